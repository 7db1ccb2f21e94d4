//! Extracts the ELF file from a compressed kernel (`bzImage`).
//!
//! The setup header states the payload's offset and length
//! (`Documentation/arch/x86/boot.rst`, protocol 2.08 and later); the payload's
//! first bytes identify the compression.

use std::io::Read;

/// Fields of the setup header, as offsets into the file.
mod at {
    pub(super) const SETUP_SECTORS: usize = 0x1f1;
    pub(super) const MAGIC: usize = 0x202;
    pub(super) const PROTOCOL: usize = 0x206;
    pub(super) const PAYLOAD_OFFSET: usize = 0x248;
    pub(super) const PAYLOAD_LENGTH: usize = 0x24c;
}

/// A kernel larger than this is a decompression bomb or not a kernel.
const MAX_SIZE: u64 = 1 << 30;

type Unpack = fn(&[u8]) -> Result<Vec<u8>, String>;

/// Magic number of a payload, the compression's name, and its decompressor.
const COMPRESSIONS: &[(&[u8], &str, Unpack)] = &[
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", zstd),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz", xz),
    (&[0x02, 0x21, 0x4c, 0x18], "lz4", lz4),
    (&[0x1f, 0x8b], "gzip", gzip),
    (b"\x7fELF", "nothing", |bytes| Ok(bytes.to_vec())),
];

/// Extracts the kernel from `image`.
pub(super) fn extract(image: &[u8]) -> Result<Vec<u8>, String> {
    let payload = locate(image)?;
    let Some((_, name, unpack)) = COMPRESSIONS.iter().find(|(magic, _, _)| payload.starts_with(magic)) else {
        return Err(format!("unknown compression, the payload begins with {:02x?}", &payload[..payload.len().min(6)]));
    };
    let kernel = unpack(payload).map_err(|error| format!("the {name} payload is corrupt: {error}"))?;
    if !kernel.starts_with(b"\x7fELF") {
        return Err(format!("the {name} payload is not an ELF file"));
    }
    Ok(kernel)
}

fn locate(image: &[u8]) -> Result<&[u8], String> {
    let word = |at: usize| -> Option<u32> { Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?)) };
    if image.get(at::MAGIC..at::MAGIC + 4) != Some(b"HdrS") {
        return Err("not a bzImage: the setup header is missing".to_owned());
    }
    let protocol = word(at::PROTOCOL).map_or(0, |word| word & 0xffff);
    if protocol < 0x208 {
        return Err(format!("boot protocol {protocol:#x} does not state the payload's offset"));
    }
    let sectors = match image[at::SETUP_SECTORS] {
        0 => 4, // The boot protocol defines 0 as 4.
        count => usize::from(count),
    };
    let (offset, length) = (word(at::PAYLOAD_OFFSET), word(at::PAYLOAD_LENGTH));
    let span = offset.zip(length).and_then(|(offset, length)| {
        let start = ((sectors + 1) * 512).checked_add(offset as usize)?;
        image.get(start..start.checked_add(length as usize)?)
    });
    span.ok_or_else(|| "the payload is outside the file".to_owned())
}

/// Reads one compressed stream to its end; ignores the size that the kernel's build
/// appends.
fn decompress(reader: impl Read) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    reader.take(MAX_SIZE).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

pub(super) fn zstd(payload: &[u8]) -> Result<Vec<u8>, String> {
    decompress(ruzstd::decoding::StreamingDecoder::new(payload).map_err(|error| error.to_string())?)
}

pub(super) fn xz(payload: &[u8]) -> Result<Vec<u8>, String> {
    decompress(lzma_rust2::XzReader::new(payload, false))
}

pub(super) fn gzip(payload: &[u8]) -> Result<Vec<u8>, String> {
    decompress(flate2::read::GzDecoder::new(payload))
}

/// Decompresses the legacy lz4 format: a magic number, then blocks of up to 8 MiB, each
/// preceded by its compressed length.
fn lz4(payload: &[u8]) -> Result<Vec<u8>, String> {
    const BLOCK: usize = 8 << 20;
    let mut rest = &payload[4..];
    let mut kernel = Vec::new();
    let mut block = vec![0; BLOCK];
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        // After the last block comes the appended size, not a length.
        if length == 0 || tail.len() < length {
            break;
        }
        let (packed, tail) = tail.split_at(length);
        let size = lz4_flex::block::decompress_into(packed, &mut block).map_err(|error| error.to_string())?;
        kernel.extend_from_slice(&block[..size]);
        rest = tail;
        // Only the last block may be shorter.
        if size < BLOCK || kernel.len() as u64 > MAX_SIZE {
            break;
        }
    }
    Ok(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    /// A bzImage with one setup sector and `payload`.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 1024];
        image[at::SETUP_SECTORS] = 1;
        image[at::MAGIC..at::MAGIC + 4].copy_from_slice(b"HdrS");
        image[at::PROTOCOL..at::PROTOCOL + 2].copy_from_slice(&0x20fu16.to_le_bytes());
        image[at::PAYLOAD_OFFSET..at::PAYLOAD_OFFSET + 4].copy_from_slice(&8u32.to_le_bytes());
        let length = u32::try_from(payload.len()).unwrap();
        image[at::PAYLOAD_LENGTH..at::PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        image.extend_from_slice(&[0xcc; 8]);
        image.extend_from_slice(payload);
        image.extend_from_slice(b"trailing bytes");
        image
    }

    fn kernel() -> Vec<u8> {
        let mut kernel = b"\x7fELF".to_vec();
        kernel.extend((0..200_000u32).flat_map(|i| (i / 7).to_le_bytes()));
        kernel
    }

    fn with_size(mut payload: Vec<u8>, kernel: &[u8]) -> Vec<u8> {
        payload.extend_from_slice(&u32::try_from(kernel.len()).unwrap().to_le_bytes());
        payload
    }

    #[test]
    fn kernel_is_extracted_from_every_compression() {
        let kernel = kernel();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&kernel).unwrap();
        assert_eq!(extract(&image(&with_size(gzip.finish().unwrap(), &kernel))).unwrap(), kernel);

        let zstd = ruzstd::encoding::compress_to_vec(&kernel[..], ruzstd::encoding::CompressionLevel::Fastest);
        assert_eq!(extract(&image(&with_size(zstd, &kernel))).unwrap(), kernel);

        let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
        let block = lz4_flex::block::compress(&kernel);
        lz4.extend_from_slice(&u32::try_from(block.len()).unwrap().to_le_bytes());
        lz4.extend_from_slice(&block);
        assert_eq!(extract(&image(&with_size(lz4, &kernel))).unwrap(), kernel);

        let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
        xz.write_all(&kernel).unwrap();
        assert_eq!(extract(&image(&with_size(xz.finish().unwrap(), &kernel))).unwrap(), kernel);

        assert_eq!(extract(&image(&kernel)).unwrap(), kernel);
    }

    #[test]
    fn non_kernel_image_is_rejected() {
        assert!(extract(b"").unwrap_err().contains("setup header"));
        assert!(extract(&image(b"plain text")).unwrap_err().contains("unknown compression"));
        let zstd = ruzstd::encoding::compress_to_vec(&b"text"[..], ruzstd::encoding::CompressionLevel::Fastest);
        assert!(extract(&image(&zstd)).unwrap_err().contains("not an ELF"));
        let mut outside = image(b"x");
        outside[at::PAYLOAD_LENGTH + 3] = 0x7f;
        assert!(extract(&outside).unwrap_err().contains("outside"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(which in 0usize..COMPRESSIONS.len(), tail in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut payload = COMPRESSIONS[which].0.to_vec();
            payload.extend(tail);
            let _ = extract(&image(&payload));
            let _ = extract(&payload);
        }
    }
}

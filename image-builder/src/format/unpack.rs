//! Decompresses images in process, without external programs.

use std::io::{self, BufRead, Read};

/// Magic number of LZ4's legacy frame format.
pub const LZ4_LEGACY: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// Maximum size of an uncompressed block of a legacy frame.
const LZ4_BLOCK: usize = 8 << 20;
/// Maximum size of a compressed block.
const LZ4_MAX_COMPRESSED: usize = LZ4_BLOCK + LZ4_BLOCK / 255 + 16;

/// Memory limit of the xz decoder; preset 9 needs 65 MiB. The Zstandard decoder has
/// a limit of 128 MiB of its own.
const MAX_MEMORY_KIB: u32 = 128 << 10;

const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const GZIP: [u8; 2] = [0x1f, 0x8b];
const XZ: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];

/// Returns a reader that decompresses `packed` according to its magic number. Data
/// without a known magic number is returned unchanged.
///
/// # Errors
/// A failed read, or a corrupt header.
pub fn decompress<'a>(mut packed: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let start = packed.fill_buf()?;
    Ok(if start.starts_with(&LZ4_LEGACY) {
        Box::new(Lz4::new(packed)?)
    } else if start.starts_with(&ZSTD) {
        Box::new(ruzstd::decoding::StreamingDecoder::new(packed).map_err(io::Error::other)?)
    } else if start.starts_with(&GZIP) {
        Box::new(flate2::bufread::GzDecoder::new(packed))
    } else if start.starts_with(&XZ) {
        Box::new(lzma_rust2::XzReader::new_mem_limit(packed, false, MAX_MEMORY_KIB))
    } else {
        Box::new(packed)
    })
}

/// Decodes LZ4's legacy frame format, as the kernel does: a magic number, then blocks
/// of up to 8 MiB, each preceded by its compressed length, until the end of the input or a
/// length of zero. A magic number instead of a length begins another frame.
pub struct Lz4<R> {
    input: R,
    packed: Vec<u8>,
    block: Vec<u8>,
    position: usize,
}

impl<R: Read> Lz4<R> {
    /// Creates a decoder of the frame at the start of `input`.
    ///
    /// # Errors
    /// A failed read, or a wrong magic number.
    pub fn new(mut input: R) -> io::Result<Self> {
        let mut magic = [0; 4];
        input.read_exact(&mut magic)?;
        if magic != LZ4_LEGACY {
            return Err(invalid_data("not an LZ4 legacy frame"));
        }
        Ok(Self { input, packed: Vec::new(), block: Vec::new(), position: 0 })
    }

    /// Decodes the next block; returns false at the end.
    fn advance(&mut self) -> io::Result<bool> {
        let length = loop {
            let mut word = Vec::with_capacity(4);
            self.input.by_ref().take(4).read_to_end(&mut word)?;
            // As in the kernel, fewer than four bytes are the end.
            let Ok(word) = <[u8; 4]>::try_from(word) else { return Ok(false) };
            if word != LZ4_LEGACY {
                break u32::from_le_bytes(word) as usize;
            }
        };
        if length == 0 {
            return Ok(false);
        }
        if length > LZ4_MAX_COMPRESSED {
            return Err(invalid_data("invalid block length"));
        }
        self.packed.clear();
        // The buffer grows with the data read: the length is untrusted.
        self.input.by_ref().take(length as u64).read_to_end(&mut self.packed)?;
        if self.packed.len() != length {
            return Err(invalid_data("truncated block"));
        }
        self.block.resize(LZ4_BLOCK, 0);
        let size = lz4_flex::block::decompress_into(&self.packed, &mut self.block)
            .map_err(|error| invalid_data(format!("corrupt block: {error}")))?;
        self.block.truncate(size);
        self.position = 0;
        Ok(true)
    }
}

impl<R: Read> Read for Lz4<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.position == self.block.len() {
            if !self.advance()? {
                self.block.clear();
                self.position = 0;
                return Ok(0);
            }
        }
        let count = bytes.len().min(self.block.len() - self.position);
        bytes[..count].copy_from_slice(&self.block[self.position..self.position + count]);
        self.position += count;
        Ok(count)
    }
}

fn invalid_data(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    fn legacy(blocks: &[&[u8]]) -> Vec<u8> {
        let mut frame = LZ4_LEGACY.to_vec();
        for block in blocks {
            let packed = lz4_flex::block::compress(block);
            frame.extend_from_slice(&u32::try_from(packed.len()).unwrap().to_le_bytes());
            frame.extend_from_slice(&packed);
        }
        frame
    }

    fn read(packed: &[u8]) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        decompress(packed)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn each_compression_is_decoded() {
        let content: Vec<u8> = (0..100_000u32).flat_map(|number| (number / 9).to_le_bytes()).collect();
        assert_eq!(read(&content).unwrap(), content);
        let zstd = ruzstd::encoding::compress_to_vec(&content[..], ruzstd::encoding::CompressionLevel::Fastest);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&content).unwrap();
        let mut xz = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(1)).unwrap();
        xz.write_all(&content).unwrap();
        let (first, second) = content.split_at(50_000);
        let frames = [legacy(&[first]), legacy(&[second])].concat();
        for packed in [zstd, gzip.finish().unwrap(), xz.finish().unwrap(), legacy(&[first, second]), frames] {
            assert_eq!(read(&packed).unwrap(), content, "{:02x?}", &packed[..4]);
            // With padding, as image files have.
            assert_eq!(read(&[&packed[..], &[0; 99]].concat()).unwrap(), content, "{:02x?}", &packed[..4]);
        }
    }

    #[test]
    fn corrupt_frame_then_error_names_the_cause() {
        let mut frame = legacy(&[b"hello hello hello hello"]);
        let length = frame.len();
        assert!(read(&frame[..length - 1]).unwrap_err().to_string().contains("truncated block"));
        frame[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read(&frame).unwrap_err().to_string().contains("invalid block length"));
    }

    proptest! {
        #[test]
        fn arbitrary_input_does_not_panic(which in 0usize..4, tail in proptest::collection::vec(any::<u8>(), 0..300)) {
            let start: &[u8] = [&LZ4_LEGACY[..], &ZSTD, &GZIP, &XZ][which];
            let _ = read(&[start, &tail].concat());
        }
    }
}

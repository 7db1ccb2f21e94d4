//! Reading what was packed, in Rust: no program decides what is seen.

use std::io::{self, BufRead, Read};

/// The first bytes of LZ4's old framing.
pub const LZ4_LEGACY: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// The most that a block of the old framing holds.
const LZ4_BLOCK: usize = 8 << 20;
/// The most that LZ4 makes of a block that cannot be packed.
const LZ4_LARGEST: usize = LZ4_BLOCK + LZ4_BLOCK / 255 + 16;

/// What unpacking xz may take; its highest usual level needs 65 MiB. Zstandard's
/// reader has 128 MiB as its own limit.
const MOST_MEMORY_KIB: u32 = 128 << 10;

const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const GZIP: [u8; 2] = [0x1f, 0x8b];
const XZ: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];

/// What `packed` holds; itself where it is not packed in a way that the
/// kernel knows.
///
/// # Errors
/// A failed read, or a damaged beginning.
pub fn unpacked<'a>(mut packed: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let start = packed.fill_buf()?;
    Ok(if start.starts_with(&LZ4_LEGACY) {
        Box::new(Lz4::new(packed)?)
    } else if start.starts_with(&ZSTD) {
        Box::new(ruzstd::decoding::StreamingDecoder::new(packed).map_err(io::Error::other)?)
    } else if start.starts_with(&GZIP) {
        Box::new(flate2::bufread::GzDecoder::new(packed))
    } else if start.starts_with(&XZ) {
        Box::new(lzma_rust2::XzReader::new_mem_limit(packed, false, MOST_MEMORY_KIB))
    } else {
        Box::new(packed)
    })
}

/// LZ4's old framing, as the kernel reads it: a magic number, then blocks of
/// up to 8 MiB, each with its packed length before it, until the end or a
/// length of zero. Another magic number may stand where a length should.
pub struct Lz4<R> {
    input: R,
    packed: Vec<u8>,
    block: Vec<u8>,
    given: usize,
}

impl<R: Read> Lz4<R> {
    /// Reads the frame that `input` begins with.
    ///
    /// # Errors
    /// A failed read, or another beginning.
    pub fn new(mut input: R) -> io::Result<Self> {
        let mut magic = [0; 4];
        input.read_exact(&mut magic)?;
        if magic != LZ4_LEGACY {
            return Err(bad("not LZ4's old framing"));
        }
        Ok(Self { input, packed: Vec::new(), block: Vec::new(), given: 0 })
    }

    /// The next block; no at the end.
    fn advance(&mut self) -> io::Result<bool> {
        let length = loop {
            let mut word = Vec::with_capacity(4);
            self.input.by_ref().take(4).read_to_end(&mut word)?;
            // The kernel, too, takes what is too short for a length as the end.
            let Ok(word) = <[u8; 4]>::try_from(word) else { return Ok(false) };
            if word != LZ4_LEGACY {
                break u32::from_le_bytes(word) as usize;
            }
        };
        if length == 0 {
            return Ok(false);
        }
        if length > LZ4_LARGEST {
            return Err(bad("a block that is longer than any"));
        }
        self.packed.clear();
        // Grows with what is there, not with what the length claims.
        self.input.by_ref().take(length as u64).read_to_end(&mut self.packed)?;
        if self.packed.len() != length {
            return Err(bad("the end of the file inside a block"));
        }
        self.block.resize(LZ4_BLOCK, 0);
        let size = lz4_flex::block::decompress_into(&self.packed, &mut self.block)
            .map_err(|error| bad(format!("a damaged block: {error}")))?;
        self.block.truncate(size);
        self.given = 0;
        Ok(true)
    }
}

impl<R: Read> Read for Lz4<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.given == self.block.len() {
            if !self.advance()? {
                self.block.clear();
                self.given = 0;
                return Ok(0);
            }
        }
        let count = bytes.len().min(self.block.len() - self.given);
        bytes[..count].copy_from_slice(&self.block[self.given..self.given + count]);
        self.given += count;
        Ok(count)
    }
}

fn bad(what: impl Into<String>) -> io::Error {
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
        unpacked(packed)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn every_packing_is_undone() {
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
            // Filled up to a page, as our images are.
            assert_eq!(read(&[&packed[..], &[0; 99]].concat()).unwrap(), content, "{:02x?}", &packed[..4]);
        }
    }

    #[test]
    fn damage_is_named() {
        let mut frame = legacy(&[b"hello hello hello hello"]);
        let length = frame.len();
        assert!(read(&frame[..length - 1]).unwrap_err().to_string().contains("inside a block"));
        frame[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read(&frame).unwrap_err().to_string().contains("longer than any"));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(which in 0usize..4, tail in proptest::collection::vec(any::<u8>(), 0..300)) {
            let start: &[u8] = [&LZ4_LEGACY[..], &ZSTD, &GZIP, &XZ][which];
            let _ = read(&[start, &tail].concat());
        }
    }
}

//! Reads ranges of files while a model runs: never through a map, in which a file cut short is a signal, and past the system's
//! cache of pages where that works, since what is read goes into a cache of its own.

use super::FileError;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What reads past the cache are aligned to.
const BLOCK: usize = 4096;

/// Something that can be read at any place.
pub trait ReadAt: Send + Sync {
    /// Reads up to `dst.len()` bytes at `at`; 0 past the end.
    fn read_at(&self, dst: &mut [u8], at: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    #[cfg(unix)]
    fn read_at(&self, dst: &mut [u8], at: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(self, dst, at)
    }

    #[cfg(windows)]
    fn read_at(&self, dst: &mut [u8], at: u64) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(self, dst, at)
    }
}

/// A range of a file that does not come whole.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file ends too early.
    #[error("`{}` ends before byte {end}, at byte {found}: it was cut short while the model runs", path.display())]
    Short {
        /// Which file.
        path: PathBuf,
        /// Last byte that is needed, and one.
        end: u64,
        /// Where it ends.
        found: u64,
    },
    /// The system refused.
    #[error("cannot read `{}` at byte {at}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Where.
        at: u64,
        /// Why.
        source: io::Error,
    },
}

/// Whether the system shall keep what is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// No: it has a place of its own.
    Past,
    /// Yes.
    Kept,
}

/// A file that stays open: deleting it changes nothing, cutting it short is an error.
pub struct Reader {
    path: PathBuf,
    through: Box<dyn ReadAt>,
    past: Option<Box<dyn ReadAt>>,
    refused: AtomicBool,
}

impl Reader {
    /// Opens a file.
    pub fn open(path: &Path, pages: Pages) -> Result<Self, FileError> {
        let through = File::open(path).map_err(super::failed("open", path))?;
        let past = if pages == Pages::Past { open_past(path) } else { None };
        Ok(Self::of(path, Box::new(through), past.map(|f| Box::new(f) as Box<dyn ReadAt>)))
    }

    /// Of something else that can be read; `past` takes blocks only.
    pub fn of(path: &Path, through: Box<dyn ReadAt>, past: Option<Box<dyn ReadAt>>) -> Self {
        Self { path: path.to_path_buf(), through, past, refused: AtomicBool::new(false) }
    }

    /// Whether reads go past the cache.
    pub fn is_past(&self) -> bool {
        self.past.is_some() && !self.refused.load(Relaxed)
    }

    /// Reads `len` bytes at `at`; `room` is kept from one read to the next.
    pub fn read<'a>(&self, at: u64, len: usize, room: &'a mut Vec<u8>) -> Result<&'a [u8], ReadError> {
        let before = (at % BLOCK as u64) as usize;
        let whole = (before + len).next_multiple_of(BLOCK);
        if room.len() < whole + BLOCK {
            room.resize(whole + BLOCK, 0);
        }
        let start = room.as_ptr().align_offset(BLOCK);
        if let Some(past) = self.past.as_ref().filter(|_| self.is_past()) {
            match self.fill(past.as_ref(), &mut room[start..start + whole], before + len, at - before as u64) {
                // Some systems open a file so and refuse to read it.
                Err(ReadError::Io { source, .. }) if source.kind() == io::ErrorKind::InvalidInput => {
                    self.refused.store(true, Relaxed)
                }
                done => return done.map(|()| &room[start + before..start + before + len]),
            }
        }
        self.fill(self.through.as_ref(), &mut room[start..start + len], len, at)?;
        Ok(&room[start..start + len])
    }

    /// Fills at least `needed` bytes.
    fn fill(&self, from: &dyn ReadAt, dst: &mut [u8], needed: usize, at: u64) -> Result<(), ReadError> {
        let mut filled = 0;
        while filled < needed {
            let here = at + filled as u64;
            match from.read_at(&mut dst[filled..], here) {
                Ok(0) => return Err(ReadError::Short { path: self.path.clone(), end: at + needed as u64, found: here }),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(ReadError::Io { path: self.path.clone(), at: here, source }),
            }
        }
        Ok(())
    }
}

#[cfg(target_os = "linux")]
fn open_past(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    File::options().read(true).custom_flags(direct).open(path).ok()
}

#[cfg(not(target_os = "linux"))]
fn open_past(_: &Path) -> Option<File> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn bytes(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    /// Reads what it is told to, a few bytes at a time.
    struct Slow(Vec<u8>, Mutex<Vec<io::ErrorKind>>);

    impl ReadAt for Slow {
        fn read_at(&self, dst: &mut [u8], at: u64) -> io::Result<usize> {
            if let Some(kind) = self.1.lock().unwrap().pop() {
                return Err(kind.into());
            }
            let from = &self.0[(at as usize).min(self.0.len())..];
            let n = from.len().min(dst.len()).min(100);
            dst[..n].copy_from_slice(&from[..n]);
            Ok(n)
        }
    }

    fn slow(faults: &[io::ErrorKind]) -> Box<dyn ReadAt> {
        Box::new(Slow(bytes(1000), Mutex::new(faults.to_vec())))
    }

    /// Exact, past the cache where this system allows it; ranges that begin, end and lie anywhere, to the last byte of a file that
    /// is no multiple of a block. Fails if what alignment puts before a range is not left out.
    #[test]
    fn ranges_come_as_they_lie() {
        let dir = tempfile::tempdir().unwrap();
        let (path, all) = (dir.path().join("f"), bytes(3 * BLOCK + 77));
        std::fs::write(&path, &all).unwrap();
        for pages in [Pages::Past, Pages::Kept] {
            let reader = Reader::open(&path, pages).unwrap();
            let mut room = Vec::new();
            for (at, len) in
                [(0, 1), (5, BLOCK), (BLOCK, BLOCK), (BLOCK - 1, BLOCK + 2), (2 * BLOCK + 1, BLOCK + 76), (0, all.len())]
            {
                assert_eq!(reader.read(at as u64, len, &mut room).unwrap(), &all[at..at + len], "{at} {len} {pages:?}");
            }
            assert!(matches!(reader.read(3 * BLOCK as u64, 78, &mut room), Err(ReadError::Short { .. })));
        }
    }

    /// A file that is deleted can still be read; one that is cut short is an error that names it, and no signal.
    #[test]
    fn a_file_may_go_but_not_shrink() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, bytes(3 * BLOCK)).unwrap();
        let reader = Reader::open(&path, Pages::Past).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2 * BLOCK as u64).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut room = Vec::new();
        assert_eq!(reader.read(10, BLOCK, &mut room).unwrap(), &bytes(3 * BLOCK)[10..10 + BLOCK]);
        let error = reader.read(BLOCK as u64, 2 * BLOCK, &mut room).unwrap_err().to_string();
        assert!(error.contains("weights") && error.contains("byte 12288") && error.contains("8192"), "{error}");
    }

    /// What comes in pieces or is interrupted is read on; what fails is said with its place.
    #[test]
    fn a_read_that_fails_is_said() {
        let mut room = Vec::new();
        let reader = Reader::of(Path::new("f"), slow(&[io::ErrorKind::Interrupted]), None);
        assert_eq!(reader.read(3, 990, &mut room).unwrap(), &bytes(1000)[3..993]);
        let reader = Reader::of(Path::new("f"), slow(&[io::ErrorKind::Other]), None);
        let error = reader.read(400, 10, &mut room).unwrap_err().to_string();
        assert!(error.contains("`f`") && error.contains("byte 400"), "{error}");
    }

    /// A file that opens for reads past the cache and then refuses them is read through it.
    #[test]
    fn refused_blocks_are_read_through_the_cache() {
        let mut room = Vec::new();
        let reader = Reader::of(Path::new("f"), slow(&[]), Some(slow(&[io::ErrorKind::InvalidInput])));
        assert!(reader.is_past());
        assert_eq!(reader.read(7, 900, &mut room).unwrap(), &bytes(1000)[7..907]);
        assert!(!reader.is_past());
    }
}

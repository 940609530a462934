//! The only code that creates, renames or removes files.
//!
//! An output appears whole or not at all: it is written beside its final place, synced, and renamed. Must not know what the
//! bytes mean.

mod output;
mod reader;

pub use output::{Existing, JOURNAL, OutputDir, WorkDir, partial_bytes};
pub use reader::{Pages, ReadAt, ReadError, Reader};

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are explained by the message they appear in")]
pub enum FileError {
    /// The system refused.
    #[error("cannot {op} `{}`", path.display())]
    Io { op: &'static str, path: PathBuf, source: io::Error },
    /// Something stands at the final place.
    #[error("output `{}` already exists", path.display())]
    Exists { path: PathBuf },
    /// What stands at the final place was not written by this tool.
    #[error("refusing to replace `{}`: expected an empty directory or one with `moe.json`, found {found}", path.display())]
    NotOurs { path: PathBuf, found: &'static str },
    /// Another run writes the same output.
    #[error("`{}` is being written by another process{}", path.display(), pid.map(|p| format!(" ({p})")).unwrap_or_default())]
    Busy { path: PathBuf, pid: Option<u32> },
    /// Writing the output could destroy the input.
    #[error("output `{}` and input `{}` lie within each other", output.display(), input.display())]
    Overlapping { input: PathBuf, output: PathBuf },
    /// The path has no last component to put a temporary name beside.
    #[error("expected a path that ends in a name, found `{}`", path.display())]
    NoName { path: PathBuf },
    /// All was written, and only the last rename failed.
    #[error("cannot move the finished output to `{}`; it is kept in `{}`", path.display(), kept.display())]
    NotMoved { path: PathBuf, kept: PathBuf, source: io::Error },
}

impl FileError {
    /// Whether the user named a wrong path, rather than an operation failing on a right one.
    pub fn is_bad_input(&self) -> bool {
        match self {
            FileError::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::NotADirectory
                    | io::ErrorKind::IsADirectory
            ),
            FileError::NotMoved { .. } => false,
            FileError::Exists { .. }
            | FileError::NotOurs { .. }
            | FileError::Busy { .. }
            | FileError::Overlapping { .. }
            | FileError::NoName { .. } => true,
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            FileError::Io { source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied => "check the permissions, or choose another place",
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space, or choose another disk",
                io::ErrorKind::ReadOnlyFilesystem => "choose a place that can be written to",
                io::ErrorKind::NotFound => "check the path",
                io::ErrorKind::AlreadyExists => "remove the file that is there, or choose another name",
                _ => return None,
            },
            FileError::Exists { .. } => "pass `--force` to replace it, or choose another output",
            FileError::NotOurs { .. } => "choose another output, or remove what is there yourself",
            FileError::Busy { .. } => "wait for the other run to end, or choose another output",
            FileError::Overlapping { .. } => "choose an output beside the input",
            FileError::NoName { .. } => "name the output itself, such as `out/model`",
            FileError::NotMoved { .. } => "move it by hand before the next run clears it",
        };
        Some(hint.to_owned())
    }
}

/// A file without a name, gone when dropped: what does not fit in memory.
pub struct Scratch(File);

/// Creates a scratch file in the system's temporary folder.
pub fn scratch() -> Result<Scratch, FileError> {
    let path = std::env::temp_dir().join(format!("moe-{}", unique()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(failed("create", &path))?;
    fs::remove_file(&path).map_err(failed("remove", &path))?;
    Ok(Scratch(file))
}

impl Scratch {
    /// Reads `len` bytes at `at`.
    pub fn read_at(&self, at: u64, len: usize) -> Result<Vec<u8>, FileError> {
        let mut bytes = vec![0; len];
        let mut file = &self.0;
        let read = file.seek(io::SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(failed("read", Path::new("scratch file")))?;
        Ok(bytes)
    }

    /// The same file for readers.
    pub fn reader(&self) -> Result<Reader, FileError> {
        let path = Path::new("scratch file");
        let file = self.0.try_clone().map_err(failed("open", path))?;
        Ok(Reader::of(path, Box::new(file), None))
    }

    /// Writes bytes at `at`.
    pub fn write_at(&mut self, at: u64, bytes: &[u8]) -> Result<(), FileError> {
        let written = self.0.seek(io::SeekFrom::Start(at)).and_then(|_| self.0.write_all(bytes));
        written.map_err(failed("write", Path::new("scratch file")))
    }
}

/// Writes a file that appears whole or not at all, replacing one that is there.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    write_whole(path, |file| file.write_all(bytes).map_err(failed("write", path)))
}

/// Writes a file piece by piece that appears whole or not at all, replacing one that is there.
pub fn write_whole<E: From<FileError>>(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>) -> Result<(), E> {
    let partial = sibling(path, &format!(".partial.{}", unique()))?;
    let write = || -> Result<(), E> {
        let mut file = BufWriter::new(File::create_new(&partial).map_err(failed("create", &partial))?);
        fill(&mut file)?;
        file.flush().map_err(failed("write", &partial))?;
        file.get_ref().sync_all().map_err(failed("sync", &partial))?;
        fs::rename(&partial, path).map_err(failed("replace", path))?;
        Ok(())
    };
    let written = write();
    match written {
        Ok(()) => Ok(sync_parent(path)?),
        Err(_) => {
            fs::remove_file(&partial).ok();
            written
        }
    }
}

/// Copies the content of a file to a place where there is none yet; returns its size. Permissions are not copied, so that
/// what was made from a read-only input can be removed again.
pub fn copy(from: &Path, to: &Path) -> Result<u64, FileError> {
    let mut source = File::open(from).map_err(failed("open", from))?;
    let mut target = File::create_new(to).map_err(failed("create", to))?;
    io::copy(&mut source, &mut target).map_err(failed("write", to))
}

/// A file of lines, each of which is on disk before the call that wrote it returns.
#[derive(Debug)]
pub struct LineLog {
    path: PathBuf,
    file: File,
}

impl LineLog {
    /// Starts an empty log; an old one is emptied.
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let log = Self { path: path.to_owned(), file: create(path)? };
        sync_parent(path)?;
        Ok(log)
    }

    /// Opens a log with its lines, `None` if there is none. What follows the last line end was being written when the power
    /// went, and is cut off.
    pub fn open(path: &Path) -> Result<Option<(Self, Vec<String>)>, FileError> {
        let mut file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed("open", path)(e)),
        };
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed("read", path))?;
        let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
        let cut = file.set_len(whole as u64).and_then(|()| file.seek(io::SeekFrom::End(0)));
        cut.map_err(failed("write", path))?;
        let lines = String::from_utf8_lossy(&bytes[..whole]).lines().map(str::to_owned).collect();
        Ok(Some((Self { path: path.to_owned(), file }, lines)))
    }

    /// Adds a line.
    pub fn append(&mut self, line: &str) -> Result<(), FileError> {
        let written = self.file.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(failed("write", &self.path))
    }
}

/// Size of a file, and when it was last written in nanoseconds since 1970, where the system says.
pub fn stamp(path: &Path) -> Result<(u64, Option<u64>), FileError> {
    let meta = fs::metadata(path).map_err(failed("inspect", path))?;
    let since = meta.modified().ok().and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
    Ok((meta.len(), since.map(|d| d.as_nanos() as u64)))
}

/// Creates a file, or empties the one that is there.
pub fn create(path: &Path) -> Result<File, FileError> {
    File::create(path).map_err(failed("create", path))
}

/// The whole content of a file.
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(failed("read", path))
}

/// Opens a file to read it piece by piece.
pub fn open(path: &Path) -> Result<File, FileError> {
    File::open(path).map_err(failed("open", path))
}

/// Bytes that an ordinary user may still write where `dir` is, or where it will be created; `None` if the system cannot say.
pub fn available_bytes(dir: &Path) -> Option<u64> {
    let dir = std::path::absolute(dir).ok()?;
    let existing = dir.ancestors().find(|path| path.exists())?;
    #[cfg(unix)]
    {
        let stat = rustix::fs::statvfs(existing).ok()?;
        stat.f_bavail.checked_mul(stat.f_frsize)
    }
    #[cfg(not(unix))]
    {
        let _ = existing;
        None
    }
}

/// Fails if the output would lie inside the input, or the input inside the output; links are followed.
pub fn check_disjoint(input: &Path, output: &Path) -> Result<(), FileError> {
    let (a, b) = (real_path(input)?, real_path(output)?);
    if a.starts_with(&b) || b.starts_with(&a) {
        return Err(FileError::Overlapping { input: input.to_owned(), output: output.to_owned() });
    }
    Ok(())
}

/// The path with its existing part resolved and `..` taken out of the rest.
fn real_path(path: &Path) -> Result<PathBuf, FileError> {
    let absolute = std::path::absolute(path).map_err(failed("resolve", path))?;
    for ancestor in absolute.ancestors() {
        let Ok(mut real) = ancestor.canonicalize() else { continue };
        let rest = absolute.strip_prefix(ancestor).unwrap_or(Path::new(""));
        for part in rest.components() {
            match part {
                Component::ParentDir => drop(real.pop()),
                part => real.push(part),
            }
        }
        return Ok(real);
    }
    Ok(absolute)
}

fn sync_tree(dir: &Path) -> Result<(), FileError> {
    for entry in fs::read_dir(dir).map_err(failed("list", dir))? {
        let entry = entry.map_err(failed("list", dir))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(failed("inspect", &path))?;
        if kind.is_dir() {
            sync_tree(&path)?;
        } else if kind.is_file() {
            File::open(&path).and_then(|file| file.sync_all()).map_err(failed("sync", &path))?;
        }
    }
    sync_dir(dir)
}

/// Makes names in a directory durable; only a Unix lets a directory be opened for that.
fn sync_dir(dir: &Path) -> Result<(), FileError> {
    if cfg!(unix) { File::open(dir).and_then(|file| file.sync_all()).map_err(failed("sync", dir)) } else { Ok(()) }
}

fn sync_parent(path: &Path) -> Result<(), FileError> {
    match path.parent() {
        Some(parent) if parent != Path::new("") => sync_dir(parent),
        _ => sync_dir(Path::new(".")),
    }
}

/// `.<name><suffix>` beside `path`.
fn sibling(path: &Path, suffix: &str) -> Result<PathBuf, FileError> {
    let name = path.file_name().ok_or_else(|| FileError::NoName { path: path.to_owned() })?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(suffix);
    Ok(path.with_file_name(hidden))
}

/// Differs between processes and between calls.
fn unique() -> String {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    format!("{}.{}", std::process::id(), CALLS.fetch_add(1, Ordering::Relaxed))
}

fn failed(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    let path = path.to_owned();
    move |source| FileError::Io { op, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What lies in a directory, in order.
    pub(super) fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Trips when the write goes to the file itself (a reader's map would change), or leaves its partial file.
    #[test]
    fn an_atomic_write_replaces_without_touching_the_old_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        write_atomic(&path, b"old").unwrap();
        let mut before = File::open(&path).unwrap();
        write_atomic(&path, b"new").unwrap();
        let mut old = String::new();
        before.read_to_string(&mut old).unwrap();
        assert_eq!((old.as_str(), read(&path).unwrap().as_slice()), ("old", &b"new"[..]));
        assert_eq!(names(dir.path()), ["x"]);
        let error = write_atomic(&dir.path().join("no/x"), b"").unwrap_err();
        assert!(error.to_string().contains("no/") && error.hint().is_some(), "{error}");
    }

    /// Trips when a torn last line is kept, or when the next line is written over an old one.
    #[test]
    fn a_torn_line_of_a_log_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert!(LineLog::open(&path).unwrap().is_none());
        LineLog::create(&path).unwrap().append("one").unwrap();
        fs::write(&path, "one\ntw").unwrap();
        let (mut log, lines) = LineLog::open(&path).unwrap().unwrap();
        log.append("three").unwrap();
        assert_eq!((lines, read(&path).unwrap()), (vec!["one".to_owned()], b"one\nthree\n".to_vec()));
    }

    /// Trips when `copy` overwrites: a file copied onto itself would be emptied.
    #[test]
    fn a_copy_never_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        let (x, y) = (dir.path().join("x"), dir.path().join("y"));
        fs::write(&x, "123").unwrap();
        assert_eq!(copy(&x, &y).unwrap(), 3);
        assert!(copy(&x, &x).is_err());
        assert_eq!(read(&x).unwrap(), b"123");
        assert_eq!(read(&y).unwrap(), b"123");
    }

    /// Trips when either direction is left out, when names are compared as text, or when `..` is not resolved.
    #[test]
    fn outputs_lie_outside_inputs() {
        let dir = tempfile::tempdir().unwrap();
        let input = dir.path().join("in");
        fs::create_dir(&input).unwrap();
        for inside in ["in", "in/out", "in/a/b", ".", "in2/../in/out", "in/../in"] {
            let error = check_disjoint(&input, &dir.path().join(inside)).unwrap_err();
            assert!(matches!(error, FileError::Overlapping { .. }), "{inside}");
        }
        for beside in ["in2", "out/in", "in/../out"] {
            check_disjoint(&input, &dir.path().join(beside)).unwrap();
        }
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&input, dir.path().join("link")).unwrap();
            check_disjoint(&input, &dir.path().join("link/out")).unwrap_err();
        }
    }

    #[test]
    fn free_space_is_known_before_the_directory_is() {
        let dir = tempfile::tempdir().unwrap();
        assert!(available_bytes(&dir.path().join("not/yet")).is_none_or(|bytes| bytes > 0));
        assert_eq!(available_bytes(dir.path()).is_some(), cfg!(unix));
    }
}

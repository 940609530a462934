//! The only code that creates, renames or removes files.
//!
//! An output appears whole or not at all: it is written beside its final place, synced, and renamed. Must not know what the
//! bytes mean.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Held inside a directory while it is being written.
const LOCK: &str = ".lock";
/// What marks a directory as an artifact of this tool, hence as one that may be replaced.
const MANIFEST: &str = "moe.json";

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

/// What to do with a directory that already stands at the final place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Leave it, and fail.
    Refuse,
    /// Replace it if it is empty or holds `moe.json`; anything else is refused all the same.
    Replace,
}

/// A directory being written, as `.<name>.partial` beside its final place.
///
/// A lock file inside holds the writer's pid, and the lock on it ends with the process: what a crashed run left behind is
/// cleared by the next one. Dropping an `OutputDir` that was not committed removes everything.
#[derive(Debug)]
pub struct OutputDir {
    partial: PathBuf,
    target: PathBuf,
    existing: Existing,
    keep: bool,
    _lock: File,
}

impl OutputDir {
    /// Starts writing a directory that will end up at `final_path`; missing parents are created.
    pub fn create(final_path: &Path, existing: Existing) -> Result<OutputDir, FileError> {
        let target = std::path::absolute(final_path).map_err(failed("resolve", final_path))?;
        let partial = sibling(&target, ".partial")?;
        check_replaceable(&target, existing)?;
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(failed("create", parent))?;
        }
        let lock = lock_dir(&partial, &target)?;
        let out = OutputDir { partial, target, existing, keep: false, _lock: lock };
        clear(&out.partial)?;
        Ok(out)
    }

    /// Where to create files until [`OutputDir::commit`].
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Leaves the unfinished directory in place when this is dropped, for whoever wants to look into it.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Syncs every file, then gives the directory its final name. Where only the move fails, the output is kept.
    pub fn commit(mut self) -> Result<(), FileError> {
        sync_tree(&self.partial)?;
        self.keep = true;
        check_replaceable(&self.target, self.existing)?;
        let moved = |source| FileError::NotMoved { path: self.target.clone(), kept: self.partial.clone(), source };
        let old = if self.target.exists() {
            let old = sibling(&self.target, &format!(".old.{}", unique()))?;
            fs::rename(&self.target, &old).map_err(moved)?;
            Some(old)
        } else {
            None
        };
        if let Err(source) = fs::rename(&self.partial, &self.target) {
            if let Some(old) = &old {
                fs::rename(old, &self.target).ok();
            }
            return Err(moved(source));
        }
        // The lock travels with the directory, so that nobody can take the partial name over before it is free.
        let lock = self.target.join(LOCK);
        fs::remove_file(&lock).map_err(failed("remove", &lock))?;
        sync_dir(&self.target)?;
        sync_parent(&self.target)?;
        match old {
            Some(old) => fs::remove_dir_all(&old).map_err(failed("remove", &old)),
            None => Ok(()),
        }
    }
}

/// Removes everything inside a directory but its lock.
fn clear(dir: &Path) -> Result<(), FileError> {
    for entry in fs::read_dir(dir).map_err(failed("list", dir))? {
        let entry = entry.map_err(failed("list", dir))?;
        let path = entry.path();
        if entry.file_name() == LOCK {
            continue;
        }
        let is_dir = entry.file_type().map_err(failed("inspect", &path))?.is_dir();
        let removed = if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(failed("remove", &path))?;
    }
    Ok(())
}

impl Drop for OutputDir {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        // Renamed first: another run may claim the partial name as soon as the lock inside is gone.
        if let Ok(doomed) = sibling(&self.target, &format!(".discarded.{}", unique()))
            && fs::rename(&self.partial, &doomed).is_ok()
        {
            fs::remove_dir_all(&doomed).ok();
        }
    }
}

/// A directory beside an output, for what a run has finished and a later one may go on from. It outlives the run unless
/// [`WorkDir::remove`]d; a lock keeps a second run out.
#[derive(Debug)]
pub struct WorkDir {
    path: PathBuf,
    _lock: File,
}

impl WorkDir {
    /// Opens `.<name>.work` beside `target`, or makes it.
    pub fn open(target: &Path) -> Result<WorkDir, FileError> {
        let target = std::path::absolute(target).map_err(failed("resolve", target))?;
        let path = sibling(&target, ".work")?;
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(failed("create", parent))?;
        }
        let lock = lock_dir(&path, &target)?;
        Ok(WorkDir { path, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A folder inside, made if need be.
    pub fn folder(&self, name: &str) -> Result<PathBuf, FileError> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).map_err(failed("create", &path))?;
        Ok(path)
    }

    /// Removes everything inside.
    pub fn clear(&self) -> Result<(), FileError> {
        clear(&self.path)
    }

    /// Removes it.
    pub fn remove(self) -> Result<(), FileError> {
        fs::remove_dir_all(&self.path).map_err(failed("remove", &self.path))
    }
}

/// Makes `partial` if need be and locks it for this process.
fn lock_dir(partial: &Path, target: &Path) -> Result<File, FileError> {
    loop {
        match fs::create_dir(partial) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed("create", partial)(e)),
            _ => (),
        }
        let path = partial.join(LOCK);
        let mut file = match OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(failed("lock", &path)(e)),
        };
        match file.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                file.read_to_string(&mut pid).ok();
                return Err(FileError::Busy { path: target.to_owned(), pid: pid.trim().parse().ok() });
            }
            // File systems without locks: two writers at once is then the user's to avoid.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => (),
            Err(TryLockError::Error(e)) => return Err(failed("lock", &path)(e)),
        }
        // The last holder may have moved the directory away between our open and our lock.
        if same_file(&file, &path) {
            file.set_len(0).map_err(failed("write", &path))?;
            writeln!(file, "{}", std::process::id()).map_err(failed("write", &path))?;
            return Ok(file);
        }
    }
}

#[cfg(unix)]
fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

#[cfg(not(unix))]
fn same_file(_: &File, path: &Path) -> bool {
    path.exists()
}

fn check_replaceable(target: &Path, existing: Existing) -> Result<(), FileError> {
    let meta = match fs::symlink_metadata(target) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("inspect", target)(e)),
    };
    let not_ours = |found| Err(FileError::NotOurs { path: target.to_owned(), found });
    match existing {
        Existing::Refuse => Err(FileError::Exists { path: target.to_owned() }),
        Existing::Replace if meta.is_symlink() => not_ours("a symbolic link"),
        Existing::Replace if !meta.is_dir() => not_ours("a file"),
        Existing::Replace if target.join(MANIFEST).is_file() => Ok(()),
        Existing::Replace => match fs::read_dir(target).map_err(failed("list", target))?.next() {
            None => Ok(()),
            Some(_) => not_ours("files of another origin"),
        },
    }
}

/// A file without a name, gone when dropped: hidden states that do not fit in memory.
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

    /// Writes bytes at `at`.
    pub fn write_at(&mut self, at: u64, bytes: &[u8]) -> Result<(), FileError> {
        let written = self.0.seek(io::SeekFrom::Start(at)).and_then(|_| self.0.write_all(bytes));
        written.map_err(failed("write", Path::new("scratch file")))
    }
}

/// Writes a file that appears whole or not at all, replacing one that is there.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let partial = sibling(path, &format!(".partial.{}", unique()))?;
    let write = || -> Result<(), FileError> {
        let mut file = File::create_new(&partial).map_err(failed("create", &partial))?;
        file.write_all(bytes).map_err(failed("write", &partial))?;
        file.sync_all().map_err(failed("sync", &partial))?;
        fs::rename(&partial, path).map_err(failed("replace", path))
    };
    let written = write();
    match written {
        Ok(()) => sync_parent(path),
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

/// Creates a file, or empties the one that is there.
pub fn create(path: &Path) -> Result<File, FileError> {
    File::create(path).map_err(failed("create", path))
}

/// The whole content of a file.
pub fn read(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(failed("read", path))
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

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Trips when commit renames before the files are there, or leaves its lock or its partial directory behind.
    #[test]
    fn a_committed_directory_appears_whole_and_alone() {
        let dir = tempfile::tempdir().unwrap();
        let out = OutputDir::create(&dir.path().join("new parent/ä b"), Existing::Refuse).unwrap();
        fs::create_dir(out.path().join("sub")).unwrap();
        fs::write(out.path().join("sub/x"), "1").unwrap();
        assert_eq!(names(&dir.path().join("new parent")), [".ä b.partial"]);
        out.commit().unwrap();
        assert_eq!(names(&dir.path().join("new parent")), ["ä b"]);
        assert_eq!(names(&dir.path().join("new parent/ä b")), ["sub"]);
    }

    /// Trips when Drop does nothing, or ignores `keep`.
    #[test]
    fn an_abandoned_directory_vanishes_unless_kept() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        drop(OutputDir::create(&target, Existing::Refuse).unwrap());
        assert!(names(dir.path()).is_empty());
        let mut out = OutputDir::create(&target, Existing::Refuse).unwrap();
        out.keep();
        fs::write(out.path().join("x"), "1").unwrap();
        drop(out);
        assert_eq!(names(&dir.path().join(".out.partial")), [".lock", "x"]);
        let out = OutputDir::create(&target, Existing::Refuse).unwrap();
        assert_eq!(names(out.path()), [".lock"], "leftovers of an earlier run must not enter the output");
    }

    /// Trips when the lock is not taken, or is not tied to its holder.
    #[test]
    fn two_writers_exclude_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let first = OutputDir::create(&target, Existing::Refuse).unwrap();
        let error = OutputDir::create(&target, Existing::Refuse).unwrap_err();
        let me = std::process::id();
        assert!(matches!(error, FileError::Busy { pid: Some(pid), .. } if pid == me), "{error}");
        drop(first);
        OutputDir::create(&target, Existing::Refuse).unwrap().commit().unwrap();
    }

    /// Trips when `Replace` skips the look into the directory, at creation or again at commit.
    #[test]
    fn only_our_own_directories_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        fs::create_dir(&target).unwrap();
        assert!(matches!(OutputDir::create(&target, Existing::Refuse), Err(FileError::Exists { .. })));
        let late = OutputDir::create(&target, Existing::Replace).unwrap();
        fs::write(target.join("thesis.tex"), "1").unwrap();
        assert!(matches!(late.commit(), Err(FileError::NotOurs { .. })));
        assert!(matches!(OutputDir::create(&target, Existing::Replace), Err(FileError::NotOurs { .. })));
        fs::write(target.join(MANIFEST), "{}").unwrap();
        let out = OutputDir::create(&target, Existing::Replace).unwrap();
        fs::write(out.path().join("y"), "2").unwrap();
        assert_eq!(names(&target), [MANIFEST, "thesis.tex"]);
        out.commit().unwrap();
        assert_eq!(names(&target), ["y"]);
        assert_eq!(names(dir.path()), ["out"]);
        let file = dir.path().join("file");
        fs::write(&file, "1").unwrap();
        assert!(matches!(OutputDir::create(&file, Existing::Replace), Err(FileError::NotOurs { .. })));
        assert!(matches!(OutputDir::create(Path::new("/"), Existing::Refuse), Err(FileError::NoName { .. })));
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

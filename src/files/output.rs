//! A directory that appears whole or not at all, and one writer at a time.

use super::{FileError, failed, sibling, sync_dir, sync_parent, sync_tree, unique};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Held inside a directory while it is being written.
const LOCK: &str = ".lock";
/// What an unfinished run has done, for the run that continues it; inside its directory until that has its final name.
pub const JOURNAL: &str = ".journal";
/// What marks a directory as an artifact of this tool, hence as one that may be replaced.
const MANIFEST: &str = "moe.json";

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
/// A lock file inside holds the writer's pid, and the lock on it ends with the process, so that the next run may take over what a
/// crashed one left behind. A directory that holds a [`JOURNAL`] can be continued. Dropping an `OutputDir` that was neither
/// committed nor kept removes everything.
#[derive(Debug)]
pub struct OutputDir {
    partial: PathBuf,
    target: PathBuf,
    existing: Existing,
    keep: bool,
    _lock: File,
}

impl OutputDir {
    /// Starts writing a directory that will end up at `final_path`; missing parents are created, leftovers cleared.
    pub fn create(final_path: &Path, existing: Existing) -> Result<OutputDir, FileError> {
        let mut out = Self::claim(final_path, existing)?;
        out.keep = false;
        out.clear(&[])?;
        Ok(out)
    }

    /// The same with whatever an unfinished run has left; it is kept on drop if it can be continued.
    pub fn claim(final_path: &Path, existing: Existing) -> Result<OutputDir, FileError> {
        let target = std::path::absolute(final_path).map_err(failed("resolve", final_path))?;
        let partial = sibling(&target, ".partial")?;
        check_replaceable(&target, existing)?;
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(failed("create", parent))?;
        }
        let lock = lock_dir(&partial, &target)?;
        let keep = partial.join(JOURNAL).exists();
        Ok(OutputDir { partial, target, existing, keep, _lock: lock })
    }

    /// Where to create files until [`OutputDir::commit`].
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Leaves the unfinished directory in place when this is dropped, for whoever wants to continue it.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// Removes everything.
    pub fn discard(mut self) {
        self.keep = false;
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
        // The lock travels with the directory, so that nobody can take the partial name over before it is free; so does the
        // journal, so that until then the directory can be continued.
        for name in [JOURNAL, LOCK] {
            let path = self.target.join(name);
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed("remove", &path)(e)),
                _ => (),
            }
        }
        sync_dir(&self.target)?;
        sync_parent(&self.target)?;
        match old {
            Some(old) => fs::remove_dir_all(&old).map_err(failed("remove", &old)),
            None => Ok(()),
        }
    }

    /// Removes what an unfinished run left, except the files named.
    pub fn clear(&self, except: &[&str]) -> Result<(), FileError> {
        clear(&self.partial, except)
    }
}

/// Removes everything inside a directory but its lock and the files named.
fn clear(dir: &Path, except: &[&str]) -> Result<(), FileError> {
    for entry in fs::read_dir(dir).map_err(failed("list", dir))? {
        let entry = entry.map_err(failed("list", dir))?;
        let path = entry.path();
        if entry.file_name() == LOCK || except.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        let is_dir = entry.file_type().map_err(failed("inspect", &path))?.is_dir();
        let removed = if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(failed("remove", &path))?;
    }
    Ok(())
}

/// A directory beside an output, `.<name>.work`, for what a run has chosen before it writes, so that a later run can go on from
/// it. It outlives the run unless it is [`WorkDir::remove`]d; a lock keeps a second run out.
#[derive(Debug)]
pub struct WorkDir {
    path: PathBuf,
    _lock: File,
}

impl WorkDir {
    /// Opens the directory, or makes it.
    pub fn open(output: &Path) -> Result<WorkDir, FileError> {
        let target = std::path::absolute(output).map_err(failed("resolve", output))?;
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
        clear(&self.path, &[])
    }

    /// Removes it.
    pub fn remove(self) -> Result<(), FileError> {
        fs::remove_dir_all(&self.path).map_err(failed("remove", &self.path))
    }
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

/// Bytes that an unfinished run of `final_path` holds.
pub fn partial_bytes(final_path: &Path) -> u64 {
    let partial = std::path::absolute(final_path).ok().and_then(|target| sibling(&target, ".partial").ok());
    let entries = partial.and_then(|dir| fs::read_dir(dir).ok()).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).filter(|meta| meta.is_file()).map(|meta| meta.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::names;

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

    /// Trips when a directory with a journal is cleared before anyone could continue it, or when the journal enters the output.
    #[test]
    fn what_can_be_continued_is_kept_until_it_is_committed() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let mut out = OutputDir::create(&target, Existing::Refuse).unwrap();
        for name in [JOURNAL, "done", "half"] {
            fs::write(out.path().join(name), "1").unwrap();
        }
        out.keep();
        drop(out);
        drop(OutputDir::claim(&target, Existing::Refuse).unwrap());
        assert_eq!(partial_bytes(&target), 3 + format!("{}\n", std::process::id()).len() as u64);
        let out = OutputDir::claim(&target, Existing::Refuse).unwrap();
        out.clear(&[JOURNAL, "done"]).unwrap();
        assert_eq!(names(out.path()), [JOURNAL, LOCK, "done"]);
        out.commit().unwrap();
        assert_eq!((names(&target), names(dir.path())), (vec!["done".to_owned()], vec!["out".to_owned()]));
        OutputDir::create(&dir.path().join("other"), Existing::Refuse).unwrap().discard();
        assert_eq!(names(dir.path()), ["out"]);
    }
}

//! Checksums of files and bytes.

use super::manifest::FileSum;
use crate::files::FileError;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Checksums of files in the order given, several at once, each told to `done` as it comes. Ends early, with what there is, when
/// `stopped` says so.
pub fn hash_files<E: From<FileError> + Send>(
    paths: &[&Path],
    stopped: &(dyn Fn() -> bool + Sync),
    done: &(dyn Fn(&FileSum) -> Result<(), E> + Sync),
) -> Result<Vec<FileSum>, E> {
    let workers = (rayon::current_num_threads() / 4).clamp(1, 4).min(paths.len().max(1));
    let next = AtomicUsize::new(0);
    let mut sums: Vec<(usize, FileSum)> = std::thread::scope(|scope| {
        let worker = || {
            let mut sums = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(path) = paths.get(i) else { return Ok::<_, E>(sums) };
                let Some(sum) = hash_file(path, stopped)? else { return Ok(sums) };
                done(&sum)?;
                sums.push((i, sum));
            }
        };
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        let joined = handles.into_iter().map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect::<Result<Vec<_>, _>>()
    })?
    .into_iter()
    .flatten()
    .collect();
    sums.sort_by_key(|(i, _)| *i);
    Ok(sums.into_iter().map(|(_, sum)| sum).collect())
}

fn hash_file(path: &Path, stopped: &(dyn Fn() -> bool + Sync)) -> Result<Option<FileSum>, FileError> {
    let failed = |op| move |source| FileError::Io { op, path: path.to_path_buf(), source };
    let mut file = File::open(path).map_err(failed("open"))?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
    while !stopped() {
        let n = file.read(&mut buffer).map_err(failed("read"))?;
        if n == 0 {
            let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            return Ok(Some(FileSum { name, bytes, sha256: hex(hash.finalize()) }));
        }
        bytes += n as u64;
        hash.update(&buffer[..n]);
    }
    Ok(None)
}

/// Bytes of a digest in lower-case hexadecimal.
pub fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

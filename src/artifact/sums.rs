//! Checksums of files and bytes.

use super::manifest::FileSum;
use crate::files::FileError;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Checksums of files, several at once; `next` is the number of the next file to take.
pub fn hash_files(paths: &[&Path], next: &AtomicUsize) -> Result<Vec<FileSum>, FileError> {
    let workers = (rayon::current_num_threads() / 4).clamp(1, 4).min(paths.len().max(1));
    let mut sums: Vec<(usize, FileSum)> = std::thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(path) = paths.get(i) else { return Ok::<_, FileError>(done) };
                done.push((i, hash_file(path)?));
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

fn hash_file(path: &Path) -> Result<FileSum, FileError> {
    let failed = |op| move |source| FileError::Io { op, path: path.to_path_buf(), source };
    let mut file = File::open(path).map_err(failed("open"))?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut buffer).map_err(failed("read"))?;
        if n == 0 {
            break;
        }
        bytes += n as u64;
        hash.update(&buffer[..n]);
    }
    let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    Ok(FileSum { name, bytes, sha256: hex(hash.finalize()) })
}

/// Bytes of a digest in lower-case hexadecimal.
pub fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

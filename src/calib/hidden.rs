//! Hidden states of all windows between two layers, and the passes in which windows are run. The only thing that grows with the
//! length of a text; past a limit it lies in a scratch file.

use super::windows::Window;
use crate::files::{self, FileError, Scratch};
use std::ops::Range;

/// Rows of hidden states in one pass.
pub const BATCH_TOK: usize = 2048;

/// Hidden states of all windows, `[rows, D]`, in memory or in a scratch file.
pub enum Hidden {
    /// Values.
    Memory(Vec<f32>),
    /// Their bytes.
    File(Scratch),
}

impl Hidden {
    /// Zeros.
    pub fn new(len: usize, in_memory: bool) -> Result<Self, FileError> {
        Ok(if in_memory { Hidden::Memory(vec![0.0; len]) } else { Hidden::File(files::scratch()?) })
    }

    /// Elements `at`.
    pub fn read(&self, at: Range<usize>) -> Result<Vec<f32>, FileError> {
        match self {
            Hidden::Memory(v) => Ok(v[at].to_vec()),
            Hidden::File(f) => {
                let bytes = f.read_at(4 * at.start as u64, 4 * at.len())?;
                Ok(bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
            }
        }
    }

    /// Replaces the elements from `at` on.
    pub fn write(&mut self, at: usize, values: &[f32]) -> Result<(), FileError> {
        match self {
            Hidden::Memory(v) => v[at..at + values.len()].copy_from_slice(values),
            Hidden::File(f) => f.write_at(4 * at as u64, &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())?,
        }
        Ok(())
    }
}

/// Groups of consecutive windows of about 2048 rows, with their first row.
pub fn groups(windows: &[Window]) -> Vec<(usize, &[Window])> {
    groups_of(windows, BATCH_TOK)
}

/// Groups of consecutive windows of about `most` rows, with their first row.
pub fn groups_of(windows: &[Window], most: usize) -> Vec<(usize, &[Window])> {
    let mut groups = Vec::new();
    let (mut start, mut first_row, mut rows) = (0, 0, 0);
    for (i, w) in windows.iter().enumerate() {
        if rows > 0 && rows + w.tokens.len() > most {
            groups.push((first_row, &windows[start..i]));
            (start, first_row, rows) = (i, first_row + rows, 0);
        }
        rows += w.tokens.len();
    }
    if start < windows.len() {
        groups.push((first_row, &windows[start..]));
    }
    groups
}

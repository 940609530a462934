//! Experts that lie on the disk: where the bytes of each are, threads that read them, and rooms in page-locked memory that are
//! filled ahead of need. No device is asked.
//!
//! Files stay open and are read, not mapped: a file that is deleted can still be read, and one that is cut short is an error.

use crate::files::{ReadError, Reader};
use rayon::prelude::*;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

/// Reads under way at a time: what an NVMe disk wants to be asked for.
const THREADS: usize = 16;
/// Bytes between two pieces up to which they are one read.
const GAP_BYTES: u64 = 64 << 10;

/// A piece of an expert's run in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index of the file.
    pub file: usize,
    /// Where it begins there, and its length.
    pub at: u64,
    pub len: usize,
    /// Where it belongs in the run.
    pub to: usize,
}

/// One read and the pieces that come with it.
#[derive(Debug, PartialEq, Eq)]
struct Span {
    file: usize,
    at: u64,
    len: usize,
    pieces: Vec<Piece>,
}

/// As few reads as bring all pieces without much between them.
fn spans(mut pieces: Vec<Piece>) -> Vec<Span> {
    pieces.sort_unstable_by_key(|p| (p.file, p.at));
    let mut spans: Vec<Span> = Vec::new();
    for piece in pieces {
        let end = piece.at + piece.len as u64;
        match spans.last_mut().filter(|s| s.file == piece.file && piece.at <= s.at + s.len as u64 + GAP_BYTES) {
            Some(span) => {
                span.len = span.len.max((end - span.at) as usize);
                span.pieces.push(piece);
            }
            None => spans.push(Span { file: piece.file, at: piece.at, len: piece.len, pieces: vec![piece] }),
        }
    }
    spans
}

/// All experts of a model in its files.
pub(super) struct Cold {
    files: Vec<Reader>,
    /// Of each run.
    runs: Vec<Vec<Span>>,
    pool: rayon::ThreadPool,
}

thread_local! {
    static ROOM: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Cold {
    /// Of files and the pieces of each run.
    pub fn new(files: Vec<Reader>, runs: Vec<Vec<Piece>>) -> Result<Self, std::io::Error> {
        let named = rayon::ThreadPoolBuilder::new().thread_name(|i| format!("experts-{i}"));
        let pool = named.num_threads(THREADS).build().map_err(std::io::Error::other)?;
        Ok(Self { files, runs: runs.into_iter().map(spans).collect(), pool })
    }

    fn read(&self, run: usize, dst: &mut [u8]) -> Result<(), ReadError> {
        ROOM.with_borrow_mut(|room| {
            for span in &self.runs[run] {
                let bytes = self.files[span.file].read(span.at, span.len, room)?;
                for p in &span.pieces {
                    let from = (p.at - span.at) as usize;
                    dst[p.to..p.to + p.len].copy_from_slice(&bytes[from..from + p.len]);
                }
            }
            Ok(())
        })
    }

    /// Reads runs side by side and waits for them.
    pub fn read_all(&self, jobs: Vec<(usize, &mut [u8])>) -> Result<(), ReadError> {
        // All are waited for, so that no room is filled later on.
        let done: Vec<Result<(), ReadError>> =
            self.pool.install(|| jobs.into_par_iter().map(|(run, dst)| self.read(run, dst)).collect());
        done.into_iter().collect()
    }
}

/// Memory that a run is read into.
pub(super) trait Room: Send + 'static {
    /// Its bytes.
    fn bytes(&mut self) -> &mut [u8];

    /// Whether what was in it is no longer needed.
    fn is_free(&self) -> bool;

    /// Waits until it is.
    fn wait(&self);
}

/// A room, and whether its run came.
type Filled<R> = (R, Result<(), ReadError>);

/// Rooms that are filled with the runs that will be asked for, in the order in which they will be.
pub(super) struct Ahead<R> {
    cold: Arc<Cold>,
    idle: VecDeque<R>,
    flying: VecDeque<(usize, Receiver<Filled<R>>)>,
    queue: VecDeque<usize>,
}

impl<R: Room> Ahead<R> {
    /// With at least one room, each as large as the largest run.
    pub fn new(cold: &Arc<Cold>, rooms: Vec<R>) -> Self {
        assert!(!rooms.is_empty());
        Self { cold: Arc::clone(cold), idle: rooms.into(), flying: VecDeque::new(), queue: VecDeque::new() }
    }

    /// Has these runs read in this order; what is under way and fits is kept.
    pub fn plan(&mut self, runs: &[usize]) {
        let begun = self.flying.len();
        if runs.len() < begun || !self.flying.iter().map(|f| f.0).eq(runs[..begun].iter().copied()) {
            self.forget();
        }
        self.queue = runs[self.flying.len()..].iter().copied().collect();
        self.send(false);
    }

    /// Forgets what would be asked for.
    fn forget(&mut self) {
        self.queue.clear();
        for (_, filled) in self.flying.drain(..) {
            self.idle.extend(filled.recv().ok().map(|(room, _)| room));
        }
    }

    /// Has the next runs read, as many as there are free rooms, and one in any case if `wait`.
    fn send(&mut self, wait: bool) {
        while let Some(&run) = self.queue.front()
            && let Some(mut room) = self.idle.pop_front()
        {
            if !room.is_free() {
                if !(wait && self.flying.is_empty()) {
                    return self.idle.push_front(room);
                }
                room.wait();
            }
            self.queue.pop_front();
            let (to, filled) = sync_channel(1);
            let cold = Arc::clone(&self.cold);
            self.cold.pool.spawn(move || {
                let read = cold.read(run, room.bytes());
                to.send((room, read)).ok();
            });
            self.flying.push_back((run, filled));
        }
    }

    /// The next run, once it is there, `None` if its reader is gone. Its room comes back with [`Ahead::give_back`].
    pub fn take(&mut self, run: usize) -> Option<Result<R, ReadError>> {
        if self.flying.front().map(|f| f.0).or(self.queue.front().copied()) != Some(run) {
            self.plan(&[run]);
        }
        self.send(true);
        let (room, read) = self.flying.pop_front()?.1.recv().ok()?;
        match read {
            Ok(()) => Some(Ok(room)),
            Err(error) => {
                self.idle.push_back(room);
                Some(Err(error))
            }
        }
    }

    /// A room that can be filled again.
    pub fn give_back(&mut self, room: R) {
        self.idle.push_back(room);
        self.send(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{Pages, ReadAt};
    use std::io;
    use std::path::Path;

    impl Room for Vec<u8> {
        fn bytes(&mut self) -> &mut [u8] {
            self
        }

        fn is_free(&self) -> bool {
            true
        }

        fn wait(&self) {}
    }

    fn piece(file: usize, at: u64, len: usize, to: usize) -> Piece {
        Piece { file, at, len, to }
    }

    /// Neighbours are one read whatever their order in the run, and what lies apart is not.
    #[test]
    fn neighbours_are_read_at_once() {
        let apart = 200 + GAP_BYTES + 1;
        let found = spans(vec![piece(0, 100, 100, 0), piece(0, 0, 100, 512), piece(0, apart, 7, 256), piece(1, 3, 4, 700)]);
        let shape: Vec<_> = found.iter().map(|s| (s.file, s.at, s.len, s.pieces.len())).collect();
        assert_eq!(shape, [(0, 0, 200, 2), (0, apart, 7, 1), (1, 3, 4, 1)]);
    }

    /// Byte `i` of run `r` is `r + i`; words come before scales in the run and after them in the file.
    fn cold(dir: &Path, num: usize) -> Arc<Cold> {
        let path = dir.join("experts");
        let run = |r: usize| (0..100u8).map(move |i| i.wrapping_add(r as u8)).collect::<Vec<u8>>();
        let file: Vec<u8> = (0..num).flat_map(|r| [&run(r)[60..], &run(r)[..60]].concat()).collect();
        std::io::Write::write_all(&mut std::fs::File::create(&path).unwrap(), &file).unwrap();
        let pieces = (0..num as u64).map(|r| vec![piece(0, 100 * r + 40, 60, 0), piece(0, 100 * r, 40, 60)]);
        Arc::new(Cold::new(vec![Reader::open(&path, Pages::Past).unwrap()], pieces.collect()).unwrap())
    }

    fn is_run(bytes: &[u8], run: usize) -> bool {
        bytes.iter().enumerate().all(|(i, &b)| b == (i as u8).wrapping_add(run as u8))
    }

    #[test]
    fn runs_are_put_together_from_their_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let cold = cold(dir.path(), 40);
        let mut rooms = vec![vec![0; 100]; 40];
        cold.read_all(rooms.iter_mut().map(Vec::as_mut_slice).enumerate().collect()).unwrap();
        assert!(rooms.iter().enumerate().all(|(r, room)| is_run(room, r)));
    }

    /// Exact. Three rooms serve any number of runs, in the order announced or against it; fails if a run that was read ahead is
    /// taken for another.
    #[test]
    fn what_is_read_ahead_is_what_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let mut ahead = Ahead::new(&cold(dir.path(), 20), vec![vec![0u8; 100]; 3]);
        ahead.plan(&[0, 1, 2, 3, 5, 6]);
        for run in [0, 1, 2, 3, 7, 7, 4, 19] {
            if run == 2 {
                ahead.plan(&[2, 3, 7, 9]);
            }
            let room = ahead.take(run).unwrap().unwrap();
            assert!(is_run(&room, run), "{run}");
            ahead.give_back(room);
        }
        assert_eq!((ahead.flying.len(), ahead.idle.len()), (0, 3));
    }

    struct Faulty;

    impl ReadAt for Faulty {
        fn read_at(&self, dst: &mut [u8], at: u64) -> io::Result<usize> {
            if (300..400).contains(&at) { Err(io::Error::other("the disk is gone")) } else { Ok(dst.len()) }
        }
    }

    /// A run that cannot be read is an error for whoever asks for it and for nobody else, and costs no room.
    #[test]
    fn a_fault_stays_with_its_run() {
        let files = vec![Reader::of(Path::new("shard"), Box::new(Faulty), None)];
        let cold = Arc::new(Cold::new(files, (0..5).map(|r| vec![piece(0, 100 * r, 100, 0)]).collect()).unwrap());
        let mut ahead = Ahead::new(&cold, vec![vec![0u8; 100]; 2]);
        ahead.plan(&[0, 1, 2, 3, 4]);
        for run in 0..5 {
            match ahead.take(run).unwrap() {
                Ok(room) => ahead.give_back(room),
                Err(error) => assert!(run == 3 && error.to_string().contains("`shard` at byte 300: the disk is gone"), "{error}"),
            }
        }
        assert_eq!(ahead.idle.len(), 2);
        let mut rooms = vec![vec![0; 100]; 5];
        assert!(cold.read_all(rooms.iter_mut().map(Vec::as_mut_slice).enumerate().collect()).is_err());
    }
}

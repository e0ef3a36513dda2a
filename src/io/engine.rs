//! Executes streams and batches of transfers: by io_uring while it works, else piece by piece.
//! Fallbacks are logged once.

use once_cell::sync::OnceCell;

use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicU32, Ordering};
use crate::io::files::{FileId, Next, Piece, Source};
use crate::io::open_file::OpenFile;
use crate::io::span::Span;
use crate::io::uring::{Left, MAX_DEPTH, Outcome, Rings};

/// Limit: failures of rings before io_uring is given up.
const MAX_FAILURES: u32 = 2;

/// Looks up the file of a piece.
pub type Open<'a> = &'a dyn Fn(FileId) -> Result<Arc<OpenFile>>;

/// Executes transfers between real files and memory.
pub struct Engine {
    place: String,
    rings: Option<Rings>,
    ring_failures: AtomicU32,
    /// Limitations found when it was opened.
    fallback: Option<String>,
    /// These limitations, and the reason for giving up io_uring.
    rings_off: OnceCell<String>,
}

impl Engine {
    /// The best engine for the files of a place. `reasons` are limitations that are known already.
    /// `depth` limits transfers in flight for a caller; 0 = [`MAX_DEPTH`].
    pub fn new(place: &str, no_uring: bool, depth: u32, mut reasons: Vec<String>) -> Engine {
        let mut rings = None;
        if !no_uring {
            match Rings::new(if depth == 0 { MAX_DEPTH } else { depth }) {
                Ok(found) => rings = Some(found),
                Err(error) => reasons.push(format!("no io_uring: {}", error.message())),
            }
        }
        let fallback = (!reasons.is_empty()).then(|| reasons.join("; "));
        if let Some(reason) = &fallback {
            log::warn!("{place}: {reason}");
        }
        let place = place.to_string();
        let (ring_failures, rings_off) = (AtomicU32::new(0), OnceCell::new());
        Engine { place, rings, ring_failures, fallback, rings_off }
    }

    /// The rings, while they are in use.
    pub fn rings(&self) -> Option<&Rings> {
        self.rings.as_ref().filter(|_| self.rings_off.get().is_none())
    }

    /// Description for people.
    pub fn name(&self, direct: bool) -> &'static str {
        match (self.rings().is_some(), direct) {
            (true, true) => "io_uring, direct",
            (true, false) => "io_uring, buffered",
            (false, true) => "threads, direct",
            (false, false) => "threads, buffered",
        }
    }

    /// Why a better engine is not used.
    pub fn fallback(&self) -> Option<&str> {
        self.rings_off.get().or(self.fallback.as_ref()).map(String::as_str)
    }

    /// Executes the open pieces of a batch.
    ///
    /// # Safety
    /// As for [`crate::io::files::Files::transfer`].
    pub unsafe fn transfer(&self, pieces: &mut [Piece], align: u64, open: Open<'_>) {
        let is_one = pieces.len() < 2;
        let mut batch = Batch { pieces, at: 0 };
        // SAFETY: the caller's promise.
        unsafe { self.run(&mut batch, is_one, align, open) };
    }

    /// Executes the pieces of a source.
    ///
    /// # Safety
    /// As for [`crate::io::files::Files::stream`].
    pub unsafe fn stream(&self, source: &mut dyn Source, align: u64, open: Open<'_>) {
        // SAFETY: the caller's promise.
        unsafe { self.run(source, false, align, open) };
    }

    /// # Safety
    /// As [`Engine::stream`].
    unsafe fn run(&self, source: &mut dyn Source, is_one: bool, align: u64, open: Open<'_>) {
        let (mut left, mut outcome, mut any) = (Left::new(), Outcome::default(), false);
        if let Some(rings) = self.rings().filter(|_| !is_one) {
            // SAFETY: the caller's promise.
            outcome = unsafe { rings.stream(source, align, open, &mut left) };
        }
        let mut execute = |source: &mut dyn Source, key, piece: Piece| {
            // SAFETY: the caller's promise; no ring uses the memory any more.
            let result = unsafe { carry_out(&piece, align, open) };
            any |= result.is_ok();
            source.ended(key, result);
        };
        left.into_iter().for_each(|(key, piece)| execute(source, key, piece));
        while let Next::Piece(key, piece) = source.next() {
            execute(source, key, piece);
        }
        if let Some(error) = outcome.failed {
            self.ring_failed(error.message());
        } else if let (Some(number), true) = (outcome.refused, any) {
            self.ring_failed(&std::io::Error::from_raw_os_error(number).to_string());
        }
    }

    /// A ring failed; its open pieces were transferred without it.
    fn ring_failed(&self, reason: &str) {
        let place = &self.place;
        if self.ring_failures.fetch_add(1, Ordering::AcqRel) + 1 < MAX_FAILURES {
            log::warn!("{place}: a ring of io_uring failed: {reason}");
            return;
        }
        let late = format!("no io_uring any more: {reason}");
        let all = self.fallback.iter().map(String::as_str).chain([late.as_str()]);
        if self.rings_off.set(all.collect::<Vec<_>>().join("; ")).is_ok() {
            log::warn!("{place}: {late}");
        }
    }
}

/// The open pieces of a batch.
struct Batch<'a> {
    pieces: &'a mut [Piece],
    at: usize,
}

impl Source for Batch<'_> {
    fn next(&mut self) -> Next {
        while let Some(piece) = self.pieces.get(self.at) {
            self.at += 1;
            if piece.is_open() {
                return Next::Piece(self.at - 1, piece.anew());
            }
        }
        Next::End
    }

    fn ended(&mut self, key: usize, result: Result<()>) {
        if let Some(piece) = self.pieces.get_mut(key) {
            piece.result = result;
        }
    }
}

/// Executes a piece by plain calls.
///
/// # Safety
/// As for [`crate::io::files::Files::transfer`].
unsafe fn carry_out(piece: &Piece, align: u64, open: Open<'_>) -> Result<()> {
    let file = open(piece.file)?;
    let mut span = Span::new(piece, &*file).until(file.end());
    // SAFETY: the caller's promise.
    let result = unsafe { span.carry_out(align) };
    result.map_err(|error| error.within(file.name()))
}

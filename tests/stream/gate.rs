//! Files whose reads a test holds up, and whose readers panic.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kvtier::base::status::Result;
use kvtier::io::files::Piece;
use kvtier::io::model_files::{ModelFiles, Stamp};

#[derive(Default)]
struct State {
    shut: bool,
    waiting: u32,
    batches: u32,
    panic_at: u32,
}

/// Files behind a gate.
pub struct Gate {
    files: Arc<dyn ModelFiles>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Limit of a wait: a longer one hangs, however slow the machine is.
const LONG: Duration = Duration::from_secs(240);

impl Gate {
    pub fn new(files: Arc<dyn ModelFiles>) -> Arc<Gate> {
        Arc::new(Gate { files, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Reads wait from now on, or do not any more.
    pub fn shut(&self, shut: bool) {
        self.state.lock().expect("a lock").shut = shut;
        self.changed.notify_all();
    }

    /// The reader of the `n`th batch from now on panics.
    pub fn panic_at(&self, n: u32) {
        let mut state = self.state.lock().expect("a lock");
        state.panic_at = state.batches + n;
    }

    /// Waits until a thread reads.
    pub fn wait(&self) {
        let state = self.state.lock().expect("a lock");
        let waited = self.changed.wait_timeout_while(state, LONG, |state| state.waiting == 0);
        assert!(!waited.expect("a lock").1.timed_out(), "no thread reads");
    }
}

impl ModelFiles for Gate {
    fn align_bytes(&self) -> u64 {
        self.files.align_bytes()
    }

    fn engine(&self) -> &str {
        "gate"
    }

    fn fallback(&self) -> Option<&str> {
        None
    }

    fn count(&self) -> u32 {
        self.files.count()
    }

    fn stamp(&self, file: u32) -> Stamp {
        self.files.stamp(file)
    }

    fn check(&self, file: u32) -> Result<()> {
        self.files.check(file)
    }

    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        let mut state = self.state.lock().expect("a lock");
        state.batches += 1;
        let panics = state.batches == state.panic_at;
        state.waiting += 1;
        self.changed.notify_all();
        let (mut state, ended) =
            self.changed.wait_timeout_while(state, LONG, |state| state.shut).expect("a lock");
        state.waiting -= 1;
        drop(state);
        assert!(!ended.timed_out(), "the gate stays shut");
        assert!(!panics, "a reader that panics");
        // SAFETY: the caller's promise.
        unsafe { self.files.transfer(pieces) };
    }
}

//! Sessions: sequences of tokens, and blocking transfers of their KV.

use std::ops::Range;
use std::time::Duration;

use crate::api::planes::{Layer, Source, Target};
use crate::api::scope::{Moved, Scope};
use crate::api::store::Namespace;
use crate::base::op::{OpOpts, RELEASED};
use crate::base::status::Result;
use crate::store::guards;
use crate::store::state::{Level, SessionOpts};

/// A sequence of tokens in a namespace. While it is open, its stored KV stays in at least one tier.
///
/// Tokens of transfers are numbered from the start of the sequence. A range begins at a multiple of
/// [`Layout::chunk_tokens`](crate::api::Layout::chunk_tokens) and ends at one, or at the end of the
/// session. A partial chunk at the end is kept for this session only, and in memory.
pub struct Session {
    // Dropped in this order: the namespace closes after its sessions.
    pub(super) session: guards::Session,
    pub(super) space: Namespace,
    /// How it was opened, without its name.
    pub(super) opts: SessionOpts<'static>,
}

impl Session {
    /// Appends tokens. On failure nothing changes.
    ///
    /// # Errors
    ///
    /// [`Status::Limit`](crate::api::Status::Limit): a session has at most 2^27 tokens.
    pub fn append(&mut self, tokens: &[u32]) -> Result<()> {
        self.space.shared.call(|| self.session.append(tokens, &[]))
    }

    /// Keeps the first `tokens` tokens.
    pub fn truncate(&mut self, tokens: u64) -> Result<()> {
        self.space.shared.call(|| self.session.truncate(tokens))?;
        Ok(())
    }

    /// Opens a session with the same tokens, tenant, priority and TTL, but without a name: a branch of
    /// a conversation. Both share the full chunks.
    pub fn fork(&self) -> Result<Session> {
        let session = self.space.shared.call(|| self.session.fork(&self.opts))?;
        Ok(Session { session, space: self.space.clone(), opts: self.opts })
    }

    /// Number of its tokens.
    pub fn tokens(&self) -> Result<u64> {
        self.space.shared.call(|| self.session.tokens())
    }

    /// Number of its first tokens whose KV can be reused now, from any tier: [`Session::get`] of
    /// them loads it. An engine computes at least the last token of a prompt itself, since it needs
    /// the logits.
    pub fn reusable_tokens(&self) -> Result<u64> {
        Ok(self.space.shared.call(|| self.session.lookup())?.now_tokens)
    }

    /// Looks up the tokens at the remote, and waits until it answers or the timeout ends. Returns the
    /// number of first tokens that can be reused from the store and its remote.
    ///
    /// # Errors
    ///
    /// [`Status::Timeout`](crate::api::Status::Timeout): answers so far count, for
    /// [`Session::reusable_tokens`] and [`Session::get`].
    pub fn remote_lookup(&self, timeout: Duration) -> Result<u64> {
        let shared = &self.space.shared;
        let opts = OpOpts { deadline_ns: shared.deadline_ns(timeout), ..OpOpts::default() };
        shared.call(|| {
            let op = shared.store.locate(self.session.number, &opts)?;
            let result = op.wait(RELEASED, 0).and_then(|()| op.result());
            op.remove();
            result.map(|()| op.value())
        })
    }

    /// Stores the KV of tokens, for successive layers from `first_layer` on, and waits for `level`.
    /// KV that is stored already is not stored again.
    ///
    /// [`Level::Ram`] waits for a copy in host memory only; from there the KV is written to disk and
    /// to the remote as the spec says, and [`Store::close`](crate::api::Store::close) writes the
    /// rest.
    ///
    /// # Errors
    ///
    /// [`Status::Invalid`](crate::api::Status::Invalid) (planes or tokens do not fit the layout),
    /// [`Status::Budget`](crate::api::Status::Budget) (no memory; part of the KV is stored),
    /// [`Status::Io`](crate::api::Status::Io) (the disk failed),
    /// [`Status::Unavailable`](crate::api::Status::Unavailable) (no disk or remote for this level),
    /// [`Status::Again`](crate::api::Status::Again) (too many transfers at once).
    pub fn put<'env>(
        &self,
        tokens: Range<u64>,
        first_layer: usize,
        planes: impl IntoIterator<Item = Layer<Source<'env>>>,
        level: Level,
    ) -> Result<Moved> {
        self.scope(|scope| Ok(scope.put(tokens, first_layer, planes, level)?.wait()?.0))
    }

    /// Loads the KV of tokens, for successive layers from `first_layer` on, and waits for it.
    ///
    /// Missing KV is no error: [`Moved::tokens`] is the number of tokens that arrived without a gap,
    /// and memory of others may be unchanged. Damaged KV counts as missing. Layers with a window or a
    /// state load only the part that the next token needs.
    ///
    /// # Errors
    ///
    /// As [`Session::put`].
    pub fn get<'env>(
        &self,
        tokens: Range<u64>,
        first_layer: usize,
        planes: impl IntoIterator<Item = Layer<Target<'env>>>,
    ) -> Result<Moved> {
        self.scope(|scope| Ok(scope.get(tokens, first_layer, planes)?.wait()?.0))
    }

    /// Runs `body`, which begins transfers that run while it computes. Returns when all of them have
    /// ended, whether `body` waits for them, drops them, forgets them, or panics.
    ///
    /// ```
    /// use kvtier::api::{Layer, Result, Session, Target};
    ///
    /// /// Loads all layers at once, and computes each as soon as it has arrived.
    /// fn restore(session: &Session, tokens: u64, layers: &mut [Vec<u8>]) -> Result<()> {
    ///     session.scope(|scope| {
    ///         let mut loads = Vec::new();
    ///         for (layer, memory) in layers.iter_mut().enumerate() {
    ///             loads.push(scope.get(0..tokens, layer, [Layer::single(&mut memory[..])])?);
    ///         }
    ///         for load in loads {
    ///             let (moved, memory) = load.wait()?; // the memory is the engine's again
    ///             compute(moved.tokens, &memory[0].k);
    ///         }
    ///         Ok(())
    ///     })
    /// }
    /// # fn compute(_tokens: u64, _kv: &[u8]) {}
    /// ```
    pub fn scope<'env, R>(&self, body: impl FnOnce(&Scope<'_, 'env>) -> R) -> R {
        let scope = Scope::new(self);
        body(&scope)
        // The drop of the scope waits. `body` had a shared reference, so it could not forget it.
    }
}

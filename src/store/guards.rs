//! Namespaces and sessions of an open store that close themselves: what the C handles and the Rust
//! interface own.

use crate::base::core::Core;
use crate::base::fork;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::format::keys::identity::Identity;
use crate::format::keys::{Fingerprint, recipe};
use crate::meta::key::Key;
use crate::meta::layout::Layout;
use crate::store::handle::Store;
use crate::store::state::{NamespaceOpts, SessionOpts, StoreState};

/// An open namespace. Its sessions keep it open.
pub struct Namespace {
    /// The runtime of its store.
    pub core: Arc<Core>,
    /// Its store.
    pub store: Arc<Store>,
    /// Its number in the store.
    pub number: u32,
    /// Layers of its layout.
    pub layers: usize,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// The hash of its identity and layout.
    pub key: Key,
}

impl Namespace {
    /// Opens a namespace. The fingerprint of `layout` replaces the one in `identity`.
    pub fn open(
        core: &Arc<Core>,
        store: &Arc<Store>,
        identity: &Identity<'_>,
        layout: Layout,
        holes: bool,
        remote_tenant: u64,
    ) -> Result<Namespace> {
        let fingerprint = Some(Fingerprint::of(&layout.encode()));
        let key = Identity { layout: fingerprint, ..*identity }.key()?;
        let codec = recipe::codec_of(identity.recipe.unwrap_or(&[]));
        let codec = codec.map_err(|e| e.within("recipe"))?;
        let (layers, chunk_tokens) = (layout.layers(), layout.chunk_tokens());
        let opts = NamespaceOpts { key, layout, holes };
        let number = store.with(|core| {
            let number = core.open_namespace(&opts)?;
            core.set_codec(number, codec);
            if let Err(error) = core.set_tenant(number, remote_tenant) {
                core.close_namespace(number);
                return Err(error);
            }
            Ok(number)
        })?;
        let (core, store) = (core.clone(), store.clone());
        Ok(Namespace { core, store, number, layers, chunk_tokens, key })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // A thread that did not survive the fork may have held the store's lock.
        if fork::check().is_err() {
            return;
        }
        let closed = self.store.release_with(|core| {
            core.close_namespace(self.number);
            Ok(())
        });
        if let Err(error) = closed {
            log::error!("internal: a namespace could not be closed in its store: {error}");
        }
    }
}

/// A session, by its number in the store. The number is reused only after the session was dropped.
pub struct Session {
    /// Its namespace.
    pub ns: Arc<Namespace>,
    /// Its number in the store.
    pub number: u32,
}

impl Session {
    /// Opens a session without tokens.
    pub fn open(ns: &Arc<Namespace>, opts: &SessionOpts<'_>) -> Result<Session> {
        let number = ns.store.with(|core| core.open_session(ns.number, opts))?;
        Ok(Session { ns: ns.clone(), number })
    }

    /// Opens a session with the tokens of this one.
    pub fn fork(&self, opts: &SessionOpts<'_>) -> Result<Session> {
        let number = self.ns.store.with(|core| core.fork(self.number, opts))?;
        Ok(Session { ns: self.ns.clone(), number })
    }

    /// Number of its tokens.
    pub fn tokens(&self) -> Result<u64> {
        let tokens = |core: &StoreState| -> Result<u64> {
            Ok(core.session(self.number)?.path().tokens().len() as u64)
        };
        self.ns.store.inspect(tokens)?
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A thread that did not survive the fork may have held the store's lock.
        if fork::check().is_err() {
            return;
        }
        if let Err(error) = self.ns.store.release_with(|core| core.close_session(self.number)) {
            log::error!("internal: a session could not be closed in its store: {error}");
        }
    }
}

//! Namespaces and sessions of an open store that close themselves: what the C handles and the Rust
//! interface own.

use crate::base::core::Core;
use crate::base::fork;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::fail;
use crate::format::keys::identity::Identity;
use crate::format::keys::media::Medium;
use crate::format::keys::{Fingerprint, recipe};
use crate::meta::key::Key;
use crate::meta::layout::Layout;
use crate::store::handle::Store;
use crate::store::pool::calls::{self, OwnedSessionOpts};
use crate::store::pool::wire::{NamespaceId, SessionId};
use crate::store::state::plans::LookupResult;
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
        let encoded = layout.encode();
        let opts = NamespaceOpts { key, layout, holes };
        let own = |core: &mut StoreState| {
            let number = core.open_namespace(&opts)?;
            core.set_codec(number, codec);
            if let Err(error) = core.set_tenant(number, remote_tenant) {
                core.close_namespace(number);
                return Err(error);
            }
            Ok(number)
        };
        let tenant = remote_tenant;
        let number = store.call(own, || calls::OpenNamespace {
            key,
            layout: encoded,
            holes,
            codec,
            tenant,
        })?;
        if let Some(client) = store.client() {
            client.note_namespace(number, (key, chunk_tokens));
        }
        let (core, store) = (core.clone(), store.clone());
        Ok(Namespace { core, store, number, layers, chunk_tokens, key })
    }
}

impl Namespace {
    /// The namespace, as calls to another process name it.
    pub fn id(&self) -> NamespaceId {
        NamespaceId(self.number)
    }

    /// Which keys are resident, as bits of tiers; `found` has at least as many places as there are keys.
    pub fn exist(&self, keys: &[Key], found: &mut [u8]) -> Result<()> {
        let Some(client) = self.store.client() else {
            return self.store.inspect_now(|core| core.exists(self.number, keys, found))?;
        };
        let call = calls::Exists { namespace: self.id(), keys: keys.to_vec() };
        let answer = client.call(&call)?;
        if answer.len() != keys.len() {
            fail!(Corrupt, "the server has answered for {} keys of {}", answer.len(), keys.len());
        }
        found[..keys.len()].copy_from_slice(&answer);
        Ok(())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // A thread that did not survive the fork may have held the store's lock.
        if fork::check().is_err() {
            return;
        }
        let own = |core: &mut StoreState| {
            core.close_namespace(self.number);
            Ok(())
        };
        let closed = self.store.release(own, || calls::CloseNamespace { namespace: self.id() });
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
        let own = |core: &mut StoreState| core.open_session(ns.number, opts);
        let number = ns.store.call(own, || calls::OpenSession {
            namespace: ns.id(),
            opts: OwnedSessionOpts::of(opts),
        })?;
        Ok(Session { ns: ns.clone(), number })
    }

    /// Opens a session with the tokens of this one.
    pub fn fork(&self, opts: &SessionOpts<'_>) -> Result<Session> {
        let own = |core: &mut StoreState| core.fork(self.number, opts);
        let number = self.ns.store.call(own, || calls::ForkSession {
            session: self.id(),
            opts: OwnedSessionOpts::of(opts),
        })?;
        Ok(Session { ns: self.ns.clone(), number })
    }

    /// The session, as calls to another process name it.
    pub fn id(&self) -> SessionId {
        SessionId(self.number)
    }

    /// Appends tokens, and media whose positions count from the first of these.
    pub fn append(&self, tokens: &[u32], media: &[Medium]) -> Result<()> {
        self.ns.store.call(
            |core| core.append_after(self.number, tokens, media.to_vec()),
            || calls::Append { session: self.id(), tokens: tokens.to_vec(), media: media.to_vec() },
        )
    }

    /// Truncates the session.
    pub fn truncate(&self, tokens: u64) -> Result<()> {
        self.ns.store.call(
            |core| core.truncate(self.number, tokens).map(|_| ()),
            || calls::Truncate { session: self.id(), tokens },
        )
    }

    /// What of its tokens can be reused.
    pub fn lookup(&self) -> Result<LookupResult> {
        self.ns.store.call(
            |core| core.lookup_session(self.number).cloned(),
            || calls::LookupSession { session: self.id() },
        )
    }

    /// Number of its tokens.
    pub fn tokens(&self) -> Result<u64> {
        let tokens = |core: &StoreState| -> Result<u64> {
            Ok(core.session(self.number)?.path().tokens().len() as u64)
        };
        match self.ns.store.client() {
            None => self.ns.store.inspect(tokens)?,
            Some(client) => client.call(&calls::SessionTokens { session: self.id() }),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A thread that did not survive the fork may have held the store's lock.
        if fork::check().is_err() {
            return;
        }
        let own = |core: &mut StoreState| core.close_session(self.number);
        let closed = self.ns.store.release(own, || calls::CloseSession { session: self.id() });
        if let Err(error) = closed {
            log::error!("internal: a session could not be closed in its store: {error}");
        }
    }
}

//! Stores and namespaces.

use std::time::Duration;

use crate::api::session::Session;
use crate::base::core::Core;
use crate::base::runtime::Runtime;
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::base::{fork, panic};
use crate::fail;
use crate::format::keys::identity::Identity;
use crate::meta::layout::Layout;
use crate::store::bundle::Bundle;
use crate::store::counters::StoreStats;
use crate::store::guards;
use crate::store::handle::Store as Opened;
use crate::store::pool::calls;
use crate::store::pool::wire::Raw;
use crate::store::state::{SessionOpts, StoreState};

/// A store with its runtime. Everything that is opened in it shares it.
pub(super) struct Shared {
    pub(super) store: Arc<Opened>,
    runtime: Runtime,
}

impl Shared {
    pub(super) fn new(runtime: Runtime, store: Opened) -> Shared {
        Shared { store: Arc::new(store), runtime }
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        self.runtime.core()
    }

    /// Calls into the library. A panic inside it, which is a defect of the library, is an error for
    /// the caller and ends the work of the store.
    pub(super) fn call<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        fork::check()?;
        panic::catch(body).unwrap_or_else(|text| {
            // The store must halt even if this panics, too.
            let _ = panic::catch(|| self.core().poison(&text));
            self.halt();
            Err(Status::Panic.into())
        })
    }

    /// Ends the work of the store after a panic. If that panics, too, threads may still use memory of
    /// callers, which nobody may get back: the process ends.
    pub(super) fn halt(&self) {
        if panic::catch(|| self.store.halt()).is_err() {
            std::process::abort();
        }
    }

    /// A deadline on the runtime's clock; never 0, which would be none.
    pub(super) fn deadline_ns(&self, timeout: Duration) -> u64 {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.core().clock().now_ns().saturating_add(timeout_ns).max(1)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if fork::check().is_err() {
            return;
        }
        // A closed store closes again without an effect.
        if let Err(error) = self.call(|| self.store.close(0)) {
            log::error!("a store that was dropped could not write everything back: {error}");
        }
    }
}

/// A store: keeps KV in host memory, on disk and at a remote, with threads and a memory budget of
/// its own.
///
/// Clones are the same store. When the last clone, [`Namespace`] and [`Session`] are dropped, the
/// store closes as [`Store::close`] does, but its errors are only logged.
#[derive(Clone)]
pub struct Store {
    pub(super) shared: Arc<Shared>,
}

impl Store {
    /// Opens a store from a spec: `store(...)`, or `kvtier(budget=budget(...), store=store(...))`
    /// with parameters of the threads and the budget; an empty one is `store(host=1GiB)`. Recovers
    /// what an earlier process left in the directory of its disk.
    ///
    /// The reference of specs lists all parameters. Remotes need cargo features of this crate, such
    /// as `redis` or `s3`.
    ///
    /// ```
    /// use kvtier::api::{Status, Store};
    ///
    /// let store = Store::open("store(host=64MiB, policy=lru)")?;
    /// assert_eq!(store.stats()?.puts, 0);
    /// let error = Store::open("store(hots=64MiB)").err().expect("a misspelt parameter");
    /// assert_eq!(error.status(), Status::Spec);
    /// assert!(error.message().contains("host"), "{error}"); // did you mean ...
    /// # Ok::<(), kvtier::api::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Status::Spec`], [`Status::Budget`] (not so much memory), [`Status::Busy`] (another process
    /// has the directory), [`Status::NotFound`] (its parent is missing), [`Status::Io`],
    /// [`Status::Corrupt`], [`Status::Unsupported`] (the remote's feature is not built in), and for a
    /// remote with `require=true` [`Status::Unavailable`] and [`Status::Timeout`].
    pub fn open(spec: &str) -> Result<Store> {
        fork::check()?;
        let opened = panic::catch(|| {
            let bundle = Bundle::parse(spec)?;
            if bundle.store.has_custom_remote() {
                fail!(
                    Invalid,
                    "the spec has remote=custom(...), which takes callbacks of the C interface: use \
                     another remote"
                );
            }
            bundle.open()
        });
        let (runtime, store) = opened.unwrap_or_else(|text| {
            log::error!("caught a panic inside the library: {text}");
            Err(Status::Panic.into())
        })?;
        Ok(Store { shared: Arc::new(Shared::new(runtime, store)) })
    }

    /// Opens the namespace of a model. Equal identities and layouts are the same namespace, with the
    /// KV that an earlier process left on disk. The field [`Identity::layout`] is not read: `layout`
    /// fills it.
    ///
    /// The identity must tell models apart whose KV differs: give a digest of the weights, and name
    /// in [`Identity::recipe`] how KV is computed where that is not exact.
    ///
    /// # Errors
    ///
    /// [`Status::Limit`] (a field is too long, or too many namespaces are open), [`Status::Spec`]
    /// (the recipe names an unknown codec).
    pub fn namespace(&self, identity: &Identity<'_>, layout: &Layout) -> Result<Namespace> {
        let Shared { store, .. } = &*self.shared;
        let core = self.shared.core();
        let open = || guards::Namespace::open(core, store, identity, layout.clone(), false, 0);
        let ns = Arc::new(self.shared.call(open)?);
        Ok(Namespace { ns, layout: Arc::new(layout.clone()), shared: self.shared.clone() })
    }

    /// Counters since the open, and the current state.
    pub fn stats(&self) -> Result<StoreStats> {
        let store = &self.shared.store;
        let own = |core: &StoreState| Raw(core.stats_now());
        Ok(self.shared.call(|| store.ask(own, || calls::Stats {}))?.0)
    }

    /// The statistics as Prometheus text.
    pub fn metrics(&self) -> Result<String> {
        let store = &self.shared.store;
        let own = |core: &StoreState| core.metrics_text();
        self.shared.call(|| store.ask(own, || calls::MetricsText {}))
    }

    /// Closes the store: cancels open transfers, writes full chunks that are in memory only to disk,
    /// as the spec allows, and ends the threads. Sessions, namespaces and clones of the store that
    /// are still there return [`Status::Closed`] from now on.
    ///
    /// # Errors
    ///
    /// [`Status::Io`]: the disk failed. The store is closed all the same, and KV that was not written
    /// is lost; KV that was written is intact.
    pub fn close(self) -> Result<()> {
        self.shared.call(|| self.shared.store.close(0))
    }
}

/// A model in a store: its sessions share the KV of common prefixes.
#[derive(Clone)]
pub struct Namespace {
    // Dropped in this order: the store closes last.
    pub(super) ns: Arc<guards::Namespace>,
    pub(super) layout: Arc<Layout>,
    pub(super) shared: Arc<Shared>,
}

impl Namespace {
    /// Opens a session without tokens.
    ///
    /// # Errors
    ///
    /// [`Status::Again`]: as many sessions are open as the parameter `sessions` of the spec says.
    pub fn session(&self) -> Result<Session> {
        self.session_with(&SessionOpts::default())
    }

    /// The same with a name, tenant or priority.
    pub fn session_with(&self, opts: &SessionOpts<'_>) -> Result<Session> {
        let session = self.shared.call(|| guards::Session::open(&self.ns, opts))?;
        let opts = SessionOpts { name: b"", ..*opts };
        Ok(Session { session, space: self.clone(), opts })
    }

    /// Number of the first tokens of a sequence whose KV can be reused now. Counts no use and
    /// references nothing: KV may be evicted before the next call. Does not ask a remote.
    pub fn reusable_tokens(&self, tokens: &[u32]) -> Result<u64> {
        let Shared { store, .. } = &*self.shared;
        Ok(self.shared.call(|| store.lookup(self.ns.number, tokens))?.now_tokens)
    }

    /// The hash of its identity and layout.
    pub fn key(&self) -> [u8; 32] {
        self.ns.key.0
    }

    /// The layout of its KV.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

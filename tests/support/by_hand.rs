//! A store in one thread, on a simulated disk: which hands work, and when, a test says.
#![allow(dead_code)]

#[path = "shared_core.rs"]
mod shared_core;

use kvtier::base::account::Account;
use kvtier::base::status::Status;
use kvtier::base::sync::{Arc, Mutex};
use kvtier::device::Stream;
use kvtier::device::host::Host;
use kvtier::io::simulated::plan::{Fault, Plan};
use kvtier::io::simulated::{SimFiles, SimOpts};
use kvtier::kv::core::work::Hands;
use kvtier::kv::core::{Config, Core, Deed, Level, Rectangle, SessionOpts, SpaceOpts};
use kvtier::kv::hands::Tools;
use kvtier::meta::key::Key;
use kvtier::tier::disk::{DiskTier, Options};

use crate::support::{Engine, Model, Shape, marks_of};
use shared_core::Shared;

/// Cells of 4 KiB, a block each.
pub const MODEL: Model = Model { layers: 2, heads: 2, run: 64, chunk: 16 };
/// A few chunks.
const SEGMENT: u64 = 16 * 4096;

/// The store.
pub struct World {
    pub files: SimFiles,
    pub core: Shared,
    pub tools: Tools,
    pub space: u32,
}

impl World {
    pub fn open() -> World {
        let opts = SimOpts { capacity_bytes: 64 << 20, ..SimOpts::default() };
        World::on(SimFiles::new(1, opts), Config { host_bytes: 8 << 20, ..World::config() }, None)
    }

    pub fn config() -> Config {
        Config { max_chunks: 256, ..Config::default() }
    }

    pub fn on(files: SimFiles, config: Config, account: Option<Arc<Account>>) -> World {
        World::sized(files, config, account, SEGMENT, 32 << 20)
    }

    /// The same on a disk of so many bytes, in segments of so many.
    pub fn sized(
        files: SimFiles,
        config: Config,
        account: Option<Arc<Account>>,
        segment_bytes: u64,
        disk_bytes: u64,
    ) -> World {
        let options = Options { segment_bytes, ..Options::new(disk_bytes, [7; 16]) };
        let opened = DiskTier::open(std::sync::Arc::new(files.clone()), options);
        let (disk, found, _) = opened.expect("a sound store");
        let disk = Arc::new(disk);
        let mut core = Core::new(config, account, Some(disk.clone())).expect("opened");
        core.tick(1);
        core.adopt(&found).expect("memory");
        let opts = SpaceOpts { key: Key([1; 32]), layout: MODEL.layout(), holes: false };
        let space = core.open_space(&opts).expect("opened");
        let tools = Tools { device: Arc::new(Host::default()), disk: Some(disk), far: None };
        World { files, core: Shared(Arc::new(Mutex::new(core))), tools, space }
    }

    /// The power fails.
    pub fn crash(self) -> World {
        self.files.crash().expect("memory");
        let config = Config { host_bytes: 8 << 20, ..World::config() };
        World::on(self.files.reopen(), config, None)
    }

    pub fn with<R>(&self, act: impl FnOnce(&mut Core) -> R) -> R {
        act(&mut self.core.0.lock())
    }

    /// Does all there is to do.
    pub fn rest(&self) {
        // Looking for one kind of work may make another.
        let has_work = |core: &mut Core| Hands::ALL.into_iter().any(|hands| core.has_work(hands));
        while Hands::ALL.into_iter().any(|hands| self.work(hands)) || self.with(has_work) {}
        self.with(|core| core.check()).expect("the tables agree");
    }

    /// Some hands do one batch; false if there is none.
    pub fn work(&self, hands: Hands) -> bool {
        let Some(mut work) = self.with(|core| core.take(hands)) else { return false };
        let mut keeper = self.core.clone();
        // SAFETY: whoever has submitted keeps its memory until this is over.
        let outcome = unsafe { self.tools.work(&mut work, Stream(0), &mut keeper) };
        self.with(|core| core.done(work, outcome, 0));
        true
    }

    pub fn session(&self, tokens: &[u32]) -> u32 {
        self.with(|core| {
            let number = core.open_session(self.space, &SessionOpts::default()).expect("room");
            core.append(number, tokens).expect("room");
            number
        })
    }

    /// Stores some layers of all of a session; how that went.
    pub fn put(&self, tokens: &[u32], layers: std::ops::Range<usize>, level: Level) -> Status {
        let session = self.session(tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        engine.compute(&marks_of(0, tokens));
        let what = engine.rectangle(0, tokens.len(), layers, false);
        let status = self.ends(session, Deed::Put, level, what);
        self.with(|core| core.close_session(session)).expect("open");
        status
    }

    pub fn ends(&self, session: u32, deed: Deed, level: Level, what: Rectangle) -> Status {
        self.with(|core| core.submit_rectangle(session, deed, level, 0, what)).expect("submitted");
        self.rest();
        let mut finished = Vec::new();
        self.with(|core| core.finished(&mut finished));
        let waits = self.with(|core| core.what_waits());
        finished.pop().expect(&waits).error.map_or(Status::Ok, |error| error.status())
    }

    pub fn is_there(&self, tokens: &[u32]) -> bool {
        let session = self.session(tokens);
        let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
        let what = engine.whole();
        let status = self.ends(session, Deed::Get, Level::Ram, what);
        self.with(|core| core.close_session(session)).expect("open");
        if status == Status::Ok {
            engine.check(&marks_of(0, tokens), 0..tokens.len(), 0..MODEL.layers);
        }
        status == Status::Ok
    }

    pub fn next_sync_fails(&self) {
        self.files.set_plan(Plan::default().once(Fault::SyncError, 1));
    }
}

//! Remotes of the engine's own: a table of callbacks, for stores of objects that this library does
//! not know (Mooncake, NIXL, InfiniStore).

use std::ffi::{c_char, c_void};

use crate::base::callback::Foreign as Callback;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::abi::{Plain, known_flags, read};
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::status::kvt_status_t;
use crate::store::spec::CustomRemote;
use crate::tier::remote::name::Prefix;
use crate::tier::remote::{
    Caps, Client, Gets, Name, Part, Puts, Queries, Remote, RemoteError, Server,
};

/// A put does nothing where there is an object of that name; without it the last writer wins.
pub const KVT_REMOTE_FIRST_WINS: u64 = 1;

/// Most objects of a batch that an engine's remote is given.
const MAX_BATCH: u32 = 4096;

/// A piece of memory. Pieces of a get that nobody wants may be the same memory in several items;
/// those of a put are not to be written. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_part_t {
    /// Where it is, in host memory.
    pub address: *mut c_void,
    /// How long.
    pub bytes: u64,
}

/// An object of a batch. Stands in arrays only; the next is `stride_bytes` behind it.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_item_t {
    /// Its name: letters, digits, '.', '_', '-' and '/'. Not NUL-terminated.
    pub name: *const c_char,
    /// Length of that.
    pub name_bytes: u64,
    /// Where its bytes go (get) or come from (put), one piece after the other.
    pub parts: *const kvt_remote_part_t,
    /// How many pieces.
    pub part_count: u64,
    /// Of a get: the first of its bytes that is wanted.
    pub offset: u64,
    /// Written by the callback. Of a get: how many bytes came, fewer than there is room for where
    /// the object ends. Of a question: how long the object is. Of a put: 1 if it was there.
    pub bytes: u64,
    /// Written by the callback: KVT_OK; KVT_E_NOT_FOUND; KVT_E_AGAIN (at another time),
    /// KVT_E_TIMEOUT, KVT_E_BUDGET (full), KVT_E_LIMIT (it takes none that long), KVT_E_CORRUPT,
    /// KVT_E_UNAVAILABLE. It is KVT_E_AGAIN before.
    pub status: kvt_status_t,
    /// Always 0.
    pub reserved: u32,
}

/// Does something with all objects of a batch until a deadline (CLOCK_MONOTONIC). Each has a
/// status of its own afterwards, and no memory of the batch is touched any more. Anything but
/// KVT_OK is the status of all that have none.
pub type kvt_remote_batch_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        items: *mut kvt_remote_item_t,
        count: u64,
        stride_bytes: u64,
        deadline_ns: u64,
    ) -> kvt_status_t,
>;

/// A remote of the engine's own, for `remote=custom(...)` in a store's spec. Its functions are
/// called from threads of the store, from several at once, with no lock held; they must not
/// unwind, and must not call the store that they are of. What they say of being there is a hint,
/// and what they give is checked: they may be wrong, but not late.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_remote_custom_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_REMOTE_FIRST_WINS.
    pub flags: u64,
    /// Bytes of an object that it is quick with; 0 = 1 MiB.
    pub preferred_bytes: u64,
    /// Most bytes of an object; 0 = as many as an object can have.
    pub max_bytes: u64,
    /// Most objects of a batch; 0 = 32.
    pub batch: u32,
    /// Always 0.
    pub reserved: u32,
    /// Fetches objects, or parts of them.
    pub get: kvt_remote_batch_fn,
    /// Stores objects.
    pub put: kvt_remote_batch_fn,
    /// Says which are there, and how long they are.
    pub exists: kvt_remote_batch_fn,
    /// Takes objects away; null = they are never taken away.
    pub remove: kvt_remote_batch_fn,
    /// Handed to all of them; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data, once the store is closed; may be null.
    pub destroy: kvt_destroy_fn,
}

#[derive(Clone, Copy)]
struct Table {
    get: kvt_remote_batch_fn,
    put: kvt_remote_batch_fn,
    exists: kvt_remote_batch_fn,
    remove: kvt_remote_batch_fn,
}

/// A remote, and what stands before its names.
#[derive(Clone)]
struct Called {
    callback: Arc<Callback<Table>>,
    caps: Caps,
    prefix: Prefix,
}

/// A way to it: memory for batches.
struct CustomClient {
    remote: Called,
    items: Vec<kvt_remote_item_t>,
    parts: Vec<kvt_remote_part_t>,
    names: Vec<u8>,
}

// SAFETY: pointers in its tables are of the batch that is under way, and of no use after it.
unsafe impl Send for CustomClient {}

/// The remote of a store's options, and who is to keep its data once the store is open.
///
/// # Safety
/// `custom` is null or valid for the size it states; its functions are what they say.
pub(crate) unsafe fn remote_of(
    custom: *const kvt_remote_custom_t,
) -> Result<Option<(CustomRemote, impl FnOnce())>> {
    if custom.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(custom)? };
    known_flags(given.flags, KVT_REMOTE_FIRST_WINS)?;
    if given.reserved != 0 || given.batch > MAX_BATCH {
        fail!(
            Invalid,
            "reserved is {}, batch {} (at most {MAX_BATCH})",
            given.reserved,
            given.batch
        );
    }
    let kvt_remote_custom_t { get, put, exists, remove, user_data, destroy, .. } = given;
    if get.is_none() || put.is_none() || exists.is_none() {
        fail!(Invalid, "a remote needs get, put and exists");
    }
    let or = |given: u64, usual: u64| if given == 0 { usual } else { given };
    let caps = Caps {
        preferred_bytes: or(given.preferred_bytes, 1 << 20),
        max_bytes: or(given.max_bytes, u64::MAX),
        batch: or(given.batch.into(), 32) as usize,
        ranges: true,
        first_wins: given.flags & KVT_REMOTE_FIRST_WINS != 0,
        // What the engine's own keeps is the engine's to count.
        client_bytes: 0,
    };
    let table = Table { get, put, exists, remove };
    let callback = Arc::new(Callback::new(table, user_data, destroy));
    let keeper = callback.clone();
    let make = move |prefix: &Prefix| {
        let (callback, prefix) = (callback.clone(), prefix.clone());
        Box::new(Called { callback, caps, prefix }) as Box<dyn Remote>
    };
    Ok(Some((CustomRemote(Arc::new(make)), move || keeper.keep())))
}

impl Remote for Called {
    fn caps(&self) -> Caps {
        self.caps
    }

    fn client(&self) -> Box<dyn Client> {
        let (items, parts, names) = (Vec::new(), Vec::new(), Vec::new());
        Box::new(CustomClient { remote: self.clone(), items, parts, names })
    }
}

/// What a callback's status says.
fn trouble(status: kvt_status_t) -> RemoteError {
    match Status::from_code(status) {
        Some(Status::NotFound) => RemoteError::Absent,
        Some(Status::Again) => RemoteError::Busy,
        Some(Status::Timeout) => RemoteError::Timeout,
        Some(Status::Budget | Status::NoMem) => RemoteError::Full,
        Some(Status::Limit) => RemoteError::TooLong,
        Some(Status::Corrupt) => RemoteError::Damaged,
        Some(Status::Unsupported) => RemoteError::Denied,
        _ => RemoteError::Unreachable,
    }
}

/// Which of the callbacks.
type Which = fn(&Table) -> kvt_remote_batch_fn;

impl CustomClient {
    fn clear(&mut self) {
        self.items.clear();
        self.parts.clear();
        self.names.clear();
    }

    fn add(&mut self, name: &Name, parts: &[Part], offset: u64) {
        let begin = self.names.len();
        self.remote.prefix.write(name, &mut self.names);
        let name_bytes = (self.names.len() - begin) as u64;
        let of =
            |part: &Part| kvt_remote_part_t { address: part.address.cast(), bytes: part.bytes };
        self.parts.extend(parts.iter().map(of));
        self.items.push(kvt_remote_item_t {
            name: std::ptr::null(),
            name_bytes,
            parts: std::ptr::null(),
            part_count: parts.len() as u64,
            offset,
            bytes: 0,
            status: Status::Again.code(),
            reserved: 0,
        });
    }

    /// Calls; each item's status and bytes are known then.
    fn call(&mut self, which: Which, deadline_ns: u64) {
        let (mut name, mut part) = (0, 0);
        for item in &mut self.items {
            item.name = self.names.as_ptr().wrapping_add(name).cast();
            item.parts = self.parts.as_ptr().wrapping_add(part);
            name += item.name_bytes as usize;
            part += item.part_count as usize;
        }
        for items in self.items.chunks_mut(self.remote.caps.batch) {
            let status = self.remote.callback.call(|table, user_data| {
                let Some(function) = which(&table) else { return Status::Unsupported.code() };
                let (count, stride) = (items.len() as u64, size_of::<kvt_remote_item_t>() as u64);
                // SAFETY: function and data came together; the tables are borrowed for the call.
                unsafe { function(user_data, items.as_mut_ptr(), count, stride, deadline_ns) }
            });
            if status == Status::Ok.code() {
                continue;
            }
            let unsaid = Status::Again.code();
            items.iter_mut().filter(|item| item.status == unsaid).for_each(|i| i.status = status);
        }
    }

    /// What each came to.
    fn results(&self) -> impl Iterator<Item = std::result::Result<u64, RemoteError>> + '_ {
        self.items.iter().map(|item| match item.status == Status::Ok.code() {
            true => Ok(item.bytes),
            false => Err(trouble(item.status)),
        })
    }
}

impl Client for CustomClient {
    fn greet(&mut self, deadline_ns: u64) -> Result<Server> {
        self.clear();
        self.add(&Name { tenant: 0, hash: [0; 20] }, &[], 0);
        self.call(|table| table.exists, deadline_ns);
        match self.results().next() {
            Some(Ok(_) | Err(RemoteError::Absent)) => {}
            Some(Err(trouble)) => return Err(Error::from(trouble)),
            None => return Err(Status::Invalid.into()),
        }
        let words = "a remote of the engine's own".to_string();
        Ok(Server { words, warnings: Vec::new() })
    }

    unsafe fn get(&mut self, gets: &mut Gets, deadline_ns: u64) {
        self.clear();
        for at in 0..gets.items.len() {
            let Some(get) = gets.items.get(at) else { break };
            let (name, offset) = (get.name, get.offset);
            self.add(&name, gets.parts_of(at), offset);
        }
        self.call(|table| table.get, deadline_ns);
        let rooms: Vec<u64> = (0..gets.items.len()).map(|at| gets.room_of(at)).collect();
        for ((get, result), room) in gets.items.iter_mut().zip(self.results()).zip(rooms) {
            // More than there is room for cannot have come.
            get.result = result
                .and_then(|came| if came <= room { Ok(came) } else { Err(RemoteError::Malformed) });
        }
    }

    unsafe fn put(&mut self, puts: &mut Puts, deadline_ns: u64) {
        self.clear();
        for at in 0..puts.items.len() {
            let Some(put) = puts.items.get(at) else { break };
            let name = put.name;
            self.add(&name, puts.parts_of(at), 0);
        }
        self.call(|table| table.put, deadline_ns);
        for (put, result) in puts.items.iter_mut().zip(self.results()) {
            put.result = result.map(|was_there| was_there != 0);
        }
    }

    fn lookup(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.clear();
        queries.items.iter().for_each(|ask| self.add(&ask.name, &[], 0));
        self.call(|table| table.exists, deadline_ns);
        queries.items.iter_mut().zip(self.results()).for_each(|(ask, result)| ask.result = result);
    }

    fn remove(&mut self, queries: &mut Queries, deadline_ns: u64) {
        self.clear();
        queries.items.iter().for_each(|ask| self.add(&ask.name, &[], 0));
        self.call(|table| table.remove, deadline_ns);
        for (ask, result) in queries.items.iter_mut().zip(self.results()) {
            ask.result = match result {
                Err(RemoteError::Absent) => Ok(0),
                result => result,
            };
        }
    }
}

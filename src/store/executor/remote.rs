//! Remote requests of the workers: lookups, fetches, uploads. Each worker has its own connection
//! and memory for headers; cells are read from and written to host memory directly.

use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::base::sync::{Arc, Mutex};
use crate::format::codec::Codec;
use crate::store::state::remote_fetch::{Fetch, FetchBatch};
use crate::store::state::remote_lookup::LookupBatch;
use crate::store::state::remote_upload::{Upload, UploadBatch};
use crate::tier::remote::object::{CellSource, Object, Sink};
use crate::tier::remote::{Client, Gets, Puts, Queries, Remote, RemoteError};

/// Memory for received bytes that are discarded.
const SINK_BYTES: usize = 256 << 10;

/// A connection to the remote, with the memory of its batches.
struct RemoteJob {
    client: Box<dyn Client>,
    gets: Gets,
    puts: Puts,
    queries: Queries,
    headers: Vec<u8>,
    sink: Vec<u8>,
}

/// Executes remote requests. Each clone opens its own connection at its first use.
pub struct RemoteExecutor {
    remote: Arc<dyn Remote>,
    clock: Clock,
    connection: Mutex<Option<Box<RemoteJob>>>,
}

impl Clone for RemoteExecutor {
    fn clone(&self) -> RemoteExecutor {
        RemoteExecutor::new(self.remote.clone(), self.clock.clone())
    }
}

impl RemoteExecutor {
    /// For a remote.
    pub fn new(remote: Arc<dyn Remote>, clock: Clock) -> RemoteExecutor {
        RemoteExecutor { remote, clock, connection: Mutex::new(None) }
    }

    /// Approximate memory of one executor.
    pub fn bytes_of(remote: &dyn Remote) -> u64 {
        SINK_BYTES as u64 + remote.caps().client_bytes
    }

    /// The remote.
    pub fn remote(&self) -> &Arc<dyn Remote> {
        &self.remote
    }

    fn run<R>(&self, timeout_ns: u64, act: impl FnOnce(&mut RemoteJob, u64) -> R) -> R {
        // No lock is held meanwhile, since the remote may be the engine's own code.
        let connection = self.connection.lock().take();
        let mut remote_job = connection.unwrap_or_else(|| {
            Box::new(RemoteJob {
                client: self.remote.client(),
                gets: Gets::default(),
                puts: Puts::default(),
                queries: Queries::default(),
                headers: Vec::new(),
                sink: vec![0; SINK_BYTES],
            })
        });
        let result = act(&mut remote_job, self.clock.now_ns().saturating_add(timeout_ns));
        *self.connection.lock() = Some(remote_job);
        result
    }

    /// Executes fetches.
    ///
    /// # Safety
    /// Their destinations are not shared until the state has been notified of the end.
    pub unsafe fn fetch(&self, batch: &mut FetchBatch) {
        self.run(batch.timeout_ns, |remote_job, deadline_ns| {
            // SAFETY: the caller's promise.
            unsafe { remote_job.fetch(batch, deadline_ns) }
        });
    }

    /// Executes uploads and removals.
    ///
    /// # Safety
    /// Their planes do not change until the state has been notified of the end.
    pub unsafe fn upload(&self, batch: &mut UploadBatch) {
        self.run(batch.timeout_ns, |remote_job, deadline_ns| {
            // SAFETY: the caller's promise.
            unsafe { remote_job.upload(batch, deadline_ns) }
        });
    }

    /// Executes lookups.
    pub fn lookup(&self, batch: &mut LookupBatch) {
        if batch.items.is_empty() {
            return;
        }
        self.run(batch.timeout_ns, |remote_job, deadline_ns| remote_job.lookup(batch, deadline_ns));
    }
}

/// The object of a fetch.
fn fetch_object(fetch: &Fetch) -> Result<Object<'_>> {
    Object::new(&fetch.shape, fetch.object(), fetch.chunk, Codec::None)
}

fn upload_object(upload: &Upload) -> Result<Object<'_>> {
    Object::new(&upload.shape, upload.object(), upload.chunk, upload.codec())
}

/// The cells of an upload.
fn cells_of(upload: &Upload) -> Vec<CellSource<'_>> {
    let mut planes = &upload.planes[..];
    let cells = upload.shape.cells(upload.object()).iter();
    cells
        .map(|shape| {
            let (own, others) = planes.split_at(shape.planes().len().min(planes.len()));
            planes = others;
            CellSource { codec: upload.codec(), planes: own }
        })
        .collect()
}

impl RemoteJob {
    /// Memory for the headers of a batch, and where each begins.
    fn room(&mut self, headers: impl Iterator<Item = Result<usize>>) -> Vec<usize> {
        let mut at = 0;
        let mut starts = Vec::new();
        for bytes in headers {
            starts.push(at);
            at += bytes.unwrap_or(0);
        }
        self.headers.clear();
        self.headers.resize(at, 0);
        starts
    }

    /// # Safety
    /// As [`RemoteExecutor::fetch`].
    unsafe fn fetch(&mut self, batch: &mut FetchBatch, deadline_ns: u64) {
        let sizes =
            batch.fetches.iter().map(|item| fetch_object(item).map(|object| object.header_bytes()));
        let starts = self.room(sizes);
        self.gets.clear();
        let sink = Sink { address: self.sink.as_mut_ptr(), bytes: self.sink.len() as u64 };
        let headers = self.headers.as_mut_ptr();
        // Index in the batch of each element of the request.
        let (mut indices, mut rejected) = (Vec::with_capacity(starts.len()), Vec::new());
        for (i, (fetch, &start)) in batch.fetches.iter().zip(&starts).enumerate() {
            let header = headers.wrapping_add(start);
            let added = fetch_object(fetch).and_then(|object| {
                object.get(fetch.name, header, &fetch.places, sink, &mut self.gets)
            });
            match added {
                Ok(()) => indices.push(i),
                Err(error) => {
                    log::error!("internal: a fetch could not be built: {error}");
                    rejected.push(i);
                }
            }
        }
        // This is no failure of the remote.
        rejected.into_iter().for_each(|i| batch.fetches[i].result = Err(RemoteError::TooLong));
        let verify = &mut |gets: &Gets, item: usize| {
            let fetch = &mut batch.fetches[indices[item]];
            let mut verdicts = std::mem::take(&mut fetch.verdicts);
            let bytes = gets.items[item].result.unwrap_or(0);
            fetch.result =
                fetch_object(fetch).map_err(|_| RemoteError::TooLong).and_then(|object| {
                    let header = headers.wrapping_add(starts[indices[item]]).cast_const();
                    // SAFETY: the header's room; the client writes it no more.
                    let header =
                        unsafe { std::slice::from_raw_parts(header, object.header_bytes()) };
                    // SAFETY: the caller's promise; the client writes there no more.
                    unsafe { object.verify(header, bytes, &fetch.places, &mut verdicts) }
                });
            fetch.verdicts = verdicts;
        };
        // SAFETY: headers and the sink belong to this call, destinations are valid by the caller's promise.
        unsafe { self.client.get_each(&mut self.gets, deadline_ns, verify) };
        for (get, &i) in self.gets.items.iter().zip(&indices) {
            if let Err(error) = get.result {
                batch.fetches[i].result = Err(error);
            }
        }
    }

    /// # Safety
    /// As [`RemoteExecutor::upload`].
    unsafe fn upload(&mut self, batch: &mut UploadBatch, deadline_ns: u64) {
        let sizes = batch
            .uploads
            .iter()
            .map(|item| upload_object(item).map(|object| object.header_bytes()));
        let starts = self.room(sizes);
        self.puts.clear();
        let headers = self.headers.as_mut_ptr();
        let header_of = |i: usize, object: &Object<'_>| {
            // SAFETY: the room for this header, which one item at a time uses.
            unsafe {
                std::slice::from_raw_parts_mut(
                    headers.wrapping_add(starts[i]),
                    object.header_bytes(),
                )
            }
        };
        let mut indices = Vec::with_capacity(starts.len());
        for (i, upload) in batch.uploads.iter().enumerate() {
            let added = upload_object(upload).and_then(|object| {
                let header = header_of(i, &object);
                object.add(upload.name, &cells_of(upload), header, &mut self.puts)
            });
            match added {
                Ok(_) => indices.push(i),
                Err(error) => log::error!("internal: an upload could not be built: {error}"),
            }
        }
        if !batch.removals.is_empty() {
            self.queries.items.clear();
            batch.removals.iter().for_each(|&name| self.queries.name(name));
            self.client.remove(&mut self.queries, deadline_ns);
            let items = &self.queries.items;
            batch.removal_error = items.iter().find_map(|query| query.result.err());
            batch.removed = items.iter().filter(|query| query.result.is_ok()).count() as u64;
            let late = items.iter().filter(|query| query.result == Err(RemoteError::Timeout));
            batch.late.extend(late.map(|query| query.name));
        }
        if !indices.is_empty() {
            let seal = &mut |item: usize| {
                let (i, upload) = (indices[item], &batch.uploads[indices[item]]);
                let sealed = upload_object(upload).and_then(|object| {
                    // SAFETY: the caller's promise: no one writes the planes.
                    unsafe { object.seal(&cells_of(upload), header_of(i, &object)) }
                });
                if let Err(error) = sealed {
                    log::error!("internal: an upload could not be sealed: {error}");
                }
            };
            // SAFETY: the caller's promise; each header is written before it is read.
            unsafe { self.client.put_each(&mut self.puts, deadline_ns, seal) };
        }
        for (put, &i) in self.puts.items.iter().zip(&indices) {
            batch.uploads[i].result = put.result;
        }
    }

    fn lookup(&mut self, batch: &mut LookupBatch, deadline_ns: u64) {
        self.queries.items.clear();
        batch.items.iter().for_each(|item| self.queries.name(item.name));
        self.client.lookup(&mut self.queries, deadline_ns);
        for (item, query) in batch.items.iter_mut().zip(&self.queries.items) {
            item.result = match query.result {
                Ok(bytes) => Ok(bytes > 0),
                Err(RemoteError::Absent) => Ok(false),
                Err(error) => Err(error),
            };
        }
    }
}

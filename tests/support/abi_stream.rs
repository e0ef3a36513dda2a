//! The machine's instructions for models and streamers: of a small file, with which every byte
//! that is given is compared.

use std::path::PathBuf;
use std::ptr::{null, null_mut};

use kvtier::ffi::budget::kvt_budget_t;
use kvtier::ffi::device::kvt_device_t;
use kvtier::ffi::error::kvt_error_t;
use kvtier::ffi::model::*;
use kvtier::ffi::model_look::*;
use kvtier::ffi::model_table::*;
use kvtier::ffi::status::*;
use kvtier::ffi::stream::*;
use kvtier::ffi::stream_look::*;
use kvtier::ffi::stream_opts::*;
use kvtier::ffi::stream_plan::*;
use kvtier::ffi::stream_use::*;
use kvtier::ffi::view::KVT_MEMORY_DEVICE;

use super::{Machine, Ordering, Padded, STREAMED, Shelf, Tape, check, out};

const UNITS: u32 = 7;
const NAMES: [&[u8; 9]; UNITS as usize] = [
    b"some unit",
    b"next unit",
    b"next five",
    b"the fifth",
    b"the sixth",
    b"the tenth",
    b"the least",
];
const UNIT_BYTES: u64 = 9000;
const IMAGE_BYTES: u64 = 12288;
const FILE_BYTES: u64 = 100_000;

/// What the machine has of models and streamers.
pub(super) struct Streams {
    models: Shelf<kvt_model_t>,
    streams: Shelf<kvt_stream_t>,
    /// Streamers with a device, and which.
    devices: Vec<(*mut kvt_stream_t, *const kvt_device_t)>,
    held: Vec<(*mut kvt_stream_t, kvt_held_t)>,
    path: Option<PathBuf>,
}

fn content(offset: u64) -> u8 {
    (offset * 7 + offset / 251) as u8
}

impl Streams {
    pub(super) fn new() -> Streams {
        Streams {
            models: Shelf::new(),
            streams: Shelf::new(),
            devices: Vec::new(),
            held: Vec::new(),
            path: None,
        }
    }

    /// The file of the machine, made when it is asked for.
    fn path(&mut self) -> kvt_text_t {
        let path = self.path.get_or_insert_with(|| {
            let name =
                format!("kvt-machine-{}-{:?}", std::process::id(), std::thread::current().id());
            let path = std::env::temp_dir().join(name);
            let bytes: Vec<u8> = (0..FILE_BYTES).map(content).collect();
            std::fs::write(&path, bytes).expect("a file of 100 KB");
            path
        });
        let text = path.as_os_str().as_encoded_bytes();
        kvt_text_t { text: text.as_ptr().cast(), bytes: text.len() as u64 }
    }

    fn device_of(&self, stream: *mut kvt_stream_t) -> *const kvt_device_t {
        self.devices.iter().rfind(|(of, _)| *of == stream).map_or(null(), |(_, device)| *device)
    }

    pub(super) fn take_down(&mut self) {
        // SAFETY: handles this machine made, and what it holds of them.
        unsafe {
            for (stream, held) in &mut self.held {
                assert_eq!(kvt_stream_release(*stream, held, 0, null_mut()), KVT_OK);
            }
            for stream in &mut self.streams.live {
                assert_eq!(kvt_stream_close(stream, 0, null_mut()), KVT_OK);
            }
            for model in &mut self.models.live {
                assert_eq!(kvt_model_close(model), KVT_OK);
            }
        }
        if let Some(path) = self.path.take() {
            std::fs::remove_file(path).expect("the file is there");
        }
    }
}

/// Mostly what is there.
fn unit(tape: &mut Tape) -> u32 {
    match tape.byte() {
        255 => tape.number() as u32,
        other => u32::from(other) % (UNITS + u32::from(other > 240)),
    }
}

fn terms(tape: &mut Tape, on_device: bool) -> Padded<kvt_stream_terms_t> {
    Padded::<kvt_stream_terms_t>::new(tape, |c, t| {
        c.flags = KVT_TERMS_HOST_RESERVE | KVT_TERMS_KV;
        if on_device {
            c.flags |= KVT_TERMS_DEVICE_CEILING | KVT_TERMS_DEVICE_SAFETY;
            c.device_ceiling_bytes = IMAGE_BYTES * u64::from(2 + t.byte() % 9);
        }
        // What is read goes through host memory.
        let staging = if on_device { 4 << 20 } else { 0 };
        c.host_ceiling_bytes = staging + IMAGE_BYTES * u64::from(2 + t.byte() % 9);
        match t.byte() {
            240 => c.flags = t.flags(),
            228..=239 => c.flags |= KVT_STREAM_SHRINKS,
            241 => c.seat = u32::from(t.byte() % 4),
            242..=244 => c.mode = u32::from(t.byte() % 3),
            245 => c.placement = u32::from(t.byte() % 4),
            246 => c.slots = t.number() as u32,
            247 => c.chunk_bytes = t.number(),
            248 => c.kv_bytes = t.number(),
            249 => c.host_ceiling_bytes = t.number(),
            250 => c.disk_bytes_per_s = t.number(),
            251 => c.layer_compute_ns = t.number(),
            252 => c.reserved = 1,
            253 => c.expert_slots = t.number() as u32,
            254 => c.processor_layers = 1,
            255 => c.workspace_bytes = t.number(),
            _ => {}
        }
    })
}

impl Machine {
    pub(super) fn use_streams(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        match tape.byte() % 16 {
            0 => self.open_model(tape, err),
            1 => self.look_at_model(tape, err),
            2 => {
                self.open_model(tape, err);
                self.open_stream(tape, err);
            }
            3..=8 => self.acquire_unit(tape, err),
            9 | 10 => self.release_unit(tape, err),
            11 | 12 => self.tell_stream(tape, err),
            13 => self.look_at_stream(tape, err),
            14 if tape.byte() > 128 => self.open_stream(tape, err),
            14 => self.open_on_device(tape, err),
            _ => self.close_stream(tape, err),
        }
    }

    fn open_model(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.streams.models.live.len() >= 3 {
            return;
        }
        let path = self.streams.path();
        // A table that is accepted is always the same one.
        let ranges: Vec<kvt_file_range_t> = (0..u64::from(UNITS))
            .map(|number| kvt_file_range_t {
                file: u32::from(tape.byte() > 253),
                reserved: 0,
                offset: if tape.byte() > 253 { u64::MAX } else { number * UNIT_BYTES + 100 },
                bytes: if tape.byte() > 253 { 0 } else { UNIT_BYTES - 100 },
            })
            .collect();
        let entries: Vec<kvt_unit_entry_t> = ranges
            .iter()
            .zip(0u32..)
            .map(|(range, number)| kvt_unit_entry_t {
                name: NAMES[number as usize].as_ptr().cast(),
                name_bytes: if tape.byte() > 253 { 0 } else { 9 },
                role: if tape.byte() > 253 { 9 } else { KVT_ROLE_LAYER },
                layer: number,
                expert: 0,
                reserved: u32::from(tape.byte() > 253),
                ranges: range,
                range_count: 1,
            })
            .collect();
        let mut table = Padded::<kvt_model_table_t>::new(tape, |c, t| {
            (c.paths, c.path_count, c.path_stride_bytes) = (&path, 1, 16);
            (c.units, c.unit_count) = (entries.as_ptr(), entries.len() as u64);
            c.unit_stride_bytes = size_of::<kvt_unit_entry_t>() as u64;
            c.range_stride_bytes = size_of::<kvt_file_range_t>() as u64;
            c.flags = u64::from(t.byte() > 253);
        });
        let mut model = null_mut();
        // SAFETY: arrays with their lengths.
        let status = check(unsafe {
            match tape.byte() {
                250.. => kvt_model_open(&path, 1, 16, &mut model, err), // it is of no known format
                _ => kvt_model_table(table.ptr(), &mut model, err),
            }
        });
        assert_eq!(status == KVT_OK, !model.is_null());
        self.streams.models.live.extend((status == KVT_OK).then_some(model));
    }

    fn look_at_model(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let model = self.streams.models.pick(tape);
        let (number, mut found, mut count) = (unit(tape), 0, 0);
        let (mut info, mut file) = (out::<kvt_model_info_t>(), out::<kvt_model_file_t>());
        let (mut one, mut tensor) = (out::<kvt_unit_t>(), out::<kvt_tensor_t>());
        let (mut terms, mut memory) = (terms(tape, false), out::<kvt_stream_memory_t>());
        let (mut plan, mut forecast) = (out::<kvt_stream_plan_t>(), out::<kvt_forecast_t>());
        let mut parts = [kvt_part_t { tensor: 0, unit: 0, at: 0, from: 0, bytes: 0 }; 4];
        let mut homes = [kvt_unit_home_t { home: 0, on_processor: 0 }; 8];
        let mut words = [0; 4096];
        let memory = if tape.byte() > 128 { memory.ptr() } else { null_mut() };
        // SAFETY: outputs with their lengths.
        unsafe {
            check(kvt_model_info(model, info.ptr()));
            check(kvt_model_file(model, number, file.ptr()));
            check(kvt_model_unit(model, number, one.ptr()));
            check(kvt_model_tensor(model, number, tensor.ptr()));
            check(kvt_model_unit_parts(model, number, parts.as_mut_ptr(), 4, 32, &mut count));
            let room = u64::from(tape.byte() % 5);
            check(kvt_model_tensor_parts(model, number, parts.as_mut_ptr(), room, 32, &mut count));
            check(kvt_model_find(model, c"some unit#0".as_ptr(), 11, &mut found));
            check(kvt_model_layer(model, number, KVT_NONE, &mut found));
            let (terms, homes) = (terms.ptr(), homes.as_mut_ptr());
            let (plan, forecast) = (plan.ptr(), forecast.ptr());
            check(kvt_model_plan(model, terms, memory, plan, forecast, homes, 8, 8, err));
            let (kind, to) = (u32::from(tape.byte() % 3), words.as_mut_ptr());
            check(kvt_model_plan_words(model, terms, memory, kind, to, 4096, &mut count, err));
            let links = c"disk=3.3".as_ptr();
            check(kvt_model_what_if(model, terms, memory, links, 8, forecast, err));
            if tape.byte() > 200 {
                let mut after = model;
                let status = check(kvt_model_close(&mut after));
                self.streams.models.freed(model, after, status);
            }
        }
    }

    fn open_stream(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.streams.streams.live.len() >= 2 {
            return;
        }
        let (model, runtime) = (self.streams.models.pick(tape), self.runtimes.pick(tape));
        let device = self.some_device(tape);
        let mut terms = terms(tape, !device.is_null());
        let budget: *const kvt_budget_t =
            if tape.byte() > 200 { self.budgets.pick(tape) } else { null() };
        let order: Vec<u32> = (0..4).map(|_| unit(tape)).collect();
        let mut opts = Padded::<kvt_stream_opts_t>::new(tape, |c, t| {
            (c.model, c.terms, c.budget) = (model, terms.ptr(), budget);
            c.device = device;
            // Not from a map: that is for comparing with.
            c.flags = if t.byte() > 128 { t.flags() & !KVT_STREAM_MAPPED & !64 } else { 0 };
            if t.byte() > 220 {
                (c.order, c.order_count) = (order.as_ptr(), 4);
            }
            c.verify = u32::from(t.byte() > 200) * u32::from(t.byte() % 4);
            c.readers = if t.byte() > 250 { t.number() as u32 } else { 1 };
            c.marks = u32::from(t.byte() > 200) * u32::from(t.byte());
            c.reserved = u32::from(t.byte() > 253);
        });
        let mut stream = null_mut();
        // SAFETY: valid pointers.
        let status = check(unsafe { kvt_stream_open(runtime, opts.ptr(), &mut stream, err) });
        assert_eq!(status == KVT_OK, !stream.is_null());
        self.streams.streams.live.extend((status == KVT_OK).then_some(stream));
        if status == KVT_OK && !device.is_null() {
            self.streams.devices.push((stream, device));
        }
    }

    /// A streamer with a device, as it should be opened.
    fn open_on_device(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        self.open_model(tape, err);
        let full = self.streams.streams.live.len() >= 2;
        let (Some(&runtime), Some(&model)) =
            (self.runtimes.live.first(), self.streams.models.live.first())
        else {
            return;
        };
        let device = self.simulated_device(runtime);
        if full || device.is_null() {
            return;
        }
        let slots = u64::from(2 + tape.byte() % 9);
        let mut terms = Padded::<kvt_stream_terms_t>::new(&mut Tape(&[]), |c, _| {
            c.flags = KVT_TERMS_HOST_RESERVE | KVT_TERMS_KV;
            c.flags |= KVT_TERMS_DEVICE_CEILING | KVT_TERMS_DEVICE_SAFETY;
            c.device_ceiling_bytes = IMAGE_BYTES * slots;
            c.host_ceiling_bytes = 4 << 20;
        });
        let mut opts = Padded::<kvt_stream_opts_t>::new(&mut Tape(&[]), |c, _| {
            (c.model, c.terms, c.device, c.readers) = (model, terms.ptr(), device, 1);
        });
        let mut stream = null_mut();
        // SAFETY: valid pointers.
        if check(unsafe { kvt_stream_open(runtime, opts.ptr(), &mut stream, err) }) == KVT_OK {
            self.streams.streams.live.push(stream);
            self.streams.devices.push((stream, device));
        }
    }

    fn acquire_unit(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let (stream, number) = (self.streams.streams.pick(tape), unit(tape));
        let device = self.streams.device_of(stream);
        let some = if device.is_null() { 2 } else { 4 };
        let flags = if tape.byte() > 250 { tape.flags() } else { u64::from(tape.byte() % some) };
        let deadline_ns = self.now() + 2_000_000_000;
        let mut held = out::<kvt_held_t>();
        // SAFETY: valid pointers; what is given is as long as it says, until it is given back.
        unsafe {
            let status =
                check(kvt_stream_acquire(stream, number, flags, deadline_ns, held.ptr(), err));
            if status != KVT_OK {
                return;
            }
            let held = held.ptr().read_unaligned();
            assert_eq!((held.unit, held.bytes % 4096), (number, 0));
            let mut copied = vec![0; held.bytes as usize];
            let mut at = held.address.cast::<u8>();
            let mut whole = true;
            if held.memory == KVT_MEMORY_DEVICE {
                whole = self.bring(device, &held, &mut copied);
                at = copied.as_ptr();
            }
            let from = u64::from(number) * UNIT_BYTES + 100;
            let lead = from % 4096;
            let same = (0..UNIT_BYTES - 100)
                .all(|i| at.add((lead + i) as usize).read() == content(from + i));
            assert!(same || !whole, "unit {number} is not what is in the file");
            STREAMED.fetch_add(1, Ordering::SeqCst);
            self.streams.held.push((stream, held));
        }
    }

    fn release_unit(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let wrong = self.streams.streams.pick(tape);
        let Some(at) = self.streams.held.len().checked_sub(1 + usize::from(tape.byte() % 2)) else {
            return;
        };
        let (stream, mut held) = self.streams.held[at];
        // SAFETY: valid pointers.
        unsafe {
            let device = self.streams.device_of(stream);
            let after = u64::from(tape.byte() > 250);
            if after == 1 && device.is_null() {
                assert_ne!(check(kvt_stream_release(stream, &mut held, after, err)), KVT_OK);
            }
            if tape.byte() > 240 && wrong != stream {
                let mut none = kvt_held_t { place: 0, ..held };
                assert_ne!(check(kvt_stream_release(wrong, &mut none, 0, err)), KVT_OK);
            }
            let marks = !device.is_null() && tape.byte() > 100;
            let after = if marks { self.mark(device) } else { 0 };
            // A copy that has failed is told of here, too: the unit has gone back.
            let status = check(kvt_stream_release(stream, &mut held, after, err));
            assert!(status == KVT_OK || !device.is_null() && status == KVT_E_IO, "{status}");
            assert_eq!(check(kvt_stream_release(stream, &mut held, 0, err)), KVT_E_STATE);
        }
        self.streams.held.remove(at);
    }

    fn tell_stream(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let stream = self.streams.streams.pick(tape);
        let units = [unit(tape), unit(tape), unit(tape)];
        let mut room = Padded::<kvt_stream_room_t>::new(tape, |c, t| {
            c.host_bytes = IMAGE_BYTES * u64::from(1 + t.byte() % 9);
            c.flags = u64::from(t.byte() > 240) * t.flags();
            c.reserved = u32::from(t.byte() > 250);
        });
        let mut plan = out::<kvt_stream_plan_t>();
        let deadline_ns = self.now() + 2_000_000_000;
        // SAFETY: valid pointers.
        unsafe {
            match tape.byte() % 6 {
                0 => check(kvt_stream_pass_begin(stream, err)),
                1 => check(kvt_stream_pass_end(stream, err)),
                2 => check(kvt_stream_hint(stream, units.as_ptr(), 3, err)),
                3 => check(kvt_stream_verify(stream, units[0], null_mut(), err)),
                4 => check(kvt_stream_rebalance(stream, room.ptr(), plan.ptr(), err)),
                _ if tape.byte() > 200 => check(kvt_stream_load(stream, deadline_ns, err)),
                _ => 0,
            };
        }
    }

    fn look_at_stream(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let stream = self.streams.streams.pick(tape);
        let (mut plan, mut forecast) = (out::<kvt_stream_plan_t>(), out::<kvt_forecast_t>());
        let (mut stats, mut progress) =
            (out::<kvt_stream_stats_t>(), out::<kvt_stream_progress_t>());
        let mut homes = [kvt_unit_home_t { home: 0, on_processor: 0 }; 8];
        let mut words = [0; 4096];
        let (mut count, mut sum, mut address, number) = (0, 0, null(), unit(tape));
        let mut marks = [kvt_stream_mark_t { stage: 0, unit: 0, begin_ns: 0, end_ns: 0 }; 16];
        // SAFETY: outputs with their lengths.
        unsafe {
            let (rows, room) = (homes.as_mut_ptr(), u64::from(tape.byte() % 9));
            check(kvt_stream_plan(stream, plan.ptr(), forecast.ptr(), rows, room, 8));
            let (kind, to) = (u32::from(tape.byte() % 3), words.as_mut_ptr());
            check(kvt_stream_plan_words(stream, kind, to, 4096, &mut count));
            check(kvt_stream_what_if(stream, c"disk=2".as_ptr(), 6, forecast.ptr(), err));
            check(kvt_stream_stats(stream, stats.ptr()));
            check(kvt_stream_progress(stream, progress.ptr()));
            check(kvt_stream_marks(stream, marks.as_mut_ptr(), 16, 24, &mut count));
            check(kvt_stream_layers(stream, null_mut(), 0, 0, &mut count));
            check(kvt_stream_engine(stream, to, 4096, &mut count));
            check(kvt_stream_sum(stream, number, &mut sum));
            check(kvt_stream_fixed(stream, number, &mut address, null_mut()));
        }
    }

    fn close_stream(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let stream = self.streams.streams.pick(tape);
        let held = self.streams.held.iter().filter(|(of, _)| *of == stream).count();
        let mut after = stream;
        // SAFETY: a local handle variable.
        let status = check(unsafe { kvt_stream_close(&mut after, 0, err) });
        assert!(held == 0 || status == KVT_E_BUSY, "closed with {held} units in use");
        self.streams.streams.freed(stream, after, status);
    }
}

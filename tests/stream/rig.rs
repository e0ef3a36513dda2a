//! A streamer over a small model of which every byte is known, and an engine that looks at
//! every byte that it is given.

use std::path::PathBuf;
use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::base::fault::Faults;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::{Error, Result, Status};
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Copy, Device, Event, Memory, Stream, Way};
use kvtier::io::fixed::FixedFiles;
use kvtier::io::fixed::real::RealFixed;
use kvtier::io::fixed::simulated::{SimFile, SimFixed, SimFixedOpts, content};
use kvtier::stream::model::Model;
use kvtier::stream::plan::Wishes;
use kvtier::stream::streamer::{Held, How, Opts, Streamer};
use kvtier::stream::units::{Entry, NONE, Range, Role, Units};

use crate::model_files::{Scratch, Sizes, write_gguf};

pub const MIB: u64 = 1 << 20;
const SECOND_NS: u64 = 1_000_000_000;

/// A wait that ends long after any that is not for ever.
pub fn soon() -> u64 {
    Clock::real().now_ns() + 20 * SECOND_NS
}

pub fn patiently() -> How {
    How { deadline_ns: soon(), ..How::default() }
}

/// Files of a model, and what is in them.
pub struct Files {
    pub scratch: Scratch,
    pub paths: Vec<PathBuf>,
    pub model: Model,
    pub units: Units,
    pub bytes: Vec<Vec<u8>>,
}

pub fn dense(layers: u64) -> Sizes {
    Sizes { layers, ..Sizes::default() }
}

/// Layers larger than a chunk.
pub fn large(layers: u64) -> Sizes {
    Sizes { layers, hidden: 256, ffn: 512, vocabulary: 10, ..Sizes::default() }
}

pub fn experts(layers: u64, experts: u64) -> Sizes {
    Sizes { layers, experts, ..Sizes::default() }
}

impl Files {
    pub fn new(name: &str, sizes: &Sizes) -> Files {
        Files::split(name, sizes, 1)
    }

    pub fn split(name: &str, sizes: &Sizes, files: usize) -> Files {
        let scratch = Scratch::new(&format!("stream-{name}"));
        let paths = write_gguf(&scratch.0, "model", &sizes.gguf(), &sizes.metadata(), files);
        let model = Model::open(&paths).expect("a model");
        let units = Units::of(&model).expect("units");
        let read = |file: &kvtier::stream::model::File| std::fs::read(&file.path).expect("bytes");
        let bytes = model.files.iter().map(read).collect();
        Files { scratch, paths, model, units, bytes }
    }

    /// Layers of one size, and nothing else, as an engine names them.
    pub fn even(name: &str, layers: u32, bytes: u64) -> Files {
        let entry = |layer: u32| Entry {
            name: format!("layer {layer}"),
            role: Role::Layer,
            layer,
            expert: NONE,
            ranges: vec![Range { file: 0, offset: u64::from(layer) * bytes, bytes }],
        };
        let mut files =
            Files::table(name, &[bytes * u64::from(layers)], (0..layers).map(entry).collect());
        content(3, 0, &mut files.bytes[0]);
        std::fs::write(&files.paths[0], &files.bytes[0]).expect("written");
        files
    }

    /// Units as an engine names them, in files of these lengths that have nothing but zeros.
    pub fn table(name: &str, lengths: &[u64], entries: Vec<Entry>) -> Files {
        let scratch = Scratch::new(&format!("stream-{name}"));
        let path = |file: usize| scratch.0.join(format!("table-{file}"));
        let paths: Vec<PathBuf> = (0..lengths.len()).map(path).collect();
        for (path, &bytes) in paths.iter().zip(lengths) {
            std::fs::File::create(path).and_then(|f| f.set_len(bytes)).expect("a file");
        }
        let (model, units) = Units::table(&paths, entries).expect("units");
        let bytes = lengths.iter().map(|&bytes| vec![0; bytes as usize]).collect();
        Files { scratch, paths, model, units, bytes }
    }

    /// The same model in simulated files, with other bytes.
    pub fn simulate(&mut self, opts: SimFixedOpts) -> Arc<SimFixed> {
        let mut files = Vec::new();
        for (number, bytes) in (0..).zip(&mut self.bytes) {
            content(number + 7, 0, bytes);
            files.push(SimFile { bytes: bytes.len() as u64, seed: number + 7 });
        }
        Arc::new(SimFixed::new(Clock::real(), SimFixedOpts { files, ..opts }).expect("files"))
    }

    pub fn real(&self) -> Arc<dyn FixedFiles> {
        Arc::new(RealFixed::open(&self.paths, &Default::default()).expect("files"))
    }

    /// What all images take.
    pub fn all_bytes(&self) -> u64 {
        self.units.units.iter().map(|unit| unit.image_bytes).sum()
    }

    /// The units of a pass: all but experts, in order.
    pub fn order(&self) -> Vec<u32> {
        let units = &self.units.units;
        (0..units.len()).filter(|&u| units[u].role != Role::Expert).map(|u| u as u32).collect()
    }

    pub fn experts_of(&self, layer: u32) -> Vec<u32> {
        let of = |&u: &usize| {
            let unit = &self.units.units[u];
            unit.role == Role::Expert && unit.layer == layer
        };
        (0..self.units.units.len()).filter(of).map(|u| u as u32).collect()
    }

    /// Whether an image has the bytes of a unit.
    pub fn is_right(&self, unit: u32, image: &[u8]) -> bool {
        self.units.units[unit as usize].extents.iter().all(|extent| {
            let file = &self.bytes[extent.file as usize];
            let (from, at, bytes) =
                (extent.offset as usize, extent.at as usize, extent.bytes as usize);
            file[from..from + bytes] == image[at..at + bytes]
        })
    }
}

/// Only what is said here, of a machine that has plenty.
pub fn wishes() -> Wishes {
    Wishes {
        host_reserve_bytes: Some(0),
        device_safety_bytes: Some(0),
        kv_bytes: Some(0),
        chunk_bytes: MIB,
        ..Wishes::default()
    }
}

pub fn with_host(bytes: u64) -> Opts {
    let wishes = Wishes { host_ceiling_bytes: Some(bytes), ..wishes() };
    Opts { wishes, ..Opts::default() }
}

/// On a device. `homes`: of host memory, beside staging.
pub fn with_device(device: Arc<Simulated>, bytes: u64, homes: u64) -> Opts {
    let wishes = Wishes {
        host_ceiling_bytes: Some(2 * MIB + homes),
        device_ceiling_bytes: Some(bytes),
        staging_bytes: 2 * MIB,
        ..wishes()
    };
    Opts { wishes, device: Some(device), ..Opts::default() }
}

pub fn device(opts: SimulatedOpts) -> Arc<Simulated> {
    let memory_bytes = if opts.memory_bytes == 0 { 1 << 30 } else { opts.memory_bytes };
    let opts = SimulatedOpts { memory_bytes, ..opts };
    Arc::new(Simulated::new(Clock::real(), opts).expect("a device"))
}

/// A runtime, a streamer on it, and what it should give.
pub struct Rig {
    pub streamer: Streamer,
    pub device: Option<Arc<dyn Device>>,
    pub files: Files,
    pub runtime: Runtime,
}

pub fn runtime(faults: &str) -> Runtime {
    let faults = (!faults.is_empty()).then(|| Faults::parse(faults).expect("faults"));
    Runtime::open(RuntimeOpts { workers: 1, faults, ..RuntimeOpts::default() }).expect("a runtime")
}

impl Rig {
    pub fn open(files: Files, opts: Opts) -> Result<Rig> {
        let real = files.real();
        Rig::open_on(runtime(""), real, files, opts)
    }

    pub fn open_on(
        runtime: Runtime,
        fixed: Arc<dyn FixedFiles>,
        files: Files,
        opts: Opts,
    ) -> Result<Rig> {
        let (model, units, device) = (files.model.clone(), files.units.clone(), &opts.device);
        let device = device.clone();
        let streamer = Streamer::open_on(runtime.core(), fixed, model, units, opts)?;
        Ok(Rig { streamer, device, files, runtime })
    }

    /// Whether a unit that was acquired is what is in the file: its event first, if any.
    pub fn is_right(&self, held: &Held) -> Result<bool> {
        if let (Some(event), Some(device)) = (held.lease.event, &self.device) {
            device.wait(event, soon())?;
        }
        let image = &self.files.units.units[held.lease.unit as usize].image_bytes;
        assert_eq!(held.bytes, *image);
        // SAFETY: an image that is ours until it is released; a simulated device has its
        // memory in this process.
        let image = unsafe {
            let at = std::ptr::with_exposed_provenance::<u8>(held.address as usize);
            std::slice::from_raw_parts(at, held.bytes as usize)
        };
        Ok(self.files.is_right(held.lease.unit, image))
    }

    /// Has a unit, looks at it, gives it back.
    pub fn use_unit(&self, unit: u32, how: How) -> Result<()> {
        let held = loop {
            match self.streamer.acquire(unit, how) {
                Err(error) if how.poll && error.status() == Status::Again => {
                    std::thread::yield_now();
                }
                held => break held?,
            }
        };
        let right = self.is_right(&held);
        // Given early, it may turn out not to have come whole: then this says so.
        self.streamer.release(&held, None)?;
        let name = &self.files.units.units[unit as usize].name;
        assert!(right?, "{name} has wrong bytes at {:?}", held.lease);
        Ok(())
    }

    /// The same until nothing goes wrong; how often something did.
    pub fn insist(&self, unit: u32, how: How, fine: &[Status]) -> u32 {
        for failed in 0..50 {
            // What was given early and failed is still under way: then it is waited for.
            let how = How { early: how.early && failed == 0, ..how };
            let Err(error) = self.use_unit(unit, how) else { return failed };
            assert!(fine.contains(&error.status()), "unit {unit}: {error}");
        }
        panic!("unit {unit} fails again and again");
    }

    pub fn pass(&self, how: How) -> Result<()> {
        self.streamer.pass_begin()?;
        self.files.order().into_iter().try_for_each(|unit| self.use_unit(unit, how))?;
        self.streamer.pass_end()
    }

    /// A use on the device that ends after it was given back: the bytes are copied out by
    /// a batch, whose event says when.
    pub fn compute(&self, unit: u32, how: How) -> Result<Computing<'_>> {
        self.compute_with(&self.streamer.acquire(unit, How { early: true, ..how })?)
    }

    /// The same with a unit that is had already; it is given back, whatever this comes to.
    pub fn compute_with(&self, held: &Held) -> Result<Computing<'_>> {
        let device = self.device.as_ref().expect("a device");
        let mut out = vec![0u8; held.bytes as usize];
        let memory = held.memory;
        let copied = Copy::bytes(out.as_mut_ptr(), held.address, held.bytes, Way::Gather, memory);
        // SAFETY: the image is ours until the event that the release is told of, and what it
        // is copied to as long as `Computing` lives, which waits for it.
        let event = unsafe { device.submit(Stream(1), held.lease.event, &mut [copied?]) };
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                self.streamer.release(held, None)?;
                return Err(error);
            }
        };
        // The streamer has an event of its own: it releases that when it likes.
        // SAFETY: a batch without memory.
        let mark = unsafe { device.submit(Stream(1), None, &mut []) };
        if mark.is_err() {
            drop(device.wait(event, soon()));
        }
        let released = self.streamer.release(held, mark.ok());
        let computing = Computing { rig: self, unit: held.lease.unit, event, out };
        released.map(|()| computing)
    }

    pub fn closed(&self) {
        self.streamer.close(soon()).expect("it closes");
    }
}

/// Something that the device does with a unit.
pub struct Computing<'a> {
    rig: &'a Rig,
    unit: u32,
    event: Event,
    out: Vec<u8>,
}

impl Computing<'_> {
    pub fn end(&self) -> Result<()> {
        self.rig.device.as_ref().expect("a device").wait(self.event, soon())?;
        assert!(self.rig.files.is_right(self.unit, &self.out), "unit {} is wrong", self.unit);
        Ok(())
    }
}

impl Drop for Computing<'_> {
    fn drop(&mut self) {
        let device = self.rig.device.as_ref().expect("a device");
        drop(device.wait(self.event, soon()));
    }
}

pub fn status<T>(result: Result<T>) -> Status {
    result.err().as_ref().map_or(Status::Ok, Error::status)
}

/// Whether memory is the device's.
pub fn on_device(held: &Held) -> bool {
    held.memory == Memory::Device
}

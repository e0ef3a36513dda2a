//! A file that a GPU reads by itself, to see whether it does, and how fast.

use std::path::{Path, PathBuf};

use kvtier::base::clock::Clock;
use kvtier::base::status::{Error, Result, Status};
use kvtier::device::cuda::{CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::direct::DirectFile;
use kvtier::device::{Copy, Device, DeviceMemory, Direction, Memory, Stream};
use kvtier::fail;
use kvtier::io::files::{Access, FileId, Piece};
use kvtier::io::model_files::ModelFiles;
use kvtier::io::model_files::real::{ModelFilesOpts, RealModelFiles};

/// Where the CUDA driver is, if not where the system has it: for a run without a GPU.
const DRIVER: &str = "KVTIER_CUDA_LIBRARY";
/// Where cuFile is, likewise.
const CUFILE: &str = "KVTIER_CUFILE_LIBRARY";

/// How the tool opens a GPU.
pub fn opts(ordinal: u32, choice: CopyMethodChoice) -> CudaOpts {
    CudaOpts {
        library: std::env::var_os(DRIVER).map(Into::into),
        cufile: std::env::var_os(CUFILE).map(Into::into),
        ordinal,
        choice,
        ..CudaOpts::default()
    }
}

/// A file in a directory, and as much memory of a device. The file goes with this.
pub struct Trial<'a> {
    device: &'a Cuda,
    path: PathBuf,
    files: Option<RealModelFiles>,
    known: Option<DirectFile>,
    memory: Option<DeviceMemory>,
    bytes: u64,
}

fn byte_at(offset: usize) -> u8 {
    (offset / 4096 * 31 + offset % 251) as u8
}

impl<'a> Trial<'a> {
    /// Writes the file, and tells the device of it.
    pub fn new(device: &'a Cuda, dir: &Path, bytes: u64) -> Result<Trial<'a>> {
        let path = dir.join(format!(".kvtier-direct-{}", std::process::id()));
        let content: Vec<u8> = (0..bytes as usize).map(byte_at).collect();
        let mut trial = Trial { device, path, files: None, known: None, memory: None, bytes };
        let written = std::fs::File::create(&trial.path).and_then(|mut file| {
            std::io::Write::write_all(&mut file, &content)?;
            file.sync_all()
        });
        written.map_err(|error| {
            Error::new(Status::Io, format!("{}: {error}", trial.path.display()))
        })?;
        let direct = device.direct()?;
        let paths = [trial.path.clone()];
        let of = trial
            .files
            .insert(RealModelFiles::open(&paths, &ModelFilesOpts::default())?)
            .descriptor(0)?;
        // SAFETY: the file stays open, and the memory the device's, until this is dropped.
        unsafe {
            trial.known = Some(direct.add_file(of.number, of.file_system)?);
            let address = trial.memory.insert(device.allocate(bytes)?).address;
            direct.add_memory(address, bytes)?;
        }
        Ok(trial)
    }

    /// Where it is read to.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address)
    }

    /// Reads a part straight into the device's memory.
    pub fn read(&self, offset: u64, bytes: u64) -> Result<()> {
        let file = self.known.ok_or(Status::State)?;
        // SAFETY: memory of this alone; nothing that the device does uses it.
        unsafe { self.device.direct()?.read(file, offset, self.address() + offset, bytes) }
    }

    /// Reads a part into host memory, as much as it is to be.
    pub fn read_to_host(&self, offset: u64, host: *mut u8, bytes: u64) -> Result<()> {
        let files = self.files.as_ref().ok_or(Status::State)?;
        let mut pieces = [Piece::one(FileId(0), Access::Read, offset, host, bytes)];
        // SAFETY: the caller's buffer, which has as much and nobody else uses.
        unsafe { files.transfer(&mut pieces) };
        let [piece] = pieces;
        piece.result
    }

    /// Whether all of it comes as it was written.
    pub fn check(&self) -> Result<()> {
        self.read(0, self.bytes)?;
        let mut back = vec![0u8; self.bytes as usize];
        let (host, address) = (back.as_mut_ptr(), self.address());
        let copy = Copy::bytes(host, address, self.bytes, Direction::Gather, Memory::Device)?;
        // SAFETY: both stay until the event has come.
        let event = unsafe { self.device.submit(Stream(0), None, &mut [copy]) }?;
        self.device.wait(event, 0)?;
        self.device.release(event)?;
        if (0..).zip(&back).any(|(at, byte)| *byte != byte_at(at)) {
            fail!(Corrupt, "other bytes came to the device than were written");
        }
        Ok(())
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        if let Ok(direct) = self.device.direct() {
            // SAFETY: told of once; no read is under way. What was not told of is not known.
            unsafe {
                drop(direct.remove_memory(self.address()));
                self.known.take().map(|known| direct.remove_file(known));
            }
        }
        if let Some(memory) = self.memory.take() {
            // SAFETY: nobody uses it any more.
            drop(unsafe { self.device.free(&memory) });
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            eprintln!("kvtier: {} stays: {error}", self.path.display());
        }
    }
}

/// Opens the first GPU.
pub fn first() -> Result<Cuda> {
    Cuda::open(Clock::real(), &opts(0, CopyMethodChoice::default()))
}

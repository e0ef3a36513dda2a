//! Direct reads from a file into GPU memory: whether they work, for `kvtier doctor`, and how fast
//! they are, for `kvtier-bench`.

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

/// Environment variable with the path of the CUDA driver, for tests without a GPU.
const DRIVER: &str = "KVTIER_CUDA_LIBRARY";
/// Environment variable with the path of cuFile, for tests without a GPU.
const CUFILE: &str = "KVTIER_CUFILE_LIBRARY";

/// The options with which the tool opens a GPU.
pub fn opts(ordinal: u32, choice: CopyMethodChoice) -> CudaOpts {
    CudaOpts {
        library: std::env::var_os(DRIVER).map(Into::into),
        cufile: std::env::var_os(CUFILE).map(Into::into),
        ordinal,
        choice,
        ..CudaOpts::default()
    }
}

/// A temporary file and device memory of the same size. The drop removes the file.
pub struct DirectReadTest<'a> {
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

impl<'a> DirectReadTest<'a> {
    /// Writes the file and registers it and the memory with the device.
    pub fn new(device: &'a Cuda, dir: &Path, bytes: u64) -> Result<DirectReadTest<'a>> {
        let path = dir.join(format!(".kvtier-direct-{}", std::process::id()));
        let content: Vec<u8> = (0..bytes as usize).map(byte_at).collect();
        let mut test =
            DirectReadTest { device, path, files: None, known: None, memory: None, bytes };
        let written = std::fs::File::create(&test.path).and_then(|mut file| {
            std::io::Write::write_all(&mut file, &content)?;
            file.sync_all()
        });
        written
            .map_err(|error| Error::new(Status::Io, format!("{}: {error}", test.path.display())))?;
        let direct = device.direct()?;
        let paths = [test.path.clone()];
        let of = test
            .files
            .insert(RealModelFiles::open(&paths, &ModelFilesOpts::default())?)
            .descriptor(0)?;
        // SAFETY: the file stays open and the memory allocated until the drop.
        unsafe {
            test.known = Some(direct.add_file(of.number, of.file_system)?);
            let address = test.memory.insert(device.allocate(bytes)?).address;
            direct.add_memory(address, bytes)?;
        }
        Ok(test)
    }

    /// The address of the device memory.
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address)
    }

    /// Reads a part directly into the device memory.
    pub fn read(&self, offset: u64, bytes: u64) -> Result<()> {
        let file = self.known.ok_or(Status::State)?;
        // SAFETY: memory of this test alone; no work of the device uses it.
        unsafe { self.device.direct()?.read(file, offset, self.address() + offset, bytes) }
    }

    /// Reads a part into host memory.
    pub fn read_to_host(&self, offset: u64, host: *mut u8, bytes: u64) -> Result<()> {
        let files = self.files.as_ref().ok_or(Status::State)?;
        let mut pieces = [Piece::one(FileId(0), Access::Read, offset, host, bytes)];
        // SAFETY: the caller's buffer has `bytes` bytes, and no other code uses it.
        unsafe { files.transfer(&mut pieces) };
        let [piece] = pieces;
        piece.result
    }

    /// Reads the whole file and compares it with the bytes that were written.
    pub fn check(&self) -> Result<()> {
        self.read(0, self.bytes)?;
        let mut back = vec![0u8; self.bytes as usize];
        let (host, address) = (back.as_mut_ptr(), self.address());
        let copy = Copy::bytes(host, address, self.bytes, Direction::Gather, Memory::Device)?;
        // SAFETY: both stay valid until the event has completed.
        let event = unsafe { self.device.submit(Stream(0), None, &mut [copy]) }?;
        self.device.wait(event, 0)?;
        self.device.release(event)?;
        if (0..).zip(&back).any(|(at, byte)| *byte != byte_at(at)) {
            fail!(Corrupt, "the device received bytes that differ from the file");
        }
        Ok(())
    }
}

impl Drop for DirectReadTest<'_> {
    fn drop(&mut self) {
        if let Ok(direct) = self.device.direct() {
            // SAFETY: registered at most once, and no read is in progress. Removing an
            // unregistered file or address is an error without effect.
            unsafe {
                drop(direct.remove_memory(self.address()));
                self.known.take().map(|known| direct.remove_file(known));
            }
        }
        if let Some(memory) = self.memory.take() {
            // SAFETY: no code uses the memory any more.
            drop(unsafe { self.device.free(&memory) });
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            eprintln!("kvtier: cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Opens the first GPU.
pub fn first() -> Result<Cuda> {
    Cuda::open(Clock::real(), &opts(0, CopyMethodChoice::default()))
}

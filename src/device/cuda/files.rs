//! Files that are read straight into device memory, by cuFile.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::device::cuda::abi::Handle;
use crate::device::cuda::cufile::{CuFile, check, note, short};
use crate::device::cuda::cufile_abi::{Descriptor, DescriptorOf, KIND_DESCRIPTOR};
use crate::device::cuda::{Cuda, CudaOpts};
use crate::device::direct::{DIRECT_ALIGN_BYTES, Direct, DirectFile};
use crate::fail;

/// ext2 to ext4, by the kernel's number.
const EXT: u64 = 0xef53;
/// XFS.
const XFS: u64 = 0x5846_5342;

/// What a device has of cuFile.
pub struct Files {
    library: Option<PathBuf>,
    file_systems: Vec<u64>,
    registered: Mutex<Registered>,
}

#[derive(Default)]
struct Registered {
    cufile: Option<Arc<CuFile>>,
    /// Handles of files, by number.
    files: BTreeMap<u64, usize>,
    /// Memory, by address: how much.
    memory: BTreeMap<u64, u64>,
    last: u64,
}

impl Files {
    /// Nothing is loaded yet.
    pub fn new(opts: &CudaOpts) -> Files {
        Files {
            library: opts.cufile.clone(),
            file_systems: opts.file_systems.clone(),
            registered: Mutex::new(Registered::default()),
        }
    }

    /// Takes back what was made known, and closes it. The thread is in the device's context.
    pub fn close(&self) {
        let registered = std::mem::take(&mut *self.registered.lock());
        let Some(cufile) = registered.cufile else { return };
        for &handle in registered.files.values() {
            // SAFETY: a file that was made known, of which no read is under way.
            unsafe { (cufile.calls.remove_file)(handle as Handle) };
        }
        for &address in registered.memory.keys() {
            // SAFETY: memory that was made known, which no read goes to.
            let status = unsafe { (cufile.calls.remove_memory)(address as Handle) };
            note("cuFileBufDeregister", status);
        }
    }
}

impl Cuda {
    /// Loads and opens cuFile, the first time.
    pub(super) fn begin_files(&self) -> Result<()> {
        let mut registered = self.files.registered.lock();
        if registered.cufile.is_none() {
            Cuda::check_alive(&self.inner.lock())?;
            let _guard = self.enter()?;
            registered.cufile = Some(Arc::new(CuFile::open(self.files.library.as_deref())?));
        }
        Ok(())
    }

    fn cufile(&self) -> Result<Arc<CuFile>> {
        Cuda::check_alive(&self.inner.lock())?;
        self.files.registered.lock().cufile.clone().ok_or_else(|| Status::State.into())
    }

    /// Only of local file systems is it said that what does not go directly fails: others may
    /// try again by way of host memory, whatever was set.
    fn check_file_system(&self, number: u64) -> Result<()> {
        if ![EXT, XFS].contains(&number) && !self.files.file_systems.contains(&number) {
            fail!(
                Unavailable,
                "the file system ({number:#x}) is neither ext4 nor XFS: nobody can tell whether \
                 cuFile reads it directly"
            );
        }
        Ok(())
    }
}

impl Direct for Cuda {
    fn describe(&self) -> String {
        self.cufile().map_or_else(|error| error.to_string(), |cufile| cufile.description.clone())
    }

    unsafe fn add_file(&self, descriptor: i32, file_system: u64) -> Result<DirectFile> {
        self.check_file_system(file_system)?;
        let cufile = self.cufile()?;
        let file = DescriptorOf { descriptor };
        let mut asked = Descriptor { kind: KIND_DESCRIPTOR, file, calls: std::ptr::null() };
        let mut handle: Handle = std::ptr::null_mut();
        let _guard = self.enter()?;
        // SAFETY: a description, and a place for a handle.
        let status = unsafe { (cufile.calls.add_file)(&mut handle, &mut asked) };
        if let Err(error) = check("cuFileHandleRegister", status) {
            fail!(Unavailable, "{}", error.message());
        }
        let mut registered = self.files.registered.lock();
        registered.last += 1;
        let number = registered.last;
        registered.files.insert(number, handle as usize);
        Ok(DirectFile(number))
    }

    unsafe fn remove_file(&self, file: DirectFile) -> Result<()> {
        let cufile = self.files.registered.lock().cufile.clone().ok_or(Status::State)?;
        let handle = self.files.registered.lock().files.remove(&file.0).ok_or(Status::Handle)?;
        let _guard = self.enter()?;
        // SAFETY: made known once; no read is under way, as the caller promises.
        unsafe { (cufile.calls.remove_file)(handle as Handle) };
        Ok(())
    }

    unsafe fn add_memory(&self, address: u64, bytes: u64) -> Result<()> {
        if address % DIRECT_ALIGN_BYTES != 0 || bytes == 0 {
            fail!(Invalid, "{bytes} bytes at {address:#x}: not on {DIRECT_ALIGN_BYTES} bytes");
        }
        let cufile = self.cufile()?;
        let length = usize::try_from(bytes).map_err(|_| Status::Limit)?;
        if self.files.registered.lock().memory.contains_key(&address) {
            fail!(Invalid, "the memory at {address:#x} is known already");
        }
        let _guard = self.enter()?;
        // SAFETY: memory of the device's, as the caller promises; it is not touched here.
        let status = unsafe { (cufile.calls.add_memory)(address as Handle, length, 0) };
        check("cuFileBufRegister", status)?;
        self.files.registered.lock().memory.insert(address, bytes);
        Ok(())
    }

    unsafe fn remove_memory(&self, address: u64) -> Result<()> {
        let cufile = self.files.registered.lock().cufile.clone().ok_or(Status::State)?;
        self.files.registered.lock().memory.remove(&address).ok_or(Status::Handle)?;
        let _guard = self.enter()?;
        // SAFETY: made known once; no read is under way, as the caller promises.
        let status = unsafe { (cufile.calls.remove_memory)(address as Handle) };
        check("cuFileBufDeregister", status)
    }

    unsafe fn read(&self, file: DirectFile, offset: u64, address: u64, bytes: u64) -> Result<()> {
        let cufile = self.cufile()?;
        if [offset, address, bytes].iter().any(|number| number % DIRECT_ALIGN_BYTES != 0) {
            // cuFile would read elsewhere first, and copy.
            fail!(Invalid, "a direct read is not on {DIRECT_ALIGN_BYTES} bytes");
        }
        let registered = self.files.registered.lock();
        let handle = *registered.files.get(&file.0).ok_or(Status::Handle)?;
        let place =
            registered.memory.range(..=address).next_back().map(|(base, all)| (*base, *all));
        drop(registered);
        // Into other memory cuFile would read by way of buffers of its own, if it has any.
        let inside = |(base, all): &(u64, u64)| {
            all.checked_sub(address - base).is_some_and(|left| bytes <= left)
        };
        let Some((base, _)) = place.filter(inside) else {
            fail!(Invalid, "{bytes} bytes at {address:#x}: not memory for direct reads");
        };
        let length = isize::try_from(bytes).map_err(|_| Status::Limit)?;
        let offset = i64::try_from(offset).map_err(|_| Status::Limit)?;
        let _guard = self.enter()?;
        // SAFETY: a file and memory that are known; nobody else uses it, as the caller promises.
        let got = unsafe {
            let at = (address - base) as i64; // inside of memory: far below the limit
            (cufile.calls.read)(handle as Handle, base as Handle, length as usize, offset, at)
        };
        if got == length { Ok(()) } else { Err(short(got, bytes)) }
    }
}

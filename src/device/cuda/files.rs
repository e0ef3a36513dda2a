//! Direct file reads by cuFile.

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

/// Kernel's number of ext2, ext3 and ext4.
const EXT: u64 = 0xef53;
/// Kernel's number of XFS.
const XFS: u64 = 0x5846_5342;

/// cuFile state of a device.
pub struct Files {
    library: Option<PathBuf>,
    file_systems: Vec<u64>,
    registered: Mutex<Registered>,
}

#[derive(Default)]
struct Registered {
    cufile: Option<Arc<CuFile>>,
    /// File handles by number.
    files: BTreeMap<u64, usize>,
    /// Registered memory: length by address.
    memory: BTreeMap<u64, u64>,
    last: u64,
}

impl Files {
    /// State without a loaded library.
    pub fn new(opts: &CudaOpts) -> Files {
        Files {
            library: opts.cufile.clone(),
            file_systems: opts.file_systems.clone(),
            registered: Mutex::new(Registered::default()),
        }
    }

    /// Deregisters everything and closes cuFile. The device's context is current.
    pub fn close(&self) {
        let registered = std::mem::take(&mut *self.registered.lock());
        let Some(cufile) = registered.cufile else { return };
        for &handle in registered.files.values() {
            // SAFETY: a registered file without reads in flight.
            unsafe { (cufile.calls.remove_file)(handle as Handle) };
        }
        for &address in registered.memory.keys() {
            // SAFETY: registered memory without reads in flight.
            let status = unsafe { (cufile.calls.remove_memory)(address as Handle) };
            note("cuFileBufDeregister", status);
        }
    }
}

impl Cuda {
    /// Loads and opens cuFile on first use.
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

    /// Accepts local file systems only: others may retry through host memory whatever was
    /// configured.
    fn check_file_system(&self, number: u64) -> Result<()> {
        if ![EXT, XFS].contains(&number) && !self.files.file_systems.contains(&number) {
            fail!(
                Unavailable,
                "file system {number:#x} is neither ext4 nor XFS: cuFile may read it through host \
                 memory; add it to file_systems if it reads directly"
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
        let mut descriptor = Descriptor { kind: KIND_DESCRIPTOR, file, calls: std::ptr::null() };
        let mut handle: Handle = std::ptr::null_mut();
        let _guard = self.enter()?;
        // SAFETY: a description, and a place for a handle.
        let status = unsafe { (cufile.calls.add_file)(&mut handle, &mut descriptor) };
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
        // SAFETY: registered once; no read is in flight, as the caller promises.
        unsafe { (cufile.calls.remove_file)(handle as Handle) };
        Ok(())
    }

    unsafe fn add_memory(&self, address: u64, bytes: u64) -> Result<()> {
        if address % DIRECT_ALIGN_BYTES != 0 || bytes == 0 {
            fail!(
                Invalid,
                "{bytes} bytes at {address:#x}: the address must be a multiple of {DIRECT_ALIGN_BYTES}, the length positive"
            );
        }
        let cufile = self.cufile()?;
        let length = usize::try_from(bytes).map_err(|_| Status::Limit)?;
        if self.files.registered.lock().memory.contains_key(&address) {
            fail!(Invalid, "the memory at {address:#x} is registered already");
        }
        let _guard = self.enter()?;
        // SAFETY: device memory, as the caller promises; it is not accessed here.
        let status = unsafe { (cufile.calls.add_memory)(address as Handle, length, 0) };
        check("cuFileBufRegister", status)?;
        self.files.registered.lock().memory.insert(address, bytes);
        Ok(())
    }

    unsafe fn remove_memory(&self, address: u64) -> Result<()> {
        let cufile = self.files.registered.lock().cufile.clone().ok_or(Status::State)?;
        self.files.registered.lock().memory.remove(&address).ok_or(Status::Handle)?;
        let _guard = self.enter()?;
        // SAFETY: registered once; no read is in flight, as the caller promises.
        let status = unsafe { (cufile.calls.remove_memory)(address as Handle) };
        check("cuFileBufDeregister", status)
    }

    unsafe fn read(&self, file: DirectFile, offset: u64, address: u64, bytes: u64) -> Result<()> {
        let cufile = self.cufile()?;
        if [offset, address, bytes].iter().any(|number| number % DIRECT_ALIGN_BYTES != 0) {
            // cuFile would read to a bounce buffer, and copy.
            fail!(
                Invalid,
                "a direct read at {offset} of {bytes} bytes to {address:#x}: all must be multiples of {DIRECT_ALIGN_BYTES}"
            );
        }
        let registered = self.files.registered.lock();
        let handle = *registered.files.get(&file.0).ok_or(Status::Handle)?;
        let place =
            registered.memory.range(..=address).next_back().map(|(base, all)| (*base, *all));
        drop(registered);
        // cuFile would read to other memory through bounce buffers, if it has any.
        let inside = |(base, all): &(u64, u64)| {
            all.checked_sub(address - base).is_some_and(|left| bytes <= left)
        };
        let Some((base, _)) = place.filter(inside) else {
            fail!(Invalid, "{bytes} bytes at {address:#x} are not registered for direct reads");
        };
        let length = isize::try_from(bytes).map_err(|_| Status::Limit)?;
        let offset = i64::try_from(offset).map_err(|_| Status::Limit)?;
        let _guard = self.enter()?;
        // SAFETY: a registered file, and registered memory that nothing else uses, as the caller
        // promises.
        let got = unsafe {
            let at = (address - base) as i64; // inside of memory: far below the limit
            (cufile.calls.read)(handle as Handle, base as Handle, length as usize, offset, at)
        };
        if got == length { Ok(()) } else { Err(short(got, bytes)) }
    }
}

//! Kernel modules, loaded once for a device on first use, and launches. All kernels take one
//! argument.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::Ordering;
use crate::device::call::Call;
use crate::device::cuda::Cuda;
use crate::device::cuda::abi::{
    Handle, JIT_ERROR_BYTES, JIT_ERRORS, MAX_SHARED, PLAIN_SHARED_BYTES,
};
use crate::device::cuda::kernels::{MAX_STEPS, MODULES, Module, Step, steps};
use crate::device::cuda::submit::Work;
use crate::device::{Event, Stream};
use crate::fail;

/// Bytes kept of a compiler log.
const LOG_BYTES: usize = 4096;

/// A prepared launch: `call` is the index of its argument.
pub struct Launch {
    pub function: usize,
    pub step: Step,
    pub call: usize,
}

/// Loaded modules and load failures.
#[derive(Default)]
pub struct Loaded {
    modules: Vec<Option<Result<usize>>>,
    functions: Vec<(usize, &'static str, usize)>,
    /// Allowed dynamic shared memory of each function, in the same order.
    allowed: Vec<u32>,
}

impl Loaded {
    /// Modules to unload.
    pub fn modules(&self) -> impl Iterator<Item = Handle> {
        self.modules.iter().flatten().flatten().map(|module| *module as Handle)
    }

    /// Why requested kernels are unavailable, by module.
    pub fn failures(&self) -> Vec<String> {
        let failed = |module: &Option<Result<usize>>| {
            Some(module.as_ref()?.as_ref().err()?.message().to_string())
        };
        self.modules.iter().filter_map(failed).collect()
    }
}

/// The kernels in all modules.
pub fn kernels() -> u64 {
    MODULES.iter().fold(0, |set, source| set | source.kind_bits())
}

impl Cuda {
    /// Implements [`crate::device::Device::launch`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn launch_all(
        &self,
        stream: Stream,
        after: Option<Event>,
        calls: &[Call],
    ) -> Result<Event> {
        if stream.0 as usize >= self.streams.len() {
            fail!(Invalid, "stream {}: the device has {}", stream.0, self.streams.len());
        }
        if calls.len() > crate::device::MAX_COPIES {
            fail!(Limit, "{} kernels in a batch exceed the limit", calls.len());
        }
        Cuda::check_alive(&self.inner.lock())?;
        let launches = self.prepare(calls)?;
        let work = Work::Kernels(&launches, calls);
        self.put(&mut self.inner.lock(), stream.0 as usize, after, &work)
    }

    /// Loads the modules that calls need.
    pub(super) fn prepare(&self, calls: &[Call]) -> Result<Vec<Launch>> {
        let (mut launches, mut found) = (Vec::new(), Vec::new());
        launches.try_reserve(calls.len() * MAX_STEPS).map_err(|_| Status::NoMem)?;
        let _guard = self.enter()?;
        let mut loaded = self.loaded.lock();
        for (at, call) in calls.iter().enumerate() {
            found.clear();
            steps(call, self.shared_bytes, &mut found)
                .map_err(|error| error.within(&format!("kernel {at}")))?;
            for step in &found {
                let function = self.function(&mut loaded, step)?;
                launches.push(Launch { function, step: *step, call: at });
            }
        }
        Ok(launches)
    }

    /// Driver's handle of a function, with the shared memory that a launch needs.
    fn function(&self, loaded: &mut Loaded, step: &Step) -> Result<usize> {
        let same =
            |(module, name, _): &(usize, &str, usize)| *module == step.module && *name == step.name;
        let at = match loaded.functions.iter().position(same) {
            Some(at) => at,
            None => {
                let module = self.module(loaded, step.module)?;
                let name = CString::new(step.name).map_err(|_| Status::Invalid)?;
                let mut function: Handle = std::ptr::null_mut();
                // SAFETY: a place for a handle, a loaded module, and a NUL-terminated name.
                let code = unsafe {
                    (self.driver.find_function)(&mut function, module as Handle, name.as_ptr())
                };
                self.driver.check("cuModuleGetFunction", code)?;
                loaded.functions.push((step.module, step.name, function as usize));
                loaded.allowed.push(PLAIN_SHARED_BYTES);
                loaded.functions.len() - 1
            }
        };
        let function = loaded.functions[at].2;
        if step.shared_bytes > loaded.allowed[at] {
            // SAFETY: a function of a loaded module.
            let code = unsafe {
                (self.driver.set_function)(
                    function as Handle,
                    MAX_SHARED,
                    step.shared_bytes as c_int,
                )
            };
            self.driver.check("cuFuncSetAttribute", code)?;
            loaded.allowed[at] = step.shared_bytes;
        }
        Ok(function)
    }

    /// Loads all modules now; [`Cuda::describe`] names the unavailable ones.
    pub fn load_kernels(&self) -> Result<()> {
        let _guard = self.enter()?;
        let mut loaded = self.loaded.lock();
        for which in 0..MODULES.len() {
            // The failure is stored in `loaded`.
            let _ = self.module(&mut loaded, which);
        }
        Ok(())
    }

    /// A module, loaded on first use. A failed load is not retried.
    fn module(&self, loaded: &mut Loaded, which: usize) -> Result<usize> {
        let Some(source) = MODULES.get(which) else { return Err(Status::Unsupported.into()) };
        if loaded.modules.len() <= which {
            loaded.modules.resize_with(which + 1, || None);
        }
        if loaded.modules[which].is_none() {
            let found = self.load(source).map_err(|error| error.within(&source.words()));
            if let Err(error) = &found {
                log::error!("{}", error.message());
                self.kernels_fail.fetch_or(source.kind_bits(), Ordering::AcqRel);
            }
            loaded.modules[which] = Some(found);
        }
        match &loaded.modules[which] {
            Some(found) => found.clone(),
            None => Err(Status::Unavailable.into()),
        }
    }

    /// Loads machine code for the device's capability, else PTX, which the driver compiles.
    fn load(&self, source: &Module) -> Result<usize> {
        if self.capability == 90 {
            match self.load_image(&source.cubin_90()?) {
                Ok(module) => return Ok(module),
                Err(error) => log::warn!(
                    "machine code of {} does not load, the driver compiles PTX: {}",
                    source.name,
                    error.message()
                ),
            }
        }
        self.load_image(&source.ptx()?)
    }

    fn load_image(&self, image: &[u8]) -> Result<usize> {
        let mut log = vec![0u8; LOG_BYTES];
        let options = [JIT_ERRORS, JIT_ERROR_BYTES];
        // The interface passes numbers as pointers; the driver writes the log's length there.
        let log_bytes: *mut c_void = std::ptr::without_provenance_mut(LOG_BYTES - 1);
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log_bytes];
        let mut module: Handle = std::ptr::null_mut();
        // SAFETY: a place for a handle, an image in its format, as many values as options, and a
        // log that is longer than stated, so it ends with a zero.
        let code = unsafe {
            (self.driver.load_module)(
                &mut module,
                image.as_ptr().cast(),
                options.len() as c_uint,
                options.as_ptr(),
                values.as_mut_ptr(),
            )
        };
        if code == 0 {
            return Ok(module as usize);
        }
        // SAFETY: the log's last byte stays zero.
        let words = unsafe { CStr::from_ptr(log.as_ptr().cast::<c_char>()) }.to_string_lossy();
        let error = self.driver.error("cuModuleLoadDataEx", code);
        let text = format!("{} {}", error.message(), words.trim());
        Err(Error::new(Status::Unavailable, text.trim_end()))
    }

    /// Launches one call with functions that were loaded before.
    ///
    /// # Safety
    /// As for [`Cuda::issue_kernels`].
    pub(super) unsafe fn issue_call(
        &self,
        call: &Call,
        (found, functions): (&mut Vec<Step>, &[(&str, usize)]),
        stream: Handle,
        begun: &mut bool,
    ) -> Result<()> {
        found.clear();
        steps(call, self.shared_bytes, found)?;
        for step in found.iter() {
            let function = functions.iter().find(|(name, _)| *name == step.name);
            let Some(&(_, function)) = function else { return Err(Status::Unsupported.into()) };
            let launch = Launch { function, step: *step, call: 0 };
            // SAFETY: the caller's promise.
            unsafe { self.issue_kernels(&[launch], &[*call], stream, begun)? };
        }
        Ok(())
    }

    /// Launches kernels on a stream.
    ///
    /// # Safety
    /// As for [`crate::device::Device::launch`]. The stream is of this context, which is current.
    pub(super) unsafe fn issue_kernels(
        &self,
        launches: &[Launch],
        calls: &[Call],
        stream: Handle,
        begun: &mut bool,
    ) -> Result<()> {
        for launch in launches {
            let Some(call) = calls.get(launch.call) else { return Err(Status::Invalid.into()) };
            let argument: *mut c_void = std::ptr::from_ref(call).cast_mut().cast();
            let arguments = [argument];
            let Step { grid, block, shared_bytes, .. } = launch.step;
            // SAFETY: a loaded function that takes one `Call` by value, which the driver copies
            // before it returns. The caller guarantees the memory in it.
            let code = unsafe {
                (self.driver.launch)(
                    launch.function as Handle,
                    grid[0],
                    grid[1],
                    grid[2],
                    block[0],
                    block[1],
                    block[2],
                    shared_bytes,
                    stream,
                    arguments.as_ptr(),
                    std::ptr::null(),
                )
            };
            self.driver.check("cuLaunchKernel", code)?;
            *begun = true;
        }
        Ok(())
    }
}

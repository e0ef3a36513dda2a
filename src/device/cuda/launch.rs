//! Kernels: loaded when the first of a source is asked for, once for a device, and launched with
//! the one argument that all of them take.

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

/// The words of a compiler that are kept.
const LOG_BYTES: usize = 4096;

/// One launch, ready: which of the calls is its argument.
pub struct Launch {
    pub function: usize,
    pub step: Step,
    pub call: usize,
}

/// What was loaded, and why the rest was not.
#[derive(Default)]
pub struct Loaded {
    modules: Vec<Option<Result<usize>>>,
    functions: Vec<(usize, &'static str, usize)>,
    /// The most shared memory that each function was allowed, in the same order.
    allowed: Vec<u32>,
}

impl Loaded {
    /// What is to be unloaded.
    pub fn modules(&self) -> impl Iterator<Item = Handle> {
        self.modules.iter().flatten().flatten().map(|module| *module as Handle)
    }

    /// Why kernels that were asked for cannot be had, source by source.
    pub fn failures(&self) -> Vec<String> {
        let failed = |module: &Option<Result<usize>>| {
            Some(module.as_ref()?.as_ref().err()?.message().to_string())
        };
        self.modules.iter().filter_map(failed).collect()
    }
}

/// The kernels that there are sources of.
pub fn kernels() -> u64 {
    MODULES.iter().fold(0, |set, source| set | source.kind_bits())
}

impl Cuda {
    /// What [`crate::device::Device::launch`] says.
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
            fail!(Invalid, "stream {} of {}", stream.0, self.streams.len());
        }
        if calls.len() > crate::device::MAX_COPIES {
            fail!(Limit, "{} kernels in a batch", calls.len());
        }
        Cuda::check_alive(&self.inner.lock())?;
        let launches = self.prepare(calls)?;
        let work = Work::Kernels(&launches, calls);
        self.put(&mut self.inner.lock(), stream.0 as usize, after, &work)
    }

    /// Loads what the calls need.
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

    /// The driver's handle of a function, with as much shared memory as a launch asks for.
    fn function(&self, loaded: &mut Loaded, step: &Step) -> Result<usize> {
        let same =
            |(module, name, _): &(usize, &str, usize)| *module == step.module && *name == step.name;
        let at = match loaded.functions.iter().position(same) {
            Some(at) => at,
            None => {
                let module = self.module(loaded, step.module)?;
                let name = CString::new(step.name).map_err(|_| Status::Invalid)?;
                let mut function: Handle = std::ptr::null_mut();
                // SAFETY: a place for a handle, a module that is loaded, and a name that ends
                // with a zero.
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
            // SAFETY: a function of a module that is loaded.
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

    /// Loads all kernels there are, for those who want to know now whether they can be had; what
    /// [`Cuda::describe`] says of them is the answer.
    pub fn load_kernels(&self) -> Result<()> {
        let _guard = self.enter()?;
        let mut loaded = self.loaded.lock();
        for which in 0..MODULES.len() {
            // Why not is kept where it is told.
            let _ = self.module(&mut loaded, which);
        }
        Ok(())
    }

    /// A module, loaded the first time. What cannot be loaded is not tried again.
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

    /// Machine code where it fits the device, else what the driver compiles itself.
    fn load(&self, source: &Module) -> Result<usize> {
        if self.capability == 90 {
            match self.load_image(&source.cubin_90()?) {
                Ok(module) => return Ok(module),
                Err(error) => log::warn!("{} is compiled anew: {}", source.name, error.message()),
            }
        }
        self.load_image(&source.ptx()?)
    }

    fn load_image(&self, image: &[u8]) -> Result<usize> {
        let mut log = vec![0u8; LOG_BYTES];
        let options = [JIT_ERRORS, JIT_ERROR_BYTES];
        // Numbers are handed over as if they were addresses, and the driver writes there how long
        // the log is.
        let log_bytes: *mut c_void = std::ptr::without_provenance_mut(LOG_BYTES - 1);
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log_bytes];
        let mut module: Handle = std::ptr::null_mut();
        // SAFETY: a place for a handle, an image that ends as its kind does, as many values as
        // options, and a log that is longer than it is said to be: it ends with a zero.
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

    /// Puts one kernel on a stream, of functions that were loaded before.
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

    /// Puts kernels on a stream.
    ///
    /// # Safety
    /// As for [`crate::device::Device::launch`]; the stream is one of this context, which is
    /// entered.
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
            // SAFETY: a function that is loaded and takes one `Call` by value, which the driver
            // copies before it returns; the memory in it is the caller's promise.
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

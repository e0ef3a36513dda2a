//! Makes a CUDA context current for the duration of a call.

use std::ffi::{CStr, c_int};

use crate::base::status::Result;
use crate::device::cuda::DeviceInfo;
use crate::device::cuda::abi::{
    CAPABILITY_MAJOR, CAPABILITY_MINOR, CAPTURE_RELAXED, Handle, Ordinal, STREAM_NON_BLOCKING,
};
use crate::device::cuda::driver::Driver;

/// Limit: bytes of a device's name.
const NAME_BYTES: usize = 256;

/// A context is current on the calling thread until this is dropped.
pub struct ContextGuard<'a> {
    driver: &'a Driver,
    capture_mode: u32,
}

impl<'a> ContextGuard<'a> {
    pub fn enter(driver: &'a Driver, context: usize) -> Result<ContextGuard<'a>> {
        let mut capture_mode = CAPTURE_RELAXED;
        // SAFETY: a context that outlives its device. While an engine captures a graph, some calls
        // are forbidden in other threads and would invalidate the capture; relaxed mode excludes
        // this thread from that.
        unsafe {
            driver.check("cuCtxPushCurrent", (driver.push)(context as Handle))?;
            let code = (driver.exchange_capture_mode)(&mut capture_mode);
            let inside = ContextGuard { driver, capture_mode };
            driver.check("cuThreadExchangeStreamCaptureMode", code)?;
            Ok(inside)
        }
    }

    /// Device of the context.
    pub fn ordinal(&self) -> Result<Ordinal> {
        let mut ordinal: Ordinal = 0;
        // SAFETY: a place for a number.
        let code = unsafe { (self.driver.context_device)(&mut ordinal) };
        self.driver.check("cuCtxGetDevice", code).map(|()| ordinal)
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: undoes `enter`; places for the previous values.
        unsafe {
            let code = (self.driver.exchange_capture_mode)(&mut self.capture_mode);
            self.driver.note("cuThreadExchangeStreamCaptureMode", code);
            self.driver.note("cuCtxPopCurrent", (self.driver.pop)(&mut context));
        }
    }
}

impl Driver {
    /// CUDA version of the driver: 12040 is 12.4.
    pub fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: a place for a number.
        let code = unsafe { (self.get_version)(&mut version) };
        self.check("cuDriverGetVersion", code).map(|()| version)
    }

    /// Number of devices.
    pub fn devices(&self) -> Result<c_int> {
        let mut count = 0;
        // SAFETY: a place for a number.
        let code = unsafe { (self.device_count)(&mut count) };
        self.check("cuDeviceGetCount", code).map(|()| count)
    }

    /// Handle of the device at an index.
    pub fn device_at(&self, place: c_int) -> Result<Ordinal> {
        let mut device = 0;
        // SAFETY: a place for a handle.
        let code = unsafe { (self.device)(&mut device, place) };
        self.check("cuDeviceGet", code).map(|()| device)
    }

    /// Name and capability of a device.
    pub fn found(&self, ordinal: Ordinal) -> Result<DeviceInfo> {
        let mut name = [0; NAME_BYTES];
        // SAFETY: a place of that many bytes, the last of which stays zero.
        let code =
            unsafe { (self.device_name)(name.as_mut_ptr(), NAME_BYTES as c_int - 1, ordinal) };
        self.check("cuDeviceGetName", code)?;
        // SAFETY: as above: it ends with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let of = |which| self.attribute(which, ordinal).map(|number| number.max(0) as u32);
        Ok(DeviceInfo { name, capability: of(CAPABILITY_MAJOR)? * 10 + of(CAPABILITY_MINOR)? })
    }

    /// Attribute of a device.
    pub fn attribute(&self, which: c_int, ordinal: Ordinal) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: a place for a number.
        let code = unsafe { (self.device_attribute)(&mut value, which, ordinal) };
        self.check("cuDeviceGetAttribute", code).map(|()| value)
    }

    /// Retains the device's primary context, which the process shares.
    pub fn retain(&self, ordinal: Ordinal) -> Result<usize> {
        let mut context: Handle = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        let code = unsafe { (self.retain_primary)(&mut context, ordinal) };
        self.check("cuDevicePrimaryCtxRetain", code).map(|()| context as usize)
    }

    /// Creates a stream in the current context.
    pub fn make_stream(&self) -> Result<usize> {
        let mut stream: Handle = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        let code = unsafe { (self.create_stream)(&mut stream, STREAM_NON_BLOCKING) };
        self.check("cuStreamCreate", code).map(|()| stream as usize)
    }
}

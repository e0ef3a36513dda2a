//! cuFile (GPUDirect Storage), loaded when direct reads are first requested. It is rejected unless
//! it guarantees direct reads. In its compatibility mode it silently reads through host memory of
//! its own, which no budget counts.

use std::ffi::{c_int, c_uint, c_void};
use std::path::Path;

use crate::base::library::Library;
use crate::base::status::{Error, Result, Status};
use crate::device::cuda::abi::Handle;
use crate::device::cuda::cufile_abi::{
    ALLOW_COMPATIBLE, Descriptor, FALL_BACK, FEATURE_P2P, FORCE_COMPATIBLE, FileStatus,
    MODE_COMPATIBLE, MODE_POLL, PLAIN_READS, Properties, REACHES_P2P, RoomyProperties, code,
    describe_code,
};
use crate::fail;

/// Default library.
const CUFILE: &str = "libcufile.so.0";

macro_rules! cufile {
    (all { $($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ty),*) -> $ret:ty;)* }
     newer { $($(#[$may_doc:meta])* $may:ident = $may_symbol:literal ($($may_arg:ty),*);)* }) => {
        /// Functions of a loaded cuFile; those that older versions lack are optional.
        pub struct Calls {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $($(#[$may_doc])* pub $may: Option<unsafe extern "C" fn($($may_arg),*) -> FileStatus>,)*
        }

        impl Calls {
            fn of(library: &Library) -> Result<Calls> {
                Ok(Calls {
                    $($name: {
                        let Some(symbol) = library.symbol($symbol) else {
                            let name = library.name();
                            fail!(Unavailable, "{name} lacks {}: too old, or not cuFile", $symbol);
                        };
                        type Function = unsafe extern "C" fn($($arg),*) -> $ret;
                        // SAFETY: cuFile's functions of these names have these signatures; a test
                        // compares them with its header.
                        unsafe { std::mem::transmute::<Handle, Function>(symbol) }
                    },)*
                    $($may: library.symbol($may_symbol).map(|symbol| {
                        type Function = unsafe extern "C" fn($($may_arg),*) -> FileStatus;
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<Handle, Function>(symbol) }
                    }),)*
                })
            }
        }
    };
}

cufile! {
    all {
        /// Opens the driver for the process; calls are counted.
        open = "cuFileDriverOpen" () -> FileStatus;
        /// Closes it. (Some libraries lack the older form.)
        close = "cuFileDriverClose_v2" () -> FileStatus;
        /// Properties of the driver.
        properties = "cuFileDriverGetProperties" (*mut RoomyProperties) -> FileStatus;
        /// Registers a file.
        add_file = "cuFileHandleRegister" (*mut Handle, *mut Descriptor) -> FileStatus;
        /// Deregisters a file.
        remove_file = "cuFileHandleDeregister" (Handle) -> ();
        /// Registers (pins) device memory.
        add_memory = "cuFileBufRegister" (*const c_void, usize, c_int) -> FileStatus;
        /// Deregisters memory.
        remove_memory = "cuFileBufDeregister" (*const c_void) -> FileStatus;
        /// Reads: file, registered memory, length, file offset, memory offset.
        read = "cuFileRead" (Handle, *mut c_void, usize, i64, i64) -> isize;
    }
    newer {
        /// Version: 1130 is 1.13.
        get_version = "cuFileGetVersion" (*mut c_int);
        /// Value of a boolean parameter; before the driver is open, the value that it will have.
        get_switch = "cuFileGetParameterBool" (c_uint, *mut u8);
        /// Sets a boolean parameter, before the driver is opened.
        set_switch = "cuFileSetParameterBool" (c_uint, bool);
    }
}

/// An open cuFile that reads directly or fails.
pub struct CuFile {
    pub calls: Calls,
    /// Description for people.
    pub description: String,
}

impl CuFile {
    /// Loads a cuFile (default: the system's) and opens it. A context is current.
    /// [`Status::Unavailable`] says why it cannot be used, or might not read directly.
    pub fn open(path: Option<&Path>) -> Result<CuFile> {
        let library = Library::open(path.unwrap_or(Path::new(CUFILE)))
            .map_err(|error| error.within("no cuFile"))?;
        let calls = Calls::of(&library)?;
        let before = calls.switch(ALLOW_COMPATIBLE);
        calls.set(ALLOW_COMPATIBLE, false);
        // SAFETY: its own function.
        let status = unsafe { (calls.open)() };
        if let Err(error) = check("cuFileDriverOpen", status) {
            // The parameter stays set for the next user of cuFile in this process: restore it.
            if let Ok(Some(before)) = before {
                calls.set(ALLOW_COMPATIBLE, before);
            }
            let text = format!("cuFile does not open: {}", error.message());
            return Err(Error::new(Status::Unavailable, text));
        }
        // Dropping it closes the driver from here on.
        let mut cufile = CuFile { calls, description: String::new() };
        let properties = cufile.calls.known_properties()?;
        cufile.calls.refuse_compatibility(&properties)?;
        cufile.description = cufile.describe(&properties);
        Ok(cufile)
    }

    fn describe(&self, properties: &Properties) -> String {
        let mut version: c_int = 0;
        // SAFETY: a place for a number.
        let status = self.calls.get_version.map(|of| unsafe { of(&mut version) });
        let name = match status.is_some_and(|status| status.code == 0) {
            true => format!("cuFile {}.{}", version / 1000, version % 1000 / 10),
            false => "cuFile".to_string(),
        };
        match (properties.major_version, properties.minor_version) {
            (0, 0) => format!("{name} by PCI P2PDMA, compatibility mode off"),
            (major, minor) => {
                format!("{name} with nvidia-fs {major}.{minor}, compatibility mode off")
            }
        }
    }
}

impl Drop for CuFile {
    fn drop(&mut self) {
        // SAFETY: opened once.
        let status = unsafe { (self.calls.close)() };
        note("cuFileDriverClose", status);
    }
}

impl Calls {
    /// Value of a parameter; `None`: this version has no parameters.
    fn switch(&self, which: c_uint) -> Result<Option<bool>> {
        let Some(get) = self.get_switch else { return Ok(None) };
        let mut is_on: u8 = 0; // the size of a C bool, valid for any value
        // SAFETY: a place for the value.
        let status = unsafe { get(which, &mut is_on) };
        check("cuFileGetParameterBool", status).map(|()| Some(is_on != 0))
    }

    /// Sets a parameter, if this version has parameters. Its effect is checked later.
    fn set(&self, which: c_uint, is_on: bool) {
        if let Some(set) = self.set_switch {
            // SAFETY: its own function.
            let status = unsafe { set(which, is_on) };
            if status.code != 0 {
                log::debug!("{}", error("cuFileSetParameterBool", status).message());
            }
        }
    }

    fn known_properties(&self) -> Result<Properties> {
        let mut found = RoomyProperties { known: Properties::default(), rest: [0; 128] };
        // SAFETY: a struct larger than any known version fills.
        let status = unsafe { (self.properties)(&mut found) };
        check("cuFileDriverGetProperties", status).map_err(unavailable)?;
        Ok(found.known)
    }

    /// Rejects compatibility mode. An earlier user in this process may have enabled it, and setting
    /// parameters may have had no effect, so this checks the open driver.
    fn refuse_compatibility(&self, properties: &Properties) -> Result<()> {
        const REMEDY: &str = "set allow_compat_mode to false in cufile.json";
        let modes = properties.modes;
        if modes & 1 << MODE_COMPATIBLE != 0 {
            fail!(Unavailable, "cuFile may silently read through host memory: {REMEDY}");
        }
        if modes & !(1 << MODE_POLL) != 0 {
            fail!(
                Unavailable,
                "cuFile is in an unknown mode {modes:#x}: only polling (0x1) is accepted"
            );
        }
        for which in [ALLOW_COMPATIBLE, FORCE_COMPATIBLE] {
            if self.switch(which).map_err(unavailable)? == Some(true) {
                fail!(
                    Unavailable,
                    "cuFile was opened in this process with silent reads through host memory: \
                     {REMEDY}, and force_compat_mode"
                );
            }
        }
        // Versions without these parameters return an error.
        for which in [PLAIN_READS, FALL_BACK] {
            if let Ok(Some(true)) = self.switch(which) {
                fail!(
                    Unavailable,
                    "cuFile is configured for POSIX reads through host memory: switch them off in cufile.json"
                );
            }
        }
        let has_module = (properties.major_version, properties.minor_version) != (0, 0);
        let has_p2p = properties.features & 1 << FEATURE_P2P != 0
            || properties.reaches & 1 << REACHES_P2P != 0;
        if !has_module && !has_p2p {
            fail!(
                Unavailable,
                "cuFile has no path to a GPU: load the kernel module nvidia-fs, or enable PCI P2PDMA"
            );
        }
        Ok(())
    }
}

fn unavailable(error: Error) -> Error {
    Error::new(Status::Unavailable, error.message().to_string())
}

/// Converts a status to a result.
pub fn check(call: &str, status: FileStatus) -> Result<()> {
    if status.code == 0 { Ok(()) } else { Err(error(call, status)) }
}

/// Logs a failed cleanup call.
pub fn note(call: &str, status: FileStatus) {
    if status.code != 0 {
        log::warn!("a cuFile cleanup call failed: {}", error(call, status).message());
    }
}

fn error(call: &str, status: FileStatus) -> Error {
    let code = status.code.saturating_abs();
    let also = if code == code::CUDA { format!(" ({})", status.cuda) } else { String::new() };
    Error::new(Status::Io, format!("{call}: {}{also} ({code})", describe_code(code)))
}

/// The error of a short read.
pub fn short(got: isize, requested: u64) -> Error {
    let text = match got {
        0.. => format!("cuFileRead: {got} bytes of {requested}"),
        // A system error number, or a code of cuFile in its place.
        -1 => {
            let found = std::io::Error::last_os_error();
            match found.raw_os_error() {
                Some(code) if code > code::BASE => {
                    return error("cuFileRead", FileStatus { code, cuda: 0 });
                }
                _ => format!("cuFileRead: {found}"),
            }
        }
        _ => {
            let code = c_int::try_from(got).unwrap_or(c_int::MIN).saturating_abs();
            return error("cuFileRead", FileStatus { code, cuda: 0 });
        }
    };
    Error::new(Status::Io, text)
}

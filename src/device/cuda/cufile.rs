//! cuFile: loaded when somebody wants to read files straight into device memory, and refused
//! unless it says that it will never do so by way of host memory instead. It does that in silence
//! otherwise (its compatibility mode), in memory that nobody has counted.

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

/// The library, where the system keeps them.
const CUFILE: &str = "libcufile.so.0";

macro_rules! cufile {
    (all { $($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ty),*) -> $ret:ty;)* }
     newer { $($(#[$may_doc:meta])* $may:ident = $may_symbol:literal ($($may_arg:ty),*);)* }) => {
        /// The functions of a cuFile that was loaded. Those that older ones lack may be absent.
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
                            fail!(Unavailable, "{name} has no {}: an old cuFile, or none", $symbol);
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
        /// Starts it, for the process; counted.
        open = "cuFileDriverOpen" () -> FileStatus;
        /// Ends that. (Its older form is not known to all libraries.)
        close = "cuFileDriverClose_v2" () -> FileStatus;
        /// What it can do.
        properties = "cuFileDriverGetProperties" (*mut RoomyProperties) -> FileStatus;
        /// Makes a file known.
        add_file = "cuFileHandleRegister" (*mut Handle, *mut Descriptor) -> FileStatus;
        /// Takes that back.
        remove_file = "cuFileHandleDeregister" (Handle) -> ();
        /// Pins device memory for reads.
        add_memory = "cuFileBufRegister" (*const c_void, usize, c_int) -> FileStatus;
        /// Takes that back.
        remove_memory = "cuFileBufDeregister" (*const c_void) -> FileStatus;
        /// Reads: a file, registered memory, how much, where in the file, where in the memory.
        read = "cuFileRead" (Handle, *mut c_void, usize, i64, i64) -> isize;
    }
    newer {
        /// Which one it is: 1130 is 1.13.
        get_version = "cuFileGetVersion" (*mut c_int);
        /// What a switch is at: while it is not open, what it will be at.
        get_switch = "cuFileGetParameterBool" (c_uint, *mut u8);
        /// Sets a switch, before it is opened.
        set_switch = "cuFileSetParameterBool" (c_uint, bool);
    }
}

/// cuFile, open, and such that it reads directly or fails.
pub struct CuFile {
    pub calls: Calls,
    /// What it is, for people.
    pub description: String,
}

impl CuFile {
    /// Loads a cuFile, the system's if none is named, and opens it. The thread is in a context.
    /// [`Status::Unavailable`] and why, where it cannot be had or might not read directly.
    pub fn open(path: Option<&Path>) -> Result<CuFile> {
        let library = Library::open(path.unwrap_or(Path::new(CUFILE)))
            .map_err(|error| error.within("no cuFile"))?;
        let calls = Calls::of(&library)?;
        let before = calls.switch(ALLOW_COMPATIBLE);
        calls.set(ALLOW_COMPATIBLE, false);
        // SAFETY: its own function.
        let status = unsafe { (calls.open)() };
        if let Err(error) = check("cuFileDriverOpen", status) {
            // What was set waits for the next who opens it, who may want it as it was.
            if let Ok(Some(before)) = before {
                calls.set(ALLOW_COMPATIBLE, before);
            }
            let text = format!("cuFile does not start: {}", error.message());
            return Err(Error::new(Status::Unavailable, text));
        }
        // From here on it is closed when it is dropped.
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
    /// What a switch is at; none: it has no switches to ask for.
    fn switch(&self, which: c_uint) -> Result<Option<bool>> {
        let Some(get) = self.get_switch else { return Ok(None) };
        let mut is_on: u8 = 0; // as wide as a bool, whatever comes
        // SAFETY: a place for an answer.
        let status = unsafe { get(which, &mut is_on) };
        check("cuFileGetParameterBool", status).map(|()| Some(is_on != 0))
    }

    /// Sets a switch, if it has them. What comes of it is asked for later.
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
        // SAFETY: a place with more room than any that is known of fills.
        let status = unsafe { (self.properties)(&mut found) };
        check("cuFileDriverGetProperties", status).map_err(unavailable)?;
        Ok(found.known)
    }

    /// Whoever opened it before may have allowed what is refused here, and what is set may not
    /// have come to pass: what counts is what it says now that it is open.
    fn refuse_compatibility(&self, properties: &Properties) -> Result<()> {
        const REMEDY: &str = "set allow_compat_mode to false in cufile.json";
        let modes = properties.modes;
        if modes & 1 << MODE_COMPATIBLE != 0 {
            fail!(Unavailable, "cuFile may read by way of host memory, in silence: {REMEDY}");
        }
        if modes & !(1 << MODE_POLL) != 0 {
            fail!(Unavailable, "cuFile is in a mode that is not known here: {modes:#x}");
        }
        for which in [ALLOW_COMPATIBLE, FORCE_COMPATIBLE] {
            if self.switch(which).map_err(unavailable)? == Some(true) {
                fail!(
                    Unavailable,
                    "cuFile was opened in this process to read by way of host memory, in \
                     silence: {REMEDY}, and force_compat_mode"
                );
            }
        }
        // Those who do not know these switches say so.
        for which in [PLAIN_READS, FALL_BACK] {
            if let Ok(Some(true)) = self.switch(which) {
                fail!(Unavailable, "cuFile is set to plain reads, by way of host memory");
            }
        }
        let has_module = (properties.major_version, properties.minor_version) != (0, 0);
        let has_p2p = properties.features & 1 << FEATURE_P2P != 0
            || properties.reaches & 1 << REACHES_P2P != 0;
        if !has_module && !has_p2p {
            fail!(
                Unavailable,
                "cuFile has no way to a GPU: neither the kernel module nvidia-fs nor PCI P2PDMA"
            );
        }
        Ok(())
    }
}

fn unavailable(error: Error) -> Error {
    Error::new(Status::Unavailable, error.message().to_string())
}

/// What a call returned, as a result.
pub fn check(call: &str, status: FileStatus) -> Result<()> {
    if status.code == 0 { Ok(()) } else { Err(error(call, status)) }
}

/// Notes a call that failed where nothing more can be done about it.
pub fn note(call: &str, status: FileStatus) {
    if status.code != 0 {
        log::warn!("giving back to cuFile: {}", error(call, status).message());
    }
}

fn error(call: &str, status: FileStatus) -> Error {
    let code = status.code.saturating_abs();
    let also = if code == code::CUDA { format!(" ({})", status.cuda) } else { String::new() };
    Error::new(Status::Io, format!("{call}: {}{also} ({code})", describe_code(code)))
}

/// What a read came to that did not bring all.
pub fn short(got: isize, wanted: u64) -> Error {
    let text = match got {
        0.. => format!("cuFileRead: {got} bytes of {wanted}"),
        // The system's error number, or a code of its own in the same place.
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

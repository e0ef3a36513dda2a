//! Compares the declarations of cuFile's interface with the crate `cudarc`, which generates its own
//! from cuFile's header. No function of cuFile is called.

use std::mem::{offset_of, size_of};

use cudarc::cufile::sys;

use crate::device::cuda::cufile::Calls;
use crate::device::cuda::cufile_abi::*;

trait Shape {
    const SIZES: &'static [usize];
}

macro_rules! shapes {
    ($(($($arg:ident),*))*) => {$(
        impl<R, $($arg),*> Shape for unsafe extern "C" fn($($arg),*) -> R {
            const SIZES: &'static [usize] = &[size_of::<R>() $(, size_of::<$arg>())*];
        }
        impl<R, $($arg),*> Shape for unsafe fn($($arg),*) -> R {
            const SIZES: &'static [usize] = &[size_of::<R>() $(, size_of::<$arg>())*];
        }
    )*};
}

shapes! { () (A) (A, B) (A, B, C) (A, B, C, D, E) }

fn header_fields<F: Shape>(_: F) -> &'static [usize] {
    F::SIZES
}

fn ours<F: Shape>(_: fn(&Calls) -> F) -> &'static [usize] {
    F::SIZES
}

fn ours_newer<F: Shape>(_: fn(&Calls) -> Option<F>) -> &'static [usize] {
    F::SIZES
}

macro_rules! same {
    ($ours:ident: $($field:ident = $name:ident ($($any:tt)*);)*) => {$(
        let found = header_fields(sys::$name as unsafe fn($($any)*) -> _);
        assert_eq!($ours(|calls| calls.$field), found, stringify!($name));
    )*};
}

#[test]
fn functions_have_the_arguments_of_the_header() {
    same! { ours:
        open = cuFileDriverOpen();
        close = cuFileDriverClose_v2();
        properties = cuFileDriverGetProperties(_);
        add_file = cuFileHandleRegister(_, _);
        remove_file = cuFileHandleDeregister(_);
        add_memory = cuFileBufRegister(_, _, _);
        remove_memory = cuFileBufDeregister(_);
        read = cuFileRead(_, _, _, _, _);
    }
    same! { ours_newer:
        get_version = cuFileGetVersion(_);
        get_switch = cuFileGetParameterBool(_, _);
        set_switch = cuFileSetParameterBool(_, _);
    }
}

#[test]
fn descriptions_are_laid_out_as_in_the_header() {
    assert_eq!(offset_of!(FileStatus, code), offset_of!(sys::CUfileError, err));
    assert_eq!(offset_of!(FileStatus, cuda), offset_of!(sys::CUfileError, cu_err));
    assert_eq!(size_of::<FileStatus>(), size_of::<sys::CUfileError>());
    assert_eq!(offset_of!(Descriptor, kind), offset_of!(sys::CUfileDescr_t, type_));
    assert_eq!(offset_of!(Descriptor, file), offset_of!(sys::CUfileDescr_t, handle));
    assert_eq!(offset_of!(Descriptor, calls), offset_of!(sys::CUfileDescr_t, fs_ops));
    assert_eq!(size_of::<Descriptor>(), size_of::<sys::CUfileDescr_t>());
    let same = [
        (
            offset_of!(Properties, major_version),
            offset_of!(sys::CUfileDrvProps, nvfs.major_version),
        ),
        (
            offset_of!(Properties, minor_version),
            offset_of!(sys::CUfileDrvProps, nvfs.minor_version),
        ),
        (offset_of!(Properties, poll_size), offset_of!(sys::CUfileDrvProps, nvfs.poll_thresh_size)),
        (
            offset_of!(Properties, max_direct_size),
            offset_of!(sys::CUfileDrvProps, nvfs.max_direct_io_size),
        ),
        (offset_of!(Properties, reaches), offset_of!(sys::CUfileDrvProps, nvfs.dstatusflags)),
        (offset_of!(Properties, modes), offset_of!(sys::CUfileDrvProps, nvfs.dcontrolflags)),
        (offset_of!(Properties, features), offset_of!(sys::CUfileDrvProps, fflags)),
        (
            offset_of!(Properties, max_batch_timeout),
            offset_of!(sys::CUfileDrvProps, max_batch_io_timeout_msecs),
        ),
        (size_of::<Properties>(), size_of::<sys::CUfileDrvProps>()),
        (offset_of!(RoomyProperties, known), 0),
    ];
    for (ours, header_fields) in same {
        assert_eq!(ours, header_fields);
    }
}

#[test]
fn constants_match_the_header() {
    use sys::CUFileBoolConfigParameter_t as Switch;
    use sys::CUfileDriverControlFlags as Mode;
    use sys::CUfileOpError as Failure;
    let same = [
        (KIND_DESCRIPTOR, sys::CUfileFileHandleType::CU_FILE_HANDLE_TYPE_OPAQUE_FD as u32),
        (MODE_POLL, Mode::CU_FILE_USE_POLL_MODE as u32),
        (MODE_COMPATIBLE, Mode::CU_FILE_ALLOW_COMPAT_MODE as u32),
        (REACHES_P2P, sys::CUfileDriverStatusFlags::CU_FILE_NVME_P2P_SUPPORTED as u32),
        (ALLOW_COMPATIBLE, Switch::CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE as u32),
        (FORCE_COMPATIBLE, Switch::CUFILE_PARAM_FORCE_COMPAT_MODE as u32),
    ];
    for (ours, header_fields) in same {
        assert_eq!(ours, header_fields);
    }
    let codes = [
        (code::NO_MODULE, Failure::CU_FILE_DRIVER_NOT_INITIALIZED),
        (code::OTHER_MODULE, Failure::CU_FILE_DRIVER_VERSION_MISMATCH),
        (code::NOT_THIS_PLATFORM, Failure::CU_FILE_PLATFORM_NOT_SUPPORTED),
        (code::NOT_THIS_FILE, Failure::CU_FILE_IO_NOT_SUPPORTED),
        (code::NOT_THIS_DEVICE, Failure::CU_FILE_DEVICE_NOT_SUPPORTED),
        (code::CUDA, Failure::CU_FILE_CUDA_DRIVER_ERROR),
        (code::TOO_MUCH_PINNED, Failure::CU_FILE_INVALID_MAPPING_SIZE),
        (code::NOT_THIS_KIND, Failure::CU_FILE_INVALID_FILE_TYPE),
        (code::NOT_DIRECT, Failure::CU_FILE_DIO_NOT_SET),
        (code::NOT_ALLOWED, Failure::CU_FILE_PERMISSION_DENIED),
        (code::FILE_IS_KNOWN, Failure::CU_FILE_HANDLE_ALREADY_REGISTERED),
        (code::NOT_STARTED, Failure::CU_FILE_NVFS_SETUP_ERROR),
        (code::SWITCHED_OFF, Failure::CU_FILE_IO_DISABLED),
    ];
    for (ours, header_fields) in codes {
        assert_eq!(ours, header_fields as i32, "{}", describe_code(ours));
    }
}

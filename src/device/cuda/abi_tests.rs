//! Compares the declarations of the driver's interface with the crate `cudarc`, which generates its
//! own from CUDA's headers. No driver function is called.

use std::mem::{offset_of, size_of};

use cudarc::driver::sys;

use crate::device::cuda::abi::*;
use crate::device::cuda::driver::{BatchCall, Driver};

/// Sizes of a function's result and arguments.
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

shapes! {
    (A) (A, B) (A, B, C) (A, B, C, D) (A, B, C, D, E) (A, B, C, D, E, F)
    (A, B, C, D, E, F, G, H, I)
    (A, B, C, D, E, F, G, H, I, J, K)
}

fn driver_fields<F: Shape>(_: F) -> &'static [usize] {
    F::SIZES
}

/// Sizes for a required function of the driver.
fn ours<F: Shape>(_: fn(&Driver) -> F) -> &'static [usize] {
    F::SIZES
}

/// Sizes for an optional function of the driver.
fn ours_newer<F: Shape>(_: fn(&Driver) -> Option<F>) -> &'static [usize] {
    F::SIZES
}

/// Compares fields of [`Driver`] with functions of the headers.
macro_rules! same {
    ($ours:ident: $($field:ident = $name:ident ($($any:tt)*);)*) => {$(
        let found = driver_fields(sys::$name as unsafe fn($($any)*) -> _);
        assert_eq!($ours(|driver| driver.$field), found, stringify!($name));
    )*};
}

#[test]
fn functions_have_the_arguments_of_the_headers() {
    same! { ours:
        init = cuInit(_);
        get_version = cuDriverGetVersion(_);
        error_name = cuGetErrorName(_, _);
        error_text = cuGetErrorString(_, _);
        device_count = cuDeviceGetCount(_);
        device = cuDeviceGet(_, _);
        device_name = cuDeviceGetName(_, _, _);
        device_attribute = cuDeviceGetAttribute(_, _, _);
        retain_primary = cuDevicePrimaryCtxRetain(_, _);
        release_primary = cuDevicePrimaryCtxRelease_v2(_);
        push = cuCtxPushCurrent_v2(_);
        pop = cuCtxPopCurrent_v2(_);
        exchange_capture_mode = cuThreadExchangeStreamCaptureMode(_);
        context_device = cuCtxGetDevice(_);
        memory_info = cuMemGetInfo_v2(_, _);
        allocate = cuMemAlloc_v2(_, _);
        free = cuMemFree_v2(_);
        to_device = cuMemcpyHtoDAsync_v2(_, _, _, _);
        from_device = cuMemcpyDtoHAsync_v2(_, _, _, _);
        within_device = cuMemcpyDtoDAsync_v2(_, _, _, _);
        between_devices = cuMemcpyPeerAsync(_, _, _, _, _, _);
        can_reach = cuDeviceCanAccessPeer(_, _, _);
        reach = cuCtxEnablePeerAccess(_, _);
        anywhere = cuMemcpyAsync(_, _, _, _);
        rows = cuMemcpy2DAsync_v2(_, _);
        create_stream = cuStreamCreate(_, _);
        destroy_stream = cuStreamDestroy_v2(_);
        sync_stream = cuStreamSynchronize(_);
        stream_wait = cuStreamWaitEvent(_, _, _);
        is_capturing = cuStreamIsCapturing(_, _);
        stream_context = cuStreamGetCtx(_, _);
        create_event = cuEventCreate(_, _);
        destroy_event = cuEventDestroy_v2(_);
        record = cuEventRecord(_, _);
        query = cuEventQuery(_);
        sync_event = cuEventSynchronize(_);
        register_host = cuMemHostRegister_v2(_, _, _);
        unregister_host = cuMemHostUnregister(_);
        host_on_device = cuMemHostGetDevicePointer_v2(_, _, _);
        allocate_host = cuMemHostAlloc(_, _, _);
        free_host = cuMemFreeHost(_);
        pointer_attributes = cuPointerGetAttributes(_, _, _, _);
        load_module = cuModuleLoadDataEx(_, _, _, _, _);
        unload_module = cuModuleUnload(_);
        find_function = cuModuleGetFunction(_, _, _);
        set_function = cuFuncSetAttribute(_, _, _);
        launch = cuLaunchKernel(_, _, _, _, _, _, _, _, _, _, _);
    }
    same! { ours_newer:
        find_symbol = cuGetProcAddress_v2(_, _, _, _, _);
        granularity = cuMemGetAllocationGranularity(_, _, _);
        reserve = cuMemAddressReserve(_, _, _, _, _);
        unreserve = cuMemAddressFree(_, _);
        create_memory = cuMemCreate(_, _, _, _);
        release_memory = cuMemRelease(_);
        map = cuMemMap(_, _, _, _, _);
        unmap = cuMemUnmap(_, _);
        set_access = cuMemSetAccess(_, _, _, _);
        wait_value = cuStreamWaitValue32_v2(_, _, _, _);
    }
    let batch = driver_fields(sys::cuMemcpyBatchAsync as unsafe fn(_, _, _, _, _, _, _, _, _) -> _);
    assert_eq!(BatchCall::SIZES, batch);
}

/// Compares a struct field by field, in order, and as a whole.
macro_rules! same_layout {
    ($ours:ty, $driver_fields:ty, $($our:ident = $their:ident,)*) => {
        $(assert_eq!(offset_of!($ours, $our), offset_of!($driver_fields, $their), stringify!($our));)*
        assert_eq!(size_of::<$ours>(), size_of::<$driver_fields>());
    };
}

#[test]
fn descriptions_are_laid_out_as_in_the_headers() {
    same_layout!(
        Rows,
        sys::CUDA_MEMCPY2D,
        from_x_bytes = srcXInBytes,
        from_y = srcY,
        from_kind = srcMemoryType,
        from_host = srcHost,
        from_device = srcDevice,
        from_array = srcArray,
        from_pitch = srcPitch,
        to_x_bytes = dstXInBytes,
        to_y = dstY,
        to_kind = dstMemoryType,
        to_host = dstHost,
        to_device = dstDevice,
        to_array = dstArray,
        to_pitch = dstPitch,
        width_bytes = WidthInBytes,
        height = Height,
    );
    same_layout!(
        BatchOrder,
        sys::CUmemcpyAttributes,
        order = srcAccessOrder,
        from = srcLocHint,
        to = dstLocHint,
        flags = flags,
    );
    same_layout!(
        Allocation,
        sys::CUmemAllocationProp,
        kind = type_,
        handles = requestedHandleTypes,
        location = location,
        unused = win32HandleMetaData,
        flags = allocFlags,
    );
    same_layout!(AccessOf, sys::CUmemAccessDesc, location = location, flags = flags,);
    assert_eq!(size_of::<[i32; 2]>(), size_of::<sys::CUmemLocation>());
}

#[test]
fn constants_match_the_headers() {
    use sys::CUdevice_attribute as Attribute;
    use sys::CUpointer_attribute as PointerInfo;
    let same = [
        (
            BLOCK_SHARED as i64,
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as i64,
        ),
        (KIND_HOST as i64, sys::CUmemorytype::CU_MEMORYTYPE_HOST as i64),
        (KIND_DEVICE as i64, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as i64),
        (STREAM_NON_BLOCKING as i64, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as i64),
        (
            EVENT_FLAGS as i64,
            sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as i64
                | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as i64,
        ),
        (CAPTURE_RELAXED as i64, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as i64),
        (HOST_PORTABLE as i64, sys::CU_MEMHOSTREGISTER_PORTABLE as i64),
        (HOST_MAPPED as i64, sys::CU_MEMHOSTREGISTER_DEVICEMAP as i64),
        (HOST_PORTABLE as i64, sys::CU_MEMHOSTALLOC_PORTABLE as i64),
        (HOST_MAPPED as i64, sys::CU_MEMHOSTALLOC_DEVICEMAP as i64),
        (MAX_PITCH as i64, Attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH as i64),
        (CAPABILITY_MAJOR as i64, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as i64),
        (CAPABILITY_MINOR as i64, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as i64),
        (REACHES_PAGEABLE as i64, Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS as i64),
        (
            SAME_ADDRESSES as i64,
            Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM as i64,
        ),
        (POINTER_KIND as i64, PointerInfo::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as i64),
        (POINTER_ON_DEVICE as i64, PointerInfo::CU_POINTER_ATTRIBUTE_DEVICE_POINTER as i64),
        (POINTER_MANAGED as i64, PointerInfo::CU_POINTER_ATTRIBUTE_IS_MANAGED as i64),
        (POINTER_ORDINAL as i64, PointerInfo::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as i64),
        (POINTER_START as i64, PointerInfo::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as i64),
        (POINTER_BYTES as i64, PointerInfo::CU_POINTER_ATTRIBUTE_RANGE_SIZE as i64),
        (POINTER_ACCESS as i64, PointerInfo::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS as i64),
        (
            POINTER_READ_WRITE as i64,
            sys::CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS::CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE
                as i64,
        ),
        (JIT_ERRORS as i64, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER as i64),
        (JIT_ERROR_BYTES as i64, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as i64),
        (
            MAX_SHARED as i64,
            sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as i64,
        ),
        (1, sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM as i64),
        (MEMORY_STAYS as i64, sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as i64),
        (LOCATION_DEVICE as i64, sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i64),
        (
            GRANULARITY_MINIMUM as i64,
            sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as i64,
        ),
        (
            ACCESS_READ_WRITE as i64,
            sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as i64,
        ),
    ];
    for (at, (ours, driver_fields)) in same.into_iter().enumerate() {
        assert_eq!(ours, driver_fields, "number {at}");
    }
}

#[test]
fn status_codes_match_the_headers() {
    use sys::CUresult as Theirs;
    let same = [
        (code::INVALID_VALUE, Theirs::CUDA_ERROR_INVALID_VALUE),
        (code::OUT_OF_MEMORY, Theirs::CUDA_ERROR_OUT_OF_MEMORY),
        (code::NO_DEVICE, Theirs::CUDA_ERROR_NO_DEVICE),
        (code::INVALID_DEVICE, Theirs::CUDA_ERROR_INVALID_DEVICE),
        (code::INVALID_CONTEXT, Theirs::CUDA_ERROR_INVALID_CONTEXT),
        (code::INVALID_HANDLE, Theirs::CUDA_ERROR_INVALID_HANDLE),
        (code::NOT_READY, Theirs::CUDA_ERROR_NOT_READY),
        (code::ALREADY_REACHED, Theirs::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED),
        (code::ALREADY_REGISTERED, Theirs::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
        (code::NOT_SUPPORTED, Theirs::CUDA_ERROR_NOT_SUPPORTED),
        (code::CAPTURED_EVENT, Theirs::CUDA_ERROR_CAPTURED_EVENT),
    ];
    for (ours, driver_fields) in same {
        assert_eq!(ours, driver_fields as Code);
    }
    let sticky = [
        Theirs::CUDA_ERROR_DEINITIALIZED,
        Theirs::CUDA_ERROR_DEVICE_UNAVAILABLE,
        Theirs::CUDA_ERROR_ECC_UNCORRECTABLE,
        Theirs::CUDA_ERROR_NVLINK_UNCORRECTABLE,
        Theirs::CUDA_ERROR_ILLEGAL_ADDRESS,
        Theirs::CUDA_ERROR_LAUNCH_TIMEOUT,
        Theirs::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        Theirs::CUDA_ERROR_ASSERT,
        Theirs::CUDA_ERROR_HARDWARE_STACK_ERROR,
        Theirs::CUDA_ERROR_ILLEGAL_INSTRUCTION,
        Theirs::CUDA_ERROR_MISALIGNED_ADDRESS,
        Theirs::CUDA_ERROR_INVALID_ADDRESS_SPACE,
        Theirs::CUDA_ERROR_INVALID_PC,
        Theirs::CUDA_ERROR_LAUNCH_FAILED,
        Theirs::CUDA_ERROR_TENSOR_MEMORY_LEAK,
        Theirs::CUDA_ERROR_MPS_CLIENT_TERMINATED,
        Theirs::CUDA_ERROR_UNKNOWN,
    ];
    for driver_fields in sticky {
        assert!(is_sticky(driver_fields as Code), "{driver_fields:?}");
    }
    // 226 is in newer headers only: a contained error that destroys the context.
    assert_eq!(sticky.len() + 1, code::STICKY.len());
    for harmless in [
        Theirs::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
        Theirs::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
        Theirs::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        Theirs::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
        Theirs::CUDA_ERROR_NOT_PERMITTED,
    ] {
        assert!(!is_sticky(harmless as Code), "{harmless:?}");
    }
}

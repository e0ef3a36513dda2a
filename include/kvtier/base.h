/// @file
/// Statuses, errors, versions, logging, features and spec strings; and the rules of all functions.
///
/// The rules, said once (docs/reference/c.md explains them):
///
/// - Status: a function that can fail returns kvt_status_t: 0 is success, negative is an error. On
///   failure no output is written, except counts and sizes with KVT_E_TOO_SMALL. Any function may
///   return KVT_E_INVALID (an argument outside its range), KVT_E_HANDLE (stale, foreign or null),
///   KVT_E_CLOSED, KVT_E_FORKED, KVT_E_NOMEM, KVT_E_TOO_NEW (a struct has a field that this library
///   does not know), KVT_E_REENTRANT and KVT_E_PANIC. `@return` names only the other codes.
/// - err: receives an error object that explains a failure; free it with kvt_error_free. May be
///   null.
/// - Pointers must not be null, unless the comment says so. Null options mean the defaults.
/// - Structs start with KVT_..._INIT, which sets struct_size. Zero is the default of every field;
///   reserved fields are 0. A struct without struct_size is an element of arrays; pass its sizeof
///   as stride_bytes.
/// - Arrays: an output array has `capacity` entries (or `out_capacity` bytes). The call writes the
///   number of entries to its count, also with KVT_E_TOO_SMALL. A null array with capacity 0 asks
///   for the number, where it is known before the call.
/// - Handles are never dereferenced: a stale one is an error. Objects that a call returns belong to
///   the caller; the close or free takes a pointer to the handle, clears it, and accepts null.
///   Structs and arrays are copied during the call, unless the comment says that they are borrowed.
/// - Threads: any thread may call any function, also inside a callback. A call that waits returns
///   KVT_E_REENTRANT there. Comments name only what differs ("Threading: ...").
/// - Time: deadlines are CLOCK_MONOTONIC nanoseconds, 0 = none. Durations end in _ns, sizes in
///   _bytes.
/// - Texts are UTF-8 with a length in bytes, or KVT_NUL_TERMINATED as the length. Output has no NUL
///   at its end.
/// - Enumerations: a type such as kvt_level_t is an integer of fixed width, and the enum below it
///   names its values. Values may be added. Types that end in _flags_t are sets of bits.
///
/// A program checks that header and library fit before its first other call:
///
///     kvt_error_t *err = NULL;
///     kvt_status_t status = kvt_abi_check(KVT_HEADER_VERSION, &err);
///     if (status != KVT_OK) {
///         fprintf(stderr, "%s: %s\n", kvt_status_name(status), kvt_error_message(err));
///         kvt_error_free(&err);
///         return 1;
///     }
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_BASE_H
#define KVTIER_BASE_H

#include <stdint.h>

#ifdef __cplusplus
/* C++ has no designated initialisers before C++20. */
template <typename T> inline T kvt_sized_() {
    T value = T();
    value.struct_size = sizeof(T);
    return value;
}
#define KVT_INIT_(T) (kvt_sized_<T>())
#else
#define KVT_INIT_(T) { .struct_size = sizeof(T) }
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Statuses -------------------------------------------------------------------------------- */

/// Status of a call: 0 is success, negative is an error. Later libraries add codes and change none:
/// treat a negative code that your header does not list as an error.
typedef int32_t kvt_status_t;
enum {
    /// The call succeeded.
    KVT_OK = 0,
    /// An argument is null, out of range or has unknown flags.
    KVT_E_INVALID = -1,
    /// A handle is null, stale, of another type or not from this library.
    KVT_E_HANDLE = -2,
    /// A struct sets a field that this library does not know.
    KVT_E_TOO_NEW = -3,
    /// An output buffer is too small; the call has written the size that is needed.
    KVT_E_TOO_SMALL = -4,
    /// The system has no memory for the call.
    KVT_E_NOMEM = -5,
    /// The budget of a tier has too few free bytes.
    KVT_E_BUDGET = -6,
    /// A bounded queue or table is full: drain completions, free ops, then retry.
    KVT_E_AGAIN = -7,
    /// The object is in use by work in flight: wait for its release, then retry.
    KVT_E_BUSY = -8,
    /// The object is closed or closing.
    KVT_E_CLOSED = -9,
    /// The operation was cancelled before it completed.
    KVT_E_CANCELLED = -10,
    /// The deadline passed before the operation completed.
    KVT_E_TIMEOUT = -11,
    /// The call is not allowed inside a callback.
    KVT_E_REENTRANT = -12,
    /// This process is a fork of the one that opened the library.
    KVT_E_FORKED = -13,
    /// A defect inside the library was caught. The object is poisoned: close it.
    KVT_E_PANIC = -14,
    /// The program was built against a header that does not fit this library.
    KVT_E_ABI = -15,
    /// The object does not support the operation, or the library was built without it.
    KVT_E_UNSUPPORTED = -16,
    /// A device, tier or feature that the call needs does not exist here, or is lost.
    KVT_E_UNAVAILABLE = -17,
    /// The requested object or data does not exist.
    KVT_E_NOT_FOUND = -18,
    /// Bytes do not match their checksum: treat them as absent.
    KVT_E_CORRUPT = -19,
    /// The operating system reported an error.
    KVT_E_IO = -20,
    /// A spec string is malformed; the error object has the offset.
    KVT_E_SPEC = -21,
    /// A documented limit was exceeded.
    KVT_E_LIMIT = -22,
    /// The quota of locked memory (RLIMIT_MEMLOCK) is too small.
    KVT_E_PIN_QUOTA = -23,
    /// The object is not in a state that allows the call.
    KVT_E_STATE = -24,
    /// The process that serves a shared store is gone.
    KVT_E_LOST = -25,
};

/// Length of a text that ends with a NUL, after at most 1 MiB.
#define KVT_NUL_TERMINATED UINT64_MAX

/// Returns the name of a status, such as "KVT_E_BUSY"; "KVT_E_UNKNOWN" if the library does not know
/// it. The string is static, NUL-terminated and never null. Threading: also in a forked child.
const char *kvt_status_name(kvt_status_t status);

/// Returns a sentence on what a status means and what the caller can do. The string is static,
/// NUL-terminated and never null. Threading: also in a forked child.
const char *kvt_status_str(kvt_status_t status);

/* ---- Errors ---------------------------------------------------------------------------------- */

/// The explanation of a failure. Calls with a `kvt_error_t **err` write an error there only if they
/// fail. The variable must be null or hold an error, which is freed and replaced. In a forked child
/// (KVT_E_FORKED) no error is written.
typedef struct kvt_error_t kvt_error_t;

/// Details of an error.
typedef struct kvt_error_info_t {
    uint64_t struct_size;
    /// UTF-8 and NUL-terminated; valid until the error is freed or replaced.
    const char *message;
    /// Without the NUL.
    uint64_t message_bytes;
    /// Byte offset in the input text; UINT64_MAX = the error is not about a text.
    uint64_t offset;
    /// Status that the failed call returned.
    kvt_status_t status;
    /// errno of the failed system call; 0 = none failed.
    int32_t os_errno;
} kvt_error_info_t;
#define KVT_ERROR_INFO_INIT KVT_INIT_(kvt_error_info_t)

/// Reads the details of an error. `out->message` is borrowed until the error is freed or replaced.
kvt_status_t kvt_error_info(const kvt_error_t *error, kvt_error_info_t *out);

/// Returns the message of an error, UTF-8 and NUL-terminated; empty if the handle is null or stale.
/// It is borrowed until the error is freed or replaced.
const char *kvt_error_message(const kvt_error_t *error);

/// Frees an error.
kvt_status_t kvt_error_free(kvt_error_t **error);

/* ---- Versions -------------------------------------------------------------------------------- */

/// Version of this header.
#define KVT_VERSION_MAJOR 0
#define KVT_VERSION_MINOR 1
#define KVT_VERSION_PATCH 0

/// Version of this header as one number: (major << 32) | (minor << 16) | patch.
#define KVT_HEADER_VERSION 65536

/// Returns the version of the library as text, such as "0.1.0". The string is static,
/// NUL-terminated and never null. Threading: also in a forked child.
const char *kvt_version_str(void);

/// Reads the version of the library as one number, in the format of KVT_HEADER_VERSION. Threading:
/// also in a forked child.
kvt_status_t kvt_version(uint64_t *out);

/// Checks that a program can use this library. Call it once, before any other function:
/// kvt_abi_check(KVT_HEADER_VERSION, &err).
///
/// Before 1.0 the library must have the same minor version as the program's header, and at least
/// its patch version; from 1.0 on the same major version, and at least its minor version.
///
/// @return KVT_E_ABI.
kvt_status_t kvt_abi_check(uint64_t header_version, kvt_error_t **err);

/* ---- Logging --------------------------------------------------------------------------------- */

/// Log levels; each includes those before it. OFF: no messages. ERROR: unexpected failures. WARN:
/// degraded operation. INFO: rare events. DEBUG: for debugging. TRACE: everything.
typedef uint32_t kvt_log_level_t;
enum {
    KVT_LOG_OFF = 0,
    KVT_LOG_ERROR = 1,
    KVT_LOG_WARN = 2,
    KVT_LOG_INFO = 3,
    KVT_LOG_DEBUG = 4,
    KVT_LOG_TRACE = 5,
};

/// Releases `user_data`. Called once, after the last call of the callback that it was registered
/// with. It must not unwind.
typedef void (*kvt_destroy_fn)(void *user_data);

/// Receives a log message of at most 2048 bytes. Texts are UTF-8, not NUL-terminated, and borrowed
/// for the call. Any thread calls it, also several at once, and never under a lock of the library:
/// a message that is logged under one arrives after its release. It must not unwind.
typedef void (*kvt_log_fn)(void *user_data, kvt_log_level_t level, const char *target,
                           uint64_t target_bytes, const char *message, uint64_t message_bytes);

/// Sets or removes the log callback of the process. Without one the library logs nothing; it never
/// writes to standard output or error. The previous callback may still run in another thread when
/// this returns; its destroy is called after that.
///
/// @param level      KVT_LOG_*: the most detailed level that is passed on.
/// @param callback   Null removes the present one.
/// @param user_data  Passed to the callback; taken over on success only.
/// @param destroy    May be null.
/// @return KVT_E_STATE (a Rust program has installed a logger of its own).
kvt_status_t kvt_log_set(kvt_log_level_t level, kvt_log_fn callback, void *user_data,
                         kvt_destroy_fn destroy, kvt_error_t **err);

/* ---- Features -------------------------------------------------------------------------------- */

/// An optional feature. Texts are static UTF-8, not NUL-terminated.
typedef struct kvt_feature_t {
    uint64_t struct_size;
    const char *name;
    uint64_t name_bytes;
    /// The purpose of the feature.
    const char *note;
    uint64_t note_bytes;
    /// 1 = this library contains the feature.
    uint32_t built;
    /// 1 = this machine supports it, as probed during the call.
    uint32_t present;
} kvt_feature_t;
#define KVT_FEATURE_INIT KVT_INIT_(kvt_feature_t)

/// Reads the number of optional features.
kvt_status_t kvt_feature_count(uint64_t *out_count);

/// Reads a feature by its index, below kvt_feature_count. Probes the machine: not for a hot path.
///
/// @return KVT_E_NOT_FOUND.
kvt_status_t kvt_feature_at(uint64_t index, kvt_feature_t *out);

/// Reads a feature by its name, such as "cuda", "io_uring" or "redis". Probes the machine: not for
/// a hot path.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_feature_find(const char *name, uint64_t name_bytes, kvt_feature_t *out,
                              kvt_error_t **err);

/* ---- Specs ----------------------------------------------------------------------------------- */

/// Checks the grammar of a spec string, and writes its canonical form. A spec is a name with
/// optional arguments, such as "qos(inner=s3fifo(small=10%))". The call that uses the spec checks
/// that the name and its parameters exist.
///
/// @param out        Receives the canonical form, not NUL-terminated; may be null.
/// @param out_bytes  Receives its length; may be null.
/// @return KVT_E_SPEC, KVT_E_LIMIT (more than 4096 bytes, 8 levels or 64 arguments),
///         KVT_E_TOO_SMALL.
kvt_status_t kvt_spec_check(const char *spec, uint64_t spec_bytes, char *out, uint64_t out_capacity,
                            uint64_t *out_bytes, kvt_error_t **err);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_BASE_H */

package kvtier

// #cgo pkg-config: kvtier
// #include "shim.h"
import "C"

import "fmt"

// Status is the library's status of a failed call. It is an error itself, so that
// errors.Is(err, kvtier.NotFound) works.
type Status int32

// The statuses that programs handle most often. docs/reference/errors.md lists all.
const (
	Invalid     Status = C.KVT_E_INVALID
	BadHandle   Status = C.KVT_E_HANDLE
	Budget      Status = C.KVT_E_BUDGET
	Again       Status = C.KVT_E_AGAIN
	Busy        Status = C.KVT_E_BUSY
	Closed      Status = C.KVT_E_CLOSED
	Cancelled   Status = C.KVT_E_CANCELLED
	Timeout     Status = C.KVT_E_TIMEOUT
	Unavailable Status = C.KVT_E_UNAVAILABLE
	NotFound    Status = C.KVT_E_NOT_FOUND
	Corrupt     Status = C.KVT_E_CORRUPT
	IO          Status = C.KVT_E_IO
	BadSpec     Status = C.KVT_E_SPEC
	BadState    Status = C.KVT_E_STATE
	Lost        Status = C.KVT_E_LOST
)

// String returns the name of the constant in C, such as "KVT_E_BUSY".
func (s Status) String() string { return C.GoString(C.kvt_status_name(C.kvt_status_t(s))) }

func (s Status) Error() string { return C.GoString(C.kvt_status_str(C.kvt_status_t(s))) }

// Error is the error that failing calls return.
type Error struct {
	// Call is the name of the operation that failed.
	Call    string
	Status  Status
	Message string
	// Offset is the position of the error in a spec; -1 if the error is not about a text.
	Offset int
	// Errno is the operating system's error number, or 0.
	Errno int
}

func (e *Error) Error() string {
	return fmt.Sprintf("kvtier: %s: %s: %s", e.Call, e.Status.String(), e.Message)
}

// Unwrap returns the status, for errors.Is.
func (e *Error) Unwrap() error { return e.Status }

// invalid is the error for arguments that the binding rejects itself.
func invalid(call, message string) *Error {
	return &Error{Call: call, Status: Invalid, Message: message, Offset: -1}
}

// check turns the result of a C call into an error, and frees the C error.
func check(call string, o C.outcome) error {
	if o.status == C.KVT_OK {
		return nil
	}
	e := &Error{Call: call, Status: Status(o.status), Message: Status(o.status).Error(), Offset: -1}
	if o.error == nil {
		return e
	}
	var info C.kvt_error_info_t
	info.struct_size = C.sizeof_kvt_error_info_t
	if C.kvt_error_info(o.error, &info) == C.KVT_OK {
		e.Message = C.GoStringN(info.message, C.int(info.message_bytes))
		e.Errno = int(info.os_errno)
		if uint64(info.offset) != ^uint64(0) {
			e.Offset = int(info.offset)
		}
	}
	C.kvt_error_free(&o.error)
	return e
}

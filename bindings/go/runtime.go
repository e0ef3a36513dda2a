// Package kvtier keeps KV caches of language models in tiers: host memory and disk.
//
// It is a thin layer over the C interface. Close every object, in any order and from any goroutine;
// there are no finalizers. The library reads and writes the memory of Buffers only. That memory is
// outside of Go's heap: the garbage collector does not move it, and nothing is pinned.
package kvtier

// #include "shim.h"
import "C"

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"
)

// owner holds a C handle that is closed once. Calls on a closed handle fail with BadHandle.
type owner struct{ raw atomic.Uint64 }

func (o *owner) get() C.handle { return C.handle(o.raw.Load()) }

// closeHandle closes the handle. It keeps the handle if closing fails with Busy, such as at a deadline.
func (o *owner) closeHandle(call string, closing func(C.handle) C.outcome) error {
	raw := o.raw.Swap(0)
	if raw == 0 {
		return nil
	}
	err := check(call, closing(C.handle(raw)))
	if e, is := err.(*Error); is && e.Status == Busy {
		o.raw.Store(raw)
	}
	return err
}

// text passes a string's bytes to a C call. The pointer is valid during that call only.
func text(s string) (*C.char, C.uint64_t) {
	if s == "" {
		return nil, 0
	}
	b := []byte(s)
	return (*C.char)(unsafe.Pointer(&b[0])), C.uint64_t(len(b))
}

// deadline is a time after now on the library's clock; 0 = no deadline.
func deadline(after time.Duration) C.uint64_t {
	if after <= 0 {
		return 0
	}
	return C.clock_ns() + C.uint64_t(after.Nanoseconds())
}

// Runtime owns the library's threads. Buffers are allocated on a runtime, and stores may share one.
type Runtime struct {
	owner
	// ofStore is set for the runtime of a store that Open opened.
	ofStore bool
}

// OpenRuntime starts a runtime; workers 0 = a number that fits the machine.
func OpenRuntime(workers int) (*Runtime, error) {
	if err := check("open runtime", C.check_abi()); err != nil {
		return nil, err
	}
	var raw C.handle
	if err := check("open runtime", C.runtime_open(C.uint32_t(workers), &raw)); err != nil {
		return nil, err
	}
	r := &Runtime{}
	r.raw.Store(uint64(raw))
	return r, nil
}

// Close cancels ops, waits for them and ends the threads. The runtime of a store that Open opened closes
// with its store: Close fails with BadState.
func (r *Runtime) Close() error {
	_, err := r.CloseWithin(0)
	return err
}

// CloseWithin is Close with a time limit (0 = none). It returns the number of objects that are still
// open on the runtime. They stay valid and are closed as usual.
func (r *Runtime) CloseWithin(limit time.Duration) (leftOpen int, err error) {
	if r.ofStore {
		return 0, &Error{Call: "close", Status: BadState, Offset: -1,
			Message: "the runtime belongs to a store: close the store"}
	}
	var left C.uint64_t
	err = r.closeHandle("close", func(h C.handle) C.outcome {
		return C.runtime_close(h, deadline(limit), &left)
	})
	return int(left), err
}

// Buffer is memory of the library that ops read and write.
type Buffer struct {
	owner
	address unsafe.Pointer
	size    int
	// users counts the ops that use the buffer; bufferClosed once it is closed.
	users atomic.Int64
}

const bufferClosed = -1 << 62

// use keeps the buffer open until unuse.
func (b *Buffer) use() error {
	for {
		n := b.users.Load()
		if n < 0 {
			return &Error{Call: "transfer", Status: BadHandle, Offset: -1,
				Message: "a view is of a closed buffer: use a buffer that is open"}
		}
		if b.users.CompareAndSwap(n, n+1) {
			return nil
		}
	}
}

func (b *Buffer) unuse() { b.users.Add(-1) }

// Buffer allocates size bytes of memory, set to zero.
func (r *Runtime) Buffer(size int) (*Buffer, error) {
	b := &Buffer{size: size}
	var raw C.handle
	err := check("buffer", C.buffer_alloc(r.get(), C.uint64_t(size), &raw, &b.address))
	if err != nil {
		return nil, err
	}
	b.raw.Store(uint64(raw))
	return b, nil
}

// Bytes is the buffer's memory. Do not touch it while an op uses it, nor after Close.
func (b *Buffer) Bytes() []byte { return unsafe.Slice((*byte)(b.address), b.size) }

// Close frees the memory. It fails with Busy while an op uses it: wait for the op first.
func (b *Buffer) Close() error {
	if !b.users.CompareAndSwap(0, bufferClosed) {
		n := b.users.Load()
		if n < 0 {
			return nil
		}
		return &Error{Call: "close", Status: Busy, Offset: -1,
			Message: fmt.Sprintf("%d ops use the buffer: wait for them, then close it", n)}
	}
	err := b.closeHandle("close", func(h C.handle) C.outcome { return C.buffer_free(h) })
	if b.get() != 0 {
		b.users.Store(0)
	}
	return err
}

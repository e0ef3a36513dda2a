// Package kvtier keeps KV caches of language models in tiers: memory, disk, and back.
//
// It is a thin layer over the C interface. Everything that is opened is closed by Close, in any
// order and by any goroutine; there are no finalizers. Bytes that the library reads and writes lie
// in a Buffer, outside of Go's heap, so nothing is pinned and nothing moves.
package kvtier

// #include "shim.h"
import "C"

import (
	"sync/atomic"
	"time"
	"unsafe"
)

// owner is a handle that is closed once. Calls on a closed one fail with BadHandle.
type owner struct{ raw atomic.Uint64 }

func (o *owner) get() C.handle { return C.handle(o.raw.Load()) }

// shut closes it, and keeps it where that fails (Busy at a deadline).
func (o *owner) shut(call string, closing func(C.handle) C.outcome) error {
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

// text gives a string's bytes for the time of a call. Go pointers in C are only for that time.
func text(s string) (*C.char, C.uint64_t) {
	if s == "" {
		return nil, 0
	}
	b := []byte(s)
	return (*C.char)(unsafe.Pointer(&b[0])), C.uint64_t(len(b))
}

// deadline is now and so much on the library's clock; 0 stays "none".
func deadline(after time.Duration) C.uint64_t {
	if after <= 0 {
		return 0
	}
	return C.clock_ns() + C.uint64_t(after.Nanoseconds())
}

// Runtime owns the threads; a store is opened on one.
type Runtime struct{ owner }

// Open starts a runtime; 0 workers are as many as the machine suggests.
func Open(workers int) (*Runtime, error) {
	if err := check("open", C.check_abi()); err != nil {
		return nil, err
	}
	var raw C.handle
	if err := check("open", C.runtime_open(C.uint32_t(workers), &raw)); err != nil {
		return nil, err
	}
	r := &Runtime{}
	r.raw.Store(uint64(raw))
	return r, nil
}

// Close cancels what runs and waits for it.
func (r *Runtime) Close() error {
	_, err := r.CloseWithin(0)
	return err
}

// CloseWithin is Close with a limit (0: none), and says how many things were left open on it: they
// go on answering and are closed as usual.
func (r *Runtime) CloseWithin(limit time.Duration) (leftOpen int, err error) {
	var left C.uint64_t
	err = r.shut("close", func(h C.handle) C.outcome {
		return C.runtime_close(h, deadline(limit), &left)
	})
	return int(left), err
}

// Buffer is memory of the library's, which ops may read and write.
type Buffer struct {
	owner
	address unsafe.Pointer
	size    int
	// users is how many ops use it, or closed.
	users atomic.Int64
}

const closed = -1 << 62

// use keeps it open until unuse.
func (b *Buffer) use() error {
	for {
		n := b.users.Load()
		if n < 0 {
			return &Error{Call: "move", Status: BadHandle, Message: "the buffer is closed", Offset: -1}
		}
		if b.users.CompareAndSwap(n, n+1) {
			return nil
		}
	}
}

func (b *Buffer) unuse() { b.users.Add(-1) }

// Buffer allocates memory; it is zero.
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

// Bytes is the memory itself: not to be touched while an op uses it, nor after Close.
func (b *Buffer) Bytes() []byte { return unsafe.Slice((*byte)(b.address), b.size) }

// Close gives the memory back. It fails with Busy while an op uses it: wait for the op first.
func (b *Buffer) Close() error {
	if !b.users.CompareAndSwap(0, closed) {
		if b.users.Load() < 0 {
			return nil
		}
		return &Error{Call: "close", Status: Busy, Message: "an op uses the buffer: wait for it", Offset: -1}
	}
	err := b.shut("close", func(h C.handle) C.outcome { return C.buffer_free(h) })
	if b.get() != 0 {
		b.users.Store(0)
	}
	return err
}

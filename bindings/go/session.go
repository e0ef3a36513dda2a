package kvtier

// #include "shim.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"
)

// Session is a sequence of tokens in a namespace. While it is open, its chunks stay in at least one
// tier. Its ops outlive it.
type Session struct{ owner }

// Append appends tokens.
func (s *Session) Append(tokens ...uint32) error {
	t, count := tokensOf(tokens)
	return check("append", C.session_append(s.get(), t, count))
}

// Truncate truncates the session to its first tokens.
func (s *Session) Truncate(tokens int) error {
	return check("truncate", C.session_truncate(s.get(), C.uint64_t(tokens)))
}

// Len returns the number of tokens of the session.
func (s *Session) Len() (int, error) {
	var c C.kvt_session_info_t
	err := check("info", C.session_info(s.get(), &c))
	return int(c.tokens), err
}

// Close closes the session. Its chunks may be evicted then.
func (s *Session) Close() error {
	return s.closeHandle("session close", func(h C.handle) C.outcome { return C.session_close(h) })
}

// StepKind is the action of a step of a plan.
type StepKind uint32

// Kinds of steps.
const (
	Resident  StepKind = C.KVT_PLAN_RESIDENT  // nothing to do
	Load      StepKind = C.KVT_PLAN_LOAD      // get the tokens
	Recompute StepKind = C.KVT_PLAN_RECOMPUTE // compute the tokens
)

func (k StepKind) String() string { return [...]string{"resident", "load", "recompute"}[k] }

// Step is a range of tokens with the same action.
type Step struct {
	First, Tokens int
	StepKind      StepKind
	Tier          Tier
	Predicted     time.Duration
}

// Cost is the cost of prefill: Beta nanoseconds per token, and Alpha nanoseconds per token and token of
// context.
type Cost struct{ Alpha, Beta float64 }

// Plan computes the cheapest way to get the KV of all tokens. A nil cost = the observed cost.
func (s *Session) Plan(cost *Cost) ([]Step, error) {
	var alpha, beta C.double
	var has C.int
	if cost != nil {
		alpha, beta, has = C.double(cost.Alpha), C.double(cost.Beta), 1
	}
	rows := make([]C.kvt_plan_step_t, 16)
	for {
		var count C.uint64_t
		var totals C.kvt_plan_t
		o := C.session_plan(s.get(), alpha, beta, has, &rows[0], C.uint64_t(len(rows)), &count, &totals)
		if o.status == C.KVT_E_TOO_SMALL {
			C.kvt_error_free(&o.error)
			rows = make([]C.kvt_plan_step_t, int(count))
			continue
		}
		if err := check("plan", o); err != nil {
			return nil, err
		}
		steps := make([]Step, count)
		for i, r := range rows[:count] {
			steps[i] = Step{int(r.first_token), int(r.tokens), StepKind(r.kind), Tier(r.tier),
				time.Duration(r.predicted_ns)}
		}
		return steps, nil
	}
}

// View describes a layer's K or V: tokens in a buffer from Offset on, each with Heads runs of RunBytes
// bytes. A stride of 0 means no gaps.
type View struct {
	Buffer                  *Buffer
	Offset                  int
	Heads, RunBytes         int
	TokenStride, HeadStride int
}

// Transfer is a range of tokens by a range of layers, with one view per layer. V is empty if the layers
// have none. Tokens 0 = to the end of the session.
type Transfer struct {
	FirstToken, Tokens int
	FirstLayer         int
	K, V               []View
	Level              Level
}

// Put submits a put. The op's value is the number of tokens, from the first on, that were stored without
// a gap.
func (s *Session) Put(t Transfer) (*Op, error) { return s.submit("put", t, 1) }

// Get submits a get, which loads KV into the buffers. The op ends with NotFound if KV is missing; the
// rest arrives.
func (s *Session) Get(t Transfer) (*Op, error) { return s.submit("get", t, 0) }

// fits reports whether a view of so many tokens lies within size bytes. Its arithmetic cannot overflow.
func (v View) fits(tokens, size int) bool {
	heads, head := v.Heads, v.HeadStride
	if heads == 0 {
		heads = 1
	}
	if head == 0 {
		head = v.RunBytes
	}
	token := v.TokenStride
	if token == 0 {
		token = heads * v.RunBytes
	}
	left := size - v.Offset - v.RunBytes
	if left < 0 || heads-1 > left/head {
		return false
	}
	return tokens-1 <= (left-(heads-1)*head)/token
}

// lower converts views for C. It rejects views that exceed their buffer, and marks the buffers as used.
func lower(call string, views []View, tokens int, used map[*Buffer]bool) ([]C.kvt_view_t, error) {
	rows := make([]C.kvt_view_t, len(views))
	for i, v := range views {
		if v.Buffer == nil {
			return nil, invalid(call, fmt.Sprintf("view %d has no buffer: set Buffer", i))
		}
		if v.Offset < 0 || v.RunBytes <= 0 || v.Heads < 0 || v.TokenStride < 0 || v.HeadStride < 0 ||
			!v.fits(tokens, v.Buffer.size) {
			return nil, invalid(call, fmt.Sprintf("view %d of %d tokens exceeds its buffer of %d bytes: "+
				"check Offset, Heads, RunBytes and the strides", i, tokens, v.Buffer.size))
		}
		if !used[v.Buffer] {
			if err := v.Buffer.use(); err != nil {
				return nil, err
			}
			used[v.Buffer] = true
		}
		rows[i].address = unsafe.Add(v.Buffer.address, v.Offset)
		rows[i].run_bytes = C.uint64_t(v.RunBytes)
		rows[i].heads = C.uint32_t(v.Heads)
		rows[i].token_stride_bytes = C.uint64_t(v.TokenStride)
		rows[i].head_stride_bytes = C.uint64_t(v.HeadStride)
	}
	return rows, nil
}

// first is the address of the first view, or null.
func first(rows []C.kvt_view_t) *C.kvt_view_t {
	if len(rows) == 0 {
		return nil
	}
	return &rows[0]
}

// submit submits a put or a get.
func (s *Session) submit(call string, t Transfer, isPut C.int) (*Op, error) {
	tokens := t.Tokens
	if tokens == 0 {
		all, err := s.Len()
		if err != nil {
			return nil, err
		}
		tokens = all - t.FirstToken
	}
	if tokens <= 0 || t.FirstToken < 0 || t.FirstLayer < 0 {
		return nil, invalid(call, fmt.Sprintf("the transfer has %d tokens from token %d and layer %d on: "+
			"it must have at least 1 token, from 0 on", tokens, t.FirstToken, t.FirstLayer))
	}
	if len(t.K) == 0 || (len(t.V) != 0 && len(t.V) != len(t.K)) {
		return nil, invalid(call, fmt.Sprintf("the transfer has %d views of K and %d of V: "+
			"pass one per layer, or none of V", len(t.K), len(t.V)))
	}
	used := map[*Buffer]bool{}
	k, err := lower(call, t.K, tokens, used)
	var v []C.kvt_view_t
	if err == nil {
		v, err = lower(call, t.V, tokens, used)
	}
	op := &Op{call: call}
	for b := range used {
		op.buffers = append(op.buffers, b)
	}
	if err != nil {
		op.releaseBuffers()
		return nil, err
	}
	var raw C.handle
	err = check(call, C.session_transfer(s.get(), isPut, C.uint64_t(t.FirstToken), C.uint64_t(tokens),
		C.uint32_t(t.FirstLayer), first(k), first(v), C.uint32_t(len(k)), C.uint32_t(t.Level), &raw))
	if err != nil {
		op.releaseBuffers()
		return nil, err
	}
	op.raw = raw
	return op, nil
}

// Op is a submitted transfer. Do not touch its buffers until Wait has returned. Call Wait for every op:
// Wait also frees it.
type Op struct {
	call    string
	raw     C.handle
	buffers []*Buffer
	once    sync.Once
	value   int
	err     error
}

// releaseBuffers lets the buffers of the op be closed.
func (o *Op) releaseBuffers() {
	for _, b := range o.buffers {
		b.unuse()
	}
	o.buffers = nil
}

// Wait waits until the op is released and returns its value. If the context ends, Wait cancels the op,
// and still waits for its release: only then may the memory be used. It returns the context's error if
// the op was cancelled. A second call returns the same result.
func (o *Op) Wait(ctx context.Context) (int, error) {
	o.once.Do(func() {
		waited := make(chan struct{})
		var watch sync.WaitGroup
		if ctx.Done() != nil {
			watch.Add(1)
			go func() {
				defer watch.Done()
				select {
				case <-ctx.Done():
					C.op_cancel(o.raw)
				case <-waited:
				}
			}()
		}
		status := C.op_wait(o.raw, 0)
		close(waited)
		watch.Wait()
		if status != C.KVT_OK {
			o.err = check(o.call, C.outcome{status: status})
			return // the library may still use the memory: the buffers stay in use
		}
		var info C.kvt_op_info_t
		o.err = check(o.call, C.op_result(o.raw, &info))
		o.value = int(info.value)
		C.op_free(o.raw)
		o.releaseBuffers()
		if ctx.Err() != nil && errors.Is(o.err, Cancelled) {
			o.err = ctx.Err()
		}
	})
	return o.value, o.err
}

// Cancel cancels the op; Wait returns its result.
func (o *Op) Cancel() { C.op_cancel(o.raw) }

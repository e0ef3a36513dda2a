package kvtier

// #include "shim.h"
import "C"

import (
	"context"
	"errors"
	"sync"
	"time"
	"unsafe"
)

// Session is a sequence of tokens whose KV is kept. Its ops outlive it.
type Session struct{ owner }

// Append adds tokens.
func (s *Session) Append(tokens ...uint32) error {
	t, count := tokensOf(tokens)
	return check("append", C.session_append(s.get(), t, count))
}

// Truncate leaves so many tokens.
func (s *Session) Truncate(tokens int) error {
	return check("truncate", C.session_truncate(s.get(), C.uint64_t(tokens)))
}

// Len is how many tokens it has.
func (s *Session) Len() (int, error) {
	var c C.kvt_session_info_t
	err := check("info", C.session_info(s.get(), &c))
	return int(c.tokens), err
}

// Close lets its chunks leave.
func (s *Session) Close() error {
	return s.shut("session close", func(h C.handle) C.outcome { return C.session_close(h) })
}

// StepKind is what to do with one step of a plan.
type StepKind uint32

// Kinds of steps.
const (
	Resident  StepKind = C.KVT_PLAN_RESIDENT
	Load      StepKind = C.KVT_PLAN_LOAD
	Recompute StepKind = C.KVT_PLAN_RECOMPUTE
)

func (d StepKind) String() string { return [...]string{"resident", "load", "recompute"}[d] }

// Step is one step of a plan.
type Step struct {
	First, Tokens int
	StepKind      StepKind
	Tier          Tier
	Predicted     time.Duration
}

// Cost is what computing takes: Beta nanoseconds a token, and Alpha for each token before it.
type Cost struct{ Alpha, Beta float64 }

// Plan is the cheapest way to have all of the session's KV. A nil cost is what was observed.
func (s *Session) Plan(cost *Cost) ([]Step, error) {
	var alpha, beta C.double
	var has C.int
	if cost != nil {
		alpha, beta, has = C.double(cost.Alpha), C.double(cost.Beta), 1
	}
	rows := make([]C.kvt_plan_step_t, 16)
	for {
		var count C.uint64_t
		var sum C.kvt_plan_t
		o := C.session_plan(s.get(), alpha, beta, has, &rows[0], C.uint64_t(len(rows)), &count, &sum)
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

// View says where a layer's K or V is: tokens of a buffer from Offset on, Heads runs of RunBytes each.
// Strides of 0 mean: without gaps.
type View struct {
	Buffer                  *Buffer
	Offset                  int
	Heads, RunBytes         int
	TokenStride, HeadStride int
}

// Transfer is a range of tokens by a range of layers, with as many views as layers. V is empty where layers
// have none. Tokens 0: to the end.
type Transfer struct {
	FirstToken, Tokens int
	FirstLayer         int
	K, V               []View
	Level              Level
}

// Put stores; the value of the op is how many tokens from the first on are there without a gap.
func (s *Session) Put(m Transfer) (*Op, error) { return s.move("put", m, 1) }

// Get loads into the buffers. It ends with NotFound where something is missing; the rest came.
func (s *Session) Get(m Transfer) (*Op, error) { return s.move("get", m, 0) }

// fits says whether so many tokens lie within so many bytes. Nothing of it can overflow.
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
	room := size - v.Offset - v.RunBytes
	if room < 0 || heads-1 > room/head {
		return false
	}
	return tokens-1 <= (room-(heads-1)*head)/token
}

// lower makes C's views of them, and never one that leads out of its buffer.
func lower(views []View, tokens int, used map[*Buffer]bool) ([]C.kvt_view_t, error) {
	rows := make([]C.kvt_view_t, len(views))
	for i, v := range views {
		if v.Buffer == nil || v.Offset < 0 || v.RunBytes <= 0 || v.Heads < 0 || v.TokenStride < 0 ||
			v.HeadStride < 0 || !v.fits(tokens, v.Buffer.size) {
			return nil, &Error{Call: "move", Status: Invalid, Offset: -1,
				Message: "a view that leads out of its buffer"}
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

func first(rows []C.kvt_view_t) *C.kvt_view_t {
	if len(rows) == 0 {
		return nil
	}
	return &rows[0]
}

func (s *Session) move(call string, m Transfer, isPut C.int) (*Op, error) {
	tokens := m.Tokens
	if tokens == 0 {
		all, err := s.Len()
		if err != nil {
			return nil, err
		}
		tokens = all - m.FirstToken
	}
	if tokens <= 0 || m.FirstToken < 0 || m.FirstLayer < 0 || len(m.K) == 0 ||
		(len(m.V) != 0 && len(m.V) != len(m.K)) {
		return nil, &Error{Call: call, Status: Invalid, Offset: -1,
			Message: "views are one for each layer, tokens at least one"}
	}
	used := map[*Buffer]bool{}
	k, err := lower(m.K, tokens, used)
	var v []C.kvt_view_t
	if err == nil {
		v, err = lower(m.V, tokens, used)
	}
	op := &Op{call: call}
	for b := range used {
		op.buffers = append(op.buffers, b)
	}
	if err != nil {
		op.letGo()
		return nil, err
	}
	var raw C.handle
	err = check(call, C.session_move(s.get(), isPut, C.uint64_t(m.FirstToken), C.uint64_t(tokens),
		C.uint32_t(m.FirstLayer), first(k), first(v), C.uint32_t(len(k)), C.uint32_t(m.Level), &raw))
	if err != nil {
		op.letGo()
		return nil, err
	}
	op.raw = raw
	return op, nil
}

// Op is a move under way. Its buffers are the library's until Wait has returned; every op must be
// waited for, which also frees it.
type Op struct {
	call    string
	raw     C.handle
	buffers []*Buffer
	once    sync.Once
	value   int
	err     error
}

func (o *Op) letGo() {
	for _, b := range o.buffers {
		b.unuse()
	}
	o.buffers = nil
}

// Wait waits until the memory is yours again and gives the op's value. A context that ends cancels
// the op: Wait then still waits for the release (soon, and only then is the memory safe to use), and
// gives the context's error if the op did not succeed before. It may be called again.
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
			return // the memory is not ours: the buffers stay in use
		}
		var info C.kvt_op_info_t
		o.err = check(o.call, C.op_result(o.raw, &info))
		o.value = int(info.value)
		C.op_free(o.raw)
		o.letGo()
		if ctx.Err() != nil && errors.Is(o.err, Cancelled) {
			o.err = ctx.Err()
		}
	})
	return o.value, o.err
}

// Cancel asks it to end; Wait says how it went.
func (o *Op) Cancel() { C.op_cancel(o.raw) }

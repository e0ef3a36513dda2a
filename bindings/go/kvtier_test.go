package kvtier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	layers, chunk, heads, run = 3, 8, 2, 32
	maxTokens                 = 80
	plane                     = maxTokens * heads * run
)

// must ends the test if err is not nil.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantStatus ends the test unless err has the status.
func wantStatus(t *testing.T, err error, want Status) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("the error is %v, want %s", err, want)
	}
}

func openAll(t *testing.T, spec string) (*Runtime, *Store, *Namespace) {
	t.Helper()
	r, err := OpenRuntime(2)
	must(t, err)
	s, err := r.OpenStore(spec)
	must(t, err)
	n, err := s.Namespace(Identity{Model: "m", Salt: "s"},
		Layout{ChunkTokens: chunk, Layers: layers, DType: F16, KVHeads: heads,
			KBytes: heads * run, VBytes: heads * run})
	must(t, err)
	return r, s, n
}

func closeAll(t *testing.T, r *Runtime, s *Store, n *Namespace) {
	t.Helper()
	must(t, n.Close())
	must(t, s.Close(10*time.Minute))
	left, err := r.CloseWithin(10 * time.Minute)
	must(t, err)
	if left != 0 {
		t.Fatalf("%d objects are still open, want 0", left)
	}
	must(t, r.Close()) // a second close does nothing
}

// transferOf describes all layers of a buffer: K and V of each layer, one after the other.
func transferOf(b *Buffer) (m Transfer) {
	for i := 0; i < layers; i++ {
		m.K = append(m.K, View{Buffer: b, Offset: 2 * i * plane, Heads: heads, RunBytes: run})
		m.V = append(m.V, View{Buffer: b, Offset: (2*i + 1) * plane, Heads: heads, RunBytes: run})
	}
	return m
}

func sequence(seed, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(seed*1000 + i)
	}
	return tokens
}

// buffer allocates a buffer; a seed other than 0 fills it with random bytes.
func buffer(t *testing.T, r *Runtime, seed int64) *Buffer {
	t.Helper()
	b, err := r.Buffer(2 * layers * plane)
	must(t, err)
	if seed != 0 {
		rand.New(rand.NewSource(seed)).Read(b.Bytes())
	}
	return b
}

// same reports whether the first tokens of both buffers are equal.
func same(a, b *Buffer, tokens int) bool {
	for i := 0; i < 2*layers; i++ {
		from, to := i*plane, i*plane+tokens*heads*run
		if !bytes.Equal(a.Bytes()[from:to], b.Bytes()[from:to]) {
			return false
		}
	}
	return true
}

// finish waits for an op that must succeed, and returns its value.
func finish(t *testing.T, op *Op, err error) int {
	t.Helper()
	must(t, err)
	n, err := op.Wait(context.Background())
	must(t, err)
	return n
}

func TestDurablePutSurvivesRestart(t *testing.T) {
	spec := fmt.Sprintf(`store(host=1MiB, disk=disk(path="%s/kv", bytes=16MiB, segment=1MiB))`,
		t.TempDir())
	var original []byte
	for round := 0; round < 2; round++ {
		r, s, n := openAll(t, spec)
		session, err := n.Session("a session", 3)
		must(t, err)
		must(t, session.Append(sequence(1, 64)...))
		from, to := buffer(t, r, 7), buffer(t, r, 0)
		if round == 0 {
			original = append([]byte(nil), from.Bytes()...)
			transfer := transferOf(from)
			transfer.Level = Durable
			op, err := session.Put(transfer)
			if n := finish(t, op, err); n != 64 {
				t.Fatal(n)
			}
		} else {
			copy(from.Bytes(), original)
		}
		if reusable, err := n.Reusable(sequence(1, 70)); err != nil || reusable != 64 {
			t.Fatal(reusable, err)
		}
		plan, err := session.Plan(&Cost{Alpha: 1, Beta: 1e9})
		must(t, err)
		if len(plan) != 1 || plan[0].StepKind != Load || plan[0].Tokens != 64 {
			t.Fatal(plan)
		}
		op, err := session.Get(transferOf(to))
		finish(t, op, err)
		if !same(from, to, 64) {
			t.Fatal("the loaded bytes differ from the stored bytes")
		}
		stats, err := s.Stats()
		must(t, err)
		if round == 1 && stats.DiskHitCells == 0 {
			t.Fatal(stats)
		}
		metrics, err := s.Metrics()
		must(t, err)
		if !strings.Contains(metrics, "kvtier_") {
			t.Fatal(metrics)
		}
		must(t, from.Close())
		must(t, to.Close())
		must(t, session.Close())
		closeAll(t, r, s, n)
	}
}

func TestOpenedStoreOwnsItsRuntime(t *testing.T) {
	spec := fmt.Sprintf(`store(host=1MiB, disk=disk(path="%s/kv", bytes=16MiB, segment=1MiB))`,
		t.TempDir())
	layout, err := LayoutGQA(layers, heads, run/2, F16, chunk)
	must(t, err)
	var original []byte
	for round := 0; round < 2; round++ {
		s, err := Open(spec)
		must(t, err)
		n, err := s.Namespace(Identity{Model: "m"}, layout)
		must(t, err)
		session, err := n.Session("", 0)
		must(t, err)
		must(t, session.Append(sequence(1, 64)...))
		b := buffer(t, s.Runtime(), 7)
		transfer := transferOf(b)
		if round == 0 {
			original = append([]byte(nil), b.Bytes()...)
			transfer.Level = Durable
			op, err := session.Put(transfer)
			finish(t, op, err)
		} else {
			clear := b.Bytes()
			for i := range clear {
				clear[i] = 0
			}
			op, err := session.Get(transfer)
			if n := finish(t, op, err); n != 64 || !bytes.Equal(b.Bytes()[:64*heads*run], original[:64*heads*run]) {
				t.Fatal(n)
			}
		}
		wantStatus(t, s.Runtime().Close(), BadState)
		must(t, b.Close())
		must(t, session.Close())
		must(t, n.Close())
		must(t, s.Close(10*time.Minute))
		must(t, s.Close(0)) // a second close does nothing
		_, err = s.Runtime().Buffer(1)
		wantStatus(t, err, BadHandle)
	}
	_, err = Open("stroe")
	wantStatus(t, err, BadSpec)
	s, err := Open("kvtier(workers=1, store=store(host=2MiB))")
	must(t, err)
	must(t, s.Close(10*time.Minute))
}

func TestLayoutsHaveTheSizesOfTheirShapes(t *testing.T) {
	r, s, n := openAll(t, "store(host=1MiB)")
	latent, err := LayoutMLA(6, 512, 64, BF16, 16)
	must(t, err)
	if latent.KBytes != 1152 || latent.VBytes != 0 {
		t.Fatal(latent)
	}
	window, err := LayoutWindow(6, 4, 16, BF16, 16, 64, 3)
	must(t, err)
	if window.KBytes != 128 || window.WindowTokens != 64 || window.FullEvery != 3 || window.FullFirst != 2 {
		t.Fatal(window)
	}
	first := window
	first.FullFirst = 0
	for _, layout := range []Layout{latent, window, first} {
		other, err := s.Namespace(Identity{Model: "m"}, layout)
		must(t, err)
		must(t, other.Close())
	}
	_, err = LayoutGQA(0, 1, 8, F16, 16)
	wantStatus(t, err, Invalid)
	_, err = LayoutGQA(2, 1, 0, F16, 16)
	wantStatus(t, err, Invalid)
	closeAll(t, r, s, n)
}

func TestGetOfMissingKVEndsWithNotFound(t *testing.T) {
	r, s, n := openAll(t, "store(host=1MiB)")
	session, err := n.Session("", 0)
	must(t, err)
	must(t, session.Append(sequence(2, 16)...))
	b := buffer(t, r, 0)
	op, err := session.Get(transferOf(b))
	must(t, err)
	got, err := op.Wait(context.Background())
	wantStatus(t, err, NotFound)
	var e *Error
	if got != 0 || !errors.As(err, &e) || e.Message == "" || e.Call != "get" {
		t.Fatal(got, err)
	}
	if _, again := op.Wait(context.Background()); again != err {
		t.Fatal(again)
	}
	must(t, b.Close())
	must(t, session.Close())
	closeAll(t, r, s, n)
}

func TestInvalidArgumentsAreRejected(t *testing.T) {
	r, s, n := openAll(t, "store(host=1MiB)")
	_, err := r.OpenStore("stroe")
	wantStatus(t, err, BadSpec)
	var e *Error
	if !errors.As(err, &e) || e.Offset != 0 || !strings.Contains(err.Error(), "KVT_E_SPEC") {
		t.Fatal(err)
	}
	_, err = s.Namespace(Identity{}, Layout{})
	wantStatus(t, err, Invalid)
	wantStatus(t, s.SetPolicy(Host, "lruu"), BadSpec)
	must(t, s.SetPolicy(Host, "arc"))
	session, err := n.Session("", 0)
	must(t, err)
	must(t, session.Append(sequence(1, 90)...))
	b := buffer(t, r, 0)
	_, err = session.Put(transferOf(b)) // 90 tokens, but the buffer has 80
	wantStatus(t, err, Invalid)
	_, err = session.Put(Transfer{})
	wantStatus(t, err, Invalid)
	_, err = session.Put(Transfer{Tokens: 8, K: []View{{RunBytes: 1}}})
	wantStatus(t, err, Invalid)
	must(t, b.Close())
	must(t, session.Close())
	wantStatus(t, session.Append(1), BadHandle)
	_, err = session.Len()
	wantStatus(t, err, BadHandle)
	closeAll(t, r, s, n)
	_, err = r.Buffer(1)
	wantStatus(t, err, BadHandle)
	_, err = n.Session("", 0)
	wantStatus(t, err, BadHandle)
}

func TestGoroutinesTransferConcurrently(t *testing.T) {
	r, s, n := openAll(t, "store(host=8MiB)")
	var all sync.WaitGroup
	for g := 0; g < 16; g++ {
		all.Add(1)
		go func(g int) {
			defer all.Done()
			from, to := buffer(t, r, int64(g+1)), buffer(t, r, 0)
			for i := 0; i < 20; i++ {
				session, err := n.Session(fmt.Sprint(g), g)
				if err == nil {
					err = session.Append(sequence(g+100, 8*(1+i%10))...)
				}
				var op *Op
				if err == nil {
					op, err = session.Put(transferOf(from))
				}
				if err == nil {
					_, err = op.Wait(context.Background())
				}
				if err == nil {
					op, err = session.Get(transferOf(to))
				}
				if err == nil {
					_, err = op.Wait(context.Background())
				}
				if err != nil || !same(from, to, 8*(1+i%10)) {
					t.Error(err, g, i)
					return
				}
				runtime.GC() // the library must not use Go memory
				_ = session.Close()
			}
			_ = from.Close()
			_ = to.Close()
		}(g)
	}
	all.Wait()
	closeAll(t, r, s, n)
}

func TestContextCancelsOp(t *testing.T) {
	r, s, n := openAll(t, "store(host=8MiB)")
	b := buffer(t, r, 3)
	for i := 0; i < 200; i++ {
		session, err := n.Session("", 0)
		must(t, err)
		must(t, session.Append(sequence(i, maxTokens)...))
		ctx, cancel := context.WithCancel(context.Background())
		op, err := session.Put(transferOf(b))
		must(t, err)
		if i%2 == 0 {
			cancel()
		}
		if i%8 == 1 {
			wantStatus(t, b.Close(), Busy)
		}
		_, err = op.Wait(ctx)
		if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, Cancelled) {
			t.Fatal(err)
		}
		cancel()
		must(t, session.Close())
	}
	must(t, b.Close())
	closeAll(t, r, s, n)
}

// The store and the runtime are closed during transfers. Each op ends, once.
func TestClosingStoreEndsOps(t *testing.T) {
	for i := 0; i < 20; i++ {
		r, s, n := openAll(t, "store(host=8MiB)")
		b := buffer(t, r, 3)
		var ops []*Op
		for j := 0; j < 8; j++ {
			session, err := n.Session("", 0)
			must(t, err)
			must(t, session.Append(sequence(100*i+j, maxTokens)...))
			op, err := session.Put(transferOf(b))
			must(t, err)
			ops = append(ops, op)
			must(t, session.Close())
		}
		must(t, n.Close())
		must(t, s.Close(0))
		for _, op := range ops {
			if _, err := op.Wait(context.Background()); err != nil &&
				!errors.Is(err, Cancelled) && !errors.Is(err, Closed) {
				t.Fatal(err)
			}
		}
		must(t, b.Close())
		must(t, r.Close())
	}
}

func TestPolicyEvictsAndSwitches(t *testing.T) {
	p, err := OpenPolicy("lru", PolicyOptions{Capacity: 100})
	must(t, err)
	for id := uint64(1); id <= 5; id++ {
		must(t, p.Insert(int64(id), Object{ID: id, Units: 1}))
	}
	must(t, p.Insert(6, Object{ID: 6, Units: 2, Parent: 5, HasParent: true}))
	wantStatus(t, p.Insert(7, Object{ID: 6, Units: 1}), Invalid)
	if n, err := p.Lookup(8, 1, 2, 99); err != nil || n != 2 {
		t.Fatal(n, err)
	}
	victims, shortfall, err := p.Evict(9, 3, 10)
	if err != nil || shortfall != 0 || len(victims) != 2 || victims[0].ID != 3 || victims[1] != (Victim{6, 2}) {
		t.Fatal(victims, shortfall, err)
	}
	must(t, p.Switch("qos(inner=s3fifo)"))
	spec, err := p.Spec()
	if err != nil || !strings.HasPrefix(spec, "qos") {
		t.Fatal(spec, err)
	}
	victims, shortfall, err = p.Evict(10, 100, 10)
	if err != nil || len(victims) != 4 || shortfall != 96 {
		t.Fatal(victims, shortfall, err)
	}
	wantStatus(t, p.Switch("arcc"), BadSpec)
	must(t, p.Close())
	must(t, p.Close())
	wantStatus(t, p.Switch("arc"), BadHandle)
}

// Views that exceed their buffer are rejected, also if their strides overflow; views of closed buffers,
// too.
func TestViewsOutsideTheirBufferAreRejected(t *testing.T) {
	r, s, n := openAll(t, "store(host=1MiB)")
	session, err := n.Session("", 0)
	must(t, err)
	must(t, session.Append(sequence(1, 8)...))
	b := buffer(t, r, 1)
	const huge = 1 << 62
	for _, v := range []View{
		{Buffer: b, Heads: heads, RunBytes: run, TokenStride: huge},
		{Buffer: b, Heads: heads, RunBytes: run, HeadStride: huge},
		{Buffer: b, Heads: 1 << 32, RunBytes: run, HeadStride: 1 << 32},
		{Buffer: b, Heads: heads, RunBytes: run, Offset: huge},
	} {
		for _, tokens := range []int{2, 5, 8} {
			_, err = session.Put(Transfer{K: []View{v}, V: []View{v}, Tokens: tokens})
			wantStatus(t, err, Invalid)
		}
	}
	must(t, b.Close()) // no op uses it
	must(t, b.Close())
	_, err = session.Put(transferOf(b))
	wantStatus(t, err, BadHandle)
	must(t, session.Close())
	closeAll(t, r, s, n)
}

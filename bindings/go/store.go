package kvtier

// #include "shim.h"
import "C"

import (
	"time"
	"unsafe"
)

// Tier is where bytes rest.
type Tier uint32

// The tiers.
const (
	Host   Tier = C.KVT_TIER_HOST
	Disk   Tier = C.KVT_TIER_DISK
	NoTier Tier = C.KVT_TIER_NONE
)

// Level says when a put has ended: in memory, on disk, or synced.
type Level uint32

// The levels.
const (
	RAM     Level = C.KVT_LEVEL_RAM
	OnDisk  Level = C.KVT_LEVEL_DISK
	Durable Level = C.KVT_LEVEL_DURABLE
)

// DType is what numbers a layer's KV has.
type DType uint32

// The types.
const (
	AnyBytes DType = C.KVT_DTYPE_BYTES
	F32      DType = C.KVT_DTYPE_F32
	F16      DType = C.KVT_DTYPE_F16
	BF16     DType = C.KVT_DTYPE_BF16
)

// Store keeps KV in tiers. Any goroutine may use it.
type Store struct{ owner }

// OpenStore opens a store by its spec, such as `store(host=8GiB, disk=disk(path="kv", bytes=1TiB))`.
func (r *Runtime) OpenStore(spec string) (*Store, error) {
	var raw C.handle
	s, n := text(spec)
	if err := check("store", C.store_open(r.get(), s, n, &raw)); err != nil {
		return nil, err
	}
	store := &Store{}
	store.raw.Store(uint64(raw))
	return store, nil
}

// Close waits for what is written, at most so long (0: as long as it takes; then Busy, and the store
// stays open).
func (s *Store) Close(limit time.Duration) error {
	return s.shut("store close", func(h C.handle) C.outcome { return C.store_close(h, deadline(limit)) })
}

// SetPolicy goes on with another policy for Host or Disk.
func (s *Store) SetPolicy(tier Tier, spec string) error {
	t, n := text(spec)
	return check("set policy", C.store_set_policy(s.get(), C.uint32_t(tier), t, n))
}

// StoreStats are the numbers that say how it goes; Metrics has all.
type StoreStats struct {
	Puts, Gets, HostHitCells, DiskHitCells, MissedCells uint64
	HostUsedBytes, DiskUsedBytes, EvictedChunks         uint64
}

// Stats counts.
func (s *Store) Stats() (StoreStats, error) {
	var c C.kvt_store_stats_t
	if err := check("stats", C.store_stats(s.get(), &c)); err != nil {
		return StoreStats{}, err
	}
	return StoreStats{
		Puts: uint64(c.puts), Gets: uint64(c.gets), HostHitCells: uint64(c.host_hit_cells),
		DiskHitCells: uint64(c.disk_hit_cells), MissedCells: uint64(c.missed_cells),
		HostUsedBytes: uint64(c.host_used_bytes), DiskUsedBytes: uint64(c.disk_used_bytes),
		EvictedChunks: uint64(c.evicted_chunks),
	}, nil
}

// Metrics is the text that Prometheus reads.
func (s *Store) Metrics() (string, error) {
	for room := 64 << 10; ; room *= 2 {
		to := make([]byte, room)
		var n C.uint64_t
		o := C.store_metrics(s.get(), (*C.char)(unsafe.Pointer(&to[0])), C.uint64_t(room), &n)
		if o.status == C.KVT_E_TOO_SMALL {
			continue
		}
		return string(to[:n]), check("metrics", o)
	}
}

// Identity is everything that makes KV other KV. Empty fields are absent.
type Identity struct{ Model, Weights, Salt, Recipe string }

// Layout says what a token has in each layer. All layers are alike here, and need every earlier token;
// the C interface also has layers with windows and with states.
type Layout struct {
	ChunkTokens    int
	Layers         int
	DType          DType
	KVHeads        int
	KBytes, VBytes int // of a token in a layer
}

// Namespace is who may share.
type Namespace struct{ owner }

func field(s string) (*C.char, C.uint64_t) {
	if s == "" {
		return nil, C.NO_TEXT
	}
	return text(s)
}

// Namespace opens one, or finds it: equal identities and layouts are the same.
func (s *Store) Namespace(who Identity, what Layout) (*Namespace, error) {
	model, modelBytes := field(who.Model)
	weights, weightsBytes := field(who.Weights)
	salt, saltBytes := field(who.Salt)
	recipe, recipeBytes := field(who.Recipe)
	if what.Layers <= 0 {
		return nil, &Error{Call: "namespace", Status: Invalid, Message: "a layout without layers", Offset: -1}
	}
	layers := make([]C.uint16_t, what.Layers)
	for i := range layers {
		layers[i] = C.uint16_t(i)
	}
	var raw C.handle
	// What is built in shim.h points at these for the time of the call alone.
	err := check("namespace", C.namespace_open(s.get(), model, modelBytes, weights, weightsBytes,
		salt, saltBytes, recipe, recipeBytes, C.uint32_t(what.ChunkTokens), C.uint32_t(what.DType),
		C.uint32_t(what.KVHeads), C.uint64_t(what.KBytes), C.uint64_t(what.VBytes), &layers[0],
		C.uint64_t(what.Layers), 0, &raw))
	if err != nil {
		return nil, err
	}
	n := &Namespace{}
	n.raw.Store(uint64(raw))
	return n, nil
}

// Close closes it; its chunks and sessions stay.
func (n *Namespace) Close() error {
	return n.shut("namespace close", func(h C.handle) C.outcome { return C.namespace_close(h) })
}

func tokensOf(tokens []uint32) (*C.uint32_t, C.uint64_t) {
	if len(tokens) == 0 {
		return nil, 0
	}
	return (*C.uint32_t)(unsafe.Pointer(&tokens[0])), C.uint64_t(len(tokens))
}

// Reusable is how many tokens of a sequence could be gone on from. Nothing is held.
func (n *Namespace) Reusable(tokens []uint32) (int, error) {
	var c C.kvt_lookup_t
	t, count := tokensOf(tokens)
	err := check("lookup", C.namespace_lookup(n.get(), t, count, &c))
	return int(c.reusable_tokens), err
}

// Session opens a sequence without tokens; the name and the tenant are for the books.
func (n *Namespace) Session(name string, tenant int) (*Session, error) {
	var raw C.handle
	t, length := text(name)
	err := check("session", C.session_open(n.get(), t, length, C.uint32_t(tenant), &raw))
	if err != nil {
		return nil, err
	}
	s := &Session{}
	s.raw.Store(uint64(raw))
	return s, nil
}

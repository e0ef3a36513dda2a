package kvtier

// #include "shim.h"
import "C"

import (
	"fmt"
	"time"
	"unsafe"
)

// Tier is a storage level.
type Tier uint32

// The tiers.
const (
	Host   Tier = C.KVT_TIER_HOST
	Disk   Tier = C.KVT_TIER_DISK
	NoTier Tier = C.KVT_TIER_NONE
)

// Level is when a put completes.
type Level uint32

// The levels.
const (
	RAM     Level = C.KVT_LEVEL_RAM     // in host memory
	OnDisk  Level = C.KVT_LEVEL_DISK    // written to disk
	Durable Level = C.KVT_LEVEL_DURABLE // synced to disk
)

// DType is the element type of a layer's KV.
type DType uint32

// The element types.
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

// Close waits until KV in memory is written to disk, at most for limit (0 = no limit). At the limit it
// fails with Busy: call it again.
func (s *Store) Close(limit time.Duration) error {
	return s.closeHandle("store close", func(h C.handle) C.outcome { return C.store_close(h, deadline(limit)) })
}

// SetPolicy switches the eviction policy of Host or Disk.
func (s *Store) SetPolicy(tier Tier, spec string) error {
	t, n := text(spec)
	return check("set policy", C.store_set_policy(s.get(), C.uint32_t(tier), t, n))
}

// StoreStats has the main counters of a store; Metrics has all of them.
type StoreStats struct {
	Puts, Gets, HostHitCells, DiskHitCells, MissedCells uint64
	HostUsedBytes, DiskUsedBytes, EvictedChunks         uint64
}

// Stats reads the counters of the store.
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

// Metrics returns the statistics of the store as Prometheus text.
func (s *Store) Metrics() (string, error) {
	for capacity := 64 << 10; ; capacity *= 2 {
		to := make([]byte, capacity)
		var n C.uint64_t
		o := C.store_metrics(s.get(), (*C.char)(unsafe.Pointer(&to[0])), C.uint64_t(capacity), &n)
		if o.status == C.KVT_E_TOO_SMALL {
			continue
		}
		return string(to[:n]), check("metrics", o)
	}
}

// Identity is everything that KV depends on beside its tokens. Sessions share KV if all fields are
// equal. Empty fields are absent.
type Identity struct{ Model, Weights, Salt, Recipe string }

// Layout describes the KV of a token in each layer. All layers have equal sizes and need all earlier
// tokens; the C interface also has layers with windows and with states.
type Layout struct {
	ChunkTokens    int
	Layers         int
	DType          DType
	KVHeads        int
	KBytes, VBytes int // per token and layer
}

// Namespace is the unit of sharing: its sessions share the KV of common prefixes.
type Namespace struct{ owner }

// field passes a field of an identity to C; an empty one is absent.
func field(s string) (*C.char, C.uint64_t) {
	if s == "" {
		return nil, C.NO_TEXT
	}
	return text(s)
}

// Namespace opens a namespace. Equal identities and layouts give the same namespace.
func (s *Store) Namespace(identity Identity, layout Layout) (*Namespace, error) {
	model, modelBytes := field(identity.Model)
	weights, weightsBytes := field(identity.Weights)
	salt, saltBytes := field(identity.Salt)
	recipe, recipeBytes := field(identity.Recipe)
	if layout.Layers <= 0 {
		return nil, invalid("namespace", fmt.Sprintf("the layout has %d layers: set Layers to at least 1",
			layout.Layers))
	}
	layers := make([]C.uint16_t, layout.Layers)
	for i := range layers {
		layers[i] = C.uint16_t(i)
	}
	var raw C.handle
	// Structs in shim.h point to these bytes during the call only.
	err := check("namespace", C.namespace_open(s.get(), model, modelBytes, weights, weightsBytes,
		salt, saltBytes, recipe, recipeBytes, C.uint32_t(layout.ChunkTokens), C.uint32_t(layout.DType),
		C.uint32_t(layout.KVHeads), C.uint64_t(layout.KBytes), C.uint64_t(layout.VBytes), &layers[0],
		C.uint64_t(layout.Layers), 0, &raw))
	if err != nil {
		return nil, err
	}
	n := &Namespace{}
	n.raw.Store(uint64(raw))
	return n, nil
}

// Close closes the namespace. Its chunks stay in the store, its sessions stay open.
func (n *Namespace) Close() error {
	return n.closeHandle("namespace close", func(h C.handle) C.outcome { return C.namespace_close(h) })
}

// tokensOf passes tokens to a C call.
func tokensOf(tokens []uint32) (*C.uint32_t, C.uint64_t) {
	if len(tokens) == 0 {
		return nil, 0
	}
	return (*C.uint32_t)(unsafe.Pointer(&tokens[0])), C.uint64_t(len(tokens))
}

// Reusable returns the number of leading tokens of a sequence whose KV can be reused. It references
// nothing: chunks may be evicted before the next call.
func (n *Namespace) Reusable(tokens []uint32) (int, error) {
	var c C.kvt_lookup_t
	t, count := tokensOf(tokens)
	err := check("lookup", C.namespace_lookup(n.get(), t, count, &c))
	return int(c.reusable_tokens), err
}

// Session opens a session without tokens. Name and tenant are for statistics; the tenant is also for
// fairness.
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

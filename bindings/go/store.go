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
type Store struct {
	owner
	runtime *Runtime
}

// Open opens a store with a runtime and a budget of its own, which Close closes, too. The spec is
// `store(...)`, or `kvtier(workers=4, budget=budget(host=8GiB), store=store(...))` with parameters of the
// runtime and the budget; an empty one is `store(host=1GiB)`.
func Open(spec string) (*Store, error) {
	if err := check("open", C.check_abi()); err != nil {
		return nil, err
	}
	var raw, runtime C.handle
	s, n := text(spec)
	if err := check("open", C.open_all(s, n, &raw, &runtime)); err != nil {
		return nil, err
	}
	store := &Store{runtime: &Runtime{ofStore: true}}
	store.raw.Store(uint64(raw))
	store.runtime.raw.Store(uint64(runtime))
	return store, nil
}

// Runtime returns the runtime of the store, for buffers. That of Open is valid until the store is closed.
func (s *Store) Runtime() *Runtime { return s.runtime }

// OpenStore opens a store by its spec, such as `store(host=8GiB, disk=disk(path="kv", bytes=1TiB))`.
func (r *Runtime) OpenStore(spec string) (*Store, error) {
	var raw C.handle
	s, n := text(spec)
	if err := check("store", C.store_open(r.get(), s, n, &raw)); err != nil {
		return nil, err
	}
	store := &Store{runtime: r}
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

// Layout describes the KV of a token in each layer. All layers have equal sizes; the C interface also has
// layouts whose layers differ. LayoutGQA, LayoutMLA and LayoutWindow return the layouts of most models.
type Layout struct {
	ChunkTokens    int
	Layers         int
	DType          DType
	KVHeads        int
	KBytes, VBytes int // per token and layer
	// WindowTokens are the tokens that a layer with a window attends to; 0 = all layers attend to all.
	WindowTokens int
	// FullEvery: each FullEvery-th layer attends to all tokens, from layer FullFirst on; 0 = none does.
	FullEvery, FullFirst int
}

// layoutOf returns a layout that C filled.
func layoutOf(c *C.kvt_layout_t, err error) (Layout, error) {
	if err != nil {
		return Layout{}, err
	}
	return Layout{ChunkTokens: int(c.chunk_tokens), Layers: int(c.layers), DType: DType(c.dtype),
		KVHeads: int(c.kv_heads), KBytes: int(c.k_bytes), VBytes: int(c.v_bytes),
		WindowTokens: int(c.window_tokens), FullEvery: int(c.full_every), FullFirst: int(c.full_first)}, nil
}

// LayoutGQA returns the layout of grouped-query, multi-query or multi-head attention: K and V by head.
func LayoutGQA(layers, kvHeads, headDim int, dtype DType, chunkTokens int) (Layout, error) {
	var c C.kvt_layout_t
	return layoutOf(&c, check("layout", C.layout_gqa(&c, C.uint32_t(layers), C.uint32_t(kvHeads),
		C.uint32_t(headDim), C.uint32_t(dtype), C.uint32_t(chunkTokens))))
}

// LayoutMLA returns the layout of latent attention: one plane, K, of the latent and the rotated part of
// the key.
func LayoutMLA(layers, latentDim, ropeDim int, dtype DType, chunkTokens int) (Layout, error) {
	var c C.kvt_layout_t
	return layoutOf(&c, check("layout", C.layout_mla(&c, C.uint32_t(layers), C.uint32_t(latentDim),
		C.uint32_t(ropeDim), C.uint32_t(dtype), C.uint32_t(chunkTokens))))
}

// LayoutWindow returns the layout of layers that attend to the last windowTokens tokens only, except each
// fullEvery-th: 6 for Gemma 3, 2 for gpt-oss, 0 = none. The first one is layer fullEvery - 1; set FullFirst
// where it is another.
func LayoutWindow(layers, kvHeads, headDim int, dtype DType, chunkTokens, windowTokens, fullEvery int) (Layout, error) {
	var c C.kvt_layout_t
	return layoutOf(&c, check("layout", C.layout_window(&c, C.uint32_t(layers), C.uint32_t(kvHeads),
		C.uint32_t(headDim), C.uint32_t(dtype), C.uint32_t(chunkTokens), C.uint32_t(windowTokens),
		C.uint32_t(fullEvery))))
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
	c := C.kvt_layout_t{struct_size: C.sizeof_kvt_layout_t, chunk_tokens: C.uint32_t(layout.ChunkTokens),
		layers: C.uint32_t(layout.Layers), dtype: C.kvt_dtype_t(layout.DType),
		kv_heads: C.uint32_t(layout.KVHeads), window_tokens: C.uint32_t(layout.WindowTokens),
		full_every: C.uint32_t(layout.FullEvery), full_first: C.uint32_t(layout.FullFirst),
		k_bytes: C.uint64_t(layout.KBytes), v_bytes: C.uint64_t(layout.VBytes)}
	var raw C.handle
	// Structs in shim.h point to these bytes during the call only.
	err := check("namespace", C.namespace_open(s.get(), model, modelBytes, weights, weightsBytes,
		salt, saltBytes, recipe, recipeBytes, &c, 0, &raw))
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

/// @file
/// Weights: models in files, and streamers that load their units.
///
/// A model is a GGUF or safetensors file, or a table of byte ranges; its units are layers, experts
/// and embeddings. A streamer keeps as many units resident as the memory allows, and loads the
/// others ahead of their use, pass after pass. A lease keeps a unit in place while it is used.
///
/// Life cycle: kvt_model_open, kvt_stream_open, for each pass kvt_stream_acquire and _release of
/// each unit, kvt_stream_close, kvt_model_close.
///
///     kvt_str_t path = {"model.gguf", KVT_NUL_TERMINATED};
///     if (kvt_model_open(&path, 1, sizeof path, &model, &err) != KVT_OK) return fail(err);
///     kvt_model_info_t facts = KVT_MODEL_INFO_INIT;
///     if (kvt_model_info(model, &facts) != KVT_OK) return fail(NULL);
///     kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
///     terms.host_ceiling_bytes = 4ull << 30; /* weights get at most 4 GiB */
///     kvt_stream_opts_t opts = KVT_STREAM_OPTS_INIT;
///     opts.model = model, opts.terms = &terms;
///     if (kvt_stream_open(runtime, &opts, &streamer, &err) != KVT_OK) return fail(err);
///     for (uint32_t unit = 0; unit < facts.units; unit++) { /* a pass */
///         kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
///         if (kvt_stream_acquire(streamer, unit, 0, 0, &lease, &err) != KVT_OK) return fail(err);
///         use(lease.address); /* lease.bytes bytes, as in the file */
///         if (kvt_stream_release(streamer, &lease, 0, &err) != KVT_OK) return fail(err);
///     }
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_STREAM_H
#define KVTIER_STREAM_H

#include <kvtier/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_device_t; /* kvtier/device.h */

/* ---- Models ---------------------------------------------------------------------------------- */

/// The files of a model: tensors, and the units that they are loaded in. Immutable; belongs to no
/// runtime and keeps no file open. Texts of its structs are not NUL-terminated; they and other
/// arrays are valid until the model is closed. At most 4096 files, 2^20 tensors, 2^18 units and
/// 2^22 parts of tensors.
typedef struct kvt_model_t kvt_model_t;

/// No layer, no expert; for kvt_stream_unit_address: all units.
#define KVT_NONE 4294967295

/// Formats of models.
typedef uint32_t kvt_format_t;
enum {
    /// GGUF, one file or split.
    KVT_FORMAT_GGUF = 1,
    /// Safetensors, one file or sharded.
    KVT_FORMAT_SAFETENSORS = 2,
    /// Byte ranges that the engine names: kvt_model_table.
    KVT_FORMAT_TABLE = 3,
};

/// A text or a path. Stands in arrays.
typedef struct kvt_str_t {
    const char *text;
    /// Length of the text, or KVT_NUL_TERMINATED.
    uint64_t bytes;
} kvt_str_t;

/// Properties of a model; 0 where its files do not state them.
typedef struct kvt_model_info_t {
    uint64_t struct_size;
    /// Bytes of all tensors.
    uint64_t bytes;
    kvt_format_t format;
    /// Numbers of files, units and tensors.
    uint32_t files;
    uint32_t units;
    uint32_t tensors;
    /// Such as "llama".
    const char *architecture;
    uint64_t architecture_bytes;
    uint32_t layers;
    /// Elements of a hidden state.
    uint32_t hidden;
    /// Query heads.
    uint32_t heads;
    /// Key and value heads of a layer, the most where layers differ; 1 where keys are a latent
    /// vector.
    uint32_t kv_heads;
    /// Elements of a stored key.
    uint32_t key_dim;
    /// Elements of a value; 0 beside a key_dim: values are computed from the stored keys.
    uint32_t value_dim;
    /// Longest context in tokens.
    uint32_t context;
    uint32_t vocabulary;
    /// Experts of a layer.
    uint32_t experts;
    /// Experts of a layer that a token uses.
    uint32_t experts_used;
    /// BLAKE3 of the headers, of the lengths of the files, and of the names, types, sizes and
    /// offsets of the tensors. Models that differ only in weights may have the same.
    uint8_t fingerprint[32];
} kvt_model_info_t;
#define KVT_MODEL_INFO_INIT KVT_INIT_(kvt_model_info_t)

/// A file of a model.
typedef struct kvt_model_file_t {
    uint64_t struct_size;
    const char *path;
    uint64_t path_bytes;
    /// Length of the file.
    uint64_t bytes;
} kvt_model_file_t;
#define KVT_MODEL_FILE_INIT KVT_INIT_(kvt_model_file_t)

/// Opens a model and groups its tensors into units by their names. Reads headers, not weights.
///
/// @param paths  All files of the model, or one path: a GGUF or safetensors file, the index of a
///               sharded model, the directory of a model, any file of a split GGUF model.
/// @return KVT_E_CORRUPT (a damaged file, files that contradict each other), KVT_E_UNSUPPORTED
///         (version or data type), KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT.
kvt_status_t kvt_model_open(const kvt_str_t *paths, uint64_t path_count, uint64_t stride_bytes,
                            kvt_model_t **out, kvt_error_t **err);

/// Closes a model. Streamers that were opened with it stay open.
kvt_status_t kvt_model_close(kvt_model_t **model);

/// Reads the properties of a model.
kvt_status_t kvt_model_info(const kvt_model_t *model, kvt_model_info_t *out);

/// Describes a file of a model.
///
/// @param file  Below kvt_model_info_t.files.
kvt_status_t kvt_model_file(const kvt_model_t *model, uint32_t file, kvt_model_file_t *out);

/* ---- Contents of models ---------------------------------------------------------------------- */

/// Roles of a unit.
typedef uint32_t kvt_role_t;
enum {
    /// Other tensors.
    KVT_ROLE_OTHER = 0,
    /// A layer, without its experts.
    KVT_ROLE_LAYER = 1,
    /// An expert of a layer.
    KVT_ROLE_EXPERT = 2,
    /// The table of token embeddings.
    KVT_ROLE_EMBEDDING = 3,
    /// The norm between the last layer and the head.
    KVT_ROLE_NORM = 4,
    /// The output projection (LM head).
    KVT_ROLE_HEAD = 5,
};

/// A unit of weights: bytes that are needed together and loaded together. Units have the order in
/// which a pass needs them: the embedding, tensors without a role, each layer followed by its
/// experts, the norm, the head. Units of kvt_model_table have the order of the table.
typedef struct kvt_unit_t {
    uint64_t struct_size;
    /// Such as "layer 3 expert 7".
    const char *name;
    uint64_t name_bytes;
    kvt_role_t role;
    /// Layer and expert; KVT_NONE where the role has none.
    uint32_t layer;
    uint32_t expert;
    /// Parts of tensors in the unit: see kvt_model_unit_parts.
    uint32_t parts;
    /// Bytes of its tensors.
    uint64_t bytes;
    /// Bytes in memory: tensors with their alignment, a multiple of 4096.
    uint64_t image_bytes;
} kvt_unit_t;
#define KVT_UNIT_INIT KVT_INIT_(kvt_unit_t)

/// A tensor in its file.
typedef struct kvt_tensor_t {
    uint64_t struct_size;
    const char *name;
    uint64_t name_bytes;
    /// Data type as the format names it, such as "Q6_K" or "BF16".
    const char *dtype;
    uint64_t dtype_bytes;
    /// Dimensions, the innermost first.
    const uint64_t *dims;
    uint32_t dim_count;
    /// Index of the file; offset and bytes are those in the file.
    uint32_t file;
    uint64_t offset;
    uint64_t bytes;
    /// Parts: 1, or one for each expert; 0 if the tensor has no bytes.
    uint32_t parts;
    uint32_t reserved;
} kvt_tensor_t;
#define KVT_TENSOR_INIT KVT_INIT_(kvt_tensor_t)

/// A tensor in its unit, or one expert's share of a tensor. Stands in arrays.
typedef struct kvt_part_t {
    uint32_t tensor;
    uint32_t unit;
    /// Offset in the unit: the first byte is at kvt_unit_lease_t.address + at.
    uint64_t at;
    /// Offset in the tensor; 0 unless the tensor is divided between experts.
    uint64_t from;
    /// Length of the part.
    uint64_t bytes;
} kvt_part_t;

/// Describes a unit of a model.
///
/// @param unit  Below kvt_model_info_t.units.
kvt_status_t kvt_model_unit(const kvt_model_t *model, uint32_t unit, kvt_unit_t *out);

/// Describes a tensor of a model. Tensors have the order of files and offsets.
///
/// @param tensor  Below kvt_model_info_t.tensors.
kvt_status_t kvt_model_tensor(const kvt_model_t *model, uint32_t tensor, kvt_tensor_t *out);

/// Lists the parts of tensors in a unit, by offset in the unit.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^22).
kvt_status_t kvt_model_unit_parts(const kvt_model_t *model, uint32_t unit, kvt_part_t *parts,
                                  uint64_t capacity, uint64_t stride_bytes, uint64_t *out_count);

/// Lists the parts of a tensor, by offset in the tensor: one, or one for each expert.
///
/// @return As kvt_model_unit_parts.
kvt_status_t kvt_model_tensor_parts(const kvt_model_t *model, uint32_t tensor, kvt_part_t *parts,
                                    uint64_t capacity, uint64_t stride_bytes, uint64_t *out_count);

/// Finds a tensor by its name, and writes its index.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT (a name over 1 MiB).
kvt_status_t kvt_model_find_tensor(const kvt_model_t *model, const char *name, uint64_t name_bytes,
                                   uint32_t *out);

/// Finds the unit of a layer, or of an expert of a layer.
///
/// @param expert  KVT_NONE = the layer itself.
/// @return KVT_E_NOT_FOUND.
kvt_status_t kvt_model_find_unit(const kvt_model_t *model, uint32_t layer, uint32_t expert,
                                 uint32_t *out);

/* ---- Models from tables of byte ranges ------------------------------------------------------- */

/// A byte range of a file. Stands in arrays.
typedef struct kvt_file_range_t {
    /// Index in kvt_model_table_t.paths.
    uint32_t file;
    uint32_t reserved;
    uint64_t offset;
    /// At least 1.
    uint64_t bytes;
} kvt_file_range_t;

/// A unit that the engine names. Stands in arrays.
typedef struct kvt_unit_entry_t {
    const char *name;
    /// 1 to 504, or KVT_NUL_TERMINATED.
    uint64_t name_bytes;
    kvt_role_t role;
    /// Below 65536 with KVT_ROLE_LAYER and KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    uint32_t layer;
    /// Below 65536 with KVT_ROLE_EXPERT; else 0 or KVT_NONE.
    uint32_t expert;
    uint32_t reserved;
    /// Bytes of the unit, at least one range; each range becomes a tensor.
    const kvt_file_range_t *ranges;
    uint64_t range_count;
} kvt_unit_entry_t;

/// A model as a table of byte ranges.
typedef struct kvt_model_table_t {
    uint64_t struct_size;
    /// 0: none are defined.
    uint64_t flags;
    const kvt_str_t *paths;
    uint64_t path_count;
    uint64_t path_stride_bytes;
    /// In the order in which a pass needs them.
    const kvt_unit_entry_t *units;
    uint64_t unit_count;
    uint64_t unit_stride_bytes;
    uint64_t range_stride_bytes;
} kvt_model_table_t;
#define KVT_MODEL_TABLE_INIT KVT_INIT_(kvt_model_table_t)

/// Makes a model from units that the engine names, for files of other formats. Each range becomes a
/// tensor, named after its unit: "layer 3#0". Ranges lie in their files and do not overlap; no two
/// units are the same layer or expert. Plans reserve no KV, unless kvt_stream_terms_t.kv_bytes is
/// set.
///
/// @return KVT_E_NOT_FOUND, KVT_E_IO, KVT_E_LIMIT.
kvt_status_t kvt_model_table(const kvt_model_table_t *table, kvt_model_t **out, kvt_error_t **err);

/* ---- Options of streamers -------------------------------------------------------------------- */

/// Where the engine computes.
typedef uint32_t kvt_compute_t;
enum {
    /// The engine computes on the processor, with weights in host memory.
    KVT_COMPUTE_HOST = 1,
    /// The engine computes on kvt_stream_opts_t.device.
    KVT_COMPUTE_DEVICE = 2,
};

/// How memory is divided among units.
typedef uint32_t kvt_stream_mode_t;
enum {
    /// Some units are resident, the others pass through a few slots.
    KVT_STREAM_TIERED = 0,
    /// No unit is resident: all memory is slots, and a policy chooses the victim. For unknown orders;
    /// slower than KVT_STREAM_TIERED where the order is known.
    KVT_STREAM_RING = 1,
};

/// Which units are resident: units at equal distances, the first, or the last ones.
typedef uint32_t kvt_place_t;
enum {
    KVT_PLACE_INTERLEAVED = 0,
    KVT_PLACE_FIRST = 1,
    KVT_PLACE_LAST = 2,
};

/// Flags of kvt_stream_terms_t.
typedef uint64_t kvt_terms_flags_t;
enum {
    /// Take 0 in the field of that name as 0, not as the default.
    KVT_TERMS_DEVICE_CEILING = 1,
    KVT_TERMS_HOST_CEILING = 2,
    KVT_TERMS_DEVICE_SAFETY = 4,
    KVT_TERMS_HOST_RESERVE = 8,
    KVT_TERMS_KV = 16,
    KVT_TERMS_EXPERT_SLOTS = 32,
    /// Weights must be able to give memory back later, by kvt_stream_rebalance or to the budget. Slots
    /// exist even where all units fit, of the size that lets most memory be given back. Experts get no
    /// more slots than a layer needs, unless expert_slots is set; slots beyond that need are given
    /// back, too. Always set with a budget; no effect with KVT_STREAM_RING.
    KVT_TERMS_SHRINKS = 256,
};

/// Flags of a streamer.
typedef uint64_t kvt_stream_flags_t;
enum {
    /// Measure the disk first if its rate is not set; reads up to 256 MiB.
    KVT_STREAM_MEASURE = 1,
    /// Passes do not follow each other: nothing is prefetched across the end of a pass.
    KVT_STREAM_ONCE = 2,
    /// Each unit has a fixed address, and memory only while it is loaded: see kvt_stream_unit_address.
    /// On a device, a unit takes a multiple of the mapping granularity (2 MiB on CUDA), which the plan
    /// counts.
    KVT_STREAM_IN_PLACE = 4,
    /// Read through the page cache, and drop the pages afterwards.
    KVT_STREAM_BUFFERED = 8,
    /// Do not use io_uring.
    KVT_STREAM_NO_URING = 16,
    /// Copy from a memory map: slow, for comparison. A file that is truncated meanwhile ends the
    /// process (SIGBUS).
    KVT_STREAM_MAPPED = 32,
    /// Keep checksums in the file `sidecar`, or beside the model (.kvtsum) if that is empty.
    KVT_STREAM_SIDECAR = 64,
    /// Use pinned_percent even if it is 0, not its default.
    KVT_STREAM_SET_PINNED_PERCENT = 128,
    /// The device reads files into its slots, bypassing host memory (CUDA: cuFile, whose compatibility
    /// mode is disabled in the whole process). Opening returns KVT_E_UNAVAILABLE and the reason where
    /// it cannot: no library, no kernel module, a file system other than ext4 and XFS. Unaligned
    /// chunks, resident units and failed reads go through host memory: kvt_stream_stats_t.direct_bytes,
    /// direct_failed. The number of slots is fixed. Not with KVT_VERIFY_ALWAYS or KVT_STREAM_IN_PLACE.
    KVT_STREAM_DIRECT = 512,
};

/// When bytes are compared with their checksums.
typedef uint32_t kvt_verify_t;
enum {
    /// Do not compare bytes with checksums.
    KVT_VERIFY_NEVER = 0,
    /// When a unit is read for the first time; unknown checksums are stored.
    KVT_VERIFY_FIRST = 1,
    /// At each read.
    KVT_VERIFY_ALWAYS = 2,
};

/// Memory limits and link rates of a plan. 0 is the default of every field; where 0 is also a
/// value, a KVT_TERMS_* flag selects it.
typedef struct kvt_stream_terms_t {
    uint64_t struct_size;
    kvt_terms_flags_t flags;
    /// 0 = on the device if there is one.
    kvt_compute_t compute;
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    kvt_stream_mode_t mode;
    kvt_place_t placement;
    /// At most 65536; 0 = 2. Slots for units that are not resident; in a ring the least number.
    uint32_t slots;
    /// Most device memory for weights; 0 = as much as is free.
    uint64_t device_ceiling_bytes;
    /// Most host memory for weights, slots and staging; 0 = as much as is free.
    uint64_t host_ceiling_bytes;
    /// Device memory that stays free; 0 = 256 MiB.
    uint64_t device_safety_bytes;
    /// Host memory that stays free; 0 = 6 GiB, a quarter of a machine with less than 24 GiB, or a
    /// sixteenth (64 MiB to 6 GiB) of a cgroup's limit.
    uint64_t host_reserve_bytes;
    /// Tokens that KV is reserved for, where the engine computes; 0 = the model's, at most 4096.
    uint32_t context;
    /// Concurrent sequences; 0 = 1.
    uint32_t sequences;
    /// Bytes of a KV element; 0 = 2.
    uint32_t kv_element_bytes;
    /// Number of last layers that the processor computes; only if the engine computes on a device.
    uint32_t processor_layers;
    /// Bytes of KV; 0 = computed from context, sequences and kv_element_bytes.
    uint64_t kv_bytes;
    /// Workspace of the engine.
    uint64_t workspace_bytes;
    /// Buffers for hidden states.
    uint64_t hidden_bytes;
    /// 0 = as many as fit; with KVT_TERMS_SHRINKS as few as a layer needs.
    uint32_t expert_slots;
    uint32_t reserved;
    /// Host memory for reads on their way to a device; 0 = chosen, usually 16 chunks.
    uint64_t staging_bytes;
    /// Bytes of one read or copy, at most 1 GiB; 0 = 4 MiB.
    uint64_t chunk_bytes;
    /// Time to compute a layer, for forecasts.
    uint64_t layer_compute_ns;
    /// Rate from the file to host memory; 0 = not known.
    uint64_t disk_bytes_per_s;
    /// Rate from host memory to the device; 0 = not known.
    uint64_t device_bytes_per_s;
    /// Rate at which the processor computes with weights in host memory; 0 = not known.
    uint64_t processor_bytes_per_s;
} kvt_stream_terms_t;
#define KVT_STREAM_TERMS_INIT KVT_INIT_(kvt_stream_terms_t)

/// Memory that a plan is made for.
typedef struct kvt_stream_memory_t {
    uint64_t struct_size;
    /// Free on the device; 0 = no device.
    uint64_t device_free_bytes;
    /// Host memory that the process may still use.
    uint64_t host_free_bytes;
    /// RAM of the machine, or the limit of its cgroup if that is less; 0 = host_free_bytes.
    uint64_t host_total_bytes;
    /// Memory that may be locked; UINT64_MAX = no limit.
    uint64_t lockable_bytes;
} kvt_stream_memory_t;
#define KVT_STREAM_MEMORY_INIT KVT_INIT_(kvt_stream_memory_t)

/// Options of kvt_stream_open.
typedef struct kvt_stream_opts_t {
    uint64_t struct_size;
    /// KVT_STREAM_MEASURE, _ONCE, _IN_PLACE, _BUFFERED, _NO_URING, _MAPPED, _SIDECAR,
    /// _SET_PINNED_PERCENT, _DIRECT.
    kvt_stream_flags_t flags;
    /// Required. May be closed afterwards.
    const kvt_model_t *model;
    /// Null = defaults.
    const kvt_stream_terms_t *terms;
    /// Charged for all memory, of the same runtime; null = none. Implies KVT_TERMS_SHRINKS: the
    /// budget can reclaim resident units and expert slots.
    const kvt_budget_t *budget;
    /// 32 bits; the budget reclaims from owners of low priority first.
    int64_t priority;
    /// Units in the order of a pass, without experts; null = the order of their numbers.
    const uint32_t *order;
    uint64_t order_count;
    /// Policy spec that chooses victims in KVT_STREAM_RING; empty = "fifo".
    const char *policy;
    uint64_t policy_bytes;
    /// Policy spec of the expert slots; empty = "lru".
    const char *expert_policy;
    uint64_t expert_policy_bytes;
    /// Path of the checksum file; implies KVT_STREAM_SIDECAR. Ignored with KVT_VERIFY_NEVER.
    const char *sidecar;
    uint64_t sidecar_bytes;
    kvt_verify_t verify;
    /// Reader threads, at most 64; 0 = 8.
    uint32_t readers;
    /// Reads in flight of one thread, at most 64; 0 = 64.
    uint32_t depth;
    /// Spans kept for kvt_stream_marks, at most 2^20; with any, each acquire takes a lock.
    uint32_t marks;
    /// Percent of the expert slots that the most used experts keep; 0 = 50.
    uint32_t pinned_percent;
    uint32_t reserved;
    /// Device of the same runtime, with memory of its own, that the engine computes on; null = the
    /// processor.
    const struct kvt_device_t *device;
} kvt_stream_opts_t;
#define KVT_STREAM_OPTS_INIT KVT_INIT_(kvt_stream_opts_t)

/* ---- Plans of streamers ---------------------------------------------------------------------- */

/// Where a unit stays between uses: only in the file, in host memory, or in device memory.
typedef uint32_t kvt_unit_resident_t;
enum {
    KVT_RESIDENT_FILE = 1,
    KVT_RESIDENT_HOST = 2,
    KVT_RESIDENT_DEVICE = 3,
};

/// What limits a pass: computing, the link to the device, or the disk.
typedef uint32_t kvt_binding_t;
enum {
    KVT_BINDING_COMPUTE = 1,
    KVT_BINDING_DEVICE = 2,
    KVT_BINDING_DISK = 3,
};

/// Formats of the description of a plan.
typedef uint32_t kvt_plan_format_t;
enum {
    /// A plan as text for people.
    KVT_PLAN_TEXT = 0,
    /// A plan as one JSON object.
    KVT_PLAN_JSON = 1,
};

/// A plan: the residency of units, the slots, and the memory that they need.
typedef struct kvt_stream_plan_t {
    uint64_t struct_size;
    kvt_compute_t compute;
    /// KVT_STREAM_TIERED or KVT_STREAM_RING.
    kvt_stream_mode_t mode;
    /// Number of units resident in device memory, in host memory, and in the file alone.
    uint32_t device_units;
    uint32_t host_units;
    uint32_t file_units;
    /// Slots for units that are not resident where they are used.
    uint32_t slots;
    /// Bytes of one slot.
    uint64_t slot_bytes;
    uint32_t expert_slots;
    uint32_t reserved;
    /// Bytes of one expert slot.
    uint64_t expert_slot_bytes;
    /// Host memory for reads on their way to a device.
    uint64_t staging_bytes;
    /// Bytes of one read or copy.
    uint64_t chunk_bytes;
    /// Device memory of the plan.
    uint64_t device_bytes;
    /// Host memory of the plan.
    uint64_t host_bytes;
    /// Part of host_bytes that is locked.
    uint64_t pinned_bytes;
} kvt_stream_plan_t;
#define KVT_STREAM_PLAN_INIT KVT_INIT_(kvt_stream_plan_t)

/// Forecast of a pass; all 0 if the rate of a link that the plan needs is not known.
typedef struct kvt_forecast_t {
    uint64_t struct_size;
    /// A pass in the steady state.
    uint64_t pass_ns;
    /// The first pass, without prefetched units.
    uint64_t first_ns;
    /// Lower bound of a pass: the longest of the three below.
    uint64_t bound_ns;
    /// Computing alone.
    uint64_t compute_ns;
    /// The device link alone.
    uint64_t device_ns;
    /// The disk alone.
    uint64_t disk_ns;
    /// Bytes that cross the device link in a pass.
    uint64_t device_bytes;
    /// Bytes that are read in a pass.
    uint64_t disk_bytes;
    /// Passes a second: tokens, if a pass makes one. 0 if pass_ns is 0.
    double tokens_per_s;
    /// The resource that limits a pass; 0 = not known.
    kvt_binding_t binding;
    uint32_t reserved;
} kvt_forecast_t;
#define KVT_FORECAST_INIT KVT_INIT_(kvt_forecast_t)

/// Residency of a unit. Stands in arrays.
typedef struct kvt_unit_residency_t {
    kvt_unit_resident_t residency;
    /// 1: used in host memory, although the engine computes on a device; else 0.
    uint32_t on_processor;
} kvt_unit_residency_t;

/// Plans where units are resident, and forecasts a pass. Opens no files and takes no memory.
/// kvt_stream_open makes the same plan from the same terms and the memory that is free then.
///
/// @param memory     Null = this machine, without a device.
/// @param out        May be null, as may forecast.
/// @param residency  One entry for each unit; may be null with capacity 0.
/// @return KVT_E_BUDGET (too little memory: the message names the least), KVT_E_TOO_SMALL,
///         KVT_E_LIMIT.
kvt_status_t kvt_model_plan(const kvt_model_t *model, const kvt_stream_terms_t *terms,
                            const kvt_stream_memory_t *memory, kvt_stream_plan_t *out,
                            kvt_forecast_t *forecast, kvt_unit_residency_t *residency,
                            uint64_t capacity, uint64_t stride_bytes, kvt_error_t **err);

/// Describes the plan of kvt_model_plan as text, with the reason for each figure.
///
/// @param kind          KVT_PLAN_TEXT or KVT_PLAN_JSON.
/// @param out           Receives the text, not NUL-terminated.
/// @param out_capacity  Free memory changes between calls: add some room to the size.
/// @return As kvt_model_plan.
kvt_status_t kvt_model_plan_describe(const kvt_model_t *model, const kvt_stream_terms_t *terms,
                                     const kvt_stream_memory_t *memory, kvt_plan_format_t kind,
                                     char *out, uint64_t out_capacity, uint64_t *out_bytes,
                                     kvt_error_t **err);

/// Forecasts a pass of the plan of kvt_model_plan with other link rates. Every link that the plan
/// needs must have a rate, in links or in terms.
///
/// @param links  GB/s (1e9 bytes) of h2d, disk and cpu, such as "h2d=13,disk=3.3"; others as in
///               terms.
/// @return As kvt_model_plan; KVT_E_SPEC.
kvt_status_t kvt_model_forecast(const kvt_model_t *model, const kvt_stream_terms_t *terms,
                                const kvt_stream_memory_t *memory, const char *links,
                                uint64_t links_bytes, kvt_forecast_t *out, kvt_error_t **err);

/* ---- Streamers ------------------------------------------------------------------------------- */

/// A streamer: loads the units of a model ahead of their use, under a budget of memory. Resident
/// units stay in memory; the others pass through slots and are prefetched in the order of a pass.
/// Threads may lease units at the same time.
typedef struct kvt_stream_t kvt_stream_t;

/// Flags of kvt_stream_acquire.
typedef uint64_t kvt_acquire_flags_t;
enum {
    /// Do not wait: KVT_E_AGAIN if the unit is not loaded.
    KVT_ACQUIRE_POLL = 1,
    /// Do not wait for copies that were submitted to the device: the bytes are complete after
    /// kvt_unit_lease_t.event. See kvt_device_stream_wait.
    KVT_ACQUIRE_SUBMITTED = 2,
};

/// A lease of a unit: the right to read its bytes until kvt_stream_release. A copy of the struct is
/// the same lease, and is not released on its own.
typedef struct kvt_unit_lease_t {
    uint64_t struct_size;
    /// Read-only, a multiple of 4096. A part of a tensor is at address + kvt_part_t.at.
    const void *address;
    /// kvt_unit_t.image_bytes.
    uint64_t bytes;
    uint32_t unit;
    /// Where the address is valid.
    kvt_memory_t memory;
    /// Opaque; 0 = released.
    uint64_t place;
    /// Device event that completes the bytes; 0 = complete. Valid until the release.
    uint64_t event;
    /// When the lease was granted; 0 = not recorded.
    uint64_t since_ns;
} kvt_unit_lease_t;
#define KVT_UNIT_LEASE_INIT KVT_INIT_(kvt_unit_lease_t)

/// Opens a streamer: opens the files, makes a plan, takes its memory, and begins to load resident
/// units. With a device, the engine computes there and units are loaded to device memory.
///
/// @return KVT_E_BUDGET (too little memory: the message names the least), KVT_E_CORRUPT (a file
///         changed since the model was opened), KVT_E_UNSUPPORTED (KVT_COMPUTE_DEVICE without a
///         device; KVT_STREAM_IN_PLACE on a host or custom device; flags that exclude each other),
///         KVT_E_UNAVAILABLE (KVT_STREAM_DIRECT), KVT_E_SPEC, KVT_E_NOT_FOUND, KVT_E_IO,
///         KVT_E_LIMIT.
kvt_status_t kvt_stream_open(const kvt_runtime_t *runtime, const kvt_stream_opts_t *opts,
                             kvt_stream_t **out, kvt_error_t **err);

/// Closes a streamer: ends calls that wait for units, waits for reads and copies in flight, and
/// saves new checksums to the sidecar.
///
/// @return KVT_E_BUSY (units are leased: the streamer stays open; or a read, a copy or an event of
///         kvt_stream_release did not end before the deadline: it stays closing, close again).
kvt_status_t kvt_stream_close(kvt_stream_t **stream, uint64_t deadline_ns, kvt_error_t **err);

/// Leases a unit, and waits until it is loaded. The unit stays where it is until it was released as
/// often as it was acquired. If it is resident where it is used, this costs one atomic operation.
/// To retry a failed read, acquire the unit again.
///
/// @param flags  KVT_ACQUIRE_*, or 0.
/// @return KVT_E_AGAIN (KVT_ACQUIRE_POLL), KVT_E_TIMEOUT, KVT_E_BUSY (leases hold all slots, or the
///         unit itself after a failed copy), KVT_E_CORRUPT (wrong checksum, changed file),
///         KVT_E_IO, KVT_E_BUDGET (a unit larger than slots lost its memory: see
///         kvt_stream_rebalance).
kvt_status_t kvt_stream_acquire(const kvt_stream_t *stream, uint32_t unit,
                                kvt_acquire_flags_t flags, uint64_t deadline_ns,
                                kvt_unit_lease_t *out, kvt_error_t **err);

/// Releases a lease, and clears the struct. Allowed while the streamer closes. If a copy failed
/// after KVT_ACQUIRE_SUBMITTED, the lease is released and the copy's error is returned: results
/// computed with the unit are wrong. After another error the lease is not released.
///
/// @param after  Device event after which the memory may be reused; 0 = now. The streamer takes the
///               event over, except with KVT_E_UNSUPPORTED, _INVALID, _HANDLE and _STATE. See
///               kvt_device_import_event.
/// @return KVT_E_STATE (released before), KVT_E_UNSUPPORTED (an event, without a device).
kvt_status_t kvt_stream_release(const kvt_stream_t *stream, kvt_unit_lease_t *lease, uint64_t after,
                                kvt_error_t **err);

/* ---- Passes ---------------------------------------------------------------------------------- */

/// Flags of kvt_stream_limits_t: use host_bytes or device_bytes even if it is 0.
typedef uint64_t kvt_limit_flags_t;
enum {
    KVT_LIMIT_HOST = 1,
    KVT_LIMIT_DEVICE = 2,
};

/// Memory for weights from now on; 0 = unchanged.
typedef struct kvt_stream_limits_t {
    uint64_t struct_size;
    kvt_limit_flags_t flags;
    /// Most host memory.
    uint64_t host_bytes;
    /// Most device memory.
    uint64_t device_bytes;
    /// Tokens that KV is reserved for.
    uint32_t context;
    uint32_t reserved;
} kvt_stream_limits_t;
#define KVT_STREAM_LIMITS_INIT KVT_INIT_(kvt_stream_limits_t)

/// Progress of loading the resident units.
typedef struct kvt_stream_progress_t {
    uint64_t struct_size;
    /// Units that are not yet where the plan puts them.
    uint64_t missing;
    /// Units that are resident in memory by the plan.
    uint64_t resident_units;
    /// Bytes read so far, for any purpose.
    uint64_t read_bytes;
} kvt_stream_progress_t;
#define KVT_STREAM_PROGRESS_INIT KVT_INIT_(kvt_stream_progress_t)

/// Waits until all resident units are loaded. Optional: acquired units are loaded first.
///
/// @return KVT_E_TIMEOUT, KVT_E_IO, KVT_E_CORRUPT.
kvt_status_t kvt_stream_wait_resident(const kvt_stream_t *stream, uint64_t deadline_ns,
                                      kvt_error_t **err);

/// Reads the progress of loading the resident units.
kvt_status_t kvt_stream_progress(const kvt_stream_t *stream, kvt_stream_progress_t *out);

/// Begins a pass, in which units are prefetched in their order. Fails if a file was changed.
///
/// @return KVT_E_CORRUPT (a changed file), KVT_E_IO.
kvt_status_t kvt_stream_pass_begin(const kvt_stream_t *stream, kvt_error_t **err);

/// Ends a pass. Without KVT_STREAM_ONCE, the first units of the next pass are being prefetched.
kvt_status_t kvt_stream_pass_end(const kvt_stream_t *stream, kvt_error_t **err);

/// Prefetches units that the engine will use, such as the experts that a router chose, into slots
/// that are free or whose unit may be evicted. Experts of earlier hints that were not used may be
/// evicted.
///
/// @return KVT_E_LIMIT (more than 2^18 units).
kvt_status_t kvt_stream_hint(const kvt_stream_t *stream, const uint32_t *units, uint64_t count,
                             kvt_error_t **err);

/// Gives weights more or less memory while passes go on, and makes a new plan. Returns at once:
/// leased units move after their release, the others are loaded meanwhile (kvt_stream_progress).
/// Slots stay, except expert slots: their number may fall, and rise up to the number at opening.
///
/// @param out  Receives the new plan; may be null.
/// @return KVT_E_BUDGET (slots do not fit: nothing was changed), KVT_E_UNSUPPORTED (in place, a
///         unit would move between processor and device).
kvt_status_t kvt_stream_rebalance(const kvt_stream_t *stream, const kvt_stream_limits_t *limits,
                                  kvt_stream_plan_t *out, kvt_error_t **err);

/* ---- Statistics of streamers ----------------------------------------------------------------- */

/// Stages of a unit's load and use.
typedef uint32_t kvt_stage_t;
enum {
    /// A chunk was read.
    KVT_STAGE_READ = 1,
    /// A chunk was copied to the device.
    KVT_STAGE_COPY = 2,
    /// The engine leased a unit.
    KVT_STAGE_USE = 3,
    /// The engine waited for a unit.
    KVT_STAGE_WAIT = 4,
};

/// Counters of a streamer since it was opened.
typedef struct kvt_stream_stats_t {
    uint64_t struct_size;
    /// Passes that ended.
    uint64_t passes;
    /// Duration of the last pass.
    uint64_t pass_ns;
    /// Leases that were granted.
    uint64_t acquires;
    /// Acquires that waited.
    uint64_t waited;
    /// Time that acquires waited: for reads, for copies to the device, and for slots.
    uint64_t wait_read_ns;
    uint64_t wait_copy_ns;
    uint64_t wait_slot_ns;
    /// Time that units were leased; of resident ones only with kvt_stream_opts_t.marks.
    uint64_t use_ns;
    uint64_t read_bytes;
    /// Sum of the durations of reads: more than the elapsed time where reads overlapped.
    uint64_t read_ns;
    /// Bytes a second of the disk, as measured or set; 0 = not known.
    uint64_t read_ceiling_bytes_per_s;
    /// Bytes copied to the device.
    uint64_t copied_bytes;
    /// Sum of the durations of copies.
    uint64_t copy_ns;
    /// Bytes a second of the device link, as set; 0 = not known.
    uint64_t copy_ceiling_bytes_per_s;
    /// Bytes that were loaded and never used.
    uint64_t wasted_bytes;
    /// Reads and copies that failed.
    uint64_t failed;
    /// Acquired experts that were in a slot.
    uint64_t expert_hits;
    /// Acquired experts that had to be loaded.
    uint64_t expert_misses;
    /// Part of read_bytes that the device read itself (KVT_STREAM_DIRECT).
    uint64_t direct_bytes;
    /// Direct reads that failed, and went through host memory; three in a row end direct reads.
    uint64_t direct_failed;
} kvt_stream_stats_t;
#define KVT_STREAM_STATS_INIT KVT_INIT_(kvt_stream_stats_t)

/// Expert counters of a layer. Stands in arrays.
typedef struct kvt_expert_stats_t {
    uint32_t layer;
    uint32_t reserved;
    /// Acquired experts that were in a slot.
    uint64_t hits;
    /// Acquired experts that had to be loaded.
    uint64_t misses;
    /// Bytes that were loaded.
    uint64_t bytes;
} kvt_expert_stats_t;

/// A span of time. Stands in arrays.
typedef struct kvt_stream_span_t {
    kvt_stage_t stage;
    uint32_t unit;
    /// CLOCK_MONOTONIC, as end_ns.
    uint64_t begin_ns;
    uint64_t end_ns;
} kvt_stream_span_t;

/// Reads the current plan, its forecast, and the residency of each unit: see kvt_model_plan.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^18).
kvt_status_t kvt_stream_plan(const kvt_stream_t *stream, kvt_stream_plan_t *out,
                             kvt_forecast_t *forecast, kvt_unit_residency_t *residency,
                             uint64_t capacity, uint64_t stride_bytes);

/// Describes the current plan as text: see kvt_model_plan_describe.
///
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_stream_plan_describe(const kvt_stream_t *stream, kvt_plan_format_t kind, char *out,
                                      uint64_t out_capacity, uint64_t *out_bytes);

/// Forecasts a pass of the current plan with other link rates.
///
/// @param links  See kvt_model_forecast; others keep their current rate.
/// @return KVT_E_SPEC, KVT_E_LIMIT (links over 256 bytes).
kvt_status_t kvt_stream_forecast(const kvt_stream_t *stream, const char *links,
                                 uint64_t links_bytes, kvt_forecast_t *out, kvt_error_t **err);

/// Reads the counters of a streamer.
kvt_status_t kvt_stream_stats(const kvt_stream_t *stream, kvt_stream_stats_t *out);

/// Reads expert counters, one row for each layer that has experts.
///
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT (a capacity over 2^24).
kvt_status_t kvt_stream_layers(const kvt_stream_t *stream, kvt_expert_stats_t *rows,
                               uint64_t capacity, uint64_t stride_bytes, uint64_t *out_count);

/// Reads the last kvt_stream_opts_t.marks spans of time, the oldest first.
///
/// @return As kvt_stream_layers.
kvt_status_t kvt_stream_marks(const kvt_stream_t *stream, kvt_stream_span_t *rows,
                              uint64_t capacity, uint64_t stride_bytes, uint64_t *out_count);

/// Describes in one line how files are read, and why no faster method is used.
///
/// @param out  Receives the text, not NUL-terminated.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_stream_describe_io(const kvt_stream_t *stream, char *out, uint64_t out_capacity,
                                    uint64_t *out_bytes);

/// Reads a unit from its files, not from memory, on the calling thread, and compares it with its
/// checksums. Unknown checksums are stored.
///
/// @param out_sum  Receives the checksum of the unit; may be null.
/// @return KVT_E_CORRUPT (wrong checksum), KVT_E_IO, KVT_E_BUDGET.
kvt_status_t kvt_stream_verify(const kvt_stream_t *stream, uint32_t unit, uint64_t *out_sum,
                               kvt_error_t **err);

/// Reads the checksum of a unit.
///
/// @return KVT_E_NOT_FOUND (no sidecar has it, and not all of the unit was read with checksums).
kvt_status_t kvt_stream_checksum(const kvt_stream_t *stream, uint32_t unit, uint64_t *out);

/// Reads the address that a unit has from open to close (KVT_STREAM_IN_PLACE). The address has
/// memory only while the unit is leased: other reads see zeros or incomplete data, and may be an
/// error that ends the device's context. With a device it is a device address, except for units
/// that the processor uses (kvt_unit_lease_t.memory): they are outside the range.
///
/// @param unit       KVT_NONE = the range of all units.
/// @param out_bytes  May be null.
/// @return KVT_E_STATE (units are not in place).
kvt_status_t kvt_stream_unit_address(const kvt_stream_t *stream, uint32_t unit,
                                     const void **out_address, uint64_t *out_bytes);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_STREAM_H */

/// @file
/// Eviction policies, over a table of the library or of the engine.
///
/// A store uses policies by their names in its spec. This header gives the same policies to an
/// engine that keeps blocks itself: the policy is notified of lookups, inserts and references, and
/// chooses victims. The policy "custom" evicts by a score function of the engine
/// (kvt_policy_custom_t).
///
/// Life cycle: kvt_policy_open, kvt_policy_record or kvt_policy_lookup and _insert,
/// kvt_policy_evict, kvt_policy_close. Times are the engine's, in nanoseconds, and never decrease.
///
///     kvt_policy_opts_t opts = KVT_POLICY_OPTS_INIT;
///     opts.spec = "horizon", opts.spec_bytes = KVT_NUL_TERMINATED;
///     opts.max_objects = 1 << 20, opts.capacity_units = 50000; /* blocks of the engine's cache */
///     if (kvt_policy_open(&opts, &policy, &err) != KVT_OK) return fail(err);
///     /* A request used blocks 11, 12 and 13, of one unit each; 12 continues 11, and 13 continues 12. */
///     const uint64_t ids[] = {11, 12, 13}, units[] = {1, 1, 1};
///     if (kvt_policy_record(policy, now_ns, NULL, ids, units, 3, NULL, &err) != KVT_OK) return fail(err);
///     /* Room for two blocks is needed. */
///     kvt_policy_victim_t victims[2];
///     kvt_policy_outcome_t outcome = KVT_POLICY_OUTCOME_INIT;
///     if (kvt_policy_evict(policy, now_ns, 2, victims, 2, sizeof victims[0], &outcome, &err) != KVT_OK)
///         return fail(err);
///     for (uint64_t i = 0; i < outcome.victims; i++) use(&victims[i].id);
///
/// Generated from the sources of the library; a test compares. Do not edit.

#ifndef KVTIER_POLICY_H
#define KVTIER_POLICY_H

#include <kvtier/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

struct kvt_policy_columns_t;

/* ---- Policies -------------------------------------------------------------------------------- */

/// An eviction policy with its table of objects. Needs no runtime.
typedef struct kvt_policy_t kvt_policy_t;

/// Flags of a policy.
typedef uint64_t kvt_policy_flags_t;
enum {
    /// The engine can use objects behind a missing one, so objects are evicted in any order. Otherwise
    /// children are evicted before their parents.
    KVT_POLICY_HOLES = 1,
    /// `remember` = 0 means none, not the default.
    KVT_POLICY_ZERO_REMEMBER = 2,
    /// `alpha` and `beta` are taken as they are: 0 means 0, not the default.
    KVT_POLICY_COST = 4,
};

/// Scores candidates for the policy "custom": writes one number per row to `out_scores`. The lowest
/// score is evicted first; NaN is an error. Any status but KVT_OK fails the calling function with
/// that status, without effect. Columns and scores are borrowed for the call. The function must not
/// unwind.
///
/// An eviction skips objects that were used, referenced or removed meanwhile. If too little is free
/// then, it scores again, at most 4 times in all; an error in a repetition is a shortfall.
///
/// Threading: called on the thread that evicts or selects, under no lock, so on several threads at
/// once. It may use the policy.
typedef kvt_status_t (*kvt_policy_score_fn)(void *user_data,
                                            const struct kvt_policy_columns_t *columns,
                                            int64_t now_ns, double *out_scores);

/// Predicts when a sequence is used next or ends: seconds from now, with a confidence of 0 to 1.
/// Returns 1, or 0 if unknown; values out of range count as unknown. Lengths are in tokens,
/// 0 = unknown. It is called
///
/// - after kvt_policy_lookup and kvt_policy_record with a session, which is `sequence`: the
///   prediction acts as a hint;
/// - in kvt_policy_select for each row without a lifetime: `sequence` is the id.
///
/// Threading and unwinding: as for kvt_policy_score_fn.
typedef uint32_t (*kvt_policy_predict_fn)(void *user_data, uint64_t sequence, uint64_t length,
                                          uint64_t max_length, double *out_seconds,
                                          double *out_confidence);

/// Callback table of the policy "custom".
typedef struct kvt_policy_custom_t {
    uint64_t struct_size;
    kvt_policy_score_fn score;
    /// Passed to score; owned by the policy once it is open.
    void *user_data;
    /// Releases user_data; may be null.
    kvt_destroy_fn destroy;
} kvt_policy_custom_t;
#define KVT_POLICY_CUSTOM_INIT KVT_INIT_(kvt_policy_custom_t)

/// The engine's predictor of next uses and lifetimes.
typedef struct kvt_policy_predictor_t {
    uint64_t struct_size;
    kvt_policy_predict_fn predict;
    /// Passed to predict; owned by the policy once it is open.
    void *user_data;
    /// Releases user_data; may be null.
    kvt_destroy_fn destroy;
} kvt_policy_predictor_t;
#define KVT_POLICY_PREDICTOR_INIT KVT_INIT_(kvt_policy_predictor_t)

/// Options of kvt_policy_open.
typedef struct kvt_policy_opts_t {
    uint64_t struct_size;
    kvt_policy_flags_t flags;
    /// Such as "arc" or "qos(inner=s3fifo)"; null = "lru".
    const char *spec;
    uint64_t spec_bytes;
    /// Most objects in the table, up to 2^28; 0 = 1048576.
    uint64_t max_objects;
    /// Capacity of the cache in units; 0 = unknown.
    uint64_t capacity_units;
    /// Evictions that the log keeps, up to 2^20; 0 = none.
    uint64_t log_entries;
    /// Evicted ids that are remembered for the re-prefill rate, up to 2^28; 0 = 1048576.
    uint64_t remember;
    /// 0 to 1e12; 0 = 1 / 53800. Recomputing n tokens after l tokens of context costs n * beta +
    /// alpha * (n * l + n * n / 2). The defaults describe a model of the 70B class.
    double alpha;
    /// 0 to 1e12; 0 = 1. See alpha.
    double beta;
    /// Score function. The spec "custom" needs it; else it may be null.
    const kvt_policy_custom_t *custom;
    /// May be null.
    const kvt_policy_predictor_t *predictor;
} kvt_policy_opts_t;
#define KVT_POLICY_OPTS_INIT KVT_INIT_(kvt_policy_opts_t)

/// A policy that can be opened. Texts are not NUL-terminated and live as long as the library.
typedef struct kvt_policy_info_t {
    uint64_t struct_size;
    /// Name in specs.
    const char *name;
    uint64_t name_bytes;
    /// Description in one line.
    const char *about;
    uint64_t about_bytes;
} kvt_policy_info_t;
#define KVT_POLICY_INFO_INIT KVT_INIT_(kvt_policy_info_t)

/// Opens a policy.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT.
kvt_status_t kvt_policy_open(const kvt_policy_opts_t *opts, kvt_policy_t **out, kvt_error_t **err);

/// Closes a policy. Calls in progress still finish; then the callbacks' user data is released.
kvt_status_t kvt_policy_close(kvt_policy_t **policy);

/// Switches to another policy. Objects keep their last use, number of uses, references, pins and
/// sessions. Learned state passes only to a policy of the same kind. The call sorts all objects;
/// other calls on the policy wait meanwhile.
///
/// @param spec  As in kvt_policy_opts_t; "custom" needs a score function given at the open.
/// @return KVT_E_SPEC, KVT_E_LIMIT.
kvt_status_t kvt_policy_switch(const kvt_policy_t *policy, const char *spec, uint64_t spec_bytes,
                               kvt_error_t **err);

/// Sets the capacity. Evicts nothing.
///
/// @param capacity_units  0 = unknown.
kvt_status_t kvt_policy_set_capacity(const kvt_policy_t *policy, uint64_t capacity_units);

/// Counts the policies that can be opened.
kvt_status_t kvt_policy_count(uint64_t *out_count);

/// Describes a policy that can be opened.
///
/// @param index  0 to kvt_policy_count - 1; kvt_policy_log_entry_t.policy is such an index.
/// @return KVT_E_NOT_FOUND.
kvt_status_t kvt_policy_info(uint64_t index, kvt_policy_info_t *out);

/* ---- Lookups, uses, inserts ------------------------------------------------------------------ */

/// Flags of kvt_policy_context_t.
typedef uint64_t kvt_context_flags_t;
enum {
    /// kvt_policy_context_t.session is set.
    KVT_CONTEXT_SESSION = 1,
    /// kvt_policy_context_t.priority is set, also if it is 0. Needs KVT_CONTEXT_SESSION.
    KVT_CONTEXT_PRIORITY = 2,
};

/// Flags of kvt_policy_object_t.
typedef uint64_t kvt_object_flags_t;
enum {
    /// kvt_policy_object_t.parent is set.
    KVT_OBJECT_HAS_PARENT = 1,
};

/// Flags of kvt_policy_hint_t.
typedef uint64_t kvt_hint_flags_t;
enum {
    /// The objects will not be used again.
    KVT_HINT_DONE = 1,
    /// `confidence` = 0 means 0, not the default 1.
    KVT_HINT_ZERO_CONFIDENCE = 2,
};

/// Why a sequence stopped. TOOL_USE: it waits for a tool and continues soon. END_TURN: a person
/// reads the answer. LENGTH: it reached the limit of tokens.
typedef uint32_t kvt_stop_t;
enum {
    KVT_STOP_UNKNOWN = 0,
    KVT_STOP_TOOL_USE = 1,
    KVT_STOP_END_TURN = 2,
    KVT_STOP_LENGTH = 3,
    KVT_STOP_CANCELLED = 4,
};

/// The request that a call belongs to. Every field is optional.
typedef struct kvt_policy_context_t {
    uint64_t struct_size;
    kvt_context_flags_t flags;
    /// The caller's id of a sequence; needs KVT_CONTEXT_SESSION.
    uint64_t session;
    /// Tenant of the session; must be 0 without KVT_CONTEXT_SESSION.
    uint32_t tenant;
    /// Class of the session, 0 to 255; 0 is evicted first. Without KVT_CONTEXT_PRIORITY the class
    /// stays as it is, at first 1.
    uint32_t priority;
    /// Tokens of the whole request; 0 = tokens_each for each id.
    uint32_t length;
    /// Most tokens that the sequence can have; 0 = unknown.
    uint32_t max_length;
    /// Tokens of each object of the path, of which the last may have fewer; 0 = 1.
    uint32_t tokens_each;
    uint32_t reserved;
} kvt_policy_context_t;
#define KVT_POLICY_CONTEXT_INIT KVT_INIT_(kvt_policy_context_t)

/// An object to insert.
typedef struct kvt_policy_object_t {
    /// The caller's id.
    uint64_t id;
    /// Id of the object that this one continues; needs KVT_OBJECT_HAS_PARENT. It may be inserted
    /// later.
    uint64_t parent;
    /// Size, 1 to 2^32 - 1.
    uint64_t units;
    kvt_object_flags_t flags;
    /// Expected time of the next use, by the clock of now_ns; 0 = unknown.
    int64_t next_use_ns;
    /// Recompute cost; 0 = computed from context and tokens.
    double cost;
    /// Tokens before the object.
    uint32_t context;
    /// Tokens in the object.
    uint32_t tokens;
    /// Layer of a cell, up to 65535.
    uint32_t layer;
    /// Layers of the model, up to 65535; 0 = the object has all layers.
    uint32_t layers;
    /// Index of the chunk in its sequence.
    uint32_t chunk;
    /// Chunks of that sequence.
    uint32_t chunks;
} kvt_policy_object_t;

/// Expectations of the engine about future uses of objects.
typedef struct kvt_policy_hint_t {
    uint64_t struct_size;
    kvt_hint_flags_t flags;
    /// Expected time of the next use, by the clock of now_ns; 0 = unknown.
    int64_t next_use_ns;
    /// Confidence of next_use_ns, 0 to 1; 0 = 1, unless KVT_HINT_ZERO_CONFIDENCE is set.
    double confidence;
    /// Why the request that used the objects stopped.
    kvt_stop_t stop;
    uint32_t reserved;
} kvt_policy_hint_t;
#define KVT_POLICY_HINT_INIT KVT_INIT_(kvt_policy_hint_t)

/// Looks up a path of objects and counts the lookup. Touches the hits, the last one first, so that
/// no object is older than its children. Objects behind a missing one are hits only with
/// KVT_POLICY_HOLES.
///
/// @param now_ns       The caller's monotonic clock, -2^62 to 2^62 - 1; it must not go back.
///                     0 = CLOCK_MONOTONIC. Use one clock per policy.
/// @param context      May be null.
/// @param ids          The path, from its start.
/// @param count        At most 2^24.
/// @param out_found    `count` bytes: 1 for a hit, else 0; may be null.
/// @param out_leading  Number of hits before the first miss; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_policy_lookup(const kvt_policy_t *policy, int64_t now_ns,
                               const kvt_policy_context_t *context, const uint64_t *ids,
                               uint64_t count, uint8_t *out_found, uint64_t *out_leading,
                               kvt_error_t **err);

/// Touches objects, the last one first, without counting a lookup. Skips ids that are not in the
/// table.
///
/// @param now_ns       See kvt_policy_lookup, also for context and count.
/// @param out_touched  Number of objects touched; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_policy_touch(const kvt_policy_t *policy, int64_t now_ns,
                              const kvt_policy_context_t *context, const uint64_t *ids,
                              uint64_t count, uint64_t *out_touched, kvt_error_t **err);

/// Records a use of objects: touches those in the table and inserts the others, all or none. For
/// engines that keep their own tables: kvt_policy_select prefers recorded uses to columns.
///
/// @param now_ns     See kvt_policy_lookup, also for context and count.
/// @param units      Sizes of new objects, 1 to 2^32 - 1; null = 1 each.
/// @param out_added  Number of objects inserted; may be null.
/// @return KVT_E_LIMIT (also: the table is full).
kvt_status_t kvt_policy_record(const kvt_policy_t *policy, int64_t now_ns,
                               const kvt_policy_context_t *context, const uint64_t *ids,
                               const uint64_t *units, uint64_t count, uint64_t *out_added,
                               kvt_error_t **err);

/// Inserts objects, all or none. An id that is in the table is an error.
///
/// @param now_ns  See kvt_policy_lookup, also for context and count.
/// @param rows    Parents before children: the first row counts as used last.
/// @return KVT_E_LIMIT (also: the table is full; evict first).
kvt_status_t kvt_policy_insert(const kvt_policy_t *policy, int64_t now_ns,
                               const kvt_policy_context_t *context, const kvt_policy_object_t *rows,
                               uint64_t count, uint64_t stride_bytes, kvt_error_t **err);

/* ---- Removals, references, pins, hints ------------------------------------------------------- */

/// Removes objects that their owner gave up, with their references and pins; all or none. It does
/// not count as an eviction. Children must be removed with their parents.
///
/// @param now_ns  See kvt_policy_lookup, also for count.
/// @param ids     Each once.
/// @return KVT_E_NOT_FOUND, KVT_E_STATE (a child would stay), KVT_E_LIMIT.
kvt_status_t kvt_policy_remove(const kvt_policy_t *policy, int64_t now_ns, const uint64_t *ids,
                               uint64_t count, kvt_error_t **err);

/// Reports that the objects chosen by kvt_policy_select were freed: removes them as evicted, all or
/// none. Statistics, log, advice and ghosts then know of them. Children must be evicted with their
/// parents. An id that is not in the table counts as 1 unit and is remembered, but not logged.
///
/// @param now_ns  See kvt_policy_lookup, also for count.
/// @param ids     Each once.
/// @return KVT_E_STATE (a child would stay), KVT_E_LIMIT.
kvt_status_t kvt_policy_report_evicted(const kvt_policy_t *policy, int64_t now_ns,
                                       const uint64_t *ids, uint64_t count, kvt_error_t **err);

/// Changes the sizes of objects, all or none.
///
/// @param units  New sizes, 1 to 2^32 - 1.
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_resize(const kvt_policy_t *policy, const uint64_t *ids,
                               const uint64_t *units, uint64_t count, kvt_error_t **err);

/// Adds a reference to each object, all or none. A referenced object is never evicted.
///
/// @param ids    An id that occurs twice gets two references.
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_acquire(const kvt_policy_t *policy, const uint64_t *ids, uint64_t count,
                                kvt_error_t **err);

/// Removes a reference from each object, all or none.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_STATE (an object has no reference), KVT_E_LIMIT.
kvt_status_t kvt_policy_release(const kvt_policy_t *policy, const uint64_t *ids, uint64_t count,
                                kvt_error_t **err);

/// Pins objects, all or none. A pinned object is never evicted. Pins are not counted: one
/// kvt_policy_unpin ends any number.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_pin(const kvt_policy_t *policy, const uint64_t *ids, uint64_t count,
                            kvt_error_t **err);

/// Unpins objects, all or none. An object that is not pinned is no error.
///
/// @param count  At most 2^24.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_unpin(const kvt_policy_t *policy, const uint64_t *ids, uint64_t count,
                              kvt_error_t **err);

/// Passes the engine's hint about objects to the policy, usually about the path of a finished
/// request. Skips ids that are not in the table.
///
/// @param now_ns     See kvt_policy_lookup, also for context and count.
/// @param out_known  Number of ids in the table; may be null.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_policy_hint(const kvt_policy_t *policy, int64_t now_ns,
                             const kvt_policy_context_t *context, const uint64_t *ids,
                             uint64_t count, const kvt_policy_hint_t *hint, uint64_t *out_known,
                             kvt_error_t **err);

/* ---- Eviction from the policy's own table ---------------------------------------------------- */

/// An evicted object.
typedef struct kvt_policy_victim_t {
    uint64_t id;
    /// Units that it frees.
    uint64_t units;
} kvt_policy_victim_t;

/// The result of an eviction.
typedef struct kvt_policy_outcome_t {
    uint64_t struct_size;
    /// Number of victims.
    uint64_t victims;
    /// Units that the victims free.
    uint64_t freed_units;
    /// Units missing to the number required.
    uint64_t shortfall_units;
    /// Time of the decision; 0 = not measured (1 eviction in 16 is, no preview).
    uint64_t decision_ns;
    /// Policy that decided, maybe not the one opened. The text lives as long as the library.
    const char *decided_by;
    uint64_t decided_by_bytes;
} kvt_policy_outcome_t;
#define KVT_POLICY_OUTCOME_INIT KVT_INIT_(kvt_policy_outcome_t)

/// Evicts objects until `required_units` are free. Removes the victims from the table; the caller
/// frees their memory. No victim is superfluous. If there are too few candidates, or `capacity` is
/// too small, the rest is a shortfall and no error.
///
/// @param now_ns          See kvt_policy_lookup.
/// @param required_units  0 evicts nothing.
/// @param victims         Receives the victims in the order of eviction.
/// @param capacity        Most victims, up to 2^28.
/// @return KVT_E_LIMIT, any status of the score function.
kvt_status_t kvt_policy_evict(const kvt_policy_t *policy, int64_t now_ns, uint64_t required_units,
                              kvt_policy_victim_t *victims, uint64_t capacity,
                              uint64_t stride_bytes, kvt_policy_outcome_t *out, kvt_error_t **err);

/// Reports the victims that kvt_policy_evict would choose, and evicts nothing. A policy that
/// learns, or that moves objects while it searches (such as arc and sieve), may choose others the
/// next time. Parameters and statuses are those of kvt_policy_evict.
kvt_status_t kvt_policy_preview(const kvt_policy_t *policy, int64_t now_ns, uint64_t required_units,
                                kvt_policy_victim_t *victims, uint64_t capacity,
                                uint64_t stride_bytes, kvt_policy_outcome_t *out,
                                kvt_error_t **err);

/* ---- Selection from the engine's table ------------------------------------------------------- */

/// Flags of kvt_policy_select.
typedef uint64_t kvt_select_flags_t;
enum {
    /// The last victim may give up a tail of its blocks and keep the others.
    KVT_SELECT_TAIL = 1,
};

/// Candidates as columns: one array per property, with `rows` entries each. A null array means that
/// every row has the default. Arrays are aligned as C requires.
typedef struct kvt_policy_columns_t {
    uint64_t struct_size;
    /// Number of candidates, up to 2^28.
    uint64_t rows;
    /// Required; each id once.
    const uint64_t *ids;
    /// Blocks of the candidate, up to 2^32 - 1; default: those listed in block_ids, else 1.
    const uint64_t *blocks;
    /// Time of creation; default 0.
    const int64_t *created_ns;
    /// Time of the last use; default: created_ns.
    const int64_t *last_access_ns;
    /// Number of uses; default 1.
    const uint64_t *count;
    /// Class, 0 is evicted first; default 1.
    const uint8_t *priority;
    /// Not 0: never chosen.
    const uint8_t *pinned;
    /// Time until the next use or the end; below 0 = unknown, the default.
    const int64_t *lifetime_ns;
    /// Confidence of lifetime_ns, 0 to 1; default 1.
    const float *confidence;
    /// Tokens of the candidate; default 0.
    const uint64_t *length;
    /// Most tokens that the candidate can have; 0 = unknown, the default.
    const uint64_t *max_length;
    /// Holders; above 1 the candidate is shared and never chosen; default 1.
    const uint32_t *refs;
    /// Default 0.
    const uint32_t *tenant;
    /// Recompute cost; 0, the default = computed from context and tokens.
    const double *cost;
    /// Tokens before the candidate; default 0.
    const uint64_t *context;
    /// Tokens in the candidate; default: length.
    const uint64_t *tokens;
    /// Layer of a cell; default 0.
    const uint32_t *layer;
    /// Layers of the model, for cells; default 0.
    const uint32_t *layers;
    /// Index of the chunk in its sequence; default 0.
    const uint32_t *chunk;
    /// Chunks of that sequence; default 0.
    const uint32_t *chunks;
    /// rows + 1 entries: start of each row's blocks in block_ids, and the end of the last. Null:
    /// blocks are only counted.
    const uint64_t *block_offsets;
    /// Blocks of all rows, those of a row in the order of its tokens. A block that several rows
    /// list is shared: it counts once, and is free when all its holders are evicted.
    const uint64_t *block_ids;
    /// Holders of each entry of block_ids, including those that are no rows; 0, the default = the
    /// rows that list it.
    const uint32_t *block_refs;
    /// Entries of block_ids and of block_refs, up to 2^28.
    uint64_t block_entries;
} kvt_policy_columns_t;
#define KVT_POLICY_COLUMNS_INIT KVT_INIT_(kvt_policy_columns_t)

/// A chosen candidate.
typedef struct kvt_policy_pick_t {
    /// Index of its row.
    uint64_t row;
    uint64_t id;
    /// Blocks that it frees.
    uint64_t freed_blocks;
    /// Leading blocks that it keeps; 0 = it is evicted.
    uint64_t kept_blocks;
    /// Index in the selection's block_ids of the first block that it frees.
    uint64_t first_block;
} kvt_policy_pick_t;

/// The result of a selection. Set the fields marked "In" before the call.
typedef struct kvt_policy_selection_t {
    uint64_t struct_size;
    /// In: receives the chosen candidates in the order of eviction.
    kvt_policy_pick_t *victims;
    /// In: entries of `victims`; as many as rows are always enough.
    uint64_t victim_capacity;
    /// In: sizeof(kvt_policy_pick_t).
    uint64_t stride_bytes;
    /// In: receives the freed blocks by victim, if the columns list blocks; may be null.
    uint64_t *block_ids;
    /// In: entries of `block_ids`.
    uint64_t block_capacity;
    /// Victims chosen; with KVT_E_TOO_SMALL the capacity needed.
    uint64_t victim_count;
    /// Blocks in block_ids; with KVT_E_TOO_SMALL the capacity needed.
    uint64_t block_count;
    uint64_t freed_blocks;
    /// Blocks missing to the number required.
    uint64_t shortfall_blocks;
    /// Time of the decision.
    uint64_t decision_ns;
    /// Policy that decided, maybe not the one opened. The text lives as long as the library.
    const char *decided_by;
    uint64_t decided_by_bytes;
} kvt_policy_selection_t;
#define KVT_POLICY_SELECTION_INIT KVT_INIT_(kvt_policy_selection_t)

/// Chooses candidates that free `required_blocks`, in the policy's order. No victim is superfluous.
/// Ids break ties, so the order of the rows does not matter. The call evicts nothing: the caller
/// frees the victims and reports them with kvt_policy_report_evicted.
///
/// - Uses recorded for an id (such as by kvt_policy_record) take precedence over its columns.
/// - The table keeps an object's context, tokens, layer, layers, chunk, chunks and cost from the
///   columns, for policies that use them.
/// - Pinned and shared rows are never chosen, nor rows whose object in the table is pinned,
///   referenced or the parent of another object.
///
/// @param now_ns           See kvt_policy_lookup.
/// @param required_blocks  0 chooses nothing. If it cannot be reached, every candidate that may be
///                         evicted is chosen, and the rest is a shortfall.
/// @param flags            KVT_SELECT_*.
/// @param selection        With KVT_E_TOO_SMALL only its counts are written.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, any status of the score function.
kvt_status_t kvt_policy_select(const kvt_policy_t *policy, int64_t now_ns,
                               const kvt_policy_columns_t *candidates, uint64_t required_blocks,
                               kvt_select_flags_t flags, kvt_policy_selection_t *selection,
                               kvt_error_t **err);

/* ---- Statistics and the eviction log --------------------------------------------------------- */

/// Statistics of a policy since it was opened. Without lookups, ratios and rates are 0 and Jain's
/// indices 1.
typedef struct kvt_policy_stats_t {
    uint64_t struct_size;
    /// Objects in the table.
    uint64_t objects;
    uint64_t max_objects;
    /// Sum of the objects' sizes.
    uint64_t units;
    /// 0 = unknown.
    uint64_t capacity_units;
    /// Known sessions.
    uint64_t sessions;
    /// Tenants counted separately, up to 1024; the others count as one.
    uint64_t tenants;
    /// Lookups.
    uint64_t requests;
    /// Objects looked up, in all lookups.
    uint64_t references;
    /// References that found a usable object.
    uint64_t hits;
    /// References to objects that were evicted before and are missing: to be recomputed.
    uint64_t evicted_references;
    /// Tokens looked up.
    uint64_t tokens;
    /// Tokens found.
    uint64_t hit_tokens;
    /// Recompute cost of the tokens looked up.
    double cost;
    /// Recompute cost of the tokens found.
    double hit_cost;
    /// Objects inserted.
    uint64_t inserts;
    /// Objects evicted.
    uint64_t evictions;
    /// Units evicted.
    uint64_t evicted_units;
    /// Evictions and selections called.
    uint64_t decisions;
    /// Decisions that freed less than required.
    uint64_t shortfalls;
    /// Decisions that were timed: every selection, 1 eviction in 16 (by "custom": every one).
    uint64_t decisions_timed;
    /// Times of these decisions: median, 99th percentile, maximum, mean.
    uint64_t decision_p50_ns;
    uint64_t decision_p99_ns;
    uint64_t decision_max_ns;
    uint64_t decision_mean_ns;
    /// hits / references.
    double hit_ratio;
    /// hit_tokens / tokens.
    double token_hit_ratio;
    /// hit_cost / cost.
    double cost_hit_ratio;
    /// evicted_references / references.
    double re_prefill_rate;
    /// Jain's index, over sessions, of the tokens found per token that an unbounded cache would
    /// have found: 1 if all are equal, 1/n if one of n has everything.
    double jain_sessions;
    /// The same over tenants.
    double jain_tenants;
    /// Metadata bytes per object of a full table.
    double bytes_per_object;
    /// Number of the next eviction in the log.
    uint64_t next_log_number;
    /// Name of the policy; lives as long as the library.
    const char *name;
    uint64_t name_bytes;
} kvt_policy_stats_t;
#define KVT_POLICY_STATS_INIT KVT_INIT_(kvt_policy_stats_t)

/// An eviction in the log.
typedef struct kvt_policy_log_entry_t {
    /// Counts evictions from 1; a gap means that entries were overwritten.
    uint64_t number;
    /// Time of the eviction, by the caller's clock.
    int64_t at_ns;
    uint64_t id;
    /// Valid if has_session is not 0.
    uint64_t session;
    /// Time of the last use, as far as the policy knows it.
    int64_t stamp_ns;
    /// Score in the policy's order; the lowest is evicted first.
    double score;
    /// Units freed.
    uint32_t units;
    /// Uses since the object was inserted.
    uint32_t hits;
    /// The policy's queue that the object was in.
    uint32_t queue;
    uint32_t has_session;
    /// Index of the policy that decided, for kvt_policy_info.
    uint32_t policy;
    uint32_t reserved;
} kvt_policy_log_entry_t;

/// Reads a policy's statistics. Visits every session, so keep it out of hot paths.
kvt_status_t kvt_policy_stats(const kvt_policy_t *policy, kvt_policy_stats_t *out);

/// Writes the policy's spec in canonical form, not NUL-terminated.
///
/// @param out_bytes  Length of the spec; may be null.
/// @return KVT_E_TOO_SMALL.
kvt_status_t kvt_policy_spec(const kvt_policy_t *policy, char *out, uint64_t out_capacity,
                             uint64_t *out_bytes);

/// Reads a gauge: a number particular to the policy, such as "arc_p" of arc.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
kvt_status_t kvt_policy_gauge(const kvt_policy_t *policy, const char *name, uint64_t name_bytes,
                              double *out_value, kvt_error_t **err);

/// Reads a gauge by its index, to list them all. kvt_policy_switch changes the list.
///
/// @param out_name        Not NUL-terminated; lives as long as the library. May be null.
/// @param out_name_bytes  May be null.
/// @param out_value       May be null.
/// @return KVT_E_NOT_FOUND (`index` is past the last gauge).
kvt_status_t kvt_policy_gauge_at(const kvt_policy_t *policy, uint64_t index, const char **out_name,
                                 uint64_t *out_name_bytes, double *out_value);

/// Reads the log of evictions, oldest first.
///
/// @param from_number  First entry wanted, such as the last one read plus 1. Overwritten entries
///                     are left out.
/// @param capacity     Up to 2^21. More entries are no error: read on from the last one.
/// @param out_count    Entries written.
/// @return KVT_E_LIMIT.
kvt_status_t kvt_policy_log(const kvt_policy_t *policy, uint64_t from_number,
                            kvt_policy_log_entry_t *entries, uint64_t capacity,
                            uint64_t stride_bytes, uint64_t *out_count);

/* ---- Advice ---------------------------------------------------------------------------------- */

/// Flags of kvt_policy_advice_rules_t.
typedef uint64_t kvt_advice_flags_t;
enum {
    /// `shrink_above` = 0 means 0, not the default.
    KVT_ADVICE_ZERO_SHRINK = 1,
    /// `grow_below` = 0 means 0, not the default.
    KVT_ADVICE_ZERO_GROW = 2,
};

/// Rules of the advice.
typedef struct kvt_policy_advice_rules_t {
    uint64_t struct_size;
    kvt_advice_flags_t flags;
    /// Re-prefill rate of a window above which batches are halved, 0 to 1; 0 = 0.3.
    double shrink_above;
    /// Evictions in a window below which batches are doubled; 0 = 10.
    uint64_t grow_below;
    /// Smallest batch; 0 = 1.
    uint64_t min_batch;
    /// Largest batch; 0 = 128.
    uint64_t max_batch;
    /// Lookups in a window; 0 = 100.
    uint64_t window;
    /// Consecutive windows that must agree; 0 = 2.
    uint64_t patience;
} kvt_policy_advice_rules_t;
#define KVT_POLICY_ADVICE_RULES_INIT KVT_INIT_(kvt_policy_advice_rules_t)

/// Advice for a scheduler.
typedef struct kvt_policy_advice_t {
    uint64_t struct_size;
    /// Batch size to run next.
    uint64_t batch;
    /// Re-prefill rate of the last full window.
    double re_prefill_rate;
    /// Evictions in that window.
    uint64_t evictions;
} kvt_policy_advice_t;
#define KVT_POLICY_ADVICE_INIT KVT_INIT_(kvt_policy_advice_t)

/// Advises a scheduler on its batch size: half if too much is recomputed, double if hardly anything
/// is evicted. Consecutive windows of lookups must agree first (kvt_policy_advice_rules_t). A
/// change is advised once.
///
/// @param batch  The current batch size.
kvt_status_t kvt_policy_advise(const kvt_policy_t *policy, uint64_t batch,
                               kvt_policy_advice_t *out);

/// Replaces the rules of kvt_policy_advise. Windows before the call no longer count.
kvt_status_t kvt_policy_set_advice(const kvt_policy_t *policy,
                                   const kvt_policy_advice_rules_t *given, kvt_error_t **err);

#ifdef __cplusplus
}
#endif

#endif /* KVTIER_POLICY_H */

/* Enumerates the keys that a block of queries attends to, tile by tile: all keys, or the keys in
 * the lists of a head. The lists are those of src/attention/keys.rs.
 *
 * A window of keys is a bit set in shared memory. Lists mark their keys in it, and marked keys are
 * appended to a queue. So tiles are full whatever the lists contain, and no list is searched for
 * each key. `prefill_lines` has converted columns and diagonals to bit sets before. */
#pragma once

#include "attend.h"

constexpr u32 WINDOW = 1024;
/* Limit: queries of a block that follows lists. */
constexpr u32 LISTED_ROWS = 64;

/* The kind and lists of a head: `Head` of src/attention/keys.rs. */
enum { DENSE = 0, LINES = 1, BLOCKS = 2, RANGES = 3 };
struct head_lists {
    u32 kind, first, lists, query_block, key_block, dense_from;
};

/* A tile of keys: addresses of their rows, their positions, and for LINES a bit mask of the queries
 * that see each key, 32 queries per word. */
struct tile {
    u64 keys[KEYS], values[KEYS];
    u32 at[KEYS];
    u32 seen[LISTED_ROWS / 32][KEYS];
};

/* The bit sets of a head's columns and diagonals. Bit PAD + d of `diagonals` stands for distance d:
 * bits of negative distances exist and are 0. Bit x of `near` is set if one of the bits x to x + 63
 * of `diagonals` is set. */
constexpr u32 PAD = 96;
struct lines {
    u32 *columns, *diagonals, *near;
};

/* Positions that bit sets cover. */
DEVICE u32 reach_of(const call &c) { return most(c.tokens, c.first + c.query_count); }
DEVICE u32 line_words(const call &c) { return reach_of(c) / 32 + 8; }

DEVICE lines lines_of(const call &c, u32 head) {
    u32 words = line_words(c), *columns = (u32 *)c.scratch + (u64)head * 3 * words;
    return {columns, columns + words, columns + 2 * (u64)words};
}

/* 32 bits from `bit` on. */
DEVICE u32 bits_from(const u32 *words, u32 bit) {
    u64 both = words[bit / 32] | (u64)words[bit / 32 + 1] << 32;
    return (u32)(both >> bit % 32);
}

struct list {
    const u32 *items;
    u32 count;
};

/* Queued keys, the bit set of a window, and the lists, which are kept here to save registers. */
struct queue {
    u32 at[KEYS + WINDOW];
    u32 words[WINDOW / 32];
    list runs, columns;
    lines bits;
    /* Index of the next run and of the next column, and keys of a block. */
    u32 run, column, key_block;
};
static_assert(sizeof(queue) == 4552, "attend_prefill.rs must reserve sizeof(queue)");
static_assert(sizeof(tile) == 1792, "attend_prefill.rs must reserve sizeof(tile)");

DEVICE list list_of(const call &c, u32 at) {
    const u32 *starts = (const u32 *)c.counts;
    return {(const u32 *)c.index + starts[at], starts[at + 1] - starts[at]};
}

/* The index of a query head's entry in the index. */
DEVICE u32 entry_of(const call &c, u32 head) {
    if (c.count == 1) return 0;
    return c.count == c.key_heads ? head / (c.query_heads / c.key_heads) : head;
}

/* Partition of queries into blocks of at most `each` queries that share a list. The first `listed`
 * queries follow lists, and each row of `row` queries has `pieces` blocks. The others are dense.
 * `before` counts the listed blocks, `all` all blocks. */
struct blocks {
    u32 listed, row, pieces, before, all;
};

DEVICE blocks blocks_of(const call &c, const head_lists &head, u32 each = LISTED_ROWS) {
    blocks cut;
    u32 sparse = head.dense_from < c.first ? 0 : head.dense_from - c.first;
    cut.listed = head.kind == DENSE ? 0 : least(sparse, c.query_count);
    bool has_rows = (head.kind == BLOCKS || head.kind == RANGES) && head.query_block > 0;
    cut.row = has_rows ? least(head.query_block, cut.listed) : cut.listed;
    cut.pieces = ceil_div(cut.row, each);
    cut.before = cut.row == 0 ? 0 : ceil_div(cut.listed, cut.row) * cut.pieces;
    cut.all = cut.before + ceil_div(c.query_count - cut.listed, each);
    return cut;
}

/* State of the enumeration: equal in all threads. */
struct walk {
    u32 kind, key_head;
    /* First query, end of the queries, position of the first query. */
    u32 query, until, position;
    /* Begin of the next window or tile, and end of the keys. */
    u32 begin, end;
    /* First queued key and number of queued keys. */
    u32 from, have;
};

DEVICE void begin_walk(const call &c, walk &walk, u32 query, u32 until, u32 key_head) {
    walk.query = query;
    walk.until = until;
    walk.position = c.first + query;
    walk.key_head = key_head;
    walk.kind = DENSE;
    walk.begin = walk.from = walk.have = 0;
    walk.end = least(c.tokens, c.first + until);
}

/* Begins the enumeration for a block of queries with an index; false if the block has no query.
 * Other threads see the changes of the queue after a barrier, and one precedes the first mark. */
DEVICE bool begin_listed(const call &c, walk &walk, queue &queue, u32 head, u32 block,
                         u32 each = LISTED_ROWS) {
    u32 entry = entry_of(c, head);
    head_lists lists = ((const head_lists *)c.numbers)[entry];
    blocks cut = blocks_of(c, lists, each);
    // The last blocks have the most keys, so they run first.
    block = cut.all - 1 - block;
    bool is_listed = block < cut.before;
    u32 row = is_listed ? block / cut.pieces : 0, query, until;
    if (is_listed) {
        query = row * cut.row + block % cut.pieces * each;
        until = least(least(query + each, (row + 1) * cut.row), cut.listed);
    } else {
        query = cut.listed + (block - cut.before) * each;
        until = least(query + each, c.query_count);
    }
    if (query >= until) return false;
    begin_walk(c, walk, query, until, head / (c.query_heads / c.key_heads));
    if (!is_listed) return true;
    walk.kind = lists.kind;
    if (threadIdx.x != 0) return true;
    queue.runs = queue.columns = {nullptr, 0};
    queue.run = queue.column = 0;
    queue.key_block = lists.key_block;
    if (lists.kind == LINES) queue.bits = lines_of(c, entry);
    if (lists.kind == BLOCKS) queue.runs = list_of(c, lists.first + row);
    if (lists.kind == RANGES) {
        queue.columns = list_of(c, lists.first);
        queue.runs = list_of(c, lists.first + 1 + row);
        queue.runs.count /= 2;
    }
    return true;
}

/* Marks keys `from` to `to` in the window that begins at `begin`. */
DEVICE void mark(queue &queue, u32 begin, u32 from, u32 to) {
    for (u32 word = (from - begin) / 32; word * 32 < to - begin; word++) {
        u32 first = begin + word * 32;
        u32 bits = from > first ? ALL_LANES << (from - first) : ALL_LANES;
        if (to - first < 32) bits &= (1u << (to - first)) - 1;
        atomicOr(&queue.words[word], bits);
    }
}

/* Marks the keys of a list in the window, from run `from` on. Adds the number of runs that end in
 * the window to `ended`. */
DEVICE void mark_runs(const walk &walk, queue &queue, bool is_columns, u32 from, u32 *ended) {
    list list = is_columns ? queue.columns : queue.runs;
    u32 behind = least(walk.begin + WINDOW, walk.end);
    u32 i = from + threadIdx.x;
    for (; threadIdx.x < THREADS && i < list.count; i += THREADS) {
        u64 first, last;
        if (is_columns) {
            first = list.items[i], last = first + 1;
        } else if (walk.kind == BLOCKS) {
            first = (u64)list.items[i] * queue.key_block, last = first + queue.key_block;
        } else {
            first = list.items[2 * i], last = list.items[2 * i + 1];
        }
        if (first >= behind) break;
        u32 begin = most((u32)first, walk.begin), end = (u32)least(last, (u64)behind);
        if (begin < end) mark(queue, walk.begin, begin, end);
        if (last <= behind) atomicAdd(ended, 1u);
    }
}

/* Marks the keys of the window that any query of the block sees through columns or diagonals. */
DEVICE void mark_lines(const walk &walk, queue &queue) {
    u32 first = walk.begin + threadIdx.x * 32;
    if (threadIdx.x >= WINDOW / 32) return;
    u32 bits = 0;
    if (first < walk.end) {
        // Distances fall as key positions rise.
        u32 near = bits_from(queue.bits.near, walk.position + PAD - 31 - first);
        bits = queue.bits.columns[first / 32] | __brev(near);
        if (walk.end - first < 32) bits &= (1u << (walk.end - first)) - 1;
    }
    queue.words[threadIdx.x] = bits;
}

DEVICE void mark_window(const walk &walk, queue &queue) {
    if (walk.kind == LINES) {
        mark_lines(walk, queue);
    } else if (walk.kind == DENSE) {
        u32 first = walk.begin + threadIdx.x * 32, left = walk.end - least(first, walk.end);
        if (threadIdx.x < WINDOW / 32)
            queue.words[threadIdx.x] = left < 32 ? (1u << left) - 1 : ALL_LANES;
    } else {
        u32 run = queue.run, column = queue.column;
        if (threadIdx.x < WINDOW / 32) queue.words[threadIdx.x] = 0;
        __syncthreads();
        mark_runs(walk, queue, false, run, &queue.run);
        mark_runs(walk, queue, true, column, &queue.column);
    }
    __syncthreads();
}

/* Appends the marked keys to the queue: four of the first threads per word. */
DEVICE void append_marked(walk &walk, queue &queue) {
    u32 own = queue.words[lane()], count = (u32)__popc(own);
    u32 up_to = warp_up_to(count), word = threadIdx.x / 4, shift = threadIdx.x % 4 * 8;
    u32 bits = from_lane(own, word), at = from_lane(up_to - count, word) + walk.have;
    at += (u32)__popc(bits & ((1u << shift) - 1));
    bits = threadIdx.x < THREADS ? bits >> shift & 255 : 0;
    for (; bits != 0; bits &= bits - 1)
        queue.at[at++] = walk.begin + word * 32 + shift + (u32)__ffs((int)bits) - 1;
    walk.have += from_lane(up_to, WARP - 1);
}

/* Fills the queue until it has a whole tile, or until the keys end. */
DEVICE void fill(walk &walk, queue &queue) {
    u32 held = threadIdx.x < walk.have ? queue.at[walk.from + threadIdx.x] : 0;
    __syncthreads();
    if (threadIdx.x < walk.have) queue.at[threadIdx.x] = held;
    walk.from = 0;
    while (walk.have < KEYS && walk.begin < walk.end) {
        mark_window(walk, queue);
        append_marked(walk, queue);
        walk.begin += WINDOW;
        __syncthreads();
    }
}

/* Bit mask of the 32 queries of the block that see a key through columns or diagonals. */
DEVICE u32 seen_by(const walk &walk, const queue &queue, u32 key, u32 queries) {
    if (queue.bits.columns[key / 32] >> key % 32 & 1) return ALL_LANES;
    return bits_from(queue.bits.diagonals, walk.position + 32 * queries + PAD - key);
}

/* Reads the next tile; false if there is none. All threads must call it; they see the tile after a
 * barrier. */
template <bool LISTED>
DEVICE bool next_tile(const call &c, walk &walk, queue *queue, tile &tile) {
    if (LISTED && walk.have < KEYS && walk.begin < walk.end) fill(walk, *queue);
    u32 count = least(LISTED ? walk.have : walk.end - least(walk.begin, walk.end), KEYS);
    if (count == 0) return false;
    // Places behind the last key repeat the first key, and no query sees them.
    u32 key = threadIdx.x % KEYS, i = key < count ? key : 0;
    u32 at = LISTED ? queue->at[walk.from + i] : walk.begin + i;
    if (threadIdx.x < KEYS) {
        tile.keys[key] = key_at(c, at, walk.key_head);
        tile.at[key] = key < count ? at : NOWHERE;
    } else if (threadIdx.x < 2 * KEYS) {
        tile.values[key] = value_at(c, at, walk.key_head);
    }
    if (LISTED && walk.kind == LINES && threadIdx.x < 2 * KEYS)
        tile.seen[threadIdx.x / KEYS][key] = seen_by(walk, *queue, at, threadIdx.x / KEYS);
    if (LISTED) {
        walk.from += count;
        walk.have -= count;
    } else {
        walk.begin += KEYS;
    }
    return true;
}

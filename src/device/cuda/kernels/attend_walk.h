/* Which keys a block of queries is computed with, tile by tile. All of them, or what the lists of
 * a head say: see src/attention/keys.rs, the same tables are read here.
 *
 * Lists are not looked through for each key. A window of keys is a bit for each in shared memory;
 * lists mark what they name in it, and what is marked is put in line, so that tiles are full
 * whatever lists say. Columns and diagonals were made bits before, by `prefill_lines`. */
#pragma once

#include "attend.h"

constexpr u32 WINDOW = 1024;
/* Most queries of a block that follows lists. */
constexpr u32 LISTED_ROWS = 64;

/* How the lists of a head are meant: `Head` of src/attention/keys.rs. */
enum { DENSE = 0, LINES = 1, BLOCKS = 2, RANGES = 3 };
struct head_lists {
    u32 kind, first, lists, query_block, key_block, dense_from;
};

/* A tile of keys: where their rows are, which positions they have, and where there are lines
 * which of each 32 queries see each. */
struct tile {
    u64 keys[KEYS], values[KEYS];
    u32 at[KEYS];
    u32 seen[LISTED_ROWS / 32][KEYS];
};

/* The bits of the lines of a head. Distances begin PAD bits on, so that those behind a query are
 * there, and 0. `near` has the bit of x where one of x to x + 63 is a diagonal. */
constexpr u32 PAD = 96;
struct lines {
    u32 *columns, *diagonals, *near;
};

DEVICE u32 reach_of(const call &c) { return most(c.tokens, c.first + c.query_count); }
DEVICE u32 line_words(const call &c) { return reach_of(c) / 32 + 8; }

DEVICE lines lines_of(const call &c, u32 head) {
    u32 words = line_words(c), *columns = (u32 *)c.scratch + (u64)head * 3 * words;
    return {columns, columns + words, columns + 2 * (u64)words};
}

/* 32 bits from one on. */
DEVICE u32 bits_from(const u32 *words, u32 bit) {
    u64 both = words[bit / 32] | (u64)words[bit / 32 + 1] << 32;
    return (u32)(both >> bit % 32);
}

struct list {
    const u32 *items;
    u32 count;
};

/* Keys in line, and the bits of a window; and what lists say, which takes no registers here. */
struct queue {
    u32 at[KEYS + WINDOW];
    u32 words[WINDOW / 32];
    list runs, columns;
    lines bits;
    /* Where the next run and column are, and keys of a block. */
    u32 run, column, key_block;
};
static_assert(sizeof(queue) == 4552, "what attend_prefill.rs asks for");
static_assert(sizeof(tile) == 1792, "what attend_prefill.rs asks for");

DEVICE list list_of(const call &c, u32 at) {
    const u32 *starts = (const u32 *)c.counts;
    return {(const u32 *)c.index + starts[at], starts[at + 1] - starts[at]};
}

/* What is said for a query head. */
DEVICE u32 entry_of(const call &c, u32 head) {
    if (c.count == 1) return 0;
    return c.count == c.key_heads ? head / (c.query_heads / c.key_heads) : head;
}

/* How queries are cut into blocks of `each` that have one list each: up to `listed` by lists, each
 * row of them in `pieces`, behind that dense. */
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

/* Where a walk is: the same in all threads. */
struct walk {
    u32 kind, key_head;
    /* The queries are from one up to another, the position of the first is `position`. */
    u32 query, until, position;
    /* The next window or tile, and behind the last key. */
    u32 begin, end;
    /* In the queue. */
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

/* The walk of a block of queries that follows lists; false if it has none. What it puts into the
 * queue others see behind a barrier: there is one before anything is marked. */
DEVICE bool begin_listed(const call &c, walk &walk, queue &queue, u32 head, u32 block,
                         u32 each = LISTED_ROWS) {
    u32 entry = entry_of(c, head);
    head_lists said = ((const head_lists *)c.numbers)[entry];
    blocks cut = blocks_of(c, said, each);
    // The last have most to do: they come first.
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
    walk.kind = said.kind;
    if (threadIdx.x != 0) return true;
    queue.runs = queue.columns = {nullptr, 0};
    queue.run = queue.column = 0;
    queue.key_block = said.key_block;
    if (said.kind == LINES) queue.bits = lines_of(c, entry);
    if (said.kind == BLOCKS) queue.runs = list_of(c, said.first + row);
    if (said.kind == RANGES) {
        queue.columns = list_of(c, said.first);
        queue.runs = list_of(c, said.first + 1 + row);
        queue.runs.count /= 2;
    }
    return true;
}

/* Marks keys of the window. */
DEVICE void mark(queue &queue, u32 begin, u32 from, u32 to) {
    for (u32 word = (from - begin) / 32; word * 32 < to - begin; word++) {
        u32 first = begin + word * 32;
        u32 bits = from > first ? ALL_LANES << (from - first) : ALL_LANES;
        if (to - first < 32) bits &= (1u << (to - first)) - 1;
        atomicOr(&queue.words[word], bits);
    }
}

/* What a list has in the window from a run on; how many of its runs end in it is added to
 * `ended`. */
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

/* Which keys of the window any query of the block sees by its lines. */
DEVICE void mark_lines(const walk &walk, queue &queue) {
    u32 first = walk.begin + threadIdx.x * 32;
    if (threadIdx.x >= WINDOW / 32) return;
    u32 bits = 0;
    if (first < walk.end) {
        // Distances go down where keys go up.
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

/* Puts what is marked in line: four of the first threads a word. */
DEVICE void line_up(walk &walk, queue &queue) {
    u32 own = queue.words[lane()], count = (u32)__popc(own);
    u32 up_to = warp_up_to(count), word = threadIdx.x / 4, shift = threadIdx.x % 4 * 8;
    u32 bits = from_lane(own, word), at = from_lane(up_to - count, word) + walk.have;
    at += (u32)__popc(bits & ((1u << shift) - 1));
    bits = threadIdx.x < THREADS ? bits >> shift & 255 : 0;
    for (; bits != 0; bits &= bits - 1)
        queue.at[at++] = walk.begin + word * 32 + shift + (u32)__ffs((int)bits) - 1;
    walk.have += from_lane(up_to, WARP - 1);
}

/* Goes on until there is a whole tile in the queue, or nothing more. */
DEVICE void fill(walk &walk, queue &queue) {
    u32 held = threadIdx.x < walk.have ? queue.at[walk.from + threadIdx.x] : 0;
    __syncthreads();
    if (threadIdx.x < walk.have) queue.at[threadIdx.x] = held;
    walk.from = 0;
    while (walk.have < KEYS && walk.begin < walk.end) {
        mark_window(walk, queue);
        line_up(walk, queue);
        walk.begin += WINDOW;
        __syncthreads();
    }
}

/* Which of 32 queries of the block see a key by lines. */
DEVICE u32 seen_by(const walk &walk, const queue &queue, u32 key, u32 queries) {
    if (queue.bits.columns[key / 32] >> key % 32 & 1) return ALL_LANES;
    return bits_from(queue.bits.diagonals, walk.position + 32 * queries + PAD - key);
}

/* The next tile, if there is one. All threads come; others see the tile behind a barrier. */
template <bool LISTED>
DEVICE bool take(const call &c, walk &walk, queue *queue, tile &tile) {
    if (LISTED && walk.have < KEYS && walk.begin < walk.end) fill(walk, *queue);
    u32 count = least(LISTED ? walk.have : walk.end - least(walk.begin, walk.end), KEYS);
    if (count == 0) return false;
    // What lies behind the last is read as the first, and seen by nobody.
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

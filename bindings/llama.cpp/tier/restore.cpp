// Copies KV from the store into the context: straight into the engine's tensors where that is possible,
// else piece by piece, in the order of positions. The next pieces are read while the engine takes one in.
#include "tier/tier.hpp"

#include <algorithm>
#include <deque>

namespace kvtier_llama {

namespace {

constexpr size_t pieces_ahead = 3;
constexpr uint32_t first_piece_tokens = 32;
constexpr uint64_t buffer_wait_ns = 1000000000;
/// A disk slower than this is slower than decoding, so a late piece is a miss.
constexpr uint64_t get_wait_ns = 5000000000;
constexpr uint64_t byte_wait_ns = 10;
/// After its deadline or a cancel an op releases its memory at once, unless the disk hangs.
constexpr uint64_t release_wait_ns = 1000000000;

struct piece_t {
    uint32_t first = 0, end = 0;
    held_buffer buffer;
    blob_place place;
    uint64_t deadline_ns = 0;
};

/// Cells of the blob of a piece: of windows only those needed at `to`, of states only the last.
struct piece_cells {
    std::vector<cell_t> cells;
    std::vector<cell_range> ranges;

    piece_cells(const tier_t &tier, const prompt_t &of, uint32_t first, uint32_t end, uint32_t to, bool state) {
        for (uint32_t i = first; i < end; i++) {
            cells.push_back(of.cell(i));
        }
        for (const section_shape &is : tier.shape.sections) {
            uint32_t begin = first;
            if (is.window_tokens != 0 && to > is.window_tokens) {
                begin = std::max<uint32_t>(first, uint32_t(full_chunks(tier, to - is.window_tokens)));
            }
            if (is.is_state()) {
                const bool always = is.kind == section_kind::end_state;
                ranges.push_back({&cells.back(), always || (state && end == to) ? 1u : 0u});
            } else if (is.kind == section_kind::compressed) {
                ranges.push_back({nullptr, end / is.row_tokens - first / is.row_tokens});
            } else {
                begin = std::min(begin, end);
                ranges.push_back({cells.data() + (begin - first), end - begin});
            }
        }
    }

    bool empty() const {
        return std::all_of(ranges.begin(), ranges.end(), [](const cell_range &one) { return one.count == 0; });
    }
};

/// Waits for the gets of a piece. If they do not complete, its buffer stays taken, because the
/// store may still write into it.
kvt_status_t end_piece(tier_t &tier, piece_t &piece, uint64_t deadline_ns) {
    kvt_status_t status = KVT_OK;
    if (reap(tier, *piece.buffer, deadline_ns, &status)) {
        return status;
    }
    piece.buffer->stuck = true;
    piece.buffer.release();
    return KVT_E_TIMEOUT;
}

/// Cancels a piece. Its gets must complete before its buffer is reused.
void drop_piece(tier_t &tier, piece_t &piece) {
    if (!piece.buffer) {
        return;
    }
    for (kvt_op_t *op : piece.buffer->ops) {
        kvt_op_cancel(op);
    }
    end_piece(tier, piece, now_ns() + release_wait_ns);
}

/// Returns the store's status, or KVT_E_AGAIN without a buffer.
kvt_status_t begin_piece(tier_t &tier, const session &held, const prompt_t &of, piece_t &piece,
                         const piece_cells &has) {
    const uint64_t bytes = blob_bytes(tier.shape, has.ranges);
    piece.buffer = bytes != 0 ? take_buffer(tier, bytes, now_ns() + buffer_wait_ns) : nullptr;
    if (!piece.buffer) {
        return KVT_E_AGAIN;
    }
    piece.place = build_blob(tier.shape, has.ranges, 0, piece.buffer->data);
    locate_cells(tier.shape, of, &piece.place);
    piece.deadline_ns = now_ns() + get_wait_ns + bytes * byte_wait_ns;
    const kvt_status_t status =
        get_rows(tier, held, *piece.buffer, piece.place, piece.first, piece.end, piece.deadline_ns);
    if (status != KVT_OK) {
        drop_piece(tier, piece);
    }
    return status;
}

/// Pieces in flight. The destructor cancels all of them, however a restore ends.
struct pipeline {
    tier_t &tier;
    std::deque<piece_t> pieces;

    explicit pipeline(tier_t &of) : tier(of) {}
    pipeline(const pipeline &) = delete;
    pipeline &operator=(const pipeline &) = delete;
    ~pipeline() {
        for (piece_t &piece : pieces) {
            drop_piece(tier, piece);
        }
    }
};

/// Pieces grow: the first one is short, because nothing overlaps with its read.
uint32_t next_end(const tier_t &tier, uint32_t from, uint32_t at, uint32_t to) {
    if (tier.scratch < 0) {
        return to;
    }
    const uint32_t tokens = std::max<uint32_t>(at - from, uint32_t(full_chunks(tier, first_piece_tokens)));
    return std::min(at + std::max(tier.chunk, std::min(tokens, tier.piece)), to);
}

/// Ends a restore into tensors. False if cells are missing.
bool end_in_place(tier_t &tier, piece_t &piece, llama_seq_id seq, restored_t *done) {
    const kvt_status_t status = end_piece(tier, piece, piece.deadline_ns + release_wait_ns);
    if (!piece.buffer) {
        tier.scratch_stuck = true;
        done->refused = status;
        return true;
    }
    if (status == KVT_OK) {
        llama_memory_seq_cp(tier.memory, tier.scratch, seq, -1, -1);
        done->tokens = piece.end;
        done->bytes = piece.place.bytes;
        tier.stats.in_place_bytes += piece.place.bytes;
    }
    llama_memory_seq_rm(tier.memory, tier.scratch, -1, -1);
    return status == KVT_OK;
}

/// Restores [from, to) into the engine's tensors at once. False, with the sequence as it was, if that is
/// not possible, or if cells are missing: then pieces restore what there is.
bool restore_in_place(tier_t &tier, const session &held, const prompt_t &of, llama_seq_id seq, uint32_t from,
                      uint32_t to, restored_t *done) {
    const auto has_cells = [](const section_shape &is) { return is.kind == section_kind::cells; };
    const std::vector<section_shape> &sections = tier.shape.sections;
    if (tier.scratch < 0 || from == to || !std::all_of(sections.begin(), sections.end(), has_cells)) {
        return false;
    }
    check_scratch(tier);
    piece_t piece;
    piece.first = from;
    piece.end = to;
    // Only for its ops: rows do not pass through it.
    piece.buffer = take_buffer(tier, 0, 1);
    const piece_cells has(tier, of, from, to, to, false);
    if (!piece.buffer || !take_cells(tier, has.ranges, piece.buffer->data, &piece.place)) {
        return false;
    }
    locate_cells(tier.shape, of, &piece.place);
    piece.deadline_ns = now_ns() + get_wait_ns + piece.place.bytes * byte_wait_ns;
    const kvt_status_t begun =
        get_rows(tier, held, *piece.buffer, piece.place, from, to, piece.deadline_ns);
    if (begun != KVT_OK) {
        for (kvt_op_t *op : piece.buffer->ops) {
            kvt_op_cancel(op);
        }
        piece.buffer->worst = begun;
    }
    return end_in_place(tier, piece, seq, done);
}

} // namespace

bool splice(tier_t &tier, llama_seq_id seq, bool empty, const uint8_t *blob, uint64_t bytes) {
    check_scratch(tier);
    if (empty || tier.scratch < 0) {
        return empty && llama_state_seq_set_data(tier.ctx, blob, bytes, seq) == bytes;
    }
    const bool taken = llama_state_seq_set_data(tier.ctx, blob, bytes, tier.scratch) == bytes;
    if (taken) {
        llama_memory_seq_cp(tier.memory, tier.scratch, seq, -1, -1);
    }
    llama_memory_seq_rm(tier.memory, tier.scratch, -1, -1);
    return taken;
}

restored_t restore(tier_t &tier, const session &held, const prompt_t &of, llama_seq_id seq, uint32_t from,
                   uint32_t to, bool state) {
    restored_t done;
    done.tokens = from;
    if (restore_in_place(tier, held, of, seq, from, to, &done)) {
        return done;
    }
    pipeline line(tier);
    bool empty = from == 0 || !tier.shape.has_attention();
    uint32_t at = from;
    while (at < to || !line.pieces.empty()) {
        while (at < to && line.pieces.size() < pieces_ahead) {
            const uint32_t end = next_end(tier, from, at, to);
            const piece_cells has(tier, of, at, end, to, state);
            if (!has.empty()) {
                line.pieces.emplace_back();
                piece_t &piece = line.pieces.back();
                piece.first = at;
                piece.end = end;
                const kvt_status_t begun = begin_piece(tier, held, of, piece, has);
                if (begun != KVT_OK) {
                    line.pieces.pop_back();
                    if (line.pieces.empty()) {
                        done.refused = begun;
                        return done;
                    }
                    break;
                }
            }
            at = end;
        }
        if (line.pieces.empty()) {
            continue;
        }
        piece_t piece = std::move(line.pieces.front());
        line.pieces.pop_front();
        kvt_status_t status = end_piece(tier, piece, piece.deadline_ns + release_wait_ns);
        if (status == KVT_OK && !splice(tier, seq, empty, piece.buffer->data, piece.place.bytes)) {
            status = KVT_E_STATE;
        }
        piece.buffer.reset();
        if (status != KVT_OK) {
            done.refused = status;
            return done;
        }
        empty = false;
        done.tokens = piece.end;
        done.bytes += piece.place.bytes;
    }
    done.tokens = to;
    return done;
}

} // namespace kvtier_llama

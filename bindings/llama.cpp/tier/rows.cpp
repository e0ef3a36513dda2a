// Transfers between rows of a blob and a session: views into the blob, without a copy.
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_llama {

namespace {

/// The order of rows in a section for consecutive indices.
struct row_order {
    /// The rows are contiguous, from row `first` on.
    bool straight = true;
    uint32_t first = 0;
    /// If not contiguous: the row of each index.
    std::vector<uint32_t> rows;
};

row_order order_of(const section_shape &is, const section_place &place, uint32_t first, uint32_t end) {
    row_order order;
    if (is.kind == section_kind::compressed) {
        // A row for several tokens is as many rows of the store.
        order.first = first;
        return order;
    }
    order.rows.assign(end - first, 0);
    for (size_t row = 0; row < place.indices.size(); row++) {
        const int32_t index = place.indices[row];
        if (index >= int32_t(first) && index < int32_t(end)) {
            order.rows[uint32_t(index) - first] = uint32_t(row);
        }
    }
    order.first = order.rows[0];
    for (size_t i = 0; i < order.rows.size() && order.straight; i++) {
        order.straight = order.rows[i] == order.first + i;
    }
    return order;
}

/// Views of a section's layers, and the page tables that they point to.
struct views_t {
    std::vector<kvt_view_t> k, v;
    bool has_v = false;
    /// Page tables, one per row size.
    std::vector<std::pair<uint64_t, std::vector<void *>>> tables;

    void *const *table(uint8_t *data, const row_order &order, uint64_t row_bytes) {
        for (const auto &one : tables) {
            if (one.first == row_bytes) {
                return one.second.data();
            }
        }
        std::vector<void *> places;
        for (const uint32_t row : order.rows) {
            places.push_back(data + row * row_bytes);
        }
        tables.emplace_back(row_bytes, std::move(places));
        return tables.back().second.data();
    }
};

/// The address `at` bytes after `data`. Offsets of tensors outside of a blob wrap around.
uint8_t *address(uint8_t *data, uint64_t at) {
    return reinterpret_cast<uint8_t *>(reinterpret_cast<uintptr_t>(data) + at);
}

kvt_view_t plane_view(views_t &all, uint8_t *data, const row_order &order, uint64_t at, uint64_t row_bytes) {
    kvt_view_t view{};
    if (order.straight) {
        view.address = address(data, at + order.first * row_bytes);
    } else {
        view.pages = all.table(data, order, row_bytes);
        view.page_count = order.rows.size();
        view.page_tokens = 1;
        view.shift_bytes = int64_t(at);
    }
    view.run_bytes = row_bytes;
    view.token_stride_bytes = row_bytes;
    return view;
}

void section_views(views_t &all, const section_shape &is, const section_place &place, uint8_t *data,
                   uint32_t first, uint32_t end) {
    const row_order order = order_of(is, place, first, end);
    const size_t layers = is.layers();
    // Reserved, so that adding a table does not move the others: at most two row sizes per layer.
    all.tables.reserve(2 * layers);
    all.has_v = is.has_v;
    for (size_t i = 0; i < layers; i++) {
        const uint64_t k_bytes = is.planes[i].row_bytes / is.row_tokens;
        all.k.push_back(plane_view(all, data, order, place.at[i], k_bytes));
        kvt_view_t v{};
        if (is.has_v) {
            const plane_shape &plane = is.planes[layers + i];
            const uint64_t each = plane.element_bytes != 0 ? plane.element_bytes : plane.row_bytes;
            v = plane_view(all, data, order, place.at[layers + i], each);
            if (plane.element_bytes != 0) {
                // In a transposed plane each element has a row of all cells, so elements take the place
                // of heads.
                v.heads = uint32_t(plane.row_bytes / each);
                v.head_stride_bytes = each * place.rows;
            }
        }
        all.v.push_back(v);
    }
}

void state_views(views_t &all, const section_shape &is, const section_place &place, uint8_t *data) {
    for (size_t i = 0; i < is.planes.size(); i++) {
        kvt_view_t view{};
        view.address = data + place.at[i];
        view.run_bytes = is.planes[i].row_bytes;
        if (view.run_bytes != 0) {
            all.k.push_back(view);
        }
    }
}

enum class direction { put, get };

kvt_status_t submit(tier_t &tier, const session &of, buffer_t &buffer, direction which, views_t &views,
                    const section_layers &layers, uint32_t first, uint32_t end, uint64_t deadline_ns) {
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.first_token = first;
    transfer.tokens = end - first;
    transfer.first_layer = layers.first;
    transfer.layers = layers.count;
    transfer.k = views.k.data();
    transfer.v = views.has_v ? views.v.data() : nullptr;
    transfer.stride_bytes = sizeof(kvt_view_t);
    kvt_op_t *op = nullptr;
    kvt_status_t status = KVT_OK;
    buffer.ops.reserve(buffer.ops.size() + 1);
    if (which == direction::put) {
        transfer.level = tier.has_disk ? KVT_LEVEL_DURABLE : KVT_LEVEL_RAM;
        status = kvt_session_put(of.handle, &transfer, nullptr, &op, nullptr);
    } else {
        kvt_submit_opts_t until = KVT_SUBMIT_OPTS_INIT;
        until.deadline_ns = deadline_ns;
        status = kvt_session_get(of.handle, &transfer, &until, &op, nullptr);
    }
    if (op) {
        buffer.ops.push_back(op);
    }
    return status;
}

kvt_status_t move_section(tier_t &tier, const session &of, buffer_t &buffer, const blob_place &place,
                          size_t number, direction which, uint32_t first, uint32_t end,
                          uint64_t deadline_ns) {
    const section_shape &is = tier.shape.sections[number];
    if (tier.layers[number].count == 0) {
        return KVT_OK;
    }
    views_t views;
    if (is.is_state()) {
        state_views(views, is, place.sections[number], buffer.data);
    } else {
        section_views(views, is, place.sections[number], buffer.data, first, end);
    }
    return submit(tier, of, buffer, which, views, tier.layers[number], first, end, deadline_ns);
}

} // namespace

void locate_cells(const shape &is, const prompt_t &of, blob_place *place) {
    for (size_t i = 0; i < is.sections.size(); i++) {
        const section_shape &section = is.sections[i];
        section_place &where = place->sections[i];
        where.indices.clear();
        for (const cell_t &cell : where.cells) {
            if (section.is_state()) {
                const size_t length = of.length_before(cell.position + 1);
                const bool is_last = length != 0 && of.cell(length - 1).position == cell.position;
                where.indices.push_back(is_last ? int32_t(length) - 1 : -1);
                continue;
            }
            const size_t index = of.find(cell);
            const bool inside = index < of.count;
            const cell_t wanted = inside ? cell_of(section, of.cell(index)) : cell_t{};
            const bool same = cell.position == wanted.position && cell.x == wanted.x && cell.y == wanted.y &&
                              cell.token == wanted.token;
            where.indices.push_back(inside && same ? int32_t(index) : -1);
        }
    }
}

uint32_t rows_begin(const section_shape &is, const section_place &place, uint32_t first, uint32_t end) {
    if (is.kind == section_kind::compressed) {
        return uint64_t(place.rows) * is.row_tokens >= end ? first : end;
    }
    std::vector<bool> present(end - first, false);
    for (const int32_t index : place.indices) {
        if (index >= int32_t(first) && index < int32_t(end)) {
            present[uint32_t(index) - first] = true;
        }
    }
    uint32_t begin = end;
    while (begin > first && present[begin - first - 1]) {
        begin--;
    }
    return begin;
}

kvt_status_t put_rows(tier_t &tier, const session &from, buffer_t &buffer, const blob_place &place,
                      uint32_t first, uint32_t end, bool state) {
    const uint32_t chunk = tier.chunk;
    kvt_status_t worst = KVT_OK;
    for (size_t i = 0; i < tier.shape.sections.size(); i++) {
        const section_shape &is = tier.shape.sections[i];
        uint32_t begin = first;
        if (is.is_state()) {
            const std::vector<int32_t> &at = place.sections[i].indices;
            begin = state && at.size() == 1 && at[0] == int32_t(end) - 1 ? end - chunk : end;
        } else {
            begin = (rows_begin(is, place.sections[i], first, end) + chunk - 1) / chunk * chunk;
        }
        if (begin >= end) {
            continue;
        }
        const kvt_status_t status = move_section(tier, from, buffer, place, i, direction::put, begin, end, 0);
        worst = status != KVT_OK ? status : worst;
    }
    return worst;
}

kvt_status_t get_rows(tier_t &tier, const session &from, buffer_t &buffer, const blob_place &place,
                      uint32_t first, uint32_t end, uint64_t deadline_ns) {
    for (size_t i = 0; i < tier.shape.sections.size(); i++) {
        const section_shape &is = tier.shape.sections[i];
        const section_place &where = place.sections[i];
        if (where.rows == 0) {
            continue;
        }
        const bool partly = is.kind == section_kind::cells;
        const uint32_t begin = is.is_state() ? end - tier.chunk
                                             : std::max(first, partly ? uint32_t(where.indices[0]) : first);
        const kvt_status_t status =
            move_section(tier, from, buffer, place, i, direction::get, begin, end, deadline_ns);
        if (status != KVT_OK) {
            return status;
        }
    }
    return KVT_OK;
}

} // namespace kvtier_llama

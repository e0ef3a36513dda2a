// Transfers between rows of a blob and a session: views into the blob, without a copy.
#include "tier/tier.hpp"

#include <algorithm>

namespace kvtier_llama {

namespace {

/// The order of rows in a section for consecutive positions.
struct row_order {
    /// The rows are contiguous, from row `first` on.
    bool straight = true;
    uint32_t first = 0;
    /// If not contiguous: the row of each position.
    std::vector<uint32_t> rows;
};

row_order order_of(const section_place &place, uint32_t first, uint32_t end) {
    row_order order;
    order.rows.assign(end - first, 0);
    const size_t cells = place.positions.size();
    for (size_t row = 0; row < cells; row++) {
        const uint32_t position = uint32_t(place.positions[row]);
        if (position >= first && position < end) {
            order.rows[position - first] = uint32_t(row);
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

kvt_view_t plane_view(views_t &all, uint8_t *data, const row_order &order, uint64_t at, uint64_t row_bytes) {
    kvt_view_t view{};
    if (order.straight) {
        view.address = data + at + order.first * row_bytes;
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
    const row_order order = order_of(place, first, end);
    // Reserved, so that adding a table does not move the others: at most two row sizes per layer.
    all.tables.reserve(2 * is.layers.size());
    for (size_t i = 0; i < is.layers.size(); i++) {
        const layer_shape &layer = is.layers[i];
        all.k.push_back(plane_view(all, data, order, place.k_at[i], layer.k_bytes));
        kvt_view_t v{};
        if (layer.v_bytes != 0 && is.transposed) {
            // In transposed V each element has a row of all cells, so elements take the place of
            // heads.
            v = plane_view(all, data, order, place.v_at[i], layer.v_element_bytes);
            v.heads = uint32_t(layer.v_bytes / layer.v_element_bytes);
            v.head_stride_bytes = uint64_t(layer.v_element_bytes) * place.positions.size();
        } else if (layer.v_bytes != 0) {
            v = plane_view(all, data, order, place.v_at[i], layer.v_bytes);
        }
        all.has_v = all.has_v || layer.v_bytes != 0;
        all.v.push_back(v);
    }
}

void state_views(views_t &all, const section_shape &is, const section_place &place, uint8_t *data) {
    for (size_t i = 0; i < is.parts.size(); i++) {
        kvt_view_t view{};
        view.address = data + place.k_at[i];
        view.run_bytes = is.parts[i].bytes;
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
    views_t views;
    if (is.recurrent) {
        state_views(views, is, place.sections[number], buffer.data);
    } else {
        section_views(views, is, place.sections[number], buffer.data, first, end);
    }
    return submit(tier, of, buffer, which, views, tier.layers[number], first, end, deadline_ns);
}

} // namespace

uint32_t rows_begin(const section_place &place, uint32_t first, uint32_t end) {
    std::vector<bool> present(end - first, false);
    for (const int32_t position : place.positions) {
        if (uint32_t(position) >= first && uint32_t(position) < end) {
            present[uint32_t(position) - first] = true;
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
        uint32_t begin = first;
        if (tier.shape.sections[i].recurrent) {
            const std::vector<int32_t> &at = place.sections[i].positions;
            begin = state && at.size() == 1 && at[0] == int32_t(end) - 1 ? end - chunk : end;
        } else {
            begin = (rows_begin(place.sections[i], first, end) + chunk - 1) / chunk * chunk;
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
        const std::vector<int32_t> &at = place.sections[i].positions;
        if (at.empty()) {
            continue;
        }
        const uint32_t begin = tier.shape.sections[i].recurrent ? end - tier.chunk
                                                                : std::max(first, uint32_t(at[0]));
        const kvt_status_t status =
            move_section(tier, from, buffer, place, i, direction::get, begin, end, deadline_ns);
        if (status != KVT_OK) {
            return status;
        }
    }
    return KVT_OK;
}

} // namespace kvtier_llama

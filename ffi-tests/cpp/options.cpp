// Option structs: what to_c() makes of absent, empty and zero members; handles that are borrowed.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

static_assert(std::is_aggregate_v<kvt::submit_opts> && std::is_aggregate_v<kvt::store_opts> &&
              std::is_aggregate_v<kvt::transfer> && std::is_aggregate_v<kvt::layout> &&
              std::is_aggregate_v<kvt::stream_opts> && std::is_aggregate_v<kvt::policy_hint>);
static_assert(std::is_same_v<decltype(kvt::transfer::level), kvt_level_t>,
              "a level of the C interface is assigned without a cast");
static_assert(!std::is_convertible_v<kvt::queue *, kvt::ref<kvt_buffer_t>>);

static void absent_is_the_default_and_zero_is_a_value() {
    kvt::budget_opts limits;
    CHECK(limits.to_c().flags == 0 && limits.to_c().struct_size == sizeof(kvt_budget_opts_t));
    limits.host_bytes = 0;
    limits.pinned_bytes = 7;
    limits.strict = true;
    const kvt_budget_opts_t c = limits.to_c();
    CHECK(c.flags == (KVT_BUDGET_STRICT | KVT_BUDGET_ZERO_HOST | KVT_BUDGET_ZERO_PINNED));
    CHECK(c.host_bytes == 0 && c.pinned_bytes == 7 && c.reserve_bytes == 0);

    kvt::policy_hint hint;
    CHECK(hint.to_c().flags == 0 && hint.to_c().confidence == 0);
    hint.confidence = 0;
    hint.done = true;
    CHECK(hint.to_c().flags == (KVT_HINT_ZERO_CONFIDENCE | KVT_HINT_DONE));

    kvt::plan_terms terms;
    CHECK(terms.to_c().flags == 0);
    terms.costs = kvt::prefill_cost{2, 0};
    CHECK(terms.to_c().flags == KVT_PLAN_COST && terms.to_c().alpha_ns == 2);
    kvt::policy_opts policy;
    policy.costs = kvt::policy_opts::cost{0, 3};
    CHECK(policy.to_c().flags == KVT_POLICY_COST && policy.to_c().beta == 3);

    kvt::stream_opts stream;
    kvt_stream_terms_t place;
    stream.terms.kv_bytes = 0;
    stream.terms.layer_compute = std::chrono::microseconds(3);
    kvt_stream_opts_t of = stream.to_c(place);
    CHECK(of.flags == 0 && of.sidecar == nullptr && of.order == nullptr && of.terms == &place);
    CHECK(place.flags == KVT_TERMS_KV && place.layer_compute_ns == 3000);
    stream.sidecar = "";
    stream.order.emplace();
    of = stream.to_c(place);
    CHECK(of.flags == KVT_STREAM_SIDECAR && of.sidecar == nullptr);
    CHECK(of.order != nullptr && of.order_count == 0);
}

static void texts_and_lists_are_borrowed() {
    std::vector<kvt_identity_extra_t> extra;
    kvt::identity model;
    model.model = "m";
    model.salt = "";
    model.extra = {{0x80000001u, "x"}, {0x80000002u, {}}};
    const kvt_identity_t c = model.to_c(extra);
    CHECK(c.model == model.model->data() && c.model_bytes == 1);
    CHECK(c.salt != nullptr && c.salt_bytes == 0);        // empty
    CHECK(c.weights == nullptr && c.weights_bytes == 0);  // absent
    CHECK(c.extra == extra.data() && c.extra_count == 2);
    CHECK(extra[0].tag == 0x80000001u && extra[0].value_bytes == 1 && extra[1].value == nullptr);

    std::vector<kvt_group_t> groups;
    kvt::layer_group group;
    group.layers = {0, 1};
    kvt::layout cells;
    cells.chunk_tokens = 16;
    cells.groups = {group};
    const kvt_layout_t layout = cells.to_c(groups);
    CHECK(layout.group_count == 1 && layout.stride_bytes == sizeof(kvt_group_t));
    CHECK(layout.groups[0].layers == cells.groups[0].layers.data());
    CHECK(layout.groups[0].layer_count == 2);

    kvt::store_opts store;
    CHECK(store.to_c().spec == nullptr && store.to_c().policy == nullptr);
    const kvt_secret_t secrets[] = {kvt::secret("password", "p")};
    store.secrets = secrets;
    store.write = KVT_WRITE_BACK;
    CHECK(store.to_c().secrets == secrets && store.to_c().secret_stride_bytes == sizeof secrets[0]);

    kvt::transfer all;
    CHECK(all.to_c().k == nullptr && all.to_c().layers == 0 && all.to_c().chunks == nullptr);
    const std::vector<kvt_view_t> views(3);
    all.k = views;
    all.needed_only = true;
    all.chunks.emplace();
    const kvt_transfer_t sent = all.to_c();
    CHECK(sent.layers == 3 && sent.v == nullptr && sent.stride_bytes == sizeof(kvt_view_t));
    CHECK(sent.flags == KVT_TRANSFER_NEEDED_ONLY && sent.chunks != nullptr && sent.chunk_count == 0);
}

static void layouts_of_models_have_their_sizes() {
    const kvt::layout gqa = kvt::layout::gqa(32, 8, 128, KVT_DTYPE_F16, 64);
    CHECK(gqa.layers == 32 && gqa.chunk_tokens == 64 && gqa.k_bytes == 8 * 128 * 2);
    CHECK(gqa.v_bytes == gqa.k_bytes && gqa.groups.empty());
    const kvt::layout mla = kvt::layout::mla(61, 512, 64, KVT_DTYPE_BF16, 64);
    CHECK(mla.k_bytes == 576 * 2 && mla.v_bytes == 0);
    const kvt::layout window = kvt::layout::window(26, 4, 256, KVT_DTYPE_BF16, 64, 512, 6);
    CHECK(window.window_tokens == 512 && window.full_every == 6 && window.full_first == 5);
    CHECK_THROWS(kvt::layout::gqa(0, 8, 128, KVT_DTYPE_F16, 64), KVT_E_INVALID);
    std::vector<kvt_group_t> none;
    const kvt_layout_t c = window.to_c(none);
    CHECK(c.groups == nullptr && c.layers == 26 && c.full_first == 5);
}

static void borrowed_handles_are_null_or_of_an_object() {
    const kvt::runtime runtime = kvt::runtime::open();
    const kvt::buffer buffer = runtime.alloc(4096);
    kvt::queue queue = runtime.open_queue();
    kvt::submit_opts opts;
    CHECK(opts.to_c().queue == nullptr);
    opts.queue = &queue;
    CHECK(opts.to_c().queue == queue.get());
    opts.queue = queue.get(); // a handle of the C interface
    runtime.submit(kvt::item::checksum(buffer, 0, 4096), opts).finish();
    kvt_completion_t done[1];
    CHECK(queue.wait(done) == 1);
    // An empty owner is an error, and not the absence of a queue.
    const kvt::queue empty;
    opts.queue = &empty;
    CHECK(opts.to_c().queue != nullptr);
    CHECK_THROWS(runtime.submit(kvt::item::checksum(buffer, 0, 4096), opts), KVT_E_HANDLE);
    const kvt::queue *none = nullptr;
    opts.queue = none;
    CHECK(opts.to_c().queue == nullptr);
    const kvt::budget no_budget;
    CHECK_THROWS(kvt::store::open(runtime, "store(host=1MiB)", &no_budget), KVT_E_HANDLE);
}

#if __cplusplus >= 202002L
static void members_can_be_named() {
    const kvt::runtime runtime = kvt::runtime::open({.workers = 1, .name = "named"});
    const kvt::buffer buffer = runtime.alloc({.try_pin = true, .bytes = 4096});
    CHECK(buffer.size() == 4096);
    const kvt::policy policy = kvt::policy::open({.spec = "lru", .max_objects = 4});
    CHECK(policy.spec() == "lru");
}
#endif

int main() {
    absent_is_the_default_and_zero_is_a_value();
    texts_and_lists_are_borrowed();
    layouts_of_models_have_their_sizes();
    borrowed_handles_are_null_or_of_an_object();
#if __cplusplus >= 202002L
    members_can_be_named();
#endif
    return done();
}

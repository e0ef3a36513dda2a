// kvt::model and kvt::streamer: passes over a model in a file, leases that release themselves, less
// memory during passes, errors as exceptions.
#include <kvtier/kvtier.hpp>

#include "check.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

constexpr std::uint32_t LAYERS = 6;
constexpr std::uint64_t LAYER_BYTES = 70000, HEAD_BYTES = 20000;

std::string write_model(const std::string &folder, std::vector<char> &image) {
    std::string header = "{";
    std::uint64_t end = 0;
    const auto add = [&](const std::string &name, std::uint64_t bytes) {
        header += (end > 0 ? ",\"" : "\"") + name + "\":{\"dtype\":\"U8\",\"shape\":[" +
                  std::to_string(bytes) + "],\"data_offsets\":[" + std::to_string(end) + "," +
                  std::to_string(end + bytes) + "]}";
        end += bytes;
    };
    for (std::uint32_t layer = 0; layer < LAYERS; layer++)
        add("model.layers." + std::to_string(layer) + ".mlp.weight", LAYER_BYTES);
    add("lm_head.weight", HEAD_BYTES);
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    image.resize(8);
    for (std::size_t i = 0; i < 8; i++)
        image[i] = static_cast<char>((std::uint64_t{header.size()} >> (8 * i)) & 255);
    image.insert(image.end(), header.begin(), header.end());
    for (std::uint64_t i = 0; i < end; i++) image.push_back(static_cast<char>(i * 31 % 251));
    const std::string path = folder + "/model.safetensors";
    std::ofstream(path, std::ios::binary).write(image.data(), std::streamsize(image.size()));
    return path;
}

kvt::stream_opts half_memory() {
    kvt::stream_opts opts;
    opts.terms.host_reserve_bytes = opts.terms.kv_bytes = 0;
    opts.terms.host_ceiling_bytes = 5 * 73728 + 24576;
    return opts;
}

bool same(const kvt::model &model, const kvt::unit_lease &lease, const std::vector<char> &image) {
    for (const kvt_part_t &part : model.unit_parts(lease.unit())) {
        const kvt_tensor_t tensor = model.tensor(part.tensor);
        const auto bytes = lease.part(part);
        if (std::memcmp(bytes.data(), image.data() + tensor.offset + part.from, bytes.size()) != 0)
            return false;
    }
    return true;
}

void model_lists_units_and_plans(const kvt::model &model, std::size_t image_bytes) {
    const kvt_model_info_t info = model.info();
    CHECK(info.units == LAYERS + 1 && info.tensors == LAYERS + 1);
    CHECK(model.file(0).bytes == image_bytes);
    const std::uint32_t tensor = model.find_tensor("model.layers.3.mlp.weight");
    const auto parts = model.tensor_parts(tensor);
    CHECK(parts.size() == 1 && parts[0].unit == model.find_unit(3));
    CHECK(std::string(model.unit(parts[0].unit).name, 7) == "layer 3");
    CHECK_THROWS(model.find_tensor("nothing"), KVT_E_NOT_FOUND);
    CHECK_THROWS(model.find_unit(0, 0), KVT_E_NOT_FOUND);

    kvt::stream_opts opts = half_memory();
    const kvt::stream_plan plan = model.plan(opts.terms);
    CHECK(plan.residency.size() == info.units && plan.totals.file_units > 0);
    CHECK(model.plan_describe(opts.terms).find("host") != std::string::npos);
    CHECK(model.plan_describe(opts.terms, {}, KVT_PLAN_JSON).front() == '{');
    const kvt_forecast_t slow = model.forecast(opts.terms, "disk=1");
    const kvt_forecast_t fast = model.forecast(opts.terms, "disk=2");
    CHECK(fast.pass_ns < slow.pass_ns);
    opts.terms.host_ceiling_bytes = 10000;
    CHECK_THROWS(model.plan(opts.terms), KVT_E_BUDGET);
}

void passes_lease_every_unit(const kvt::runtime &runtime, const kvt::model &model,
                             const std::vector<char> &image) {
    kvt::streamer streamer = kvt::streamer::open(runtime, model, half_memory());
    streamer.wait_resident();
    CHECK(streamer.progress().missing == 0);
    for (int pass = 0; pass < 3; pass++) {
        streamer.pass_begin();
        for (std::uint32_t unit = 0; unit <= LAYERS; unit++)
            CHECK(same(model, streamer.acquire(unit), image));
        streamer.pass_end();
    }
    CHECK(streamer.stats().passes == 3 && streamer.stats().acquires == 3 * (LAYERS + 1));
    CHECK(streamer.layers().empty() && streamer.marks().empty());
    CHECK(!streamer.describe_io().empty() && !streamer.plan_describe().empty());
    const kvt::stream_plan plan = streamer.plan();
    CHECK(plan.residency.size() == LAYERS + 1);

    kvt::unit_lease one = streamer.acquire(1);
    kvt::unit_lease other = std::move(one);
    CHECK(!one && other && same(model, other, image));
    CHECK_THROWS(streamer.close(), KVT_E_BUSY);
    other.release();
    CHECK(!other);
    one = streamer.try_acquire(0);
    while (!one) one = streamer.try_acquire(0);
    CHECK(same(model, one, image));
    one = kvt::unit_lease();
    CHECK_THROWS(streamer.acquire(LAYERS + 1), KVT_E_INVALID);
    CHECK_THROWS(streamer.unit_address(0), KVT_E_STATE);
    const std::vector<std::uint32_t> next = {1, 2};
    streamer.hint(next);

    kvt::stream_limits limits;
    limits.host_bytes = 4 * 73728 + 24576;
    CHECK(streamer.rebalance(limits).host_units < plan.totals.host_units);
    CHECK(same(model, streamer.acquire(2), image));
    const std::uint64_t sum = streamer.verify(2);
    CHECK(streamer.checksum(2) == sum);
    streamer.close();
    CHECK(!streamer);
}

void units_in_place_have_fixed_addresses(const kvt::runtime &runtime, const kvt::model &model,
                                         const std::vector<char> &image) {
    kvt::stream_opts opts = half_memory();
    opts.in_place = true;
    opts.order = std::vector<std::uint32_t>{5, 4, 3, 2, 1, 0};
    const kvt::streamer streamer = kvt::streamer::open(runtime, model, opts);
    for (std::uint32_t unit = LAYERS; unit-- > 0;) {
        const kvt::unit_lease lease = streamer.acquire(unit, kvt::deadline::in(HANG_GUARD));
        CHECK(lease.data() == streamer.unit_address(unit) && same(model, lease, image));
    }
}

void rebalance_reduces_resident_units(const kvt::runtime &runtime, const kvt::model &model,
                                      const std::vector<char> &image) {
    kvt::stream_opts opts = half_memory();
    opts.terms.host_ceiling_bytes = 4 * image.size();
    opts.terms.shrinks = true;
    const kvt::streamer streamer = kvt::streamer::open(runtime, model, opts);
    kvt::stream_limits limits;
    limits.host_bytes = half_memory().terms.host_ceiling_bytes;
    CHECK(model.plan(opts.terms).totals.slots == 2);
    CHECK(streamer.rebalance(limits).host_units < LAYERS);
    for (std::uint32_t unit = 0; unit < LAYERS; unit++)
        CHECK(same(model, streamer.acquire(unit), image));
}

void model_of_a_table_has_the_named_units(const kvt::runtime &runtime, const std::string &path,
                                          const std::vector<char> &image) {
    std::vector<kvt::unit_entry> units(1);
    units[0].name = "two ranges";
    units[0].ranges = {kvt_file_range_t{0, 0, 5000, 9000}, kvt_file_range_t{0, 0, 100, 7}};
    const std::vector<std::string> paths = {path};
    const kvt::model model = kvt::model::table(paths, units);
    const kvt::streamer streamer = kvt::streamer::open(runtime, model);
    CHECK(same(model, streamer.acquire(0), image));
    units[0].ranges[0].offset = image.size();
    CHECK_THROWS(kvt::model::table(paths, units), KVT_E_INVALID);
}

}  // namespace

int main() {
    static_assert(!std::is_copy_constructible<kvt::unit_lease>::value, "only one object releases");
    char folder[] = "/tmp/kvt-stream-cpp-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    std::vector<char> image;
    const std::string path = write_model(folder, image);
    {
        kvt::runtime runtime = kvt::runtime::open();
        kvt::model model = kvt::model::open(path);
        model_lists_units_and_plans(model, image.size());
        passes_lease_every_unit(runtime, model, image);
        units_in_place_have_fixed_addresses(runtime, model, image);
        rebalance_reduces_resident_units(runtime, model, image);
        model_of_a_table_has_the_named_units(runtime, path, image);
        CHECK_THROWS(kvt::model::open(path + ".none"), KVT_E_NOT_FOUND);
        model.close();
        CHECK_THROWS(kvt::streamer::open(runtime, model), KVT_E_HANDLE);
        CHECK(runtime.close().streamers == 0);
    }
    CHECK(std::remove(path.c_str()) == 0 && rmdir(folder) == 0);
    return done();
}

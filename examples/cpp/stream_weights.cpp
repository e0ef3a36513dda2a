// stream_weights: a model that is larger than the memory for its weights, in C++17.
//
//   stream_weights [MIB OF MEMORY [DIRECTORY]]     default: 6 MiB, for a model of 16 MiB
//
// Writes a safetensors file, opens it as a model, and runs passes over its units as an engine does.
// kvt::unit_lease is the lease of a unit: its destructor gives the memory back. The checksum of every
// tensor is compared.
#include <kvtier/kvtier.hpp>

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr double mib = 1 << 20;
constexpr int layers = 12, passes = 3;

struct tensor {
    std::string name;
    std::uint64_t bytes;
    std::uint64_t checksum = 0;
};

std::vector<tensor> tensors_of_model() {
    std::vector<tensor> all{{"model.embed_tokens.weight", 2 << 20}};
    for (int layer = 0; layer < layers; layer++) {
        const std::string prefix = "model.layers." + std::to_string(layer);
        all.push_back({prefix + ".input_layernorm.weight", 4096});
        all.push_back({prefix + ".mlp.up_proj.weight", 1 << 20});
    }
    all.push_back({"model.norm.weight", 4096});
    all.push_back({"lm_head.weight", 2 << 20});
    return all;
}

// safetensors: 8 bytes with the length of the header, the header in JSON, the tensors.
std::vector<tensor> write_model(const std::filesystem::path &path) {
    std::vector<tensor> all = tensors_of_model();
    std::string header;
    std::uint64_t end = 0;
    for (const tensor &one : all) {
        header += (end > 0 ? "," : "{") + ("\"" + one.name) + "\":{\"dtype\":\"F16\",\"shape\":[" +
                  std::to_string(one.bytes / 2) + "],\"data_offsets\":[" + std::to_string(end) + "," +
                  std::to_string(end + one.bytes) + "]}";
        end += one.bytes;
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    std::ofstream file(path, std::ios::binary);
    for (int i = 0; i < 8; i++) file.put(static_cast<char>(header.size() >> 8 * i));
    file << header;
    std::uint64_t number = 0;
    for (tensor &one : all) {
        std::vector<std::byte> data(one.bytes);
        for (std::size_t i = 0; i < data.size(); i++)
            data[i] = static_cast<std::byte>((i * 2654435761u >> 11) + number * 77);
        one.checksum = kvt::checksum(data);
        file.write(reinterpret_cast<const char *>(data.data()), static_cast<std::streamsize>(data.size()));
        number++;
    }
    file.close();
    if (!file) throw std::runtime_error("cannot write " + path.string());
    return all;
}

void run(const std::filesystem::path &directory, std::uint64_t memory_bytes) {
    const std::filesystem::path path = directory / "model.safetensors";
    const std::vector<tensor> written = write_model(path);
    const kvt::runtime runtime = kvt::runtime::open();
    const kvt::model model = kvt::model::open(path.string()); // reads the header
    const kvt_model_info_t info = model.info();
    std::vector<std::vector<kvt_part_t>> parts; // of each unit, by offset in the unit
    for (std::uint32_t unit = 0; unit < info.units; unit++) parts.push_back(model.unit_parts(unit));

    kvt::stream_opts opts;
    opts.terms.host_ceiling_bytes = memory_bytes;
    opts.terms.host_reserve_bytes = opts.terms.kv_bytes = 0; // set, so 0 is a value and not the default
    const kvt::streamer streamer = kvt::streamer::open(runtime, model, opts);
    const kvt_stream_plan_t plan = streamer.plan().totals;
    std::printf("model: %u units, %.1f MiB. memory: %.1f MiB. ", info.units, info.bytes / mib, memory_bytes / mib);
    std::printf("resident: %u units, the others share %u slots of %.1f MiB\n", plan.host_units, plan.slots,
                plan.slot_bytes / mib);
    if (plan.host_bytes > memory_bytes) throw std::runtime_error("the plan takes too much memory");

    for (int pass = 1; pass <= passes; pass++) {
        const std::uint64_t before = streamer.stats().read_bytes;
        streamer.pass_begin();
        for (std::uint32_t unit = 0; unit < info.units; unit++) { // units have the order of a pass
            const kvt::unit_lease lease = streamer.acquire(unit); // waits until the unit is loaded
            for (const kvt_part_t &part : parts[unit]) // an engine multiplies; tensors have the order of the file
                if (kvt::checksum(lease.part(part)) != written[part.tensor].checksum)
                    throw std::runtime_error(written[part.tensor].name + " is wrong");
        } // released here
        streamer.pass_end(); // begins to read for the next pass
        std::printf("pass %d: every tensor is right; %.1f MiB read from the file during the pass\n", pass,
                    (streamer.stats().read_bytes - before) / mib);
    }
}

} // namespace

int main(int argc, char **argv) try {
    const std::uint64_t memory_bytes = std::stoull(argc > 1 ? argv[1] : "6") << 20;
    if (argc > 2) return run(argv[2], memory_bytes), 0;
    char made[] = "/tmp/kvtier-example-XXXXXX";
    if (mkdtemp(made) == nullptr) throw std::runtime_error("cannot make a directory in /tmp");
    const auto remove = [](char *path) { std::filesystem::remove_all(path); };
    const std::unique_ptr<char, decltype(remove)> directory(made, remove);
    run(directory.get(), memory_bytes);
    return 0;
} catch (const std::exception &error) { // kvt::exception has the library's message
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}

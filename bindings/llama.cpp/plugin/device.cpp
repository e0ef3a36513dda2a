// The device KVTIER, and the entry point by which the engine finds it.
#include "inner_device.h"
#include "memory.h"
#include "plugin.h"
#include "stats.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#ifndef KVTIER_PLUGIN_API_VERSION
#define KVTIER_PLUGIN_API_VERSION GGML_BACKEND_API_VERSION
#endif

namespace kvtier_plugin {

namespace {

// Backends that keep tensors as files have them.
constexpr const char * PLAIN_KINDS[] = {"CUDA", "ROCm", "MUSA", "Vulkan"};

Settings the_settings;
ggml_backend_dev_t the_inner = nullptr;

ggml_backend_device & device();

const char * device_name(ggml_backend_dev_t) {
    return "KVTIER";
}

const char * device_description(ggml_backend_dev_t) {
    return inner_has_memory() ? "kvtier: weights and KV in a budget, computed by another device"
                    : "kvtier: weights and KV in a budget, computed by the CPU";
}

// The budget and its free part, at least 1 MiB: engines divide by these numbers.
void device_memory(ggml_backend_dev_t, size_t * free_bytes, size_t * total_bytes) {
    constexpr uint64_t MIN_BYTES = 1 << 20;
    uint64_t total = MIN_BYTES, left = MIN_BYTES;
    try {
        std::string why;
        if (const Memory * memory = Memory::get(why)) {
            const kvt_tier_report_t now = memory->report();
            total = std::max(total, now.limit_bytes);
            left = std::max(left, now.free_bytes);
        } else {
            log_line(why);
        }
    } catch (...) {
        // Report the minimum.
    }
    *free_bytes = size_t(left);
    *total_bytes = size_t(total);
}

// Engines give layers and KV only to devices that call themselves a GPU.
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void device_props(ggml_backend_dev_t which, ggml_backend_dev_props * out) {
    std::memset(out, 0, sizeof *out);
    if (inner_has_memory()) {
        // Engines that use all devices use only one of several equal ones, so this one takes the inner
        // device's id.
        ggml_backend_dev_props inner;
        ggml_backend_dev_get_props(the_inner, &inner);
        out->device_id = inner.device_id;
    }
    out->name = device_name(which);
    out->description = device_description(which);
    device_memory(which, &out->memory_free, &out->memory_total);
    out->type = device_type(which);
    // Weights are best passed as a map of the file: nothing of it is read.
    out->caps.mmap_support = true;
}

ggml_backend_t device_open(ggml_backend_dev_t which, const char *) {
    try {
        return backend_open(which);
    } catch (...) {
        return nullptr;
    }
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
    return buffer_type();
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(the_inner, op);
}

// Only the plugin's own buffers, which include KV buffers of an inner device with its own memory. Host
// memory could be read too. But an engine gives work to the first device that can read its operands,
// and would give this one the layers that the CPU is to compute.
bool device_supports_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return type == buffer_type() || (inner_has_memory() && type == inner_buffer_type());
}

const char * registry_name(ggml_backend_reg_t) {
    return "KVTIER";
}

size_t registry_count(ggml_backend_reg_t) {
    return 1;
}

ggml_backend_dev_t registry_device(ggml_backend_reg_t, size_t) {
    return &device();
}

void * registry_proc(ggml_backend_reg_t, const char * name) {
    try {
        return backend_proc(name);
    } catch (...) {
        return nullptr;
    }
}

ggml_backend_reg & registry() {
    static ggml_backend_reg made = [] {
        ggml_backend_reg one = {};
        one.api_version = KVTIER_PLUGIN_API_VERSION;
        one.iface.get_name = registry_name;
        one.iface.get_device_count = registry_count;
        one.iface.get_device = registry_device;
        one.iface.get_proc_address = registry_proc;
        return one;
    }();
    return made;
}

ggml_backend_device & device() {
    static ggml_backend_device made = [] {
        ggml_backend_device one = {};
        one.iface.get_name = device_name;
        one.iface.get_description = device_description;
        one.iface.get_memory = device_memory;
        one.iface.get_type = device_type;
        one.iface.get_props = device_props;
        one.iface.init_backend = device_open;
        one.iface.get_buffer_type = device_buffer_type;
        one.iface.supports_op = device_supports_op;
        one.iface.supports_buft = device_supports_type;
        one.reg = &registry();
        return one;
    }();
    return made;
}

// Finds the device that computes: the CPU, or a device with its own memory.
bool find_inner(std::string & why) {
    std::string name = the_settings.inner;
    const bool is_trusted = !name.empty() && name.back() == '!';
    name.resize(name.size() - size_t(is_trusted));
    ggml_backend_dev_t found = ggml_backend_dev_by_name(name.c_str());
    if (!found) {
        why = "KVTIER_UNDER=" + the_settings.inner +
              " is not a device of this engine: name one that it lists";
        return false;
    }
    const auto type = ggml_backend_dev_type(found);
    const bool is_cpu = type == GGML_BACKEND_DEVICE_TYPE_CPU;
    const bool has_memory = type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
    if (!is_cpu && (!has_memory || ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(found)))) {
        why = "KVTIER_UNDER=" + the_settings.inner +
              " is neither the CPU nor a device with memory of its own";
        return false;
    }
    // Some backends store tensors in a form of their own, where a file's bytes would be wrong numbers.
    const std::string kind = ggml_backend_reg_name(ggml_backend_dev_backend_reg(found));
    const auto is_kind = [&](const char * one) { return kind == one; };
    if (!is_cpu && !is_trusted && std::none_of(std::begin(PLAIN_KINDS), std::end(PLAIN_KINDS), is_kind)) {
        why = "KVTIER_UNDER=" + the_settings.inner + ": kvtier does not know whether " + kind +
              " keeps weights as files have them; if it does, set KVTIER_UNDER=" + name + "!";
        return false;
    }
    the_inner = found;
    return true;
}

bool is_same_engine(std::string & why) {
    if (std::strcmp(ggml_version(), KVTIER_GGML_VERSION) != 0) {
        why = std::string("ggml ") + ggml_version() + " is loaded, but this plugin was compiled against " +
              KVTIER_GGML_VERSION + ": compile it against the headers of the loaded engine";
        return false;
    }
    if (kvt_abi_check(KVT_HEADER_VERSION, nullptr) != KVT_OK) {
        why = std::string("libkvtier ") + kvt_version_str() +
              " is loaded, but this plugin was compiled against another version of its header: compile "
              "it again";
        return false;
    }
    return true;
}

} // namespace

const Settings & settings() {
    return the_settings;
}

ggml_backend_dev_t inner_device() {
    return the_inner;
}

ggml_backend_reg_t load() {
    static const bool is_good = [] {
        std::string why;
        Settings read;
        if (!is_same_engine(why) || !settings_read(read, why)) {
            log_line(why + ". The device KVTIER is not available");
            return false;
        }
        the_settings = read;
        if (!find_inner(why)) {
            log_line(why + ". The device KVTIER is not available");
            return false;
        }
        if (read.has_stats) {
            std::atexit([] { totals().print(); });
        }
        buffer_type()->device = &device();
        return true;
    }();
    return is_good ? &registry() : nullptr;
}

} // namespace kvtier_plugin

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    try {
        return kvtier_plugin::load();
    } catch (...) {
        return nullptr;
    }
}

// The backend plugin: NIXL's interface on objects.hpp.

#include "objects.hpp"
#include "params.hpp"

#include "backend/backend_plugin.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

namespace {

using namespace kvtier_nixl;

constexpr const char *plugin_name = "KVTIER";
constexpr const char *plugin_version = "0.1.0";
/// How long the release of a running request waits for its end.
constexpr std::chrono::seconds release_wait{30};

/// A registered object.
class object_key final : public nixlBackendMD {
public:
    explicit object_key(std::string text) : nixlBackendMD(true), key(std::move(text)) {}
    const std::string key;
};

/// NIXL's object plugin takes the number of a descriptor without a text as its key, too.
std::string key_of(const nixlBlobDesc &object) {
    return object.metaInfo.empty() ? std::to_string(object.devId) : object.metaInfo;
}

/// A request: batches of objects of equal size.
class request final : public nixlBackendReqH {
public:
    std::vector<batch> batches;
    bool is_write = false;
    std::size_t count = 0;
    bool release_failed = false;
    nixl_status_t status = NIXL_ERR_NOT_POSTED;

    bool advance() {
        bool ended = true;
        for (batch &one : batches) ended = one.advance() && ended;
        return ended;
    }
    /// The result of a request that has ended.
    nixl_status_t result() const {
        std::size_t failed = 0;
        const batch *worst = nullptr;
        for (const batch &one : batches) {
            if (one.status() == KVT_OK) continue;
            failed += one.failed();
            if (worst == nullptr || worst->status() == KVT_E_NOT_FOUND) worst = &one;
        }
        if (worst == nullptr) return NIXL_SUCCESS;
        NIXL_ERROR << "a " << (is_write ? "WRITE" : "READ") << " of " << count << " objects failed for "
                   << std::min(failed, count) << ": " << worst->message();
        return worst->status() == KVT_E_NOT_FOUND ? NIXL_ERR_NOT_FOUND : NIXL_ERR_BACKEND;
    }
};

/// Runs a call of the interface, which must not throw.
template <class Call> nixl_status_t guarded(const char *name, Call call) noexcept {
    try {
        return call();
    } catch (const std::invalid_argument &error) {
        NIXL_ERROR << name << ": " << error.what();
        return NIXL_ERR_INVALID_PARAM;
    } catch (const std::exception &error) {
        NIXL_ERROR << name << ": " << error.what();
        return NIXL_ERR_BACKEND;
    } catch (...) {
        NIXL_ERROR << name << ": an exception of an unknown type";
        return NIXL_ERR_BACKEND;
    }
}

[[noreturn]] void reject(const std::string &text) { throw std::invalid_argument(text); }

/// Checks one descriptor of a transfer, and returns its object.
const object_key &checked(const nixlMetaDesc &local, const nixlMetaDesc &remote) {
    const auto *object = static_cast<const object_key *>(remote.metadataP);
    if (object == nullptr)
        reject("an object of the transfer is not registered: call register_memory(..., \"OBJ\") first");
    if (local.len != remote.len || local.len == 0)
        reject("object \"" + object->key + "\" has " + std::to_string(remote.len) +
               " bytes, its memory " + std::to_string(local.len) + ": give the same number, at least 1");
    if (remote.addr != 0)
        reject("object \"" + object->key + "\" is used at offset " + std::to_string(remote.addr) +
               ": objects are transferred whole, from offset 0");
    return *object;
}

class engine final : public nixlBackendEngine {
public:
    explicit engine(const nixlBackendInitParams *init)
        : nixlBackendEngine(init),
          objects_(std::make_shared<objects>(
              read_params(*init->customParams, init->type == "OBJ"))) {}

    bool supportsRemote() const override { return false; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return false; }
    nixl_mem_list_t getSupportedMems() const override { return {OBJ_SEG, DRAM_SEG}; }

    nixl_status_t registerMem(const nixlBlobDesc &memory, const nixl_mem_t &kind,
                              nixlBackendMD *&out) override {
        return guarded("registerMem", [&] {
            if (kind != OBJ_SEG && kind != DRAM_SEG) return NIXL_ERR_NOT_SUPPORTED;
            out = kind == OBJ_SEG ? new object_key(key_of(memory)) : nullptr;
            return NIXL_SUCCESS;
        });
    }
    nixl_status_t deregisterMem(nixlBackendMD *object) override {
        delete object;
        return NIXL_SUCCESS;
    }
    nixl_status_t connect(const std::string &) override { return NIXL_SUCCESS; }
    nixl_status_t disconnect(const std::string &) override { return NIXL_SUCCESS; }
    nixl_status_t unloadMD(nixlBackendMD *) override { return NIXL_SUCCESS; }
    nixl_status_t loadLocalMD(nixlBackendMD *input, nixlBackendMD *&output) override {
        output = input;
        return NIXL_SUCCESS;
    }

    nixl_status_t queryMem(const nixl_reg_dlist_t &asked,
                           std::vector<nixl_query_resp_t> &answers) const override {
        return guarded("queryMem", [&] {
            std::vector<std::string> keys;
            for (const nixlBlobDesc &object : asked) keys.push_back(key_of(object));
            answers.assign(keys.size(), std::nullopt);
            const std::vector<std::uint64_t> sizes =
                keys.empty() ? std::vector<std::uint64_t>() : objects_->sizes(keys);
            for (std::size_t at = 0; at < sizes.size(); at++)
                if (sizes[at] != 0) answers[at] = nixl_b_params_t{{"size", std::to_string(sizes[at])}};
            return NIXL_SUCCESS;
        });
    }

    nixl_status_t prepXfer(const nixl_xfer_op_t &operation, const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote, const std::string &peer,
                           nixlBackendReqH *&handle, const nixl_opt_b_args_t *) const override {
        return guarded("prepXfer", [&] {
            if (peer != localAgent)
                reject("the objects belong to agent \"" + peer + "\": give this agent's name, \"" +
                       localAgent + "\"");
            if (local.getType() != DRAM_SEG || remote.getType() != OBJ_SEG)
                reject("transfers are between host memory (DRAM) and objects (OBJ) only");
            if (local.descCount() != remote.descCount() || local.descCount() == 0)
                reject(std::to_string(local.descCount()) + " pieces of memory for " +
                       std::to_string(remote.descCount()) + " objects: give as many, at least 1");
            auto made = std::make_unique<request>();
            fill(*made, operation == NIXL_WRITE, local, remote);
            handle = made.release();
            return NIXL_SUCCESS;
        });
    }

    nixl_status_t postXfer(const nixl_xfer_op_t &, const nixl_meta_dlist_t &, const nixl_meta_dlist_t &,
                           const std::string &, nixlBackendReqH *&handle,
                           const nixl_opt_b_args_t *options) const override {
        return guarded("postXfer", [&] {
            auto &of = static_cast<request &>(*handle);
            if (options != nullptr && options->hasNotif)
                reject("the backend has no notifications: leave the message out");
            if (of.status == NIXL_IN_PROG) return NIXL_ERR_REPOST_ACTIVE;
            of.status = NIXL_IN_PROG;
            for (batch &one : of.batches) one.start();
            // A failure is left to checkXfer, as by plugins that cannot fail here: engines rely on that.
            return check(of) == NIXL_SUCCESS ? NIXL_SUCCESS : NIXL_IN_PROG;
        });
    }

    nixl_status_t checkXfer(nixlBackendReqH *handle) const override {
        return guarded("checkXfer", [&] { return check(static_cast<request &>(*handle)); });
    }

    /// Frees a request. A running request is cancelled, and freed when no transfer uses its memory. NIXL
    /// drops a request with the second release, whatever the status, so that one waits without a limit.
    nixl_status_t releaseReqH(nixlBackendReqH *handle) const override {
        return guarded("releaseReqH", [&] {
            auto *of = static_cast<request *>(handle);
            if (of->status == NIXL_IN_PROG && !of->release_failed) {
                of->release_failed = true;
                for (batch &one : of->batches) one.cancel();
                const auto end = std::chrono::steady_clock::now() + release_wait;
                while (!of->advance()) {
                    if (std::chrono::steady_clock::now() >= end) {
                        NIXL_ERROR << "a cancelled transfer still uses its memory after 30 s";
                        return NIXL_ERR_REPOST_ACTIVE;
                    }
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
            }
            delete of; // waits for running ops
            return NIXL_SUCCESS;
        });
    }

private:
    static nixl_status_t check(request &of) {
        if (of.status == NIXL_IN_PROG && of.advance()) of.status = of.result();
        return of.status;
    }

    /// Sorts the objects of a transfer into batches of equal size. A write also writes heads.
    void fill(request &to, bool is_write, const nixl_meta_dlist_t &local,
              const nixl_meta_dlist_t &remote) const {
        to.is_write = is_write;
        to.count = static_cast<std::size_t>(local.descCount());
        std::map<std::pair<bool, std::uint64_t>, std::size_t> last;
        const auto batch_of = [&](bool is_head, std::uint64_t bytes) -> batch & {
            const auto [at, is_new] = last.try_emplace({is_head, bytes}, to.batches.size());
            if (is_new || to.batches[at->second].count() == max_names) {
                at->second = to.batches.size();
                to.batches.emplace_back(objects_, is_head ? objects_->heads() : objects_->of(bytes),
                                        is_write);
            }
            return to.batches[at->second];
        };
        for (std::size_t at = 0; at < to.count; at++) {
            const object_key &object = checked(local[at], remote[at]);
            batch_of(false, local[at].len).add(object.key, reinterpret_cast<void *>(local[at].addr));
            if (is_write) batch_of(true, head_bytes).add_head(object.key, local[at].len);
        }
    }

    std::shared_ptr<objects> objects_;
};

}  // namespace

extern "C" NIXL_PLUGIN_EXPORT nixlBackendPlugin *nixl_plugin_init() {
    return nixlBackendPluginCreator<engine>::create(NIXL_PLUGIN_API_VERSION, plugin_name, plugin_version,
                                                    default_params(), {OBJ_SEG, DRAM_SEG});
}

extern "C" NIXL_PLUGIN_EXPORT void nixl_plugin_fini() {}

#include "objects.hpp"

#include <cstdlib>
#include <stdexcept>

namespace kvtier_nixl {

namespace {

/// Most directories that `{slot}` tries.
constexpr int max_slots = 64;

/// The credentials of the remote, from the environment.
std::vector<kvt_secret_t> secrets() {
    static constexpr std::array<std::array<const char *, 2>, 5> known = {{
        {"password", "KVTIER_REMOTE_PASSWORD"},
        {"s3.key", "KVTIER_REMOTE_S3_KEY"},
        {"s3.secret", "KVTIER_REMOTE_S3_SECRET"},
        {"s3.token", "KVTIER_REMOTE_S3_TOKEN"},
        {"seal", "KVTIER_REMOTE_SEAL"},
    }};
    std::vector<kvt_secret_t> out;
    for (const auto &[name, variable] : known)
        if (const char *value = std::getenv(variable)) out.push_back(kvt::secret(name, value));
    return out;
}

std::string with_slot(const std::string &spec, int slot) {
    const std::string mark = "{slot}";
    std::string out;
    for (std::size_t at = 0, end = 0; end != std::string::npos; at = end + mark.size()) {
        end = spec.find(mark, at);
        out += spec.substr(at, end - at);
        if (end != std::string::npos) out += std::to_string(slot);
    }
    return out;
}

std::vector<std::uint64_t> split(std::uint64_t bytes) {
    if (bytes == 0 || bytes > max_object_bytes)
        throw std::invalid_argument("an object of " + std::to_string(bytes) +
                                    " bytes cannot be stored: give 1 byte to 16 GiB");
    const std::uint64_t count = (bytes + part_bytes - 1) / part_bytes;
    const std::uint64_t each = (bytes + count - 1) / count;
    std::vector<std::uint64_t> parts(count, each);
    parts.back() = bytes - each * (count - 1);
    return parts;
}

kvt::layout layout_of(const std::vector<std::uint64_t> &parts) {
    kvt::layout layout;
    layout.chunk_tokens = 1;
    for (std::size_t at = 0; at < parts.size(); at++) {
        if (at == 0 || parts[at] != parts[at - 1]) {
            layout.groups.emplace_back();
            layout.groups.back().k_bytes = parts[at];
        }
        layout.groups.back().layers.push_back(static_cast<std::uint16_t>(at));
    }
    return layout;
}

/// The tensors of a transfer: one view per part, with the address of each object.
std::vector<kvt_view_t> views(const sized &where, std::vector<void *> &pages) {
    std::vector<kvt_view_t> out;
    std::int64_t shift = 0;
    for (const std::uint64_t bytes : where.parts) {
        kvt_view_t view = kvt_view_t();
        view.pages = pages.data();
        view.page_count = pages.size();
        view.page_tokens = 1;
        view.run_bytes = bytes;
        view.shift_bytes = shift;
        view.memory = KVT_MEMORY_HOST;
        out.push_back(view);
        shift += static_cast<std::int64_t>(bytes);
    }
    return out;
}

/// The size in a head; 0, as of a missing object, for a size that no object has.
std::uint64_t decode(const std::array<std::uint8_t, head_bytes> &head) {
    std::uint64_t value = 0;
    for (std::size_t at = head_bytes; at-- > 0;) value = value << 8 | head[at];
    return value <= max_object_bytes ? value : 0;
}

}  // namespace

void names::add(const std::string &key) {
    bytes.insert(bytes.end(), key.begin(), key.end());
    ends.push_back(bytes.size());
}

/// Opens the store. `{slot}` in the spec is the number of the first directory that is free.
shared_store::shared_store(const std::string &spec) {
    kvt::check_abi();
    kvt::runtime_opts named;
    named.name = "kvt-nixl";
    runtime = kvt::runtime::open(named);
    const std::vector<kvt_secret_t> credentials = secrets();
    for (int slot = 0;; slot++) {
        const std::string text = with_slot(spec, slot);
        kvt::store_opts opts;
        opts.spec = text;
        opts.secrets = credentials;
        try {
            store = kvt::store::open(runtime, opts);
            return;
        } catch (const kvt::exception &error) {
            if (error.status() != KVT_E_BUSY) throw;
            if (text == spec)
                throw std::invalid_argument(std::string(error.message()) +
                                            " (several processes need {slot} in the path of the disk)");
            if (slot + 1 == max_slots) throw;
        }
    }
}

std::shared_ptr<shared_store> shared_store::open(const std::string &spec) {
    static std::mutex lock;
    static std::map<std::string, std::weak_ptr<shared_store>> opened;
    const std::lock_guard<std::mutex> guard(lock);
    auto &slot = opened[spec];
    std::shared_ptr<shared_store> found = slot.lock();
    if (!found) slot = found = std::make_shared<shared_store>(spec);
    return found;
}

objects::objects(const params &given) : params_(given), shared_(shared_store::open(given.spec)) {
    choose_level();
}

/// The level of writes: as given, else that of the farthest tier.
void objects::choose_level() {
    const kvt_store_stats_t stats = shared_->store.stats();
    const kvt_remote_stats_t remote = shared_->store.remote_stats();
    has_remote_ = remote.read_circuit != 0;
    const bool has_disk = stats.disk_limit_bytes != 0, writes_remote = remote.write_circuit != 0;
    const std::string &level = params_.level;
    if ((level == "disk" || level == "durable") && !has_disk)
        throw std::invalid_argument("level=\"" + level + "\" needs a store with a disk: add disk=disk(...) "
                                    "to the spec");
    if (level == "remote" && !writes_remote)
        throw std::invalid_argument("level=\"remote\" needs a store that writes to a remote: add "
                                    "remote=... to the spec");
    if (level == "ram") level_ = KVT_LEVEL_RAM;
    else if (level == "durable") level_ = KVT_LEVEL_DURABLE;
    else if (level == "disk") level_ = KVT_LEVEL_DISK;
    else if (level == "remote" || writes_remote) level_ = KVT_LEVEL_REMOTE;
    else level_ = has_disk ? KVT_LEVEL_DISK : KVT_LEVEL_RAM;
}

std::shared_ptr<sized> objects::open(std::uint64_t bytes, bool is_head) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = by_size_.find({is_head, bytes});
    if (found != by_size_.end()) {
        found->second->used = ++uses_;
        return found->second;
    }
    auto made = std::make_shared<sized>();
    made->parts = split(bytes);
    if (by_size_.size() >= max_sizes) (void)close_one();
    kvt::identity identity;
    identity.model = is_head ? "nixl head" : "nixl";
    if (!params_.weights.empty()) identity.weights = params_.weights;
    if (!params_.bucket.empty()) identity.salt = params_.bucket;
    while (!made->space) {
        try {
            made->space =
                shared_->store.open_namespace(identity, layout_of(made->parts), KVT_NAMESPACE_HOLES);
        } catch (const kvt::exception &error) {
            if (error.status() != KVT_E_LIMIT || !close_one()) throw;
        }
    }
    made->session = made->space.open_session();
    made->used = ++uses_;
    by_size_[{is_head, bytes}] = made;
    return made;
}

std::shared_ptr<sized> objects::open_if_room(std::uint64_t bytes, bool is_head) {
    try {
        return open(bytes, is_head);
    } catch (const kvt::exception &error) {
        if (error.status() != KVT_E_LIMIT) throw;
        return nullptr;
    }
}

bool objects::close_one() {
    auto oldest = by_size_.end();
    for (auto at = by_size_.begin(); at != by_size_.end(); ++at)
        if (at->second.use_count() == 1 &&
            (oldest == by_size_.end() || at->second->used < oldest->second->used))
            oldest = at;
    if (oldest == by_size_.end()) return false;
    by_size_.erase(oldest);
    return true;
}

kvt::op objects::lookup(const sized &where, const names &which) const {
    kvt::submit_opts opts;
    opts.deadline = kvt::deadline::in(params_.lookup);
    return where.session.remote_lookup_blocks(which.view(), opts);
}

kvt::op objects::put(const sized &where, const names &which, std::vector<void *> &pages) const {
    const std::vector<kvt_view_t> k = views(where, pages);
    kvt::blocks blocks;
    blocks.names = which.view();
    blocks.k = k;
    blocks.level = level_;
    return where.session.put_blocks(blocks);
}

kvt::op objects::get(const sized &where, const names &which, std::vector<void *> &pages) const {
    const std::vector<kvt_view_t> k = views(where, pages);
    kvt::blocks blocks;
    blocks.names = which.view();
    blocks.k = k;
    return where.session.get_blocks(blocks);
}

std::vector<std::uint8_t> objects::find(const sized &where, const names &which) const {
    std::vector<std::uint8_t> found = where.space.blocks_exist(which.view());
    bool missing = false;
    for (const std::uint8_t state : found) missing = missing || state == 0;
    if (!missing || !has_remote_) return found;
    (void)lookup(where, which).wait(); // without an answer in time the objects count as missing
    return where.space.blocks_exist(which.view());
}

/// The sizes that the heads of objects record; 0 for an object without a head.
std::vector<std::uint64_t> objects::head_values(const std::vector<std::string> &keys) {
    const std::shared_ptr<sized> where = open_if_room(head_bytes, true);
    if (!where) return std::vector<std::uint64_t>(keys.size(), 0);
    names all;
    for (const std::string &key : keys) all.add(key);
    const std::vector<std::uint8_t> found = find(*where, all);
    std::vector<std::array<std::uint8_t, head_bytes>> values(keys.size());
    names present;
    std::vector<std::size_t> places;
    std::vector<void *> pages;
    for (std::size_t at = 0; at < keys.size(); at++) {
        values[at].fill(0);
        if (found[at] == 0) continue;
        present.add(keys[at]);
        places.push_back(at);
        pages.push_back(values[at].data());
    }
    std::vector<std::uint64_t> out(keys.size(), 0);
    if (places.empty()) return out;
    const kvt::op op = get(*where, present, pages);
    (void)op.wait();
    std::vector<kvt_op_item_t> items(places.size());
    const std::size_t count = op.items(items);
    for (std::size_t at = 0; at < count; at++)
        if (items[at].status == KVT_OK) out[places[at]] = decode(values[places[at]]);
    return out;
}

std::vector<std::uint64_t> objects::sizes(const std::vector<std::string> &keys) {
    std::vector<std::uint64_t> out = head_values(keys);
    std::map<std::uint64_t, std::vector<std::size_t>> by_size;
    for (std::size_t at = 0; at < keys.size(); at++)
        if (out[at] != 0) by_size[out[at]].push_back(at);
    for (const auto &[bytes, places] : by_size) {
        names which;
        for (const std::size_t at : places) which.add(keys[at]);
        const std::shared_ptr<sized> where = open_if_room(bytes, false);
        const std::vector<std::uint8_t> found =
            where ? find(*where, which) : std::vector<std::uint8_t>(places.size(), 0);
        for (std::size_t at = 0; at < places.size(); at++)
            if (found[at] == 0) out[places[at]] = 0;
    }
    return out;
}

void batch::add_head(const std::string &key, std::uint64_t bytes) {
    heads_.push_back(std::make_unique<std::array<std::uint8_t, head_bytes>>());
    for (std::uint8_t &byte : *heads_.back()) {
        byte = static_cast<std::uint8_t>(bytes);
        bytes >>= 8;
    }
    add(key, heads_.back()->data());
}

void batch::start() {
    status_ = KVT_OK;
    message_.clear();
    failed_ = 0;
    cancelled_ = false;
    op_ = kvt::op();
    step_ = !writes_ && store_->has_remote() ? step::lookup : step::copy;
    (void)advance();
}

bool batch::advance() noexcept {
    if (step_ == step::lookup && !cancelled_) submit();
    if (step_ == step::looking && is_released()) step_ = step::copy; // the answers are hints for the get
    if (cancelled_ && (step_ == step::lookup || step_ == step::copy))
        fail(KVT_E_CANCELLED, "the transfer was cancelled");
    if (step_ == step::copy) submit();
    if (step_ == step::copying && is_released()) take_result();
    return step_ == step::ended;
}

/// Whether the op no longer uses the memory.
bool batch::is_released() const noexcept {
    try {
        return (op_.info().state & KVT_OP_RELEASED) != 0;
    } catch (...) { // the library has no such op
        return true;
    }
}

void batch::submit() noexcept {
    try {
        const bool looks_up = step_ == step::lookup;
        op_ = looks_up  ? store_->lookup(*where_, names_)
              : writes_ ? store_->put(*where_, names_, pages_)
                        : store_->get(*where_, names_, pages_);
        step_ = looks_up ? step::looking : step::copying;
    } catch (const kvt::exception &error) {
        if (error.status() == KVT_E_AGAIN) return; // too many transfers: the next call tries again
        fail(error.status(), error.what());
    } catch (const std::exception &error) {
        fail(KVT_E_NOMEM, error.what());
    } catch (...) {
        fail(KVT_E_PANIC, "an exception of an unknown type");
    }
}

void batch::fail(kvt_status_t status, const char *message) noexcept {
    status_ = status;
    failed_ = names_.count();
    step_ = step::ended;
    try {
        message_ = message;
    } catch (...) { // no memory: the status alone says what happened
        message_.clear();
    }
}

void batch::take_result() noexcept {
    try {
        step_ = step::ended;
        const kvt::error error = op_.error();
        status_ = error.status();
        if (status_ != KVT_OK) {
            message_ = std::string(error.name()) + ": " + error.message();
            std::vector<kvt_op_item_t> items(names_.count());
            const std::size_t count = op_.items(items);
            for (std::size_t at = 0; at < count; at++) failed_ += items[at].status != KVT_OK;
        }
        op_ = kvt::op();
    } catch (...) {
        fail(status_ == KVT_OK ? KVT_E_NOMEM : status_, "the result of the transfer cannot be read");
    }
}

void batch::cancel() {
    cancelled_ = true;
    if (op_) op_.cancel();
}

}  // namespace kvtier_nixl

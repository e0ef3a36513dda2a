/// @file
/// Objects of any size in a kvtier store, by key. Nothing here is NIXL's.
///
/// A block of a namespace has a fixed size, so objects of each size have a namespace. A small object of a
/// fixed size, the head, tells the size of the object of a key to processes that have not seen it.

#ifndef KVTIER_NIXL_OBJECTS_HPP
#define KVTIER_NIXL_OBJECTS_HPP

#include "params.hpp"

#include <kvtier/kvtier.hpp>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvtier_nixl {

/// Bytes of a head: the size of the object, little endian.
constexpr std::size_t head_bytes = 8;
/// Most bytes of a part. A part is one cell of the store, and several fit into a segment.
constexpr std::uint64_t part_bytes = 4 << 20;
/// Most parts of an object, the library's own limit.
constexpr std::uint64_t max_parts = 4096;
/// Most bytes of an object.
constexpr std::uint64_t max_object_bytes = max_parts * part_bytes;
/// Most objects of one op.
constexpr std::size_t max_names = 1024;
/// Most sizes whose namespaces are open, unless running transfers need more. A store has room for 64.
constexpr std::size_t max_sizes = 48;

/// The objects of one size.
struct sized {
    kvt::namespace_ space;
    kvt::session session;
    /// Bytes of each part, in order.
    std::vector<std::uint64_t> parts;
    /// Number of its last use.
    std::uint64_t used = 0;
};

/// The names of some objects.
struct names {
    std::vector<std::uint8_t> bytes;
    std::vector<std::uint64_t> ends;

    void add(const std::string &key);
    std::size_t count() const { return ends.size(); }
    kvt::block_names view() const { return {bytes, 0, ends}; }
};

/// A store. Agents of one process with equal specs share it, because a directory belongs to one store.
struct shared_store {
    explicit shared_store(const std::string &spec);
    static std::shared_ptr<shared_store> open(const std::string &spec);

    kvt::runtime runtime;
    kvt::store store;
};

/// The objects of an agent.
class objects {
public:
    explicit objects(const params &given);

    /// The objects of a size, which may be `head_bytes`: heads are in a namespace of their own.
    std::shared_ptr<sized> of(std::uint64_t bytes) { return open(bytes, false); }
    std::shared_ptr<sized> heads() { return open(head_bytes, true); }
    /// The size of each object; 0 for one that is neither in the store nor at its remote, or whose
    /// size has no namespace because running transfers use all of them.
    std::vector<std::uint64_t> sizes(const std::vector<std::string> &keys);
    /// Starts a lookup at the remote. Its answer need not be read: gets use it.
    kvt::op lookup(const sized &where, const names &which) const;
    kvt::op put(const sized &where, const names &which, std::vector<void *> &pages) const;
    kvt::op get(const sized &where, const names &which, std::vector<void *> &pages) const;
    bool has_remote() const { return has_remote_; }

private:
    std::shared_ptr<sized> open(std::uint64_t bytes, bool is_head);
    /// The same; null if running transfers use all layouts of the store.
    std::shared_ptr<sized> open_if_room(std::uint64_t bytes, bool is_head);
    /// Closes the namespace that was used least recently, of those that nothing uses. False if there
    /// is none.
    bool close_one();
    /// A byte per name, 0 if the object is missing, after a lookup at the remote.
    std::vector<std::uint8_t> find(const sized &where, const names &which) const;
    std::vector<std::uint64_t> head_values(const std::vector<std::string> &keys);
    void choose_level();

    params params_;
    std::shared_ptr<shared_store> shared_;
    kvt_level_t level_ = KVT_LEVEL_RAM;
    bool has_remote_ = false;
    std::mutex lock_;
    std::map<std::pair<bool, std::uint64_t>, std::shared_ptr<sized>> by_size_;
    std::uint64_t uses_ = 0;
};

/// A request for objects of one size, at most `max_names`: a lookup at the remote if need be, then a
/// copy. `advance` never blocks.
class batch {
public:
    batch(std::shared_ptr<objects> store, std::shared_ptr<sized> where, bool writes)
        : store_(std::move(store)), where_(std::move(where)), writes_(writes) {}

    /// Adds an object and its memory.
    void add(const std::string &key, void *memory) {
        names_.add(key);
        pages_.push_back(memory);
    }
    /// Adds the head of an object, whose memory this batch owns.
    void add_head(const std::string &key, std::uint64_t bytes);
    std::size_t count() const { return names_.count(); }
    /// Makes the batch ready to run, again.
    void start();
    /// Does what can be done now. True when the memory of the objects is the caller's again. An exception
    /// ends the batch as failed.
    bool advance() noexcept;
    /// Ends the batch early. `advance` still tells when.
    void cancel();
    /// After the end: KVT_OK, or why it failed.
    kvt_status_t status() const { return status_; }
    const std::string &message() const { return message_; }
    /// After the end: how many of the objects are missing or failed.
    std::size_t failed() const { return failed_; }

private:
    enum class step { lookup, looking, copy, copying, ended };
    bool is_released() const noexcept;
    void submit() noexcept;
    void fail(kvt_status_t status, const char *message) noexcept;
    void take_result() noexcept;

    std::shared_ptr<objects> store_;
    std::shared_ptr<sized> where_;
    bool writes_;
    names names_;
    std::vector<std::unique_ptr<std::array<std::uint8_t, head_bytes>>> heads_;
    std::vector<void *> pages_;
    step step_ = step::ended;
    bool cancelled_ = false;
    kvt::op op_;
    kvt_status_t status_ = KVT_OK;
    std::string message_;
    std::size_t failed_ = 0;
};

}  // namespace kvtier_nixl

#endif

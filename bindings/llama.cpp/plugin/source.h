// The files that have the weights' bytes while they are not in memory: the model's own files, or a file
// that the plugin writes.
#ifndef KVTIER_PLUGIN_SOURCE_H
#define KVTIER_PLUGIN_SOURCE_H

#include <ggml.h>
#include <gguf.h>

#include <cstdint>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <vector>

namespace kvtier_plugin {

// A place in one of the files.
struct Place {
    uint32_t file = 0;
    uint64_t offset = 0;
};

class Source {
public:
    // The files open in the process, and KVTIER_MODEL, that have tensors of these names, types and
    // shapes. Null if there is none.
    static std::unique_ptr<Source> of_open_files(ggml_tensor * const * tensors, int count);
    // A file without a name in this directory; it grows as tensors are placed.
    static std::unique_ptr<Source> of_directory(const std::string & directory, std::string & why);
    ~Source();

    // The place of a tensor; false if no file has it.
    bool place(const ggml_tensor * tensor, Place & out);
    // Accepts bytes from the engine. True if the files have the same bytes from now on.
    bool accept(const Place & place, uint64_t from, const void * data, uint64_t bytes, std::string & why);
    bool read(const Place & place, uint64_t from, void * out, uint64_t bytes) const;

    // Paths of the open files, valid even if their names change.
    std::vector<std::string> paths() const;
    bool is_spill() const { return spills_; }
    // Drops the files' pages from the page cache, as far as nobody maps them: the engine read them while it
    // loaded, and a cgroup counts them as used memory.
    void drop_cache() const;
    // Experts of a layer that a token uses, as the files state; 0 if they do not.
    uint32_t experts_used() const;

private:
    struct File {
        int fd = -1;
        struct stat seen = {};
        gguf_context * header = nullptr;
    };
    // A range of addresses that maps a file.
    struct Map {
        uint64_t begin = 0, end = 0, offset = 0;
        uint32_t file = 0;
    };

    Source() = default;
    void add_if_matching(const std::string & path, ggml_tensor * const * tensors, int count);
    bool is_known(const struct stat & seen) const;
    bool is_map_of(const Place & place, uint64_t from, const void * data, uint64_t bytes);
    bool map_find(uint64_t address, Map & out) const;

    std::vector<File> files_;
    Map map_;
    bool spills_ = false;
    uint64_t spill_bytes_ = 0;
};

} // namespace kvtier_plugin

#endif

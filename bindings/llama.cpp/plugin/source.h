// Where the bytes of weights lie while they are not in memory: in the model's own files, or in a file
// that they are written to.
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
    // Of the files that the process has open (and KVTIER_MODEL) those that have tensors of these
    // names, types and shapes. Null where none has.
    static std::unique_ptr<Source> of_open_files(ggml_tensor * const * tensors, int count);
    // A file without a name in this directory, for as many bytes as are asked for.
    static std::unique_ptr<Source> of_directory(const std::string & directory, std::string & why);
    ~Source();

    // Where a tensor lies; false where none of the files has it.
    bool place(const ggml_tensor * tensor, Place & out);
    // Takes what the engine hands over. True where it is what the files have from now on.
    bool take(const Place & place, uint64_t from, const void * data, uint64_t bytes, std::string & why);
    bool read(const Place & place, uint64_t from, void * out, uint64_t bytes) const;

    // Paths that lead to the very files that are open here, whatever becomes of their names.
    std::vector<std::string> paths() const;
    bool is_spill() const { return spills_; }

private:
    struct File {
        int fd = -1;
        struct stat seen = {};
        gguf_context * header = nullptr;
    };
    // A stretch of addresses that is a map of a file.
    struct Map {
        uint64_t begin = 0, end = 0, offset = 0;
        uint32_t file = 0;
    };

    Source() = default;
    void consider(const std::string & path, ggml_tensor * const * tensors, int count);
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

#include "source.h"

#include "plugin.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace kvtier_plugin {

namespace {

constexpr uint64_t COMPARE_BYTES = 1 << 20;
// More than any loader opens; further files are ignored.
constexpr size_t MAX_FILES = 4096;

bool read_all(int fd, void * out, uint64_t bytes, uint64_t offset) {
    char * at = static_cast<char *>(out);
    while (bytes > 0) {
        const ssize_t got = pread(fd, at, bytes, off_t(offset));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return false;
        }
        at += got;
        offset += uint64_t(got);
        bytes -= uint64_t(got);
    }
    return true;
}

bool write_all(int fd, const void * data, uint64_t bytes, uint64_t offset) {
    const char * at = static_cast<const char *>(data);
    while (bytes > 0) {
        const ssize_t put = pwrite(fd, at, bytes, off_t(offset));
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return false;
        }
        at += put;
        offset += uint64_t(put);
        bytes -= uint64_t(put);
    }
    return true;
}

// Tells whether the header has this tensor; `offset` is from the start of the file.
bool header_has(const gguf_context * header, const ggml_tensor * tensor, uint64_t & offset) {
    const int64_t id = gguf_find_tensor(header, ggml_get_name(tensor));
    if (id < 0 || gguf_get_tensor_type(header, id) != tensor->type ||
        gguf_get_tensor_size(header, id) != ggml_nbytes(tensor)) {
        return false;
    }
    const int64_t * ne = gguf_get_tensor_ne(header, id);
    if (!std::equal(ne, ne + GGML_MAX_DIMS, tensor->ne)) {
        return false;
    }
    offset = gguf_get_data_offset(header) + gguf_get_tensor_offset(header, id);
    return true;
}

std::vector<std::string> open_files() {
    std::vector<std::string> found;
    DIR * directory = opendir("/proc/self/fd");
    if (!directory) {
        return found;
    }
    while (const dirent * entry = readdir(directory)) {
        if (entry->d_name[0] != '.' && found.size() < MAX_FILES) {
            found.push_back(std::string("/proc/self/fd/") + entry->d_name);
        }
    }
    closedir(directory);
    return found;
}

} // namespace

std::unique_ptr<Source> Source::of_open_files(ggml_tensor * const * tensors, int count) {
    std::unique_ptr<Source> source(new Source);
    if (!settings().model.empty()) {
        source->add_if_matching(settings().model, tensors, count);
    }
    for (const std::string & path : open_files()) {
        source->add_if_matching(path, tensors, count);
    }
    return source->files_.empty() ? nullptr : std::move(source);
}

std::unique_ptr<Source> Source::of_directory(const std::string & directory, std::string & why) {
    std::unique_ptr<Source> source(new Source);
    File file;
    file.fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file.fd < 0) {
        why = "cannot create a file in KVTIER_DIR=" + directory + ": " + std::strerror(errno);
        return nullptr;
    }
    source->files_.push_back(file);
    source->spills_ = true;
    return source;
}

Source::~Source() {
    for (File & file : files_) {
        gguf_free(file.header);
        close(file.fd);
    }
}

bool Source::is_known(const struct stat & seen) const {
    return std::any_of(files_.begin(), files_.end(), [&](const File & file) {
        return file.seen.st_dev == seen.st_dev && file.seen.st_ino == seen.st_ino;
    });
}

// Opens the file again: the engine's descriptor may use direct I/O, and will be closed.
void Source::add_if_matching(const std::string & path, ggml_tensor * const * tensors, int count) {
    struct stat seen;
    if (stat(path.c_str(), &seen) != 0 || !S_ISREG(seen.st_mode) || is_known(seen)) {
        return;
    }
    File file;
    file.fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY);
    char magic[4];
    if (file.fd < 0) {
        return;
    }
    if (fstat(file.fd, &file.seen) == 0 && read_all(file.fd, magic, sizeof magic, 0) &&
        std::memcmp(magic, GGUF_MAGIC, sizeof magic) == 0) {
        const std::string again = "/proc/self/fd/" + std::to_string(file.fd);
        file.header = gguf_init_from_file(again.c_str(), {/* no_alloc */ true, /* ctx */ nullptr});
    }
    uint64_t offset = 0;
    const bool fits = file.header && std::any_of(tensors, tensors + count, [&](const ggml_tensor * one) {
                          return header_has(file.header, one, offset);
                      });
    if (fits) {
        files_.push_back(file);
    } else {
        gguf_free(file.header);
        close(file.fd);
    }
}

void Source::drop_cache() const {
    for (const File & file : files_) {
        posix_fadvise(file.fd, 0, 0, POSIX_FADV_DONTNEED);
    }
}

uint32_t Source::experts_used() const {
    constexpr const char * NAME = ".expert_used_count";
    for (const File & file : files_) {
        for (int64_t key = 0; file.header && key < gguf_get_n_kv(file.header); key++) {
            const std::string name = gguf_get_key(file.header, key);
            const size_t length = std::strlen(NAME);
            if (name.size() > length && name.compare(name.size() - length, length, NAME) == 0 &&
                gguf_get_kv_type(file.header, key) == GGUF_TYPE_UINT32) {
                return gguf_get_val_u32(file.header, key);
            }
        }
    }
    return 0;
}

bool Source::place(const ggml_tensor * tensor, Place & out) {
    if (spills_) {
        const uint64_t offset = spill_bytes_;
        const uint64_t end = offset + GGML_PAD(ggml_nbytes(tensor), ALIGNMENT);
        // Extended now, so that a table of the file can be made before the bytes are written.
        if (ftruncate(files_[0].fd, off_t(end)) != 0) {
            return false;
        }
        out = {0, offset};
        spill_bytes_ = end;
        return true;
    }
    for (uint32_t file = 0; file < files_.size(); file++) {
        uint64_t offset = 0;
        if (header_has(files_[file].header, tensor, offset)) {
            out = {file, offset};
            return true;
        }
    }
    return false;
}

bool Source::accept(const Place & place, uint64_t from, const void * data, uint64_t bytes,
                    std::string & why) {
    const int fd = files_[place.file].fd;
    const uint64_t offset = place.offset + from;
    if (spills_) {
        if (!write_all(fd, data, bytes, offset)) {
            why = "cannot write weights to KVTIER_DIR: " + std::string(std::strerror(errno));
            return false;
        }
        return true;
    }
    if (is_map_of(place, from, data, bytes)) {
        return true;
    }
    std::vector<char> piece(size_t(std::min(bytes, COMPARE_BYTES)));
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t length = std::min(bytes - done, COMPARE_BYTES);
        if (!read_all(fd, piece.data(), length, offset + done) ||
            std::memcmp(piece.data(), static_cast<const char *>(data) + done, length) != 0) {
            return false;
        }
        done += length;
    }
    return true;
}

// Bytes that are a map of the file at this very place need no comparison, and are not touched.
bool Source::is_map_of(const Place & place, uint64_t from, const void * data, uint64_t bytes) {
    const uint64_t address = reinterpret_cast<uintptr_t>(data);
    const auto covers = [&] { return map_.begin <= address && map_.end - address >= bytes; };
    if (map_.end <= address || !covers()) {
        if (!map_find(address, map_) || !covers()) {
            map_ = Map();
            return false;
        }
    }
    return map_.file == place.file && map_.offset + (address - map_.begin) == place.offset + from;
}

bool Source::map_find(uint64_t address, Map & out) const {
    std::FILE * maps = std::fopen("/proc/self/maps", "re");
    if (!maps) {
        return false;
    }
    char line[8192];
    bool found = false;
    while (!found && std::fgets(line, sizeof line, maps)) {
        uint64_t begin = 0, end = 0, offset = 0, inode = 0;
        unsigned major_number = 0, minor_number = 0;
        char access[5] = "";
        if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &begin, &end,
                        access, &offset, &major_number, &minor_number, &inode) != 7 ||
            address < begin || address >= end) {
            continue;
        }
        // A private map that is written to may differ from the file.
        const bool is_clean = access[1] == '-';
        for (uint32_t file = 0; is_clean && file < files_.size() && !found; file++) {
            const struct stat & seen = files_[file].seen;
            found = seen.st_ino == inode && seen.st_dev == makedev(major_number, minor_number);
            out = {begin, end, offset, file};
        }
        break;
    }
    std::fclose(maps);
    return found;
}

bool Source::read(const Place & place, uint64_t from, void * out, uint64_t bytes) const {
    return read_all(files_[place.file].fd, out, bytes, place.offset + from);
}

std::vector<std::string> Source::paths() const {
    std::vector<std::string> all;
    for (const File & file : files_) {
        all.push_back("/proc/self/fd/" + std::to_string(file.fd));
    }
    return all;
}

} // namespace kvtier_plugin

// Compares streamed weights with a memory map, in processes with the same memory limit.
#include "bench.hpp"

#include <cerrno>
#include <fcntl.h>
#include <fstream>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

/// A cgroup with a memory limit; removed by the destructor.
struct Cgroup {
    std::string path, why;
    bool is_second = false;

    bool write(const std::string &name, const std::string &text) {
        std::ofstream file(path + "/" + name);
        file << text << std::flush;
        return file.good();
    }
    bool make(uint64_t limit_bytes) {
        static int made = 0;
        const std::string name = "/kvtier-bench-" + std::to_string(getpid()) + "-" + std::to_string(made++);
        std::ifstream controllers("/sys/fs/cgroup/cgroup.controllers");
        is_second = controllers.good();
        path = (is_second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") + name;
        const char *limit = is_second ? "memory.max" : "memory.limit_in_bytes";
        if (mkdir(path.c_str(), 0700) != 0) {
            why = "cannot make a memory cgroup: " + std::string(std::strerror(errno));
            path.clear();
            return false;
        }
        if (!write(limit, std::to_string(limit_bytes))) {
            why = "cannot set the cgroup's memory limit: add `memory` to cgroup.subtree_control";
            return false;
        }
        // Without swap, as the budget has none.
        write(is_second ? "memory.swap.max" : "memory.memsw.limit_in_bytes",
              is_second ? "0" : std::to_string(limit_bytes));
        return true;
    }
    ~Cgroup() {
        if (!path.empty()) {
            rmdir(path.c_str());
        }
    }
};

struct Child {
    double token_s = 0;
    uint64_t peak_bytes = 0;
    bool is_done = false;
};

uint64_t peak_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmHWM:", 0) == 0) {
            return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
        }
    }
    return 0;
}

} // namespace

/// Measures one kind of run in this process, after a few tokens of warm-up.
int run_child(const Options &options) {
    Runner runner;
    runner.open(options, options.child == "stream", LLAMA_LOAD_MODE_MMAP);
    runner.decode(3);
    std::printf("%.9f %llu\n", runner.decode(options.tokens), (unsigned long long) peak_bytes());
    runner.close();
    return 0;
}

namespace {

Child start(const Options &options, const char *kind, Cgroup *cgroup) {
    int ends[2];
    Child child;
    if (pipe(ends) != 0) {
        return child;
    }
    const std::string tokens = std::to_string(options.tokens), threads = std::to_string(options.threads);
    const std::string budget = std::to_string(options.budget_bytes);
    const std::string slots = std::to_string(std::max(2u, options.slots));
    const pid_t pid = fork();
    if (pid == 0) {
        if (cgroup && !cgroup->write("cgroup.procs", std::to_string(getpid()))) {
            _exit(3);
        }
        dup2(ends[1], 1);
        execl("/proc/self/exe", "bench", options.model.c_str(), "--child", kind, "--tokens", tokens.c_str(),
              "--threads", threads.c_str(), "--budget", budget.c_str(), "--slots", slots.c_str(), nullptr);
        _exit(2);
    }
    ::close(ends[1]);
    FILE *out = fdopen(ends[0], "r");
    unsigned long long peak = 0;
    const bool said = out && std::fscanf(out, "%lf %llu", &child.token_s, &peak) == 2;
    if (out) {
        std::fclose(out);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    child.peak_bytes = peak;
    child.is_done = pid > 0 && said && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return child;
}

/// Drops a file from the page cache; false if other processes keep it there.
bool drop_cache(const std::string &path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    const off_t bytes = lseek(file, 0, SEEK_END);
    if (file < 0 || bytes <= 0) {
        return false;
    }
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    void *map = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, file, 0);
    ::close(file);
    if (map == MAP_FAILED) {
        return false;
    }
    std::vector<unsigned char> pages(static_cast<size_t>((bytes + 4095) / 4096));
    const bool known = mincore(map, static_cast<size_t>(bytes), pages.data()) == 0;
    munmap(map, static_cast<size_t>(bytes));
    const auto there = std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; });
    return known && static_cast<size_t>(there) <= pages.size() / 20;
}

/// Read-ahead of the disk that has the file, in KiB, or -1.
long readahead_kb(const std::string &path) {
    struct stat found {};
    if (stat(path.c_str(), &found) != 0) {
        return -1;
    }
    const std::string device = "/sys/dev/block/" + std::to_string(major(found.st_dev)) + ":" +
                               std::to_string(minor(found.st_dev));
    for (const char *where : {"/queue/read_ahead_kb", "/../queue/read_ahead_kb"}) {
        std::ifstream file(device + where);
        long kilobytes = -1;
        if (file >> kilobytes) {
            return kilobytes;
        }
    }
    return -1;
}

} // namespace

void bench_mmap(const Options &options) {
    const Bar bar = {"weights_mmap", "a memory map in the same cgroup", "higher", 1.5};
    const Bar ahead_bar = {"weights_mmap_readahead_128k", "a memory map in the same cgroup", "higher", 2.5};
    const Child free = start(options, "stream", nullptr);
    std::string why = free.is_done ? "" : "the streamed run failed";
    // The peak of the streamed run, and some more for memory that the kernel charges to the cgroup.
    const uint64_t limit_bytes = free.peak_bytes + free.peak_bytes / 20 + (8u << 20);
    std::vector<double> ratios, maps;
    for (uint32_t i = 0; why.empty() && i < options.pairs; i++) {
        // Pages that are in memory already would not be charged to this cgroup.
        if (!drop_cache(options.model)) {
            why = "other processes keep the model in the page cache: use a copy of the file";
            break;
        }
        // One cgroup for each run, because pages read by the other run would be charged to it.
        Cgroup one, other;
        if (!one.make(limit_bytes) || !other.make(limit_bytes)) {
            why = one.why + other.why;
            break;
        }
        const Child map = start(options, "mmap", &one);
        drop_cache(options.model);
        const Child stream = start(options, "stream", &other);
        if (!map.is_done || !stream.is_done) {
            why = map.is_done ? "the streamed run failed in the cgroup" :
                  "the memory-mapped run failed in the cgroup";
            break;
        }
        std::fprintf(stderr, "map %.2f ms, streamed %.2f ms\n", map.token_s * 1e3, stream.token_s * 1e3);
        maps.push_back(map.token_s);
        ratios.push_back(map.token_s / stream.token_s);
    }
    if (!why.empty()) {
        print_none(bar, why);
        print_none(ahead_bar, why);
        return;
    }
    print(bar, median(ratios), median(maps));
    const long ahead = readahead_kb(options.model);
    if (ahead == 128) {
        print(ahead_bar, median(ratios), median(maps));
    } else {
        print_none(ahead_bar, "the disk's read-ahead is " + std::to_string(ahead) +
                                  " KiB, not 128: write 128 to its queue/read_ahead_kb, as root");
    }
}

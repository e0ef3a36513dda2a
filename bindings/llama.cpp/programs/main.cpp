// kvtier-llama: opens store and model, runs the command, saves, prints the statistics.
#include "commands.h"
#include "failure.h"
#include "input.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include <sys/stat.h>

namespace {

int report_error(bool json, exit_status status, const char *what) {
    if (json) {
        std::printf("%s\n", json_object().text("type", "error").text("error", what).str().c_str());
    } else {
        std::fprintf(stderr, "kvtier-llama: %s\n", what);
    }
    return status;
}

void make_directory(const std::string &path) {
    if (!path.empty() && mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
        throw failure(exit_store, "--disk " + path + ": " + std::strerror(errno));
    }
}

int serve(run &r) {
    switch (r.o.action) {
    case command::chat:
        return run_chat(r);
    case command::complete:
        return run_complete(r);
    case command::batch:
        return run_batch(r);
    }
    return exit_usage;
}

// A failed flush does not fail the run: a later run recomputes the KV.
void save(run &r) {
    r.out.activity("saving");
    const std::string reason = r.cache.flush();
    r.out.clear();
    if (!reason.empty()) {
        r.out.note("not all KV was saved: " + reason);
    }
}

// Saves also after an error, so that computed KV is not lost.
int serve_and_save(run &r) {
    try {
        const int status = serve(r);
        save(r);
        r.done.show(r.out, r.e, r.cache, r.o.kv);
        return status;
    } catch (...) {
        r.out.clear();
        save(r);
        throw;
    }
}

std::unique_ptr<kv_cache> open_kv_cache(const options &o, engine &e, const std::shared_ptr<kv_store> &store) {
    for (const auto &p : e.adapters()) {
        if (std::unique_ptr<kv_cache> own = p->make_kv_cache(e)) {
            return own;
        }
    }
    return o.kv ? open_tier(o, e, store) : no_tier(o, e);
}

int run_program(const options &o) {
    screen out(o.json, o.quiet);
    make_directory(o.disk);
    const std::shared_ptr<kv_store> store = o.kv ? open_store(o) : nullptr;
    engine e(o, out, open_adapters(o, store));
    const std::unique_ptr<kv_cache> cache = open_kv_cache(o, e, store);
    run r = {o, e, *cache, out, {}};
    return serve_and_save(r);
}

} // namespace

int main(int argc, char **argv) {
    options o;
    // Found before parsing, so that errors of the command line are JSON, too.
    for (int i = 1; i < argc; ++i) {
        o.json = o.json || std::strcmp(argv[i], "--json") == 0;
    }
    try {
        if (!parse_options(argc, argv, o)) {
            return exit_good;
        }
        watch_signals();
        return run_program(o);
    } catch (const failure &what) {
        return report_error(o.json, what.status, what.what());
    } catch (const std::exception &what) {
        return report_error(o.json, exit_failed, what.what());
    }
}

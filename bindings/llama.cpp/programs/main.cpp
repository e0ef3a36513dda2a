// kvtier-llama: loads, does what is asked, saves, and says what it did.
#include "commands.h"
#include "failure.h"
#include "input.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

#include <sys/stat.h>

namespace {

int say(bool json, exit_status status, const char *what) {
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
    switch (r.o.what) {
    case command::chat:
        return run_chat(r);
    case command::complete:
        return run_complete(r);
    case command::batch:
        return run_batch(r);
    }
    return exit_usage;
}

// Answers count also where their KV could not be stored: it is computed anew then.
void save(run &r) {
    r.out.busy("saving");
    const std::string trouble = r.k.flush();
    r.out.clear();
    if (!trouble.empty()) {
        r.out.note("not all could be saved: " + trouble);
    }
}

// What was computed is saved also where the run ends early.
int serve_and_save(run &r) {
    try {
        const int status = serve(r);
        save(r);
        r.done.show(r.out, r.e, r.k, r.o.kv);
        return status;
    } catch (...) {
        r.out.clear();
        save(r);
        throw;
    }
}

std::unique_ptr<keeper> open_keeper(const options &o, engine &e, const std::shared_ptr<kv_store> &store) {
    for (const auto &p : e.parts()) {
        if (std::unique_ptr<keeper> own = p->make_keeper(e)) {
            return own;
        }
    }
    return o.kv ? open_tier(o, e, store) : no_tier(o, e);
}

int run_program(const options &o) {
    screen out(o.json, o.quiet);
    make_directory(o.disk);
    const std::shared_ptr<kv_store> store = o.kv ? open_store(o) : nullptr;
    engine e(o, out, open_parts(o, store));
    const std::unique_ptr<keeper> k = open_keeper(o, e, store);
    run r = {o, e, *k, out, {}};
    return serve_and_save(r);
}

} // namespace

int main(int argc, char **argv) {
    options o;
    // Also what is wrong with the flags is said as JSON where that was wanted.
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
        return say(o.json, what.status, what.what());
    } catch (const std::exception &what) {
        return say(o.json, exit_failed, what.what());
    }
}

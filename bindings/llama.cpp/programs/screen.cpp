// Standard output, standard error, progress bars.
#include "screen.h"

#include <cmath>
#include <cstdio>

#include <unistd.h>

screen::screen(bool json_, bool quiet_)
    : json(json_), quiet(quiet_), terminal(!json_ && !quiet_ && isatty(2) == 1) {}

void screen::put(const std::string &bytes) {
    clear();
    const bool whole = std::fwrite(bytes.data(), 1, bytes.size(), stdout) == bytes.size();
    broken = broken || !whole || std::fflush(stdout) != 0;
}

void screen::text(const std::string &part) {
    if (part.empty()) {
        return;
    }
    put(json ? json_object().text("type", "text").text("text", part).str() + "\n" : part);
}

void screen::end_text() {
    if (!json) {
        put("\n");
    }
}

void screen::line(const json_object &object) {
    if (json) {
        put(object.str() + "\n");
    }
}

void screen::note(const std::string &message) {
    if (json) {
        line(json_object().text("type", "note").text("text", message));
    } else if (!quiet) {
        clear();
        std::fprintf(stderr, "%s\n", message.c_str());
    }
}

void screen::error(const std::string &message) {
    clear();
    std::fprintf(stderr, "kvtier-llama: %s\n", message.c_str());
}

void screen::progress(const char *what, uint64_t done, uint64_t all) {
    const int share = all ? (int) (100.0 * (double) done / (double) all) : 100;
    if (!terminal || (shown && share == last_share)) {
        return;
    }
    if (done >= all) {
        clear();
        return;
    }
    const int width = 30, full = share * width / 100;
    std::fprintf(stderr, "\r\033[K%s [%.*s%.*s] %d%%", what, full, "##############################",
                 width - full, "..............................", share);
    shown = true;
    last_share = share;
}

void screen::activity(const std::string &what) {
    if (terminal) {
        std::fprintf(stderr, "\r\033[K%s ...", what.c_str());
        shown = true;
        last_share = -1;
    }
}

void screen::clear() {
    if (shown) {
        std::fputs("\r\033[K", stderr);
        shown = false;
    }
}

std::string bytes_text(double bytes) {
    const char *units[] = {"B", "kB", "MB", "GB", "TB"};
    int unit = 0;
    for (; unit < 4 && bytes >= 999.5; ++unit) {
        bytes /= 1000;
    }
    char out[32];
    std::snprintf(out, sizeof out, unit ? "%.3g %s" : "%.0f %s", bytes, units[unit]);
    return out;
}

std::string time_text(double ns) {
    char out[32];
    if (ns < 999.5e6) {
        std::snprintf(out, sizeof out, "%.3g ms", ns / 1e6);
    } else {
        std::snprintf(out, sizeof out, ns < 99.95e9 ? "%.3g s" : "%.0f s", ns / 1e9);
    }
    return out;
}

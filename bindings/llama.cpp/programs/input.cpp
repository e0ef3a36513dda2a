// Lines and signals.
#include "input.h"

#include "failure.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

namespace {

volatile std::sig_atomic_t ctrl_c = 0;
volatile std::sig_atomic_t leave = 0;

void on_ctrl_c(int) {
    if (ctrl_c) {
        _exit(exit_interrupted);
    }
    ctrl_c = 1;
}

void on_leave(int) {
    leave = 1;
}

void watch(int number, void (*handler)(int)) {
    struct sigaction action = {};
    action.sa_handler = handler;
    sigemptyset(&action.sa_mask);
    // Without SA_RESTART: a read that waits for a line comes back.
    sigaction(number, &action, nullptr);
}

} // namespace

void watch_signals() {
    watch(SIGINT, on_ctrl_c);
    watch(SIGTERM, on_leave);
    watch(SIGHUP, on_leave);
    watch(SIGPIPE, SIG_IGN);
}

bool answer_stopped() {
    return ctrl_c || leave;
}

bool program_stopped() {
    return leave;
}

void forget_ctrl_c() {
    ctrl_c = 0;
}

line_reader::line_reader(const std::string &path, size_t most_bytes) : file(0), most_bytes(most_bytes) {
    if (path != "-") {
        file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file < 0) {
            throw failure(exit_usage, path + ": " + std::strerror(errno));
        }
    }
}

line_reader::~line_reader() {
    if (file > 0) {
        close(file);
    }
}

// Waits until there is something to read. False: a signal came first; none is missed on the way.
bool line_reader::wait() {
    sigset_t ours, before;
    sigemptyset(&ours);
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
        sigaddset(&ours, number);
    }
    pthread_sigmask(SIG_BLOCK, &ours, &before);
    pollfd what = {file, POLLIN, 0};
    if (!answer_stopped()) {
        ppoll(&what, 1, nullptr, &before);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return !answer_stopped();
}

bool line_reader::fill() {
    if (!wait()) {
        return false;
    }
    char part[1 << 16];
    const ssize_t got = read(file, part, sizeof part);
    if (got < 0 && errno != EINTR && errno != EAGAIN) {
        throw failure(exit_failed, std::string("the input cannot be read: ") + std::strerror(errno));
    }
    ended = got == 0;
    held.append(part, got > 0 ? (size_t) got : 0);
    if (held.size() > most_bytes) {
        throw failure(exit_usage, std::string("the input has a line, or a prompt, of more than ") +
                                     std::to_string(most_bytes >> 20) + " MiB");
    }
    return true;
}

line_is line_reader::next(std::string &line) {
    size_t searched = 0;
    for (;;) {
        const size_t end = held.find('\n', searched);
        if (end != std::string::npos || (ended && !held.empty())) {
            line = held.substr(0, end);
            held.erase(0, end == std::string::npos ? end : end + 1);
            if (!line.empty() && line.back() == '\r') {
                line.pop_back();
            }
            return line_is::there;
        }
        searched = held.size();
        if (ended || !fill()) {
            return ended ? line_is::last : line_is::stopped;
        }
    }
}

std::string line_reader::all() {
    while (!ended) {
        if (!fill()) {
            throw failure(exit_interrupted, "stopped");
        }
    }
    return std::move(held);
}

// Reads lines and handles signals.
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

volatile std::sig_atomic_t interrupt_received = 0;
volatile std::sig_atomic_t terminate_received = 0;

void on_interrupt(int) {
    if (interrupt_received) {
        _exit(exit_interrupted);
    }
    interrupt_received = 1;
}

void on_terminate(int) {
    terminate_received = 1;
}

void watch(int number, void (*handler)(int)) {
    struct sigaction action = {};
    action.sa_handler = handler;
    sigemptyset(&action.sa_mask);
    // Without SA_RESTART a signal interrupts a read that waits for a line.
    sigaction(number, &action, nullptr);
}

} // namespace

void watch_signals() {
    watch(SIGINT, on_interrupt);
    watch(SIGTERM, on_terminate);
    watch(SIGHUP, on_terminate);
    watch(SIGPIPE, SIG_IGN);
}

bool answer_interrupted() {
    return interrupt_received || terminate_received;
}

bool termination_requested() {
    return terminate_received;
}

void clear_interrupt() {
    interrupt_received = 0;
}

line_reader::line_reader(const std::string &path, size_t max_bytes) : file(0), max_bytes(max_bytes) {
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

// Waits for input. False: a signal came first. Signals are blocked up to ppoll, so that none is missed.
bool line_reader::wait() {
    sigset_t ours, before;
    sigemptyset(&ours);
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
        sigaddset(&ours, number);
    }
    pthread_sigmask(SIG_BLOCK, &ours, &before);
    pollfd poll_input = {file, POLLIN, 0};
    if (!answer_interrupted()) {
        ppoll(&poll_input, 1, nullptr, &before);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return !answer_interrupted();
}

bool line_reader::fill() {
    if (!wait()) {
        return false;
    }
    char part[1 << 16];
    const ssize_t got = read(file, part, sizeof part);
    if (got < 0 && errno != EINTR && errno != EAGAIN) {
        throw failure(exit_failed, std::string("reading the input failed: ") + std::strerror(errno));
    }
    ended = got == 0;
    held.append(part, got > 0 ? (size_t) got : 0);
    if (held.size() > max_bytes) {
        throw failure(exit_usage, std::string("a line or a prompt of the input exceeds the limit of ") +
                                     std::to_string(max_bytes >> 20) + " MiB: shorten it");
    }
    return true;
}

read_result line_reader::next(std::string &line) {
    size_t searched = 0;
    for (;;) {
        const size_t end = held.find('\n', searched);
        if (end != std::string::npos || (ended && !held.empty())) {
            line = held.substr(0, end);
            held.erase(0, end == std::string::npos ? end : end + 1);
            if (!line.empty() && line.back() == '\r') {
                line.pop_back();
            }
            return read_result::line;
        }
        searched = held.size();
        if (ended || !fill()) {
            return ended ? read_result::end : read_result::interrupted;
        }
    }
}

std::string line_reader::all() {
    while (!ended) {
        if (!fill()) {
            throw failure(exit_interrupted, "interrupted");
        }
    }
    return std::move(held);
}

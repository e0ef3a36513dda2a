// Lines of a file or of standard input, and signals.
#pragma once

#include <cstddef>
#include <string>

// Handles SIGINT, SIGTERM and SIGHUP. Ctrl-C ends an answer; the other two end the program after a save. A
// second Ctrl-C before clear_interrupt ends the program at once.
void watch_signals();
bool answer_interrupted();    // one of the three signals came
bool termination_requested(); // SIGTERM or SIGHUP came
void clear_interrupt();       // forgets the last Ctrl-C

enum class read_result { line, end, interrupted };

// Throws failure: the file cannot be read, or a line (or the whole input, for all) exceeds the limit.
class line_reader {
  public:
    // `max_bytes`: limit of a line; 16 MiB by default. "-" is standard input.
    explicit line_reader(const std::string &path, size_t max_bytes = size_t(16) << 20);
    ~line_reader();
    line_reader(const line_reader &) = delete;
    line_reader &operator=(const line_reader &) = delete;

    // The next line, without its end.
    read_result next(std::string &line);

    // The remaining input, unchanged.
    std::string all();

  private:
    bool wait();
    bool fill();

    int file;
    size_t max_bytes;
    std::string held;
    bool ended = false;
};

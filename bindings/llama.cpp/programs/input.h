// Lines of a file or of standard input, and Ctrl-C.
#pragma once

#include <cstddef>
#include <string>

// Ctrl-C ends an answer, SIGTERM and SIGHUP end the program in an orderly way. A second Ctrl-C, before
// the first was dealt with, ends the program at once.
void watch_signals();
bool answer_stopped();  // Ctrl-C came, or worse
bool program_stopped(); // SIGTERM or SIGHUP came
void forget_ctrl_c();   // it was dealt with

enum class line_is { there, last, stopped };

// Throws failure: no such file, or a line (or all) of more bytes than are allowed.
class line_reader {
  public:
    // "-" is standard input.
    explicit line_reader(const std::string &path, size_t most_bytes = size_t(16) << 20);
    ~line_reader();
    line_reader(const line_reader &) = delete;
    line_reader &operator=(const line_reader &) = delete;

    // The next line, without its end.
    line_is next(std::string &line);

    // All that is left, as it is.
    std::string all();

  private:
    bool wait();
    bool fill();

    int file;
    size_t most_bytes;
    std::string held;
    bool ended = false;
};

// Output: answers on standard output as they are decoded; everything else on standard error.
#pragma once

#include "json.h"

#include <cstdint>
#include <string>

class screen {
  public:
    screen(bool json, bool quiet);

    // Prints a part of an answer.
    void text(const std::string &part);
    // Ends the line of an answer.
    void end_text();
    // Prints a line of JSON; nothing without --json.
    void line(const json_object &object);
    // Prints a message that is not part of an answer; with --json as a line of type "note".
    void note(const std::string &message);
    // Prints an error after which the run continues. Not used with --json, which has lines of type "error".
    void error(const std::string &message);
    // Shows a progress bar, on a terminal only. A full bar and any other output remove it.
    void progress(const char *what, uint64_t done, uint64_t all);
    // Shows that work without a known length is in progress, on a terminal only.
    void activity(const std::string &what);
    void clear();

    const bool json;
    const bool quiet;
    const bool terminal;

    // False after a failed write: the reader of standard output is gone.
    bool is_open() const { return !broken; }

  private:
    void put(const std::string &bytes);

    bool shown = false;
    bool broken = false;
    int last_share = -1;
};

// "23.4 MB", "1.2 s".
std::string bytes_text(double bytes);
std::string time_text(double ns);

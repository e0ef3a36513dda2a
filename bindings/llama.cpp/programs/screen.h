// What is shown: answers on standard output, as they come; all else on standard error.
#pragma once

#include "json.h"

#include <cstdint>
#include <string>

class screen {
  public:
    screen(bool json, bool quiet);

    // A part of an answer.
    void text(const std::string &part);
    // The end of an answer's line.
    void end_text();
    // A line of JSON; nothing where --json was not given.
    void line(const json_object &object);
    // Words for the user, not part of an answer. With --json a line of type "note".
    void note(const std::string &words);
    // Something went wrong, and the run goes on. Not with --json, where errors are lines of their own.
    void complain(const std::string &words);
    // A bar; one that is full, or another output, removes it. Only on a terminal.
    void bar(const char *what, uint64_t done, uint64_t all);
    // Something that takes a while and cannot be measured.
    void busy(const std::string &what);
    void clear();

    const bool json;
    const bool quiet;
    const bool terminal;

    // False once standard output is gone: whoever read it left.
    bool alive() const { return !broken; }

  private:
    void put(const std::string &bytes);

    bool shown = false;
    bool broken = false;
    int last_share = -1;
};

// "23.4 MB", "1.2 s".
std::string bytes_text(double bytes);
std::string time_text(double ns);

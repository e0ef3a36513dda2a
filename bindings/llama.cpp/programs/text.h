// Bytes to UTF-8 text. Tokens may end inside a character and need not be UTF-8.
#pragma once

#include <string>

class utf8_stream {
  public:
    // Takes bytes and returns the complete characters so far. Invalid bytes become U+FFFD.
    std::string feed(const std::string &bytes);

    // The rest at the end: an incomplete character, as U+FFFD, or nothing.
    std::string rest();

  private:
    std::string held;
};

// Converts a whole text at once.
std::string clean_utf8(const std::string &bytes);

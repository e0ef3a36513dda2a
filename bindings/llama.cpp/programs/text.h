// Bytes that become text: tokens end in the middle of a character, and need not be UTF-8 at all.
#pragma once

#include <string>

class utf8_stream {
  public:
    // Takes bytes; gives the characters that are whole by now. What is no UTF-8 becomes U+FFFD.
    std::string feed(const std::string &bytes);

    // What is left in the end: at most a part of a character, as U+FFFD.
    std::string rest();

  private:
    std::string held;
};

// All of it at once.
std::string clean_utf8(const std::string &bytes);

// A conversation written down, so that the program can go on with it: DIR/sessions/NAME.jsonl, beside the
// store. Lines are only added; one that a kill tore off does not count.
#pragma once

#include "conversation.h"

#include <string>

class session {
  public:
    session() = default;
    // Opens or makes it. Throws failure: it cannot be read, is another program's, or of another vocabulary.
    session(const std::string &dir, const std::string &name, const std::string &vocabulary);
    ~session();
    session(const session &) = delete;
    session &operator=(const session &) = delete;

    // What was said, put into `to`. True: the last answer was cut off; `so_far` is what there was of it.
    bool restore(conversation &to, std::string &so_far) const;
    // Whether anything was said yet.
    bool fresh() const { return records_.empty(); }

    // Written and synced: it is there after a kill. Nothing happens without a file.
    void add(const std::string &role, const std::string &text, const tokens_t &tokens, bool end, bool anew);
    // The conversation starts anew; what was said is kept as NAME.jsonl.old, .old.2 and so on.
    void forget();

  private:
    struct record {
        std::string role, text;
        tokens_t tokens;
        bool end = true;  // of what that role said
        bool anew = false; // its tokens replace all before
    };

    void lock();
    void read();
    void start();
    void write(const std::string &line);
    record record_of(const std::string &line) const;

    std::string path_, vocabulary_;
    std::vector<record> records_;
    int file_ = -1;
};

// The transcript of a conversation, which a later run continues: DIR/sessions/NAME.jsonl, beside the store.
// Lines are only appended. An incomplete last line, left by a kill, is ignored.
#pragma once

#include "conversation.h"

#include <string>

class session {
  public:
    session() = default;
    // Opens or creates the transcript. Throws failure: the file cannot be read, another program has it open,
    // or it belongs to another vocabulary.
    session(const std::string &dir, const std::string &name, const std::string &vocabulary);
    ~session();
    session(const session &) = delete;
    session &operator=(const session &) = delete;

    // Appends the messages and tokens to `to`. True: the last answer is incomplete, and `partial_answer` has
    // its text so far.
    bool restore(conversation &to, std::string &partial_answer) const;
    // Whether the transcript has no message yet.
    bool fresh() const { return records_.empty(); }

    // Appends a line and syncs it, so that it survives a kill. Does nothing without a file.
    void add(const std::string &role, const std::string &text, const tokens_t &tokens, bool end,
             bool replaces);
    // Starts a new conversation. The old transcript becomes NAME.jsonl.old, .old.2 and so on.
    void forget();

  private:
    struct record {
        std::string role, text;
        tokens_t tokens;
        bool end = true;       // the message ends with this record
        bool replaces = false; // its tokens replace all tokens before
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

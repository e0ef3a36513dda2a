// Transcripts: JSON lines with text and tokens. Stored tokens match the saved KV; tokenizing again might not.
#include "session.h"

#include "failure.h"
#include "input.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

constexpr size_t max_tokens = size_t(1) << 24;
constexpr size_t max_bytes = size_t(1) << 30;
// Limit of the transcripts that /forget keeps.
constexpr int max_old_transcripts = 10000;

std::string list_of(const tokens_t &tokens) {
    std::string out = "[";
    for (const llama_token token : tokens) {
        out += (out.size() > 1 ? "," : "") + std::to_string(token);
    }
    return out + "]";
}

[[noreturn]] void io_failure(const std::string &path) {
    throw failure(exit_store, path + ": " + std::strerror(errno));
}

const std::string &field_text(const json_value &line, const char *name) {
    const json_value *value = line.find(name);
    if (!value || value->is != json_value::string) {
        throw std::runtime_error(std::string("the field '") + name + "' is missing or is not a string");
    }
    return value->text;
}

bool field_true(const json_value &line, const char *name) {
    const json_value *value = line.find(name);
    return value && value->is == json_value::boolean && value->truth;
}

} // namespace

session::session(const std::string &dir, const std::string &name, const std::string &vocabulary)
    : path_(dir + "/sessions/" + name + ".jsonl"), vocabulary_(vocabulary) {
    const std::string folder = dir + "/sessions";
    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
        io_failure(folder);
    }
    file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file_ < 0) {
        io_failure(path_);
    }
    try {
        lock();
        read();
    } catch (...) {
        close(file_);
        throw;
    }
}

session::~session() {
    if (file_ >= 0) {
        close(file_);
    }
}

// Locks the file, because lines of two programs would mix.
void session::lock() {
    if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
        throw failure(exit_store, path_ + ": " +
                                      (errno == EWOULDBLOCK
                                           ? "another program has this session open: close that program, "
                                             "or choose another --session"
                                           : std::strerror(errno)));
    }
}

void session::start() {
    write(json_object().count("kvtier_llama_session", 1).text("vocabulary", vocabulary_).str());
}

void session::read() {
    line_reader reader(path_, max_bytes);
    const std::string all = reader.all();
    const size_t whole = all.rfind('\n') == std::string::npos ? 0 : all.rfind('\n') + 1;
    if (whole < all.size() && ftruncate(file_, (off_t) whole) != 0) {
        io_failure(path_);
    }
    if (whole == 0) {
        start();
        return;
    }
    size_t at = 0, number = 0;
    while (at < whole) {
        const size_t end = all.find('\n', at);
        const std::string line = all.substr(at, end - at);
        at = end + 1;
        try {
            if (++number > 1) {
                records_.push_back(record_of(line));
            } else if (const json_value head = read_json(line); !head.find("kvtier_llama_session")) {
                throw std::runtime_error("the file is not a transcript of kvtier-llama: choose another "
                                         "--session");
            } else if (field_text(head, "vocabulary") != vocabulary_) {
                throw std::runtime_error("the transcript belongs to a model with another vocabulary: choose "
                                         "another --session");
            }
        } catch (const std::runtime_error &what) {
            throw failure(exit_store, path_ + ", line " + std::to_string(number) + ": " + what.what());
        }
    }
}

session::record session::record_of(const std::string &line) const {
    const json_value value = read_json(line);
    record r;
    r.role = field_text(value, "role");
    r.text = field_text(value, "text");
    r.end = field_true(value, "end");
    r.replaces = field_true(value, "anew");
    const double n_vocab = std::strtod(vocabulary_.c_str(), nullptr);
    const json_value *tokens = value.find("tokens");
    if (!tokens || tokens->is != json_value::array || tokens->items.size() > max_tokens) {
        throw std::runtime_error("the field 'tokens' is missing, is not an array, or has more than 16777216 "
                                 "tokens");
    }
    for (const json_value &token : tokens->items) {
        if (token.is != json_value::number || !(token.amount >= 0 && token.amount < n_vocab)) {
            throw std::runtime_error("'tokens' has a token that is not in the vocabulary of the model");
        }
        r.tokens.push_back((llama_token) token.amount);
    }
    return r;
}

bool session::restore(conversation &to, std::string &partial_answer) const {
    bool open_answer = false;
    partial_answer.clear();
    for (const record &r : records_) {
        if (r.replaces) {
            to.tokens.clear();
        }
        to.add(r.tokens);
        if (r.role != "assistant") {
            to.restore({r.role, r.text});
            open_answer = r.role == "user";
            partial_answer.clear();
            continue;
        }
        partial_answer += r.text;
        open_answer = !r.end;
        if (r.end) {
            to.restore({r.role, partial_answer});
            partial_answer.clear();
        }
    }
    return open_answer;
}

void session::add(const std::string &role, const std::string &text, const tokens_t &tokens, bool end,
                  bool replaces) {
    if (file_ < 0) {
        return;
    }
    json_object line;
    line.text("role", role).text("text", text).raw("tokens", list_of(tokens)).flag("end", end);
    if (replaces) {
        line.flag("anew", true);
    }
    write(line.str());
}

void session::write(const std::string &line) {
    const std::string whole = line + "\n";
    struct stat info = {};
    if (fstat(file_, &info) != 0) {
        io_failure(path_);
    }
    if (whole.size() > max_bytes - std::min(max_bytes, (size_t) info.st_size)) {
        throw failure(exit_store, path_ + " would exceed its limit of 1 GiB: use /forget or another "
                                          "--session");
    }
    size_t at = 0;
    while (at < whole.size()) {
        const ssize_t put = ::write(file_, whole.data() + at, whole.size() - at);
        if (put < 0 && errno != EINTR) {
            io_failure(path_);
        }
        at += put > 0 ? (size_t) put : 0;
    }
    if (fdatasync(file_) != 0) {
        io_failure(path_);
    }
}

void session::forget() {
    if (file_ < 0) {
        return;
    }
    std::string old = path_ + ".old";
    for (int number = 2; number <= max_old_transcripts && access(old.c_str(), F_OK) == 0; ++number) {
        old = path_ + ".old." + std::to_string(number);
    }
    if (std::rename(path_.c_str(), old.c_str()) != 0) {
        io_failure(path_);
    }
    close(file_);
    file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file_ < 0) {
        io_failure(path_);
    }
    lock();
    records_.clear();
    start();
}

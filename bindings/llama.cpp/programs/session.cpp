// Transcripts: JSON lines with the tokens as they were, so that the KV that was saved fits them.
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

constexpr size_t most_tokens = size_t(1) << 24;
constexpr size_t most_bytes = size_t(1) << 30;
// Of conversations that were forgotten.
constexpr int most_old = 10000;

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
        throw std::runtime_error(std::string("no text '") + name + "'");
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

// Two programs would write their lines between each other's.
void session::lock() {
    if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
        throw failure(exit_store, path_ + ": " +
                                      (errno == EWOULDBLOCK ? "another program has this session open"
                                                            : std::strerror(errno)));
    }
}

void session::start() {
    write(json_object().count("kvtier_llama_session", 1).text("vocabulary", vocabulary_).str());
}

void session::read() {
    line_reader reader(path_, most_bytes);
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
                throw std::runtime_error("it is no session of this program");
            } else if (field_text(head, "vocabulary") != vocabulary_) {
                throw std::runtime_error("it was held with another vocabulary: name another session");
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
    r.anew = field_true(value, "anew");
    const double n_vocab = std::strtod(vocabulary_.c_str(), nullptr);
    const json_value *tokens = value.find("tokens");
    if (!tokens || tokens->is != json_value::array || tokens->items.size() > most_tokens) {
        throw std::runtime_error("no list 'tokens'");
    }
    for (const json_value &token : tokens->items) {
        if (token.is != json_value::number || !(token.amount >= 0 && token.amount < n_vocab)) {
            throw std::runtime_error("a token that the model does not have");
        }
        r.tokens.push_back((llama_token) token.amount);
    }
    return r;
}

bool session::restore(conversation &to, std::string &so_far) const {
    bool open_answer = false;
    so_far.clear();
    for (const record &r : records_) {
        if (r.anew) {
            to.tokens.clear();
        }
        to.add(r.tokens);
        if (r.role != "assistant") {
            to.restore({r.role, r.text});
            open_answer = r.role == "user";
            so_far.clear();
            continue;
        }
        so_far += r.text;
        open_answer = !r.end;
        if (r.end) {
            to.restore({r.role, so_far});
            so_far.clear();
        }
    }
    return open_answer;
}

void session::add(const std::string &role, const std::string &text, const tokens_t &tokens, bool end,
                  bool anew) {
    if (file_ < 0) {
        return;
    }
    json_object line;
    line.text("role", role).text("text", text).raw("tokens", list_of(tokens)).flag("end", end);
    if (anew) {
        line.flag("anew", true);
    }
    write(line.str());
}

void session::write(const std::string &line) {
    const std::string whole = line + "\n";
    struct stat now = {};
    if (fstat(file_, &now) != 0) {
        io_failure(path_);
    }
    if (whole.size() > most_bytes - std::min(most_bytes, (size_t) now.st_size)) {
        throw failure(exit_store, path_ + " is longer than 1 GiB with that: name another session");
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
    for (int number = 2; number <= most_old && access(old.c_str(), F_OK) == 0; ++number) {
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

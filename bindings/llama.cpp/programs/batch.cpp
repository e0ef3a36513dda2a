// The command batch: answers the requests of many users one after the other.
#include "answer.h"
#include "commands.h"
#include "conversation.h"
#include "failure.h"
#include "input.h"

#include <cmath>
#include <map>
#include <stdexcept>

namespace {

constexpr size_t max_users = 65536;

struct request {
    std::string user, prompt;
    std::string id = "null"; // as JSON, returned unchanged
    uint32_t max_tokens = 0;
};

std::string text_field(const json_value &line, const char *name, bool required) {
    const json_value *value = line.find(name);
    if (!value && !required) {
        return "";
    }
    if (!value || value->is != json_value::string) {
        throw std::runtime_error(std::string("'") + name + "' must be a JSON string");
    }
    return value->text;
}

request read_json_request(const std::string &line, uint32_t max_tokens) {
    const json_value value = read_json(line);
    request r;
    r.max_tokens = max_tokens;
    for (const auto &field : value.fields) {
        const std::string &name = field.first;
        if (name != "user" && name != "prompt" && name != "id" && name != "n") {
            throw std::runtime_error("unknown field '" + name + "': accepted are user, prompt, id and n");
        }
    }
    r.user = text_field(value, "user", false);
    r.prompt = text_field(value, "prompt", true);
    if (const json_value *id = value.find("id")) {
        char digits[40];
        std::snprintf(digits, sizeof digits, "%.15g", id->amount);
        r.id = id->is == json_value::string   ? json_text(id->text)
               : id->is == json_value::number ? digits
                                              : "";
        if (r.id.empty()) {
            throw std::runtime_error("'id' must be a JSON string or a number");
        }
    }
    if (const json_value *n = value.find("n")) {
        if (n->is != json_value::number || !(n->amount >= 1 && n->amount <= 1 << 24) ||
            n->amount != std::floor(n->amount)) {
            throw std::runtime_error("'n' must be an integer from 1 to 16777216");
        }
        r.max_tokens = (uint32_t) n->amount;
    }
    return r;
}

request read_request(const std::string &line, uint32_t max_tokens) {
    if (line[line.find_first_not_of(" \t")] == '{') {
        return read_json_request(line, max_tokens);
    }
    const size_t colon = line.find(':');
    if (colon == std::string::npos || colon == 0) {
        throw std::runtime_error("the line is neither 'user: text' nor a JSON object");
    }
    request r;
    r.max_tokens = max_tokens;
    r.user = line.substr(0, colon);
    const size_t start = line.find_first_not_of(" \t", colon + 1);
    r.prompt = start == std::string::npos ? "" : line.substr(start);
    return r;
}

class server {
  public:
    explicit server(run &r) : r_(r) {}

    // Answers one line of the input. An invalid line is reported and does not end the run.
    void handle_line(const std::string &line) {
        ++number_;
        if (line.find_first_not_of(" \t") == std::string::npos) {
            return;
        }
        request req;
        try {
            req = read_request(line, r_.o.answer_tokens);
            serve(req);
        } catch (const failure &what) {
            fail(req, what.what());
        } catch (const std::runtime_error &what) {
            fail(req, "line " + std::to_string(number_) + ": " + what.what());
        }
    }

  private:
    void serve(const request &req) {
        answer_options opts;
        opts.max_tokens = req.max_tokens;
        if (!r_.out.json) {
            r_.out.text("[" + (req.user.empty() ? std::to_string(number_) : req.user) + "] ");
            opts.on_text = [this](const std::string &part) { r_.out.text(part); };
        }
        const answer_t a = req.user.empty() ? complete(req, opts) : chat_turn(req, opts);
        r_.done.add(a);
        r_.out.end_text();
        json_object line = answer_line(a);
        line.raw("id", req.id);
        if (!req.user.empty()) {
            line.text("user", req.user);
        }
        r_.out.line(line);
    }

    answer_t complete(const request &req, const answer_options &opts) {
        tokens_t tokens = r_.e.tokens_of(req.prompt, true);
        return answer(r_.e, r_.cache, r_.out, tokens, opts);
    }

    answer_t chat_turn(const request &req, const answer_options &opts) {
        // A marker would end the user's turn, so that the user could write text in the model's name.
        if (const std::string marker = r_.e.marker_in(req.prompt); !marker.empty()) {
            throw failure(exit_usage, "the prompt of a user has the control marker " + marker +
                                           ", which only the chat template may use: remove it");
        }
        auto it = users_.find(req.user);
        if (it == users_.end()) {
            if (users_.size() >= max_users) {
                throw failure(exit_failed, "the input has more than " + std::to_string(max_users) +
                                               " users: split it into several runs");
            }
            r_.e.check_template();
            it = users_.emplace(req.user, conversation(r_.e, r_.o.system)).first;
        }
        conversation &chat = it->second;
        const tokens_t before = chat.tokens;
        chat.add(chat.ask(req.prompt));
        try {
            const answer_t a = answer(r_.e, r_.cache, r_.out, chat.tokens, opts);
            chat.add(chat.end_answer(a.text));
            return a;
        } catch (const failure &) {
            chat.withdraw_question(before);
            throw;
        }
    }

    void fail(const request &req, const std::string &what) {
        r_.done.add_failure();
        json_object line;
        line.text("type", "error").text("error", what).raw("id", req.id).count("line", number_);
        if (!req.user.empty()) {
            line.text("user", req.user);
        }
        r_.out.line(line);
        if (!r_.out.json) {
            r_.out.end_text();
            r_.out.error(what);
        }
    }

    run &r_;
    std::map<std::string, conversation> users_;
    uint64_t number_ = 0;
};

} // namespace

int run_batch(run &r) {
    line_reader lines(r.o.input.empty() ? "-" : r.o.input);
    server all(r);
    std::string line;
    while (r.out.is_open()) {
        const read_result got = lines.next(line);
        if (got == read_result::interrupted) {
            return exit_interrupted;
        }
        if (got == read_result::end) {
            break;
        }
        all.handle_line(line);
        if (answer_interrupted()) {
            return exit_interrupted;
        }
    }
    return r.done.failures() ? exit_failed : exit_good;
}

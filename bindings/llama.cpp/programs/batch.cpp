// batch: requests of many users, one after the other, as a server would get them.
#include "answer.h"
#include "commands.h"
#include "conversation.h"
#include "failure.h"
#include "input.h"

#include <cmath>
#include <map>
#include <stdexcept>

namespace {

constexpr size_t most_users = 65536;

struct request {
    std::string user, prompt;
    std::string id = "null"; // as JSON: it comes back as it came
    uint32_t most_tokens = 0;
};

std::string text_of(const json_value &line, const char *name, bool needed) {
    const json_value *value = line.find(name);
    if (!value && !needed) {
        return "";
    }
    if (!value || value->is != json_value::string) {
        throw std::runtime_error(std::string("'") + name + "' has to be a text");
    }
    return value->text;
}

request read_json_request(const std::string &line, uint32_t most_tokens) {
    const json_value value = read_json(line);
    request r;
    r.most_tokens = most_tokens;
    for (const auto &field : value.fields) {
        const std::string &name = field.first;
        if (name != "user" && name != "prompt" && name != "id" && name != "n") {
            throw std::runtime_error("there is no field '" + name + "': user, prompt, id, n");
        }
    }
    r.user = text_of(value, "user", false);
    r.prompt = text_of(value, "prompt", true);
    if (const json_value *id = value.find("id")) {
        char digits[40];
        std::snprintf(digits, sizeof digits, "%.15g", id->amount);
        r.id = id->is == json_value::string   ? json_text(id->text)
               : id->is == json_value::number ? digits
                                              : "";
        if (r.id.empty()) {
            throw std::runtime_error("'id' has to be a text or a number");
        }
    }
    if (const json_value *n = value.find("n")) {
        if (n->is != json_value::number || !(n->amount >= 1 && n->amount <= 1 << 24) ||
            n->amount != std::floor(n->amount)) {
            throw std::runtime_error("'n' has to be a whole number of at least 1");
        }
        r.most_tokens = (uint32_t) n->amount;
    }
    return r;
}

request read_request(const std::string &line, uint32_t most_tokens) {
    if (line[line.find_first_not_of(" \t")] == '{') {
        return read_json_request(line, most_tokens);
    }
    const size_t colon = line.find(':');
    if (colon == std::string::npos || colon == 0) {
        throw std::runtime_error("neither 'user: text' nor JSON");
    }
    request r;
    r.most_tokens = most_tokens;
    r.user = line.substr(0, colon);
    const size_t start = line.find_first_not_of(" \t", colon + 1);
    r.prompt = start == std::string::npos ? "" : line.substr(start);
    return r;
}

class server {
  public:
    explicit server(run &r) : r_(r) {}

    // One line of the input. What is wrong with one is said, and the next one is served.
    void take(const std::string &line) {
        ++number_;
        if (line.find_first_not_of(" \t") == std::string::npos) {
            return;
        }
        request asked;
        try {
            asked = read_request(line, r_.o.answer_tokens);
            serve(asked);
        } catch (const failure &what) {
            fail(asked, what.what());
        } catch (const std::runtime_error &what) {
            fail(asked, "line " + std::to_string(number_) + ": " + what.what());
        }
    }

  private:
    void serve(const request &asked) {
        asked_t how;
        how.most_tokens = asked.most_tokens;
        if (!r_.out.json) {
            r_.out.text("[" + (asked.user.empty() ? std::to_string(number_) : asked.user) + "] ");
            how.on_text = [this](const std::string &part) { r_.out.text(part); };
        }
        const answer_t a = asked.user.empty() ? complete(asked, how) : talk(asked, how);
        r_.done.add(a);
        r_.out.end_text();
        json_object line = answer_line(a);
        line.raw("id", asked.id);
        if (!asked.user.empty()) {
            line.text("user", asked.user);
        }
        r_.out.line(line);
    }

    answer_t complete(const request &asked, const asked_t &how) {
        tokens_t tokens = r_.e.tokens_of(asked.prompt, true);
        return answer(r_.e, r_.k, r_.out, tokens, how);
    }

    answer_t talk(const request &asked, const asked_t &how) {
        // It would end the user's turn, and speak for the model.
        if (const std::string marker = r_.e.marker_in(asked.prompt); !marker.empty()) {
            throw failure(exit_usage, "a user's prompt cannot have the model's marker " + marker);
        }
        auto it = users_.find(asked.user);
        if (it == users_.end()) {
            if (users_.size() >= most_users) {
                throw failure(exit_failed, "more than " + std::to_string(most_users) + " users");
            }
            r_.e.need_template();
            it = users_.emplace(asked.user, conversation(r_.e, r_.o.system)).first;
        }
        conversation &chat = it->second;
        const tokens_t before = chat.tokens;
        chat.add(chat.ask(asked.prompt));
        try {
            const answer_t a = answer(r_.e, r_.k, r_.out, chat.tokens, how);
            chat.add(chat.end_answer(a.text));
            return a;
        } catch (const failure &) {
            chat.unask(before);
            throw;
        }
    }

    void fail(const request &asked, const std::string &what) {
        r_.done.add_failure();
        json_object line;
        line.text("type", "error").text("error", what).raw("id", asked.id).count("line", number_);
        if (!asked.user.empty()) {
            line.text("user", asked.user);
        }
        r_.out.line(line);
        if (!r_.out.json) {
            r_.out.end_text();
            r_.out.complain(what);
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
    while (r.out.alive()) {
        const line_is got = lines.next(line);
        if (got == line_is::stopped) {
            return exit_interrupted;
        }
        if (got == line_is::last) {
            break;
        }
        all.take(line);
        if (answer_stopped()) {
            return exit_interrupted;
        }
    }
    return r.done.failures() ? exit_failed : exit_good;
}

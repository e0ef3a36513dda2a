// The command chat: a conversation. With --session a later run continues it.
#include "answer.h"
#include "commands.h"
#include "conversation.h"
#include "failure.h"
#include "input.h"
#include "session.h"

#include <cstdio>

#include <unistd.h>

namespace {

const char help_text[] = "/quit ends the program, /forget starts a new conversation, /stats shows the table; "
                         "Ctrl-C ends an answer";

class chat_loop {
  public:
    explicit chat_loop(run &r) : r_(r), interactive_(isatty(0) == 1 && !r.out.json), chat_(r.e, "") {
        r.e.check_template();
        if (!r.o.session.empty()) {
            session_ = std::make_unique<session>(r.o.disk, r.o.session, r.e.vocabulary());
        }
        const bool fresh = !session_ || session_->fresh();
        if (fresh) {
            start_conversation();
            return;
        }
        std::string partial_answer;
        const bool cut_off = session_->restore(chat_, partial_answer);
        r.out.note("continuing '" + r.o.session + "': " + std::to_string(chat_.messages().size()) +
                   " messages, " + std::to_string(chat_.tokens.size()) + " tokens" +
                   (r.o.system.empty() ? "" : "; --system takes effect after /forget"));
        if (cut_off) {
            r.out.note("the last answer was cut off; it follows in full:");
            show(partial_answer);
            continue_answer(partial_answer);
        }
    }

    int run_all() {
        line_reader lines("-");
        std::string line;
        if (interactive_) {
            clear_interrupt();
        }
        for (;;) {
            if (interactive_) {
                std::fputs("> ", stderr);
            }
            switch (r_.out.is_open() ? lines.next(line) : read_result::end) {
            case read_result::end:
                return exit_good;
            case read_result::interrupted:
                return exit_interrupted;
            case read_result::line:
                break;
            }
            if (line == "/quit" || line == "/exit") {
                return exit_good;
            }
            if (!line.empty()) {
                handle_line(line);
            }
            if (termination_requested() || (!interactive_ && answer_interrupted())) {
                return exit_interrupted;
            }
            clear_interrupt();
        }
    }

  private:
    void start_conversation() {
        chat_ = conversation(r_.e, r_.o.system);
        if (session_ && !r_.o.system.empty()) {
            session_->add("system", r_.o.system, {}, true, false);
        }
    }

    void show(const std::string &part) { r_.out.text(part); }

    void handle_line(const std::string &line) {
        if (line == "/stats") {
            r_.done.show(r_.out, r_.e, r_.cache, r_.o.kv);
        } else if (line == "/help") {
            r_.out.note(help_text);
        } else if (line == "/forget") {
            if (session_) {
                session_->forget();
            }
            start_conversation();
            r_.out.note("a new conversation begins");
        } else if (line[0] == '/') {
            r_.out.note("unknown command " + line + ": " + help_text);
        } else {
            question(line);
        }
    }

    void question(const std::string &text) {
        const tokens_t before = chat_.tokens;
        const tokens_t more = chat_.ask(text);
        const bool replaces = !before.empty() && chat_.tokens.empty();
        chat_.add(more);
        try {
            check_room(r_.cache, chat_.tokens);
        } catch (const failure &what) {
            chat_.withdraw_question(before);
            r_.done.add_failure();
            r_.out.note(std::string(what.what()) + "; /forget starts a new conversation");
            return;
        }
        if (session_) {
            session_->add("user", text, more, true, replaces);
        }
        reply("");
    }

    // Without room for the rest, the answer ends as it is, and /forget remains possible.
    void continue_answer(const std::string &partial_answer) {
        try {
            check_room(r_.cache, chat_.tokens);
        } catch (const failure &what) {
            r_.done.add_failure();
            r_.out.end_text();
            r_.out.note(std::string(what.what()) + "; /forget starts a new conversation");
            const tokens_t end = chat_.end_answer(partial_answer);
            chat_.add(end);
            session_->add("assistant", "", end, true, false);
            return;
        }
        reply(partial_answer);
    }

    void reply(const std::string &partial_answer) {
        answer_options opts;
        opts.max_tokens = r_.o.answer_tokens;
        opts.on_text = [this](const std::string &part) { show(part); };
        opts.on_saved = [this](const std::string &text, const tokens_t &tokens) {
            if (session_) {
                session_->add("assistant", text, tokens, false, false);
            }
        };
        const answer_t a = answer(r_.e, r_.cache, r_.out, chat_.tokens, opts);
        r_.done.add(a);
        const tokens_t end = chat_.end_answer(partial_answer + a.text);
        chat_.add(end);
        if (session_) {
            session_->add("assistant", "", end, true, false);
        }
        r_.out.end_text();
        r_.out.line(answer_line(a));
        if (a.stop == stop_t::context) {
            r_.out.note("the context is full: /forget starts a new conversation, a larger --ctx gives more "
                        "room");
        }
        if (!a.reused.refused.empty()) {
            r_.out.note("not restored: " + a.reused.refused);
        }
    }

    run &r_;
    const bool interactive_;
    conversation chat_;
    std::unique_ptr<session> session_;
};

} // namespace

int run_chat(run &r) {
    chat_loop t(r);
    return t.run_all();
}

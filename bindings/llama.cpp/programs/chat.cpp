// chat: a conversation, which goes on after a restart where it has a name.
#include "answer.h"
#include "commands.h"
#include "conversation.h"
#include "failure.h"
#include "input.h"
#include "session.h"

#include <cstdio>

#include <unistd.h>

namespace {

const char words[] = "/quit leaves, /forget starts anew, /stats shows the table; Ctrl-C ends an answer";

class talk {
  public:
    explicit talk(run &r) : r_(r), typed_(isatty(0) == 1 && !r.out.json), chat_(r.e, "") {
        r.e.need_template();
        if (!r.o.session.empty()) {
            session_ = std::make_unique<session>(r.o.disk, r.o.session, r.e.vocabulary());
        }
        const bool fresh = !session_ || session_->fresh();
        if (fresh) {
            begin();
            return;
        }
        std::string so_far;
        const bool cut_off = session_->restore(chat_, so_far);
        r.out.note("going on with '" + r.o.session + "': " + std::to_string(chat_.messages().size()) +
                   " messages, " + std::to_string(chat_.tokens.size()) + " tokens" +
                   (r.o.system.empty() ? "" : "; it keeps the --system it began with"));
        if (cut_off) {
            r.out.note("its last answer was cut off; here is all of it:");
            show(so_far);
            go_on(so_far);
        }
    }

    int run_all() {
        line_reader lines("-");
        std::string line;
        if (typed_) {
            forget_ctrl_c();
        }
        for (;;) {
            if (typed_) {
                std::fputs("> ", stderr);
            }
            switch (r_.out.alive() ? lines.next(line) : line_is::last) {
            case line_is::last:
                return exit_good;
            case line_is::stopped:
                return exit_interrupted;
            case line_is::there:
                break;
            }
            if (line == "/quit" || line == "/exit") {
                return exit_good;
            }
            if (!line.empty()) {
                take(line);
            }
            if (program_stopped() || (!typed_ && answer_stopped())) {
                return exit_interrupted;
            }
            forget_ctrl_c();
        }
    }

  private:
    void begin() {
        chat_ = conversation(r_.e, r_.o.system);
        if (session_ && !r_.o.system.empty()) {
            session_->add("system", r_.o.system, {}, true, false);
        }
    }

    void show(const std::string &part) { r_.out.text(part); }

    void take(const std::string &line) {
        if (line == "/stats") {
            r_.done.show(r_.out, r_.e, r_.k, r_.o.kv);
        } else if (line == "/help") {
            r_.out.note(words);
        } else if (line == "/forget") {
            if (session_) {
                session_->forget();
            }
            begin();
            r_.out.note("forgotten");
        } else if (line[0] == '/') {
            r_.out.note("there is no " + line + ": " + words);
        } else {
            question(line);
        }
    }

    void question(const std::string &text) {
        const tokens_t before = chat_.tokens;
        const tokens_t more = chat_.ask(text);
        const bool anew = !before.empty() && chat_.tokens.empty();
        chat_.add(more);
        try {
            need_room(r_.k, chat_.tokens);
        } catch (const failure &what) {
            chat_.unask(before);
            r_.done.add_failure();
            r_.out.note(std::string(what.what()) + ". /forget starts anew.");
            return;
        }
        if (session_) {
            session_->add("user", text, more, true, anew);
        }
        reply("");
    }

    // Where there is no room for the rest of it the answer ends as it is: /forget can still be said.
    void go_on(const std::string &so_far) {
        try {
            need_room(r_.k, chat_.tokens);
        } catch (const failure &what) {
            r_.done.add_failure();
            r_.out.end_text();
            r_.out.note(std::string(what.what()) + ". /forget starts anew.");
            const tokens_t end = chat_.end_answer(so_far);
            chat_.add(end);
            session_->add("assistant", "", end, true, false);
            return;
        }
        reply(so_far);
    }

    void reply(const std::string &so_far) {
        asked_t asked;
        asked.most_tokens = r_.o.answer_tokens;
        asked.on_text = [this](const std::string &part) { show(part); };
        asked.on_saved = [this](const std::string &text, const tokens_t &tokens) {
            if (session_) {
                session_->add("assistant", text, tokens, false, false);
            }
        };
        const answer_t a = answer(r_.e, r_.k, r_.out, chat_.tokens, asked);
        r_.done.add(a);
        const tokens_t end = chat_.end_answer(so_far + a.text);
        chat_.add(end);
        if (session_) {
            session_->add("assistant", "", end, true, false);
        }
        r_.out.end_text();
        r_.out.line(answer_line(a));
        if (a.stop == stop_t::context) {
            r_.out.note("the context is full: /forget starts anew, a greater --ctx has more room");
        }
        if (!a.reused.refused.empty()) {
            r_.out.note("not restored: " + a.reused.refused);
        }
    }

    run &r_;
    const bool typed_;
    conversation chat_;
    std::unique_ptr<session> session_;
};

} // namespace

int run_chat(run &r) {
    talk t(r);
    return t.run_all();
}

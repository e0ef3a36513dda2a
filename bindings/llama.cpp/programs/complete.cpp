// The command complete: continues one text.
#include "answer.h"
#include "commands.h"
#include "failure.h"
#include "input.h"

int run_complete(run &r) {
    const std::string prompt =
        r.o.prompt_given ? r.o.prompt : line_reader(r.o.input.empty() ? "-" : r.o.input).all();
    tokens_t tokens = r.e.tokens_of(prompt, true);
    if (!r.out.json && !r.o.quiet) {
        r.out.text(prompt);
    }
    answer_options opts;
    opts.max_tokens = r.o.answer_tokens;
    opts.on_text = [&r](const std::string &part) { r.out.text(part); };
    const answer_t a = answer(r.e, r.cache, r.out, tokens, opts);
    r.done.add(a);
    r.out.end_text();
    r.out.line(answer_line(a));
    return a.stop == stop_t::interrupted ? exit_interrupted : exit_good;
}

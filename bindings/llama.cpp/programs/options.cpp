// The command line: flags, sizes, and the text of --help.
#include "options.h"

#include "failure.h"
#include "parts.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

namespace {

[[noreturn]] void wrong(const std::string &text) {
    throw failure(exit_usage, text + " (kvtier-llama --help says more)");
}

double parse_number(const std::string &flag, const std::string &text, double least, double most) {
    char *end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != 0 || !(value >= least && value <= most)) {
        char range[96];
        std::snprintf(range, sizeof range, "a number from %.12g to %.12g", least, most);
        wrong(flag + " wants " + range + ", not '" + text + "'");
    }
    return value;
}

uint32_t parse_count(const std::string &flag, const std::string &text, double least, double most) {
    const double value = parse_number(flag, text, least, most);
    if (value != std::floor(value)) {
        wrong(flag + " wants a whole number, not '" + text + "'");
    }
    return (uint32_t) value;
}

struct flag {
    const char *name;
    const char *value; // null: the flag has none
    std::string help;
    std::function<void(const std::string &)> set;
};

struct section {
    const char *title;
    std::vector<flag> flags;
};

section kv_flags(options &o) {
    return {"KV tier", {
        {"--host", "SIZE", "memory for KV that left the context (1GiB)",
         [&o](const std::string &v) { o.host_bytes = parse_size("--host", v); }},
        {"--disk", "DIR", "keep KV there, too: it outlives the program, and kill -9",
         [&o](const std::string &v) { o.disk = v; }},
        {"--disk-size", "SIZE", "most bytes of that directory (8GiB)",
         [&o](const std::string &v) { o.disk_bytes = parse_size("--disk-size", v); }},
        {"--policy", "SPEC", "who leaves memory first, such as lru, s3fifo, horizon",
         [&o](const std::string &v) { o.policy = v; }},
        {"--salt", "TEXT", "KV is shared only with runs that name the same text",
         [&o](const std::string &v) { o.salt = v; }},
        {"--no-kv", nullptr, "the same run without kvtier, to compare with",
         [&o](const std::string &) { o.kv = false; }},
    }};
}

section model_flags(options &o) {
    return {"Model", {
        {"-m", "FILE", "the model, GGUF (needed)", [&o](const std::string &v) { o.model = v; }},
        {"--ctx", "N", "tokens of the context (what the model was trained for, at most 4096)",
         [&o](const std::string &v) { o.ctx = parse_count("--ctx", v, 64, 1 << 24); }},
        {"--threads", "N", "threads that compute (the number of cores)",
         [&o](const std::string &v) { o.threads = parse_count("--threads", v, 1, 512); }},
    }};
}

section answer_flags(options &o) {
    return {"Answers", {
        {"-n", "N", "most tokens of an answer (512)",
         [&o](const std::string &v) { o.answer_tokens = parse_count("-n", v, 1, 1 << 24); }},
        {"--temp", "T", "temperature (0.8); 0 = always the likeliest token",
         [&o](const std::string &v) { o.temp = (float) parse_number("--temp", v, 0, 10); }},
        {"--greedy", nullptr, "the same as --temp 0", [&o](const std::string &) { o.temp = 0; }},
        {"--seed", "N", "makes answers repeat (random)",
         [&o](const std::string &v) {
             o.seed = parse_count("--seed", v, 0, 4294967295.0);
             o.seed_given = true;
         }},
    }};
}

section input_flags(options &o) {
    return {"What is asked", {
        {"-p", "TEXT", "complete: the prompt",
         [&o](const std::string &v) { o.prompt = v, o.prompt_given = true; }},
        {"-f", "FILE", "complete: a file with the prompt; batch: the requests; - = standard input, which is "
         "the default", [&o](const std::string &v) { o.input = v; }},
        {"--session", "NAME", "chat: a conversation that goes on where it stopped; needs --disk",
         [&o](const std::string &v) { o.session = v; }},
        {"--system", "TEXT", "chat, batch: what the model is told first",
         [&o](const std::string &v) { o.system = v; }},
        {"--template", "NAME", "chat, batch: a template of llama.cpp, instead of the model's own",
         [&o](const std::string &v) { o.chat_template = v; }},
    }};
}

section output_flags(options &o) {
    return {"Output", {
        {"--json", nullptr, "JSON lines on standard output",
         [&o](const std::string &) { o.json = true; }},
        {"--quiet", nullptr, "answers only: no bars, no table",
         [&o](const std::string &) { o.quiet = true; }},
    }};
}

std::vector<section> all_flags(options &o) {
    std::vector<section> sections = {model_flags(o), answer_flags(o), input_flags(o), kv_flags(o)};
    section parts = {"More than fits", {}};
    parts.flags.push_back({"--longer", "N", longer_help(), [&o](const std::string &v) {
        o.longer_tokens = parse_count("--longer", v, 64, 1 << 24);
    }});
    parts.flags.push_back({"--sparse", "SPEC", sparse_help(), [&o](const std::string &v) { o.sparse = v; }});
    if (has_stream()) {
        parts.flags.push_back({"--stream-budget", "SIZE", stream_help(), [&o](const std::string &v) {
            o.stream_bytes = parse_size("--stream-budget", v);
        }});
    }
    if (!parts.flags.empty()) {
        sections.push_back(parts);
    }
    sections.push_back(output_flags(o));
    return sections;
}

const char usage[] =
    "kvtier-llama: a language model whose KV cache outlives the context, and the process\n"
    "\n"
    "  kvtier-llama chat     -m MODEL [--disk DIR --session NAME]    a conversation\n"
    "  kvtier-llama complete -m MODEL -p TEXT                        goes on with a text\n"
    "  kvtier-llama batch    -m MODEL -f REQUESTS [--json]           many users, one after the other\n";

const char more[] =
    "\n"
    "Sizes: 65536, 512KiB, 512MiB, 1.5GB. K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024.\n"
    "\n"
    "Requests (batch), one a line: 'anna: What is a river?' or JSON:\n"
    "  {\"user\": \"anna\", \"prompt\": \"What is a river?\", \"id\": \"any\", \"n\": 100}\n"
    "A user's requests are one conversation, and cannot have the model's markers (<|im_end|>). Without a\n"
    "user the prompt is a text to go on with, and markers in it count.\n"
    "With --json each answer is a line (type: answer), as are errors and, at the end, the summary.\n"
    "\n"
    "Chat: /quit (or Ctrl-D) leaves, /forget starts anew, /stats shows the table, /help lists these.\n"
    "Ctrl-C ends the answer; what it said until then stays, and is saved. A second one ends the program.\n"
    "\n"
    "Exit status: 0 good, 1 something failed, 2 wrong flags, 3 no such model or it does not load,\n"
    "4 the store cannot be used, 130 ended by Ctrl-C.\n";

// Lines of at most 100 columns; those behind the first begin where it does.
void print_flag(const flag &f) {
    const size_t indent = 25, width = 75;
    std::string left = std::string("  ") + f.name + (f.value ? std::string(" ") + f.value : "");
    std::string text = f.help;
    while (!text.empty()) {
        const size_t end = text.size() <= width ? text.size() : text.rfind(' ', width);
        left.resize(indent, ' ');
        std::printf("%s%s\n", left.c_str(), text.substr(0, end).c_str());
        text.erase(0, end + 1);
        left.clear();
    }
}

void print_help() {
    options unused;
    std::fputs(usage, stdout);
    for (const section &part : all_flags(unused)) {
        std::printf("\n%s:\n", part.title);
        for (const flag &f : part.flags) {
            print_flag(f);
        }
    }
    std::fputs(more, stdout);
}

bool parse_command(const std::string &word, options &out) {
    if (word == "chat") {
        out.what = command::chat;
    } else if (word == "complete") {
        out.what = command::complete;
    } else if (word == "batch") {
        out.what = command::batch;
    } else {
        return false;
    }
    return true;
}

void parse_flags(int argc, char **argv, options &out) {
    const std::vector<section> sections = all_flags(out);
    for (int i = 2; i < argc; ++i) {
        std::string word = argv[i], value;
        const size_t equals = word.rfind("--", 0) == 0 ? word.find('=') : std::string::npos;
        const bool joined = equals != std::string::npos;
        if (joined) {
            value = word.substr(equals + 1);
            word.resize(equals);
        }
        const flag *known = nullptr;
        for (const section &part : sections) {
            for (const flag &f : part.flags) {
                known = word == f.name ? &f : known;
            }
        }
        if (!known) {
            wrong("there is no flag '" + word + "'");
        }
        if (!known->value && joined) {
            wrong(word + " has no value");
        }
        if (known->value && !joined) {
            if (i + 1 >= argc) {
                wrong(word + " wants a value: " + known->value);
            }
            value = argv[++i];
        }
        known->set(value);
    }
}

void check_session(const options &o) {
    const std::string &name = o.session;
    if (name.empty()) {
        return;
    }
    if (o.disk.empty()) {
        wrong("--session needs --disk: that is where it is kept");
    }
    const char *letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    if (name.size() > 64 || name[0] == '.' || name.find_first_not_of(letters) != std::string::npos) {
        wrong("--session wants at most 64 letters, digits, '-', '_', '.', and no '.' first");
    }
}

void check(options &o) {
    if (o.model.empty()) {
        wrong("-m names no model");
    }
    const bool talks = o.what != command::complete;
    if (talks && o.prompt_given) {
        wrong("-p is for complete");
    }
    if (o.what == command::chat && !o.input.empty()) {
        wrong("-f is for complete and batch: chat reads standard input");
    }
    if (o.prompt_given && !o.input.empty()) {
        wrong("-p and -f are two prompts");
    }
    if (o.what != command::chat && !o.session.empty()) {
        wrong("--session is for chat");
    }
    if (!talks && (!o.system.empty() || !o.chat_template.empty())) {
        wrong("--system and --template are for chat and batch: complete takes the prompt as it is");
    }
    if (!o.kv && (!o.policy.empty() || !o.salt.empty())) {
        wrong("--no-kv has no use for --policy and --salt");
    }
    if (o.longer_tokens && (!o.kv || o.what == command::batch)) {
        wrong("--longer is for chat and complete, and not without kvtier");
    }
    check_session(o);
    if (o.threads == 0) {
        o.threads = std::max(1u, std::thread::hardware_concurrency());
    }
    if (!o.seed_given) {
        o.seed = std::random_device()();
    }
}

} // namespace

uint64_t parse_size(const std::string &flag, const std::string &text) {
    char *end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    std::string unit = end;
    for (char &letter : unit) {
        letter = (char) std::tolower((unsigned char) letter);
    }
    double factor = 0;
    const std::string powers = "kmgt";
    const size_t power = unit.empty() ? std::string::npos : powers.find(unit[0]);
    if (unit.empty() || unit == "b") {
        factor = 1;
    } else if (power != std::string::npos) {
        const std::string rest = unit.substr(1);
        const double base = rest == "b" ? 1000 : rest.empty() || rest == "ib" ? 1024 : 0;
        factor = base == 0 ? 0 : std::pow(base, (double) power + 1);
    }
    const bool digit = !text.empty() && text[0] >= '0' && text[0] <= '9';
    if (!digit || factor == 0 || !(number * factor >= 1) || !(number * factor < 9e18)) {
        wrong(flag + " wants a size such as 512MiB or 2GB, not '" + text + "'");
    }
    return (uint64_t) (number * factor);
}

bool parse_options(int argc, char **argv, options &out) {
    const std::string first = argc > 1 ? argv[1] : "";
    bool help = first == "help";
    for (int i = 1; i < argc; ++i) {
        help = help || std::strcmp(argv[i], "--help") == 0 || std::strcmp(argv[i], "-h") == 0;
    }
    if (help) {
        print_help();
        return false;
    }
    if (!parse_command(first, out)) {
        wrong(first.empty() ? "what is to be done: chat, complete or batch?"
                            : "'" + first + "' is none of chat, complete, batch");
    }
    parse_flags(argc, argv, out);
    check(out);
    return true;
}

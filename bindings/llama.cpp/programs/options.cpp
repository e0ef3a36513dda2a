// The command line: flags, sizes, and the text of --help.
#include "options.h"

#include "adapters.h"
#include "failure.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

namespace {

[[noreturn]] void usage_error(const std::string &text) {
    throw failure(exit_usage, text + " (see kvtier-llama --help)");
}

double parse_number(const std::string &flag, const std::string &text, double least, double most) {
    char *end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != 0 || !(value >= least && value <= most)) {
        char range[96];
        std::snprintf(range, sizeof range, "a number from %.12g to %.12g", least, most);
        usage_error(flag + " must be " + range + ", not '" + text + "'");
    }
    return value;
}

uint32_t parse_count(const std::string &flag, const std::string &text, double least, double most) {
    const double value = parse_number(flag, text, least, most);
    if (value != std::floor(value)) {
        usage_error(flag + " must be an integer, not '" + text + "'");
    }
    return (uint32_t) value;
}

struct flag {
    const char *name;
    const char *value; // placeholder in --help; null: the flag takes no value
    std::string help;
    std::function<void(const std::string &)> set;
};

struct section {
    const char *title;
    std::vector<flag> flags;
};

section kv_flags(options &o) {
    return {"KV tier", {
        {"--host", "SIZE", "limit of the host memory for KV (1GiB)",
         [&o](const std::string &v) { o.host_bytes = parse_size("--host", v); }},
        {"--disk", "DIR", "store KV in this directory, too: it survives the program, even a kill -9",
         [&o](const std::string &v) { o.disk = v; }},
        {"--disk-size", "SIZE", "limit of the KV in that directory (8GiB)",
         [&o](const std::string &v) { o.disk_bytes = parse_size("--disk-size", v); }},
        {"--policy", "SPEC", "eviction policy of the host memory, such as lru, s3fifo, horizon",
         [&o](const std::string &v) { o.policy = v; }},
        {"--salt", "TEXT", "KV is shared only with runs that give the same text",
         [&o](const std::string &v) { o.salt = v; }},
        {"--no-kv", nullptr, "run without kvtier, for comparison",
         [&o](const std::string &) { o.kv = false; }},
    }};
}

section model_flags(options &o) {
    return {"Model", {
        {"-m", "FILE", "the model, GGUF (required)", [&o](const std::string &v) { o.model = v; }},
        {"--ctx", "N", "tokens of the context (the trained length of the model, at most 4096)",
         [&o](const std::string &v) { o.ctx = parse_count("--ctx", v, 64, 1 << 24); }},
        {"--threads", "N", "compute threads (the number of cores)",
         [&o](const std::string &v) { o.threads = parse_count("--threads", v, 1, 512); }},
    }};
}

section answer_flags(options &o) {
    return {"Answers", {
        {"-n", "N", "limit of an answer, in tokens (512)",
         [&o](const std::string &v) { o.answer_tokens = parse_count("-n", v, 1, 1 << 24); }},
        {"--temp", "T", "temperature (0.8); 0 = always the most likely token",
         [&o](const std::string &v) { o.temp = (float) parse_number("--temp", v, 0, 10); }},
        {"--greedy", nullptr, "the same as --temp 0", [&o](const std::string &) { o.temp = 0; }},
        {"--seed", "N", "seed of the sampler (random)",
         [&o](const std::string &v) {
             o.seed = parse_count("--seed", v, 0, 4294967295.0);
             o.seed_given = true;
         }},
    }};
}

section input_flags(options &o) {
    return {"Input", {
        {"-p", "TEXT", "complete: the prompt",
         [&o](const std::string &v) { o.prompt = v, o.prompt_given = true; }},
        {"-f", "FILE", "complete: file with the prompt; batch: file with the requests; - = standard input "
         "(-)",
         [&o](const std::string &v) { o.input = v; }},
        {"--session", "NAME", "chat: name of a conversation that later runs continue; needs --disk",
         [&o](const std::string &v) { o.session = v; }},
        {"--system", "TEXT", "chat, batch: the system message",
         [&o](const std::string &v) { o.system = v; }},
        {"--template", "NAME", "chat, batch: a chat template of llama.cpp, instead of the model's",
         [&o](const std::string &v) { o.chat_template = v; }},
    }};
}

section output_flags(options &o) {
    return {"Output", {
        {"--json", nullptr, "JSON lines on standard output",
         [&o](const std::string &) { o.json = true; }},
        {"--quiet", nullptr, "print answers only: no progress bars, no table",
         [&o](const std::string &) { o.quiet = true; }},
    }};
}

std::vector<section> all_flags(options &o) {
    std::vector<section> sections = {model_flags(o), answer_flags(o), input_flags(o), kv_flags(o)};
    section adapters = {"Models and sequences larger than memory", {}};
    adapters.flags.push_back({"--longer", "N", longer_help(), [&o](const std::string &v) {
        o.longer_tokens = parse_count("--longer", v, 64, 1 << 24);
    }});
    adapters.flags.push_back({"--sparse", "SPEC", sparse_help(),
                              [&o](const std::string &v) { o.sparse = v; }});
    if (has_stream()) {
        adapters.flags.push_back({"--stream-budget", "SIZE", stream_help(), [&o](const std::string &v) {
            o.stream_bytes = parse_size("--stream-budget", v);
        }});
    }
    sections.push_back(adapters);
    sections.push_back(output_flags(o));
    return sections;
}

const char usage[] =
    "kvtier-llama: runs a language model with a KV cache that survives the context and the process\n"
    "\n"
    "  kvtier-llama chat     -m MODEL [--disk DIR --session NAME]    a conversation\n"
    "  kvtier-llama complete -m MODEL -p TEXT                        continues a text\n"
    "  kvtier-llama batch    -m MODEL -f REQUESTS [--json]           requests of many users\n";

const char more[] =
    "\n"
    "Sizes: 65536, 512KiB, 512MiB, 1.5GB. K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024.\n"
    "\n"
    "Requests (batch), one per line: 'anna: What is a river?' or JSON:\n"
    "  {\"user\": \"anna\", \"prompt\": \"What is a river?\", \"id\": \"any\", \"n\": 100}\n"
    "The requests of a user are one conversation. Their prompts must not contain control markers such as\n"
    "<|im_end|>. A request without a user continues its prompt; markers in it are control tokens.\n"
    "--json prints one line for each answer (type: answer) and error, and a summary at the end.\n"
    "\n"
    "Chat: /quit (or Ctrl-D) ends the program, /forget starts a new conversation, /stats shows the table,\n"
    "/help lists the commands.\n"
    "Ctrl-C ends the answer and saves its text and KV so far. A second Ctrl-C ends the program.\n"
    "\n"
    "Exit status: 0 success, 1 a request failed, 2 invalid flags, 3 the model cannot be loaded,\n"
    "4 the store cannot be used, 130 ended by a signal.\n";

// Wraps at 100 columns, with a hanging indent.
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
        out.action = command::chat;
    } else if (word == "complete") {
        out.action = command::complete;
    } else if (word == "batch") {
        out.action = command::batch;
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
            usage_error("unknown flag '" + word + "'");
        }
        if (!known->value && joined) {
            usage_error(word + " takes no value");
        }
        if (known->value && !joined) {
            if (i + 1 >= argc) {
                usage_error(word + " needs a value: " + known->value);
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
        usage_error("--session needs --disk, the directory for its transcript");
    }
    const char *letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    if (name.size() > 64 || name[0] == '.' || name.find_first_not_of(letters) != std::string::npos) {
        usage_error("--session must be 1 to 64 letters, digits, '-', '_' or '.', and must not begin with '.'; it "
                    "is '" + name + "'");
    }
}

void check(options &o) {
    if (o.model.empty()) {
        usage_error("no model is given: add -m FILE");
    }
    const bool chats = o.action != command::complete;
    if (chats && o.prompt_given) {
        usage_error("-p is for complete only");
    }
    if (o.action == command::chat && !o.input.empty()) {
        usage_error("-f is for complete and batch only: chat reads standard input");
    }
    if (o.prompt_given && !o.input.empty()) {
        usage_error("-p and -f both give a prompt: use one of them");
    }
    if (o.action != command::chat && !o.session.empty()) {
        usage_error("--session is for chat only");
    }
    if (!chats && (!o.system.empty() || !o.chat_template.empty())) {
        usage_error("--system and --template are for chat and batch only: complete uses the prompt "
                    "unchanged");
    }
    if (!o.kv && (!o.policy.empty() || !o.salt.empty())) {
        usage_error("--policy and --salt have no effect with --no-kv: remove one or the other");
    }
    if (o.longer_tokens && (!o.kv || o.action == command::batch)) {
        usage_error("--longer is for chat and complete only, and not with --no-kv");
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
        usage_error(flag + " must be a size such as 512MiB or 2GB, not '" + text + "'");
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
        usage_error(first.empty() ? "no command is given: use chat, complete or batch"
                            : "unknown command '" + first + "': use chat, complete or batch");
    }
    parse_flags(argc, argv, out);
    check(out);
    return true;
}

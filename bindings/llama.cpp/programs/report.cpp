// The closing table and the JSON summary.
#include "report.h"

#include <cstdio>
#include <string>

namespace {

double per_second(double count, double ns) {
    return ns > 0 ? count * 1e9 / ns : 0;
}

// One row of the table: label, tokens, bytes, time, rate. Bytes and time that are 0 stay blank.
std::string row(const char *what, uint64_t tokens, double bytes, double ns, bool rate) {
    char out[160], speed[32] = "";
    if (rate && ns > 0 && tokens > 0) {
        std::snprintf(speed, sizeof speed, "%.1f/s", per_second((double) tokens, ns));
    }
    std::snprintf(out, sizeof out, "  %-26s %9llu %10s %10s %10s", what, (unsigned long long) tokens,
                  bytes > 0 ? bytes_text(bytes).c_str() : "", ns > 0 ? time_text(ns).c_str() : "", speed);
    std::string line = out;
    line.erase(line.find_last_not_of(' ') + 1);
    return line + "\n";
}

std::string tier_row(const char *what, uint64_t used, uint64_t limit) {
    char out[160];
    std::snprintf(out, sizeof out, "  %-26s %s of %s\n", what, bytes_text((double) used).c_str(),
                  bytes_text((double) limit).c_str());
    return out;
}

} // namespace

void report::add(const answer_t &a) {
    ++answers_;
    prompt_ += a.prompt_tokens;
    kept_ += a.reused.kept;
    host_ += a.reused.host;
    disk_ += a.reused.disk;
    recomputed_ += a.reused.recomputed;
    restored_bytes_ += a.reused.bytes;
    restore_ns_ += (double) a.reused.ns;
    prefilled_ += a.prefilled;
    prefill_ns_ += a.prefill_ns;
    decoded_ += a.decoded;
    decode_ns_ += a.decode_ns;
    first_ns_ += a.first_ns;
}

void report::table(screen &out, const engine &e, const kv_cache &cache, bool kv) const {
    const cache_totals t = cache.totals();
    std::string all = "\n" + e.name() + ", " + bytes_text((double) e.model_bytes()) + ", context of " +
                      std::to_string(e.n_ctx()) + " tokens, loaded in " + time_text(e.load_ns) + "\n";
    all += "                                tokens      bytes       time       rate\n";
    all += row("prompts", prompt_, 0, 0, false);
    all += row("  resident in the context", kept_, 0, 0, false);
    if (kv) {
        const uint64_t restored = host_ + disk_;
        all += row("  restored from memory", host_, 0, 0, false);
        all += row("  restored from disk", disk_, 0, 0, false);
        all += row("  restored, total", restored, (double) restored_bytes_, restore_ns_, true);
        all += row("  holes recomputed", recomputed_, 0, 0, false);
    }
    all += row("  decoded", prefilled_, 0, prefill_ns_, true);
    all += row("answers", decoded_, 0, decode_ns_, true);
    if (kv) {
        all += row("saved", t.saved_tokens, (double) t.saved_bytes, (double) t.save_ns, false);
        all += tier_row("memory", t.host_bytes, t.host_limit_bytes);
        if (t.disk_limit_bytes) {
            all += tier_row("disk", t.disk_bytes, t.disk_limit_bytes);
        }
        char line[200];
        std::snprintf(line, sizeof line, "  %-26s %llu to disk, %llu dropped; %llu from disk\n",
                      "evicted chunks", (unsigned long long) t.to_disk_chunks,
                      (unsigned long long) t.dropped_chunks, (unsigned long long) t.disk_evicted_chunks);
        all += line;
        if (t.failed_saves || t.refused_restores) {
            std::snprintf(line, sizeof line, "  %-26s %llu saves failed, %llu restores refused\n",
                          "failures", (unsigned long long) t.failed_saves,
                          (unsigned long long) t.refused_restores);
            all += line;
        }
    }
    all += cache.rows();
    for (const auto &p : e.adapters()) {
        all += p->rows();
    }
    out.clear();
    std::fputs(all.c_str(), stderr);
}

void report::show(screen &out, const engine &e, const kv_cache &cache, bool kv) const {
    if (!out.json) {
        if (!out.quiet) {
            table(out, e, cache, kv);
        }
        return;
    }
    const cache_totals t = cache.totals();
    json_object line;
    line.text("type", "summary").flag("kv", kv).count("answers", answers_).count("failed", failed_);
    line.count("prompt_tokens", prompt_).count("kept_tokens", kept_).count("host_tokens", host_);
    line.count("disk_tokens", disk_).count("recomputed_tokens", recomputed_);
    line.count("prefilled_tokens", prefilled_).count("answer_tokens", decoded_);
    line.count("restored_bytes", restored_bytes_);
    line.number("load_ms", e.load_ns / 1e6).number("restore_ms", restore_ns_ / 1e6);
    line.number("prefill_ms", prefill_ns_ / 1e6).number("decode_ms", decode_ns_ / 1e6);
    line.number("first_token_ms", first_ns_ / 1e6);
    line.number("answer_tokens_per_s", per_second((double) decoded_, decode_ns_));
    if (kv) {
        line.count("saved_tokens", t.saved_tokens).count("saved_bytes", t.saved_bytes);
        line.number("save_ms", (double) t.save_ns / 1e6).count("host_bytes", t.host_bytes);
        line.count("host_limit_bytes", t.host_limit_bytes).count("disk_bytes", t.disk_bytes);
        line.count("disk_limit_bytes", t.disk_limit_bytes).count("chunks_to_disk", t.to_disk_chunks);
        line.count("chunks_dropped", t.dropped_chunks).count("chunks_left_disk", t.disk_evicted_chunks);
        line.count("failed_saves", t.failed_saves).count("refused_restores", t.refused_restores);
    }
    cache.fields(line);
    for (const auto &p : e.adapters()) {
        p->fields(line);
    }
    out.line(line);
}

json_object answer_line(const answer_t &a) {
    json_object line;
    line.text("type", "answer").text("text", a.text).text("stop", stop_text(a.stop));
    line.count("prompt_tokens", a.prompt_tokens).count("kept_tokens", a.reused.kept);
    line.count("host_tokens", a.reused.host).count("disk_tokens", a.reused.disk);
    line.count("recomputed_tokens", a.reused.recomputed).count("prefilled_tokens", a.prefilled);
    line.count("answer_tokens", a.decoded).count("restored_bytes", a.reused.bytes);
    line.number("restore_ms", (double) a.reused.ns / 1e6).number("prefill_ms", a.prefill_ns / 1e6);
    line.number("decode_ms", a.decode_ns / 1e6).number("first_token_ms", a.first_ns / 1e6);
    if (!a.reused.refused.empty()) {
        line.text("refused", a.reused.refused);
    }
    return line;
}

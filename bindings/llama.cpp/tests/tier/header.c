/* The header compiles as C, and every function refuses null arguments with a message. */
#include <kvtier/llama.h>

int main(void) {
    kvt_llama_tier_opts_t opts = KVT_LLAMA_TIER_OPTS_INIT;
    kvt_llama_tier_t *tier = NULL;
    kvt_llama_why_t why;
    kvt_llama_attached_t attached;
    kvt_llama_tier_stats_t stats;
    kvt_llama_media_t media = {0};
    kvt_llama_prompt_t prompt = {NULL, 0, NULL, 0};
    prompt.media = &media;
    opts.model_id = "none";
    opts.flags = KVT_LLAMA_HOLES;
    if (kvt_llama_tier_open(NULL, &opts, &tier, &why) != KVT_E_INVALID || !why.text[0] || tier) return 1;
    if (kvt_llama_tier_open(NULL, &opts, NULL, NULL) != KVT_E_INVALID) return 2;
    if (kvt_llama_attach(NULL, 0, NULL, 0, &attached, &why) != KVT_E_INVALID || !why.text[0]) return 3;
    if (kvt_llama_commit(NULL, 0, NULL, 0, NULL) != KVT_E_INVALID) return 4;
    if (kvt_llama_attach_prompt(NULL, 0, &prompt, &attached, &why) != KVT_E_INVALID || !why.text[0]) return 12;
    if (kvt_llama_commit_prompt(NULL, 0, NULL, NULL) != KVT_E_INVALID) return 13;
    if (kvt_llama_prefill(NULL, 0, NULL, 0, 0, NULL) != KVT_E_INVALID) return 5;
    if (kvt_llama_flush(NULL, 0, NULL) != KVT_E_INVALID) return 6;
    if (kvt_llama_forget(NULL, 0) != KVT_E_INVALID) return 7;
    if (kvt_llama_tier_stats(NULL, &stats) != KVT_E_INVALID) return 8;
    if (kvt_llama_tier_key(NULL, NULL) != KVT_E_INVALID) return 9;
    if (kvt_llama_tier_close(NULL, &why) != KVT_OK) return 10;
    return kvt_llama_tier_close(&tier, NULL) == KVT_OK ? 0 : 11;
}

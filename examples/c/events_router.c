/* events_router: requests go to the engine that has the longest prefix of their prompt.
 *
 *   events_router [SPEC OF A STORE]
 *
 * Two engines, each with a store. A router follows the events of both stores, keeps a table of the
 * chunks that each has in memory, and compares the chunk keys of each prompt with it. Here all run
 * in one process; examples/router does the same over Redis. */
#include "must.h"

enum { ENGINES = 2, LAYERS = 1, KV_HEADS = 1, HEAD_DIM = 16, CHUNK = 16, CHATS = 7, TURNS = 4, SYSTEM = 2 };
enum { TURN = 3 * CHUNK, MOST = SYSTEM * CHUNK + TURNS * TURN, CHUNKS = MOST / CHUNK, SLOTS = 1024 };

typedef struct { kvt_store_t *store; kvt_namespace_t *ns; uint64_t cursor, requests, tokens, reused; } engine_t;
typedef struct { uint8_t key[KVT_KEY_BYTES]; uint8_t engines; int is_used; } row_t; /* engines: a set of bits */

/* ---- the router ------------------------------------------------------------------------------------ */

static row_t table[SLOTS]; /* open addressing; keys are hashes. A real router bounds the keys that it keeps */

static row_t *find(const uint8_t key[KVT_KEY_BYTES]) {
    uint32_t slot = (key[0] | (uint32_t)key[1] << 8) % SLOTS;
    while (table[slot].is_used && memcmp(table[slot].key, key, KVT_KEY_BYTES) != 0) slot = (slot + 1) % SLOTS;
    return &table[slot];
}

/* Applies the events of an engine. A router that waits for them uses kvt_store_watch and a queue. */
static void follow(engine_t *engine, int number) {
    kvt_store_event_t events[64];
    uint64_t count = 0, missed = 0;
    do {
        MUST(kvt_store_events(engine->store, &engine->cursor, events, 64, sizeof *events, &count, &missed));
        CHECK(missed == 0); /* else forget this engine, and read its state by kvt_namespace_exists */
        for (uint64_t i = 0; i < count; i++) {
            if (events[i].kind == KVT_STORE_EVENT_CLEARED) /* the only namespace here is empty now */
                for (int slot = 0; slot < SLOTS; slot++) table[slot].engines &= (uint8_t)~(1 << number);
            if (events[i].tier != KVT_TIER_HOST) continue;
            row_t *row = find(events[i].key);
            memcpy(row->key, events[i].key, KVT_KEY_BYTES), row->is_used = 1;
            if (events[i].kind == KVT_STORE_EVENT_STORED) row->engines |= (uint8_t)(1 << number);
            if (events[i].kind == KVT_STORE_EVENT_REMOVED) row->engines &= (uint8_t)~(1 << number);
        }
    } while (count > 0);
}

/* Chooses an engine by the chunks that it has, less the requests that it served; writes those chunks. */
static int choose(engine_t engines[ENGINES], const uint32_t *prompt, uint64_t tokens, uint64_t *out_chunks) {
    uint8_t keys[CHUNKS][KVT_KEY_BYTES];
    uint64_t count = 0;
    int64_t best_score = INT64_MIN;
    kvt_sequence_t sequence = KVT_SEQUENCE_INIT;
    sequence.tokens = prompt, sequence.token_count = tokens;
    /* Equal identities and layouts give equal keys in every store: a router needs one namespace. */
    MUST(kvt_namespace_chunk_keys(engines[0].ns, &sequence, keys[0], CHUNKS, &count, &err));
    int best = 0;
    for (int i = 0; i < ENGINES; i++) {
        uint64_t chunks = 0;
        while (chunks < count && find(keys[chunks])->engines & 1 << i) chunks++;
        const int64_t score = (int64_t)chunks - (int64_t)engines[i].requests;
        if (score > best_score) best = i, best_score = score, *out_chunks = chunks;
    }
    return best;
}

/* ---- the engines ----------------------------------------------------------------------------------- */

static void open_engine(engine_t *engine, const char *spec) {
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    MUST(kvt_open(spec, KVT_NUL_TERMINATED, &engine->store, &err));
    MUST(kvt_layout_gqa(&layout, LAYERS, KV_HEADS, HEAD_DIM, KVT_DTYPE_F32, CHUNK, &err));
    MUST(kvt_namespace_open(engine->store, NULL, &layout, 0, &engine->ns, &err));
}

/* Serves a prompt: reuses what the store has, and puts the rest. */
static void serve(engine_t *engine, const uint32_t *prompt, uint32_t tokens) {
    kvt_session_t *session = NULL;
    kvt_lookup_t found = KVT_LOOKUP_INIT;
    MUST(kvt_namespace_lookup(engine->ns, prompt, tokens, NULL, 0, 0, NULL, &found, &err));
    MUST(kvt_session_open(engine->ns, NULL, &session, &err));
    MUST(kvt_session_append(session, prompt, tokens, &err));
    float kv[2][MOST][HEAD_DIM];
    const uint32_t reused = (uint32_t)found.reusable_tokens;
    for (uint32_t t = 0; t < tokens; t++) /* a stand-in for the model */
        for (int i = 0; i < HEAD_DIM; i++) kv[0][t][i] = (float)(prompt[t] + (uint32_t)i), kv[1][t][i] = -kv[0][t][i];
    float loaded[2][MOST][HEAD_DIM];
    for (int is_put = 0; is_put < 2; is_put++) {
        const uint32_t first = is_put ? reused : 0;
        kvt_view_t k, v;
        memset(&k, 0, sizeof k);
        k.run_bytes = HEAD_DIM * sizeof(float), v = k;
        k.address = is_put ? kv[0][first] : loaded[0][0], v.address = is_put ? kv[1][first] : loaded[1][0];
        kvt_transfer_t transfer = KVT_TRANSFER_INIT;
        transfer.first_token = first, transfer.tokens = is_put ? tokens - reused : reused;
        transfer.k = &k, transfer.v = &v, transfer.stride_bytes = sizeof k;
        if (transfer.tokens == 0) continue; /* 0 would mean: to the end */
        MUST((is_put ? kvt_session_put_wait : kvt_session_get_wait)(session, &transfer, NULL, &err));
    }
    for (int plane = 0; plane < 2; plane++) CHECK(memcmp(loaded[plane], kv[plane], reused * sizeof kv[0][0]) == 0);
    engine->requests++, engine->tokens += tokens, engine->reused += reused;
    MUST(kvt_session_close(&session));
}

static double run(const char *spec, int is_routed) {
    engine_t engines[ENGINES];
    memset(engines, 0, sizeof engines), memset(table, 0, sizeof table);
    for (int i = 0; i < ENGINES; i++) open_engine(&engines[i], spec);
    uint64_t tokens = 0, reused = 0, request = 0;
    for (uint32_t turn = 0; turn < TURNS; turn++)
        for (uint32_t chat = 0; chat < CHATS; chat++, request++) {
            uint32_t prompt[MOST];
            const uint32_t length = SYSTEM * CHUNK + (turn + 1) * TURN;
            for (uint32_t t = 0; t < length; t++) prompt[t] = t < SYSTEM * CHUNK ? t : 1000 * (chat + 1) + t;
            uint64_t chunks = 0;
            const int chosen = choose(engines, prompt, length, &chunks);
            const int to = is_routed ? chosen : (int)(request % ENGINES);
            const uint64_t before = engines[to].reused;
            serve(&engines[to], prompt, length);
            if (is_routed) CHECK(engines[to].reused - before == chunks * CHUNK); /* as the table says */
            for (int i = 0; i < ENGINES; i++) follow(&engines[i], i);
        }
    printf("%-12s", is_routed ? "by events:" : "in turn:");
    for (int i = 0; i < ENGINES; i++) {
        printf(" engine %d served %u requests,", i, (unsigned)engines[i].requests);
        tokens += engines[i].tokens, reused += engines[i].reused;
        MUST(kvt_namespace_close(&engines[i].ns));
        MUST(kvt_store_close(&engines[i].store, 0, &err));
    }
    printf(" %.1f %% of the tokens were reused\n", 100 * (double)reused / (double)tokens);
    return (double)reused / (double)tokens;
}

int main(int argc, char **argv) {
    const char *spec = argc > 1 ? argv[1] : "store(host=16MiB)";
    const double blind = run(spec, 0), routed = run(spec, 1);
    CHECK(routed > blind);
    return 0;
}

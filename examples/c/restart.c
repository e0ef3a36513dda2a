/* restart: KV survives kill -9.
 *
 *   restart [DIRECTORY]
 *
 * A child process puts the KV of a prompt durably. Then it puts the next tokens, chunk by chunk, and
 * is killed by SIGKILL in the middle. The parent opens the same directory, looks up the prompt, plans
 * which tokens to load and which to compute, does both, and compares every byte. */
#include "must.h"
#include <signal.h>
#include <sys/wait.h>

enum { LAYERS = 4, KV_HEADS = 2, HEAD_DIM = 64, CHUNK = 32, DURABLE = 4 * CHUNK, TOKENS = 64 * CHUNK };
typedef struct { uint16_t k[LAYERS][TOKENS][KV_HEADS][HEAD_DIM], v[LAYERS][TOKENS][KV_HEADS][HEAD_DIM]; } tensors_t;
static tensors_t computed, loaded; /* the engine's tensors: [layer][token][head][element] */
static uint32_t prompt[TOKENS];    /* token ids */

typedef struct { kvt_store_t *store; kvt_namespace_t *ns; kvt_session_t *session; } engine_t;

static engine_t open_engine(const char *directory) {
    engine_t engine = {NULL, NULL, NULL};
    char spec[4200];
    snprintf(spec, sizeof spec, "store(host=64MiB, write=through, disk=disk(path=\"%s/kv\", bytes=256MiB))", directory);
    MUST(kvt_open(spec, KVT_NUL_TERMINATED, &engine.store, &err));
    kvt_identity_t identity = KVT_IDENTITY_INIT; /* sessions of equal identity and layout share KV */
    identity.model = "restart-example", identity.model_bytes = strlen("restart-example");
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    MUST(kvt_layout_gqa(&layout, LAYERS, KV_HEADS, HEAD_DIM, KVT_DTYPE_F16, CHUNK, &err));
    MUST(kvt_namespace_open(engine.store, &identity, &layout, 0, &engine.ns, &err));
    MUST(kvt_session_open(engine.ns, NULL, &engine.session, &err));
    return engine;
}

static void close_engine(engine_t *engine) {
    MUST(kvt_session_close(&engine->session));
    MUST(kvt_namespace_close(&engine->ns));
    MUST(kvt_store_close(&engine->store, 0, &err)); /* also closes the runtime that kvt_open made */
}

/* A transfer of tokens of all layers. Its views begin with the first of these tokens. */
static kvt_transfer_t transfer_of(tensors_t *kv, kvt_view_t views[2][LAYERS], uint32_t first, uint32_t tokens) {
    memset(views, 0, 2 * sizeof *views); /* strides of 0: no gaps */
    for (int layer = 0; layer < LAYERS; layer++) {
        views[0][layer].address = kv->k[layer][first];
        views[1][layer].address = kv->v[layer][first];
        for (int plane = 0; plane < 2; plane++) {
            views[plane][layer].tokens = tokens;
            views[plane][layer].heads = KV_HEADS;
            views[plane][layer].run_bytes = HEAD_DIM * sizeof(uint16_t);
        }
    }
    kvt_transfer_t transfer = KVT_TRANSFER_INIT;
    transfer.first_token = first, transfer.tokens = tokens;
    transfer.k = views[0], transfer.v = views[1], transfer.stride_bytes = sizeof(kvt_view_t);
    return transfer;
}

/* The child: puts until it is killed. It opens the library itself: handles do not survive a fork. */
static void put_until_killed(const char *directory, int progress) {
    kvt_view_t views[2][LAYERS];
    engine_t engine = open_engine(directory);
    MUST(kvt_session_append(engine.session, prompt, DURABLE, &err));
    kvt_transfer_t transfer = transfer_of(&computed, views, 0, DURABLE);
    transfer.level = KVT_LEVEL_DURABLE; /* completes when the bytes survive a crash of the machine */
    MUST(kvt_session_put_wait(engine.session, &transfer, NULL, &err));
    for (uint32_t first = DURABLE; write(progress, "p", 1) == 1 && first < TOKENS; first += CHUNK) {
        MUST(kvt_session_append(engine.session, prompt + first, CHUNK, &err));
        transfer = transfer_of(&computed, views, first, CHUNK);
        kvt_op_t *op = NULL; /* never waited for, never freed: the process does not live that long */
        MUST(kvt_session_put(engine.session, &transfer, NULL, &op, &err));
    }
    pause();
}

int main(int argc, char **argv) {
    const char *directory = work_directory(argc > 1 ? argv[1] : NULL);
    for (uint32_t i = 0; i < TOKENS; i++) prompt[i] = 1000 + i;
    for (size_t i = 0; i < sizeof computed; i++) ((uint8_t *)&computed)[i] = (uint8_t)(i * 31 >> 3 ^ i >> 11);

    int pipe_ends[2];
    char progress;
    if (pipe(pipe_ends) != 0) return perror("pipe"), 1;
    const pid_t child = fork();
    if (child < 0) return perror("fork"), 1;
    if (child == 0) put_until_killed(directory, pipe_ends[1]);
    close(pipe_ends[1]);
    int puts = 0; /* that the child has submitted */
    while (puts < 10 && read(pipe_ends[0], &progress, 1) == 1) puts++;
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(pipe_ends[0]);
    CHECK(puts == 10); /* else the child failed, and printed why */

    engine_t engine = open_engine(directory);
    kvt_lookup_t found = KVT_LOOKUP_INIT;
    MUST(kvt_namespace_lookup(engine.ns, prompt, TOKENS, NULL, 0, 0, NULL, &found, &err));
    printf("%u tokens were put durably, at least %u more were on their way when the process was killed\n", DURABLE,
           (puts - 1) * CHUNK);
    printf("%u tokens survived, %u KiB on disk\n", (unsigned)found.reusable_tokens, (unsigned)(found.disk_bytes >> 10));
    CHECK(found.reusable_tokens >= DURABLE);

    MUST(kvt_session_append(engine.session, prompt, TOKENS, &err));
    kvt_plan_terms_t terms = KVT_PLAN_TERMS_INIT;
    terms.flags = KVT_PLAN_COST, terms.beta_ns = 1e8; /* 100 ms to compute a token; an engine measures it */
    kvt_plan_step_t steps[8];
    uint64_t count = 0, from_store = 0;
    MUST(kvt_session_plan(engine.session, &terms, steps, 8, sizeof *steps, &count, NULL, &err));
    for (uint64_t i = 0; i < count; i++) {
        const uint32_t first = (uint32_t)steps[i].first_token, tokens = (uint32_t)steps[i].tokens;
        if (steps[i].kind == KVT_PLAN_LOAD) {
            kvt_view_t views[2][LAYERS];
            kvt_transfer_t transfer = transfer_of(&loaded, views, first, tokens);
            transfer.flags = KVT_TRANSFER_NEEDED_ONLY;
            MUST(kvt_session_get_wait(engine.session, &transfer, NULL, &err));
            from_store += tokens;
        } else if (steps[i].kind == KVT_PLAN_RECOMPUTE) {
            for (int layer = 0; layer < LAYERS; layer++) { /* the model would run here */
                memcpy(loaded.k[layer][first], computed.k[layer][first], tokens * sizeof loaded.k[0][0]);
                memcpy(loaded.v[layer][first], computed.v[layer][first], tokens * sizeof loaded.v[0][0]);
            }
        }
        printf("plan: %s %u tokens from %u on\n", steps[i].kind == KVT_PLAN_LOAD ? "load" : "compute", tokens, first);
    }
    CHECK(from_store > 0 && memcmp(&loaded, &computed, sizeof loaded) == 0);
    printf("every byte is right\n");
    close_engine(&engine);
    return 0;
}

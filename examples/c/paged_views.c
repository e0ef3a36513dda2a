/* paged_views: a store copies from and to the caches of engines, whatever their shape.
 *
 *   paged_views [SPEC OF A STORE]
 *
 * Three caches hold a sequence: two paged shapes of vLLM, and that of llama.cpp with V transposed.
 * The program puts a sequence from each of them, gets it into each of them, and compares. */
#include "must.h"

enum { LAYERS = 3, KV_HEADS = 4, HEAD_DIM = 32, CHUNK = 32, TOKENS = 5 * CHUNK, EMBD = KV_HEADS * HEAD_DIM };
enum { PAGE = 16, PAGES = 24, PAGE_ELEMENTS = PAGE * EMBD, CELLS = 256 };
enum { KV_OUTSIDE, KV_INSIDE, ROWS_AND_COLUMNS, SHAPES, PLANE = CELLS * EMBD }; /* a plane fits into all shapes */
static const char *const names[SHAPES] = {"[2][pages][16][heads][dim]", "[pages][2][16][heads][dim]",
                                          "K [cells][embd], V [embd][cells]"};
typedef uint16_t f16;
typedef struct {
    int shape;
    f16 memory[LAYERS][2 * PAGES * PAGE_ELEMENTS > 2 * PLANE ? 2 * PAGES * PAGE_ELEMENTS : 2 * PLANE];
    uint32_t table[TOKENS / PAGE]; /* pages of the sequence, in the order of its tokens */
    uint32_t cells[TOKENS];        /* cells of the sequence */
    void *places[TOKENS];          /* addresses for the library: of pages, or of K's cells in layer 0 */
    void *columns[TOKENS];         /* of V's cells in layer 0 */
    kvt_view_t k[LAYERS], v[LAYERS];
} cache_t;

/* Describes the cache to the library. One table of addresses serves all layers: `shift_bytes` is added. */
static void describe(cache_t *cache) {
    f16 *const start = cache->memory[0];
    const int64_t layer_bytes = sizeof cache->memory[0];
    memset(cache->k, 0, sizeof cache->k), memset(cache->v, 0, sizeof cache->v);
    for (int i = 0; i < TOKENS / PAGE; i++) {
        const uint32_t page = cache->table[i];
        if (cache->shape == KV_OUTSIDE) cache->places[i] = start + page * PAGE_ELEMENTS;
        if (cache->shape == KV_INSIDE) cache->places[i] = start + page * 2 * PAGE_ELEMENTS;
    }
    for (int t = 0; cache->shape == ROWS_AND_COLUMNS && t < TOKENS; t++) {
        cache->places[t] = start + cache->cells[t] * EMBD;
        cache->columns[t] = start + PLANE + cache->cells[t];
    }
    for (int layer = 0; layer < LAYERS; layer++) {
        kvt_view_t *k = &cache->k[layer], *v = &cache->v[layer];
        k->pages = cache->places, k->page_count = TOKENS / PAGE, k->page_tokens = PAGE;
        k->heads = KV_HEADS, k->run_bytes = HEAD_DIM * sizeof(f16); /* strides of 0: no gaps in a page */
        k->shift_bytes = layer * layer_bytes;
        *v = *k;
        if (cache->shape == KV_OUTSIDE) v->shift_bytes += PAGES * PAGE_ELEMENTS * (int64_t)sizeof(f16);
        if (cache->shape == KV_INSIDE) v->shift_bytes += PAGE_ELEMENTS * (int64_t)sizeof(f16);
        if (cache->shape != ROWS_AND_COLUMNS) continue;
        k->page_count = v->page_count = TOKENS, k->page_tokens = v->page_tokens = 1; /* cells may lie anywhere */
        v->pages = cache->columns;
        v->heads = EMBD, v->run_bytes = sizeof(f16); /* transposed: each element is a head ... */
        v->head_stride_bytes = CELLS * sizeof(f16);  /* ... and the next one is a whole row away */
    }
}

/* Address of an element, computed as the engine does. */
static f16 *element(cache_t *cache, int layer, int is_v, int token, int i) {
    const uint32_t page = cache->table[token / PAGE], at = (uint32_t)(token % PAGE * EMBD + i);
    f16 *const memory = cache->memory[layer];
    if (cache->shape == KV_OUTSIDE) return memory + (is_v * PAGES + (int)page) * PAGE_ELEMENTS + at;
    if (cache->shape == KV_INSIDE) return memory + ((int)page * 2 + is_v) * PAGE_ELEMENTS + at;
    if (is_v) return memory + PLANE + i * CELLS + cache->cells[token];
    return memory + cache->cells[token] * EMBD + i;
}

/* Empties a cache and gives the sequence new pages and cells. */
static void reset(cache_t *cache, int shape, uint32_t first) {
    memset(cache, 0xff, sizeof *cache);
    cache->shape = shape;
    for (uint32_t i = 0; i < TOKENS / PAGE; i++) cache->table[i] = (first + i * 7) % PAGES;
    for (uint32_t t = 0; t < TOKENS; t++) cache->cells[t] = (first + t * 3) % CELLS;
    describe(cache);
}

static f16 value(int source, int layer, int is_v, int token, int i) {
    return (f16)(source * 31 + layer * 1009 + is_v * 20011 + token * 131 + i * 7);
}

int main(int argc, char **argv) {
    static cache_t from, to;
    kvt_store_t *store = NULL;
    kvt_namespace_t *ns = NULL;
    kvt_layout_t layout = KVT_LAYOUT_INIT;
    MUST(kvt_open(argc > 1 ? argv[1] : "store(host=64MiB)", KVT_NUL_TERMINATED, &store, &err));
    MUST(kvt_layout_gqa(&layout, LAYERS, KV_HEADS, HEAD_DIM, KVT_DTYPE_F16, CHUNK, &err)); /* says nothing about shapes */
    MUST(kvt_namespace_open(store, NULL, &layout, 0, &ns, &err));

    for (int source = 0; source < SHAPES; source++) {
        kvt_session_t *session = NULL;
        uint32_t tokens[TOKENS]; /* other tokens for each source: equal tokens have equal KV, which is stored once */
        for (uint32_t t = 0; t < TOKENS; t++) tokens[t] = 1000 * (uint32_t)source + t;
        MUST(kvt_session_open(ns, NULL, &session, &err));
        MUST(kvt_session_append(session, tokens, TOKENS, &err));
        reset(&from, source, 5);
        for (int layer = 0; layer < LAYERS; layer++)
            for (int plane = 0; plane < 2; plane++)
                for (int t = 0; t < TOKENS; t++)
                    for (int i = 0; i < EMBD; i++)
                        *element(&from, layer, plane, t, i) = value(source, layer, plane, t, i);
        kvt_transfer_t transfer = KVT_TRANSFER_INIT;
        transfer.tokens = TOKENS;
        transfer.k = from.k, transfer.v = from.v, transfer.stride_bytes = sizeof from.k[0];
        MUST(kvt_session_put_wait(session, &transfer, NULL, &err));

        for (int target = 0; target < SHAPES; target++) {
            reset(&to, target, 2);
            transfer.k = to.k, transfer.v = to.v;
            MUST(kvt_session_get_wait(session, &transfer, NULL, &err));
            int wrong = 0;
            for (int layer = 0; layer < LAYERS; layer++)
                for (int plane = 0; plane < 2; plane++)
                    for (int t = 0; t < TOKENS; t++)
                        for (int i = 0; i < EMBD; i++)
                            wrong += *element(&to, layer, plane, t, i) != value(source, layer, plane, t, i);
            printf("%-32s -> %-32s %s\n", names[source], names[target], wrong ? "WRONG" : "equal");
            CHECK(wrong == 0);
        }
        MUST(kvt_session_close(&session));
    }
    MUST(kvt_namespace_close(&ns));
    MUST(kvt_store_close(&store, 0, &err));
    return 0;
}

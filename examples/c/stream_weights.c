/* stream_weights: a model that is larger than the memory for its weights.
 *
 *   stream_weights [MIB OF MEMORY [DIRECTORY]]     default: 6 MiB, for a model of 16 MiB
 *
 * Writes a safetensors file, opens it as a model, and runs passes over its units as an engine does:
 * acquire a unit, use its tensors where they are, release it. Some units stay resident; the others
 * pass through slots, read ahead of their use. The checksum of every tensor is compared. */
#include "must.h"

enum { LAYERS = 12, PASSES = 3, TENSORS = 3 + 2 * LAYERS };
enum { UP_BYTES = 1 << 20, NORM_BYTES = 4096, EMBED_BYTES = 2 << 20 };
static uint64_t written_sums[TENSORS]; /* by order in the file */
static uint64_t model_bytes;

/* ---- a safetensors file: 8 bytes with the length of the header, the header in JSON, the tensors ---- */

static void describe_tensor(char *header, const char *name, uint64_t bytes, uint64_t *end) {
    snprintf(header + strlen(header), 256, "%s\"%s\":{\"dtype\":\"F16\",\"shape\":[%u],\"data_offsets\":[%u,%u]}",
             *end > 0 ? "," : "{", name, (unsigned)(bytes / 2), (unsigned)*end, (unsigned)(*end + bytes));
    *end += bytes;
}

static void write_tensor(FILE *file, uint64_t bytes, int number) {
    static uint8_t data[EMBED_BYTES];
    for (uint64_t i = 0; i < bytes; i++) data[i] = (uint8_t)((i * 2654435761u >> 11) + (uint64_t)number * 77);
    MUST(kvt_checksum(data, bytes, &written_sums[number]));
    if (fwrite(data, 1, bytes, file) != bytes) perror("writing the model"), exit(1);
    model_bytes += bytes;
}

static void write_model(const char *path) {
    static char header[1 << 14];
    uint64_t end = 0;
    describe_tensor(header, "model.embed_tokens.weight", EMBED_BYTES, &end);
    for (int layer = 0; layer < LAYERS; layer++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", layer);
        describe_tensor(header, name, NORM_BYTES, &end);
        snprintf(name, sizeof name, "model.layers.%d.mlp.up_proj.weight", layer);
        describe_tensor(header, name, UP_BYTES, &end);
    }
    describe_tensor(header, "model.norm.weight", NORM_BYTES, &end);
    describe_tensor(header, "lm_head.weight", EMBED_BYTES, &end);
    strcat(header, "}");
    while (strlen(header) % 8 != 0) strcat(header, " ");
    FILE *file = fopen(path, "wb");
    if (file == NULL) perror(path), exit(1);
    const uint64_t length = strlen(header);
    uint8_t prefix[8];
    for (int i = 0; i < 8; i++) prefix[i] = (uint8_t)(length >> 8 * i);
    fwrite(prefix, 1, sizeof prefix, file);
    fwrite(header, 1, length, file);
    int number = 0;
    write_tensor(file, EMBED_BYTES, number++);
    for (int layer = 0; layer < LAYERS; layer++) {
        write_tensor(file, NORM_BYTES, number++);
        write_tensor(file, UP_BYTES, number++);
    }
    write_tensor(file, NORM_BYTES, number++);
    write_tensor(file, EMBED_BYTES, number++);
    if (fclose(file) != 0) perror(path), exit(1);
}

/* ---- the engine ------------------------------------------------------------------------------------ */

/* Uses the tensors of a unit. An engine would multiply with them; this one compares their checksums. */
static void use_unit(const kvt_model_t *model, const kvt_unit_lease_t *lease) {
    kvt_part_t parts[8]; /* in order of their offsets in the unit; an engine reads them once */
    uint64_t count = 0, sum = 0;
    MUST(kvt_model_unit_parts(model, lease->unit, parts, 8, sizeof *parts, &count));
    for (uint64_t i = 0; i < count; i++) {
        MUST(kvt_checksum((const uint8_t *)lease->address + parts[i].at, parts[i].bytes, &sum));
        CHECK(sum == written_sums[parts[i].tensor]); /* tensors have the order of the file */
    }
}

int main(int argc, char **argv) {
    const uint64_t memory_bytes = (argc > 1 ? strtoull(argv[1], NULL, 10) : 6) << 20;
    char path[4096];
    snprintf(path, sizeof path, "%s/model.safetensors", work_directory(argc > 2 ? argv[2] : NULL));
    write_model(path);

    kvt_runtime_t *runtime = NULL;
    kvt_model_t *model = NULL;
    kvt_stream_t *stream = NULL;
    const kvt_str_t file = {path, KVT_NUL_TERMINATED};
    kvt_model_info_t info = KVT_MODEL_INFO_INIT;
    MUST(kvt_model_open(&file, 1, sizeof file, &model, &err)); /* reads the header */
    MUST(kvt_model_info(model, &info));
    CHECK(info.bytes == model_bytes && info.tensors == TENSORS);

    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    terms.flags = KVT_TERMS_HOST_CEILING | KVT_TERMS_HOST_RESERVE | KVT_TERMS_KV; /* use these fields, also if 0 */
    terms.host_ceiling_bytes = memory_bytes;
    kvt_stream_opts_t opts = KVT_STREAM_OPTS_INIT;
    opts.model = model, opts.terms = &terms;
    MUST(kvt_runtime_open(NULL, &runtime, &err));
    MUST(kvt_stream_open(runtime, &opts, &stream, &err));
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    MUST(kvt_stream_plan(stream, &plan, NULL, NULL, 0, sizeof(kvt_unit_residency_t)));
    printf("model: %u units, %.1f MiB. memory: %.1f MiB. resident: %u units, the others share %u slots of %.1f MiB\n",
           info.units, (double)info.bytes / (1 << 20), (double)memory_bytes / (1 << 20), plan.host_units, plan.slots,
           (double)plan.slot_bytes / (1 << 20));
    CHECK(plan.host_bytes <= memory_bytes);

    for (int pass = 1; pass <= PASSES; pass++) {
        kvt_stream_stats_t before = KVT_STREAM_STATS_INIT, after = KVT_STREAM_STATS_INIT;
        MUST(kvt_stream_stats(stream, &before));
        MUST(kvt_stream_pass_begin(stream, &err));
        for (uint32_t unit = 0; unit < info.units; unit++) { /* units have the order of a pass */
            kvt_unit_lease_t lease = KVT_UNIT_LEASE_INIT;
            MUST(kvt_stream_acquire(stream, unit, 0, 0, &lease, &err)); /* waits until it is loaded */
            use_unit(model, &lease);
            MUST(kvt_stream_release(stream, &lease, 0, &err));
        }
        MUST(kvt_stream_pass_end(stream, &err)); /* begins to read for the next pass */
        MUST(kvt_stream_stats(stream, &after));
        printf("pass %d: every tensor is right; %.1f MiB read from the file during the pass\n", pass,
               (double)(after.read_bytes - before.read_bytes) / (1 << 20));
    }
    MUST(kvt_stream_close(&stream, 0, &err));
    MUST(kvt_model_close(&model));
    MUST(kvt_runtime_close(&runtime, 0, NULL, &err));
    return 0;
}

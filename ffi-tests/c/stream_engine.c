/* Tests of weight streaming for a model larger than memory. The engine inspects the model's files,
 * requests a plan, acquires units in the order of computation and releases them, while the budget
 * shrinks and grows. Every byte is compared with the file. */

#include "check.h"

#include <fcntl.h>
#include <sys/stat.h>

#define LAYERS 6
#define EXPERTS 4
#define MAX_TENSORS 64
#define MAX_UNITS 32
#define GRANULARITY 4096


static kvt_runtime_t *runtime;
static char folder[] = "/tmp/kvt-stream-XXXXXX";
static char file_path[64], other_path[64], sums_path[64];
static uint64_t seed = 99;

/* Contents of the model file. */
static uint8_t *image;
static uint64_t image_bytes;

static kvt_model_t *model;
static kvt_model_info_t info = KVT_MODEL_INFO_INIT;
static kvt_part_t parts[MAX_UNITS][MAX_TENSORS];
static uint64_t part_count[MAX_UNITS];
static uint64_t tensor_offset[MAX_TENSORS];
static uint64_t model_image_bytes;
static uint32_t layer_unit[LAYERS], expert_unit[LAYERS][EXPERTS];

/* ---- a model in a file ---------------------------------------------------- */

typedef struct {
    char header[16384];
    size_t length;
    uint64_t end;
} writer_t;

static void add_tensor(writer_t *writer, const char *name, uint64_t bytes) {
    writer->length += (size_t)snprintf(
        writer->header + writer->length, sizeof writer->header - writer->length,
        "%s\"%s\":{\"dtype\":\"F16\",\"shape\":[%" PRIu64 "],\"data_offsets\":[%" PRIu64 ",%" PRIu64
        "]}",
        writer->length > 1 ? "," : "", name, bytes / 2, writer->end, writer->end + bytes);
    CHECK(writer->length < sizeof writer->header);
    writer->end += bytes;
}

static void write_all(const char *path, const void *data, uint64_t bytes) {
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    CHECK(fwrite(data, 1, bytes, file) == bytes);
    CHECK(fclose(file) == 0);
}

static void write_model(void) {
    writer_t *writer = calloc(1, sizeof *writer);
    CHECK(writer != NULL);
    writer->header[0] = '{';
    writer->length = 1;
    char name[128];
    add_tensor(writer, "model.embed_tokens.weight", 80000);
    for (int layer = 0; layer < LAYERS; layer++) {
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", layer);
        add_tensor(writer, name, 514);
        snprintf(name, sizeof name, "model.layers.%d.self_attn.q_proj.weight", layer);
        add_tensor(writer, name, layer == 3 ? 79000 : 70000);
        for (int expert = 0; (layer == 2 || layer == 4) && expert < EXPERTS; expert++) {
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.up_proj.weight", layer,
                     expert);
            add_tensor(writer, name, 41000);
        }
    }
    add_tensor(writer, "model.norm.weight", 256);
    add_tensor(writer, "lm_head.weight", 90000);
    writer->header[writer->length++] = '}';
    while (writer->length % 8 != 0) writer->header[writer->length++] = ' ';
    image_bytes = 8 + writer->length + writer->end;
    image = malloc(image_bytes);
    CHECK(image != NULL);
    for (int i = 0; i < 8; i++) image[i] = (uint8_t)((uint64_t)writer->length >> (8 * i));
    memcpy(image + 8, writer->header, writer->length);
    for (uint64_t i = 8 + writer->length; i < image_bytes; i++)
        image[i] = (uint8_t)next_random(&seed);
    free(writer);
    write_all(file_path, image, image_bytes);
}

static kvt_str_t as_text(const char *text) {
    const kvt_str_t value = {text, strlen(text)};
    return value;
}

static kvt_model_t *open_model(const char *path) {
    const kvt_str_t text = as_text(path);
    kvt_model_t *opened = NULL;
    CHECK_OK(kvt_model_open(&text, 1, sizeof text, &opened, NULL));
    CHECK(opened != NULL);
    return opened;
}

static void learn_model(void) {
    model = open_model(file_path);
    CHECK_OK(kvt_model_info(model, &info));
    CHECK_EQ(info.format, KVT_FORMAT_SAFETENSORS);
    CHECK_EQ(info.files, 1);
    CHECK_EQ(info.tensors, 1 + 2 * LAYERS + 2 * EXPERTS + 2);
    CHECK_EQ(info.units, 1 + LAYERS + 2 * EXPERTS + 2);
    kvt_model_file_t file = KVT_MODEL_FILE_INIT;
    CHECK_OK(kvt_model_file(model, 0, &file));
    CHECK_EQ(file.bytes, image_bytes);
    CHECK(file.path_bytes == strlen(file_path));
    CHECK(memcmp(file.path, file_path, file.path_bytes) == 0);
    CHECK_IS(kvt_model_file(model, 1, &file), KVT_E_INVALID);

    uint64_t sum = 0;
    for (uint32_t i = 0; i < info.tensors; i++) {
        kvt_tensor_t tensor = KVT_TENSOR_INIT;
        CHECK_OK(kvt_model_tensor(model, i, &tensor));
        CHECK_EQ(tensor.file, 0);
        CHECK_EQ(tensor.parts, 1);
        CHECK_EQ(tensor.dim_count, 1);
        CHECK_EQ(tensor.dims[0] * 2, tensor.bytes);
        CHECK(tensor.dtype_bytes == 3 && memcmp(tensor.dtype, "F16", 3) == 0);
        CHECK(tensor.offset + tensor.bytes <= image_bytes);
        tensor_offset[i] = tensor.offset;
        sum += tensor.bytes;
        uint32_t found = KVT_NONE;
        CHECK_OK(kvt_model_find_tensor(model, tensor.name, tensor.name_bytes, &found));
        CHECK_EQ(found, i);
        kvt_part_t part;
        uint64_t count = 0;
        CHECK_OK(kvt_model_tensor_parts(model, i, &part, 1, sizeof part, &count));
        CHECK_EQ(count, 1);
        CHECK_EQ(part.tensor, i);
        CHECK_EQ(part.bytes, tensor.bytes);
    }
    CHECK_EQ(sum, info.bytes);
    uint32_t found = 7;
    CHECK_IS(kvt_model_find_tensor(model, "model.nothing", 13, &found), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_model_find_unit(model, LAYERS, KVT_NONE, &found), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_model_find_unit(model, 0, 0, &found), KVT_E_NOT_FOUND);
    CHECK_EQ(found, 7);

    CHECK(info.units <= MAX_UNITS);
    for (uint32_t i = 0; i < info.units; i++) {
        kvt_unit_t unit = KVT_UNIT_INIT;
        CHECK_OK(kvt_model_unit(model, i, &unit));
        CHECK_EQ(unit.image_bytes % GRANULARITY, 0);
        model_image_bytes += unit.image_bytes;
        CHECK_IS(kvt_model_unit_parts(model, i, parts[i], 0, sizeof(kvt_part_t), &part_count[i]),
                 KVT_E_TOO_SMALL);
        CHECK_EQ(part_count[i], unit.parts);
        CHECK_OK(kvt_model_unit_parts(model, i, NULL, 0, sizeof(kvt_part_t), &part_count[i]));
        CHECK_OK(kvt_model_unit_parts(model, i, parts[i], MAX_TENSORS, sizeof(kvt_part_t),
                                      &part_count[i]));
        for (uint64_t p = 0; p < part_count[i]; p++)
            CHECK(parts[i][p].at + parts[i][p].bytes <= unit.image_bytes);
        if (unit.role == KVT_ROLE_LAYER) layer_unit[unit.layer] = i;
        if (unit.role == KVT_ROLE_EXPERT) expert_unit[unit.layer][unit.expert] = i;
        CHECK((unit.role == KVT_ROLE_EMBEDDING) == (i == 0));
        CHECK((unit.role == KVT_ROLE_HEAD) == (i == info.units - 1));
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        CHECK_OK(kvt_model_find_unit(model, layer, KVT_NONE, &found));
        CHECK_EQ(found, layer_unit[layer]);
    }
    CHECK_OK(kvt_model_find_unit(model, 4, 3, &found));
    CHECK_EQ(found, expert_unit[4][3]);
    kvt_unit_t unit = KVT_UNIT_INIT;
    CHECK_IS(kvt_model_unit(model, info.units, &unit), KVT_E_INVALID);
    kvt_tensor_t tensor = KVT_TENSOR_INIT;
    CHECK_IS(kvt_model_tensor(model, info.tensors, &tensor), KVT_E_INVALID);
}

static void check_bad_models(void) {
    kvt_model_t *none = NULL;
    kvt_error_t *error = NULL;
    kvt_str_t text = as_text(other_path);
    CHECK_IS(kvt_model_open(&text, 1, sizeof text, &none, NULL), KVT_E_NOT_FOUND);
    write_all(other_path, image, image_bytes / 2);
    CHECK_IS(kvt_model_open(&text, 1, sizeof text, &none, &error), KVT_E_CORRUPT);
    CHECK(strlen(kvt_error_message(error)) > 10);
    write_all(other_path, "what is this?", 13);
    CHECK(kvt_model_open(&text, 1, sizeof text, &none, NULL) < 0);
    text.bytes = 0;
    CHECK_IS(kvt_model_open(&text, 1, sizeof text, &none, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_model_open(NULL, 1, sizeof text, &none, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_model_open(NULL, 0, sizeof text, &none, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_model_open(&text, 1, 12, &none, NULL), KVT_E_INVALID);
    CHECK(none == NULL);
    CHECK_OK(kvt_error_free(&error));
    CHECK(unlink(other_path) == 0);

    kvt_model_t *closed = open_model(file_path);
    kvt_model_t *const stale = closed;
    CHECK_OK(kvt_model_close(&closed));
    CHECK(closed == NULL);
    kvt_model_info_t nothing = KVT_MODEL_INFO_INIT;
    CHECK_IS(kvt_model_info(stale, &nothing), KVT_E_HANDLE);
    CHECK_IS(kvt_model_info((const kvt_model_t *)runtime, &nothing), KVT_E_HANDLE);
}

/* ---- plans ---------------------------------------------------------------- */

static char *plan_describe(const kvt_stream_terms_t *terms, const kvt_stream_memory_t *memory,
                        uint32_t kind) {
    uint64_t bytes = 0;
    CHECK_OK(kvt_model_plan_describe(model, terms, memory, kind, NULL, 0, &bytes, NULL));
    char *words = calloc(1, bytes + 1);
    CHECK(words != NULL && bytes > 0);
    CHECK_IS(kvt_model_plan_describe(model, terms, memory, kind, words, bytes - 1, &bytes, NULL),
             KVT_E_TOO_SMALL);
    CHECK_OK(kvt_model_plan_describe(model, terms, memory, kind, words, bytes, &bytes, NULL));
    return words;
}

static void check_plans(void) {
    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    kvt_stream_memory_t memory = KVT_STREAM_MEMORY_INIT;
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    kvt_forecast_t forecast = KVT_FORECAST_INIT;
    kvt_unit_residency_t residency[MAX_UNITS];
    memory.host_free_bytes = memory.host_total_bytes = UINT64_C(1) << 40;
    memory.lockable_bytes = UINT64_MAX;
    CHECK_OK(kvt_model_plan(model, &terms, &memory, &plan, &forecast, residency, MAX_UNITS,
                            sizeof *residency, NULL));
    CHECK_EQ(plan.compute, KVT_COMPUTE_HOST);
    CHECK_EQ(plan.host_units, info.units);
    CHECK_EQ(forecast.disk_bytes, 0);
    for (uint32_t i = 0; i < info.units; i++) CHECK_EQ(residency[i].residency, KVT_RESIDENT_HOST);

    terms.host_ceiling_bytes = model_image_bytes / 2;
    terms.flags = KVT_TERMS_HOST_RESERVE | KVT_TERMS_KV;
    terms.disk_bytes_per_s = UINT64_C(1000000000);
    CHECK_OK(kvt_model_plan(model, &terms, &memory, &plan, &forecast, residency, MAX_UNITS,
                            sizeof *residency, NULL));
    CHECK(plan.file_units > 0 && plan.host_bytes <= model_image_bytes / 2);
    CHECK_EQ(plan.file_units + plan.host_units, info.units);
    CHECK(forecast.pass_ns >= forecast.bound_ns && forecast.disk_bytes > 0);
    CHECK_EQ(forecast.binding, KVT_BINDING_DISK);
    kvt_forecast_t faster = KVT_FORECAST_INIT;
    CHECK_OK(kvt_model_forecast(model, &terms, &memory, "disk=2", 6, &faster, NULL));
    CHECK(faster.pass_ns < forecast.pass_ns);
    kvt_error_t *error = NULL;
    CHECK_IS(kvt_model_forecast(model, &terms, &memory, "tape=2", 6, &faster, &error), KVT_E_SPEC);
    kvt_error_info_t why = KVT_ERROR_INFO_INIT;
    CHECK_OK(kvt_error_info(error, &why));
    CHECK_EQ(why.offset, 0);

    char *text = plan_describe(&terms, &memory, KVT_PLAN_TEXT);
    char *json = plan_describe(&terms, &memory, KVT_PLAN_JSON);
    CHECK(json[0] == '{' && strstr(json, "\"figures\"") != NULL && strstr(text, "host") != NULL);
    free(text);
    free(json);
    CHECK_IS(kvt_model_plan_describe(model, &terms, &memory, 2, NULL, 0, NULL, NULL), KVT_E_INVALID);

    /* A device that this machine does not have. */
    memory.device_free_bytes = model_image_bytes / 2;
    terms.flags |= KVT_TERMS_DEVICE_SAFETY;
    terms.compute = KVT_COMPUTE_DEVICE;
    terms.host_ceiling_bytes = 0;
    terms.device_bytes_per_s = UINT64_C(13000000000);
    CHECK_OK(kvt_model_plan(model, &terms, &memory, &plan, &forecast, residency, MAX_UNITS,
                            sizeof *residency, NULL));
    CHECK(plan.device_units > 0 && plan.host_units > 0 && forecast.device_bytes > 0);

    /* Too little memory: the message says how much is needed. */
    terms.compute = KVT_COMPUTE_HOST;
    terms.host_ceiling_bytes = 5000;
    CHECK_IS(kvt_model_plan(model, &terms, &memory, &plan, NULL, NULL, 0, 0, &error), KVT_E_BUDGET);
    CHECK(strstr(kvt_error_message(error), "at least") != NULL);
    terms.host_ceiling_bytes = 0;
    terms.flags |= KVT_TERMS_HOST_CEILING;
    CHECK_IS(kvt_model_plan(model, &terms, &memory, &plan, NULL, NULL, 0, 0, NULL), KVT_E_BUDGET);
    terms.flags = 1u << 20;
    CHECK_IS(kvt_model_plan(model, &terms, &memory, &plan, NULL, NULL, 0, 0, NULL), KVT_E_INVALID);
    terms.flags = 0;
    terms.compute = 3;
    CHECK_IS(kvt_model_plan(model, &terms, &memory, &plan, NULL, NULL, 0, 0, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_error_free(&error));
    /* Without a description the plan uses the machine's memory. */
    CHECK_OK(kvt_model_plan(model, NULL, NULL, &plan, NULL, NULL, 0, 0, NULL));
}

/* ---- passes --------------------------------------------------------------- */

static kvt_stream_terms_t terms_of(uint64_t host_bytes) {
    kvt_stream_terms_t terms = KVT_STREAM_TERMS_INIT;
    terms.flags = KVT_TERMS_HOST_RESERVE | KVT_TERMS_KV | KVT_TERMS_HOST_CEILING;
    terms.host_ceiling_bytes = host_bytes;
    terms.chunk_bytes = 16384;
    return terms;
}

static kvt_stream_opts_t opts_of(const kvt_stream_terms_t *terms) {
    kvt_stream_opts_t opts = KVT_STREAM_OPTS_INIT;
    opts.model = model;
    opts.terms = terms;
    return opts;
}

static kvt_stream_t *open_stream(const kvt_stream_opts_t *opts) {
    kvt_stream_t *stream = NULL;
    kvt_error_t *error = NULL;
    const kvt_status_t status = kvt_stream_open(runtime, opts, &stream, &error);
    if (status != KVT_OK) fprintf(stderr, "open: %s\n", kvt_error_message(error));
    CHECK_OK(status);
    return stream;
}

static void close_stream(kvt_stream_t **stream) {
    CHECK_OK(kvt_stream_close(stream, hang_guard(), NULL));
    CHECK(*stream == NULL);
}

/* Compares a unit in memory with the file. */
static void check_unit(const kvt_unit_lease_t *held) {
    CHECK_EQ(held->memory, KVT_MEMORY_HOST);
    CHECK_EQ(held->event, 0);
    CHECK_EQ((uintptr_t)held->address % GRANULARITY, 0);
    for (uint64_t p = 0; p < part_count[held->unit]; p++) {
        const kvt_part_t *part = &parts[held->unit][p];
        CHECK(part->at + part->bytes <= held->bytes);
        CHECK(memcmp((const uint8_t *)held->address + part->at,
                     image + tensor_offset[part->tensor] + part->from, part->bytes) == 0);
    }
}

static kvt_unit_lease_t acquire(const kvt_stream_t *stream, uint32_t unit) {
    kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
    CHECK_OK(kvt_stream_acquire(stream, unit, 0, hang_guard(), &held, NULL));
    CHECK_EQ(held.unit, unit);
    check_unit(&held);
    return held;
}

static void release(const kvt_stream_t *stream, kvt_unit_lease_t *held) {
    CHECK_OK(kvt_stream_release(stream, held, 0, NULL));
    CHECK(held->address == NULL && held->place == 0);
}

static void use_unit(const kvt_stream_t *stream, uint32_t unit) {
    kvt_unit_lease_t held = acquire(stream, unit);
    release(stream, &held);
}

/* One pass through a model with experts: the router chooses two per layer. */
static void one_pass(const kvt_stream_t *stream) {
    CHECK_OK(kvt_stream_pass_begin(stream, NULL));
    use_unit(stream, 0);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        kvt_unit_lease_t held = acquire(stream, layer_unit[layer]);
        if (layer == 2 || layer == 4) {
            const uint32_t first = (uint32_t)next_random(&seed) % EXPERTS;
            const uint32_t routed[2] = {expert_unit[layer][first],
                                        expert_unit[layer][(first + 1) % EXPERTS]};
            CHECK_OK(kvt_stream_hint(stream, routed, 2, NULL));
            kvt_unit_lease_t one = acquire(stream, routed[0]);
            use_unit(stream, routed[1]);
            release(stream, &one);
        }
        release(stream, &held);
    }
    use_unit(stream, info.units - 2);
    use_unit(stream, info.units - 1);
    CHECK_OK(kvt_stream_pass_end(stream, NULL));
}

static uint64_t least_bytes(void) {
    /* Two slots of the largest layer unit, the experts of a layer, and a reserve. */
    return 2 * 110592 + EXPERTS * 49152 + 20 * GRANULARITY;
}

static void check_passes(uint64_t host_bytes, uint64_t flags, uint32_t marks) {
    const kvt_stream_terms_t terms = terms_of(host_bytes);
    kvt_stream_opts_t opts = opts_of(&terms);
    opts.flags = flags;
    opts.marks = marks;
    kvt_stream_t *stream = open_stream(&opts);
    CHECK_OK(kvt_stream_wait_resident(stream, hang_guard(), NULL));
    kvt_stream_progress_t progress = KVT_STREAM_PROGRESS_INIT;
    CHECK_OK(kvt_stream_progress(stream, &progress));
    CHECK_EQ(progress.missing, 0);
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    kvt_forecast_t forecast = KVT_FORECAST_INIT;
    kvt_unit_residency_t residency[MAX_UNITS];
    CHECK_OK(kvt_stream_plan(stream, &plan, &forecast, residency, MAX_UNITS, sizeof *residency));
    CHECK_EQ(plan.host_units, progress.resident_units);
    CHECK(plan.host_bytes <= host_bytes);
    CHECK_IS(kvt_stream_plan(stream, &plan, NULL, residency, info.units - 1, sizeof *residency),
             KVT_E_TOO_SMALL);
    for (int pass = 0; pass < 4; pass++) one_pass(stream);

    kvt_stream_stats_t stats = KVT_STREAM_STATS_INIT;
    CHECK_OK(kvt_stream_stats(stream, &stats));
    CHECK_EQ(stats.passes, 4);
    CHECK_EQ(stats.acquires, 4 * (3 + LAYERS + 4));
    CHECK_EQ(stats.failed, 0);
    CHECK(stats.read_bytes >= progress.read_bytes && stats.read_bytes > 0);
    kvt_expert_stats_t layers[4];
    uint64_t count = 0;
    CHECK_OK(kvt_stream_layers(stream, layers, 4, sizeof *layers, &count));
    CHECK_EQ(count, 2);
    CHECK(layers[0].layer == 2 && layers[1].layer == 4);
    kvt_stream_span_t rows[64];
    CHECK_OK(kvt_stream_marks(stream, rows, 64, sizeof *rows, &count));
    CHECK_EQ(count > 0, marks > 0);
    for (uint64_t i = 0; i < count; i++) {
        CHECK(rows[i].stage >= KVT_STAGE_READ && rows[i].stage <= KVT_STAGE_WAIT);
        CHECK(rows[i].begin_ns <= rows[i].end_ns && rows[i].unit < info.units);
    }
    char words[256];
    uint64_t bytes = 0;
    CHECK_OK(kvt_stream_describe_io(stream, words, sizeof words, &bytes));
    CHECK(bytes > 0);
    CHECK_OK(kvt_stream_plan_describe(stream, KVT_PLAN_JSON, NULL, 0, &bytes));
    CHECK(bytes > 100);
    if (plan.file_units > 0)
        CHECK_OK(kvt_stream_forecast(stream, "disk=1", 6, &forecast, NULL));
    const void *fixed = NULL;
    if ((flags & KVT_STREAM_IN_PLACE) == 0)
        CHECK_IS(kvt_stream_unit_address(stream, 0, &fixed, NULL), KVT_E_STATE);
    close_stream(&stream);
}

/* ---- invalid calls -------------------------------------------------------- */

static void check_mistakes(void) {
    const kvt_stream_terms_t terms = terms_of(least_bytes());
    kvt_stream_opts_t opts = opts_of(&terms);
    kvt_stream_t *stream = open_stream(&opts);
    kvt_error_t *error = NULL;
    kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
    CHECK_IS(kvt_stream_acquire(stream, info.units, 0, 0, &held, &error), KVT_E_INVALID);
    CHECK_IS(kvt_stream_acquire(stream, KVT_NONE, 0, 0, &held, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_stream_acquire(stream, 0, 64, 0, &held, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_stream_acquire(stream, 0, 0, 0, NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_stream_release(stream, &held, 0, &error), KVT_E_STATE);
    const uint32_t beyond = info.units;
    CHECK_IS(kvt_stream_hint(stream, &beyond, 1, NULL), KVT_E_INVALID);

    /* Two leases of one unit have the same bytes, and both must be released. */
    kvt_unit_lease_t first = acquire(stream, layer_unit[1]), again = acquire(stream, layer_unit[1]);
    CHECK(first.address == again.address);
    kvt_unit_lease_t copy = first;
    release(stream, &first);
    check_unit(&again);
    CHECK_IS(kvt_stream_release(stream, &first, 0, &error), KVT_E_STATE);
    CHECK(strstr(kvt_error_message(error), "released before") != NULL);
    CHECK_IS(kvt_stream_release(stream, &again, 9, NULL), KVT_E_UNSUPPORTED);
    CHECK_IS(kvt_stream_close(&stream, hang_guard(), &error), KVT_E_BUSY);
    CHECK(stream != NULL);
    use_unit(stream, layer_unit[1]);
    release(stream, &again);
    CHECK_IS(kvt_stream_release(stream, &copy, 0, NULL), KVT_E_STATE);
    copy.place = 77777;
    CHECK(kvt_stream_release(stream, &copy, 0, NULL) < 0);
    copy.unit = KVT_NONE;
    CHECK_IS(kvt_stream_release(stream, &copy, 0, NULL), KVT_E_INVALID);

    /* The engine holds all slots, so a wait would never end. */
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    kvt_unit_residency_t residency[MAX_UNITS];
    CHECK_OK(kvt_stream_plan(stream, &plan, NULL, residency, MAX_UNITS, sizeof *residency));
    kvt_unit_lease_t all[MAX_UNITS];
    uint32_t had = 0;
    kvt_status_t last = KVT_OK;
    for (uint32_t layer = 0; layer < LAYERS && last == KVT_OK; layer++) {
        if (residency[layer_unit[layer]].residency != KVT_RESIDENT_FILE) continue;
        all[had] = (kvt_unit_lease_t)KVT_UNIT_LEASE_INIT;
        last = kvt_stream_acquire(stream, layer_unit[layer], 0, 0, &all[had], &error);
        if (last == KVT_OK) check_unit(&all[had++]);
    }
    CHECK_IS(last, KVT_E_BUSY);
    CHECK_EQ(had, plan.slots);
    CHECK(strstr(kvt_error_message(error), "slots") != NULL);
    while (had > 0) release(stream, &all[--had]);

    /* Without waiting, and with a short deadline. */
    for (uint32_t i = 0; i < info.units; i++) {
        kvt_status_t status;
        const uint64_t until = hang_guard();
        do {
            status = kvt_stream_acquire(stream, i, KVT_ACQUIRE_POLL, 0, &held, NULL);
            CHECK(status == KVT_OK || status == KVT_E_AGAIN);
            CHECK(now_ns() < until);
            if (status != KVT_OK) short_pause();
        } while (status != KVT_OK);
        check_unit(&held);
        release(stream, &held);
    }
    CHECK_IS(kvt_stream_pass_begin((const kvt_stream_t *)model, NULL), KVT_E_HANDLE);
    kvt_stream_t *const stale = stream;
    close_stream(&stream);
    CHECK_IS(kvt_stream_acquire(stale, 0, 0, 0, &held, NULL), KVT_E_HANDLE);
    CHECK_OK(kvt_stream_close(&stream, 0, NULL));
    CHECK_OK(kvt_error_free(&error));
}

static void check_bad_openings(void) {
    kvt_stream_terms_t terms = terms_of(4096);
    kvt_stream_opts_t opts = opts_of(&terms);
    kvt_stream_t *none = NULL;
    kvt_error_t *error = NULL;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, &error), KVT_E_BUDGET);
    CHECK(strstr(kvt_error_message(error), "at least") != NULL);
    terms = terms_of(least_bytes());
    terms.compute = KVT_COMPUTE_DEVICE;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, NULL), KVT_E_UNSUPPORTED);
    terms.compute = KVT_COMPUTE_HOST;
    opts.expert_policy = "slru(";
    opts.expert_policy_bytes = 5;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, NULL), KVT_E_SPEC);
    opts.expert_policy = NULL;
    opts.expert_policy_bytes = 0;
    opts.readers = 1000;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, NULL), KVT_E_LIMIT);
    opts.readers = 0;
    const uint32_t twice[2] = {0, 0};
    opts.order = twice;
    opts.order_count = 2;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, NULL), KVT_E_INVALID);
    opts.order = NULL;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, NULL), KVT_E_INVALID);
    opts.order_count = 0;
    opts.verify = 9;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, NULL), KVT_E_INVALID);
    opts.verify = 0;
    CHECK_OK(kvt_error_free(&error));
    opts.flags = KVT_STREAM_DIRECT; /* without a device */
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, &error), KVT_E_INVALID);
    CHECK(strstr(kvt_error_message(error), "direct reads") != NULL);
    opts.flags = 0;
    opts.model = NULL;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, NULL), KVT_E_HANDLE);
    CHECK_IS(kvt_stream_open(runtime, NULL, &none, NULL), KVT_E_HANDLE);
    CHECK(none == NULL);
    CHECK_OK(kvt_error_free(&error));
}

/* ---- orders, rings, addresses --------------------------------------------- */

/* Units in the engine's order, and in an unknown order. */
static void check_orders(void) {
    uint32_t order[MAX_UNITS], count = 0;
    for (uint32_t layer = LAYERS; layer > 0; layer--) order[count++] = layer_unit[layer - 1];
    kvt_stream_terms_t terms = terms_of(least_bytes());
    kvt_stream_opts_t opts = opts_of(&terms);
    opts.order = order;
    opts.order_count = count;
    opts.flags = KVT_STREAM_ONCE | KVT_STREAM_NO_URING;
    opts.readers = 1;
    kvt_stream_t *stream = open_stream(&opts);
    for (int pass = 0; pass < 2; pass++) {
        CHECK_OK(kvt_stream_pass_begin(stream, NULL));
        for (uint32_t i = 0; i < count; i++) use_unit(stream, order[i]);
        CHECK_OK(kvt_stream_pass_end(stream, NULL));
    }
    close_stream(&stream);

    terms.mode = KVT_STREAM_RING;
    opts = opts_of(&terms);
    opts.policy = "lru";
    opts.policy_bytes = 3;
    stream = open_stream(&opts);
    for (int i = 0; i < 60; i++)
        use_unit(stream, (uint32_t)(next_random(&seed) % info.units));
    close_stream(&stream);
}

/* Fixed addresses: a unit has the same address in every pass. */
static void check_in_place(void) {
    const kvt_stream_terms_t terms = terms_of(least_bytes());
    kvt_stream_opts_t opts = opts_of(&terms);
    opts.flags = KVT_STREAM_IN_PLACE;
    kvt_stream_t *stream = open_stream(&opts);
    const void *start = NULL, *fixed[MAX_UNITS];
    uint64_t range = 0, bytes = 0;
    CHECK_OK(kvt_stream_unit_address(stream, KVT_NONE, &start, &range));
    CHECK_EQ(range, model_image_bytes);
    for (uint32_t i = 0; i < info.units; i++) {
        CHECK_OK(kvt_stream_unit_address(stream, i, &fixed[i], &bytes));
        CHECK((const uint8_t *)fixed[i] >= (const uint8_t *)start);
        CHECK((const uint8_t *)fixed[i] + bytes <= (const uint8_t *)start + range);
    }
    CHECK_IS(kvt_stream_unit_address(stream, info.units, &start, NULL), KVT_E_INVALID);
    for (int pass = 0; pass < 3; pass++) {
        one_pass(stream);
        for (uint32_t i = 0; i < info.units; i++) {
            kvt_unit_lease_t held = acquire(stream, i);
            CHECK(held.address == fixed[i]);
            release(stream, &held);
        }
    }
    close_stream(&stream);
}

/* Copies the unit from its fixed device address, and compares it with the file. */
static void check_on_device(kvt_device_t *device, const kvt_unit_lease_t *held) {
    static uint8_t seen[1 << 20];
    CHECK(held->bytes <= sizeof seen);
    memset(seen, 0, sizeof seen);
    kvt_copy_t copy = {0};
    copy.view.address = (void *)held->address;
    copy.view.memory = KVT_MEMORY_DEVICE;
    copy.view.tokens = copy.view.heads = 1;
    copy.view.run_bytes = copy.view.token_stride_bytes = copy.view.head_stride_bytes = held->bytes;
    copy.plane = seen;
    copy.plane_memory = KVT_MEMORY_HOST;
    copy.direction = KVT_COPY_GATHER;
    uint64_t event = 0;
    CHECK_OK(kvt_device_copy(device, 1, held->event, &copy, 1, sizeof copy, &event, NULL));
    CHECK_OK(kvt_device_wait(device, event, hang_guard(), NULL));
    CHECK_OK(kvt_device_release(device, &event, 1, NULL));
    for (uint64_t p = 0; p < part_count[held->unit]; p++) {
        const kvt_part_t *part = &parts[held->unit][p];
        CHECK(memcmp(seen + part->at, image + tensor_offset[part->tensor] + part->from,
                     part->bytes) == 0);
    }
}

/* Fixed addresses on a device, where only a few units have memory at a time. */
static void check_in_place_on_device(void) {
    kvt_device_opts_t which = KVT_DEVICE_OPTS_INIT;
    which.kind = KVT_DEVICE_KIND_SIMULATED;
    which.memory_bytes = 1u << 30;
    kvt_device_t *device = NULL;
    CHECK_OK(kvt_device_open(runtime, &which, &device, NULL));
    kvt_stream_terms_t terms = terms_of((2u << 20) + model_image_bytes);
    terms.flags |= KVT_TERMS_DEVICE_CEILING | KVT_TERMS_DEVICE_SAFETY;
    terms.device_ceiling_bytes = 7 * (2u << 20); /* memory is mapped in pieces of 2 MiB */
    kvt_stream_opts_t opts = opts_of(&terms);
    opts.device = device;
    opts.flags = KVT_STREAM_IN_PLACE;
    kvt_stream_t *stream = open_stream(&opts);
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    CHECK_OK(kvt_stream_plan(stream, &plan, NULL, NULL, 0, 0));
    CHECK(plan.slots > 0 && plan.device_bytes <= terms.device_ceiling_bytes);
    CHECK_EQ(plan.device_bytes % (2u << 20), 0);
    const void *fixed[MAX_UNITS];
    for (uint32_t i = 0; i < info.units; i++)
        CHECK_OK(kvt_stream_unit_address(stream, i, &fixed[i], NULL));
    uint64_t on_device = 0;
    for (int pass = 0; pass < 3; pass++) {
        CHECK_OK(kvt_stream_pass_begin(stream, NULL));
        for (uint32_t i = 0; i < info.units; i++) {
            kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
            const uint64_t how = pass == 1 ? KVT_ACQUIRE_SUBMITTED : 0;
            CHECK_OK(kvt_stream_acquire(stream, i, how, hang_guard(), &held, NULL));
            CHECK(held.address == fixed[i]);
            if (held.memory == KVT_MEMORY_DEVICE) {
                check_on_device(device, &held);
                on_device++;
            } else {
                check_unit(&held);
            }
            release(stream, &held);
        }
        CHECK_OK(kvt_stream_pass_end(stream, NULL));
    }
    CHECK(on_device >= 3 * LAYERS);
    close_stream(&stream);
    CHECK_OK(kvt_device_close(&device, hang_guard(), NULL));
}

/* ---- changes of the memory limit ------------------------------------------ */

static uint32_t resident_units_of(const kvt_stream_t *stream) {
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    CHECK_OK(kvt_stream_plan(stream, &plan, NULL, NULL, 0, 0));
    return plan.host_units;
}

static void check_rebalance(void) {
    const kvt_stream_terms_t terms = terms_of(model_image_bytes * 7 / 10);
    kvt_stream_opts_t opts = opts_of(&terms);
    kvt_stream_t *stream = open_stream(&opts);
    one_pass(stream);
    const uint32_t before = resident_units_of(stream);
    CHECK(before > 0);
    kvt_stream_limits_t limits_now = KVT_STREAM_LIMITS_INIT;
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    kvt_unit_lease_t held = acquire(stream, layer_unit[0]);
    limits_now.host_bytes = model_image_bytes * 6 / 10;
    CHECK_OK(kvt_stream_rebalance(stream, &limits_now, &plan, NULL));
    CHECK(plan.host_units < before && plan.host_bytes <= limits_now.host_bytes);
    check_unit(&held);
    release(stream, &held);
    one_pass(stream);
    limits_now.host_bytes = 4096;
    CHECK_IS(kvt_stream_rebalance(stream, &limits_now, &plan, NULL), KVT_E_BUDGET);
    one_pass(stream);
    limits_now.host_bytes = model_image_bytes * 7 / 10;
    CHECK_OK(kvt_stream_rebalance(stream, &limits_now, NULL, NULL));
    CHECK_OK(kvt_stream_wait_resident(stream, hang_guard(), NULL));
    CHECK(resident_units_of(stream) >= plan.host_units);
    one_pass(stream);
    close_stream(&stream);
}

/* KVT_TERMS_SHRINKS keeps slots even if every unit fits, so that the limit can shrink later. */
static void check_shrinks(void) {
    kvt_stream_terms_t terms = terms_of(2 * model_image_bytes);
    kvt_stream_plan_t plan = KVT_STREAM_PLAN_INIT;
    CHECK_OK(kvt_model_plan(model, &terms, NULL, &plan, NULL, NULL, 0, 0, NULL));
    CHECK_EQ(plan.host_units, info.units);
    CHECK_EQ(plan.slots + plan.expert_slots, 0);
    terms.flags |= KVT_TERMS_SHRINKS;
    CHECK_OK(kvt_model_plan(model, &terms, NULL, &plan, NULL, NULL, 0, 0, NULL));
    CHECK_EQ(plan.host_units, info.units);
    CHECK_EQ(plan.slots, 2);
    char *text = plan_describe(&terms, NULL, KVT_PLAN_TEXT);
    CHECK(strstr(text, "host floor") != NULL);
    free(text);

    kvt_stream_opts_t opts = opts_of(&terms);
    kvt_stream_t *stream = open_stream(&opts);
    one_pass(stream);
    kvt_stream_limits_t limits_now = KVT_STREAM_LIMITS_INIT;
    limits_now.host_bytes = model_image_bytes * 6 / 10;
    CHECK_OK(kvt_stream_rebalance(stream, &limits_now, &plan, NULL));
    CHECK(plan.host_units < info.units && plan.host_bytes <= limits_now.host_bytes);
    one_pass(stream);
    limits_now.host_bytes = 2 * model_image_bytes;
    CHECK_OK(kvt_stream_rebalance(stream, &limits_now, &plan, NULL));
    CHECK_EQ(plan.host_units, info.units);
    CHECK_OK(kvt_stream_wait_resident(stream, hang_guard(), NULL));
    one_pass(stream);
    close_stream(&stream);

    /* The flag belongs to the terms; in the options it is invalid. */
    opts.flags = KVT_TERMS_SHRINKS;
    CHECK_IS(kvt_stream_open(runtime, &opts, &stream, NULL), KVT_E_INVALID);

    /* With a budget it is implied. */
    kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
    limits.host_bytes = 2 * model_image_bytes;
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, &limits, &budget, NULL));
    terms.flags &= ~(uint64_t)KVT_TERMS_SHRINKS;
    opts.flags = 0;
    opts.budget = budget;
    stream = open_stream(&opts);
    CHECK_OK(kvt_stream_plan(stream, &plan, NULL, NULL, 0, 0));
    CHECK_EQ(plan.host_units, info.units);
    CHECK_EQ(plan.slots, 2);
    close_stream(&stream);
    CHECK_OK(kvt_budget_close(&budget, NULL));
}

static void check_budget(void) {
    kvt_budget_opts_t limits = KVT_BUDGET_OPTS_INIT;
    limits.host_bytes = 2 * model_image_bytes;
    kvt_budget_t *budget = NULL;
    CHECK_OK(kvt_budget_open(runtime, &limits, &budget, NULL));
    const kvt_stream_terms_t terms = terms_of(model_image_bytes * 7 / 10);
    kvt_stream_opts_t opts = opts_of(&terms);
    opts.budget = budget;
    kvt_stream_t *stream = open_stream(&opts);
    CHECK_OK(kvt_stream_wait_resident(stream, hang_guard(), NULL));
    one_pass(stream);
    const uint32_t before = resident_units_of(stream);
    kvt_tier_report_t report = KVT_TIER_REPORT_INIT;
    CHECK_OK(kvt_budget_tier(budget, KVT_TIER_HOST, &report));
    CHECK(report.committed_bytes + report.reserved_bytes > 0);
    const uint64_t less = (report.committed_bytes + report.reserved_bytes) * 9 / 10;
    CHECK_OK(kvt_budget_resize(budget, KVT_TIER_HOST, less, NULL));
    const uint64_t until = hang_guard();
    do {
        one_pass(stream);
        CHECK_OK(kvt_budget_tier(budget, KVT_TIER_HOST, &report));
        CHECK(now_ns() < until);
    } while (report.committed_bytes + report.reserved_bytes > less);
    CHECK(resident_units_of(stream) < before);
    close_stream(&stream);
    CHECK_OK(kvt_budget_tier(budget, KVT_TIER_HOST, &report));
    CHECK_EQ(report.committed_bytes + report.reserved_bytes, 0);
    CHECK_OK(kvt_budget_close(&budget, NULL));
}

/* ---- models from a table of ranges ---------------------------------------- */

static void check_table(void) {
    const kvt_str_t path = as_text(file_path);
    const kvt_file_range_t ranges[3] = {{0, 0, 100000, 5000}, {0, 0, 10, 4096}, {0, 0, 200001, 777}};
    kvt_unit_entry_t entries[2];
    memset(entries, 0, sizeof entries);
    entries[0].name = "the first";
    entries[0].name_bytes = 9;
    entries[0].ranges = ranges;
    entries[0].range_count = 2;
    entries[1].name = "layer nought";
    entries[1].name_bytes = 12;
    entries[1].role = KVT_ROLE_LAYER;
    entries[1].ranges = ranges + 2;
    entries[1].range_count = 1;
    kvt_model_table_t table = KVT_MODEL_TABLE_INIT;
    table.paths = &path;
    table.path_count = 1;
    table.path_stride_bytes = sizeof path;
    table.units = entries;
    table.unit_count = 2;
    table.unit_stride_bytes = sizeof *entries;
    table.range_stride_bytes = sizeof *ranges;
    kvt_model_t *own = NULL;
    CHECK_OK(kvt_model_table(&table, &own, NULL));
    uint32_t unit = KVT_NONE;
    CHECK_OK(kvt_model_find_unit(own, 0, KVT_NONE, &unit));
    CHECK_EQ(unit, 1);
    const kvt_stream_terms_t terms = terms_of(1 << 20);
    kvt_stream_opts_t opts = opts_of(&terms);
    opts.model = own;
    kvt_stream_t *stream = open_stream(&opts);
    for (uint32_t i = 0; i < 2; i++) {
        kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
        CHECK_OK(kvt_stream_acquire(stream, i, 0, hang_guard(), &held, NULL));
        kvt_part_t rows[4];
        uint64_t count = 0;
        CHECK_OK(kvt_model_unit_parts(own, i, rows, 4, sizeof *rows, &count));
        CHECK_EQ(count, i == 0 ? 2 : 1);
        for (uint64_t p = 0; p < count; p++) {
            kvt_tensor_t tensor = KVT_TENSOR_INIT;
            CHECK_OK(kvt_model_tensor(own, rows[p].tensor, &tensor));
            CHECK(memcmp((const uint8_t *)held.address + rows[p].at, image + tensor.offset,
                         tensor.bytes) == 0);
        }
        release(stream, &held);
    }
    CHECK_OK(kvt_model_close(&own));
    close_stream(&stream);

    entries[1].role = 77;
    CHECK_IS(kvt_model_table(&table, &own, NULL), KVT_E_INVALID);
    entries[1].role = KVT_ROLE_OTHER;
    entries[1].layer = 3;
    CHECK_IS(kvt_model_table(&table, &own, NULL), KVT_E_INVALID);
    entries[1].layer = 0;
    entries[1].range_count = 0;
    CHECK_IS(kvt_model_table(&table, &own, NULL), KVT_E_INVALID);
    CHECK(own == NULL);
    /* An empty model is valid, but cannot be streamed. */
    CHECK_OK(kvt_model_table(NULL, &own, NULL));
    opts.model = own;
    CHECK_IS(kvt_stream_open(runtime, &opts, &stream, NULL), KVT_E_INVALID);
    CHECK_OK(kvt_model_close(&own));
}

/* ---- changed files -------------------------------------------------------- */

/* Changes one byte of the file, and restores its modification time. */
static void damage(uint64_t offset) {
    struct stat before;
    const int file = open(file_path, O_RDWR);
    CHECK(file >= 0 && fstat(file, &before) == 0);
    const uint8_t other = (uint8_t)(image[offset] ^ 1);
    CHECK(pwrite(file, &other, 1, (off_t)offset) == 1);
    const struct timespec times[2] = {before.st_atim, before.st_mtim};
    CHECK(futimens(file, times) == 0);
    CHECK(close(file) == 0);
}

static void check_sums(void) {
    const kvt_stream_terms_t terms = terms_of(least_bytes());
    kvt_stream_opts_t opts = opts_of(&terms);
    opts.verify = KVT_VERIFY_ALWAYS;
    opts.sidecar = sums_path;
    opts.sidecar_bytes = strlen(sums_path);
    kvt_stream_t *stream = open_stream(&opts);
    for (uint32_t i = 0; i < info.units; i++) use_unit(stream, i);
    uint64_t sum = 0, same = 0;
    CHECK_OK(kvt_stream_checksum(stream, layer_unit[3], &sum));
    CHECK_IS(kvt_stream_checksum(stream, info.units, &same), KVT_E_INVALID);
    close_stream(&stream);
    CHECK(access(sums_path, R_OK) == 0);

    const kvt_part_t *part = &parts[layer_unit[3]][part_count[layer_unit[3]] - 1];
    damage(tensor_offset[part->tensor] + 20000);
    stream = open_stream(&opts);
    CHECK_OK(kvt_stream_checksum(stream, layer_unit[3], &same));
    CHECK_EQ(sum, same);
    use_unit(stream, layer_unit[1]);
    kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
    kvt_error_t *error = NULL;
    CHECK_IS(kvt_stream_acquire(stream, layer_unit[3], 0, hang_guard(), &held, &error),
             KVT_E_CORRUPT);
    CHECK(strstr(kvt_error_message(error), file_path) != NULL);
    use_unit(stream, layer_unit[1]);
    CHECK_OK(kvt_stream_verify(stream, layer_unit[1], &sum, NULL));
    CHECK_IS(kvt_stream_verify(stream, layer_unit[3], &sum, &error), KVT_E_CORRUPT);
    CHECK_IS(kvt_stream_verify(stream, info.units, &sum, NULL), KVT_E_INVALID);
    close_stream(&stream);
    CHECK_OK(kvt_error_free(&error));
    write_all(file_path, image, image_bytes);
}

static void check_changed_file(void) {
    const kvt_stream_terms_t terms = terms_of(least_bytes());
    kvt_stream_opts_t opts = opts_of(&terms);
    kvt_stream_t *stream = open_stream(&opts);
    one_pass(stream);
    CHECK(truncate(file_path, (off_t)image_bytes - 60000) == 0);
    kvt_error_t *error = NULL;
    CHECK_IS(kvt_stream_pass_begin(stream, &error), KVT_E_CORRUPT);
    CHECK(strstr(kvt_error_message(error), file_path) != NULL);
    close_stream(&stream);
    kvt_stream_t *none = NULL;
    CHECK_IS(kvt_stream_open(runtime, &opts, &none, &error), KVT_E_CORRUPT);
    CHECK_OK(kvt_error_free(&error));
    write_all(file_path, image, image_bytes);
}

/* ---- threads -------------------------------------------------------------- */

static kvt_stream_t *shared;

static void *use_some(void *data) {
    uint64_t own = 7 + *(uint64_t *)data;
    for (int i = 0; i < 120; i++) {
        const uint32_t unit = (uint32_t)(next_random(&own) % info.units);
        kvt_unit_lease_t held = KVT_UNIT_LEASE_INIT;
        const kvt_status_t status =
            kvt_stream_acquire(shared, unit, 0, hang_guard(), &held, NULL);
        if (status == KVT_E_BUSY) continue;
        CHECK_OK(status);
        check_unit(&held);
        release(shared, &held);
    }
    return NULL;
}

static void check_threads(void) {
    kvt_stream_terms_t terms = terms_of(model_image_bytes * 8 / 10);
    terms.slots = 4;
    kvt_stream_opts_t opts = opts_of(&terms);
    shared = open_stream(&opts);
    pthread_t threads[3];
    uint64_t numbers[3];
    for (uint64_t i = 0; i < 3; i++) {
        numbers[i] = i;
        threads[i] = start_thread(use_some, &numbers[i]);
    }
    kvt_stream_limits_t limits_now = KVT_STREAM_LIMITS_INIT;
    for (uint64_t i = 0; i < 6; i++) {
        limits_now.host_bytes = model_image_bytes * (i % 2 == 0 ? 65 : 80) / 100;
        const kvt_status_t status = kvt_stream_rebalance(shared, &limits_now, NULL, NULL);
        CHECK(status == KVT_OK || status == KVT_E_BUDGET);
        short_pause();
    }
    for (int i = 0; i < 3; i++) join_thread(threads[i]);
    close_stream(&shared);
}

/* A runtime that closes first reports the streamer; held units stay valid. */
static void check_end_of_runtime(void) {
    kvt_runtime_t *const kept = runtime;
    runtime = open_runtime(1, NULL);
    const kvt_stream_terms_t terms = terms_of(2 * model_image_bytes);
    kvt_stream_opts_t opts = opts_of(&terms);
    kvt_stream_t *stream = open_stream(&opts);
    CHECK_OK(kvt_stream_wait_resident(stream, hang_guard(), NULL));
    kvt_unit_lease_t held = acquire(stream, layer_unit[2]);
    kvt_close_report_t report = KVT_CLOSE_REPORT_INIT;
    CHECK_OK(kvt_runtime_close(&runtime, hang_guard(), &report, NULL));
    CHECK_EQ(report.streamers, 1);
    kvt_unit_lease_t other = KVT_UNIT_LEASE_INIT;
    CHECK_IS(kvt_stream_acquire(stream, layer_unit[1], 0, 0, &other, NULL), KVT_E_CLOSED);
    CHECK_IS(kvt_stream_wait_resident(stream, 0, NULL), KVT_E_CLOSED);
    check_unit(&held);
    CHECK_IS(kvt_stream_close(&stream, hang_guard(), NULL), KVT_E_BUSY);
    release(stream, &held);
    close_stream(&stream);
    runtime = kept;
}

int main(void) {
    check_begin();
    CHECK(mkdtemp(folder) != NULL);
    snprintf(file_path, sizeof file_path, "%s/model.safetensors", folder);
    snprintf(other_path, sizeof other_path, "%s/other.safetensors", folder);
    snprintf(sums_path, sizeof sums_path, "%s/sums", folder);
    runtime = open_runtime(1, NULL);
    write_model();
    learn_model();
    check_bad_models();
    check_plans();
    check_passes(least_bytes(), 0, 0);
    check_passes(model_image_bytes * 7 / 10, KVT_STREAM_BUFFERED, 64);
    check_passes(model_image_bytes, KVT_STREAM_MEASURE, 0);
    check_passes(model_image_bytes * 3 / 2, KVT_STREAM_MAPPED, 32);
    check_passes(model_image_bytes * 7 / 10, KVT_STREAM_IN_PLACE, 0);
    check_mistakes();
    check_bad_openings();
    check_orders();
    check_in_place();
    check_in_place_on_device();
    check_rebalance();
    check_shrinks();
    check_budget();
    check_table();
    check_sums();
    check_changed_file();
    check_threads();
    check_end_of_runtime();
    CHECK_OK(kvt_model_close(&model));
    close_runtime(&runtime);
    free(image);
    CHECK(unlink(file_path) == 0 && unlink(sums_path) == 0 && rmdir(folder) == 0);
    return check_end("stream_engine");
}

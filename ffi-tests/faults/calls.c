/* Calls that are wrong in one way each; prints the status the library gives. */

#include "../c/check.h"

static kvt_status_t planted(kvt_runtime_t *runtime, kvt_buffer_t *buffer, const char *name) {
    kvt_buffer_item_t item = sum_item(buffer, 8);
    kvt_submit_opts_t opts = KVT_SUBMIT_OPTS_INIT;
    kvt_op_t *op = NULL;
    if (strcmp(name, "none") == 0) {
        op = submit(runtime, NULL, &item, 1);
        return finish_op(&op);
    }
    if (strcmp(name, "panic") == 0) {
        kvt_runtime_t *own = open_runtime(1, "faults(worker=at(panic=1))");
        op = submit(own, NULL, &item, 1);
        const kvt_status_t status = finish_op(&op);
        close_runtime(&own);
        return status;
    }
    if (strcmp(name, "bad-enum") == 0) {
        opts.priority = 3;
        return kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, &op, NULL);
    }
    if (strcmp(name, "bad-kind") == 0) {
        item.kind = 64;
        return kvt_buffer_submit(runtime, NULL, &item, 1, sizeof item, &op, NULL);
    }
    if (strcmp(name, "short-struct") == 0) {
        opts.struct_size = 7;
        return kvt_buffer_submit(runtime, &opts, &item, 1, sizeof item, &op, NULL);
    }
    if (strcmp(name, "long-struct") == 0) {
        struct {
            kvt_submit_opts_t known;
            uint64_t unknown;
        } newer = {KVT_SUBMIT_OPTS_INIT, 1};
        newer.known.struct_size = sizeof newer;
        return kvt_buffer_submit(runtime, &newer.known, &item, 1, sizeof item, &op, NULL);
    }
    if (strcmp(name, "stale") == 0) {
        op = submit(runtime, NULL, &item, 1);
        kvt_op_t *copy = op;
        CHECK_OK(finish_op(&op));
        return kvt_op_cancel(copy);
    }
    if (strcmp(name, "foreign") == 0) return kvt_op_cancel((kvt_op_t *)(void *)&item);
    if (strcmp(name, "wrong-type") == 0) return kvt_op_cancel((kvt_op_t *)(void *)buffer);
    if (strcmp(name, "beyond-the-end") == 0) {
        item.bytes = 65;
        return kvt_buffer_submit(runtime, NULL, &item, 1, sizeof item, &op, NULL);
    }
    fprintf(stderr, "no fault is called %s\n", name);
    exit(2);
}

int main(int argc, char **argv) {
    check_begin();
    CHECK(argc > 1);
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    kvt_buffer_t *buffer = open_buffer(runtime, 64, NULL);
    printf("%s\n", kvt_status_name(planted(runtime, buffer, argv[1])));
    free_buffer(&buffer);
    close_runtime(&runtime);
    return 0;
}

/* Links, agrees on the version, copies, and survives a defect planted in a worker. */
#include <kvtier/kvtier.h>

#include <stdio.h>
#include <string.h>

#define TRY(call)                                                                       \
    do {                                                                                \
        kvt_status_t status_ = (call);                                                  \
        if (status_ != KVT_OK) {                                                        \
            fprintf(stderr, "%s:%d: %s: %s %s\n", __FILE__, __LINE__, #call,            \
                    kvt_status_name(status_), kvt_error_message(err));                  \
            return 1;                                                                   \
        }                                                                               \
    } while (0)

static unsigned char memory[2][8192];

static int run(const char *faults, kvt_status_t expected) {
    kvt_error_t *err = NULL;
    kvt_runtime_t *runtime = NULL;
    kvt_buffer_t *from = NULL, *to = NULL;
    kvt_op_t *op = NULL;
    kvt_runtime_opts_t opts = KVT_RUNTIME_OPTS_INIT;
    kvt_op_info_t info = KVT_OP_INFO_INIT;
    kvt_buffer_item_t item;

    opts.faults = faults;
    opts.faults_bytes = faults != NULL ? KVT_NUL_TERMINATED : 0;
    TRY(kvt_abi_check(KVT_HEADER_VERSION, &err));
    TRY(kvt_runtime_open(&opts, &runtime, &err));
    memset(memory[0], 7, sizeof memory[0]);
    TRY(kvt_buffer_wrap(runtime, memory[0], sizeof memory[0], NULL, NULL, &from, &err));
    TRY(kvt_buffer_wrap(runtime, memory[1], sizeof memory[1], NULL, NULL, &to, &err));
    memset(&item, 0, sizeof item);
    item.kind = KVT_ITEM_COPY;
    item.src = from;
    item.dst = to;
    item.bytes = sizeof memory[0];
    TRY(kvt_buffer_submit(runtime, NULL, &item, 1, sizeof item, &op, &err));
    TRY(kvt_op_wait(op, KVT_OP_RESOLVED, 0));
    TRY(kvt_op_info(op, &info));
    if (info.status != expected) {
        fprintf(stderr, "the op ended with %s\n", kvt_status_name(info.status));
        return 1;
    }
    if (expected == KVT_OK && memcmp(memory[0], memory[1], sizeof memory[0]) != 0) return 1;
    TRY(kvt_op_wait(op, KVT_OP_RELEASED, 0));
    TRY(kvt_op_free(&op));
    (void)kvt_buffer_free(&from);
    (void)kvt_buffer_free(&to);
    TRY(kvt_runtime_close(&runtime, 0, NULL, &err));
    return 0;
}

int main(void) {
    if (run(NULL, KVT_OK) != 0) return 1;
    if (run("faults(worker=at(panic=1))", KVT_E_PANIC) != 0) return 1;
    printf("kvtier %s\n", kvt_version_str());
    return 0;
}

/* A buffer in flight belongs to the library: here its owner writes it all the same,
 * while the worker, which the stall keeps from being done before, reads it. */

#include "../c/check.h"

int main(int argc, char **argv) {
    check_begin();
    const int clean = argc > 1 && strcmp(argv[1], "clean") == 0;
    kvt_runtime_t *runtime = open_runtime(1, "faults(worker=at(stall=50ms))");
    uint8_t *own = calloc(4096, 1);
    CHECK(own != NULL);
    kvt_buffer_t *buffer = NULL;
    CHECK_OK(kvt_buffer_wrap(runtime, own, 4096, NULL, NULL, &buffer, NULL));
    kvt_buffer_item_t item = copy_item(buffer, buffer, 2048);
    item.dst_offset = 2048;
    kvt_op_t *op = submit(runtime, NULL, &item, 1);
    if (clean) CHECK_OK(kvt_op_wait(op, KVT_OP_RELEASED, 0));
    /* Before, while and after the worker reads; no call of the library in between,
     * since any would order the two threads. */
    const uint64_t until = in_ms(200);
    do {
        for (int i = 0; i < 4096; i++) own[i] = (uint8_t)i;
    } while (!clean && now_ns() < until);
    CHECK_OK(finish_op(&op));
    free_buffer(&buffer);
    close_runtime(&runtime);
    free(own);
    return 0;
}

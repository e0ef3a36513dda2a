/* Memory of 100 bytes that is said to have 200: an op that sums it reads beyond. */

#include "../c/check.h"

int main(int argc, char **argv) {
    check_begin();
    const uint64_t said = argc > 1 && strcmp(argv[1], "clean") == 0 ? 100 : 200;
    kvt_runtime_t *runtime = open_runtime(1, NULL);
    uint8_t *own = malloc(100);
    CHECK(own != NULL);
    memset(own, 1, 100);
    kvt_buffer_t *buffer = NULL;
    CHECK_OK(kvt_buffer_wrap(runtime, own, said, NULL, NULL, &buffer, NULL));
    const kvt_buffer_item_t item = sum_item(buffer, said);
    kvt_op_t *op = submit(runtime, NULL, &item, 1);
    CHECK_OK(finish_op(&op));
    free_buffer(&buffer);
    close_runtime(&runtime);
    free(own);
    return 0;
}

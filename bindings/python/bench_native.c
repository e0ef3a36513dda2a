/*
 * C loops of the calls that bench.py times: the cost of a call without Python. Each function
 * returns the nanoseconds per call, or a negative status.
 */
#include <kvtier/kvtier.h>
#include <time.h>

static double now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec * 1e9 + (double)at.tv_nsec;
}

#define TIMED(count, call)                                                                        \
    do {                                                                                          \
        double begin = now_ns();                                                                  \
        for (uint64_t i = 0; i < (count); i++) {                                                  \
            kvt_status_t status = (call);                                                         \
            if (status != KVT_OK) return status;                                                  \
        }                                                                                         \
        return (now_ns() - begin) / (double)(count);                                              \
    } while (0)

double bench_now(const kvt_runtime_t *runtime, uint64_t count) {
    uint64_t out;
    TIMED(count, kvt_runtime_now(runtime, &out));
}

double bench_op_info(const kvt_op_t *op, uint64_t count) {
    kvt_op_info_t out = KVT_OP_INFO_INIT;
    TIMED(count, kvt_op_info(op, &out));
}

double bench_event(const kvt_ready_event_t *event, uint64_t count) {
    uint32_t out;
    TIMED(count, kvt_ready_event_query(event, &out));
}

double bench_touch(const kvt_policy_t *policy, const uint64_t *ids, uint64_t each,
                   uint64_t count) {
    uint64_t out;
    kvt_error_t *err = NULL;
    TIMED(count, kvt_policy_touch(policy, 0, NULL, ids, each, &out, &err));
}

double bench_poll(const kvt_queue_t *queue, uint64_t count) {
    kvt_completion_t room[256];
    uint64_t out;
    TIMED(count, kvt_queue_poll(queue, room, 256, sizeof room[0], &out));
}

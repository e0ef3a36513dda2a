/* A gate: memory that a worker cannot read before the test opens the gate.
 *
 * An op whose first item reads the gate starts and then blocks: the worker faults on the page,
 * and the fault handler waits for the test. So an op runs exactly as long as the test needs, on
 * a machine of any speed. */

#ifndef KVT_TESTS_GATE_H
#define KVT_TESTS_GATE_H

#include "check.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define GATE_BYTES 65536 /* a multiple of every page size */
#define MAX_GATES 4

typedef struct {
    kvt_buffer_t *buffer;
    uint8_t *_Atomic page;
    atomic_bool entered, is_open;
} gate_t;

static gate_t gates[MAX_GATES];
static struct sigaction gate_before;

/* The fault is synchronous, and a worker holds no lock while it reads a buffer. So the handler may
 * wait. */
static void gate_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    const int saved = errno;
    const uint8_t *at = info->si_addr;
    for (int i = 0; i < MAX_GATES; i++) {
        uint8_t *page = atomic_load(&gates[i].page);
        if (page == NULL || at < page || at >= page + GATE_BYTES) continue;
        atomic_store(&gates[i].entered, 1);
        while (!atomic_load(&gates[i].is_open)) short_pause();
        if (mprotect(page, GATE_BYTES, PROT_READ | PROT_WRITE) != 0) _exit(3);
        errno = saved;
        return;
    }
    sigaction(number, &gate_before, NULL); /* any other fault ends the program, as usual */
}

/* Creates a closed gate. Its bytes are zeros once it is open. */
static inline gate_t *make_gate(const kvt_runtime_t *runtime) {
    if (gate_before.sa_flags == 0 && gate_before.sa_handler == SIG_DFL) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_sigaction = gate_fault;
        action.sa_flags = SA_SIGINFO | SA_RESTART;
        CHECK(sigaction(SIGSEGV, &action, &gate_before) == 0);
    }
    gate_t *gate = gates;
    while (atomic_load(&gate->page) != NULL) CHECK(++gate < gates + MAX_GATES);
    /* Map readable first: memcheck reports a read of memory that never was readable. */
    void *page = mmap(NULL, GATE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    CHECK(mprotect(page, GATE_BYTES, PROT_NONE) == 0);
    atomic_store(&gate->entered, 0);
    atomic_store(&gate->is_open, 0);
    atomic_store(&gate->page, page);
    CHECK_OK(kvt_buffer_wrap(runtime, page, GATE_BYTES, NULL, NULL, &gate->buffer, NULL));
    return gate;
}

/* An item that blocks at the gate. */
static inline kvt_buffer_item_t gate_item(const gate_t *gate) { return sum_item(gate->buffer, 8); }

static inline int is_entered(const gate_t *gate) { return atomic_load(&gate->entered); }

/* Waits until a worker blocks at the gate. */
static inline void wait_entered(const gate_t *gate) {
    const uint64_t until = hang_guard();
    while (!is_entered(gate)) {
        CHECK(now_ns() < until);
        short_pause();
    }
}

static inline void open_gate(gate_t *gate) { atomic_store(&gate->is_open, 1); }

/* Frees the gate. No op may still read its memory. */
static inline void free_gate(gate_t *gate) {
    uint8_t *page = atomic_load(&gate->page);
    free_buffer(&gate->buffer);
    atomic_store(&gate->page, NULL);
    CHECK(munmap(page, GATE_BYTES) == 0);
}

#endif

/* Runs blocks of kernels on a processor: see cpu.h. What tests call of it is at the end. */
#include "cpu.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <mutex>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

cpu_place cpu_thread, cpu_block, cpu_block_size, cpu_grid_size;

namespace {

constexpr unsigned POISON = 0xDB, MOST_THREADS = 1024, STACK_BYTES = 128 << 10;
constexpr unsigned MOST_SHARED = 227 << 10;

struct copied {
    void *to;
    unsigned char bytes[16];
    unsigned group;
};

enum state { READY, AT_WARP, AT_BLOCK, ENDED };

struct fiber {
    state is;
    cpu_place place;
    cpu_together what;
    u32 mask;
    void *mine;
    unsigned groups;
    std::vector<copied> copies;
#if defined(__x86_64__)
    void *stack;
#else
    ucontext_t context;
#endif
};

struct {
    std::mutex turn;
    void (*kernel)(const call);
    call argument;
    fiber *fibers, *now;
    unsigned threads, chance;
    unsigned char *stacks, *dynamic;
    bool failed;
    char words[256];
#if defined(__x86_64__)
    void *home;
#else
    ucontext_t home;
#endif
} run;

#if defined(__x86_64__)
extern "C" void cpu_switch(void **from, void *to);
asm(".text\n"
    ".type cpu_switch, @function\n"
    "cpu_switch:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n"
    "    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n"
    "    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    ret\n"
    ".size cpu_switch, . - cpu_switch\n");
void enter(fiber *to) { cpu_switch(&run.home, to->stack); }
void leave() { cpu_switch(&run.now->stack, run.home); }
#else
void enter(fiber *to) { swapcontext(&run.home, &to->context); }
void leave() { swapcontext(&run.now->context, &run.home); }
#endif

void begin() {
    run.kernel(run.argument);
    run.now->is = ENDED;
    leave();
}

void prepare(fiber *fiber, unsigned at) {
    unsigned char *stack = run.stacks + (size_t)at * STACK_BYTES;
#if defined(__x86_64__)
    // As if `begin` had been called: what it would return to, then six registers.
    void **top = (void **)(stack + STACK_BYTES) - 3;
    *top = nullptr;
    *--top = (void *)begin;
    fiber->stack = top - 6;
#else
    getcontext(&fiber->context);
    fiber->context.uc_stack = {stack, 0, STACK_BYTES};
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, begin, 0);
#endif
    fiber->is = READY;
    fiber->groups = 0;
    fiber->copies.clear();
    cpu_place size = cpu_block_size;
    fiber->place = {at % size.x, at / size.x % size.y, at / size.x / size.y};
}

/* No thread can continue: all wait for the barrier, or some thread waits for ever. */
void meet() {
    unsigned ended = 0, at_warp = 0;
    for (unsigned i = 0; i < run.threads; i++) {
        ended += run.fibers[i].is == ENDED;
        at_warp += run.fibers[i].is == AT_WARP;
    }
    if (at_warp > 0 || ended > 0) {
        snprintf(run.words, sizeof run.words,
                 "block %u %u: of %u threads %u wait for lanes that do not come, %u have ended, "
                 "the others are at a barrier",
                 cpu_block.x, cpu_block.y, run.threads, at_warp, ended);
        run.failed = true;
        return;
    }
    for (unsigned i = 0; i < run.threads; i++) run.fibers[i].is = READY;
}

/* Threads from one to another, one after the other, each as far as it comes. */
bool run_some(unsigned from, unsigned to, bool is_backward) {
    bool moved = false;
    for (unsigned i = from; i < to && !run.failed; i++) {
        fiber *next = run.fibers + (is_backward ? from + to - 1 - i : i);
        if (next->is != READY) continue;
        run.now = next;
        cpu_thread = next->place;
        enter(next);
        moved = true;
    }
    return moved;
}

/* All threads; or one warp as far as it comes, then the next: that one is ahead of the others. */
bool run_all(unsigned order) {
    bool is_backward = order & 1, moved = false;
    if (order & 2) return run_some(0, run.threads, is_backward);
    unsigned warps = (run.threads + 31) / 32;
    for (unsigned i = 0; i < warps; i++) {
        unsigned first = 32 * (is_backward ? warps - 1 - i : i);
        unsigned end = first + 32 < run.threads ? first + 32 : run.threads;
        while (run_some(first, end, is_backward)) moved = true;
    }
    return moved;
}

extern "C" {
extern unsigned char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));
}

void run_block(unsigned shared) {
    memset(__start_shared_memory, POISON, __stop_shared_memory - __start_shared_memory);
    memset(run.dynamic, POISON, shared);
    for (unsigned i = 0; i < run.threads; i++) prepare(run.fibers + i, i);
    while (!run.failed) {
        // Threads in another order every time: what rests on one shows.
        run.chance = run.chance * 1664525 + 1013904223;
        if (run_all(run.chance >> 30)) continue;
        unsigned ended = 0;
        for (unsigned i = 0; i < run.threads; i++) ended += run.fibers[i].is == ENDED;
        if (ended == run.threads) return;
        meet();
    }
}

void make_room() {
    if (run.fibers != nullptr) return;
    run.fibers = new fiber[MOST_THREADS];
    void *stacks = mmap(nullptr, (size_t)MOST_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();
    run.stacks = (unsigned char *)stacks;
    run.dynamic = (unsigned char *)aligned_alloc(1024, MOST_SHARED + 1024);
    if (run.dynamic == nullptr) abort();
}

void *find(const char *name) {
    Dl_info self;
    if (dladdr((void *)find, &self) == 0) return nullptr;
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr : dlsym(library, name);
}

unsigned u16_of(const u32 *words, unsigned i) { return words[i / 2] >> 16 * (i % 2) & 0xFFFF; }

}  // namespace

void cpu_fail(const char *words) {
    if (!run.failed) snprintf(run.words, sizeof run.words, "%s", words);
    run.failed = true;
    leave();
}

unsigned char *cpu_dynamic() { return run.dynamic; }

unsigned cpu_lane() { return (unsigned)(run.now - run.fibers) % 32; }

void cpu_barrier() {
    run.now->is = AT_BLOCK;
    leave();
}

void cpu_collect(cpu_together what, u32 mask, void *mine) {
    fiber *now = run.now, *first = now - cpu_lane();
    now->what = what;
    now->mask = mask;
    now->mine = mine;
    if (!(mask >> cpu_lane() & 1)) cpu_fail("a lane is not in the mask that it gives");
    now->is = AT_WARP;
    void *given[32] = {};
    for (unsigned i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        if (first + i >= run.fibers + run.threads || first[i].is == ENDED)
            cpu_fail("a mask names a lane that is not there any more");
        if (first[i].is != AT_WARP) return leave();
        given[i] = first[i].mine;
    }
    for (unsigned i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        if (first[i].what != what || first[i].mask != mask)
            cpu_fail("lanes of a mask wait for different things");
        first[i].is = READY;
    }
    what(given, mask);
}

void cpu_copy16(void *to, const void *from, bool is) {
    if ((size_t)to % 16 != 0 || (size_t)from % 16 != 0) cpu_fail("a copy of 16 is not aligned");
    copied copy = {to, {}, run.now->groups};
    if (is) memcpy(copy.bytes, from, 16);
    run.now->copies.push_back(copy);
    memset(to, POISON, 16);
}

void cpu_copy_group() { run.now->groups++; }

void cpu_copy_wait(unsigned left) {
    std::vector<copied> &copies = run.now->copies;
    size_t kept = 0;
    for (copied &copy : copies) {
        if (copy.group + left < run.now->groups)
            memcpy(copy.to, copy.bytes, 16);
        else
            copies[kept++] = copy;
    }
    copies.resize(kept);
}

struct mma_lane {
    float *d;
    const u32 *a, *b;
    int is_bf16;
};

/* PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". */
void cpu_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], int is_bf16) {
    mma_lane mine = {d, a, b, is_bf16};
    auto meet = [](void *const *given, u32) {
        float a[16][16], b[16][8];
        mma_lane *lanes[32];
        for (unsigned lane = 0; lane < 32; lane++) {
            lanes[lane] = (mma_lane *)given[lane];
            unsigned group = lane >> 2, in_group = lane % 4;
            auto number = [&](unsigned bits) {
                return lanes[lane]->is_bf16 ? __uint_as_float(bits << 16) : cpu_from_f16((u16)bits);
            };
            for (unsigned i = 0; i < 8; i++) {
                unsigned row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
                unsigned column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
                a[row][column] = number(u16_of(lanes[lane]->a, i));
            }
            for (unsigned i = 0; i < 4; i++)
                b[in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)][group] =
                    number(u16_of(lanes[lane]->b, i));
        }
        for (unsigned lane = 0; lane < 32; lane++) {
            for (unsigned i = 0; i < 4; i++) {
                unsigned row = (lane >> 2) + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
                double sum = lanes[lane]->d[i];
                for (unsigned k = 0; k < 16; k++) sum += (double)a[row][k] * b[k][column];
                lanes[lane]->d[i] = (float)sum;
            }
        }
    };
    cpu_collect(meet, 0xFFFFFFFFu, &mine);
}

struct matrix_lane {
    const u16 *row;
    u32 got[4];
    u32 count;
    int is_across;
};

/* PTX ISA, "ldmatrix": addresses of rows of matrix m come from lanes 8m to 8m + 7. */
void cpu_load_matrix(u32 *to, const void *row, u32 count, int is_across) {
    matrix_lane mine = {(const u16 *)row, {}, count, is_across};
    auto meet = [](void *const *given, u32) {
        matrix_lane *const *lanes = (matrix_lane *const *)given;
        for (unsigned lane = 0; lane < 32; lane++) {
            for (unsigned m = 0; m < lanes[lane]->count; m++) {
                unsigned i = lane / 4, j = lane % 4 * 2;
                auto number = [&](unsigned row, unsigned column) {
                    const u16 *at = lanes[8 * m + row]->row;
                    if ((size_t)at % 16 != 0) cpu_fail("a row of a matrix is not aligned");
                    return (u32)at[column];
                };
                lanes[lane]->got[m] = lanes[lane]->is_across
                                          ? number(j, i) | number(j + 1, i) << 16
                                          : number(i, j) | number(i, j + 1) << 16;
            }
        }
    };
    cpu_collect(meet, 0xFFFFFFFFu, &mine);
    memcpy(to, mine.got, 4 * count);
}

float cpu_from_f16(u16 half) {
    u32 exponent = half >> 10 & 31, fraction = half & 1023;
    float size = exponent == 0    ? ldexpf((float)fraction, -24)
                 : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                  : ldexpf((float)(fraction + 1024), (int)exponent - 25);
    return half & 0x8000 ? -size : size;
}

u16 cpu_to_f16(float x) {
    u32 bits = __float_as_uint(x), size = bits & 0x7FFFFFFFu;
    u16 sign = (u16)(bits >> 16 & 0x8000);
    if (size > 0x7F800000u) return 0x7FFF;
    if (size >= 0x477FF000u) return sign | 0x7C00;
    if (size < 0x38800000u) return sign | (u16)lrintf(ldexpf(__uint_as_float(size), 24));
    return sign | (u16)((size + 0xFFF + (size >> 13 & 1) - 0x38000000u) >> 13);
}

u16 cpu_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

extern "C" {

/* Launches a kernel and returns when it has ended: 0, or 1 with words for it. */
int emu_launch(const char *name, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
               unsigned bz, unsigned shared, const void *call256) {
    std::lock_guard<std::mutex> turn(run.turn);
    make_room();
    run.kernel = (void (*)(const call))find(name);
    if (run.kernel == nullptr || shared > MOST_SHARED || (u64)bx * by * bz > MOST_THREADS ||
        (u64)bx * by * bz == 0 || (u64)gx * gy * gz == 0 || gy > 65535 || gz > 65535) {
        snprintf(run.words, sizeof run.words, "no such launch of %s: %u %u %u, %u %u %u, %u", name,
                 gx, gy, gz, bx, by, bz, shared);
        return 1;
    }
    memcpy(&run.argument, call256, sizeof run.argument);
    run.failed = false;
    run.threads = bx * by * bz;
    cpu_block_size = {bx, by, bz};
    cpu_grid_size = {gx, gy, gz};
    for (unsigned z = 0; z < gz; z++)
        for (unsigned y = 0; y < gy; y++)
            for (unsigned x = 0; x < gx && !run.failed; x++) {
                cpu_block = {x, y, z};
                run_block(shared);
            }
    return run.failed ? 1 : 0;
}

/* What was wrong with the last launch that failed. */
const char *emu_words() { return run.words; }

/* Where a field of the argument is; -1 where there is none of this name. */
long emu_offset(const char *field) {
#define FIELD(name) {#name, offsetof(call, name)}
    static const struct {
        const char *name;
        long at;
    } fields[] = {
        FIELD(kind), FIELD(dtype), FIELD(other_dtype), FIELD(scaling), FIELD(queries), FIELD(keys),
        FIELD(values), FIELD(out), FIELD(index), FIELD(counts), FIELD(table), FIELD(numbers),
        FIELD(more), FIELD(scales), FIELD(scratch), FIELD(scratch_bytes), FIELD(query_stride),
        FIELD(query_head_stride), FIELD(key_stride), FIELD(key_head_stride), FIELD(value_stride),
        FIELD(value_head_stride), FIELD(out_stride), FIELD(out_head_stride), FIELD(query_count),
        FIELD(query_heads), FIELD(key_heads), FIELD(key_dim), FIELD(value_dim), FIELD(page_tokens),
        FIELD(tokens), FIELD(first), FIELD(count), FIELD(keep), FIELD(recent), FIELD(sinks),
        FIELD(scale), FIELD(flags), FIELD(reserved),
    };
#undef FIELD
    for (auto &entry : fields)
        if (strcmp(entry.name, field) == 0) return entry.at;
    return -1;
}
}

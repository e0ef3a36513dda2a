/* Preloaded, makes threads late: now and then they sleep where they wake others, take locks, read
 * clocks, move bytes or begin. What holds by luck of the scheduler does not hold for long then.
 * KVT_LATE is a factor of all times, 1 without it. Children of the program are left alone. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MOST_US = 3000, FEW = 6, SOME = 8, MANY = 400 };

static uint64_t seed;
static unsigned factor = 1;
static _Thread_local uint64_t state;

/* The kernel itself: what libc calls syscall() is below. */
static long ask_kernel(long n, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long got;
    __asm__ volatile("syscall"
                     : "=a"(got)
                     : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return got;
}

__attribute__((constructor)) static void begin(void) {
    struct timespec now;
    (void)ask_kernel(SYS_clock_gettime, CLOCK_MONOTONIC, (long)&now, 0, 0, 0, 0);
    seed = (uint64_t)now.tv_nsec * 0x9e3779b97f4a7c15u + (uint64_t)getpid();
    const char *times = getenv("KVT_LATE");
    if (times != NULL) factor = (unsigned)atoi(times);
    unsetenv("LD_PRELOAD");
}

static uint64_t next_random(void) {
    if (state == 0) state = (seed ^ (uint64_t)(uintptr_t)&state * 0xd1342543de82ef95u) | 1;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state * 0x2545f4914f6cdd1du) >> 16;
}

/* One in so many sleeps, and of those one in fifty for ten times as long. */
static void late(unsigned one_in) {
    if (next_random() % one_in != 0) return;
    const uint64_t most = next_random() % 50 == 0 ? MOST_US * 10 : MOST_US;
    const uint64_t us = (1 + next_random() % most) * factor;
    const struct timespec t = {(time_t)(us / 1000000), (long)(us % 1000000 * 1000)};
    (void)ask_kernel(SYS_nanosleep, (long)&t, 0, 0, 0, 0, 0);
}

static void late_keeping_errno(unsigned one_in) {
    const int was = errno;
    late(one_in);
    errno = was;
}

long syscall(long n, ...) {
    va_list list;
    va_start(list, n);
    long v[6];
    for (int i = 0; i < 6; i++) v[i] = va_arg(list, long);
    va_end(list);
    late(n == SYS_futex ? FEW : SOME);
    const long got = ask_kernel(n, v[0], v[1], v[2], v[3], v[4], v[5]);
    if (n == SYS_futex) late(FEW);
    if (got >= 0 || got <= -4096) return got;
    errno = (int)-got;
    return -1;
}

/* The function of this name that would have been called. POSIX has void pointers hold functions. */
#define REAL(name)                                              \
    static __typeof__(&name) real;                              \
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t id, struct timespec *t) {
    REAL(clock_gettime);
    late_keeping_errno(MANY);
    return real(id, t);
}

struct start {
    void *(*run)(void *);
    void *arg;
};

static void *start_late(void *data) {
    const struct start start = *(struct start *)data;
    free(data);
    late(2);
    return start.run(start.arg);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg) {
    REAL(pthread_create);
    struct start *start = malloc(sizeof *start);
    if (start == NULL) return EAGAIN;
    start->run = run;
    start->arg = arg;
    const int got = real(thread, attr, start_late, start);
    if (got != 0) free(start);
    late(2);
    return got;
}

#define LATE(type, name, params, args) \
    type name params {                 \
        REAL(name);                    \
        late_keeping_errno(SOME);      \
        const type got = real args;    \
        late_keeping_errno(SOME);      \
        return got;                    \
    }
LATE(int, pthread_mutex_lock, (pthread_mutex_t * one), (one))
LATE(int, pthread_cond_signal, (pthread_cond_t * one), (one))
LATE(int, pthread_cond_broadcast, (pthread_cond_t * one), (one))
LATE(ssize_t, pread64, (int file, void *to, size_t n, off64_t at), (file, to, n, at))
LATE(ssize_t, pwrite64, (int file, const void *from, size_t n, off64_t at), (file, from, n, at))
LATE(ssize_t, preadv64, (int file, const struct iovec *to, int n, off64_t at), (file, to, n, at))
LATE(ssize_t, pwritev64, (int file, const struct iovec *from, int n, off64_t at), (file, from, n, at))
LATE(ssize_t, writev, (int file, const struct iovec *from, int n), (file, from, n))
LATE(int, fsync, (int file), (file))
LATE(int, fdatasync, (int file), (file))
LATE(ssize_t, send, (int file, const void *from, size_t n, int how), (file, from, n, how))
LATE(ssize_t, recv, (int file, void *to, size_t n, int how), (file, to, n, how))
LATE(ssize_t, sendmsg, (int file, const struct msghdr *what, int how), (file, what, how))

/* Part of fake.c: host memory that is registered, what is known of addresses, ranges of addresses that
 * memory is mapped into, and copies that come together. */

static int host_at(const char *at) {
    for (int i = 0; i < MOST; i++)
        if (hosts[i].at && at >= hosts[i].at && at < hosts[i].at + hosts[i].bytes) return i;
    return -1;
}

static code_t add_host(char *at, size_t bytes, int is_mapped, int is_own) {
    if ((long)bytes > max_host_bytes - host_bytes) return OUT_OF_MEMORY;
    for (int i = 0; i < MOST; i++) {
        if (hosts[i].at) continue;
        hosts[i].at = at, hosts[i].bytes = bytes, hosts[i].is_mapped = is_mapped, hosts[i].is_own = is_own;
        host_bytes += (long)bytes, live_hosts++;
        return OK;
    }
    return OUT_OF_MEMORY;
}

static code_t drop_host(char *at, int is_own, const char *call) {
    int i = host_at(at);
    if (i < 0 || hosts[i].at != at || hosts[i].is_own != is_own) {
        complain(call, "no such host memory");
        return NOT_REGISTERED;
    }
    if (in_use((pointer_t)(uintptr_t)at, hosts[i].bytes)) complain(call, "work under way uses it");
    host_bytes -= (long)hosts[i].bytes, live_hosts--;
    hosts[i].at = NULL;
    if (is_own) free(at);
    return OK;
}

code_t cuMemHostRegister_v2(char *at, size_t bytes, unsigned flags) {
    BEGIN_IN("cuMemHostRegister")
    NEED(!is_forbidden(), "cuMemHostRegister", "while a graph is made", CAPTURE_FORBIDS)
    if (!at || !bytes || flags > 15) END(INVALID_VALUE)
    for (int i = 0; i < MOST; i++)
        if (hosts[i].at && at < hosts[i].at + hosts[i].bytes && hosts[i].at < at + bytes)
            END(ALREADY_REGISTERED)
    END(add_host(at, bytes, (flags & 2) != 0, 0))
}

code_t cuMemHostUnregister(char *at) {
    BEGIN_IN("cuMemHostUnregister")
    END(drop_host(at, 0, "cuMemHostUnregister"))
}

code_t cuMemHostAlloc(char **to, size_t bytes, unsigned flags) {
    BEGIN_IN("cuMemHostAlloc")
    NEED(!is_forbidden(), "cuMemHostAlloc", "while a graph is made", CAPTURE_FORBIDS)
    if (!bytes) END(INVALID_VALUE)
    char *at = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    code_t code = at ? add_host(at, bytes, (flags & 2) != 0, 1) : OUT_OF_MEMORY;
    if (code == OK) *to = at;
    else free(at);
    END(code)
}

code_t cuMemFreeHost(char *at) {
    BEGIN_IN("cuMemFreeHost")
    END(drop_host(at, 1, "cuMemFreeHost"))
}

code_t cuMemHostGetDevicePointer_v2(pointer_t *to, char *at, unsigned flags) {
    BEGIN_IN("cuMemHostGetDevicePointer")
    int i = host_at(at);
    NEED(flags == 0 && i >= 0, "cuMemHostGetDevicePointer", "no registered memory", INVALID_VALUE)
    if (!hosts[i].is_mapped) END(INVALID_VALUE)
    *to = (pointer_t)(uintptr_t)at;
    END(OK)
}

/* The second form of it: a stream stands until a number that the device reaches is as large, or
 * larger, counted in a circle. */
code_t cuStreamWaitValue32_v2(stream_t *stream, pointer_t at, uint32_t value, unsigned flags) {
    const char *call = "cuStreamWaitValue32";
    BEGIN_IN(call)
    NEED(is_here(stream), call, "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, call, "into a graph", CAPTURE_FORBIDS)
    int host = host_at((const char *)(uintptr_t)at);
    int is_reached = owner(at, sizeof value) >= 0 || (host >= 0 && hosts[host].is_mapped);
    NEED(at % sizeof value == 0 && is_reached, call, "no number that the device reaches", INVALID_VALUE)
    NEED(flags == 0, call, "another question", INVALID_VALUE)
    END(put(stream, (op_t){.what = WAIT_VALUE, .from = (const unsigned char *)(uintptr_t)at, .turn = value}))
}

/* An unknown address is no failure: its answers are zeros. */
code_t cuPointerGetAttributes(unsigned count, const int *which, void *const *to, pointer_t at) {
    BEGIN("cuPointerGetAttributes")
    int host = host_at((const char *)(uintptr_t)at), device = -1;
    for (int i = 0; i < MOST; i++)
        if (given[i].at && at - given[i].at < given[i].bytes) device = i;
    for (unsigned i = 0; i < count; i++) {
        pointer_t start = device >= 0 ? given[device].at : host >= 0 ? (pointer_t)(uintptr_t)hosts[host].at : 0;
        size_t bytes = device >= 0 ? given[device].bytes : host >= 0 ? hosts[host].bytes : 0;
        int is_reached = device >= 0 || (host >= 0 && hosts[host].is_mapped);
        if (which[i] == 2) *(unsigned *)to[i] = device >= 0 ? DEVICE : host >= 0 ? HOST : 0;
        else if (which[i] == 3) *(pointer_t *)to[i] = is_reached ? at : 0;
        else if (which[i] == 8) *(unsigned *)to[i] = 0;
        else if (which[i] == 9) *(int *)to[i] = device >= 0 ? given[device].ordinal : host >= 0 ? 0 : -2;
        else if (which[i] == 16) *(unsigned *)to[i] = current() && reaches(current(), at, 1) ? 3 : 0;
        else if (which[i] == 11) *(pointer_t *)to[i] = start;
        else if (which[i] == 12) *(size_t *)to[i] = bytes;
        else {
            complain("cuPointerGetAttributes", "a question that it does not know");
            END(INVALID_VALUE)
        }
    }
    END(OK)
}

typedef struct {
    unsigned order;
    int from[2], to[2];
    unsigned flags;
} batch_order_t;

/* The form of 12.8. Copies of a batch have no order: they are put down as chance has it. */
static code_t batch(const pointer_t *to, const pointer_t *from, const size_t *bytes, size_t count,
                    const batch_order_t *orders, const size_t *firsts, size_t kinds, size_t *failed,
                    stream_t *stream) {
    const char *call = "cuMemcpyBatchAsync";
    BEGIN_IN(call)
    *failed = SIZE_MAX;
    NEED(is_here(stream), call, "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, call, "into a graph", CAPTURE_FORBIDS)
    NEED(count && kinds && kinds <= count && firsts[0] == 0, call, "nothing, or not described", INVALID_VALUE)
    for (size_t i = 0; i < kinds; i++) {
        NEED(i == 0 || firsts[i] > firsts[i - 1], call, "descriptions in no order", INVALID_VALUE)
        NEED(orders[i].order == 1 && orders[i].flags == 0, call, "sources out of turn", INVALID_VALUE)
    }
    for (size_t i = 0; i < count; i++)
        NEED(to[i] && from[i] && bytes[i], call, "a copy of nothing", INVALID_VALUE)
    for (size_t i = 0; i < count; i++) {
        int is_known = reaches(current(), to[i], bytes[i]) || host_at((const char *)(uintptr_t)to[i]) >= 0;
        is_known &= reaches(current(), from[i], bytes[i]) || host_at((const char *)(uintptr_t)from[i]) >= 0;
        NEED(is_known && same_addresses, call, "memory that is not registered", INVALID_VALUE)
    }
    size_t *turns = calloc(count, sizeof *turns);
    for (size_t i = 0; i < count; i++) turns[i] = i;
    for (size_t i = count; i > 1; i--) {
        size_t other = chance() % i, kept = turns[i - 1];
        turns[i - 1] = turns[other], turns[other] = kept;
    }
    for (size_t i = 0; i < count; i++) {
        size_t at = turns[i];
        put(stream, (op_t){.what = COPY, .to = (unsigned char *)(uintptr_t)to[at],
                           .from = (const unsigned char *)(uintptr_t)from[at], .width = bytes[at], .height = 1});
    }
    free(turns);
    END(OK)
}

code_t cuGetProcAddress_v2(const char *name, void **to, int of_version, uint64_t flags, int *found) {
    BEGIN("cuGetProcAddress")
    NEED(flags == 0, "cuGetProcAddress", "streams of another kind", INVALID_VALUE)
    int is_known = !strcmp(name, "cuMemcpyBatchAsync"), is_there = version >= 12080 && of_version == 12080;
    *to = is_known && is_there ? (void *)batch : NULL;
    *found = *to ? 0 : is_known ? 2 : 1;
    END(*to ? OK : NOT_FOUND)
}

enum { GRAIN = 64 << 10, MOST_WINDOWS = 64 };

typedef struct {
    unsigned kind, handles;
    int location[2];
    void *unused;
    unsigned char flags[8];
} allocation_t;

typedef struct {
    int location[2];
    unsigned flags;
} access_t;

static struct { char *at, *raw; size_t bytes; } windows[MOST_WINDOWS];
static struct { int fd, mapped, is_released; size_t bytes; } pieces[MOST_WINDOWS];
static struct { char *at; size_t bytes, piece; } mapped[MOST_WINDOWS];

static int is_plain(const allocation_t *of) {
    return of && of->kind == 1 && of->handles == 0 && of->location[0] == 1 &&
           of->location[1] == current()->ordinal && !of->unused;
}

code_t cuMemGetAllocationGranularity(size_t *to, const allocation_t *of, int option) {
    BEGIN_IN("cuMemGetAllocationGranularity")
    NEED(is_plain(of) && option == 0, "cuMemGetAllocationGranularity", "of what?", INVALID_VALUE)
    *to = GRAIN;
    END(OK)
}

code_t cuMemAddressReserve(pointer_t *to, size_t bytes, size_t align, pointer_t near, uint64_t flags) {
    BEGIN_IN("cuMemAddressReserve")
    NEED(bytes && bytes % GRAIN == 0 && !align && !near && !flags, "cuMemAddressReserve", "how?", INVALID_VALUE)
    for (int i = 0; i < MOST_WINDOWS; i++) {
        if (windows[i].at) continue;
        void *raw = mmap(NULL, bytes + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (raw == MAP_FAILED) END(OUT_OF_MEMORY)
        *to = ((pointer_t)(uintptr_t)raw + GRAIN - 1) / GRAIN * GRAIN;
        windows[i].at = (char *)(uintptr_t)*to, windows[i].raw = raw;
        windows[i].bytes = bytes, live_windows++;
        END(OK)
    }
    END(OUT_OF_MEMORY)
}

code_t cuMemAddressFree(pointer_t at, size_t bytes) {
    BEGIN_IN("cuMemAddressFree")
    for (int i = 0; i < MOST_WINDOWS; i++) {
        if (!windows[i].at || (pointer_t)(uintptr_t)windows[i].at != at) continue;
        NEED(windows[i].bytes == bytes, "cuMemAddressFree", "not all of it", INVALID_VALUE)
        for (int m = 0; m < MOST_WINDOWS; m++)
            NEED(!mapped[m].at || (pointer_t)(uintptr_t)mapped[m].at - at >= bytes, "cuMemAddressFree",
                 "memory is mapped there", INVALID_VALUE)
        munmap(windows[i].raw, bytes + GRAIN);
        windows[i].at = NULL, live_windows--;
        END(OK)
    }
    complain("cuMemAddressFree", "what is not reserved");
    END(INVALID_VALUE)
}

code_t cuMemCreate(uint64_t *to, size_t bytes, const allocation_t *of, uint64_t flags) {
    BEGIN_IN("cuMemCreate")
    NEED(bytes && bytes % GRAIN == 0 && is_plain(of) && !flags, "cuMemCreate", "how?", INVALID_VALUE)
    if ((long)bytes > max_bytes - live_bytes) END(OUT_OF_MEMORY)
    for (int i = 0; i < MOST_WINDOWS; i++) {
        if (pieces[i].bytes) continue;
        int fd = memfd_create("fake device memory", 0);
        if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) END(OUT_OF_MEMORY)
        pieces[i].fd = fd, pieces[i].bytes = bytes, pieces[i].mapped = pieces[i].is_released = 0;
        live_windows++, live_bytes += (long)bytes;
        *to = (uint64_t)i + 1;
        END(OK)
    }
    END(OUT_OF_MEMORY)
}

/* Memory goes when it is given back and mapped nowhere. */
static void settle(size_t i) {
    if (!pieces[i].is_released || pieces[i].mapped) return;
    close(pieces[i].fd);
    live_windows--, live_bytes -= (long)pieces[i].bytes;
    pieces[i].bytes = 0;
}

code_t cuMemRelease(uint64_t handle) {
    BEGIN_IN("cuMemRelease")
    NEED(handle && handle <= MOST_WINDOWS && pieces[handle - 1].bytes && !pieces[handle - 1].is_released,
         "cuMemRelease", "no memory", INVALID_VALUE)
    pieces[handle - 1].is_released = 1;
    settle(handle - 1);
    END(OK)
}

code_t cuMemMap(pointer_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    BEGIN_IN("cuMemMap")
    int is_inside = 0, is_free = 1, place = -1;
    for (int i = 0; i < MOST_WINDOWS; i++) {
        pointer_t start = (pointer_t)(uintptr_t)windows[i].at, other = (pointer_t)(uintptr_t)mapped[i].at;
        is_inside |= start && at >= start && at + bytes <= start + windows[i].bytes;
        is_free &= !other || at >= other + mapped[i].bytes || other >= at + bytes;
        if (!other) place = i;
    }
    NEED(handle && handle <= MOST_WINDOWS && pieces[handle - 1].bytes == bytes && !offset && !flags, "cuMemMap",
         "what?", INVALID_VALUE)
    NEED(is_inside && is_free && at % GRAIN == 0 && place >= 0, "cuMemMap", "where?", INVALID_VALUE)
    void *to = (void *)(uintptr_t)at;
    if (mmap(to, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pieces[handle - 1].fd, 0) != to)
        END(OUT_OF_MEMORY)
    mapped[place].at = to, mapped[place].bytes = bytes, mapped[place].piece = handle - 1;
    pieces[handle - 1].mapped++;
    END(OK)
}

/* Only now it is memory that a device may use. */
code_t cuMemSetAccess(pointer_t at, size_t bytes, const access_t *who, size_t count) {
    BEGIN_IN("cuMemSetAccess")
    NEED(count == 1 && who->flags == 3 && who->location[0] == 1 && who->location[1] == current()->ordinal,
         "cuMemSetAccess", "who?", INVALID_VALUE)
    for (int m = 0; m < MOST_WINDOWS; m++)
        if (mapped[m].at && (pointer_t)(uintptr_t)mapped[m].at == at && mapped[m].bytes == bytes)
            for (int i = 0; i < MOST; i++)
                if (!given[i].at) {
                    given[i].at = at, given[i].bytes = bytes, given[i].ordinal = current()->ordinal;
                    given[i].context = NULL;
                    END(OK)
                }
    complain("cuMemSetAccess", "nothing is mapped there");
    END(INVALID_VALUE)
}

code_t cuMemUnmap(pointer_t at, size_t bytes) {
    BEGIN_IN("cuMemUnmap")
    for (int m = 0; m < MOST_WINDOWS; m++) {
        if (!mapped[m].at || (pointer_t)(uintptr_t)mapped[m].at != at) continue;
        NEED(mapped[m].bytes == bytes, "cuMemUnmap", "not all of it", INVALID_VALUE)
        if (in_use(at, bytes)) complain("cuMemUnmap", "work under way uses it");
        for (int i = 0; i < MOST; i++)
            if (given[i].at == at) given[i].at = 0;
        mmap(mapped[m].at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        mapped[m].at = NULL;
        pieces[mapped[m].piece].mapped--;
        settle(mapped[m].piece);
        END(OK)
    }
    complain("cuMemUnmap", "what is not mapped");
    END(INVALID_VALUE)
}

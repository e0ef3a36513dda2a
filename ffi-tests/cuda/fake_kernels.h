/* Part of fake.c: modules, their functions, and launches that are carried out on the processor when
 * their turn comes. */

typedef struct module {
    function_t *functions[32];
    int count;
} module_t;

code_t cuModuleLoadDataEx(module_t **to, const void *image, unsigned count, const int *options,
                          void *const *values) {
    const char *call = "cuModuleLoadDataEx";
    pthread_mutex_lock(&lock);
    code_t told = planned(call);
    char *words = NULL;
    size_t room = 0;
    for (unsigned i = 0; i < count; i++) {
        if (options[i] == 5) words = values[i];
        if (options[i] == 6) room = (size_t)(uintptr_t)values[i];
    }
    if (told != OK) {
        if (words && room) snprintf(words, room, "the fake compiler does not like it");
        END(told)
    }
    NEED(current(), call, "in no context", INVALID_CONTEXT)
    NEED(!is_forbidden(), call, "while a graph is made", CAPTURE_FORBIDS)
    NEED(image, call, "no image", INVALID_VALUE)
    *to = calloc(1, sizeof **to);
    live_modules++;
    END(OK)
}

code_t cuModuleUnload(module_t *module) {
    BEGIN_IN("cuModuleUnload")
    for (stream_t *s = streams; s; s = s->next)
        for (op_t *op = s->first; op; op = op->next)
            if (op->what == LAUNCH) complain("cuModuleUnload", "kernels are under way");
    for (int i = 0; i < module->count; i++) free(module->functions[i]);
    free(module);
    live_modules--;
    END(OK)
}

code_t cuModuleGetFunction(function_t **to, module_t *module, const char *name) {
    BEGIN_IN("cuModuleGetFunction")
    NEED(module && module->count < 32, "cuModuleGetFunction", "no module", INVALID_HANDLE)
    function_t *function = calloc(1, sizeof *function);
    snprintf(function->name, sizeof function->name, "%s", name);
    function->shared = PLAIN_SHARED;
    *to = module->functions[module->count++] = function;
    END(OK)
}

code_t cuFuncSetAttribute(function_t *function, int which, int value) {
    BEGIN_IN("cuFuncSetAttribute")
    NEED(function && which == 8, "cuFuncSetAttribute", "a question that it does not know", INVALID_VALUE)
    if (value > block_shared) END(INVALID_VALUE)
    function->shared = (unsigned)value;
    END(OK)
}

code_t cuLaunchKernel(function_t *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                      unsigned bz, unsigned shared, stream_t *stream, void **arguments, void **extra) {
    const char *call = "cuLaunchKernel";
    BEGIN_IN(call)
    NEED(is_here(stream), call, "no stream", INVALID_HANDLE)
    NEED(!stream->capturing, call, "into a graph", CAPTURE_FORBIDS)
    NEED(function && arguments && arguments[0] && !extra, call, "no function or argument", INVALID_VALUE)
    NEED(gx && gy && gz && gy <= 65535 && gz <= 65535, call, "no grid", INVALID_VALUE)
    NEED(bx && by && bz && (uint64_t)bx * by * bz <= 1024, call, "no block", INVALID_VALUE)
    NEED(shared <= function->shared, call, "more shared memory than allowed", INVALID_VALUE)
    op_t op = {.what = LAUNCH, .function = function, .grid = {gx, gy, gz}, .block = {bx, by, bz},
               .shared = shared};
    memcpy(op.call, arguments[0], CALL_BYTES); /* the caller's own may change from now on */
    END(put(stream, op))
}

typedef struct {
    uint64_t from, to;
    int64_t from_stride, to_stride;
    uint32_t run_bytes, runs;
} piece_t;

/* Of `struct call`: what the kernel that moves bytes is asked. */
static uint64_t table_of(const op_t *op) {
    uint64_t table;
    memcpy(&table, op->call + 64, sizeof table);
    return table;
}

static uint32_t count_of(const op_t *op) {
    uint32_t count;
    memcpy(&count, op->call + 208, sizeof count);
    return count;
}

static int is_reached(const context_t *context, uint64_t at, uint64_t bytes) {
    int host = host_at((const char *)(uintptr_t)at);
    int is_host = host >= 0 && hosts[host].is_mapped &&
                  at + bytes <= (uint64_t)(uintptr_t)hosts[host].at + hosts[host].bytes;
    return is_host || reaches(context, at, bytes);
}

/* All runs of a side of a piece; strides may lead back. */
static int is_side_reached(const context_t *context, uint64_t at, int64_t stride, const piece_t *p) {
    if (!p->runs || !p->run_bytes) return 1;
    uint64_t far = (p->runs - 1) * (uint64_t)(stride < 0 ? -stride : stride);
    return is_reached(context, stride < 0 ? at - far : at, far + p->run_bytes);
}

/* Carries a launch out; false: it would go where no kernel may. */
static int runs(const context_t *context, const op_t *op) {
    const char *name = op->function->name;
    if (!strcmp(name, "move_parts") || !strcmp(name, "move_plan")) {
        const piece_t *pieces = (const piece_t *)(uintptr_t)table_of(op);
        uint32_t count = count_of(op);
        if (!is_reached(context, table_of(op), count * sizeof *pieces)) return 0;
        for (uint32_t i = 0; i < count; i++) {
            piece_t p = pieces[i];
            if (!is_side_reached(context, p.from, p.from_stride, &p) ||
                !is_side_reached(context, p.to, p.to_stride, &p))
                return 0;
            for (uint64_t run = 0; !emulator && !strcmp(name, "move_parts") && run < p.runs; run++)
                memcpy((char *)(uintptr_t)p.to + run * (uint64_t)p.to_stride,
                       (const char *)(uintptr_t)p.from + run * (uint64_t)p.from_stride, p.run_bytes);
        }
    }
    int went = !emulator || emulator(name, op->grid[0], op->grid[1], op->grid[2], op->block[0],
                                     op->block[1], op->block[2], op->shared, op->call) == 0;
    if (!strcmp(name, "move_parts")) {
        const piece_t *pieces = (const piece_t *)(uintptr_t)table_of(op);
        for (uint32_t i = 0, count = count_of(op); went && i < count; i++)
            flip((void *)(uintptr_t)pieces[i].to, (const void *)(uintptr_t)pieces[i].from,
                 pieces[i].run_bytes);
    }
    return went;
}

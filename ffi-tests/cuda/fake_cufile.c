/* A cuFile without storage, for tests: it reads by pread into memory of the driver without a device
 * (fake.c), if that says that the memory is a device's and idle. What is called wrongly is counted: in
 * no context, with files and memory that are not known or not known any more, off the grain, while
 * a read is under way. Any call can be made to fail, a read also to be short. It can be one that may go by
 * way of host memory in silence: then a read is wrong, since the library must not use such a one.
 *
 * -DOLD leaves out the setting that makes cuFile read directly or fail; -DLESS leaves out
 * cuFileRead, so that it is no cuFile at all.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int code, cuda; } told_t;
typedef struct {
    unsigned type;
    union { int descriptor; void *other; } file;
    const void *calls;
} description_t;
typedef struct {
    unsigned major, minor;
    size_t poll, direct;
    unsigned reaches, modes, features, cache, buffer, pinned, batch, timeout;
} properties_t;

enum { NO_MODULE = 5001, BAD_VALUE = 5022, IS_KNOWN = 5023, NOT_KNOWN = 5024, IS_OPEN = 5026,
       UNKNOWN_FILE = 5027, FILE_IS_KNOWN = 5028, GRAIN = 4096, MOST = 64, SHORT = -7, SWITCHES = 14 };

typedef struct file { int descriptor, is_known, reading; } file_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static file_t *files[MOST * 64];
static int file_count;
static struct { char *at; size_t bytes; int reading; } memory[MOST];
static struct { char call[64]; long nth; int code; } planted[16];
static long wrong, opened, reads;
static char wrong_text[256];
static properties_t properties;
static size_t properties_bytes = sizeof(properties_t);
static unsigned char staged[SWITCHES], running[SWITCHES], defaults[SWITCHES];
static int switch_count = SWITCHES, ignores_switches;
static int (*is_idle)(uint64_t, size_t);
static int (*context_device)(int *);

static void complain(const char *call, const char *why) {
    if (wrong++ == 0) snprintf(wrong_text, sizeof wrong_text, "%s: %s", call, why);
}

static told_t told(int code) {
    pthread_mutex_unlock(&lock);
    return (told_t){code, code == 5011 ? 700 : 0};
}

/* The driver that is loaded: the environment names it for programs that do not know of this. */
static void find_driver(void) {
    if (is_idle) return;
    const char *path = getenv("KVTIER_CUDA_LIBRARY");
    void *driver = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (!driver) return complain("cuFile", "without a driver");
    *(void **)&is_idle = dlsym(driver, "fake_is_idle");
    *(void **)&context_device = dlsym(driver, "cuCtxGetDevice");
}

static int planned(const char *call) {
    for (int i = 0; i < 16; i++)
        if (planted[i].nth && !strcmp(planted[i].call, call) && (planted[i].nth < 0 || --planted[i].nth == 0))
            return planted[i].code;
    return 0;
}

#define BEGIN(call)                                                                              \
    pthread_mutex_lock(&lock);                                                                   \
    find_driver();                                                                               \
    int planted_code = planned(call);
/* What needs memory of a device needs a context. */
#define IN_CONTEXT(call)                                                                         \
    { int ordinal; if (!context_device || context_device(&ordinal)) complain(call, "in no context"); }

told_t cuFileDriverOpen(void) {
    BEGIN("cuFileDriverOpen")
    IN_CONTEXT("cuFileDriverOpen")
    if (planted_code) return told(planted_code);
    int has_way = properties.major || properties.minor || properties.features & 16;
    if (!opened) {
        for (int i = 0; i < SWITCHES; i++) running[i] = ignores_switches ? defaults[i] : staged[i];
        if (!running[1] && !has_way) return told(NO_MODULE);
        memcpy(staged, defaults, sizeof staged);
    }
    opened++;
    return told(0);
}

told_t cuFileDriverClose_v2(void) {
    BEGIN("cuFileDriverClose")
    if (!opened) {
        complain("cuFileDriverClose", "not open");
        return told(NO_MODULE);
    }
    if (--opened) return told(0);
    for (int i = 0; i < file_count; i++) {
        if (files[i]->is_known) complain("cuFileDriverClose", "a file is still known");
        files[i]->is_known = 0;
    }
    for (int i = 0; i < MOST; i++) {
        if (memory[i].at) complain("cuFileDriverClose", "memory is still known");
        memory[i].at = NULL;
    }
    return told(planted_code);
}

told_t cuFileDriverGetProperties(void *to) {
    BEGIN("cuFileDriverGetProperties")
    if (!opened) complain("cuFileDriverGetProperties", "not open");
    if (planted_code) return told(planted_code);
    properties_t now = properties;
    now.modes |= running[1] ? 2 : 0;
    /* A later one fills more than is known here. */
    memset(to, 0xff, properties_bytes);
    memcpy(to, &now, sizeof now);
    return told(0);
}

told_t cuFileHandleRegister(void **to, const description_t *of) {
    BEGIN("cuFileHandleRegister")
    IN_CONTEXT("cuFileHandleRegister")
    if (!opened) complain("cuFileHandleRegister", "not open");
    if (planted_code) return told(planted_code);
    if (of->type != 1 || of->calls) return told(BAD_VALUE);
    for (int i = 0; i < file_count; i++)
        if (files[i]->is_known && files[i]->descriptor == of->file.descriptor) return told(FILE_IS_KNOWN);
    file_t *file = calloc(1, sizeof *file); /* kept, so that it is seen when it is used again */
    if (!file || file_count == MOST * 64) return told(5043);
    file->descriptor = of->file.descriptor, file->is_known = 1;
    files[file_count++] = file;
    *to = file;
    return told(0);
}

void cuFileHandleDeregister(file_t *file) {
    BEGIN("cuFileHandleDeregister")
    (void)planted_code;
    int found = 0;
    for (int i = 0; i < file_count; i++) found |= files[i] == file && file->is_known;
    if (!found) complain("cuFileHandleDeregister", "no file that is known");
    else if (file->reading) complain("cuFileHandleDeregister", "while it is read");
    else file->is_known = 0;
    pthread_mutex_unlock(&lock);
}

static int memory_at(const char *at) {
    for (int i = 0; i < MOST; i++) if (memory[i].at && memory[i].at == at) return i;
    return -1;
}

told_t cuFileBufRegister(char *at, size_t bytes, int flags) {
    BEGIN("cuFileBufRegister")
    IN_CONTEXT("cuFileBufRegister")
    if (!opened) complain("cuFileBufRegister", "not open");
    if (planted_code) return told(planted_code);
    if (!at || !bytes || flags) return told(BAD_VALUE);
    if (memory_at(at) >= 0) return told(IS_KNOWN);
    if (!is_idle || !is_idle((uint64_t)(uintptr_t)at, bytes)) complain("cuFileBufRegister", "no idle device memory");
    for (int i = 0; i < MOST; i++) {
        if (memory[i].at) continue;
        memory[i].at = at, memory[i].bytes = bytes, memory[i].reading = 0;
        return told(0);
    }
    return told(5016);
}

told_t cuFileBufDeregister(char *at) {
    BEGIN("cuFileBufDeregister")
    int i = memory_at(at);
    if (i < 0) {
        complain("cuFileBufDeregister", "no memory that is known");
        return told(NOT_KNOWN);
    }
    if (memory[i].reading) complain("cuFileBufDeregister", "while it is read into");
    if (!is_idle || !is_idle((uint64_t)(uintptr_t)at, memory[i].bytes))
        complain("cuFileBufDeregister", "memory that was given back before");
    memory[i].at = NULL;
    return told(planted_code);
}

#ifndef LESS
static ssize_t failed(int code) {
    pthread_mutex_unlock(&lock);
    if (code > 0 && code < 5000) {
        errno = code;
        return -1;
    }
    return -code;
}

ssize_t cuFileRead(file_t *file, char *base, size_t bytes, off_t offset, off_t at) {
    BEGIN("cuFileRead")
    IN_CONTEXT("cuFileRead")
    if (running[1] || running[2] || running[12] || running[13]) complain("cuFileRead", "by way of host memory");
    int i = memory_at(base), is_file = 0;
    for (int f = 0; f < file_count; f++) is_file |= files[f] == file && file->is_known;
    if (!is_file) {
        complain("cuFileRead", "no file that is known");
        return failed(UNKNOWN_FILE);
    }
    if (i < 0 || at < 0 || (size_t)at > memory[i].bytes || bytes > memory[i].bytes - (size_t)at) {
        complain("cuFileRead", "not into memory that is known");
        return failed(NOT_KNOWN);
    }
    char *to = base + at;
    if (offset % GRAIN || bytes % GRAIN || (uintptr_t)to % GRAIN) complain("cuFileRead", "off the grain");
    if (!is_idle || !is_idle((uint64_t)(uintptr_t)to, bytes)) complain("cuFileRead", "the device uses the memory");
    memset(to, 0xDB, bytes);
    if (planted_code && planted_code != SHORT) return failed(planted_code);
    if (planted_code == SHORT) bytes /= 2;
    file->reading++, memory[i].reading++, reads++;
    pthread_mutex_unlock(&lock);
    ssize_t got = pread(file->descriptor, to, bytes, offset);
    int number = errno;
    pthread_mutex_lock(&lock);
    if (!is_idle || !is_idle((uint64_t)(uintptr_t)to, bytes)) complain("cuFileRead", "the device used the memory");
    file->reading--, memory[i].reading--;
    pthread_mutex_unlock(&lock);
    errno = number;
    return got;
}
#endif

#ifndef OLD
told_t cuFileGetVersion(int *to) {
    BEGIN("cuFileGetVersion")
    if (!planted_code) *to = 1130;
    return told(planted_code);
}

told_t cuFileGetParameterBool(unsigned which, unsigned char *to) {
    BEGIN("cuFileGetParameterBool")
    if (planted_code || which >= (unsigned)switch_count) return told(planted_code ? planted_code : BAD_VALUE);
    *to = opened ? running[which] : staged[which];
    return told(0);
}

told_t cuFileSetParameterBool(unsigned which, unsigned char is_on) {
    BEGIN("cuFileSetParameterBool")
    if (planted_code || which >= (unsigned)switch_count) return told(planted_code ? planted_code : BAD_VALUE);
    if (opened) return told(IS_OPEN);
    staged[which] = is_on;
    return told(0);
}
#endif

/* For tests. */

/* As if new: with the kernel's module, and allowed to read through host memory unless forbidden. */
void fakefile_begin(void *idle, void *device) {
    pthread_mutex_lock(&lock);
    *(void **)&is_idle = idle, *(void **)&context_device = device;
    memset(planted, 0, sizeof planted), memset(defaults, 0, sizeof defaults);
    properties = (properties_t){.major = 2, .minor = 24, .features = 15};
    properties_bytes = sizeof properties, switch_count = SWITCHES, ignores_switches = 0;
    defaults[1] = 1;
    memcpy(staged, defaults, sizeof staged), memcpy(running, defaults, sizeof running);
    wrong = reads = opened = 0;
    for (int i = 0; i < file_count; i++) files[i]->is_known = 0;
    for (int i = 0; i < MOST; i++) memory[i].at = NULL;
    pthread_mutex_unlock(&lock);
}

void fakefile_fail(const char *call, long nth, int code) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 16; i++)
        if (planted[i].nth == 0) {
            snprintf(planted[i].call, sizeof planted[i].call, "%s", call);
            planted[i].nth = nth, planted[i].code = code;
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* Which module the kernel has, what it can do, in which modes it is, and how much of that it writes. */
void fakefile_set(unsigned major, unsigned minor, unsigned features, unsigned modes, size_t bytes) {
    properties.major = major, properties.minor = minor;
    properties.features = features, properties.modes = modes;
    properties_bytes = bytes < sizeof properties ? sizeof properties : bytes;
}

/* A switch as cufile.json has it; how many there are, and whether they do nothing. */
void fakefile_switch(int which, int is_on) { defaults[which] = staged[which] = (unsigned char)is_on; }
void fakefile_switches(int count, int does_nothing) { switch_count = count, ignores_switches = does_nothing; }

/* What a switch will be at for who opens it next. */
int fakefile_staged(int which) { return staged[which]; }

long fakefile_reads(void) { return reads; }

/* What was opened or made known and not given back. */
long fakefile_live(void) {
    long live = opened;
    for (int i = 0; i < file_count; i++) live += files[i]->is_known;
    for (int i = 0; i < MOST; i++) live += memory[i].at != NULL;
    return live;
}

/* What is wrong so far, if anything. */
const char *fakefile_wrong(void) { return wrong ? wrong_text : NULL; }

/* For programs that do not know that this is no cuFile. */
__attribute__((constructor)) static void begin(void) {
    fakefile_begin(NULL, NULL);
    if (getenv("KVTIER_FAKE_CUFILE_ALONE")) fakefile_set(0, 0, 0, 0, 0);
}

__attribute__((destructor)) static void end(void) {
    if (wrong || fakefile_live()) fprintf(stderr, "fake cuFile: %s\n", wrong ? wrong_text : "not closed");
}

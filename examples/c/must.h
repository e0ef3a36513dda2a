/* must.h: helpers that the examples share. Include it first.
 *
 *   MUST(call)        a call of the library: if it fails, prints the library's message and exits with 1
 *   CHECK(condition)  a result of the program: if it is wrong, says so and exits with 1
 *   work_directory()  a directory for files: the given one, or a new one that is removed at exit */
#ifndef KVT_EXAMPLES_MUST_H
#define KVT_EXAMPLES_MUST_H

#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 /* mkdtemp, nftw */
#endif
#include <kvtier/kvtier.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static kvt_error_t *err; /* receives the library's message; the next failure replaces it */

#define MUST(call) must(call, #call)
static inline void must(kvt_status_t status, const char *call) {
    if (status == KVT_OK) return;
    const char *message = kvt_error_message(err); /* empty if the call has no `err` */
    fprintf(stderr, "%.*s: %s: %s\n", (int)strcspn(call, "("), call, kvt_status_name(status),
            *message ? message : kvt_status_str(status));
    exit(1);
}

#define CHECK(condition) check(condition, #condition)
static inline void check(int is_right, const char *condition) {
    if (is_right) return;
    fprintf(stderr, "wrong result: %s\n", condition);
    exit(1);
}

static char made_directory[] = "/tmp/kvtier-example-XXXXXX";
static pid_t made_by; /* a forked child must not remove it */

static inline int remove_entry(const char *path, const struct stat *facts, int type, struct FTW *walk) {
    return (void)facts, (void)type, (void)walk, remove(path);
}
static inline void remove_directory(void) {
    if (getpid() == made_by) nftw(made_directory, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}
static inline const char *work_directory(const char *given) {
    if (given != NULL) return given;
    if (mkdtemp(made_directory) == NULL) perror(made_directory), exit(1);
    made_by = getpid();
    atexit(remove_directory);
    return made_directory;
}

#endif

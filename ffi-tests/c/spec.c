/* Tests of spec strings: canonical forms, sizes, errors with their offset, random input. */

#include "check.h"

#include <locale.h>

static void has_canonical_form(const char *text, const char *want) {
    char out[5000];
    uint64_t bytes = 0;
    CHECK_OK(kvt_spec_check(text, strlen(text), NULL, 0, &bytes, NULL));
    CHECK_EQ(bytes, strlen(want));
    memset(out, '#', sizeof out);
    CHECK_OK(kvt_spec_check(text, strlen(text), out, bytes, &bytes, NULL));
    CHECK(memcmp(out, want, bytes) == 0 && out[bytes] == '#'); /* and no NUL */
    CHECK_OK(kvt_spec_check(text, strlen(text), out, sizeof out, NULL, NULL));
    if (bytes > 0) {
        uint64_t needed = 0;
        out[0] = '#';
        CHECK_IS(kvt_spec_check(text, strlen(text), out, bytes - 1, &needed, NULL),
                 KVT_E_TOO_SMALL);
        CHECK_EQ(needed, bytes);
        CHECK(out[0] == '#');
    }
    /* A canonical form is its own canonical form. */
    uint64_t again = 0;
    CHECK_OK(kvt_spec_check(want, strlen(want), out, sizeof out, &again, NULL));
    CHECK(again == strlen(want) && memcmp(out, want, again) == 0);
}

static void is_refused(const char *text, uint64_t bytes, kvt_status_t status, uint64_t offset) {
    kvt_error_t *err = NULL;
    uint64_t out_bytes = 77;
    CHECK_IS(kvt_spec_check(text, bytes, NULL, 0, &out_bytes, &err), status);
    CHECK_EQ(out_bytes, 77);
    kvt_error_info_t info = KVT_ERROR_INFO_INIT;
    CHECK_OK(kvt_error_info(err, &info));
    CHECK_EQ(info.offset, offset);
    CHECK_EQ(info.status, status);
    CHECK_OK(kvt_error_free(&err));
}

static void random_input_is_handled(uint64_t rounds) {
    static const char *const pieces[] = {
        "lru", "2q", "lru-k", "(", ")", ",", "=", "\"", "\\", "1", "1e", "1e5", "-", ".5", "+1",
        "%", "KiB", "ms", " ", "\t", "\n", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xff",
        "\xc3", "1e999", "99999999999999999999", "true", "a=b", "x(y=1)", "\"a\\\"b\"", "0x10", "_"};
    uint64_t state = 4242;
    for (uint64_t i = 0; i < rounds; i++) {
        char text[256], out[1024], twice[1024];
        size_t n = 0;
        for (uint64_t k = 1 + next_random(&state) % 12; k > 0; k--) {
            const char *piece = pieces[next_random(&state) % (sizeof pieces / sizeof *pieces)];
            memcpy(text + n, piece, strlen(piece));
            n += strlen(piece);
        }
        uint64_t bytes = 0, again = 0;
        kvt_error_t *err = NULL;
        const kvt_status_t status = kvt_spec_check(text, n, out, sizeof out, &bytes, &err);
        if (status == KVT_OK) {
            CHECK_OK(kvt_spec_check(out, bytes, twice, sizeof twice, &again, NULL));
            CHECK(bytes == again && memcmp(out, twice, bytes) == 0);
            continue;
        }
        CHECK(status == KVT_E_SPEC || status == KVT_E_INVALID || status == KVT_E_LIMIT);
        kvt_error_info_t info = KVT_ERROR_INFO_INIT;
        CHECK_OK(kvt_error_info(err, &info));
        CHECK(info.offset <= n);
        CHECK_OK(kvt_error_free(&err));
    }
}

int main(int argc, char **argv) {
    check_begin();
    has_canonical_form("lru", "lru");
    has_canonical_form(" lru ( ) ", "lru");
    has_canonical_form("qos( inner = s3fifo( small = 10% ) )", "qos(inner=s3fifo(small=10%))");
    has_canonical_form("2q(1,2.50,\"a b\",lru-k)", "2q(1,2.5,\"a b\",lru-k)");
    has_canonical_form("x(\"q\\\"uote\")", "x(\"q\\\"uote\")");
    has_canonical_form("x(\"\xc3\xa9\")", "x(\"\xc3\xa9\")");
    is_refused("", KVT_NUL_TERMINATED, KVT_E_SPEC, 0);
    is_refused("lru)", 4, KVT_E_SPEC, 3);
    is_refused("lru(", 4, KVT_E_SPEC, 4);
    is_refused("lru(a=1,a=2)", 12, KVT_E_SPEC, 8);
    is_refused("lru\0", 4, KVT_E_SPEC, 3);
    is_refused("\xc3\xa9", 2, KVT_E_SPEC, 0);
    is_refused("ab\xff", 3, KVT_E_INVALID, 2);
    CHECK_IS(kvt_spec_check(NULL, 3, NULL, 0, NULL, NULL), KVT_E_INVALID);
    CHECK_IS(kvt_spec_check(NULL, 0, NULL, 0, NULL, NULL), KVT_E_SPEC);
    CHECK_IS(kvt_spec_check("lru", UINT64_MAX - 1, NULL, 0, NULL, NULL), KVT_E_LIMIT);
    /* A null buffer with a size is refused, and nothing is written. */
    uint64_t bytes = 77;
    CHECK_IS(kvt_spec_check("lru", 3, NULL, 10, &bytes, NULL), KVT_E_INVALID);
    CHECK_EQ(bytes, 77);

    char *big = malloc(8192);
    CHECK(big != NULL);
    memset(big, 'a', 8192);
    CHECK_OK(kvt_spec_check(big, 4096, NULL, 0, NULL, NULL));
    CHECK_IS(kvt_spec_check(big, 4097, NULL, 0, NULL, NULL), KVT_E_LIMIT);
    char deep[64] = "";
    for (int i = 0; i < 7; i++) strcat(deep, "a(");
    strcat(deep, "a");
    for (int i = 0; i < 7; i++) strcat(deep, ")");
    CHECK_OK(kvt_spec_check(deep, strlen(deep), NULL, 0, NULL, NULL));
    memset(big, '(', 4096);
    for (int i = 0; i < 4096; i += 2) big[i] = 'a';
    CHECK_IS(kvt_spec_check(big, 4096, NULL, 0, NULL, NULL), KVT_E_LIMIT);
    free(big);

    random_input_is_handled(count_arg(argc, argv, 200000));
    /* Numbers do not depend on the locale. */
    setlocale(LC_ALL, "de_DE.UTF-8");
    has_canonical_form("x(2.50)", "x(2.5)");
    return check_end("spec");
}

/* Tests of version numbers, the check of header against library, status names, features. */

#include "check.h"

static void version_matches_the_header(void) {
    uint64_t version = 0;
    CHECK_OK(kvt_version(&version));
    CHECK_EQ(version, KVT_HEADER_VERSION);
    CHECK_IS(kvt_version(NULL), KVT_E_INVALID);
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", KVT_VERSION_MAJOR, KVT_VERSION_MINOR,
             KVT_VERSION_PATCH);
    CHECK(strcmp(text, kvt_version_str()) == 0);
    const uint64_t joined = ((uint64_t)KVT_VERSION_MAJOR << 32) |
                            ((uint64_t)KVT_VERSION_MINOR << 16) | KVT_VERSION_PATCH;
    CHECK_EQ(joined, KVT_HEADER_VERSION);
}

static void other_header_versions_are_refused(void) {
    kvt_error_t *err = NULL;
    CHECK_OK(kvt_abi_check(KVT_HEADER_VERSION, &err));
    CHECK(err == NULL);
    const uint64_t others[] = {0, KVT_HEADER_VERSION + 1, KVT_HEADER_VERSION + (1 << 16),
                                  KVT_HEADER_VERSION | (UINT64_C(1) << 32), UINT64_MAX};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        CHECK_IS(kvt_abi_check(others[i], &err), KVT_E_ABI);
        CHECK(strstr(kvt_error_message(err), kvt_version_str()) != NULL);
        CHECK_IS(kvt_abi_check(others[i], NULL), KVT_E_ABI);
    }
    CHECK_OK(kvt_error_free(&err));
    CHECK(err == NULL);
}

static void every_status_has_a_name(void) {
    CHECK(strcmp(kvt_status_name(KVT_OK), "KVT_OK") == 0);
    CHECK(strcmp(kvt_status_name(KVT_E_BUSY), "KVT_E_BUSY") == 0);
    for (kvt_status_t status = KVT_E_STATE; status <= 0; status++) {
        CHECK(strncmp(kvt_status_name(status), "KVT_", 4) == 0);
        CHECK(strcmp(kvt_status_name(status), "KVT_E_UNKNOWN") != 0);
        CHECK(strlen(kvt_status_str(status)) > 3);
        for (kvt_status_t other = KVT_E_STATE; other < status; other++) {
            CHECK(strcmp(kvt_status_name(status), kvt_status_name(other)) != 0);
            CHECK(strcmp(kvt_status_str(status), kvt_status_str(other)) != 0);
        }
    }
    const kvt_status_t unknown[] = {1, -9999, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        CHECK(strcmp(kvt_status_name(unknown[i]), "KVT_E_UNKNOWN") == 0);
        CHECK(strlen(kvt_status_str(unknown[i])) > 3);
    }
}

static void features_are_listed_and_found(void) {
    uint64_t count = 0;
    CHECK_OK(kvt_feature_count(&count));
    CHECK(count > 0);
    CHECK_IS(kvt_feature_count(NULL), KVT_E_INVALID);
    for (uint64_t i = 0; i < count; i++) {
        kvt_feature_t feature = KVT_FEATURE_INIT;
        CHECK_OK(kvt_feature_at(i, &feature));
        CHECK(feature.name_bytes > 0 && feature.note_bytes > 0);
        CHECK(feature.built <= 1 && feature.present <= 1);
        kvt_feature_t found = KVT_FEATURE_INIT;
        CHECK_OK(kvt_feature_find(feature.name, feature.name_bytes, &found, NULL));
        CHECK(found.name == feature.name);
    }
    kvt_feature_t feature = KVT_FEATURE_INIT;
    CHECK_IS(kvt_feature_at(count, &feature), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_feature_at(UINT64_MAX, &feature), KVT_E_NOT_FOUND);
    CHECK_IS(kvt_feature_at(0, NULL), KVT_E_INVALID);
    kvt_error_t *err = NULL;
    CHECK_IS(kvt_feature_find("cudda", 5, &feature, &err), KVT_E_NOT_FOUND);
    CHECK(strstr(kvt_error_message(err), "cuda") != NULL);
    CHECK_IS(kvt_feature_find(NULL, 5, &feature, &err), KVT_E_INVALID);
    CHECK_IS(kvt_feature_find("\xff", 1, &feature, &err), KVT_E_INVALID);
    CHECK_IS(kvt_feature_find("", 0, &feature, &err), KVT_E_INVALID);
    CHECK_IS(kvt_feature_find(NULL, 0, &feature, &err), KVT_E_NOT_FOUND);
    CHECK(feature.name == NULL); /* failed calls wrote no output */
    CHECK_OK(kvt_error_free(&err));
}

int main(void) {
    check_begin();
    version_matches_the_header();
    other_header_versions_are_refused();
    every_status_has_a_name();
    features_are_listed_and_found();
    return check_end("version");
}

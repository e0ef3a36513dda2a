/* Links, agrees on the version, and opens a runtime. */
#include <kvtier/kvtier.h>
#include <stdio.h>

int main(void) {
    kvt_error_t *err = NULL;
    kvt_runtime_t *runtime = NULL;
    if (kvt_abi_check(KVT_HEADER_VERSION, &err) != KVT_OK || kvt_runtime_open(NULL, &runtime, &err) != KVT_OK ||
        kvt_runtime_close(&runtime, 0, NULL, &err) != KVT_OK) {
        fprintf(stderr, "%s\n", kvt_error_message(err));
        return 1;
    }
    printf("kvtier %s\n", kvt_version_str());
    return 0;
}

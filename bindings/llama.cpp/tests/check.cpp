// kvt_llama_check accepts the engine that the adapters were compiled against.
#include <kvtier/llama.h>

#include <cstdio>

int main() {
    kvt_llama_why_t why;
    const kvt_status_t status = kvt_llama_check(&why);
    if (status != KVT_OK || why.text[0] != 0) {
        std::fprintf(stderr, "status %d: %s\n", (int) status, why.text);
        return 1;
    }
    return kvt_llama_check(nullptr) == KVT_OK ? 0 : 1;
}

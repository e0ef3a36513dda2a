# Tests of sequences longer than the cache.
function(kvtier_longer_test name)
  kvtier_llama_test(${name} ${ARGN})
  target_include_directories(${name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/../..")
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
endfunction()

set(_longer_texts
  "${CMAKE_CURRENT_SOURCE_DIR}/../../../../docs/internals/store.md"
  "${CMAKE_CURRENT_SOURCE_DIR}/../../../../docs/reference/sparse.md")
kvtier_longer_test(watch_longer_c longer_c.c)
set_target_properties(watch_longer_c PROPERTIES C_STANDARD 99 C_EXTENSIONS OFF)
kvtier_longer_test(watch_longer_cells longer_cells.cpp)
kvtier_longer_test(watch_longer longer.cpp TIMEOUT 600 ARGS ${_longer_texts})
add_test(NAME watch_longer_long COMMAND watch_longer --trained ${_longer_texts})
set_tests_properties(watch_longer_long PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 1800 LABELS long
  ENVIRONMENT "KVTIER_LLAMA_MODELS=${KVTIER_LLAMA_MODELS}")
kvtier_longer_test(watch_longer_life longer_life.cpp ARGS ${_longer_texts})
kvtier_longer_test(watch_longer_shared longer_shared.cpp ARGS ${_longer_texts})
# A benchmark, no test.
add_executable(watch_longer_bench longer_bench.cpp)
target_compile_options(watch_longer_bench PRIVATE ${_warnings})
target_include_directories(watch_longer_bench PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/../..")
target_link_libraries(watch_longer_bench PRIVATE kvtier::llama)

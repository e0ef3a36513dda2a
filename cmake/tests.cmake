# The programs of ffi-tests, each a ctest of its own. Exit code 77 = skipped.

function(_kvtier_test language source)
  get_filename_component(stem "${source}" NAME_WE)
  set(name "${language}_${stem}")
  set(target "kvtier_test_${name}")
  add_executable(${target} "${source}")
  target_link_libraries(${target} PRIVATE kvtier::shared Threads::Threads)
  target_compile_options(${target} PRIVATE -Wall -Wextra -pedantic -Werror)
  if(language STREQUAL "c")
    # Extensions, for the POSIX calls of the tests themselves; the functions of math.h.
    target_link_libraries(${target} PRIVATE m)
    set_target_properties(${target} PROPERTIES C_STANDARD 11 C_STANDARD_REQUIRED ON)
  else()
    set(standard 17)
    if(stem MATCHES "_cpp20$")
      set(standard 20)
    endif()
    if(stem MATCHES "_noexcept$")
      target_compile_options(${target} PRIVATE -fno-exceptions)
      target_compile_definitions(${target} PRIVATE KVTIER_NO_EXCEPTIONS)
    endif()
    set_target_properties(${target} PROPERTIES
      CXX_STANDARD ${standard} CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF)
  endif()
  add_test(NAME ${name} COMMAND ${target} WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
  set_tests_properties(${name} PROPERTIES TIMEOUT 600 SKIP_RETURN_CODE 77)
endfunction()

# The examples: strict C99 and C++17, run where they may write. Their tests are example_c_NAME and
# example_cpp_NAME.
function(_kvtier_example language source)
  get_filename_component(stem "${source}" NAME_WE)
  set(target "kvtier_example_${language}_${stem}")
  add_executable(${target} "${source}")
  target_link_libraries(${target} PRIVATE kvtier::shared Threads::Threads)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Werror)
  if(language STREQUAL "c")
    target_link_libraries(${target} PRIVATE m)
    set_target_properties(${target} PROPERTIES C_STANDARD 99 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
  else()
    set_target_properties(${target} PROPERTIES
      CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF)
  endif()
  if(target STREQUAL "kvtier_example_c_hello_kv")
    # The second run finds what the first one stored.
    add_test(NAME example_c_hello_kv WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}"
      COMMAND sh -c "rm -rf hello-kv && $<TARGET_FILE:${target}> && $<TARGET_FILE:${target}> >hello-kv.txt && grep loaded hello-kv.txt")
  else()
    add_test(NAME example_${language}_${stem} COMMAND ${target}
      WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}")
  endif()
  set_tests_properties(example_${language}_${stem} PROPERTIES TIMEOUT 600)
endfunction()

file(GLOB _kvtier_c CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/ffi-tests/c/*.c")
foreach(_kvtier_source IN LISTS _kvtier_c)
  _kvtier_test(c "${_kvtier_source}")
endforeach()
file(GLOB _kvtier_cpp CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/ffi-tests/cpp/*.cpp")
foreach(_kvtier_source IN LISTS _kvtier_cpp)
  _kvtier_test(cpp "${_kvtier_source}")
endforeach()
# The C++ headers under every standard, and their generated regions.
add_test(NAME cpp_headers COMMAND "${CMAKE_CURRENT_SOURCE_DIR}/ffi-tests/cpp/headers.sh")
set_tests_properties(cpp_headers PROPERTIES TIMEOUT 900)
file(GLOB _kvtier_examples CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/examples/c/*.c")
foreach(_kvtier_source IN LISTS _kvtier_examples)
  _kvtier_example(c "${_kvtier_source}")
endforeach()
file(GLOB _kvtier_examples CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/examples/cpp/*.cpp")
foreach(_kvtier_source IN LISTS _kvtier_examples)
  _kvtier_example(cpp "${_kvtier_source}")
endforeach()
# Each example with a broken setting: it must print the library's message and exit with 1.
add_test(NAME examples_fail COMMAND "${CMAKE_CURRENT_SOURCE_DIR}/ffi-tests/examples_fail.sh"
  "${CMAKE_CURRENT_BINARY_DIR}/kvtier_example_")
set_tests_properties(examples_fail PROPERTIES TIMEOUT 600)

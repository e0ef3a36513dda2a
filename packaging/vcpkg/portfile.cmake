# Builds the source archive that packaging/build.sh makes; KVTIER_SOURCE_ARCHIVE names it. The build
# needs cargo (1.89 or newer), a C compiler, and no network.
if(NOT EXISTS "$ENV{KVTIER_SOURCE_ARCHIVE}")
  message(FATAL_ERROR "set KVTIER_SOURCE_ARCHIVE to the path of kvtier-${VERSION}-vendored.tar.gz")
endif()
vcpkg_extract_source_archive(SOURCE_PATH ARCHIVE "$ENV{KVTIER_SOURCE_ARCHIVE}")

# The interface is C, and one build serves debug and release programs.
set(VCPKG_BUILD_TYPE release)
set(features redis,dir)
foreach(feature IN ITEMS tls seal s3)
  if(feature IN_LIST FEATURES)
    string(APPEND features ",${feature}")
  endif()
endforeach()
set(built "${CURRENT_BUILDTREES_DIR}/${TARGET_TRIPLET}-rel")
file(MAKE_DIRECTORY "${built}")
vcpkg_execute_required_process(
  COMMAND "${CMAKE_COMMAND}" -E env "KVTIER_FEATURES=${features}" "CARGO_TARGET_DIR=${built}/target"
    "${SOURCE_PATH}/cmake/build.sh" "${built}/out" dist
  WORKING_DIRECTORY "${SOURCE_PATH}"
  LOGNAME "build-${TARGET_TRIPLET}")
vcpkg_execute_required_process(
  COMMAND "${CMAKE_COMMAND}" -E env --unset=DESTDIR
    "${SOURCE_PATH}/cmake/install.sh" --prefix "${CURRENT_PACKAGES_DIR}" --from "${built}/out"
  WORKING_DIRECTORY "${SOURCE_PATH}"
  LOGNAME "install-${TARGET_TRIPLET}")

if(VCPKG_LIBRARY_LINKAGE STREQUAL "static")
  file(GLOB shared "${CURRENT_PACKAGES_DIR}/lib/libkvtier.so*")
  file(REMOVE ${shared})
else()
  file(REMOVE "${CURRENT_PACKAGES_DIR}/lib/libkvtier.a")
endif()

# The CMake package lies one folder nearer to the prefix than elsewhere.
file(MAKE_DIRECTORY "${CURRENT_PACKAGES_DIR}/share")
file(RENAME "${CURRENT_PACKAGES_DIR}/lib/cmake/kvtier" "${CURRENT_PACKAGES_DIR}/share/${PORT}")
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/lib/cmake")
vcpkg_replace_string("${CURRENT_PACKAGES_DIR}/share/${PORT}/kvtierConfig.cmake"
  "\${_kvtier_here}/../../.." "\${_kvtier_here}/../..")
vcpkg_fixup_pkgconfig()
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")

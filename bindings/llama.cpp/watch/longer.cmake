# Sequences that are longer than the cache.
target_sources(kvtier_llama PRIVATE
  "${CMAKE_CURRENT_SOURCE_DIR}/longer.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/longer_cells.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/longer_decode.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/longer_graph.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/longer_policy.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/longer_resume.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/longer_rows.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/longer_store.cpp")

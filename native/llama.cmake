# Shortens the build of llama-cpp-python, which includes this file after its project() if CMAKE_ARGS has
# -DCMAKE_PROJECT_llama_cpp_INCLUDE=PATH. What computes is compiled as always.

# Nothing here links what llama.cpp's tools have in common, nearly half of the time.
set(LLAMA_BUILD_COMMON OFF)

# Compile the graphs of vision models together, as llama.cpp does with those of language models. The other files of
# mtmd define the same macros in different ways.
function(llmrun_unite_graphs)
  set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  get_target_property(folder mtmd SOURCE_DIR)
  get_target_property(sources mtmd SOURCES)
  list(FILTER sources EXCLUDE REGEX "^models/")
  list(TRANSFORM sources PREPEND "${folder}/")
  set_source_files_properties(${sources} TARGET_DIRECTORY mtmd PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
cmake_language(DEFER CALL llmrun_unite_graphs)

# Shortens the build of llama-cpp-python, which includes this file after its project() if CMAKE_ARGS has
# -DCMAKE_PROJECT_llama_cpp_INCLUDE=PATH. ggml is compiled as always, so that the speed of answers stays the same.

# Nothing here links llama.cpp's library of common parts of its tools.
set(LLAMA_BUILD_COMMON OFF)

function(llmrun_unite)
  # A model's graph is a small file with large headers. Larger batches contain two functions of one name.
  set_target_properties(llama mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
endfunction()
cmake_language(DEFER CALL llmrun_unite)

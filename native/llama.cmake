# How llmrun builds llama.cpp. llama-cpp-python includes this file after its project() if CMAKE_ARGS has
# -DCMAKE_PROJECT_llama_cpp_INCLUDE=PATH: for `pip install`, for `llmrun doctor --install-gpu`, and for the libraries that
# the wheel of a release holds (bundle.py).

# Nothing here links what llama.cpp's tools have in common, two fifths of the time.
set(LLAMA_BUILD_COMMON OFF)

# Each library once. llama.cpp would install three names of each, in a second folder too.
set(CMAKE_INSTALL_LIBDIR llama_cpp/lib)
set(CMAKE_INSTALL_BINDIR llama_cpp/lib)

# For this processor: on a Xeon (Sapphire Rapids), GCC 12 makes the repacked kernels of Q4_0 decode 7 to 15 % slower with
# -march=native than with the same instruction sets named one by one. AMX is left out: GCC miscompiles ggml's tiles.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$" AND NOT DEFINED GGML_NATIVE)
  set(GGML_NATIVE OFF)
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E -x c++ - INPUT_FILE /dev/null OUTPUT_VARIABLE predefined)
  foreach(set SSE42:SSE4_2 AVX:AVX AVX2:AVX2 BMI2:BMI2 FMA:FMA F16C:F16C AVX_VNNI:AVXVNNI AVX512:AVX512BW
          AVX512_VBMI:AVX512VBMI AVX512_VNNI:AVX512VNNI AVX512_BF16:AVX512BF16)
    string(REGEX MATCH "(.+):(.+)" set "${set}")
    string(FIND "${predefined}" "__${CMAKE_MATCH_2}__ 1" place)
    if(place EQUAL -1)
      set(GGML_${CMAKE_MATCH_1} OFF)
    else()
      set(GGML_${CMAKE_MATCH_1} ON)
    endif()
  endforeach()
endif()

function(llmrun_finish)
  foreach(target llama mtmd ggml ggml-base ${GGML_AVAILABLE_BACKENDS})
    if(NOT TARGET ${target})
      continue()
    endif()
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
    if(APPLE)
      set_property(TARGET ${target} PROPERTY INSTALL_RPATH "@loader_path")
    else()
      set_property(TARGET ${target} PROPERTY INSTALL_RPATH "$ORIGIN")
    endif()
    if(target STREQUAL "ggml-cuda" AND NOT WIN32)  # in a wheel of its own (cuda_wheel.sh), beside NVIDIA's
      set_property(TARGET ${target} PROPERTY INSTALL_RPATH "$ORIGIN:$ORIGIN/../../nvidia/cu13/lib")
    endif()
    if(GGML_BACKEND_DL)  # for other machines, which have nothing in the folders of this one
      set_property(TARGET ${target} PROPERTY INSTALL_RPATH_USE_LINK_PATH OFF)
    endif()
  endforeach()

  # Compile the graphs of vision models together, as llama.cpp does with those of language models. The other files of
  # mtmd define the same macros in different ways.
  set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  get_target_property(folder mtmd SOURCE_DIR)
  get_target_property(sources mtmd SOURCES)
  list(FILTER sources EXCLUDE REGEX "^models/")
  list(TRANSFORM sources PREPEND "${folder}/")
  set_source_files_properties(${sources} TARGET_DIRECTORY mtmd PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
cmake_language(DEFER CALL llmrun_finish)

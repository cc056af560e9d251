#!/usr/bin/env bash
# Build the llama.cpp that the wheels of a release hold (bundle.py): FOLDER/llama_cpp_python-*.whl.
#
#     native/llama_wheel.sh FOLDER
#
# It has every variant of the processor's backend, and Vulkan where glslc and Vulkan's headers are installed, or can be.
set -euo pipefail
native=$(cd "$(dirname "$0")" && pwd)
pin=$(grep -o 'llama-cpp-python==[0-9.]*' "$native/../pyproject.toml")
flags="-DCMAKE_PROJECT_llama_cpp_INCLUDE=$native/llama.cmake -DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON"
if [ "$(uname)" = Linux ]; then
  packages="glslc vulkan-headers vulkan-loader-devel spirv-headers-devel"  # of the image that cibuildwheel builds in
  command -v glslc >/dev/null || dnf install -y $packages || true
  if command -v glslc >/dev/null; then
    flags+=" -DGGML_VULKAN=ON"
  else
    echo "no glslc: this wheel is without Vulkan" >&2
  fi
fi
CMAKE_ARGS="$flags ${CMAKE_ARGS:-}" python3 -m pip wheel --no-deps --no-binary llama-cpp-python --no-cache-dir -w "$1" "$pin"

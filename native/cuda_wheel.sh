#!/usr/bin/env bash
# Build FOLDER/llmrun_cuda-*.whl: llama.cpp's CUDA backend, which the wheels of a release find where it is installed.
#
#     native/cuda_wheel.sh FOLDER [ARCHITECTURES]
#
# Needs no CUDA toolkit, GPU or driver: NVIDIA's compiler comes from the package index, as its libraries do for users.
# Hours on two cores for all architectures; CMAKE_ARGS=-DGGML_CUDA_FA=OFF makes a trial build of minutes.
set -euo pipefail
native=$(cd "$(dirname "$0")" && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
architectures=${2:-75;80;86;89;90;120}
pin=$(grep -o 'llama-cpp-python==[0-9.]*' "$native/../pyproject.toml")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
source "$work/venv/bin/activate"
pip install -q cmake ninja nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.0.2.14
toolkit=$(echo "$work"/venv/lib/python3*/site-packages/nvidia/cu13)
# The names that a linker looks for; the driver's library is there when it runs.
for name in cudart cublas cublasLt; do ln -sf "lib$name.so.13" "$toolkit/lib/lib$name.so"; done
ln -sfn lib "$toolkit/lib64"
mkdir -p "$toolkit/lib/stubs"
echo | "${CC:-cc}" -x c -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$toolkit/lib/stubs/libcuda.so" -
export PATH=$toolkit/bin:$PATH CUDACXX=$toolkit/bin/nvcc CUDAToolkit_ROOT=$toolkit

pip download -q --no-deps --no-binary llama-cpp-python -d "$work" "$pin"
mkdir "$work/source"
tar -xzf "$work"/llama_cpp_python-*.tar.gz --strip-components=1 -C "$work/source"
cmake -S "$work/source" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSKBUILD_PLATLIB_DIR="$work/unused" \
  -DCMAKE_PROJECT_llama_cpp_INCLUDE="$native/llama.cmake" -DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CUDA=ON \
  -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON \
  -DCMAKE_MODULE_LINKER_FLAGS=-Wl,--no-as-needed ${CMAKE_ARGS:-}  # the empty library of a driver would be left out
cmake --build "$work/build" --target ggml-cuda
python "$native/bundle.py" --cuda "$work/build/bin/libggml-cuda.so" "$folder"

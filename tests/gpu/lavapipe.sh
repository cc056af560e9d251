#!/usr/bin/env bash
# Run tests/gpu without a GPU: on Mesa's Vulkan driver for processors, with llama.cpp's Vulkan backend.
#
#     tests/gpu/lavapipe.sh FOLDER [PYTEST ARGUMENT...]
#
# FOLDER gets Debian's packages, unpacked without root, and the build, which a second run uses again. Only failed tests
# fail: without packages, network or compiler, or after 20 minutes, one line says that the tests were skipped.
set -uo pipefail
cd "$(dirname "$0")/../.."
limit=20m

skip() {
  echo "GPU tests skipped: $1"
  exit 0
}

if [ -z "${LAVAPIPE_LIMITED:-}" ]; then
  LAVAPIPE_LIMITED=1 timeout --kill-after=30s "$limit" "$PWD/tests/gpu/lavapipe.sh" "$@"
  status=$?
  case $status in 124 | 137) skip "not finished after $limit" ;; esac
  exit "$status"
fi

mkdir -p "${1:?a folder}" && folder=$(cd "$1" && pwd)
shift
root=$folder/root
log=$folder/log
: >"$log"

packages() {
  local own=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o Debug::NoLocking=true)
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
  apt-get "${own[@]}" update && apt-get "${own[@]}" install --yes --download-only --no-install-recommends \
    mesa-vulkan-drivers libvulkan-dev glslc spirv-headers || return 1
  for file in "$folder"/cache/archives/*.deb; do dpkg-deb -x "$file" "$root" || return 1; done
}

sources() {
  local version
  version=$(python -c 'from importlib.metadata import version; print(version("llama-cpp-python"))') || return 1
  python3 -m pip download --quiet --no-deps --no-binary llama-cpp-python -d "$folder/sdist" "llama-cpp-python==$version" ||
    pip download --quiet --no-deps --no-binary llama-cpp-python -d "$folder/sdist" "llama-cpp-python==$version" || return 1
  tar -xzf "$folder"/sdist/*.tar.gz -C "$folder" && mv "$folder"/llama_cpp_python-*/ "$folder/source"
}

# What ggml's Vulkan backend names in one place, for validation layers, and older headers lack.
missing_names() {
  grep -q "struct LayerSettingEXT" "$root"/usr/include/vulkan/vulkan_structs.hpp && return
  cat <<'CPP'
#ifdef __cplusplus
#include <cstdint>
namespace vk {
enum class LayerSettingTypeEXT { eBool32 = 0 };
struct LayerSettingEXT { const char* layer; const char* name; LayerSettingTypeEXT type; uint32_t count; const void* values; };
struct LayerSettingsCreateInfoEXT {
    template <class T> explicit LayerSettingsCreateInfoEXT(const T&) {}
    uint32_t sType = 1000496000;
    const void* pNext = nullptr;
    uint64_t count = 0;
    const void* settings = nullptr;
};
}
#endif
CPP
}

build() {
  missing_names >"$folder/missing.hpp"
  cmake -S "$folder/source/vendor/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DGGML_VULKAN=ON -DVulkan_INCLUDE_DIR="$root/usr/include" -DVulkan_LIBRARY="$(ls "$root"/usr/lib/*/libvulkan.so)" \
    -DVulkan_GLSLC_EXECUTABLE="$root/usr/bin/glslc" -DCMAKE_PREFIX_PATH="$root/usr" \
    -DCMAKE_CXX_FLAGS="-I$root/usr/include -include $folder/missing.hpp" -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF &&
    cmake --build "$folder/build" --parallel 2 --target ggml
}

if [ ! -e "$folder/lib/libggml-vulkan.so" ]; then
  for tool in apt-get dpkg-deb cmake c++; do command -v "$tool" >/dev/null || skip "there is no $tool"; done
  packages >>"$log" 2>&1 || skip "Mesa's packages can't be had ($(tail -1 "$log"))"
fi
libraries=$(echo "$root"/usr/lib/*-linux-*)
export LD_LIBRARY_PATH=$libraries:${LD_LIBRARY_PATH:-}
if [ ! -e "$folder/lib/libggml-vulkan.so" ]; then
  sources >>"$log" 2>&1 || skip "llama.cpp's sources can't be had ($(tail -1 "$log"))"
  build >>"$log" 2>&1 || skip "llama.cpp can't be built with Vulkan ($(grep -m 1 -i error "$log"))"
  installed=$(python -c 'import importlib.util as u; print(u.find_spec("llama_cpp").origin)') || skip "there is no llama.cpp"
  mkdir "$folder/lib" && cp -a "$(dirname "$installed")"/lib/*.so* "$folder"/build/bin/libggml*.so* "$folder/lib" ||
    skip "there is no llama.cpp"
fi

sed "s|\"library_path\": *\".*/|\"library_path\": \"|; s|\"library_path\": *\"|&$libraries/|" \
  "$root"/usr/share/vulkan/icd.d/lvp_icd.*.json >"$folder/driver.json"
export LD_LIBRARY_PATH=$folder/lib:$LD_LIBRARY_PATH LLAMA_CPP_LIB_PATH=$folder/lib
export VK_ICD_FILENAMES=$folder/driver.json MESA_SHADER_CACHE_DIR=$folder/shaders GGML_VK_VISIBLE_DEVICES=0,0
found=$(python -c 'from llmrun.planning.machine import this_machine; print(len(this_machine().gpus))' 2>>"$log")
[ "${found:-0}" -ge 2 ] || skip "the driver does not work here"
python -m pytest -q -m "" -n 0 -p no:cacheprovider tests/gpu "$@"

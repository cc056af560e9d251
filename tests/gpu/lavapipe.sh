#!/usr/bin/env bash
# Run tests/gpu without a GPU: on Mesa's Vulkan driver for processors, with llama.cpp's Vulkan backend.
#
#     tests/gpu/lavapipe.sh FOLDER [PYTEST ARGUMENT...]
#
# FOLDER gets Debian's packages, unpacked without root, and the build, which a second run goes on with. Only a test that
# fails twice fails. Without packages, network, compiler or time, or if the driver crashes, a line says what was skipped.
set -uo pipefail
cd "$(dirname "$0")/../.."
build_limit=12m tests_limit=8m

skip() {
  echo "GPU tests skipped: $1"
  exit 0
}

folder=${1:?a folder}
shift
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) && : >"$folder/log" || skip "$folder can't be written"
root=$folder/root
log=$folder/log

packages() {
  local own=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o Debug::NoLocking=true)
  own+=(-o APT::Sandbox::User=root -o Acquire::Retries=1 -o Acquire::http::Timeout=20)
  mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
  # Those that are installed, too: the build expects all of them in one place.
  apt-get "${own[@]}" update && apt-get "${own[@]}" install --yes --download-only --no-install-recommends --reinstall \
    mesa-vulkan-drivers libvulkan1 libvulkan-dev glslc spirv-headers || return 1
  for file in "$folder"/cache/archives/*.deb; do dpkg-deb -x "$file" "$root" || return 1; done
}

sources() {
  local version
  version=$(python -c 'from importlib.metadata import version; print(version("llama-cpp-python"))') || return 1
  rm -rf "$folder/unpacked" "$folder/sdist"
  python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d "$folder/sdist" "llama-cpp-python==$version" ||
    pip download --quiet --no-deps --no-binary llama-cpp-python -d "$folder/sdist" "llama-cpp-python==$version" || return 1
  mkdir "$folder/unpacked" && tar -xzf "$folder"/sdist/*.tar.gz --strip-components=1 -C "$folder/unpacked" &&
    mv "$folder/unpacked" "$folder/source"
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

# Compile the Vulkan backend and the list of backends; everything else is the installed llama.cpp's.
build() {
  local ggml=$folder/source/vendor/llama.cpp/ggml libraries=$folder/built installed
  installed=$(python -c 'import importlib.util as u; print(u.find_spec("llama_cpp").origin)') || return 1
  [ -e "$folder/missing.hpp" ] || missing_names >"$folder/missing.hpp"
  local names=()  # of the libraries that it asks for: those of the installed ones, without a version if llama.cmake built them
  [ -e "$(dirname "$installed")/lib/libggml-base.so.0" ] ||
    names=("-DCMAKE_PROJECT_llama_cpp_INCLUDE=$PWD/native/llama.cmake")
  cmake -S "$folder/source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release "${names[@]}" \
    -DGGML_VULKAN=ON -DVulkan_INCLUDE_DIR="$root/usr/include" -DVulkan_LIBRARY="$(ls "$root"/usr/lib/*/libvulkan.so)" \
    -DVulkan_GLSLC_EXECUTABLE="$root/usr/bin/glslc" -DCMAKE_PREFIX_PATH="$root/usr" \
    -DCMAKE_CXX_FLAGS="-I$root/usr/include -include $folder/missing.hpp" -DSKBUILD_PLATLIB_DIR="$folder/unused" &&
    cmake --build "$folder/build" --parallel 2 --target ggml-vulkan &&
    rm -rf "$libraries" && mkdir "$libraries" &&
    cp -a "$(dirname "$installed")"/lib/*.so* "$folder"/build/bin/libggml-vulkan.so* "$libraries" &&
    rm "$libraries"/libggml.so* &&
    c++ -std=c++17 -O2 -fPIC -shared -o "$libraries/libggml.so.0" -Wl,-soname,libggml.so.0 -I"$ggml/include" -I"$ggml/src" \
      -DGGML_USE_CPU -DGGML_USE_VULKAN -DGGML_BUILD -DGGML_SHARED -DGGML_BACKEND_SHARED \
      "$ggml"/src/ggml-backend-{dl,reg}.cpp -L"$libraries" -lggml-vulkan -lggml-cpu -lggml-base -ldl &&
    ln -s libggml.so.0 "$libraries/libggml.so" && mv "$libraries" "$folder/lib"
}

# Print why there is no build.
prepare() {
  local tool
  for tool in apt-get dpkg-deb cmake c++; do
    command -v "$tool" >/dev/null || { echo "there is no $tool" && return 1; }
  done
  packages >>"$log" 2>&1 || { echo "Mesa's packages can't be had ($(tail -1 "$log"))" && return 1; }
  export LD_LIBRARY_PATH="$(echo "$root"/usr/lib/*-linux-*):${LD_LIBRARY_PATH:-}"  # glslc's own
  [ -d "$folder/source" ] || sources >>"$log" 2>&1 || { echo "llama.cpp's sources can't be had ($(tail -1 "$log"))" && return 1; }
  build >>"$log" 2>&1 || { echo "llama.cpp can't be built with Vulkan ($(grep -m 1 "rror:" "$log"))" && return 1; }
}

if [ -n "${LAVAPIPE_PREPARES:-}" ]; then
  prepare >"$folder/why"
  exit
fi
if [ ! -d "$folder/lib" ]; then
  LAVAPIPE_PREPARES=1 timeout --kill-after=30s "$build_limit" bash "$PWD/tests/gpu/lavapipe.sh" "$folder" </dev/null
  case $? in
    0) ;;
    124 | 137) skip "llama.cpp was not built after $build_limit" ;;
    *) skip "$(cat "$folder/why")" ;;
  esac
fi

libraries=$(echo "$root"/usr/lib/*-linux-*)
sed "s|\"library_path\": *\".*/|\"library_path\": \"|; s|\"library_path\": *\"|&$libraries/|" \
  "$root"/usr/share/vulkan/icd.d/lvp_icd.*.json >"$folder/driver.json" 2>>"$log"
export LD_LIBRARY_PATH=$folder/lib:$libraries:${LD_LIBRARY_PATH:-} LLAMA_CPP_LIB_PATH=$folder/lib
export VK_ICD_FILENAMES=$folder/driver.json MESA_SHADER_CACHE_DIR=$folder/shaders GGML_VK_VISIBLE_DEVICES=0,0
found=$(timeout 2m python -c 'from llmrun.planning.hardware import this_machine; print(len(this_machine().gpus))' 2>>"$log")
[ "${found:-0}" = 2 ] || skip "the driver does not work here"

tests() {
  timeout --kill-after=30s "$tests_limit" pytest -q -rs -m "" -n 0 -o cache_dir="$folder/pytest" "$@" </dev/null
}
tests tests/gpu "$@"
status=$?
if [ $status = 1 ]; then
  echo "== once more, alone: the GPU tests that failed"
  tests --last-failed --last-failed-no-failures none tests/gpu "$@"
  status=$?
fi
case $status in
  0 | 1 | 2) exit $status ;;  # 2: tests can't be collected
  124 | 137) skip "not finished after $tests_limit" ;;
  *) skip "pytest ended with status $status" ;;
esac

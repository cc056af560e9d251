#include "simd.hpp"

#ifndef __GNUC__
#include <cstring>
#define __builtin_memcpy memcpy
#endif

#if defined(__clang__)
#define LLMRUN_UNROLL_16 _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define LLMRUN_UNROLL_16 _Pragma("GCC unroll 16")
#else
#define LLMRUN_UNROLL_16
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define LLMRUN_X86_LEVELS
#endif

namespace llmrun {
namespace {

// SSE2 on x86-64, NEON on 64-bit ARM: what every such CPU has.
namespace baseline {
#include "simd_loops.hpp"
constexpr Loops table{"baseline", find_maxima, count_at_least, find_at_least, exponentials, add_at_least};
}  // namespace baseline

#ifdef LLMRUN_X86_LEVELS

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#include "simd_loops.hpp"
constexpr Loops table{"avx2", find_maxima, count_at_least, find_at_least, exponentials, add_at_least};
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
namespace avx512 {
#include "simd_loops.hpp"
constexpr Loops table{"avx512", find_maxima, count_at_least, find_at_least, exponentials, add_at_least};
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // LLMRUN_X86_LEVELS

std::vector<Loops> find_available() {
    std::vector<Loops> found{baseline::table};
#ifdef LLMRUN_X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        found.push_back(avx2::table);
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        found.push_back(avx512::table);
    }
#endif
    return found;
}

}  // namespace

const std::vector<Loops>& available_loops() {
    static const std::vector<Loops> available = find_available();
    return available;
}

const Loops& loops() { return available_loops().back(); }

}  // namespace llmrun

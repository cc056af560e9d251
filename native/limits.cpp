#include "limits.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define LLMRUN_X86
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__)
#define LLMRUN_ARM
#include <arm_neon.h>
#endif

#ifdef __GNUC__
#define LLMRUN_KEPT(value) asm volatile("" ::"m"(value))
#else
#define LLMRUN_KEPT(value) static_cast<void>(static_cast<volatile const decltype(value)&>(value))
#endif

namespace llmrun {
namespace {

constexpr int chains = 12;  // independent sums: enough to hide an instruction's latency on two ports
constexpr int64_t rounds_at_once = 500'000;
constexpr size_t bytes_at_once = size_t{64} << 20;  // a shorter pass would be mostly the threads' waiting for each other

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Lets every thread do `work` at the same time, again and again; the shortest time that all of them took together.
template <typename Work>
double shortest(unsigned threads, double seconds, int least, Work work) {
    double best = 1e30;
    double began = 0;
    std::atomic<bool> done{false};
    const double end = now() + seconds;
    int round = 0;
    std::barrier start(threads, [&]() noexcept { began = now(); });
    std::barrier finish(threads, [&]() noexcept {
        const double at = now();
        best = std::min(best, at - began);
        done = ++round >= least && at >= end;
    });
    const auto run = [&](unsigned thread) {
        while (!done) {
            start.arrive_and_wait();
            work(thread);
            finish.arrive_and_wait();
        }
    };
    std::vector<std::thread> others;
    for (unsigned thread = 1; thread < threads; ++thread) {
        others.emplace_back(run, thread);
    }
    run(0);
    for (std::thread& other : others) {
        other.join();
    }
    return best;
}

// Adds up whole cache lines; plain enough for every compiler to make vector instructions of it.
uint32_t sum_of(const uint32_t* values, size_t count) {
    uint32_t sums[32] = {};
    for (size_t i = 0; i + 32 <= count; i += 32) {
        for (int lane = 0; lane < 32; ++lane) {
            sums[lane] += values[i + lane];
        }
    }
    uint32_t sum = 0;
    for (const uint32_t lane : sums) {
        sum += lane;
    }
    return sum;
}

// How many multiply-adds a loop does in each round of its chains.
struct Loop {
    void (*run)(int64_t rounds);
    int width;
};

void multiply_floats(int64_t rounds) {
    float sums[chains * 4] = {};
    for (int64_t round = 0; round < rounds; ++round) {
        for (float& sum : sums) {
            sum += 0.001f * static_cast<float>(round & 7);
        }
    }
    LLMRUN_KEPT(sums);
}

// The body of a loop with intrinsics: chains of one instruction.
#define LLMRUN_LOOP(name, target, vector, zero, operand, step)      \
    target void name(int64_t rounds) {                              \
        vector sums[chains];                                        \
        for (vector& sum : sums) {                                  \
            sum = zero;                                             \
        }                                                           \
        auto x = operand;                                           \
        for (int64_t round = 0; round < rounds; ++round) {          \
            _Pragma("GCC unroll 12") for (int i = 0; i < chains; ++i) { \
                step;                                               \
            }                                                       \
        }                                                           \
        LLMRUN_KEPT(sums);                                          \
    }

#ifdef LLMRUN_X86

#define LLMRUN_TARGET(features) __attribute__((target(features)))
// What depends on x has to be computed again.
#define LLMRUN_ANYTHING(x) asm volatile("" : "+x"(x))

LLMRUN_LOOP(dot_avx512, LLMRUN_TARGET("avx512f,avx512vnni"), __m512i, _mm512_setzero_si512(),
            _mm512_set1_epi8(1), sums[i] = _mm512_dpbusd_epi32(sums[i], x, x))
LLMRUN_LOOP(dot_avx2, LLMRUN_TARGET("avx2"), __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1),
            LLMRUN_ANYTHING(x); sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(x, x), x)))
LLMRUN_LOOP(fma_avx512, LLMRUN_TARGET("avx512f"), __m512, _mm512_setzero_ps(), _mm512_set1_ps(0.001f),
            sums[i] = _mm512_fmadd_ps(x, x, sums[i]))
LLMRUN_LOOP(fma_avx2, LLMRUN_TARGET("avx2,fma"), __m256, _mm256_setzero_ps(), _mm256_set1_ps(0.001f),
            sums[i] = _mm256_fmadd_ps(x, x, sums[i]))
#if defined(__clang__) || __GNUC__ >= 11
LLMRUN_LOOP(dot_avxvnni, LLMRUN_TARGET("avx2,avxvnni"), __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1),
            sums[i] = _mm256_dpbusd_avx_epi32(sums[i], x, x))
#endif
LLMRUN_LOOP(dot_bf16, LLMRUN_TARGET("avx512f,avx512bf16"), __m512, _mm512_setzero_ps(), _mm512_setzero_ps(),
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)x, (__m512bh)x))
#if defined(__clang__) || __GNUC__ >= 12
#define LLMRUN_FP16
LLMRUN_LOOP(fma_fp16, LLMRUN_TARGET("avx512f,avx512fp16"), __m512h, _mm512_setzero_ph(), _mm512_setzero_ph(),
            sums[i] = _mm512_fmadd_ph(x, x, sums[i]))
#endif

// Of leaf 7, where the compilers' own names for features are too new to rely on.
bool has_feature(unsigned subleaf, unsigned which, unsigned bit) {
    unsigned registers[4] = {};
    return __get_cpuid_count(7, subleaf, &registers[0], &registers[1], &registers[2], &registers[3]) &&
           ((registers[which] >> bit) & 1);
}

std::vector<Loop> loops_of(std::string_view kind) {
    __builtin_cpu_init();
    std::vector<Loop> found;
    const bool wide = __builtin_cpu_supports("avx512f");
    if (kind == "int8") {
        if (wide && __builtin_cpu_supports("avx512vnni")) {
            found.push_back({dot_avx512, 64});
        }
#if defined(__clang__) || __GNUC__ >= 11
        if (__builtin_cpu_supports("avx2") && has_feature(1, 0, 4)) {
            found.push_back({dot_avxvnni, 32});
        }
#endif
        if (__builtin_cpu_supports("avx2")) {
            found.push_back({dot_avx2, 32});
        }
        return found;
    }
    if (kind == "half" && wide && __builtin_cpu_supports("avx512bf16")) {
        found.push_back({dot_bf16, 32});
    }
#ifdef LLMRUN_FP16
    if (kind == "half" && wide && has_feature(0, 3, 23)) {
        found.push_back({fma_fp16, 32});
    }
#endif
    if (wide) {
        found.push_back({fma_avx512, 16});
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        found.push_back({fma_avx2, 8});
    }
    found.push_back({multiply_floats, 4});
    return found;
}

#elif defined(LLMRUN_ARM)

#ifdef __ARM_FEATURE_DOTPROD
LLMRUN_LOOP(dot_neon, , int32x4_t, vdupq_n_s32(0), vdupq_n_s8(1), sums[i] = vdotq_s32(sums[i], x, x))
#endif
LLMRUN_LOOP(fma_neon, , float32x4_t, vdupq_n_f32(0), vdupq_n_f32(0.001f), sums[i] = vfmaq_f32(sums[i], x, x))

std::vector<Loop> loops_of(std::string_view kind) {
    if (kind == "int8") {
#ifdef __ARM_FEATURE_DOTPROD
        return {{dot_neon, 16}};
#else
        return {};
#endif
    }
    return {{fma_neon, 4}};
}

#else

std::vector<Loop> loops_of(std::string_view kind) {
    return kind == "int8" ? std::vector<Loop>{} : std::vector<Loop>{{multiply_floats, 4}};
}

#endif

}  // namespace

double read_rate(size_t bytes, unsigned threads, double seconds) {
    const size_t each = threads ? bytes / threads / 128 * 32 : 0;  // of 4 bytes; whole rounds of sum_of()
    if (each == 0) {
        throw std::invalid_argument("there has to be something to read, and a thread that reads it");
    }
    // Not a vector: its zeroes would be written by this thread alone, and lie in its part of the memory.
    const std::unique_ptr<uint32_t[]> buffer(new uint32_t[each * threads]);
    std::vector<uint32_t> sums(size_t{threads} * 32);  // each in a cache line of its own
    const auto fill = [&](unsigned thread) {
        std::fill_n(buffer.get() + each * thread, each, thread + 1);
    };
    shortest(threads, 0, 1, fill);
    const size_t read = each * threads * sizeof(uint32_t);
    const size_t passes = std::max(size_t{1}, bytes_at_once / read);
    const double best = shortest(threads, seconds, 2, [&](unsigned thread) {
        for (size_t pass = 0; pass < passes; ++pass) {
            sums[size_t{thread} * 32] += sum_of(buffer.get() + each * thread, each);
            std::atomic_signal_fence(std::memory_order_seq_cst);  // or one pass would do for all
        }
    });
    LLMRUN_KEPT(sums[0]);
    return static_cast<double>(read * passes) / best;
}

double multiply_add_rate(std::string_view kind, unsigned threads, double seconds) {
    if (threads == 0 || (kind != "int8" && kind != "half" && kind != "single")) {
        throw std::invalid_argument("the kind has to be int8, half or single, and there has to be a thread");
    }
    double best = 0;
    const std::vector<Loop> loops = loops_of(kind);
    for (const Loop& loop : loops) {
        const double share = seconds / static_cast<double>(loops.size());
        const double time = shortest(threads, share, 2, [&](unsigned) { loop.run(rounds_at_once); });
        best = std::max(best, static_cast<double>(rounds_at_once) * chains * loop.width * threads / time);
    }
    return best;
}

}  // namespace llmrun

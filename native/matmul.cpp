#include "matmul.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif
#ifdef LLMRUN_MATMUL_ARM
#include <sys/auxv.h>
#endif

namespace llmrun {

#ifdef LLMRUN_MATMUL_X86
extern const MatmulKernels matmul_avx2;
extern const MatmulKernels matmul_avxvnni;
extern const MatmulKernels matmul_avx512vnni;
#elif defined(LLMRUN_MATMUL_ARM)
extern const MatmulKernels matmul_neon;
extern const MatmulKernels matmul_i8mm;
#endif

namespace {

#ifdef LLMRUN_MATMUL_ARM
// Bits of AT_HWCAP and AT_HWCAP2: older headers lack names.
constexpr unsigned long has_half_arithmetic = 1UL << 10, has_dotprod = 1UL << 20, has_i8mm = 1UL << 13;
#endif

std::vector<MatmulKernels> find_available() {
    std::vector<MatmulKernels> found;
#ifdef LLMRUN_MATMUL_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        return found;
    }
    found.push_back(matmul_avx2);
    unsigned registers[4] = {};  // of leaf 7, subleaf 1: AVX-VNNI has no name in older compilers
    if (__get_cpuid_count(7, 1, &registers[0], &registers[1], &registers[2], &registers[3]) && ((registers[0] >> 4) & 1)) {
        found.push_back(matmul_avxvnni);
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
        found.push_back(matmul_avx512vnni);
    }
#elif defined(LLMRUN_MATMUL_ARM)
    if (getauxval(AT_HWCAP) & has_dotprod) {
        found.push_back(matmul_neon);
        if (getauxval(AT_HWCAP2) & has_i8mm) {
            found.push_back(matmul_i8mm);
        }
    }
#endif
    return found;
}

}  // namespace

const MatmulKernel* MatmulKernels::of(int type) const {
    for (const MatmulKernel* kernel = begin; kernel != end; ++kernel) {
        if (kernel->type == type) {
            return kernel;
        }
    }
    return nullptr;
}

bool has_own_products([[maybe_unused]] int type) {
#ifdef LLMRUN_MATMUL_X86
    return type == 30 && __builtin_cpu_supports("avx512bf16");  // BF16
#elif defined(LLMRUN_MATMUL_ARM)
    return type == 1 && (getauxval(AT_HWCAP) & has_half_arithmetic);  // F16
#else
    return false;
#endif
}

const std::vector<MatmulKernels>& available_matmul_kernels() {
    static const std::vector<MatmulKernels> available = find_available();
    return available;
}

}  // namespace llmrun

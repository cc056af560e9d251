// The loops that read whole rows of logits, for the best instructions that this CPU has.
//
// Owns the choice of the CPU level. The loops are plain C++, written once in simd_loops.hpp and compiled per
// level. Must not know sampling: only floats, in groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmrun {

// A row is looked at in groups of 16 rows by 16 columns: as many columns as the widest registers have lanes.
constexpr size_t columns_per_group = 16;
constexpr size_t group_size = 256;

struct Loops {
    const char* level;  // "avx512", "avx2" or "baseline"

    // The largest of each column and of each group; raises each of the 16 worst[] to the largest bit pattern
    // without its sign, so that a NaN shows. NaN may or may not be among the maxima.
    // logits: [groups * 256]; columns: [groups * 16]; maxima: [groups]
    void (*find_maxima)(const float* logits, size_t groups, float* columns, float* maxima, int32_t* worst);

    // How many values are at least the threshold.
    size_t (*count_at_least)(const float* values, size_t count, float threshold);

    // A bit for each value of a group, the first one lowest: whether it is at least the threshold. words: [4]
    void (*find_at_least)(const float* values, float threshold, uint64_t* words);

    // exp(logit - largest) of each logit, with a relative error below 1e-6 where it is at least e^-86 and at most 1.
    // logits, weights: [groups * 256], which may be the same
    void (*exponentials)(const float* logits, size_t groups, float largest, float* weights);

    // The sum of the weights that are at least the threshold. weights: [groups * 256]
    double (*add_at_least)(const float* weights, size_t groups, float threshold);
};

// The best level, found out once.
const Loops& loops();

// All levels that this CPU can run, baseline first; for tests.
const std::vector<Loops>& available_loops();

}  // namespace llmrun

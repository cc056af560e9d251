// The loops of simd.hpp. Included by simd.cpp once per CPU level, inside that level's namespace; no guard.
//
// Each inner loop goes down a column, whose state stays in a register; the loop around it, over the 16
// columns, is what the compiler turns into vector instructions. No name of the standard library's that is
// more than a type may be used: its code could be linked from a level that the CPU does not have.

inline int32_t bits_of(float value) {
    int32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(int32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline float larger(float a, float b) { return a > b ? a : b; }
inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

inline float largest_of_16(const float* values) {
    float halves[8];
    for (int i = 0; i < 8; ++i) {
        halves[i] = larger(values[i], values[i + 8]);
    }
    float quarters[4];
    for (int i = 0; i < 4; ++i) {
        quarters[i] = larger(halves[i], halves[i + 4]);
    }
    return larger(larger(quarters[0], quarters[1]), larger(quarters[2], quarters[3]));
}

void find_maxima(const float* __restrict logits, size_t groups, float* __restrict columns,
                 float* __restrict maxima, int32_t* __restrict worst) {
    for (size_t group = 0; group < groups; ++group) {
        for (int column = 0; column < 16; ++column) {
            float largest = logits[column];
            int32_t magnitude = bits_of(largest) & 0x7fffffff;
            LLMRUN_UNROLL_16
            for (int row = 1; row < 16; ++row) {
                const float logit = logits[row * 16 + column];
                largest = larger(logit, largest);
                magnitude = larger(bits_of(logit) & 0x7fffffff, magnitude);
            }
            columns[column] = largest;
            worst[column] = larger(magnitude, worst[column]);
        }
        maxima[group] = largest_of_16(columns);
        logits += group_size;
        columns += columns_per_group;
    }
}

size_t count_at_least(const float* values, size_t count, float threshold) {
    int32_t found = 0;
    for (size_t i = 0; i < count; ++i) {
        found += values[i] >= threshold ? 1 : 0;
    }
    return static_cast<size_t>(found);
}

void find_at_least(const float* values, float threshold, uint64_t* words) {
    uint8_t reached[group_size];
    for (size_t i = 0; i < group_size; ++i) {
        reached[i] = values[i] >= threshold ? 1 : 0;
    }
    for (size_t i = 0; i < group_size; i += 64) {
        uint64_t word = 0;
        for (size_t part = 0; part < 64; part += 8) {
            uint64_t bytes;
            __builtin_memcpy(&bytes, reached + i + part, sizeof bytes);
            word |= (bytes * 0x0102040810204080u >> 56) << part;  // the lowest bit of each byte, side by side
        }
        words[i / 64] = word;
    }
}

// exp for -86 <= x <= 0: 2^n times a polynomial of the rest, |rest| <= ln(2) / 2 (coefficients as in Cephes).
inline float exponential(float x) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
    const float shifted = x * 1.44269504f + rounder;
    const float n = shifted - rounder;
    const float rest = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const auto scale = static_cast<uint32_t>(bits_of(shifted)) << 23;
    return float_of(static_cast<int32_t>(static_cast<uint32_t>(bits_of(sum)) + scale));
}

void exponentials(const float* logits, size_t groups, float largest, float* weights) {
    for (size_t group = 0; group < groups; ++group, logits += group_size, weights += group_size) {
        float terms[group_size];
        for (size_t i = 0; i < group_size; ++i) {
            terms[i] = larger(logits[i] - largest, -86.0f);  // e^-86 vanishes in any sum with a 1 in it
        }
        // A loop of its own: in one loop the compiler would jump around the polynomial for the -86.
        for (size_t i = 0; i < group_size; ++i) {
            weights[i] = exponential(terms[i]);
        }
    }
}

double add_at_least(const float* weights, size_t groups, float threshold) {
    double total = 0.0;
    for (size_t group = 0; group < groups; ++group, weights += group_size) {
        float sums[16];
        for (int column = 0; column < 16; ++column) {
            float sum = 0.0f;
            LLMRUN_UNROLL_16
            for (int row = 0; row < 16; ++row) {
                const float weight = weights[row * 16 + column];
                sum += weight >= threshold ? weight : 0.0f;
            }
            sums[column] = sum;
        }
        for (int column = 0; column < 16; ++column) {
            total += sums[column];
        }
    }
    return total;
}

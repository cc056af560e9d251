// The products of matmul.hpp beside slow twins: each weight unpacked as ggml's reference does, each product in double.
#include "matmul.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "check.hpp"

using llmrun::Columns;
using llmrun::MatmulKernel;
using llmrun::MatmulKernels;
using llmrun::Product;

namespace {

std::mt19937_64 random_bits(7);

int64_t up_to(int64_t least, int64_t most) { return least + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(most - least + 1)); }

float from_half(const uint8_t* p) {
    const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float value = exponent ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                                 : std::ldexp(static_cast<float>(fraction), -24);
    return bits >> 15 ? -value : value;
}

float from_upper_half(const uint8_t* p) {
    const uint32_t bits = static_cast<uint32_t>(p[0] | p[1] << 8) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// A type: how many bytes its blocks have, where they have halves, and each weight of a block.
struct Type {
    int number, bytes, block;
    std::vector<int> halves;
    float (*weight)(const uint8_t* block, int index);
};

const int8_t nonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

int nibble(const uint8_t* bytes, int index) { return index < 16 ? bytes[index] & 15 : bytes[index - 16] >> 4; }

int five_bits(const uint8_t* bytes, int index) { return nibble(bytes + 4, index) | (bytes[index / 8] >> index % 8 & 1) << 4; }

// The 6-bit scale and minimum of a block of 32 in Q4_K and Q5_K.
int six_bits(const uint8_t* scales, int block, bool is_minimum) {
    if (block < 4) {
        return scales[block + 4 * is_minimum] & 63;
    }
    const int low = is_minimum ? scales[block + 4] >> 4 : scales[block + 4] & 15;
    return low | scales[block - 4 + 4 * is_minimum] >> 6 << 4;
}

float of_scales(const uint8_t* b, int block, int quant) {
    return from_half(b) * static_cast<float>(six_bits(b + 4, block, false)) * static_cast<float>(quant) -
           from_half(b + 2) * static_cast<float>(six_bits(b + 4, block, true));
}

int nibble_of_256(const uint8_t* bytes, int index) {
    const uint8_t byte = bytes[index / 64 * 32 + index % 32];
    return index / 32 % 2 ? byte >> 4 : byte & 15;
}

const std::vector<Type> types{
    {2, 18, 32, {0}, [](const uint8_t* b, int i) { return from_half(b) * static_cast<float>(nibble(b + 2, i) - 8); }},
    {3, 20, 32, {0, 2}, [](const uint8_t* b, int i) { return from_half(b) * static_cast<float>(nibble(b + 4, i)) + from_half(b + 2); }},
    {6, 22, 32, {0}, [](const uint8_t* b, int i) { return from_half(b) * static_cast<float>(five_bits(b + 2, i) - 16); }},
    {7, 24, 32, {0, 2}, [](const uint8_t* b, int i) { return from_half(b) * static_cast<float>(five_bits(b + 4, i)) + from_half(b + 2); }},
    {8, 34, 32, {0}, [](const uint8_t* b, int i) { return from_half(b) * static_cast<float>(static_cast<int8_t>(b[2 + i])); }},
    {12, 144, 256, {0, 2}, [](const uint8_t* b, int i) { return of_scales(b, i / 32, nibble_of_256(b + 16, i)); }},
    {13, 176, 256, {0, 2},
     [](const uint8_t* b, int i) { return of_scales(b, i / 32, nibble_of_256(b + 48, i) | (b[16 + i % 32] >> (i / 32) & 1) << 4); }},
    {14, 210, 256, {208},
     [](const uint8_t* b, int i) {
         const int half = i / 128, quarter = i / 32 % 4, at = i % 32;
         const uint8_t low = b[64 * half + 32 * (quarter % 2) + at];
         const int quant = (quarter < 2 ? low & 15 : low >> 4) | (b[128 + 32 * half + at] >> 2 * quarter & 3) << 4;
         return from_half(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + i / 16])) * static_cast<float>(quant - 32);
     }},
    {20, 18, 32, {0}, [](const uint8_t* b, int i) { return from_half(b) * static_cast<float>(nonlinear[nibble(b + 2, i)]); }},
    {23, 136, 256, {0},
     [](const uint8_t* b, int i) {
         const int block = i / 32, scale = (b[4 + block / 2] >> 4 * (block % 2) & 15) | ((b[2] | b[3] << 8) >> 2 * block & 3) << 4;
         return from_half(b) * static_cast<float>(scale - 32) * static_cast<float>(nonlinear[nibble(b + 8 + 16 * block, i % 32)]);
     }},
    {1, 32, 16, {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, [](const uint8_t* b, int i) { return from_half(b + 2 * i); }},
    {30, 32, 16, {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, [](const uint8_t* b, int i) { return from_upper_half(b + 2 * i); }},
};

bool is_half(const Type& type) { return type.block == 16; }

// Random blocks; extreme ones have the largest or smallest of every field.
std::vector<uint8_t> random_weights(const Type& type, int64_t rows, int64_t depth, int64_t stride, int extreme) {
    std::vector<uint8_t> weights(static_cast<size_t>((rows - 1) * stride + depth / type.block * type.bytes));  // nothing behind
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t block = 0; block < depth / type.block; ++block) {
            uint8_t* bytes = weights.data() + row * stride + block * type.bytes;
            for (int i = 0; i < type.bytes; ++i) {
                bytes[i] = extreme == 1 ? 0 : extreme == 2 ? 255 : extreme == 3 ? 128 : static_cast<uint8_t>(random_bits());
            }
            for (const int half : type.halves) {
                const int bits = extreme ? 0x2c00 : static_cast<int>(up_to(0x1000, 0x3400) | up_to(0, 1) << 15);
                bytes[half] = static_cast<uint8_t>(bits);
                bytes[half + 1] = static_cast<uint8_t>(bits >> 8);
            }
        }
    }
    return weights;
}

std::vector<float> random_activations(size_t count, int extreme) {
    std::vector<float> values(count);
    std::normal_distribution<float> normal;
    for (float& value : values) {
        value = extreme ? static_cast<float>(up_to(0, 1) * 2 - 1) * 100.0f : normal(random_bits);
        if (!extreme && up_to(0, 50) == 0) {
            value *= 1000.0f;
        }
    }
    for (size_t i = 0; !extreme && i + 64 <= count && up_to(0, 3) == 0; ++i) {
        values[i] = 0;
    }
    return values;
}

struct Memory {
    explicit Memory(size_t bytes) : data(static_cast<char*>(::operator new(bytes, std::align_val_t(64)))) {}
    ~Memory() { ::operator delete(data, std::align_val_t(64)); }
    char* data;
};

struct Case {
    const Type& type;
    int64_t rows, depth, columns, row_bytes, in_stride, out_stride;
    std::vector<uint8_t> weights;
    std::vector<float> activations;
};

Case random_case(const Type& type, int extreme) {
    Case one{type, up_to(1, 150), type.block * up_to(1, is_half(type) ? 160 : type.block == 32 ? 40 : 5), up_to(1, 40), 0, 0, 0, {}, {}};
    one.row_bytes = one.depth / type.block * type.bytes;
    one.in_stride = one.depth + up_to(0, 3);
    one.out_stride = one.rows + up_to(0, 3);
    one.weights = random_weights(type, one.rows, one.depth, one.row_bytes, extreme);
    one.activations = random_activations(static_cast<size_t>(one.in_stride * one.columns), extreme);
    return one;
}

constexpr float untouched = -7.0f;

// As several threads would: records and rows in parts of random size.
std::vector<float> product(const MatmulKernels& kernels, Case& one, const Columns& in, int64_t columns, const int64_t* places) {
    const MatmulKernel& kernel = *kernels.of(one.type.number);
    std::vector<float> results(static_cast<size_t>(one.out_stride * one.columns), untouched);
    const Memory packed(static_cast<size_t>(kernel.packed_bytes(one.depth, columns))), scratch(static_cast<size_t>(kernel.scratch_bytes(one.depth, columns)));
    const int64_t records = kernel.records(one.depth, columns);
    for (int64_t first = 0, last = 0; first < records; first = last) {
        last = std::min(records, first + up_to(1, 50));
        kernel.pack(in, one.depth, columns, packed.data, first, last);
    }
    const Product whole{one.weights.data(), one.row_bytes, one.rows, one.depth, columns, packed.data, in, {results.data(), one.out_stride, places}};
    for (int64_t first = 0, last = 0; first < one.rows; first = last) {
        last = std::min(one.rows, first + kernels.rows * up_to(1, 5));
        kernel.multiply(whole, first, last, scratch.data);
    }
    return results;
}

float to_half(float value) {
    const float magnitude = std::abs(value);
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    const float step = std::ldexp(1.0f, std::max(exponent - 11, -24));
    return std::copysign(std::nearbyint(magnitude / step) * step, value);
}

#ifdef __aarch64__
constexpr bool is_arm = true;
#else
constexpr bool is_arm = false;
#endif

// Activations as ggml quantizes them for this type, and for each 32 of them what a weight's minimum counts for.
struct Rounded {
    std::vector<double> values, totals;

    Rounded(const Type& type, const float* from, int64_t depth) {
        for (int64_t first = 0; first < depth; first += type.block) {
            float largest = 0;
            for (int64_t i = first; i < first + type.block; ++i) {
                largest = std::max(largest, std::abs(from[i]));
            }
            const float inverse = 1.0f / (largest / 127.0f), factor = largest > 0 ? (is_arm && type.block == 32 ? inverse : 127.0f / largest) : 0.0f;
            const float scale = type.block == 32 ? largest / 127.0f : largest > 0 ? 1.0f / factor : 0.0f;
            for (int64_t begin = first; begin < first + type.block; begin += 32) {
                float sum = 0;
                for (int64_t i = begin; i < begin + 32; ++i) {
                    const float whole = std::nearbyint(from[i] * factor);
                    sum += whole;
                    values.push_back(static_cast<double>(whole) * (type.block == 32 ? to_half(scale) : scale));
                }
                totals.push_back(type.block == 32 ? to_half(scale * sum) : static_cast<double>(scale) * sum);
            }
        }
    }
};

// What a sum of weights of 16 bits is, to the last bit.
bool are_exact(const Case& one, const std::vector<float>& results) {
    for (int64_t row = 0; row < one.rows; ++row) {
        const uint8_t* weights = one.weights.data() + row * one.row_bytes;
        for (int64_t column = 0; column < one.columns; ++column) {
            const float* activations = one.activations.data() + column * one.in_stride;
            float total = 0;
            for (int64_t begin = 0; begin < one.depth; begin += 1024) {
                float sums[16] = {};
                for (int64_t i = begin; i < std::min(one.depth, begin + 1024); ++i) {
                    sums[i % 16] = std::fma(one.type.weight(weights + 2 * i, 0), activations[i], sums[i % 16]);
                }
                float fours[4];
                for (int i = 0; i < 4; ++i) {
                    fours[i] = (sums[4 * i] + sums[4 * i + 2]) + (sums[4 * i + 1] + sums[4 * i + 3]);
                }
                const float sum = (fours[0] + fours[2]) + (fours[1] + fours[3]);
                total = begin ? total + sum : sum;
            }
            if (results[static_cast<size_t>(column * one.out_stride + row)] != total) {
                return false;
            }
        }
    }
    return true;
}

bool are_close(const Case& one, const std::vector<float>& results) {
    std::vector<Rounded> activations;
    for (int64_t column = 0; column < one.columns; ++column) {
        activations.emplace_back(one.type, one.activations.data() + column * one.in_stride, one.depth);
    }
    const bool has_minimum = one.type.block == 32 && one.type.halves.size() == 2;
    for (int64_t row = 0; row < one.rows; ++row) {
        std::vector<double> weights(static_cast<size_t>(one.depth)), minima(static_cast<size_t>(one.depth / 32));
        for (int64_t i = 0; i < one.depth; ++i) {
            const uint8_t* block = one.weights.data() + row * one.row_bytes + i / one.type.block * one.type.bytes;
            minima[i / 32] = has_minimum ? from_half(block + 2) : 0.0;
            weights[i] = one.type.weight(block, static_cast<int>(i % one.type.block)) - minima[i / 32];
        }
        for (int64_t column = 0; column < one.columns; ++column) {
            const Rounded& rounded = activations[static_cast<size_t>(column)];
            double exact = 0, size = 0;
            for (int64_t i = 0; i < one.depth; ++i) {
                exact += weights[i] * rounded.values[i];
                size += std::abs(weights[i]) * std::abs(rounded.values[i]);
            }
            for (size_t block = 0; block < minima.size(); ++block) {
                exact += minima[block] * rounded.totals[block];
                size += std::abs(minima[block] * rounded.totals[block]);
            }
            for (int64_t first = 0; first < one.depth; first += 32) {  // the bytes begin with an offset, which is taken off again
                double most = 0, sum = 0;
                for (int64_t i = first; i < first + 32; ++i) {
                    most = std::max(most, std::abs(weights[i]));
                    sum += std::abs(rounded.values[i]);
                }
                size += 2 * most * sum;
            }
            if (!(std::abs(results[column * one.out_stride + row] - exact) <= size * 2e-6)) {
                return false;
            }
        }
    }
    return true;
}

void test_products() {
    for (const Type& type : types) {
        for (int round = 0; round < 24; ++round) {
            const int extreme = round % 6 < 3 ? 0 : round % 6 - 2;
            Case one = random_case(type, extreme);
            const Columns in{one.activations.data(), one.in_stride, nullptr};
            std::vector<float> first;
            for (const MatmulKernels& kernels : llmrun::available_matmul_kernels()) {
                const std::vector<float> results = product(kernels, one, in, one.columns, nullptr);
                CHECK(is_half(type) ? are_exact(one, results) : are_close(one, results));
                for (int64_t column = 0; column < one.columns; ++column) {  // nothing is written between the columns
                    for (int64_t row = one.rows; row < one.out_stride; ++row) {
                        CHECK(results[column * one.out_stride + row] == untouched);
                    }
                }
                CHECK(first.empty() || first == results);  // every instruction set rounds alike
                first = results;
            }
        }
    }
}

// A column has the same result alone, in a crowd, and wherever it is.
void test_columns_do_not_matter_to_each_other() {
    for (const MatmulKernels& kernels : llmrun::available_matmul_kernels()) {
        for (const Type& type : types) {
            Case one = random_case(type, 0);
            std::vector<int64_t> from, to;
            for (int64_t column = 0; column < one.columns; ++column) {
                from.push_back((one.columns - 1 - column) * one.in_stride);
                to.push_back((one.columns - 1 - column) * one.out_stride);
            }
            const Columns in{one.activations.data(), one.in_stride, nullptr};
            const std::vector<float> together = product(kernels, one, in, one.columns, nullptr);
            CHECK(product(kernels, one, {one.activations.data(), 0, from.data()}, one.columns, to.data()) == together);
            const int64_t column = up_to(0, one.columns - 1);
            const Columns alone{one.activations.data() + column * one.in_stride, 0, nullptr};
            const std::vector<float> single = product(kernels, one, alone, 1, nullptr);
            CHECK(std::memcmp(single.data(), together.data() + column * one.out_stride, static_cast<size_t>(one.rows) * sizeof(float)) == 0);
        }
    }
}

void test_other_types_have_none() {
    for (const MatmulKernels& kernels : llmrun::available_matmul_kernels()) {
        CHECK(kernels.of(0) == nullptr);
        CHECK(kernels.of(12) != nullptr);
        CHECK(kernels.of(12)->block == 256);
    }
}

}  // namespace

int main() {
    test_products();
    test_columns_do_not_matter_to_each_other();
    test_other_types_have_none();
    return summary();
}

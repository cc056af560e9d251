// The attention of attention.hpp beside a slow twin in double; and each row's bits, however the work is divided.
#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <vector>

#include "check.hpp"

using llmrun::Attention;
using llmrun::AttentionKernel;
using llmrun::AttentionKernels;
using llmrun::cells_of_chunk;
using llmrun::MatmulKernels;
using llmrun::State;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr uint16_t hidden = 0xfc00;
constexpr float untouched = -7.0f;
constexpr int f16 = 1, q8_0 = 8;

std::mt19937_64 random_bits(7);

int64_t up_to(int64_t least, int64_t most) { return least + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(most - least + 1)); }

double from_half(const char* p) {
    uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double value = exponent == 31 ? infinity : exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return bits >> 15 ? -value : value;
}

struct Memory {
    explicit Memory(size_t bytes) : data(static_cast<char*>(::operator new(bytes, std::align_val_t(64)))) {}
    ~Memory() { ::operator delete(data, std::align_val_t(64)); }
    char* data;
};

// Keys or values of one head, with something between the cells, and nothing behind the last one.
struct Cells {
    int type;
    int64_t row_bytes, stride;
    std::vector<char> bytes;

    Cells(int number, int64_t cells, int64_t elements, bool is_extreme) : type(number), row_bytes(type == f16 ? 2 * elements : elements / 32 * 34) {
        stride = row_bytes + 2 * up_to(0, 20);
        bytes.resize(static_cast<size_t>((cells - 1) * stride + row_bytes));
        for (int64_t at = 0; at + 1 < static_cast<int64_t>(bytes.size()); at += 2) {
            const bool is_half = type == f16 || at % stride % 34 == 0;
            const int least = is_extreme ? 0x4c00 : type == f16 ? 0x2c00 : 0x1400, most = is_extreme ? 0x5800 : type == f16 ? 0x4000 : 0x2000;
            const auto bits = static_cast<uint16_t>(is_half ? up_to(least, most) | up_to(0, 1) << 15 : static_cast<int64_t>(random_bits() & 0xffff));
            const uint16_t some = up_to(0, 30) == 0 ? static_cast<uint16_t>(bits & 0x83ff) : bits;  // zeros and denormal ones too
            std::memcpy(bytes.data() + at, &some, 2);
        }
    }

    double at(int64_t cell, int64_t element) const {
        const char* row = bytes.data() + cell * stride;
        if (type == f16) {
            return from_half(row + 2 * element);
        }
        const char* block = row + element / 32 * 34;
        return from_half(block) * static_cast<signed char>(block[2 + element % 32]);
    }
};

struct Case {
    int64_t positions, heads, cells, depth, width;
    Cells keys, values;
    std::vector<float> queries, slopes, sinks;
    std::vector<uint16_t> mask;
    int64_t mask_stride;
    float scale, softcap;

    Attention problem(std::vector<float>& results) const {
        const int64_t row = depth + 1, result_row = width + 1;
        results.assign(static_cast<size_t>(positions * heads * result_row), untouched);
        return {heads, positions * heads, cells, depth, width,
                {reinterpret_cast<const char*>(queries.data()), 4 * row * heads}, 4 * row,
                {{keys.bytes.data(), keys.stride}, {values.bytes.data(), values.stride}},
                {mask.empty() ? nullptr : reinterpret_cast<const char*>(mask.data()), 2 * mask_stride},
                reinterpret_cast<char*>(results.data()), 4 * result_row * heads, 4 * result_row,
                scale, softcap, slopes.data(), sinks.empty() ? nullptr : sinks.data()};
    }

    double bias(int64_t position, int64_t cell) const {
        return mask.empty() ? 0 : from_half(reinterpret_cast<const char*>(mask.data() + position * mask_stride + cell));
    }
};

// What positions see: all, the cells before their own, a window, some at random, or nothing; with biases or without.
std::vector<uint16_t> random_mask(int64_t positions, int64_t cells, int64_t stride) {
    const int64_t kind = up_to(0, 5), window = up_to(1, cells), biases = up_to(0, 1);
    if (kind == 0) {
        return {};
    }
    std::vector<uint16_t> mask(static_cast<size_t>((positions - 1) * stride + cells), hidden);
    for (int64_t position = 0; position < positions; ++position) {
        const int64_t last = cells - positions + position, sparse = up_to(1, 60);
        for (int64_t cell = 0; cell < cells; ++cell) {
            const bool is_seen = kind == 1 || (kind == 2 && cell <= last) || (kind == 3 && cell <= last && cell > last - window) ||
                                 (kind == 4 && up_to(0, sparse) == 0) || (kind == 5 && position % 3 && cell % 200 > 150);
            if (is_seen) {
                mask[static_cast<size_t>(position * stride + cell)] = biases ? static_cast<uint16_t>(0xb800 + up_to(0, 0x1400)) : 0;
            }
        }
    }
    return mask;
}

Case random_case(int key_type, int value_type, bool is_extreme) {
    const int64_t key_step = key_type == f16 ? 8 : 32, value_step = value_type == f16 ? 16 : 32;
    const int64_t positions = up_to(0, 2) ? up_to(1, 12) : up_to(1, 60), heads = up_to(1, 9), cells = up_to(1, up_to(0, 3) ? 300 : 900);
    const int64_t depth = key_step * up_to(1, 160 / key_step), width = value_step * up_to(1, 160 / value_step);
    Case one{positions, heads, cells, depth, width, {key_type, cells, depth, is_extreme}, {value_type, cells, width, is_extreme}, {}, {}, {}, {}, 0, 0, 0};
    std::normal_distribution<float> normal;
    one.queries.resize(static_cast<size_t>(positions * heads * (depth + 1)));
    std::generate(one.queries.begin(), one.queries.end(), [&] { return normal(random_bits) * (is_extreme ? 1000.0f : 1.0f); });
    const bool is_sloped = up_to(0, 2) == 0, has_sinks = up_to(0, 2) == 0;
    for (int64_t head = 0; head < heads; ++head) {
        one.slopes.push_back(is_sloped ? 1.0f / static_cast<float>(head + 1) : 1.0f);
        if (has_sinks) {
            one.sinks.push_back(normal(random_bits) * 5);
        }
    }
    one.mask_stride = cells + up_to(0, 3);
    one.mask = random_mask(positions, cells, one.mask_stride);
    one.scale = 1 / std::sqrt(static_cast<float>(depth));
    one.softcap = up_to(0, 2) ? 0.0f : static_cast<float>(up_to(3, 50));
    return one;
}

// States of `rows` rows.
struct States {
    States(const AttentionKernels& kernels, int64_t width, int64_t rows)
        : stride(kernels.value_floats(width)), scalars(static_cast<size_t>(2 * rows), untouched), values(static_cast<size_t>(rows * stride) * sizeof(float)),
          state{scalars.data(), scalars.data() + rows, reinterpret_cast<float*>(values.data)} {}

    State at(int64_t row) const { return {state.greatest + row, state.sum + row, state.values + row * stride}; }

    int64_t stride;
    std::vector<float> scalars;
    Memory values;
    State state;
};

// Parts of a random number of rows, each over all cells, or over parts of a random number of chunks.
std::vector<float> attend(const AttentionKernels& kernels, const Case& one, bool by_cells, int64_t most_rows) {
    std::vector<float> results;
    const Attention attention = one.problem(results);
    const AttentionKernel& kernel = *kernels.of(one.keys.type, one.values.type, one.depth, one.width);
    for (int64_t first = 0, last = 0; first < attention.rows; first = last) {
        last = std::min(attention.rows, first + up_to(1, most_rows));
        const int64_t rows = last - first;
        const Memory scratch(kernels.scratch_bytes(one.depth, one.width, rows));
        const States sum(kernels, one.width, rows);
        if (!by_cells) {
            kernel.attend(attention, first, last, 0, one.cells, sum.state, attention.cache, scratch.data);
        }
        for (int64_t begin = 0, end = 0; by_cells && begin < one.cells; begin = end) {
            end = std::min(one.cells, begin + cells_of_chunk);
            const States later(kernels, one.width, rows);
            kernel.attend(attention, first, last, begin, end, begin ? later.state : sum.state, attention.cache, scratch.data);
            for (int64_t row = 0, next = 0; begin && row < rows; row = next) {
                next = std::min(rows, row + up_to(1, 20));
                kernels.add(one.width, next - row, sum.at(row), later.at(row));
            }
        }
        kernels.finish(attention, first, last, sum.state);
    }
    return results;
}

bool is_row_close(const Case& one, int64_t row, const float* results) {
    const int64_t position = row / one.heads, head = row % one.heads;
    const float* query = one.queries.data() + row * (one.depth + 1);
    std::vector<double> scores;
    double greatest = one.sinks.empty() ? -infinity : one.sinks[head], error = 1e-6;  // of a score, as of a weight
    for (int64_t cell = 0; cell < one.cells; ++cell) {
        double score = 0, size = 0;
        for (int64_t i = 0; i < one.depth; ++i) {
            score += query[i] * one.keys.at(cell, i);
            size += std::abs(query[i] * one.keys.at(cell, i));
        }
        score = one.softcap != 0 ? one.softcap * std::tanh(score * one.scale / one.softcap) : score * one.scale;
        const double bias = one.bias(position, cell) * one.slopes[head];
        scores.push_back(score + bias);
        if (bias != -infinity) {
            error = std::max(error, size * one.scale * 1e-6 + (one.softcap + std::abs(bias) + std::abs(score)) * 2e-7);
        }
        greatest = std::max(greatest, scores.back());
    }
    double sum = one.sinks.empty() ? 0 : std::exp(one.sinks[head] - greatest);
    std::vector<double> exact(static_cast<size_t>(one.width)), sizes(exact);
    for (int64_t cell = 0; cell < one.cells; ++cell) {
        const double weight = scores[cell] == -infinity ? 0 : std::exp(scores[cell] - greatest);
        sum += weight;
        for (int64_t i = 0; i < one.width; ++i) {
            exact[i] += weight * one.values.at(cell, i);
            sizes[i] += weight * std::abs(one.values.at(cell, i));
        }
    }
    for (int64_t i = 0; i < one.width; ++i) {
        const double wanted = sum == 0 ? 0 : exact[i] / sum, allowed = sum == 0 ? 0 : sizes[i] / sum * std::expm1(2 * error);
        if (!(std::abs(results[i] - wanted) <= allowed + 1e-30)) {
            return false;
        }
    }
    return results[one.width] == untouched;
}

void test_attention() {
    for (const int key_type : {f16, q8_0}) {
        for (const int value_type : {f16, q8_0}) {
            for (int round = 0; round < 30; ++round) {
                const Case one = random_case(key_type, value_type, false);
                std::vector<float> first;
                for (const MatmulKernels& products : llmrun::available_matmul_kernels()) {
                    const AttentionKernels& kernels = llmrun::attention_kernels(products);
                    const std::vector<float> results = attend(kernels, one, false, 1000);
                    for (int64_t row = 0; row < one.positions * one.heads; ++row) {
                        CHECK(is_row_close(one, row, results.data() + row * (one.width + 1)));
                    }
                    for (const int64_t most_rows : {1, 5, 100}) {  // alone, in a crowd, by cells: the same bits
                        CHECK(attend(kernels, one, false, most_rows) == results);
                        CHECK(attend(kernels, one, true, most_rows) == results);
                    }
                    CHECK(first.empty() || first == results);  // every instruction set rounds alike
                    first = results;
                }
            }
        }
    }
}

// Where one score is far above the others: the value of its cell.
void test_extreme_scores() {
    for (int round = 0; round < 40; ++round) {
        Case one = random_case(f16, f16, true);
        one.softcap = 0;
        for (const MatmulKernels& products : llmrun::available_matmul_kernels()) {
            const std::vector<float> results = attend(llmrun::attention_kernels(products), one, round % 2, 1000);
            CHECK(std::all_of(results.begin(), results.end(), [](float x) { return std::isfinite(x); }));
        }
    }
}

// What a position does not see does not matter, even where it is not a number.
void test_hidden_cells() {
    Case one = random_case(f16, f16, false);
    one.mask_stride = one.cells = 300;
    one.keys = Cells(f16, 300, one.depth, false);
    one.values = Cells(f16, 300, one.width, false);
    one.mask.assign(static_cast<size_t>(one.positions * one.mask_stride), hidden);
    for (int64_t position = 0; position < one.positions; ++position) {
        std::fill_n(one.mask.begin() + position * one.mask_stride, 140, uint16_t{0});
    }
    for (const MatmulKernels& products : llmrun::available_matmul_kernels()) {
        const AttentionKernels& kernels = llmrun::attention_kernels(products);
        const std::vector<float> before = attend(kernels, one, false, 1000);
        Case other = one;
        std::fill(other.values.bytes.begin() + 140 * other.values.stride, other.values.bytes.end(), '\x7e');
        std::fill(other.keys.bytes.begin() + 256 * other.keys.stride, other.keys.bytes.end(), '\x7e');
        CHECK(attend(kernels, other, false, 1000) == before);
        CHECK(attend(kernels, other, true, 7) == before);
    }
}

// A model that is damaged is noticed by its numbers.
void test_what_is_not_a_number_stays_so() {
    Case one = random_case(f16, f16, false);
    one.mask.clear();
    one.queries[0] = std::numeric_limits<float>::quiet_NaN();
    for (const MatmulKernels& products : llmrun::available_matmul_kernels()) {
        const std::vector<float> results = attend(llmrun::attention_kernels(products), one, false, 1000);
        CHECK(std::isnan(results[0]));
        CHECK(std::none_of(results.begin() + one.width + 1, results.end(), [](float x) { return std::isnan(x); }));
    }
}

void test_other_types_and_lengths_have_none() {
    for (const MatmulKernels& products : llmrun::available_matmul_kernels()) {
        const AttentionKernels& kernels = llmrun::attention_kernels(products);
        CHECK(kernels.of(30, 30, 64, 64) == nullptr);  // BF16
        CHECK(kernels.of(f16, f16, 40, 48) && !kernels.of(f16, f16, 36, 48) && !kernels.of(f16, f16, 40, 40));
        CHECK(kernels.of(f16, q8_0, 40, 64) && !kernels.of(f16, q8_0, 40, 48) && !kernels.of(q8_0, f16, 40, 48));
    }
}

}  // namespace

int main() {
    test_attention();
    test_extreme_scores();
    test_hidden_cells();
    test_what_is_not_a_number_stays_so();
    test_other_types_and_lengths_have_none();
    return summary();
}

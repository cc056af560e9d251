// Products of weights and activations on the processor. Knows neither ggml nor threads: ggml_kernels.cpp calls it.
//
// Beside quantized weights, the activations are quantized to 8 bits, as ggml does it, once for all rows of weights ("packed"). A
// panel of weight rows is unpacked to bytes with one scale (and minimum) a block, once for all columns, into a scratch that stays
// in the cache. A tile of rows x columns of sums is then kept in registers: integers are exact within a block; blocks are added as
// floats from the first to the last. With few columns, rows are read as they lie in memory, and the same sums are added in the same
// order (matmul_few.hpp). Beside weights of 16 bits, activations stay as they are (matmul_half.hpp).
// So an element is computed in one way, whatever else is in the batch and whoever computes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmrun {

// Columns of floats: of the activations, or of the results.
struct Columns {
    float* first;
    int64_t stride;         // floats from a column to the next one
    const int64_t* places;  // or, if not null, where each column begins, in floats from the first one

    float* at(int64_t column) const { return first + (places ? places[column] : column * stride); }
};

struct Product {
    const uint8_t* weights;
    int64_t row_bytes;
    int64_t rows;
    int64_t depth;  // elements of a row, and of a column of activations
    int64_t columns;
    const char* packed;
    Columns activations;
    Columns results;
};

// The functions for one type of weights.
struct MatmulKernel {
    int type;  // ggml's number
    int block;        // the depth is a multiple of it
    int block_bytes;  // of which the rows are made, one after the other
    int64_t (*packed_bytes)(int64_t depth, int64_t columns);
    int64_t (*scratch_bytes)(int64_t depth, int64_t columns);  // so many, or fewer
    // A record is a block of some columns. Threads may write different ones.
    int64_t (*records)(int64_t depth, int64_t columns);
    void (*pack)(const Columns& activations, int64_t depth, int64_t columns, char* packed, int64_t first, int64_t last);
    // Rows from a multiple of MatmulKernels::rows on. Threads may compute different ones.
    void (*multiply)(const Product& product, int64_t first, int64_t last, char* scratch);
};

// The functions for one instruction set.
struct MatmulKernels {
    const char* name;
    int rows;  // that are computed together
    const MatmulKernel* begin;
    const MatmulKernel* end;

    const MatmulKernel* of(int type) const;
};

// Whether this processor multiplies weights of a type by itself, twice as many at once as floats: ggml's kernels let it.
bool has_own_products(int type);

// Those that this processor can run, the best one last.
const std::vector<MatmulKernels>& available_matmul_kernels();

}  // namespace llmrun

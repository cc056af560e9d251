// Flash attention on the processor: softmax(queries x keys) x values. Knows neither ggml nor threads: ggml_attention.cpp calls it.
//
// All queries that share a head of keys and values are rows of one problem, so that these are read and converted to floats once for
// all of them. Cells are taken in chunks whose size never changes. Within a chunk, a row's scores, their maximum, their sum and the
// weighted sum of values are computed in one order; chunks are added in the order of the cells, by one formula. So the result of a
// row is the same to the bit, whatever rows are beside it, whether its chunks are added at once or computed apart (State), and on
// every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matmul.hpp"

namespace llmrun {

constexpr int cells_of_chunk = 128;

// A tensor's rows: where the first one begins, and bytes from one to the next.
struct Strided {
    const char* first;
    int64_t stride;

    const char* at(int64_t index) const { return first + index * stride; }
};

struct KeysAndValues {
    Strided keys, values;  // by cell

    KeysAndValues from(int64_t cell) const { return {{keys.at(cell), keys.stride}, {values.at(cell), values.stride}}; }
};

// The queries of the heads that share one head of keys and values. Row r is the query of position r / heads and head r % heads.
struct Attention {
    int64_t heads;
    int64_t rows;
    int64_t cells;
    int64_t depth;  // elements of a query and of a key
    int64_t width;  // elements of a value and of a result
    Strided queries;  // by position, floats
    int64_t query_head_stride;
    KeysAndValues cache;
    Strided mask;   // by position, 16-bit floats that are added to the scores; `first` may be null
    char* results;  // of position 0 and head 0, floats
    int64_t result_stride, result_head_stride;
    float scale;
    float softcap;        // 0: none
    const float* slopes;  // what the mask is multiplied by, by head
    const float* sinks;   // a score without a value, by head; may be null
};

// What is known of each row after some cells: the greatest score, the sum of the weights, and the weighted sum of the values.
struct State {
    float* greatest;
    float* sum;
    float* values;  // [row][value_floats]
};

// The functions for one type of keys and one of values.
struct AttentionKernel {
    int key_type, value_type;    // ggml's numbers
    int key_block, value_block;  // depth and width are multiples of them
    // Rows [first, last) over cells [begin, end), both in whole chunks; the state has these rows, and need not have been set.
    // `next` are the keys and values that will be read after these.
    void (*attend)(const Attention& attention, int64_t first, int64_t last, int64_t begin, int64_t end, const State& state,
                   const KeysAndValues& next, char* scratch);
};

// The functions for one instruction set. Scratch and values of a state are aligned to 64 bytes.
struct AttentionKernels {
    const AttentionKernel* begin;
    const AttentionKernel* end;
    int rows;                                // that are computed together
    int64_t (*value_floats)(int64_t width);  // of a row's state
    size_t (*scratch_bytes)(int64_t depth, int64_t width, int64_t rows);
    // Adds the state of later cells.
    void (*add)(int64_t width, int64_t rows, const State& to, const State& later);
    // Writes the results of rows [first, last), whose state this is.
    void (*finish)(const Attention& attention, int64_t first, int64_t last, const State& state);

    // Null if there is none for these types and lengths of a key and a value.
    const AttentionKernel* of(int key_type, int value_type, int64_t depth, int64_t width) const;
};

// Those for the instruction set of other kernels.
const AttentionKernels& attention_kernels(const MatmulKernels& products);

}  // namespace llmrun

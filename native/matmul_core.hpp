// The products of matmul.hpp, for the instruction set that the including file describes as `Isa`.
//
// Included once per instruction set, inside a namespace of its own, and compiled for it: nothing here may be an inline function
// that other files share, or the linker could take the wrong one.

#include "matmul_types.hpp"

constexpr int chunk = 512;       // weights of a row that are unpacked at a time
constexpr int64_t first_bytes = 16 << 10;  // that are fetched before the first rows are unpacked
constexpr int most_panels = 2;   // that are unpacked before the activations are read: these come from a farther cache

template <class T>
struct Panel {
    static constexpr int rows = Isa::lanes * Isa::vectors, blocks = chunk / 32;
    alignas(64) uint8_t bytes[blocks][8][Isa::vectors][Isa::lanes][4];
    alignas(64) float scale[blocks][T::parts][Isa::vectors][Isa::lanes];
    alignas(64) float minimum[T::minima ? blocks : 1][Isa::vectors][Isa::lanes];
};

// Room for the rows of a panel that has fewer than it could.
template <class T>
constexpr int64_t spare_bytes = int64_t{Isa::lanes} * (chunk / T::block * T::bytes);

template <class T>
constexpr int64_t tile_scratch_bytes = most_panels * int64_t{sizeof(Panel<T>)} + (spare_bytes<T> + 63) / 64 * 64;

// What is read next, in the order of the memory: rows are read side by side, which the processor does not foresee.
struct Ahead {
    const uint8_t* next;
    const uint8_t* end;

    LLMRUN_INLINE void fetch(int bytes) {
        for (const uint8_t* to = next + bytes; next < to && next < end; next += 64) {
            __builtin_prefetch(next, 0, 2);
        }
    }
};

// With instructions that multiply matrices, weights and activations are beside each other by eights, and a tile multiplies pairs of
// columns. Functions that know such an Isa have it as a parameter too, since what it has is missing in others.

template <class T, class Set = Isa>
void unpack(const uint8_t* weights, int64_t stride, int64_t rows, int depth, Panel<T>& panel, uint8_t* spare, Ahead& ahead) {
    for (int vector = 0; vector < Isa::vectors; ++vector) {
        Rows from{weights + vector * Isa::lanes * stride, stride};
        const int64_t left = rows - vector * Isa::lanes;
        if (left < Isa::lanes) {
            const int64_t bytes = depth / T::block * T::bytes;
            __builtin_memset(spare, 0, spare_bytes<T>);
            for (int64_t row = 0; row < left; ++row) {
                __builtin_memcpy(spare + row * bytes, from.first + row * stride, bytes);
            }
            from = {spare, bytes};
        }
        for (int i = 0; i < depth / T::block; ++i, from.first += T::bytes) {
            const int block = i * (T::block / 32);
            ahead.fetch(Isa::lanes * T::bytes + 63);
            T::unpack(from, {panel.bytes[block][0][vector][0], panel.scale[block][0][vector],
                             T::minima ? panel.minimum[block][vector] : nullptr});
            if constexpr (Set::has_matrices) {
                for (int j = 0; j < T::block / 32; ++j) {
                    Set::pair_steps(panel.bytes[block + j][0][vector][0]);
                }
            }
        }
    }
}

template <class T>
constexpr bool has_signed_bytes = T::maximum > 127 && !Isa::has_wide_bytes;
template <class T>
constexpr int offset_of = has_signed_bytes<T> ? 0 : T::offset;

// A column's share of a record: 32 bytes, a scale, and for each part what corrects the offset, or counts for the minimum.
template <class T>
constexpr int64_t share = 32 + 4 + 4 * T::parts;

inline int64_t tiles_of(int64_t columns) { return (columns + Isa::columns - 1) / Isa::columns; }

// Activations are rounded as ggml's kernels for few columns do it (quantize_row_q8_0(), _q8_1(), _q8_K()), so that a token has
// the same ones alone and in a prompt: in blocks as long as those of the weights; scales and sums of short blocks are halves.
template <class T>
struct Rounding {
    float factor, scale, exact;

    explicit Rounding(const float* values) {
        float most = Isa::largest(values);
        for (int i = 32; i < T::block; i += 32) {
            const float other = Isa::largest(values + i);
            most = other > most ? other : most;
        }
        factor = T::block == 32 ? factor_of(most) : most > 0 ? 127.0f / most : 0.0f;
        exact = T::block == 32 ? most / 127.0f : most > 0 ? 1.0f / factor : 0.0f;
        scale = T::block == 32 ? as_half(exact) : exact;
    }

    // What corrects the bytes' offset in each part's sum, or counts for the minimum.
    void correct(const int* sums, float* out, int64_t stride) const {
        if constexpr (T::minima) {
            out[0] = -total(sums[0] + sums[1]);
        } else {
            const int32_t starts[2] = {-offset_of<T> * (T::parts == 1 ? sums[0] + sums[1] : sums[0]), -offset_of<T> * sums[1]};
            for (int part = 0; part < T::parts; ++part) {
                __builtin_memcpy(out + part * stride, starts + part, sizeof(float));
            }
        }
    }

    float total(int sum) const { return T::block == 32 ? as_half(exact * static_cast<float>(sum)) : exact * static_cast<float>(sum); }
};

template <class T, class Set = Isa>
void pack_tiles(const Columns& from, int64_t depth, int64_t columns, char* packed, int64_t first, int64_t last) {
    const int64_t blocks = depth / T::block, tiles = tiles_of(columns);
    while (first < last) {  // the records of one tile, column by column
        const int64_t tile = first / blocks, block = first % blocks;
        const int64_t end = last - first < blocks - block ? block + last - first : blocks;
        const int64_t begin = tile * columns / tiles, count = (tile + 1) * columns / tiles - begin;
        for (int64_t column = 0; column < count; ++column) {
            const float* values = from.at(begin + column);
            char* record = packed + (begin * blocks + block * count) * (T::block / 32) * share<T>;
            for (int64_t i = block; i < end; ++i) {
                const Rounding<T> rounding(values + T::block * i);
                for (int part = 0; part < T::block; part += 32, record += count * share<T>) {
                    int sums[2];
                    if constexpr (Set::has_matrices) {
                        char bytes[32];
                        Set::quantize(values + T::block * i + part, rounding.factor, bytes, sums);
                        Set::pair_columns(bytes, record, column, count);
                    } else {
                        Isa::quantize(values + T::block * i + part, rounding.factor, record + 32 * column, sums);
                    }
                    float* scales = reinterpret_cast<float*>(record + 32 * count);
                    scales[column] = rounding.scale;
                    rounding.correct(sums, scales + count + column, count);
                }
            }
        }
        first += end - block;
    }
}

// How many products of a byte and an activation fit into a sum; 16 bits have pairs of them.
template <class T>
constexpr int steps_at_once = Isa::has_wide_sums ? 8 : has_signed_bytes<T> ? 1 : T::maximum > 31 ? 2 : T::maximum > 15 ? 4 : 8;

template <class T, int Count, class Set = Isa>
void multiply_tile(const Panel<T>& panel, const char* record, int blocks, float* const* results, int64_t rows, bool is_first) {
    constexpr int vectors = Isa::vectors, steps = 8 / T::parts;
    constexpr bool is_signed = has_signed_bytes<T>;
    constexpr int at_once = steps < steps_at_once<T> ? steps : steps_at_once<T>;
    Float sums[Count][vectors];
    float some[Isa::lanes];
    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
            const int64_t left = rows - v * Isa::lanes;
            if (is_first || left <= 0) {
                sums[c][v] = Isa::no_floats();
            } else if (left >= Isa::lanes) {
                sums[c][v] = Isa::load_floats(results[c] + v * Isa::lanes);
            } else {
                __builtin_memset(some, 0, sizeof some);
                __builtin_memcpy(some, results[c] + v * Isa::lanes, left * sizeof(float));
                sums[c][v] = Isa::load_floats(some);
            }
        }
    }
    for (int b = 0; b < blocks; ++b, record += Count * share<T>) {
        const float* scales = reinterpret_cast<const float*>(record + 32 * Count);
        LLMRUN_UNROLL for (int part = 0; part < T::parts; ++part) {
            Int dots[Count][vectors];
            LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                    dots[c][v] = offset_of<T> ? Isa::every_of(scales + (1 + part) * Count + c) : Isa::none();
                }
            }
            if constexpr (Set::has_matrices) {
                Set::template multiply_pairs<Count, steps / 2>(panel.bytes[b][0][0][0], record, part * steps / 2, dots);
            } else {
                LLMRUN_UNROLL for (int begin = part * steps; begin < (part + 1) * steps; begin += at_once) {
                    Int products[Count][vectors];
                    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                            products[c][v] = Isa::begin<is_signed>(dots[c][v]);
                        }
                    }
                    LLMRUN_UNROLL for (int step = begin; step < begin + at_once; ++step) {
                        Int weights[vectors];
                        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                            weights[v] = Isa::load(panel.bytes[b][step][v]);
                        }
                        LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                            const auto activations = Set::step_of(record + 32 * c, step);
                            LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                                products[c][v] = Isa::dot<is_signed>(products[c][v], weights[v], activations);
                            }
                        }
                    }
                    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                            dots[c][v] = Isa::end<is_signed>(dots[c][v], products[c][v]);
                        }
                    }
                }
            }
            LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                const Float scale = Isa::load_floats(panel.scale[b][part][v]);
                LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                    const Float dot = Isa::times(Isa::to_floats(dots[c][v]), scale);
                    sums[c][v] = Isa::add_product(dot, Isa::every_float_of(scales + c), sums[c][v]);
                }
            }
        }
        if constexpr (T::minima) {
            LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                const Float minimum = Isa::load_floats(panel.minimum[b][v]);
                LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                    sums[c][v] = Isa::add_product(minimum, Isa::every_float_of(scales + Count + c), sums[c][v]);
                }
            }
        }
    }
    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
            const int64_t left = rows - v * Isa::lanes;
            if (left >= Isa::lanes) {
                Isa::store_floats(results[c] + v * Isa::lanes, sums[c][v]);
            } else if (left > 0) {
                Isa::store_floats(some, sums[c][v]);
                __builtin_memcpy(results[c] + v * Isa::lanes, some, left * sizeof(float));
            }
        }
    }
}

template <class T, int Count = Isa::columns>
void multiply_tile_of(int64_t count, const Panel<T>& panel, const char* record, int blocks, float* const* results,
                      int64_t rows, bool is_first) {
    if (count == Count) {
        multiply_tile<T, Count>(panel, record, blocks, results, rows, is_first);
    } else if constexpr (Count > 1) {
        multiply_tile_of<T, Count - 1>(count, panel, record, blocks, results, rows, is_first);
    }
}

template <class T>
void multiply_tiles(const Product& product, int64_t first, int64_t last, char* scratch) {
    constexpr int rows_of_panel = Panel<T>::rows;
    Panel<T>* panels = reinterpret_cast<Panel<T>*>(scratch);
    uint8_t* spare = reinterpret_cast<uint8_t*>(scratch + most_panels * sizeof(Panel<T>));
    const int64_t blocks = product.depth / 32, tiles = tiles_of(product.columns);
    Ahead start{product.weights + first * product.row_bytes, product.weights + last * product.row_bytes};
    start.fetch(static_cast<int>(first_bytes < rows_of_panel * product.row_bytes ? first_bytes : rows_of_panel * product.row_bytes));
    for (int64_t row = first; row < last; row += most_panels * rows_of_panel) {
        const int64_t rest = last - row;
        const int n_panels = rest > (most_panels - 1) * rows_of_panel ? most_panels : static_cast<int>((rest + rows_of_panel - 1) / rows_of_panel);
        const int64_t next = row + n_panels * rows_of_panel, after = last - next < most_panels * rows_of_panel ? last : next + most_panels * rows_of_panel;
        Ahead ahead{product.weights + next * product.row_bytes, product.weights + after * product.row_bytes};
        for (int64_t begin = 0; begin < product.depth; begin += chunk) {
            const int depth = static_cast<int>(product.depth - begin < chunk ? product.depth - begin : chunk);
            for (int i = 0; i < n_panels; ++i) {
                const uint8_t* weights = product.weights + (row + i * rows_of_panel) * product.row_bytes;
                unpack<T>(weights + begin / T::block * T::bytes, product.row_bytes, rest - i * rows_of_panel, depth, panels[i], spare, ahead);
            }
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const int64_t column = tile * product.columns / tiles, count = (tile + 1) * product.columns / tiles - column;
                const char* record = product.packed + (column * blocks + begin / 32 * count) * share<T>;
                for (int i = 0; i < n_panels; ++i) {
                    float* results[Isa::columns];
                    for (int64_t c = 0; c < count; ++c) {
                        results[c] = product.results.at(column + c) + row + i * rows_of_panel;
                    }
                    multiply_tile_of<T>(count, panels[i], record, depth / 32, results, rest - i * rows_of_panel, begin == 0);
                }
            }
        }
    }
}

#include "matmul_few.hpp"
#include "matmul_half.hpp"

template <class T>
int64_t packed_bytes(int64_t depth, int64_t columns) {
    return columns <= few_columns ? columns * Line<T>::size(depth) : depth / 32 * columns * share<T>;
}

template <class T>
int64_t scratch_bytes(int64_t depth, int64_t columns) {
    const int64_t few = few_scratch_bytes<T>(depth, columns < few_columns ? columns : few_columns);
    return few < tile_scratch_bytes<T> && columns > few_columns ? tile_scratch_bytes<T> : few;
}

template <class T>
int64_t records(int64_t depth, int64_t columns) {
    return columns <= few_columns ? columns * records_of_line<T>(depth) : depth / T::block * tiles_of(columns);
}

template <class T>
void pack(const Columns& from, int64_t depth, int64_t columns, char* packed, int64_t first, int64_t last) {
    if (columns <= few_columns) {
        pack_few<T>(from, depth, packed, first, last);
    } else {
        pack_tiles<T>(from, depth, columns, packed, first, last);
    }
}

template <class T>
void multiply(const Product& product, int64_t first, int64_t last, char* scratch) {
    if (product.columns <= few_columns) {
        multiply_few<T>(product, first, last, scratch);
    } else {
        multiply_tiles<T>(product, first, last, scratch);
    }
}

template <class T>
constexpr MatmulKernel kernel_of{T::type, T::block, T::bytes, packed_bytes<T>, scratch_bytes<T>, records<T>, pack<T>, multiply<T>};

constexpr MatmulKernel kernels[] = {kernel_of<Q4_0>, kernel_of<Q4_1>, kernel_of<Q5_0>, kernel_of<Q5_1>, kernel_of<Q8_0>,
                                    kernel_of<Q4_K>, kernel_of<Q5_K>, kernel_of<Q6_K>, kernel_of<IQ4_NL>, kernel_of<IQ4_XS>,
                                    half_kernel_of<F16>, half_kernel_of<BF16>};
constexpr MatmulKernels table{Isa::name, Isa::lanes * Isa::vectors, kernels, kernels + sizeof kernels / sizeof kernels[0]};

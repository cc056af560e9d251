// The products of matmul.hpp, for the instruction set that the including file describes as `Isa`.
//
// Included once per instruction set, inside a namespace of its own, and compiled for it: nothing here may be an inline function
// that other files share, or the linker could take the wrong one.

#include "matmul_types.hpp"

constexpr int chunk = 512;       // weights of a row that are unpacked at a time
constexpr int64_t first_bytes = 16 << 10;  // that are fetched before the first rows are unpacked
constexpr int most_panels = 2;   // that are unpacked before the activations are read: these come from a farther cache

template <class T>
constexpr bool has_factors = T::block == 256;

template <class T>
struct Panel {
    static constexpr int rows = Isa::lanes * Isa::vectors, blocks = chunk / 32, scales = chunk / T::block;
    static constexpr int factors_of_scale = has_factors<T> ? 8 * T::parts : 2;  // no factors: hardly any room
    alignas(64) uint8_t bytes[blocks][8][Isa::vectors][Isa::lanes][4];
    alignas(64) float scale[scales][Isa::vectors][Isa::lanes];
    alignas(64) float minimum[T::minima ? scales : 1][Isa::vectors][Isa::lanes];
    alignas(64) int32_t factors[has_factors<T> ? scales : 1][factors_of_scale][Isa::vectors][Isa::lanes];
    alignas(64) int32_t pairs[has_factors<T> ? scales : 1][factors_of_scale / 2][Isa::vectors][Isa::lanes];
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
            const int block = i * (T::block / 32), factors = has_factors<T> ? i : 0;
            ahead.fetch(Isa::lanes * T::bytes + 63);
            T::unpack(from, {panel.bytes[block][0][vector][0], panel.scale[i][vector], panel.minimum[T::minima ? i : 0][vector],
                             panel.factors[factors][0][vector], panel.pairs[factors][0][vector]});
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

// A column's share of a record, which is a block: its bytes, a scale, and what corrects the offset, or counts for the minimum; of
// a block of 256, pairs of sums for that.
template <class T>
constexpr int64_t share = T::block + 4 + (has_factors<T> ? 16 * T::parts : 4);

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

    // What corrects the bytes' offset, or counts for the minimum, by the sums of each half of a block of 32.
    void correct(const int* sums, float* out) const {
        const int32_t sum = sums[0] + sums[1], start = -offset_of<T> * sum;
        if (T::minima) {
            *out = -as_half(exact * static_cast<float>(sum));
        } else {
            __builtin_memcpy(out, &start, sizeof start);
        }
    }
};

// The sum of a block's activations, or of those in its first part.
template <class T>
LLMRUN_INLINE int16_t first_sum(const int* sums) {
    return static_cast<int16_t>(T::parts == 1 ? sums[0] + sums[1] : sums[0]);
}

// The sums of a block's activations by pairs: of its parts, or of the block and the next one.
template <class T>
void put_sums(const int* sums, int block, char* pairs, int64_t stride) {
    const int16_t both[2] = {first_sum<T>(sums), static_cast<int16_t>(sums[1])};
    if (T::parts == 1) {
        __builtin_memcpy(pairs + block / 2 * stride + block % 2 * 2, both, 2);
    } else {
        __builtin_memcpy(pairs + block * stride, both, 4);
    }
}

template <class T, class Set = Isa>
void pack_tiles(const Columns& from, int64_t depth, int64_t columns, char* packed, int64_t first, int64_t last) {
    const int64_t blocks = depth / T::block, tiles = tiles_of(columns);
    while (first < last) {  // the records of one tile, column by column
        const int64_t tile = first / blocks, block = first % blocks;
        const int64_t end = last - first < blocks - block ? block + last - first : blocks;
        const int64_t begin = tile * columns / tiles, count = (tile + 1) * columns / tiles - begin;
        for (int64_t column = 0; column < count; ++column) {
            const float* values = from.at(begin + column);
            char* record = packed + (begin * blocks + block * count) * share<T>;
            for (int64_t i = block; i < end; ++i, record += count * share<T>) {
                const Rounding<T> rounding(values + T::block * i);
                char* scales = record + T::block * count;
                __builtin_memcpy(scales + 4 * column, &rounding.scale, sizeof rounding.scale);
                for (int part = 0; part < T::block / 32; ++part) {
                    int sums[2];
                    char* bytes = record + 32 * part * count;
                    if constexpr (Set::has_matrices) {
                        char some[32];
                        Set::quantize(values + T::block * i + 32 * part, rounding.factor, some, sums);
                        Set::pair_columns(some, bytes, column, count);
                    } else {
                        Isa::quantize(values + T::block * i + 32 * part, rounding.factor, bytes + 32 * column, sums);
                    }
                    char* corrections = scales + 4 * count;
                    if constexpr (has_factors<T>) {
                        put_sums<T>(sums, part, corrections + 4 * column, 4 * count);
                    } else {
                        rounding.correct(sums, reinterpret_cast<float*>(corrections) + column);
                    }
                }
            }
        }
        first += end - block;
    }
}

// How many products of a byte and an activation fit into a sum; 16 bits have pairs of them.
template <class T>
constexpr int steps_at_once = Isa::has_wide_sums ? 8 : has_signed_bytes<T> ? 1 : T::maximum > 31 ? 2 : T::maximum > 15 ? 4 : 8;

// Where a tile's sums are, of so many rows.
template <int Count>
struct Sums {
    float* const* results;
    int64_t rows;
    bool are_none;

    LLMRUN_INLINE Float read(int c, int v) const {
        const int64_t left = rows - v * Isa::lanes;
        if (are_none || left <= 0) {
            return Isa::no_floats();
        }
        if (left >= Isa::lanes) {
            return Isa::load_floats(results[c] + v * Isa::lanes);
        }
        float some[Isa::lanes] = {};
        __builtin_memcpy(some, results[c] + v * Isa::lanes, left * sizeof(float));
        return Isa::load_floats(some);
    }

    LLMRUN_INLINE void write(int c, int v, Float sum) const {
        const int64_t left = rows - v * Isa::lanes;
        if (left >= Isa::lanes) {
            Isa::store_floats(results[c] + v * Isa::lanes, sum);
        } else if (left > 0) {
            float some[Isa::lanes];
            Isa::store_floats(some, sum);
            __builtin_memcpy(results[c] + v * Isa::lanes, some, left * sizeof(float));
        }
    }
};

// Calls end(column, vector, products) with what a block's weights have with each column's activations, from `first` on.
template <class T, int Count, class Set, class Begin, class End>
LLMRUN_INLINE void multiply_steps(const Panel<T>& panel, int b, const char* record, int first, Begin begin, End end) {
    constexpr int vectors = Isa::vectors, steps = 8 / T::parts;
    constexpr bool is_signed = has_signed_bytes<T>;
    constexpr int at_once = steps < steps_at_once<T> ? steps : steps_at_once<T>;
    LLMRUN_UNROLL for (int from = first; from < first + steps; from += at_once) {
        Int products[Count][vectors];
        LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
            LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                products[c][v] = begin(c, v);
            }
        }
        LLMRUN_UNROLL for (int step = from; step < from + at_once; ++step) {
            Int weights[vectors];
            LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                weights[v] = Isa::load(panel.bytes[b][step][v]);
            }
            LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                const auto activations = Set::step_of(record + 32 * c, step);
                LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                    products[c][v] = Isa::template dot<is_signed>(products[c][v], weights[v], activations);
                }
            }
        }
        LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
            LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                end(c, v, products[c][v]);
            }
        }
    }
}

template <class T, int Count, class Set = Isa>
void multiply_tile(const Panel<T>& panel, const char* record, int blocks, const Sums<Count>& results) {
    constexpr int vectors = Isa::vectors;
    Float sums[Count][vectors];
    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
            sums[c][v] = results.read(c, v);
        }
    }
    for (int b = 0; b < blocks; ++b, record += Count * share<T>) {
        const float* scales = reinterpret_cast<const float*>(record + 32 * Count);
        Int dots[Count][vectors];
        LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
            LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                dots[c][v] = offset_of<T> ? Isa::every_of(scales + Count + c) : Isa::none();
            }
        }
        if constexpr (Set::has_matrices) {
            Set::template multiply_pairs<Count, 4>(panel.bytes[b][0][0][0], record, 0, dots);
        } else {
            multiply_steps<T, Count, Set>(
                panel, b, record, 0, [&](int c, int v) { return Isa::begin(dots[c][v]); },
                [&](int c, int v, Int products) { dots[c][v] = Isa::end(dots[c][v], products); });
        }
        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
            const Float scale = Isa::load_floats(panel.scale[b][v]);
            LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                const Float dot = Isa::times(Isa::to_floats(dots[c][v]), scale);
                sums[c][v] = Isa::add_product(dot, Isa::every_float_of(scales + c), sums[c][v]);
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
            results.write(c, v, sums[c][v]);
        }
    }
}

// What a block of 256 has in an element's sum: whole numbers, then its scale (and minimum), then the activations' scale.
template <class T>
LLMRUN_INLINE Float add_superblock(Float sum, Int whole, Float scale, Int shares, Float minimum, Float activations) {
    Float value = Isa::times(Isa::to_floats(whole), scale);
    if (T::minima) {
        value = Isa::add_product(Isa::to_floats(shares), minimum, value);
    }
    return Isa::add_product(value, activations, sum);
}

// Takes the bytes' offset off a block's sum.
template <class T>
LLMRUN_INLINE Int without_offset(Int whole, Int pairs) {
    static_assert(offset_of<T> == 0 || offset_of<T> == 32 || offset_of<T> == 128);
    return Isa::less(whole, Isa::template left<offset_of<T> == 32 ? 5 : 7>(pairs));
}

template <class T, int Count, class Set = Isa>
void multiply_supertile(const Panel<T>& panel, const char* record, int blocks, const Sums<Count>& results) {
    constexpr int vectors = Isa::vectors, steps = 8 / T::parts;
    for (int i = 0; i < blocks / 8; ++i, record += Count * share<T>) {
        Int whole[Count][vectors], pairs[Count][vectors];
        LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
            LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                whole[c][v] = Isa::none();
            }
        }
        for (int block = 0; block < 8; ++block) {
            const char* bytes = record + 32 * Count * block;
            LLMRUN_UNROLL for (int part = 0; part < T::parts; ++part) {
                Int factors[vectors];
                LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                    factors[v] = Isa::load(panel.factors[i][T::parts * block + part][v]);
                }
                if constexpr (Set::has_matrices) {
                    Int dots[Count][vectors];
                    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                        dots[c][0] = Isa::none();
                    }
                    Set::template multiply_pairs<Count, steps / 2>(panel.bytes[8 * i + block][0][0][0], bytes, part * steps / 2, dots);
                    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                        whole[c][0] = Isa::end_with(whole[c][0], dots[c][0], factors[0]);
                    }
                } else {
                    multiply_steps<T, Count, Set>(
                        panel, 8 * i + block, bytes, part * steps, [](int, int) { return Isa::none(); },
                        [&](int c, int v, Int products) { whole[c][v] = Isa::end_with(whole[c][v], products, factors[v]); });
                }
            }
        }
        const char* scales = record + 256 * Count;
        if constexpr (T::minima || offset_of<T>) {
            LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                    pairs[c][v] = Isa::none();
                }
            }
            LLMRUN_UNROLL for (int pair = 0; pair < 4 * T::parts; ++pair) {
                LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                    const Int sums = Isa::every_of(scales + 4 * Count * (1 + pair) + 4 * c);
                    LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
                        pairs[c][v] = Isa::add_pairs(pairs[c][v], Isa::load(panel.pairs[i][pair][v]), sums);
                    }
                }
            }
        }
        const Sums<Count> before{results.results, results.rows, results.are_none && i == 0};
        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
            const Float scale = Isa::load_floats(panel.scale[i][v]), minimum = Isa::load_floats(panel.minimum[T::minima ? i : 0][v]);
            LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                if constexpr (!T::minima && offset_of<T>) {
                    whole[c][v] = without_offset<T>(whole[c][v], pairs[c][v]);
                }
                const Float activations = Isa::every_float_of(reinterpret_cast<const float*>(scales) + c);
                results.write(c, v, add_superblock<T>(before.read(c, v), whole[c][v], scale, pairs[c][v], minimum, activations));
            }
        }
    }
}

template <class T, int Count = Isa::columns>
void multiply_tile_of(int64_t count, const Panel<T>& panel, const char* record, int blocks, float* const* results,
                      int64_t rows, bool is_first) {
    if (count == Count) {
        const Sums<Count> sums{results, rows, is_first};
        if constexpr (has_factors<T>) {
            multiply_supertile<T, Count>(panel, record, blocks, sums);
        } else {
            multiply_tile<T, Count>(panel, record, blocks, sums);
        }
    } else if constexpr (Count > 1) {
        multiply_tile_of<T, Count - 1>(count, panel, record, blocks, results, rows, is_first);
    }
}

template <class T>
void multiply_tiles(const Product& product, int64_t first, int64_t last, char* scratch) {
    constexpr int rows_of_panel = Panel<T>::rows;
    Panel<T>* panels = reinterpret_cast<Panel<T>*>(scratch);
    uint8_t* spare = reinterpret_cast<uint8_t*>(scratch + most_panels * sizeof(Panel<T>));
    const int64_t blocks = product.depth / T::block, tiles = tiles_of(product.columns);
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
                const char* record = product.packed + (column * blocks + begin / T::block * count) * share<T>;
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
    return columns <= few_columns ? columns * Line<T>::size(depth) : depth / T::block * columns * share<T>;
}

template <class T>
int64_t scratch_bytes(int64_t depth, int64_t columns) {
    const int64_t few = few_scratch_bytes<T>(depth, columns < few_columns ? columns : few_columns);
    return few < tile_scratch_bytes<T> && columns > few_columns ? tile_scratch_bytes<T> : few;
}

template <class T>
int64_t records(int64_t depth, int64_t columns) {
    return columns <= few_columns ? columns * Line<T>::blocks_of(depth) : depth / T::block * tiles_of(columns);
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
        multiply_few_of<T>(product, first, last, scratch);
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

// Products of weights of 16 bits with activations as they are: both become floats where they are read, in the order of the memory.
//
// A sum is kept in 16 parts, one for each number of 16 that follow one another. They are added up, always in the same order, after
// each `half_chunk` of the depth: an element is the same among few and among many.

constexpr int half_parts = 16 / Isa::lanes;  // vectors of a sum
constexpr int half_rows = 4 / half_parts, half_columns = 6 / half_parts;  // of a tile of sums in registers
constexpr int64_t half_few = half_columns < 4 ? half_columns : 4;  // columns for which one row is read after the other
constexpr int64_t half_near = 8192;   // of few columns, the first cache holds so many
constexpr int64_t half_chunk = 1024;  // of a tile's rows and columns, the first cache holds so many
constexpr int64_t half_group = 128;   // rows for which the columns are read once

struct F16 {
    static constexpr int type = 1;
    LLMRUN_INLINE static Float load(const uint16_t* p) { return Isa::halves(p); }
};

struct BF16 {
    static constexpr int type = 30;
    LLMRUN_INLINE static Float load(const uint16_t* p) { return Isa::upper_halves(p); }
};

struct HalfTile {
    const uint16_t* rows[half_rows];
    const float* columns[half_columns];
    float* results[half_columns];
    int64_t depth;
    bool is_first;  // part of the depth: results are written, not added to
    int64_t ahead;  // bytes from what is read to what is fetched meanwhile, if not 0
};

template <class T, int Rows, int Count>
void multiply_half_tile(const HalfTile& tile, int64_t first, int64_t rows) {
    Float sums[Count][half_rows][half_parts];
    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
        LLMRUN_UNROLL for (int r = 0; r < half_rows; ++r) {
            LLMRUN_UNROLL for (int part = 0; part < half_parts; ++part) {
                sums[c][r][part] = Isa::no_floats();
            }
        }
    }
    for (int64_t i = 0; i < tile.depth; i += 16) {
        if (Rows == 1 || (tile.ahead && i % 32 == 0)) {
            LLMRUN_UNROLL for (int r = 0; r < Rows; ++r) {
                __builtin_prefetch(reinterpret_cast<const char*>(tile.rows[r] + i) + tile.ahead, 0, 2);
            }
        }
        LLMRUN_UNROLL for (int part = 0; part < half_parts; ++part) {
            const int64_t at = i + part * Isa::lanes;
            Float weights[Rows];
            LLMRUN_UNROLL for (int r = 0; r < Rows; ++r) {
                weights[r] = T::load(tile.rows[r] + at);
            }
            LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
                Float activations = Isa::load_floats(tile.columns[c] + at);
                Isa::keep(activations);  // loaded once, not for each product
                LLMRUN_UNROLL for (int r = 0; r < Rows; ++r) {
                    sums[c][r][part] = Isa::add_product(weights[r], activations, sums[c][r][part]);
                }
            }
        }
    }
    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
        float totals[4];
        Isa::add_up(sums[c], totals);
        float* results = tile.results[c] + first;
        for (int r = 0; r < Rows && first + r < rows; ++r) {
            results[r] = tile.is_first ? totals[r] : results[r] + totals[r];
        }
    }
}

template <class T, int Rows, int Count = Rows == 1 ? half_few : half_columns>
void multiply_half_tile_of(int64_t count, const HalfTile& tile, int64_t first, int64_t rows) {
    if (count == Count) {
        multiply_half_tile<T, Rows, Count>(tile, first, rows);
    } else if constexpr (Count > 1) {
        multiply_half_tile_of<T, Rows, Count - 1>(count, tile, first, rows);
    }
}

// A part of the depth of some rows.
template <class T, int Rows>
void multiply_half_rows(const Product& product, int64_t row, int64_t rows, int64_t begin, HalfTile& tile) {
    const int64_t tiles = (product.columns + half_columns - 1) / half_columns;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t column = i * product.columns / tiles, count = (i + 1) * product.columns / tiles - column;
        for (int64_t c = 0; c < count; ++c) {
            tile.columns[c] = product.activations.at(column + c) + begin;
            tile.results[c] = product.results.at(column + c) + row;
        }
        for (int64_t first = 0; first < rows; first += Rows) {
            for (int64_t r = 0; r < Rows; ++r) {  // the last row again if there are fewer
                const int64_t place = row + (first + r < rows ? first + r : rows - 1);
                tile.rows[r] = reinterpret_cast<const uint16_t*>(product.weights + place * product.row_bytes) + begin;
            }
            multiply_half_tile_of<T, Rows>(count, tile, first, rows);
        }
        tile.ahead = 0;  // is on its way
    }
}

template <class T, int Rows>
void multiply_half_groups(const Product& product, int64_t first, int64_t last) {
    constexpr int64_t most = Rows == 1 ? 1 : half_group;
    for (int64_t row = first; row < last; row += most) {
        const int64_t rows = last - row < most ? last - row : most;
        for (int64_t begin = 0; begin < product.depth; begin += half_chunk) {
            HalfTile tile{};
            tile.depth = product.depth - begin < half_chunk ? product.depth - begin : half_chunk;
            tile.is_first = begin == 0;
            const int64_t next = begin + half_chunk < product.depth ? 2 * half_chunk : rows * product.row_bytes - 2 * begin;
            tile.ahead = Rows == 1 ? bytes_ahead : next;
            multiply_half_rows<T, Rows>(product, row, rows, begin, tile);
        }
    }
}

template <class T>
void multiply_halves(const Product& product, int64_t first, int64_t last, char*) {
    if (product.columns <= half_few && product.columns * product.depth <= half_near) {
        multiply_half_groups<T, 1>(product, first, last);
    } else {
        multiply_half_groups<T, half_rows>(product, first, last);
    }
}

inline int64_t no_bytes(int64_t, int64_t) { return 0; }

inline void pack_nothing(const Columns&, int64_t, int64_t, char*, int64_t, int64_t) {}

template <class T>
constexpr MatmulKernel half_kernel_of{T::type, 16, 32, no_bytes, no_bytes, no_bytes, pack_nothing, multiply_halves<T>};

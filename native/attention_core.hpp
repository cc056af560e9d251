// The attention of attention.hpp, for the instruction set that the including file describes as `Isa`.
//
// Included once per instruction set, inside a namespace of its own, and compiled for it: nothing here may be an inline
// function that other files share, or the linker could take the wrong one.

using Int = Isa::Int;
using Float = Isa::Float;

constexpr int chunk = cells_of_chunk;
constexpr int panel = Isa::vectors * Isa::lanes;  // cells of keys, or elements of values, that are computed together
constexpr int wide = 16;                          // sums of a row's weights, on every instruction set
constexpr uint16_t hidden = 0xfc00;               // minus infinity in 16 bits
constexpr float log2_of_e = 1.44269504088896f;    // scores are multiplied by it, for powers of two
constexpr float infinity = __builtin_inff();

LLMRUN_INLINE constexpr int64_t rounded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
LLMRUN_INLINE int least(int64_t a, int b) { return a < b ? static_cast<int>(a) : b; }

// The types of keys and values, read as columns (the same element of Isa::lanes cells) or as rows (Isa::lanes elements of a cell).

struct F16 {
    static constexpr int type = 1, block = 8, step = 8, bytes = 16;

    LLMRUN_INLINE static void columns(const char* cells, int64_t stride, int element, Float* out) {
        Int x[4];
        Isa::transpose(reinterpret_cast<const uint8_t*>(cells) + 2 * element, stride, x);
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            out[2 * i] = Isa::half(x[i]);
            out[2 * i + 1] = Isa::half(Isa::template right<16>(x[i]));
        }
    }
    LLMRUN_INLINE static Float row(const char* cell, int element) {
        return Isa::halves(reinterpret_cast<const uint16_t*>(cell) + element);
    }
};

struct Q8_0 {
    static constexpr int type = 8, block = 32, step = 16, bytes = 34;

    LLMRUN_INLINE static void columns(const char* cells, int64_t stride, int element, Float* out) {
        const char* from = cells + element / block * bytes;
        uint16_t scales[Isa::lanes];
        for (int lane = 0; lane < Isa::lanes; ++lane) {
            __builtin_memcpy(scales + lane, from + lane * stride, 2);
        }
        const Float scale = Isa::halves(scales);
        Int x[4];
        Isa::transpose(reinterpret_cast<const uint8_t*>(from) + 2 + element % block, stride, x);
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            signed_bytes_to_floats<Isa>(x[i], out + 4 * i);
        }
        LLMRUN_UNROLL for (int i = 0; i < step; ++i) {
            out[i] = Isa::times(out[i], scale);
        }
    }
    LLMRUN_INLINE static Float row(const char* cell, int element) {
        const char* from = cell + element / block * bytes;
        uint16_t scale;
        __builtin_memcpy(&scale, from, 2);
        return Isa::times(Isa::signed_bytes(from + 2 + element % block), Isa::every_half(scale));
    }
};

// 2^x for an x of at most 126; below -125 it is 0. The factors have the least greatest relative error, 2e-9; 2^0 is 1.
LLMRUN_INLINE Float power(Float x) {
    constexpr float factors[] = {0.0013398875016719103f, 0.00961843691766262f, 0.055503323674201965f,
                                 0.24022647738456726f,   0.6931471824645996f,  1.0f};
    const Float whole = Isa::nearest(x), rest = Isa::minus(x, whole);
    Float sum = Isa::every_float(0.00015353361959569156f);
    LLMRUN_UNROLL for (int i = 0; i < 6; ++i) {
        sum = Isa::add_product(sum, rest, Isa::every_float(factors[i]));
    }
    return Isa::scaled(sum, whole, x, -125.0f);
}

// The part of a chunk's cells that a position sees, and whether the mask has more than 0 there.
struct Seen {
    int begin, end;
    bool has_biases;
};

inline Seen seen(const Attention& attention, int64_t position, int64_t cell, int count) {
    Seen found{0, count, false};
    if (attention.mask.first) {
        const uint16_t* mask = reinterpret_cast<const uint16_t*>(attention.mask.at(position)) + cell;
        while (found.begin < count && mask[found.begin] == hidden) {
            ++found.begin;
        }
        while (found.end > found.begin && mask[found.end - 1] == hidden) {
            --found.end;
        }
        uint16_t bits = 0;
        for (int i = found.begin; i < found.end; ++i) {
            bits |= mask[i];
        }
        found.has_biases = bits != 0;
    }
    return found;
}

inline Seen together(const Seen* some, int64_t count) {
    Seen all{chunk, 0, false};
    for (int64_t i = 0; i < count; ++i) {
        if (some[i].begin < some[i].end) {
            all = {all.begin < some[i].begin ? all.begin : some[i].begin, all.end > some[i].end ? all.end : some[i].end, false};
        }
    }
    return all;
}

inline int64_t value_floats(int64_t width) { return rounded(width, panel); }

struct Scratch {
    float* queries;  // [tile][element][row of the tile]
    float* keys;     // [panel][element][cell of the panel]
    float* values;   // [panel][cell][element of the panel]
    float* scores;   // [row of a tile][cell]
    float* biases;   // [cell]
    char* spare;     // keys of Isa::lanes cells
    Seen* positions;

    Scratch(char* memory, int64_t depth, int64_t width, int64_t rows) : memory_(memory) {
        take(keys, chunk * depth);
        take(values, chunk * value_floats(width));
        take(scores, Isa::rows * chunk);
        take(biases, chunk);
        take(queries, rows * depth);
        take(spare, Isa::lanes * depth * 2);
        take(positions, rows + 1);
    }

    static size_t bytes(int64_t depth, int64_t width, int64_t rows) {
        return static_cast<size_t>(Scratch(nullptr, depth, width, rows).taken_);
    }

private:
    template <class T>
    void take(T*& part, int64_t count) {
        part = memory_ ? reinterpret_cast<T*>(memory_ + taken_) : nullptr;
        taken_ += rounded(count * static_cast<int64_t>(sizeof(T)), 64);
    }

    char* memory_;
    int64_t taken_ = 0;
};

// Scores are exponents of two, or what a cap makes of these: the scale of the queries sees to it.
inline void pack_queries(const Attention& attention, int64_t first, int64_t last, float* to) {
    const float cap = attention.softcap;
    const float scale = (cap != 0 ? attention.scale / cap * 2 : attention.scale) * log2_of_e;
    for (int64_t row = first; row < last; row += Isa::rows) {
        const int count = least(last - row, Isa::rows);
        for (int i = 0; i < count; ++i) {
            const int64_t position = (row + i) / attention.heads, head = (row + i) % attention.heads;
            const float* query = reinterpret_cast<const float*>(attention.queries.at(position) + head * attention.query_head_stride);
            for (int64_t element = 0; element < attention.depth; ++element) {
                to[element * count + i] = query[element] * scale;
            }
        }
        to += count * attention.depth;
    }
}

// Cells of a head are often some kilobytes apart, which processors don't foresee.
LLMRUN_INLINE void fetch(const Strided& cells, int begin, int end, int64_t bytes) {
    for (int cell = begin; cell < end; ++cell) {
        for (int64_t at = 0; at < bytes; at += 64) {
            __builtin_prefetch(cells.at(cell) + at, 0, 2);
        }
    }
}

template <class T>
void unpack_keys(const Strided& keys, const Strided& next, int64_t depth, const Seen& cells, int count, const Scratch& scratch) {
    const int64_t bytes = depth / T::block * T::bytes;
    for (int cell = cells.begin / panel * panel; cell < rounded(cells.end, wide); cell += Isa::lanes) {
        fetch(next, cell, cell + Isa::lanes, bytes);
        Strided from{keys.at(cell), keys.stride};
        if (count - cell < Isa::lanes) {  // zeros behind the last one
            __builtin_memset(scratch.spare, 0, static_cast<size_t>(Isa::lanes * bytes));
            for (int i = 0; i < count - cell; ++i) {
                __builtin_memcpy(scratch.spare + i * bytes, from.at(i), static_cast<size_t>(bytes));
            }
            from = {scratch.spare, bytes};
        }
        float* to = scratch.keys + cell / panel * panel * depth + cell % panel;
        for (int element = 0; element < depth; element += T::step) {
            Float columns[T::step];
            T::columns(from.first, from.stride, element, columns);
            LLMRUN_UNROLL for (int i = 0; i < T::step; ++i) {
                Isa::store_floats(to + (element + i) * panel, columns[i]);
            }
        }
    }
}

template <class T>
void unpack_values(const Strided& values, const Strided& next, int64_t width, const Seen& cells, float* to) {
    for (int cell = cells.begin; cell < cells.end; ++cell) {
        fetch(next, cell, cell + 1, width / T::block * T::bytes);
        for (int element = 0; element < value_floats(width); element += Isa::lanes) {
            float* out = to + element / panel * panel * chunk + cell * panel + element % panel;
            Isa::store_floats(out, element < width ? T::row(values.at(cell), element) : Isa::no_floats());
        }
    }
}

// The scores of a tile's rows with the cells of a panel.
template <int Count>
LLMRUN_INLINE void score(const float* queries, const float* keys, int64_t depth, float* to) {
    Float sums[Count][Isa::vectors];
    LLMRUN_UNROLL for (int row = 0; row < Count; ++row) {
        LLMRUN_UNROLL for (int v = 0; v < Isa::vectors; ++v) {
            sums[row][v] = Isa::no_floats();
        }
    }
    for (int64_t element = 0; element < depth; ++element, keys += panel, queries += Count) {
        Float key[Isa::vectors];
        LLMRUN_UNROLL for (int v = 0; v < Isa::vectors; ++v) {
            key[v] = Isa::load_floats(keys + v * Isa::lanes);
        }
        LLMRUN_UNROLL for (int row = 0; row < Count; ++row) {
            const Float query = Isa::every_float_of(queries + row);
            LLMRUN_UNROLL for (int v = 0; v < Isa::vectors; ++v) {
                sums[row][v] = Isa::add_product(query, key[v], sums[row][v]);
            }
        }
    }
    LLMRUN_UNROLL for (int row = 0; row < Count; ++row) {
        LLMRUN_UNROLL for (int v = 0; v < Isa::vectors; ++v) {
            Isa::store_floats(to + row * chunk + v * Isa::lanes, sums[row][v]);
        }
    }
}

// Adds the weighted values of a chunk to a panel of those before, both multiplied by a factor of the row.
template <int Count>
LLMRUN_INLINE void add_values(const float* weights, const float* values, const Seen& cells, const float* old_factors,
                              const float* factors, float* to, int64_t stride) {
    Float sums[Count][Isa::vectors];
    LLMRUN_UNROLL for (int row = 0; row < Count; ++row) {
        LLMRUN_UNROLL for (int v = 0; v < Isa::vectors; ++v) {
            sums[row][v] = Isa::no_floats();
        }
    }
    for (int cell = cells.begin; cell < cells.end; ++cell) {
        Float value[Isa::vectors];
        LLMRUN_UNROLL for (int v = 0; v < Isa::vectors; ++v) {
            value[v] = Isa::load_floats(values + cell * panel + v * Isa::lanes);
        }
        LLMRUN_UNROLL for (int row = 0; row < Count; ++row) {
            const Float weight = Isa::every_float_of(weights + row * chunk + cell);
            LLMRUN_UNROLL for (int v = 0; v < Isa::vectors; ++v) {
                sums[row][v] = Isa::add_product(weight, value[v], sums[row][v]);
            }
        }
    }
    LLMRUN_UNROLL for (int row = 0; row < Count; ++row) {
        const Float old_factor = Isa::every_float_of(old_factors + row), factor = Isa::every_float_of(factors + row);
        LLMRUN_UNROLL for (int v = 0; v < Isa::vectors; ++v) {
            float* place = to + row * stride + v * Isa::lanes;
            Isa::store_floats(place, Isa::add_product(sums[row][v], factor, Isa::times(Isa::load_floats(place), old_factor)));
        }
    }
}

// Makes weights of a row's scores, in cells from a multiple of `wide` on; stores their greatest score and their sum.
LLMRUN_INLINE void weigh(float* scores, int begin, int end, const float* biases, float slope, float softcap, float* greatest, float* sum) {
    constexpr int vectors = wide / Isa::lanes;
    const Float cap = Isa::every_float(softcap * log2_of_e), factor = Isa::every_float(slope * log2_of_e);
    Float most = Isa::every_float(-infinity);
    for (int cell = begin; cell < end; cell += Isa::lanes) {
        Float score = Isa::load_floats(scores + cell);
        if (softcap != 0) {  // cap * tanh(x) = cap - 2 * cap / (e^2x + 1)
            const Float exponential = power(Isa::lesser(Isa::every_float(126.0f), score));
            const Float quotient = Isa::over(Isa::plus(cap, cap), Isa::plus(exponential, Isa::every_float(1.0f)));
            score = Isa::minus(cap, quotient);
        }
        if (biases) {
            score = Isa::add_product(Isa::load_floats(biases + cell), factor, score);
        }
        Isa::store_floats(scores + cell, score);
        most = Isa::greater(most, score);
    }
    *greatest = Isa::greatest(most);
    const Float base = Isa::every_float(*greatest == -infinity ? 0.0f : *greatest);
    Float sums[vectors];
    LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
        sums[v] = Isa::no_floats();
    }
    for (int cell = begin; cell < end; cell += wide) {
        LLMRUN_UNROLL for (int v = 0; v < vectors; ++v) {
            float* place = scores + cell + v * Isa::lanes;
            const Float weight = power(Isa::minus(Isa::load_floats(place), base));
            Isa::store_floats(place, weight);
            sums[v] = Isa::plus(sums[v], weight);
        }
    }
    *sum = Isa::sum(sums);
}

// Adds sums of weights that are relative to different greatest scores; returns by what each side's values have to be multiplied.
// At most `wide` rows.
struct Factors {
    alignas(64) float old_factors[wide], factors[wide];

    LLMRUN_INLINE Factors(int count, float* greatest, float* sum, const float* later_greatest, const float* later_sum) {
        alignas(64) float copies[4][wide] = {};
        const auto bytes = static_cast<size_t>(count) * sizeof(float);
        __builtin_memcpy(copies[0], greatest, bytes);
        __builtin_memcpy(copies[1], sum, bytes);
        __builtin_memcpy(copies[2], later_greatest, bytes);
        __builtin_memcpy(copies[3], later_sum, bytes);
        for (int i = 0; i < count; i += Isa::lanes) {
            const Float a = Isa::load_floats(copies[0] + i), b = Isa::load_floats(copies[2] + i);
            const Float most = Isa::greater(a, b), base = Isa::zero_if(most, -infinity);
            const Float x = power(Isa::minus(a, base)), y = power(Isa::minus(b, base));
            const Float both = Isa::add_product(Isa::load_floats(copies[3] + i), y, Isa::times(Isa::load_floats(copies[1] + i), x));
            Isa::store_floats(copies[0] + i, most);
            Isa::store_floats(copies[1] + i, both);
            Isa::store_floats(old_factors + i, x);
            Isa::store_floats(factors + i, y);
        }
        __builtin_memcpy(greatest, copies[0], bytes);
        __builtin_memcpy(sum, copies[1], bytes);
    }
};

// The mask of a position as floats, minus infinity behind the last cell.
inline void unpack_mask(const Attention& attention, int64_t position, int64_t cell, int begin, int end, int count, float* to) {
    for (int i = begin; i < end; i += Isa::lanes) {
        uint16_t halves[Isa::lanes];
        for (int lane = 0; lane < Isa::lanes; ++lane) {
            halves[lane] = i + lane < count ? 0 : hidden;
        }
        if (attention.mask.first && i < count) {
            const char* mask = attention.mask.at(position) + 2 * (cell + i);
            __builtin_memcpy(halves, mask, 2 * static_cast<size_t>(least(count - i, Isa::lanes)));
        }
        Isa::store_floats(to + i, Isa::halves(halves));
    }
}

// A tile of rows and a chunk of cells. `positions` begins with the first row's.
template <int Count>
void attend_tile(const Attention& attention, int64_t row, const float* queries, const Seen* positions, int64_t cell, int count,
                 const State& state, const Scratch& scratch) {
    const int64_t first = row / attention.heads;
    const Seen cells = together(positions, (row + Count - 1) / attention.heads - first + 1);
    if (cells.begin >= cells.end) {
        return;
    }
    const int begin = cells.begin / panel * panel, end = static_cast<int>(rounded(cells.end, wide));
    for (int at = begin; at < end; at += panel) {
        score<Count>(queries, scratch.keys + at * attention.depth, attention.depth, scratch.scores + at);
    }
    float greatest[Count], sum[Count];
    int64_t unpacked = -1;
    for (int i = 0; i < Count; ++i) {
        const int64_t position = (row + i) / attention.heads, head = (row + i) % attention.heads;
        const Seen& own = positions[position - first];
        const bool has_biases = own.has_biases || own.begin > begin || own.end < end;
        if (has_biases && position != unpacked) {
            unpack_mask(attention, position, cell, begin, end, count, scratch.biases);
            unpacked = position;
        }
        weigh(scratch.scores + i * chunk, begin, end, has_biases ? scratch.biases : nullptr, attention.slopes[head],
              attention.softcap, greatest + i, sum + i);
    }
    const Factors factors(Count, state.greatest, state.sum, greatest, sum);
    const int64_t stride = value_floats(attention.width);
    for (int64_t element = 0; element < stride; element += panel) {
        add_values<Count>(scratch.scores, scratch.values + element * chunk, cells, factors.old_factors, factors.factors,
                          state.values + element, stride);
    }
}

template <int Count = Isa::rows, class... Arguments>
LLMRUN_INLINE void attend_tile_of(int count, const Arguments&... arguments) {
    if (count == Count) {
        attend_tile<Count>(arguments...);
    } else if constexpr (Count > 1) {
        attend_tile_of<Count - 1>(count, arguments...);
    }
}

template <class Key, class Value>
void attend(const Attention& attention, int64_t first, int64_t last, int64_t begin, int64_t end, const State& state,
            const KeysAndValues& next, char* memory) {
    const Scratch scratch(memory, attention.depth, attention.width, last - first);
    const int64_t stride = value_floats(attention.width), position = first / attention.heads;
    const int64_t n_positions = (last - 1) / attention.heads - position + 1;
    for (int64_t row = 0; row < last - first; ++row) {
        state.greatest[row] = -infinity;
        state.sum[row] = 0;
    }
    __builtin_memset(state.values, 0, static_cast<size_t>((last - first) * stride) * sizeof(float));
    pack_queries(attention, first, last, scratch.queries);
    for (int64_t cell = begin; cell < end; cell += chunk) {
        const int count = least(end - cell, chunk);
        for (int64_t i = 0; i < n_positions; ++i) {
            scratch.positions[i] = seen(attention, position + i, cell, count);
        }
        const Seen all = together(scratch.positions, n_positions);
        if (all.begin >= all.end) {
            continue;
        }
        const KeysAndValues own = attention.cache.from(cell), later = end - cell > chunk ? attention.cache.from(cell + chunk) : next;
        unpack_keys<Key>(own.keys, later.keys, attention.depth, all, count, scratch);
        unpack_values<Value>(own.values, later.values, attention.width, all, scratch.values);
        for (int64_t row = first; row < last; row += Isa::rows) {
            const State rows{state.greatest + (row - first), state.sum + (row - first), state.values + (row - first) * stride};
            attend_tile_of(least(last - row, Isa::rows), attention, row, scratch.queries + (row - first) * attention.depth,
                           scratch.positions + (row / attention.heads - position), cell, count, rows, scratch);
        }
    }
}

inline void add(int64_t width, int64_t rows, const State& to, const State& later) {
    const int64_t stride = value_floats(width);
    for (int64_t first = 0; first < rows; first += wide) {
        const int count = least(rows - first, wide);
        const Factors factors(count, to.greatest + first, to.sum + first, later.greatest + first, later.sum + first);
        for (int i = 0; i < count; ++i) {
            const Float old_factor = Isa::every_float(factors.old_factors[i]), factor = Isa::every_float(factors.factors[i]);
            for (int64_t element = (first + i) * stride; element < (first + i + 1) * stride; element += Isa::lanes) {
                const Float old = Isa::times(Isa::load_floats(to.values + element), old_factor);
                Isa::store_floats(to.values + element, Isa::add_product(Isa::load_floats(later.values + element), factor, old));
            }
        }
    }
}

inline void finish(const Attention& attention, int64_t first, int64_t last, const State& state) {
    const int64_t stride = value_floats(attention.width);
    for (int64_t row = first; row < last; ++row) {
        const int64_t at = row - first, position = row / attention.heads, head = row % attention.heads;
        float factor = 1;
        if (attention.sinks) {
            const float sink = attention.sinks[head] * log2_of_e, one = 1;
            factor = Factors(1, state.greatest + at, state.sum + at, &sink, &one).old_factors[0];
        }
        factor = state.sum[at] == 0 ? 0 : factor / state.sum[at];
        float* to = reinterpret_cast<float*>(attention.results + position * attention.result_stride + head * attention.result_head_stride);
        for (int64_t element = 0; element < attention.width; ++element) {
            to[element] = state.values[at * stride + element] * factor;
        }
    }
}

template <class Key, class Value>
constexpr AttentionKernel kernel_of{Key::type, Value::type, Key::block, Value::block < wide ? wide : Value::block, attend<Key, Value>};

constexpr AttentionKernel kernels[] = {kernel_of<F16, F16>, kernel_of<Q8_0, Q8_0>, kernel_of<F16, Q8_0>, kernel_of<Q8_0, F16>};
constexpr AttentionKernels table{kernels, kernels + sizeof kernels / sizeof kernels[0], Isa::rows, value_floats, Scratch::bytes, add, finish};

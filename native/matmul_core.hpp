// The products of matmul.hpp, for the instruction set that the including file describes as `Isa`.
//
// Included once per instruction set, inside a namespace of its own, and compiled for it: nothing here may be an inline
// function that other files share, or the linker could take the wrong one.

constexpr int chunk = 512;       // weights of a row that are unpacked at a time
constexpr int64_t first_bytes = 16 << 10;  // that are fetched before the first rows are unpacked
constexpr int most_panels = 2;   // that are unpacked before the activations are read: these come from a farther cache
using Int = Isa::Int;
using Float = Isa::Float;

// How a type's blocks of weights become bytes. `unpack` handles one block of every lane's row: out[i] is what it makes of 4
// consecutive weights; scales and minima are of 32 / parts weights. A weight is (byte - offset) * scale - minimum.

struct Sink {
    uint8_t* bytes;  // [block of 32][step][vector][lane][4]
    float* scale;    // [block of 32][part][vector][lane]
    float* minimum;  // [block of 32][vector][lane]

    static constexpr int step = Isa::vectors * Isa::lanes * 4;
    static constexpr int row = Isa::vectors * Isa::lanes;

    void put(int block, int index, Int x) const { Isa::store(bytes + (block * 8 + index) * step, x); }
    void put_scale(int which, Float x) const { Isa::store_floats(scale + which * row, x); }
    void put_minimum(int block, Float x) const { Isa::store_floats(minimum + block * row, x); }
};

struct Rows {
    const uint8_t* first;  // a block of the first lane's row
    int64_t stride;

    // 16 bytes of every lane's row: x[i] has the i-th 4 of them
    void read(int offset, Int* x) const { Isa::transpose(first + offset, stride, x); }

    Float halves(int offset) const {
        uint16_t halves[Isa::lanes];
        for (int lane = 0; lane < Isa::lanes; ++lane) {
            __builtin_memcpy(halves + lane, first + offset + lane * stride, 2);
        }
        return Isa::halves(halves);
    }
};

// Weights that ggml has repacked: blocks of 8 rows at a time, their bytes in turns of 8.
constexpr int repacked_rows = 8;

struct RepackedRows : Rows {
    Float halves(int offset) const {
        uint16_t halves[Isa::lanes];
        for (int lane = 0; lane < Isa::lanes; lane += repacked_rows) {
            __builtin_memcpy(halves + lane, first + offset + lane * stride, 2 * repacked_rows);
        }
        return Isa::halves(halves);
    }

    // 8 bytes of every lane's row, 4 in each of two vectors
    void read(int offset, Int* x) const { Isa::unzip(first + offset, repacked_rows * stride, x); }
};

LLMRUN_INLINE Int low(Int x) { return Isa::both(x, Isa::every(0x0f0f0f0f)); }
LLMRUN_INLINE Int high(Int x) { return low(Isa::right<4>(x)); }

struct Q4_0 {
    static constexpr int type = 2, bytes = 18, block = 32, parts = 1, offset = 8, maximum = 15;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        Int x[4];
        rows.read(2, x);
        out.put_scale(0, rows.halves(0));
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            out.put(0, i, low(x[i]));
            out.put(0, 4 + i, high(x[i]));
        }
    }
};

struct Q4_1 {
    static constexpr int type = 3, bytes = 20, block = 32, parts = 1, offset = 0, maximum = 15;
    static constexpr bool minima = true;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        Int x[4];
        rows.read(4, x);
        out.put_scale(0, rows.halves(0));
        out.put_minimum(0, Isa::minus(Isa::no_floats(), rows.halves(2)));
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            out.put(0, i, low(x[i]));
            out.put(0, 4 + i, high(x[i]));
        }
    }
};

// Bits 0 to 3 as the fifth bits of 4 bytes.
LLMRUN_INLINE Int fifth_bits(Int x) {
    const Int even = Isa::either(Isa::both(Isa::left<4>(x), Isa::every(0x10)), Isa::both(Isa::left<18>(x), Isa::every(0x100000)));
    const Int odd = Isa::either(Isa::both(Isa::left<11>(x), Isa::every(0x1000)), Isa::both(Isa::left<25>(x), Isa::every(0x10000000)));
    return Isa::either(even, odd);
}

// 32 weights of 5 bits, whose fifth bits come first.
LLMRUN_INLINE void unpack_fives(const Rows& rows, int offset, const Sink& out) {
    Int fifth[4], x[4];
    rows.read(offset, fifth);
    rows.read(offset + 4, x);
    Int bits = fifth[0];
    LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
        out.put(0, i, Isa::either(i < 4 ? low(x[i % 4]) : high(x[i % 4]), fifth_bits(bits)));
        bits = Isa::right<4>(bits);
    }
}

struct Q5_0 {
    static constexpr int type = 6, bytes = 22, block = 32, parts = 1, offset = 16, maximum = 31;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        out.put_scale(0, rows.halves(0));
        unpack_fives(rows, 2, out);
    }
};

struct Q5_1 {
    static constexpr int type = 7, bytes = 24, block = 32, parts = 1, offset = 0, maximum = 31;
    static constexpr bool minima = true;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        out.put_scale(0, rows.halves(0));
        out.put_minimum(0, Isa::minus(Isa::no_floats(), rows.halves(2)));
        unpack_fives(rows, 4, out);
    }
};

struct Q8_0 {
    static constexpr int type = 8, bytes = 34, block = 32, parts = 1, offset = 128, maximum = 255;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        const Int flip = Isa::every(Isa::has_wide_bytes ? static_cast<int>(0x80808080) : 0);
        Int x[8];
        rows.read(2, x);
        rows.read(18, x + 4);
        out.put_scale(0, rows.halves(0));
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.put(0, i, Isa::differ(x[i], flip));
        }
    }
};

// The scales and minima of Q4_K and Q5_K, 6 bits each, and the two halves before them.
LLMRUN_INLINE void unpack_scales(const Rows& rows, const Sink& out) {
    Int x[4];
    rows.read(0, x);
    const Float d = Isa::half(x[0]), dmin = Isa::half(Isa::right<16>(x[0]));
    const Int six = Isa::every(0x3f3f3f3f), top = Isa::every(0x30303030);
    const Int scales[2] = {Isa::both(x[1], six), Isa::either(low(x[3]), Isa::both(Isa::right<2>(x[1]), top))};
    const Int minima[2] = {Isa::both(x[2], six), Isa::either(high(x[3]), Isa::both(Isa::right<2>(x[2]), top))};
    LLMRUN_UNROLL for (int i = 0; i < 2; ++i) {
        Float scale[4], minimum[4];
        Isa::bytes_to_floats(scales[i], scale);
        Isa::bytes_to_floats(minima[i], minimum);
        LLMRUN_UNROLL for (int j = 0; j < 4; ++j) {
            out.put_scale(4 * i + j, Isa::times(d, scale[j]));
            out.put_minimum(4 * i + j, Isa::times(dmin, minimum[j]));
        }
    }
}

struct Q4_K {
    static constexpr int type = 12, bytes = 144, block = 256, parts = 1, offset = 0, maximum = 15;
    static constexpr bool minima = true;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        unpack_scales(rows, out);
        for (int j = 0; j < 8; ++j) {
            Int x[4];
            rows.read(16 + 16 * j, x);
            LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
                out.put(j / 2 * 2, j % 2 * 4 + i, low(x[i]));
                out.put(j / 2 * 2 + 1, j % 2 * 4 + i, high(x[i]));
            }
        }
    }
};

struct Q5_K {
    static constexpr int type = 13, bytes = 176, block = 256, parts = 1, offset = 0, maximum = 31;
    static constexpr bool minima = true;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        unpack_scales(rows, out);
        Int fifth[8];
        rows.read(16, fifth);
        rows.read(32, fifth + 4);
        const Int bit = Isa::every(0x10101010);
        for (int j = 0; j < 8; ++j) {
            Int x[4];
            rows.read(48 + 16 * j, x);
            LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
                Int& bits = fifth[j % 2 * 4 + i];
                out.put(j / 2 * 2, j % 2 * 4 + i, Isa::either(low(x[i]), Isa::both(Isa::left<4>(bits), bit)));
                out.put(j / 2 * 2 + 1, j % 2 * 4 + i, Isa::either(high(x[i]), Isa::both(Isa::left<3>(bits), bit)));
                bits = Isa::right<2>(bits);
            }
        }
    }
};

struct Q6_K {
    static constexpr int type = 14, bytes = 210, block = 256, parts = 2, offset = 32, maximum = 63;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        const Float d = rows.halves(208);
        Int scales[4];
        rows.read(192, scales);
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            Float scale[4];
            Isa::signed_bytes_to_floats(scales[i], scale);
            LLMRUN_UNROLL for (int j = 0; j < 4; ++j) {
                out.put_scale(4 * i + j, Isa::times(d, scale[j]));
            }
        }
        const Int top = Isa::every(0x30303030);
        for (int j = 0; j < 4; ++j) {  // 16 of 32 weights, of half the block
            const int half = j / 2, part = j % 2;
            Int a[4], b[4], h[4];
            rows.read(64 * half + 16 * part, a);
            rows.read(64 * half + 32 + 16 * part, b);
            rows.read(128 + 32 * half + 16 * part, h);
            LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
                const int at = 4 * part + i;
                out.put(4 * half, at, Isa::either(low(a[i]), Isa::both(Isa::left<4>(h[i]), top)));
                out.put(4 * half + 1, at, Isa::either(low(b[i]), Isa::both(Isa::left<2>(h[i]), top)));
                out.put(4 * half + 2, at, Isa::either(high(a[i]), Isa::both(h[i], top)));
                out.put(4 * half + 3, at, Isa::either(high(b[i]), Isa::both(Isa::right<2>(h[i]), top)));
            }
        }
    }
};

// The values of IQ4_NL and IQ4_XS.
LLMRUN_INLINE Int nonlinear(Int nibbles) {
    alignas(16) static constexpr int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return Isa::differ(Isa::lookup(values, nibbles), Isa::every(Isa::has_wide_bytes ? static_cast<int>(0x80808080) : 0));
}

struct IQ4_NL {
    static constexpr int type = 20, bytes = 18, block = 32, parts = 1, offset = 128, maximum = 255;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        Int x[4];
        rows.read(2, x);
        out.put_scale(0, rows.halves(0));
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            out.put(0, i, nonlinear(low(x[i])));
            out.put(0, 4 + i, nonlinear(high(x[i])));
        }
    }
};

struct IQ4_XS {
    static constexpr int type = 23, bytes = 136, block = 256, parts = 1, offset = 128, maximum = 255;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        Int head[4];
        rows.read(0, head);
        const Float d = Isa::half(head[0]);
        Int top = Isa::right<16>(head[0]), bottom = head[1];
        const Int four = Isa::every(15), two = Isa::every(0x30);
        for (int j = 0; j < 8; ++j) {
            const Int scale = Isa::either(Isa::both(bottom, four), Isa::both(Isa::left<4>(top), two));
            out.put_scale(j, Isa::times(d, Isa::minus(Isa::to_floats(scale), Isa::every_float(32.0f))));
            bottom = Isa::right<4>(bottom);
            top = Isa::right<2>(top);
            Int x[4];
            rows.read(8 + 16 * j, x);
            LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
                out.put(j, i, nonlinear(low(x[i])));
                out.put(j, 4 + i, nonlinear(high(x[i])));
            }
        }
    }
};

// What ggml makes of Q4_0, Q4_K and IQ4_NL on x86 (ggml-cpu/repack.cpp: make_block_q4_0x8() and others).
struct RepackedQ4_0 : Q4_0 {
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        const RepackedRows from{rows};
        const Int flip = Isa::every(static_cast<int>(0x88888888));
        out.put_scale(0, from.halves(0));
        LLMRUN_UNROLL for (int piece = 0; piece < 2; ++piece) {
            Int x[2];
            from.read(16 + 64 * piece, x);
            LLMRUN_UNROLL for (int i = 0; i < 2; ++i) {
                const Int bytes = Isa::differ(x[i], flip);
                out.put(0, 2 * piece + i, low(bytes));
                out.put(0, 4 + 2 * piece + i, high(bytes));
            }
        }
    }
};

struct RepackedIQ4_NL : IQ4_NL {
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        const RepackedRows from{rows};
        out.put_scale(0, from.halves(0));
        LLMRUN_UNROLL for (int piece = 0; piece < 2; ++piece) {
            Int x[2];
            from.read(16 + 64 * piece, x);
            LLMRUN_UNROLL for (int i = 0; i < 2; ++i) {
                out.put(0, 2 * piece + i, nonlinear(low(x[i])));
                out.put(0, 4 + 2 * piece + i, nonlinear(high(x[i])));
            }
        }
    }
};

struct RepackedQ4_K : Q4_K {
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        const RepackedRows from{rows};
        const Float d = from.halves(0), dmin = from.halves(16);
        for (int j = 0; j < 8; ++j) {  // the scales and minima of 8 rows as Q4_K has those of 8 blocks
            uint32_t scales[Isa::lanes / 4], minima[Isa::lanes / 4];
            for (int lane = 0; lane < Isa::lanes; lane += repacked_rows) {
                uint32_t x[3];
                __builtin_memcpy(x, from.first + 32 + 12 * j + lane * from.stride, sizeof x);
                scales[lane / 4] = x[0] & 0x3f3f3f3f;
                scales[lane / 4 + 1] = (x[2] & 0x0f0f0f0f) | (x[0] >> 2 & 0x30303030);
                minima[lane / 4] = x[1] & 0x3f3f3f3f;
                minima[lane / 4 + 1] = (x[2] >> 4 & 0x0f0f0f0f) | (x[1] >> 2 & 0x30303030);
            }
            out.put_scale(j, Isa::times(d, Isa::to_floats(Isa::widen(scales))));
            out.put_minimum(j, Isa::times(dmin, Isa::to_floats(Isa::widen(minima))));
        }
        for (int piece = 0; piece < 16; ++piece) {
            Int x[2];
            from.read(128 + 64 * piece, x);
            LLMRUN_UNROLL for (int i = 0; i < 2; ++i) {
                out.put(piece / 4 * 2, piece % 4 * 2 + i, low(x[i]));
                out.put(piece / 4 * 2 + 1, piece % 4 * 2 + i, high(x[i]));
            }
        }
    }
};

template <class T>
constexpr int together = 1;  // rows whose blocks lie together
template <>
constexpr int together<RepackedQ4_0> = repacked_rows;
template <>
constexpr int together<RepackedIQ4_NL> = repacked_rows;
template <>
constexpr int together<RepackedQ4_K> = repacked_rows;

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
constexpr size_t scratch_bytes_of = most_panels * sizeof(Panel<T>) + (spare_bytes<T> + 63) / 64 * 64;

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

template <class T>
void unpack(const uint8_t* weights, int64_t stride, int64_t rows, int depth, Panel<T>& panel, uint8_t* spare, Ahead& ahead) {
    for (int vector = 0; vector < Isa::vectors; ++vector) {
        Rows from{weights + vector * Isa::lanes * stride, stride};
        const int64_t left = rows - vector * Isa::lanes;
        if (left < Isa::lanes) {
            const int64_t bytes = depth / T::block * T::bytes;
            __builtin_memset(spare, 0, spare_bytes<T>);
            for (int64_t row = 0; row < left; row += together<T>) {
                __builtin_memcpy(spare + row * bytes, from.first + row * stride, together<T> * bytes);
            }
            from = {spare, bytes};
        }
        for (int i = 0; i < depth / T::block; ++i, from.first += together<T> * T::bytes) {
            const int block = i * (T::block / 32);
            ahead.fetch(Isa::lanes * T::bytes + 63);
            T::unpack(from, {panel.bytes[block][0][vector][0], panel.scale[block][0][vector],
                             T::minima ? panel.minimum[block][vector] : nullptr});
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

template <class T>
int64_t packed_bytes(int64_t depth, int64_t columns) {
    return depth / 32 * columns * share<T>;
}

template <class T>
int64_t records(int64_t depth, int64_t columns) {
    return depth / T::block * tiles_of(columns);
}

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
        factor = most > 0 ? 127.0f / most : 0.0f;
        exact = T::block == 32 ? most / 127.0f : most > 0 ? 1.0f / factor : 0.0f;
        scale = T::block == 32 ? as_half(exact) : exact;
    }

    float total(int sum) const { return T::block == 32 ? as_half(exact * static_cast<float>(sum)) : exact * static_cast<float>(sum); }
};

template <class T>
void pack(const Columns& from, int64_t depth, int64_t columns, char* packed, int64_t first, int64_t last) {
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
                    Isa::quantize(values + T::block * i + part, rounding.factor, record + 32 * column, sums);
                    float* scales = reinterpret_cast<float*>(record + 32 * count);
                    scales[column] = rounding.scale;
                    if constexpr (T::minima) {
                        scales[count + column] = -rounding.total(sums[0] + sums[1]);
                    } else {
                        int32_t* starts = reinterpret_cast<int32_t*>(scales + count);
                        starts[column] = -offset_of<T> * (T::parts == 1 ? sums[0] + sums[1] : sums[0]);
                        if (T::parts == 2) {
                            starts[count + column] = -offset_of<T> * sums[1];
                        }
                    }
                }
            }
        }
        first += end - block;
    }
}

// How many products of a byte and an activation fit into a 16-bit sum, by pairs.
template <class T>
constexpr int steps_at_once = Isa::has_wide_bytes ? 8 : has_signed_bytes<T> ? 1 : T::maximum > 31 ? 2 : T::maximum > 15 ? 4 : 8;

template <class T, int Count>
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
                        const Int activations = Isa::every_of(record + 32 * c + 4 * step);
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
void multiply(const Product& product, int64_t first, int64_t last, char* scratch) {
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
                unpack<T>(weights + begin / T::block * (together<T> * T::bytes), product.row_bytes, rest - i * rows_of_panel, depth, panels[i], spare, ahead);
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

template <class T>
constexpr MatmulKernel kernel_of{T::type, together<T> > 1, T::block, packed_bytes<T>, records<T>, pack<T>, multiply<T>};

constexpr MatmulKernel kernels[] = {kernel_of<Q4_0>, kernel_of<Q4_1>, kernel_of<Q5_0>, kernel_of<Q5_1>, kernel_of<Q8_0>, kernel_of<Q4_K>, kernel_of<Q5_K>,
                                    kernel_of<Q6_K>, kernel_of<IQ4_NL>, kernel_of<IQ4_XS>, kernel_of<RepackedQ4_0>, kernel_of<RepackedQ4_K>, kernel_of<RepackedIQ4_NL>};
constexpr MatmulKernels table{Isa::name, Isa::lanes * Isa::vectors, scratch_bytes_of<Q6_K> + scratch_bytes_of<Q5_K>,
                              kernels, kernels + sizeof kernels / sizeof kernels[0]};

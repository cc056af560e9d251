// How a type's blocks of weights become bytes, for the instruction set that the including file describes as `Isa`: beside each
// other in many rows (for many columns), or as they follow one another in a row (for few).

using Int = Isa::Int;
using Float = Isa::Float;

// Of one block of every lane's row, `unpack` makes out[i] of 4 consecutive weights; scales and minima are of 32 / parts weights.
// A weight is (byte - offset) * scale - minimum.

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

// Blocks as they follow one another in memory: of as many times 32 weights as a vector has lanes.
constexpr int blocks_of_vector = Isa::lanes / 8;

// Out of them: 8 vectors of bytes in the order of the weights, and a scale (and minimum) of each 32 / parts weights in a lane.
template <int Parts>
struct Unpacked {
    Int bytes[8];
    Float scale[Parts];
    Float minimum;
};

struct Run {
    const uint8_t* first;

    // Of blocks with `Bytes` bytes and 32 weights: those of the i-th vector.
    template <int Bytes>
    LLMRUN_INLINE const uint8_t* block(int i) const { return first + i * blocks_of_vector * Bytes; }
    template <int Bytes>
    LLMRUN_INLINE Int nibbles(int i, int offset) const { return Isa::nibbles(block<Bytes>(i) + offset, block<Bytes>(i) + offset + Bytes); }
    template <int Bytes>
    LLMRUN_INLINE Int fifths(int i, int offset) const { return Isa::fifths(block<Bytes>(i) + offset, block<Bytes>(i) + offset + Bytes); }
    template <int Bytes>
    LLMRUN_INLINE Int all(int i, int offset) const { return Isa::join(block<Bytes>(i) + offset, block<Bytes>(i) + offset + Bytes); }
    template <int Bytes>
    LLMRUN_INLINE Float halves(int offset) const { return Isa::template halves_at<Bytes>(first + offset); }

    // Of blocks with 256 weights: the one that the i-th vector belongs to.
    template <int Bytes>
    LLMRUN_INLINE const uint8_t* superblock(int i) const { return first + i * blocks_of_vector / 8 * Bytes; }
    // 32 bytes that 64 weights share by nibbles
    template <int Bytes>
    LLMRUN_INLINE Int pairs(int i, int offset) const { return Isa::twice(superblock<Bytes>(i) + offset + i * blocks_of_vector % 8 / 2 * 32); }
    // 32 bytes that all share by bits
    template <int Bytes>
    LLMRUN_INLINE Int same(int i, int offset) const { return Isa::twice(superblock<Bytes>(i) + offset); }
    // 4 bytes of the i-th superblock
    template <int Bytes>
    LLMRUN_INLINE uint32_t words(int i, int offset) const {
        uint32_t word;
        __builtin_memcpy(&word, first + i * Bytes + offset, sizeof word);
        return word;
    }
    template <int Bytes>
    LLMRUN_INLINE Float halves_of_superblocks(int offset) const { return Isa::halves_of_eights(first + offset, first + offset + Bytes); }
    // 16 signed bytes, those of even and of odd places apart
    template <int Bytes>
    LLMRUN_INLINE void signed_pairs(int offset, Float* out) const { Isa::signed_pairs(first + offset, first + offset + Bytes, out); }
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        out.scale[0] = run.halves<bytes>(0);
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.bytes[i] = run.nibbles<bytes>(i, 2);
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        out.scale[0] = run.halves<bytes>(0);
        out.minimum = Isa::minus(Isa::no_floats(), run.halves<bytes>(2));
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.bytes[i] = run.nibbles<bytes>(i, 4);
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        out.scale[0] = run.halves<bytes>(0);
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.bytes[i] = Isa::either(run.nibbles<bytes>(i, 6), run.fifths<bytes>(i, 2));
        }
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        out.scale[0] = run.halves<bytes>(0);
        out.minimum = Isa::minus(Isa::no_floats(), run.halves<bytes>(2));
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.bytes[i] = Isa::either(run.nibbles<bytes>(i, 8), run.fifths<bytes>(i, 4));
        }
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        const Int flip = Isa::every(Isa::has_wide_bytes ? static_cast<int>(0x80808080) : 0);
        out.scale[0] = run.halves<bytes>(0);
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.bytes[i] = Isa::differ(run.all<bytes>(i, 2), flip);
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
        bytes_to_floats<Isa>(scales[i], scale);
        bytes_to_floats<Isa>(minima[i], minimum);
        LLMRUN_UNROLL for (int j = 0; j < 4; ++j) {
            out.put_scale(4 * i + j, Isa::times(d, scale[j]));
            out.put_minimum(4 * i + j, Isa::times(dmin, minimum[j]));
        }
    }
}

template <int Bytes>
LLMRUN_INLINE void unpack_scales(const Run& run, Unpacked<1>& out) {
    uint64_t scales[Isa::lanes / 8], minima[Isa::lanes / 8];
    LLMRUN_UNROLL for (int i = 0; i < Isa::lanes / 8; ++i) {
        const uint64_t a = run.words<Bytes>(i, 4), b = run.words<Bytes>(i, 8), c = run.words<Bytes>(i, 12);
        scales[i] = (a & 0x3f3f3f3f) | ((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32;
        minima[i] = (b & 0x3f3f3f3f) | ((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32;
    }
    out.scale[0] = Isa::times(run.halves_of_superblocks<Bytes>(0), Isa::to_floats(Isa::widen(scales)));
    out.minimum = Isa::times(run.halves_of_superblocks<Bytes>(2), Isa::to_floats(Isa::widen(minima)));
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        unpack_scales<bytes>(run, out);
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.bytes[i] = low(Isa::shift_blocks<4>(run.pairs<bytes>(i, 16), i * blocks_of_vector % 2));
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        unpack_scales<bytes>(run, out);
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            const int block = i * blocks_of_vector % 8;
            const Int fifth = Isa::both(Isa::shift_blocks<1>(run.same<bytes>(i, 16), block), Isa::every(0x01010101));
            out.bytes[i] = Isa::either(low(Isa::shift_blocks<4>(run.pairs<bytes>(i, 48), i * blocks_of_vector % 2)), Isa::left<4>(fifth));
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
            signed_bytes_to_floats<Isa>(scales[i], scale);
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        const Float d = run.halves_of_superblocks<bytes>(208);
        Float scales[2];
        run.signed_pairs<bytes>(192, scales);
        out.scale[0] = Isa::times(d, scales[0]);
        out.scale[1] = Isa::times(d, scales[1]);
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            const int block = i * blocks_of_vector % 8, half = block / 4, quarter = block % 4;
            const uint8_t* at = run.superblock<bytes>(i) + 64 * half;
            const Int nibbles = Isa::load_any(at + quarter % 2 * 32);
            const Int top = Isa::both(Isa::shift_blocks<2>(Isa::twice(at - 32 * half + 128), quarter), Isa::every(0x03030303));
            out.bytes[i] = Isa::either(quarter < 2 ? low(nibbles) : high(nibbles), Isa::left<4>(top));
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        out.scale[0] = run.halves<bytes>(0);
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.bytes[i] = nonlinear(run.nibbles<bytes>(i, 2));
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
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked<parts>& out) {
        uint64_t scales[Isa::lanes / 8];
        LLMRUN_UNROLL for (int i = 0; i < Isa::lanes / 8; ++i) {
            const uint64_t bottom = run.words<bytes>(i, 4), top = run.words<bytes>(i, 0) >> 16;
            scales[i] = 0;
            LLMRUN_UNROLL for (int block = 0; block < 8; ++block) {
                scales[i] |= ((bottom >> 4 * block & 15) | (top >> 2 * block & 3) << 4) << 8 * block;
            }
        }
        const Float whole = Isa::to_floats(Isa::widen(scales));
        out.scale[0] = Isa::times(run.halves_of_superblocks<bytes>(0), Isa::minus(whole, Isa::every_float(32.0f)));
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            const uint8_t* at = run.superblock<bytes>(i) + 8 + i * blocks_of_vector % 8 * 16;
            out.bytes[i] = nonlinear(Isa::nibbles(at, at + 16));
        }
    }
};


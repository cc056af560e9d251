// How a type's blocks of weights become bytes, for the instruction set that the including file describes as `Isa`: beside each
// other in many rows (for many columns), or as they follow one another in a row (for few).

using Int = Isa::Int;
using Float = Isa::Float;

// Of one block of every lane's row, `unpack` makes steps of 4 consecutive weights. A weight is (byte - offset) * scale - minimum; in
// blocks of 256 it is (byte - offset) * factor * scale - share * minimum, with a factor for each 32 / parts weights and a share for
// each 32: whole numbers, so that a block's sum is exact until it is multiplied by its scale.

struct Sink {
    uint8_t* bytes;    // [block of 32][step][vector][lane][4]
    float* scale;      // [vector][lane]
    float* minimum;    // [vector][lane]
    int32_t* factors;  // [block of 32][part][vector][lane], as Isa::factor() makes them
    int32_t* pairs;    // [pair][vector][lane]: what multiplies two sums of activations, a number of 16 bits for each

    static constexpr int step = Isa::vectors * Isa::lanes * 4;
    static constexpr int row = Isa::vectors * Isa::lanes;

    void put(int block, int index, Int x) const { Isa::store(bytes + (block * 8 + index) * step, x); }
    void put_scale(Float x) const { Isa::store_floats(scale, x); }
    void put_minimum(Float x) const { Isa::store_floats(minimum, Isa::minus(Isa::no_floats(), x)); }
    void put_factor(int which, Int x) const { Isa::store(factors + which * row, Isa::factor(x)); }
    void put_pair(int which, Int first, Int second) const {
        Isa::store(pairs + which * row, Isa::either(Isa::both(first, Isa::every(0xffff)), Isa::left<16>(second)));
    }
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

// Blocks of 32 as they follow one another in memory, as many as a vector has lanes. A vector has the first or the second halves of
// a group of blocks.
constexpr int blocks_of_group = Isa::lanes / 4;

// Out of them: first and second halves of 4 groups in turns, and a scale (and minimum) of each block in a lane.
struct Unpacked {
    Int bytes[8];
    Float scale;
    Float minimum;
};

struct Run {
    const uint8_t* first;

    // Of blocks with `Bytes` bytes: 16 of each in a group.
    template <int Bytes>
    LLMRUN_INLINE Int read(int group, int offset) const { return Isa::template sixteens<Bytes>(first + group * blocks_of_group * Bytes + offset); }
    // 16 of their 32 bits as fifth bits
    template <int Bytes>
    LLMRUN_INLINE Int fifths(int group, int offset, int half) const {
        return Isa::template fifths<Bytes>(first + group * blocks_of_group * Bytes + offset, half);
    }
    template <int Bytes>
    LLMRUN_INLINE Float halves(int offset) const { return Isa::template halves_at<Bytes>(first + offset); }
};

LLMRUN_INLINE Int low(Int x) { return Isa::both(x, Isa::every(0x0f0f0f0f)); }
LLMRUN_INLINE Int high(Int x) { return low(Isa::right<4>(x)); }

// How many blocks of 32 in their order a vector has.
constexpr int blocks_of_vector = Isa::lanes / 8;

// A row's block of 256: its bytes in the order of the weights, 8 factors of first and of second parts, and 8 shares of the minimum.
struct Superblock {
    Int bytes[8 / blocks_of_vector];
    Int factors;
    Eight shares;
};

// Of the blocks of 32 that the i-th vector has: 32 bytes that two of them share by nibbles
LLMRUN_INLINE Int halves_of_pairs(const uint8_t* p, int i) {
    const int block = i * blocks_of_vector;
    return low(Isa::shift_blocks<4>(Isa::twice(p + block / 2 * 32), block % 2));
}
// 32 bytes that all share by bits
template <int Bits>
LLMRUN_INLINE Int shifted(const uint8_t* p, int block) { return Isa::shift_blocks<Bits>(Isa::twice(p), block); }

LLMRUN_INLINE uint32_t word(const uint8_t* p) {
    uint32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    return word;
}

struct Q4_0 {
    static constexpr int type = 2, bytes = 18, block = 32, parts = 1, offset = 8, maximum = 15;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        Int x[4];
        rows.read(2, x);
        out.put_scale(rows.halves(0));
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            out.put(0, i, low(x[i]));
            out.put(0, 4 + i, high(x[i]));
        }
    }
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked& out) {
        out.scale = run.halves<bytes>(0);
        LLMRUN_UNROLL for (int group = 0; group < 4; ++group) {
            const Int nibbles = run.read<bytes>(group, 2);
            out.bytes[2 * group] = low(nibbles);
            out.bytes[2 * group + 1] = high(nibbles);
        }
    }
};

struct Q4_1 {
    static constexpr int type = 3, bytes = 20, block = 32, parts = 1, offset = 0, maximum = 15;
    static constexpr bool minima = true;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        Int x[4];
        rows.read(4, x);
        out.put_scale(rows.halves(0));
        out.put_minimum(rows.halves(2));
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            out.put(0, i, low(x[i]));
            out.put(0, 4 + i, high(x[i]));
        }
    }
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked& out) {
        out.scale = run.halves<bytes>(0);
        out.minimum = Isa::minus(Isa::no_floats(), run.halves<bytes>(2));
        LLMRUN_UNROLL for (int group = 0; group < 4; ++group) {
            const Int nibbles = run.read<bytes>(group, 4);
            out.bytes[2 * group] = low(nibbles);
            out.bytes[2 * group + 1] = high(nibbles);
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
        out.put_scale(rows.halves(0));
        unpack_fives(rows, 2, out);
    }
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked& out) {
        out.scale = run.halves<bytes>(0);
        LLMRUN_UNROLL for (int group = 0; group < 4; ++group) {
            const Int nibbles = run.read<bytes>(group, 6);
            out.bytes[2 * group] = Isa::either(low(nibbles), run.fifths<bytes>(group, 2, 0));
            out.bytes[2 * group + 1] = Isa::either(high(nibbles), run.fifths<bytes>(group, 2, 1));
        }
    }
};

struct Q5_1 {
    static constexpr int type = 7, bytes = 24, block = 32, parts = 1, offset = 0, maximum = 31;
    static constexpr bool minima = true;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        out.put_scale(rows.halves(0));
        out.put_minimum(rows.halves(2));
        unpack_fives(rows, 4, out);
    }
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked& out) {
        out.scale = run.halves<bytes>(0);
        out.minimum = Isa::minus(Isa::no_floats(), run.halves<bytes>(2));
        LLMRUN_UNROLL for (int group = 0; group < 4; ++group) {
            const Int nibbles = run.read<bytes>(group, 8);
            out.bytes[2 * group] = Isa::either(low(nibbles), run.fifths<bytes>(group, 4, 0));
            out.bytes[2 * group + 1] = Isa::either(high(nibbles), run.fifths<bytes>(group, 4, 1));
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
        out.put_scale(rows.halves(0));
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            out.put(0, i, Isa::differ(x[i], flip));
        }
    }
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked& out) {
        const Int flip = Isa::every(Isa::has_wide_bytes ? static_cast<int>(0x80808080) : 0);
        out.scale = run.halves<bytes>(0);
        LLMRUN_UNROLL for (int group = 0; group < 4; ++group) {
            out.bytes[2 * group] = Isa::differ(run.read<bytes>(group, 2), flip);
            out.bytes[2 * group + 1] = Isa::differ(run.read<bytes>(group, 18), flip);
        }
    }
};

// A byte of each lane
template <int Index>
LLMRUN_INLINE Int byte_of(Int x) { return Isa::both(Isa::right<8 * Index>(x), Isa::every(255)); }
template <int Index>
LLMRUN_INLINE Int signed_byte_of(Int x) { return Isa::right_signed<24>(Isa::left<24 - 8 * Index>(x)); }

// The factors and shares of Q4_K and Q5_K, 6 bits each, and the two halves before them.
LLMRUN_INLINE void unpack_scales(const Rows& rows, const Sink& out) {
    Int x[4];
    rows.read(0, x);
    out.put_scale(Isa::half(x[0]));
    out.put_minimum(Isa::half(Isa::right<16>(x[0])));
    const Int six = Isa::every(0x3f3f3f3f), top = Isa::every(0x30303030);
    const Int factors[2] = {Isa::both(x[1], six), Isa::either(low(x[3]), Isa::both(Isa::right<2>(x[1]), top))};
    const Int shares[2] = {Isa::both(x[2], six), Isa::either(high(x[3]), Isa::both(Isa::right<2>(x[2]), top))};
    LLMRUN_UNROLL for (int i = 0; i < 2; ++i) {
        out.put_factor(4 * i, byte_of<0>(factors[i]));
        out.put_factor(4 * i + 1, byte_of<1>(factors[i]));
        out.put_factor(4 * i + 2, byte_of<2>(factors[i]));
        out.put_factor(4 * i + 3, byte_of<3>(factors[i]));
        out.put_pair(2 * i, byte_of<0>(shares[i]), byte_of<1>(shares[i]));
        out.put_pair(2 * i + 1, byte_of<2>(shares[i]), byte_of<3>(shares[i]));
    }
}

LLMRUN_INLINE void unpack_scales(const uint8_t* block, Superblock& out) {
    const uint64_t a = word(block + 4), b = word(block + 8), c = word(block + 12);
    const Eight factors = widened((a & 0x3f3f3f3f) | ((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32);
    out.factors = Isa::factors(factors, factors);
    out.shares = widened((b & 0x3f3f3f3f) | ((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32);
}

struct Q4_K {
    static constexpr int type = 12, bytes = 144, block = 256, parts = 1, scale_at = 0, offset = 0, maximum = 15;
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
    LLMRUN_INLINE static void unpack(const uint8_t* block, Superblock& out) {
        unpack_scales(block, out);
        LLMRUN_UNROLL for (int i = 0; i < 8 / blocks_of_vector; ++i) {
            out.bytes[i] = halves_of_pairs(block + 16, i);
        }
    }
};

struct Q5_K {
    static constexpr int type = 13, bytes = 176, block = 256, parts = 1, scale_at = 0, offset = 0, maximum = 31;
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
    LLMRUN_INLINE static void unpack(const uint8_t* block, Superblock& out) {
        unpack_scales(block, out);
        LLMRUN_UNROLL for (int i = 0; i < 8 / blocks_of_vector; ++i) {
            const Int fifth = Isa::both(shifted<1>(block + 16, i * blocks_of_vector), Isa::every(0x01010101));
            out.bytes[i] = Isa::either(halves_of_pairs(block + 48, i), Isa::left<4>(fifth));
        }
    }
};

struct Q6_K {
    static constexpr int type = 14, bytes = 210, block = 256, parts = 2, scale_at = 208, offset = 32, maximum = 63;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        out.put_scale(rows.halves(208));
        Int factors[4];
        rows.read(192, factors);
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            const Int a = signed_byte_of<0>(factors[i]), b = signed_byte_of<1>(factors[i]);
            const Int c = signed_byte_of<2>(factors[i]), d = signed_byte_of<3>(factors[i]);
            out.put_factor(4 * i, a);
            out.put_factor(4 * i + 1, b);
            out.put_factor(4 * i + 2, c);
            out.put_factor(4 * i + 3, d);
            out.put_pair(2 * i, a, b);
            out.put_pair(2 * i + 1, c, d);
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
    LLMRUN_INLINE static void unpack(const uint8_t* block, Superblock& out) {
        out.factors = Isa::signed_pairs(block + 192);
        LLMRUN_UNROLL for (int i = 0; i < 8 / blocks_of_vector; ++i) {
            const int half = i * blocks_of_vector / 4, quarter = i * blocks_of_vector % 4;
            const Int nibbles = Isa::load_any(block + 64 * half + quarter % 2 * 32);
            const Int top = Isa::both(shifted<2>(block + 128 + 32 * half, quarter), Isa::every(0x03030303));
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
        out.put_scale(rows.halves(0));
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            out.put(0, i, nonlinear(low(x[i])));
            out.put(0, 4 + i, nonlinear(high(x[i])));
        }
    }
    LLMRUN_INLINE static void unpack(const Run& run, Unpacked& out) {
        out.scale = run.halves<bytes>(0);
        LLMRUN_UNROLL for (int group = 0; group < 4; ++group) {
            const Int nibbles = run.read<bytes>(group, 2);
            out.bytes[2 * group] = nonlinear(low(nibbles));
            out.bytes[2 * group + 1] = nonlinear(high(nibbles));
        }
    }
};

struct IQ4_XS {
    static constexpr int type = 23, bytes = 136, block = 256, parts = 1, scale_at = 0, offset = 128, maximum = 255;
    static constexpr bool minima = false;
    LLMRUN_INLINE static void unpack(const Rows& rows, const Sink& out) {
        Int head[4];
        rows.read(0, head);
        out.put_scale(Isa::half(head[0]));
        Int top = Isa::right<16>(head[0]), bottom = head[1];
        const Int four = Isa::every(15), two = Isa::every(0x30);
        Int last = Isa::none();
        for (int j = 0; j < 8; ++j) {
            const Int factor = Isa::plus(Isa::either(Isa::both(bottom, four), Isa::both(Isa::left<4>(top), two)), Isa::every(-32));
            out.put_factor(j, factor);
            if (j % 2) {
                out.put_pair(j / 2, last, factor);
            }
            last = factor;
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
    LLMRUN_INLINE static void unpack(const uint8_t* block, Superblock& out) {
        uint64_t factors = word(block + 4), top = word(block) >> 16;  // 8 times 4 and 2 bits, which become bytes
        factors = (factors | factors << 16) & 0x0000ffff0000ffff;
        factors = (factors | factors << 8) & 0x00ff00ff00ff00ff;
        factors = (factors | factors << 4) & 0x0f0f0f0f0f0f0f0f;
        top = (top | top << 24) & 0x000000ff000000ff;
        top = (top | top << 12) & 0x000f000f000f000f;
        top = (top | top << 6) & 0x0303030303030303;
        const Eight eight = less(widened(factors | top << 4), 32);
        out.factors = Isa::factors(eight, eight);
        LLMRUN_UNROLL for (int i = 0; i < 8 / blocks_of_vector; ++i) {
            const uint8_t* at = block + 8 + i * blocks_of_vector * 16;
            out.bytes[i] = nonlinear(Isa::nibbles(at, at + 16));
        }
    }
};


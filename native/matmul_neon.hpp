// What the products and the attention have in common with NEON: the base of their `Isa`. A vector is a pair of registers.

struct Neon {
    static constexpr int lanes = 8;
    struct Int {
        int32x4_t a, b;
    };
    struct Float {
        float32x4_t a, b;
    };

    LLMRUN_INLINE static uint8x16_t bytes_of(int32x4_t x) { return vreinterpretq_u8_s32(x); }
    LLMRUN_INLINE static int8x16_t signed_bytes_of(int32x4_t x) { return vreinterpretq_s8_s32(x); }
    LLMRUN_INLINE static int32x4_t ints_of(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
    LLMRUN_INLINE static int32x4_t load_register(const void* p) { return ints_of(vld1q_u8(static_cast<const uint8_t*>(p))); }

    LLMRUN_INLINE static Int load_any(const void* p) { return {load_register(p), load_register(static_cast<const char*>(p) + 16)}; }
    LLMRUN_INLINE static Int load(const void* p) { return load_any(p); }
    LLMRUN_INLINE static void store(void* p, Int x) {
        vst1q_u8(static_cast<uint8_t*>(p), bytes_of(x.a));
        vst1q_u8(static_cast<uint8_t*>(p) + 16, bytes_of(x.b));
    }
    LLMRUN_INLINE static Int every(int x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
    LLMRUN_INLINE static Int none() { return every(0); }
    LLMRUN_INLINE static Int every_of(const void* p) {
        int x;
        __builtin_memcpy(&x, p, sizeof x);
        return every(x);
    }
    LLMRUN_INLINE static Int both(Int x, Int y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b)}; }
    LLMRUN_INLINE static Int either(Int x, Int y) { return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b)}; }
    LLMRUN_INLINE static Int differ(Int x, Int y) { return {veorq_s32(x.a, y.a), veorq_s32(x.b, y.b)}; }
    LLMRUN_INLINE static Int plus(Int x, Int y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
    template <int Bits>
    LLMRUN_INLINE static Int right(Int x) {
        return {vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x.a), Bits)), vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x.b), Bits))};
    }
    template <int Bits>
    LLMRUN_INLINE static Int right_signed(Int x) { return {vshrq_n_s32(x.a, Bits), vshrq_n_s32(x.b, Bits)}; }
    template <int Bits>
    LLMRUN_INLINE static Int left(Int x) { return {vshlq_n_s32(x.a, Bits), vshlq_n_s32(x.b, Bits)}; }
    LLMRUN_INLINE static Int lookup(const int8_t* values, Int indices) {
        const int8x16_t table = vld1q_s8(values);
        return {vreinterpretq_s32_s8(vqtbl1q_s8(table, bytes_of(indices.a))), vreinterpretq_s32_s8(vqtbl1q_s8(table, bytes_of(indices.b)))};
    }
    LLMRUN_INLINE static Float every_float(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
    LLMRUN_INLINE static Float no_floats() { return every_float(0); }
    LLMRUN_INLINE static Float every_float_of(const float* p) { return every_float(*p); }
    LLMRUN_INLINE static Float load_floats(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    LLMRUN_INLINE static void store_floats(float* p, Float x) {
        vst1q_f32(p, x.a);
        vst1q_f32(p + 4, x.b);
    }
    LLMRUN_INLINE static void keep(Float& x) { __asm__("" : "+w"(x.a), "+w"(x.b)); }
    LLMRUN_INLINE static Float to_floats(Int x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
    LLMRUN_INLINE static Float times(Float x, Float y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
    LLMRUN_INLINE static Float minus(Float x, Float y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
    LLMRUN_INLINE static Float add_product(Float x, Float y, Float z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
    LLMRUN_INLINE static Float from_halves(uint16x8_t x) {
        const float16x8_t halves = vreinterpretq_f16_u16(x);
        return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
    }
    LLMRUN_INLINE static Float halves(const uint16_t* p) { return from_halves(vld1q_u16(p)); }
    // of numbers that are the upper halves of floats
    LLMRUN_INLINE static Float upper_halves(const uint16_t* p) {
        const uint16x8_t x = vld1q_u16(p);
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))};
    }
    // of the lower 16 bits
    LLMRUN_INLINE static Float half(Int x) {
        return from_halves(vuzp1q_u16(vreinterpretq_u16_s32(x.a), vreinterpretq_u16_s32(x.b)));
    }
    LLMRUN_INLINE static void transpose_four(int32x4_t* x) {
        const int64x2_t a = vreinterpretq_s64_s32(vtrn1q_s32(x[0], x[1])), b = vreinterpretq_s64_s32(vtrn2q_s32(x[0], x[1]));
        const int64x2_t c = vreinterpretq_s64_s32(vtrn1q_s32(x[2], x[3])), d = vreinterpretq_s64_s32(vtrn2q_s32(x[2], x[3]));
        x[0] = vreinterpretq_s32_s64(vtrn1q_s64(a, c));
        x[1] = vreinterpretq_s32_s64(vtrn1q_s64(b, d));
        x[2] = vreinterpretq_s32_s64(vtrn2q_s64(a, c));
        x[3] = vreinterpretq_s32_s64(vtrn2q_s64(b, d));
    }
    // 16 bytes of each of 8 rows -> 4 vectors with 4 bytes of each
    LLMRUN_INLINE static void transpose(const uint8_t* rows, int64_t stride, Int* out) {
        int32x4_t x[8];
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            x[i] = load_register(rows + i * stride);
        }
        transpose_four(x);
        transpose_four(x + 4);
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            out[i] = {x[i], x[4 + i]};
        }
    }
    // A vector holds one block: wider ones hold that of a second place too.
    LLMRUN_INLINE static Int twice(const uint8_t* p) { return load_any(p); }
    // 16 bytes of each of two blocks
    template <int Bytes>
    LLMRUN_INLINE static Int sixteens(const uint8_t* p) { return {load_register(p), load_register(p + Bytes)}; }
    // the 32 nibbles of 16 bytes, the lower ones first
    LLMRUN_INLINE static Int nibbles(const uint8_t* p, const uint8_t*) {
        const uint8x16_t bytes = vld1q_u8(p);
        return {ints_of(vandq_u8(bytes, vdupq_n_u8(15))), ints_of(vshrq_n_u8(bytes, 4))};
    }
    // 16 of 32 bits as fifth bits
    LLMRUN_INLINE static int32x4_t fifths_of(const uint8_t* p, int half) {
        const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201)), first = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
        const uint8x16_t places = vaddq_u8(first, vdupq_n_u8(static_cast<uint8_t>(2 * half)));
        return ints_of(vandq_u8(vtstq_u8(vqtbl1q_u8(bytes_of(every_of(p).a), places), bit), vdupq_n_u8(16)));
    }
    // of each of two blocks
    template <int Bytes>
    LLMRUN_INLINE static Int fifths(const uint8_t* p, int half) { return {fifths_of(p, half), fifths_of(p + Bytes, half)}; }
    // block number `first`, shifted right by so many times its number
    template <int Bits>
    LLMRUN_INLINE static Int shift_blocks(Int x, int first) {
        const int32x4_t bits = vdupq_n_s32(-Bits * first);
        return {vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x.a), bits)), vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x.b), bits))};
    }
    template <int Stride>
    LLMRUN_INLINE static Float halves_at(const uint8_t* p) {
        const auto at = [p](int i) { return reinterpret_cast<const uint16_t*>(p + i * Stride); };
        uint16x8_t x = vld1q_dup_u16(at(0));
        x = vld1q_lane_u16(at(1), x, 1);
        x = vld1q_lane_u16(at(2), x, 2);
        x = vld1q_lane_u16(at(3), x, 3);
        x = vld1q_lane_u16(at(4), x, 4);
        x = vld1q_lane_u16(at(5), x, 5);
        x = vld1q_lane_u16(at(6), x, 6);
        return from_halves(vld1q_lane_u16(at(7), x, 7));
    }
    LLMRUN_INLINE static Float widened(int16x8_t x) { return to_floats({vmovl_s16(vget_low_s16(x)), vmovl_high_s16(x)}); }
    LLMRUN_INLINE static Int less(Int x, Int y) { return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b)}; }
    LLMRUN_INLINE static Int add_pairs(Int sums, Int x, Int y) {
        return plus(sums, {products_of_pairs(vreinterpretq_s16_s32(x.a), vreinterpretq_s16_s32(y.a)), products_of_pairs(vreinterpretq_s16_s32(x.b), vreinterpretq_s16_s32(y.b))});
    }
    // 8 numbers for first and 8 for second halves
    LLMRUN_INLINE static Int factors(Eight x, Eight y) { return {vreinterpretq_s32_s16(x), vreinterpretq_s32_s16(y)}; }
    // 16 signed bytes: those of even and of odd places
    LLMRUN_INLINE static Int signed_pairs(const uint8_t* p) {
        const Eight x = load_eight(p);
        return factors(vshrq_n_s16(vshlq_n_s16(x, 8), 8), vshrq_n_s16(x, 8));
    }
    // those of the i-th vector, in each 16 bits
    LLMRUN_INLINE static Int factors_of(Int x, int i) {
        const uint8x16_t places = vreinterpretq_u8_u16(vdupq_n_u16(static_cast<uint16_t>(0x0100 + 0x0202 * i)));
        return {ints_of(vqtbl1q_u8(bytes_of(x.a), places)), ints_of(vqtbl1q_u8(bytes_of(x.b), places))};
    }
    // four numbers with the same sum
    LLMRUN_INLINE static int32x4_t fours(Int x) { return vaddq_s32(x.a, x.b); }
    // the sums of two times four numbers in each of 4 vectors
    LLMRUN_INLINE static Int sum_fours(const Int* x) {
        return {vpaddq_s32(vpaddq_s32(x[0].a, x[1].a), vpaddq_s32(x[2].a, x[3].a)), vpaddq_s32(vpaddq_s32(x[0].b, x[1].b), vpaddq_s32(x[2].b, x[3].b))};
    }
    // from lanes that have numbers 0, 2, 4, 6 and 1, 3, 5, 7
    LLMRUN_INLINE static Int in_order(Int x) { return {vzip1q_s32(x.a, x.b), vzip2q_s32(x.a, x.b)}; }

    LLMRUN_INLINE static void transpose_floats(Float* x) {
        int32x4_t a[8], b[8];
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            a[i] = vreinterpretq_s32_f32(x[i].a);
            b[i] = vreinterpretq_s32_f32(x[i].b);
        }
        LLMRUN_UNROLL for (int i = 0; i < 8; i += 4) {
            transpose_four(a + i);
            transpose_four(b + i);
        }
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            x[i] = {vreinterpretq_f32_s32(a[i]), vreinterpretq_f32_s32(a[4 + i])};
            x[4 + i] = {vreinterpretq_f32_s32(b[i]), vreinterpretq_f32_s32(b[4 + i])};
        }
    }
    // the sum of 16 numbers of each of 2 rows
    LLMRUN_INLINE static void add_up(const Float (*x)[2], float* out) {
        const auto halved = [](float32x4_t y) { return vadd_f32(vget_low_f32(y), vget_high_f32(y)); };
        float32x2_t sums[2];
        LLMRUN_UNROLL for (int row = 0; row < 2; ++row) {
            const Float *y = x[row];
            sums[row] = vadd_f32(vpadd_f32(halved(y[0].a), halved(y[0].b)), vpadd_f32(halved(y[1].a), halved(y[1].b)));
        }
        vst1_f32(out, vpadd_f32(sums[0], sums[1]));
    }
    // the largest magnitude of 32
    LLMRUN_INLINE static float largest(const float* values) {
        float32x4_t most = vdupq_n_f32(0);
        LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
            most = vmaxq_f32(most, vabsq_f32(vld1q_f32(values + 4 * i)));
        }
        return vmaxvq_f32(most);
    }
    LLMRUN_INLINE static void quantize(const float* values, float factor, char* bytes, int* sums) {
        LLMRUN_UNROLL for (int half = 0; half < 2; ++half) {
            int16x4_t x[4];
            LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
                x[i] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(values + 16 * half + 4 * i), factor)));
            }
            const int8x16_t whole = vcombine_s8(vqmovn_s16(vcombine_s16(x[0], x[1])), vqmovn_s16(vcombine_s16(x[2], x[3])));
            vst1q_u8(reinterpret_cast<uint8_t*>(bytes) + 16 * half, vreinterpretq_u8_s8(whole));
            sums[half] = vaddlvq_s8(whole);
        }
    }
};

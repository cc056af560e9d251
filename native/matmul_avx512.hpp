// What the products and the attention have in common with 512 bits: the base of their `Isa`.

struct Avx512 {
    static constexpr int lanes = 16;
    using Int = __m512i;
    using Float = __m512;

    LLMRUN_INLINE static Int load(const void* p) { return _mm512_load_si512(p); }
    LLMRUN_INLINE static void store(void* p, Int x) { _mm512_store_si512(p, x); }
    LLMRUN_INLINE static Int none() { return _mm512_setzero_si512(); }
    LLMRUN_INLINE static Int every(int x) { return _mm512_set1_epi32(x); }
    LLMRUN_INLINE static Int every_of(const void* p) {
        int x;
        __builtin_memcpy(&x, p, sizeof x);
        return _mm512_set1_epi32(x);
    }
    // 4 activations
    LLMRUN_INLINE static Int step_of(const char* activations, int step) { return every_of(activations + 4 * step); }
    LLMRUN_INLINE static Int both(Int a, Int b) { return _mm512_and_si512(a, b); }
    LLMRUN_INLINE static Int either(Int a, Int b) { return _mm512_or_si512(a, b); }
    LLMRUN_INLINE static Int differ(Int a, Int b) { return _mm512_xor_si512(a, b); }
    template <int Bits>
    LLMRUN_INLINE static Int right(Int x) { return _mm512_srli_epi32(x, Bits); }
    template <int Bits>
    LLMRUN_INLINE static Int right_signed(Int x) { return _mm512_srai_epi32(x, Bits); }
    template <int Bits>
    LLMRUN_INLINE static Int left(Int x) { return _mm512_slli_epi32(x, Bits); }
    LLMRUN_INLINE static Int lookup(const int8_t* values, Int indices) {
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(values))), indices);
    }
    LLMRUN_INLINE static Float no_floats() { return _mm512_setzero_ps(); }
    LLMRUN_INLINE static Float every_float(float x) { return _mm512_set1_ps(x); }
    LLMRUN_INLINE static Float every_float_of(const float* p) { return _mm512_set1_ps(*p); }
    LLMRUN_INLINE static Float load_floats(const float* p) { return _mm512_loadu_ps(p); }
    LLMRUN_INLINE static void store_floats(float* p, Float x) { _mm512_storeu_ps(p, x); }
    LLMRUN_INLINE static void keep(Float& x) { __asm__("" : "+v"(x)); }
    LLMRUN_INLINE static Float to_floats(Int x) { return _mm512_cvtepi32_ps(x); }
    LLMRUN_INLINE static Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
    LLMRUN_INLINE static Float minus(Float a, Float b) { return _mm512_sub_ps(a, b); }
    LLMRUN_INLINE static Float add_product(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    LLMRUN_INLINE static Float halves(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    // of numbers that are the upper halves of floats
    LLMRUN_INLINE static Float upper_halves(const uint16_t* p) {
        return _mm512_castsi512_ps(left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
    }
    // of the lower 16 bits
    LLMRUN_INLINE static Float half(Int x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
    // 16 bytes of each of 16 rows -> 4 vectors with 4 bytes of each
    LLMRUN_INLINE static void transpose(const uint8_t* rows, int64_t stride, Int* out) {
        Int x[4];
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            const uint8_t* row = rows + i * stride;
            x[i] = _mm512_castsi128_si512(load_16(row));
            x[i] = _mm512_inserti32x4(x[i], load_16(row + 4 * stride), 1);
            x[i] = _mm512_inserti32x4(x[i], load_16(row + 8 * stride), 2);
            x[i] = _mm512_inserti32x4(x[i], load_16(row + 12 * stride), 3);
        }
        const Int a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
        const Int c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
        out[0] = _mm512_unpacklo_epi64(a, c);
        out[1] = _mm512_unpackhi_epi64(a, c);
        out[2] = _mm512_unpacklo_epi64(b, d);
        out[3] = _mm512_unpackhi_epi64(b, d);
    }
    LLMRUN_INLINE static Int load_any(const void* p) { return _mm512_loadu_si512(p); }
    LLMRUN_INLINE static Int plus(Int a, Int b) { return _mm512_add_epi32(a, b); }
    // 32 bytes, for two blocks
    LLMRUN_INLINE static Int twice(const uint8_t* p) { return _mm512_broadcast_i64x4(load_32(p)); }
    // 16 bytes of each of four blocks
    template <int Bytes>
    LLMRUN_INLINE static Int sixteens(const uint8_t* p) {
        const Int first = _mm512_inserti32x4(_mm512_castsi128_si512(load_16(p)), load_16(p + Bytes), 1);
        return _mm512_inserti32x4(_mm512_inserti32x4(first, load_16(p + 2 * Bytes), 2), load_16(p + 3 * Bytes), 3);
    }
    // the 32 nibbles of 16 bytes at each place, the lower ones first
    LLMRUN_INLINE static Int nibbles(const uint8_t* p, const uint8_t* q) {
        const Int bytes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_broadcastsi128_si256(load_16(p))), _mm256_broadcastsi128_si256(load_16(q)), 1);
        return both(_mm512_srlv_epi64(bytes, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), every(0x0f0f0f0f));
    }
    // 16 of 32 bits of each of four blocks as fifth bits
    template <int Bytes>
    LLMRUN_INLINE static Int fifths(const uint8_t* p, int half) {
        uint64_t bits = 0;
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            bits |= static_cast<uint64_t>(half_at(p + i * Bytes + 2 * half)) << 16 * i;
        }
        return _mm512_maskz_set1_epi8(bits, 16);
    }
    // block number `first` and the next one, shifted right by so many times their numbers
    template <int Bits>
    LLMRUN_INLINE static Int shift_blocks(Int x, int first) {
        const int64_t a = Bits * first, b = a + Bits;
        return _mm512_srlv_epi64(x, _mm512_setr_epi64(a, a, a, a, b, b, b, b));
    }
    template <int Stride>
    LLMRUN_INLINE static Float halves_at(const uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(eight_halves<Stride>(p)), eight_halves<Stride>(p + 8 * Stride), 1));
    }
    LLMRUN_INLINE static Int less(Int a, Int b) { return _mm512_sub_epi32(a, b); }
    // 8 numbers for first and 8 for second halves
    LLMRUN_INLINE static Int factors(Eight a, Eight b) { return _mm512_broadcast_i64x4(_mm256_set_m128i(b, a)); }
    // 16 signed bytes: those of even and of odd places
    LLMRUN_INLINE static Int signed_pairs(const uint8_t* p) {
        const Eight x = load_eight(p);
        return factors(_mm_srai_epi16(_mm_slli_epi16(x, 8), 8), _mm_srai_epi16(x, 8));
    }
    // those of the i-th vector, which has two blocks, in each 16 bits
    LLMRUN_INLINE static Int factors_of(Int x, int i) {
        const int64_t first = 0x0100010001000100 + 0x0202020202020202 * 2 * i, second = first + 0x0202020202020202;
        return _mm512_shuffle_epi8(x, _mm512_setr_epi64(first, first, first, first, second, second, second, second));
    }
    // four numbers with the same sum
    LLMRUN_INLINE static __m128i fours(Int x) {
        const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
        return _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    }
    // the sums of four times four numbers in each of 4 vectors
    LLMRUN_INLINE static Int sum_fours(const Int* x) {
        const Int a = plus(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
        const Int b = plus(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
        return plus(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    // from lanes that have numbers 0, 4, 8, 12 and 1, 5, 9, 13 and so on
    LLMRUN_INLINE static Int in_order(Int x) {
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
    }
    LLMRUN_INLINE static void transpose_floats(Float* x) {
        Float y[16];
        LLMRUN_UNROLL for (int i = 0; i < 16; i += 4) {
            const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
            const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
            y[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
            y[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
            y[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
            y[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
        }
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            const Float a = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x88), b = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd);
            const Float c = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x88), d = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xdd);
            x[i] = _mm512_shuffle_f32x4(a, c, 0x88);
            x[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
            x[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
            x[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
        }
    }
    // the sum of 16 numbers of each of 4 rows
    LLMRUN_INLINE static void add_up(const Float (*x)[1], float* out) {
        const Float a = _mm512_add_ps(_mm512_unpacklo_ps(x[0][0], x[1][0]), _mm512_unpackhi_ps(x[0][0], x[1][0]));
        const Float b = _mm512_add_ps(_mm512_unpacklo_ps(x[2][0], x[3][0]), _mm512_unpackhi_ps(x[2][0], x[3][0]));
        const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
        const Float fours = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
        const __m256 eights = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(eights), _mm256_extractf128_ps(eights, 1)));
    }
    // the largest magnitude of 32
    LLMRUN_INLINE static float largest(const float* values) {
        return _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(load_floats(values)), _mm512_abs_ps(load_floats(values + 16))));
    }
    LLMRUN_INLINE static void quantize(const float* values, float factor, char* bytes, int* sums) {
        const Float every = every_float(factor);
        const __m128i x = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(times(load_floats(values), every)));
        const __m128i y = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(times(load_floats(values + 16), every)));
        store_quantized(x, y, bytes, sums);
    }
};

// What the instruction sets with 256 bits have in common: the base of their `Isa`.

struct Avx2 {
    static constexpr int lanes = 8;
    using Int = __m256i;
    using Float = __m256;

    LLMRUN_INLINE static Int load(const void* p) { return _mm256_load_si256(static_cast<const Int*>(p)); }
    LLMRUN_INLINE static void store(void* p, Int x) { _mm256_store_si256(static_cast<Int*>(p), x); }
    LLMRUN_INLINE static Int none() { return _mm256_setzero_si256(); }
    LLMRUN_INLINE static Int every(int x) { return _mm256_set1_epi32(x); }
    LLMRUN_INLINE static Int every_of(const void* p) {
        int x;
        __builtin_memcpy(&x, p, sizeof x);
        return _mm256_set1_epi32(x);
    }
    // 4 activations
    LLMRUN_INLINE static Int step_of(const char* activations, int step) { return every_of(activations + 4 * step); }
    LLMRUN_INLINE static Int both(Int a, Int b) { return _mm256_and_si256(a, b); }
    LLMRUN_INLINE static Int either(Int a, Int b) { return _mm256_or_si256(a, b); }
    LLMRUN_INLINE static Int differ(Int a, Int b) { return _mm256_xor_si256(a, b); }
    template <int Bits>
    LLMRUN_INLINE static Int right(Int x) { return _mm256_srli_epi32(x, Bits); }
    template <int Bits>
    LLMRUN_INLINE static Int right_signed(Int x) { return _mm256_srai_epi32(x, Bits); }
    template <int Bits>
    LLMRUN_INLINE static Int left(Int x) { return _mm256_slli_epi32(x, Bits); }
    LLMRUN_INLINE static Int lookup(const int8_t* values, Int indices) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(values))), indices);
    }
    LLMRUN_INLINE static Float no_floats() { return _mm256_setzero_ps(); }
    LLMRUN_INLINE static Float every_float(float x) { return _mm256_set1_ps(x); }
    LLMRUN_INLINE static Float every_float_of(const float* p) { return _mm256_broadcast_ss(p); }
    LLMRUN_INLINE static Float load_floats(const float* p) { return _mm256_loadu_ps(p); }
    LLMRUN_INLINE static void store_floats(float* p, Float x) { _mm256_storeu_ps(p, x); }
    LLMRUN_INLINE static void keep(Float& x) { __asm__("" : "+v"(x)); }
    LLMRUN_INLINE static Float to_floats(Int x) { return _mm256_cvtepi32_ps(x); }
    LLMRUN_INLINE static Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
    LLMRUN_INLINE static Float minus(Float a, Float b) { return _mm256_sub_ps(a, b); }
    LLMRUN_INLINE static Float add_product(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    LLMRUN_INLINE static Float halves(const uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    // of numbers that are the upper halves of floats
    LLMRUN_INLINE static Float upper_halves(const uint16_t* p) {
        return _mm256_castsi256_ps(left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
    }
    // of the lower 16 bits
    LLMRUN_INLINE static Float half(Int x) {
        const Int lower = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
        return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(lower), _mm256_extracti128_si256(lower, 1)));
    }
    // 16 bytes of each of 8 rows -> 4 vectors with 4 bytes of each
    LLMRUN_INLINE static void transpose(const uint8_t* rows, int64_t stride, Int* out) {
        Int x[4];
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            const uint8_t* row = rows + i * stride;
            x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(row)), load_16(row + 4 * stride), 1);
        }
        const Int a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
        const Int c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
        out[0] = _mm256_unpacklo_epi64(a, c);
        out[1] = _mm256_unpackhi_epi64(a, c);
        out[2] = _mm256_unpacklo_epi64(b, d);
        out[3] = _mm256_unpackhi_epi64(b, d);
    }
    LLMRUN_INLINE static Int load_any(const void* p) { return _mm256_loadu_si256(static_cast<const Int*>(p)); }
    LLMRUN_INLINE static Int plus(Int a, Int b) { return _mm256_add_epi32(a, b); }
    // A vector holds one block: wider ones hold that of a second place too.
    LLMRUN_INLINE static Int twice(const uint8_t* p) { return load_32(p); }
    // 16 bytes of each of two blocks
    template <int Bytes>
    LLMRUN_INLINE static Int sixteens(const uint8_t* p) { return _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(p)), load_16(p + Bytes), 1); }
    // the 32 nibbles of 16 bytes, the lower ones first
    LLMRUN_INLINE static Int nibbles(const uint8_t* p, const uint8_t*) {
        const Int bytes = _mm256_broadcastsi128_si256(load_16(p));
        return both(_mm256_srlv_epi64(bytes, _mm256_setr_epi64x(0, 0, 4, 4)), every(0x0f0f0f0f));
    }
    // 16 of 32 bits of each of two blocks as fifth bits
    template <int Bytes>
    LLMRUN_INLINE static Int fifths(const uint8_t* p, int half) {
        const Int bits = _mm256_set_m128i(_mm256_castsi256_si128(every_of(p + Bytes)), _mm256_castsi256_si128(every_of(p)));
        const Int place = _mm256_set1_epi8(static_cast<char>(2 * half));
        const Int places = plus(place, _mm256_setr_epi64x(0, 0x0101010101010101, 0, 0x0101010101010101));
        const Int bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201)), found = both(_mm256_shuffle_epi8(bits, places), bit);
        return both(_mm256_cmpeq_epi8(found, bit), every(0x10101010));
    }
    // block number `first`, shifted right by so many times its number
    template <int Bits>
    LLMRUN_INLINE static Int shift_blocks(Int x, int first) { return _mm256_srlv_epi64(x, _mm256_set1_epi64x(Bits * first)); }
    template <int Stride>
    LLMRUN_INLINE static Float halves_at(const uint8_t* p) { return _mm256_cvtph_ps(eight_halves<Stride>(p)); }
    LLMRUN_INLINE static Int less(Int a, Int b) { return _mm256_sub_epi32(a, b); }
    LLMRUN_INLINE static Int add_pairs(Int sums, Int a, Int b) { return plus(sums, _mm256_madd_epi16(a, b)); }
    // 8 numbers for first and 8 for second halves
    LLMRUN_INLINE static Int factors(Eight a, Eight b) { return _mm256_set_m128i(b, a); }
    // 16 signed bytes: those of even and of odd places
    LLMRUN_INLINE static Int signed_pairs(const uint8_t* p) {
        const Eight x = load_eight(p);
        return factors(_mm_srai_epi16(_mm_slli_epi16(x, 8), 8), _mm_srai_epi16(x, 8));
    }
    // those of the i-th vector, in each 16 bits
    LLMRUN_INLINE static Int factors_of(Int x, int i) { return _mm256_shuffle_epi8(x, _mm256_set1_epi16(static_cast<int16_t>(0x0100 + 0x0202 * i))); }
    // four numbers with the same sum
    LLMRUN_INLINE static __m128i fours(Int x) { return _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
    // the sums of two times four numbers in each of 4 vectors
    LLMRUN_INLINE static Int sum_fours(const Int* x) {
        const Int a = plus(_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[0], x[1]));
        const Int b = plus(_mm256_unpacklo_epi32(x[2], x[3]), _mm256_unpackhi_epi32(x[2], x[3]));
        return plus(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    // from lanes that have numbers 0, 2, 4, 6 and 1, 3, 5, 7
    LLMRUN_INLINE static Int in_order(Int x) { return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }
    LLMRUN_INLINE static void transpose_floats(Float* x) {
        Float y[8];
        LLMRUN_UNROLL for (int i = 0; i < 8; i += 4) {
            const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[i], x[i + 1])), b = _mm256_castps_pd(_mm256_unpackhi_ps(x[i], x[i + 1]));
            const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x[i + 2], x[i + 3])), d = _mm256_castps_pd(_mm256_unpackhi_ps(x[i + 2], x[i + 3]));
            y[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
            y[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
            y[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
            y[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
        }
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            x[i] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x20);
            x[i + 4] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x31);
        }
    }
    // the sum of 16 numbers of each of 2 rows
    LLMRUN_INLINE static void add_up(const Float (*x)[2], float* out) {
        const __m256d a = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(x[0][0], x[1][0]), _mm256_unpackhi_ps(x[0][0], x[1][0])));
        const __m256d b = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(x[0][1], x[1][1]), _mm256_unpackhi_ps(x[0][1], x[1][1])));
        const Float fours = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
        const __m128 low = _mm256_castps256_ps128(fours), high = _mm256_extractf128_ps(fours, 1);
        _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(low, _mm_movehl_ps(low, low)), _mm_add_ps(high, _mm_movehl_ps(high, high))));
    }
    // the largest magnitude of 32
    LLMRUN_INLINE static float largest(const float* values) {
        const Float sign = _mm256_set1_ps(-0.0f);
        Float most = no_floats();
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            most = _mm256_max_ps(most, _mm256_andnot_ps(sign, load_floats(values + 8 * i)));
        }
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    LLMRUN_INLINE static void quantize(const float* values, float factor, char* bytes, int* sums) {
        __m128i halves[4];
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            const Int whole = _mm256_cvtps_epi32(times(load_floats(values + 8 * i), every_float(factor)));
            halves[i] = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        }
        store_quantized(_mm_packs_epi16(halves[0], halves[1]), _mm_packs_epi16(halves[2], halves[3]), bytes, sums);
    }
};

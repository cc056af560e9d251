// Products of few columns, for which reading the weights takes the time: they are read as they lie in memory, a number of rows
// at a time. First each block's integer product (of 32 weights, times its scale); then, transposed, what multiply_tile() or
// multiply_supertile() adds up, in its order: an element is the same among few and among many.

constexpr int64_t few_columns = 4;  // the most: above, tiles are faster
constexpr int64_t bytes_ahead = 8 << 10;  // that are fetched before they are read: processors stop foreseeing at the end of a page

LLMRUN_INLINE int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

LLMRUN_INLINE void fetch_ahead(const uint8_t* weights, int64_t bytes) {
    LLMRUN_UNROLL for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(weights + bytes_ahead + i, 0, 2);
    }
}

// A packed column: bytes, sums of blocks of 256 by vectors, scales, corrections of blocks of 32. The latter have their bytes as Run
// reads them. Behind the last one it begins again, until a group ends with a row, and as far as a run may reach from there.
template <class T>
struct Line {
    static constexpr int64_t vector = has_factors<T> ? int64_t{sizeof(Int)} : 0;
    int64_t blocks;
    char* bytes;

    static int64_t period_of(int64_t depth) {
        int64_t blocks = depth / T::block;
        while (!has_factors<T> && blocks % blocks_of_group) {
            blocks += depth / T::block;
        }
        return blocks;
    }
    static int64_t blocks_of(int64_t depth) { return period_of(depth) + (has_factors<T> ? 0 : Isa::lanes); }
    static int64_t size(int64_t depth) { return padded(blocks_of(depth) * (T::block + vector + 4 + 4)); }

    Line() = default;
    Line(const char* packed, int64_t depth, int64_t column)
        : blocks(blocks_of(depth)), bytes(const_cast<char*>(packed) + column * size(depth)) {}

    char* sums() const { return bytes + T::block * blocks; }  // of both halves, or of blocks of 32: 16 bytes, and of second halves 16
    float* scales() const { return reinterpret_cast<float*>(sums() + vector * blocks); }
    float* corrections() const { return scales() + blocks; }
};

template <class T, int Count>
LLMRUN_INLINE void find_lines(const Product& product, Line<T> (&lines)[Count]) {
    for (int64_t column = 0; column < Count; ++column) {
        lines[column] = Line<T>(product.packed, product.depth, column);
    }
}

// Writes the sums of a vector's rows, of which there are `count`, for each column.
LLMRUN_INLINE void write_rows(const Product& product, const Float* sums, int64_t row, int64_t count) {
    for (int64_t column = 0; column < product.columns; ++column) {
        float all[Isa::lanes];
        Isa::store_floats(all, sums[column]);
        __builtin_memcpy(product.results.at(column) + row, all, static_cast<size_t>(count) * sizeof(float));
    }
}

// Not a part of its caller: GCC 12 makes one counter of the places in a loop, and loses what is written there.
template <class T>
__attribute__((noinline)) void pack_block(const float* values, const Line<T>& line, int64_t block) {
    const Rounding<T> rounding(values);
    int sums[T::block / 32][2];
    line.scales()[block] = rounding.scale;
    if constexpr (has_factors<T>) {
        for (int i = 0; i < 8; ++i) {
            Isa::quantize(values + 32 * i, rounding.factor, line.bytes + 256 * block + 32 * i, sums[i]);
        }
        int16_t halves[Line<T>::vector / 2] = {};
        for (int i = 0; i < 8; ++i) {
            halves[i] = first_sum<T>(sums[i]);
            halves[8 + i] = static_cast<int16_t>(T::parts == 1 ? 0 : sums[i][1]);
        }
        __builtin_memcpy(line.sums() + Line<T>::vector * block, halves, sizeof halves);
    } else {
        char bytes[32];
        Isa::quantize(values, rounding.factor, bytes, sums[0]);
        char* half = line.bytes + block / blocks_of_group * blocks_of_group * 32 + block % blocks_of_group * 16;
        __builtin_memcpy(half, bytes, 16);
        __builtin_memcpy(half + blocks_of_group * 16, bytes + 16, 16);
        rounding.correct(sums[0], line.corrections() + block);
    }
}

template <class T>
void pack_few(const Columns& from, int64_t depth, char* packed, int64_t first, int64_t last) {
    const int64_t blocks = Line<T>::blocks_of(depth);
    for (int64_t record = first; record < last; ++record) {
        const int64_t column = record / blocks, i = record % blocks;
        pack_block<T>(from.at(column) + i % (depth / T::block) * T::block, Line<T>(packed, depth, column), i);
    }
}

// The scratch of multiply_few(): for each row of a vector, its blocks' products with each column, and minima.
template <class T>
struct Terms {
    int64_t stride;
    float* first;

    static int64_t stride_of(int64_t depth) { return Isa::lanes * (depth / 32 + 1); }
    static int64_t size(int64_t depth, int64_t columns) {
        return padded((columns + T::minima) * stride_of(depth) * int64_t{sizeof(float)});
    }

    Terms(char* scratch, int64_t depth) : stride(stride_of(depth)), first(reinterpret_cast<float*>(scratch)) {}

    float* minima() const { return first; }
    float* products(int64_t column) const { return first + (T::minima + column) * stride; }
};

template <class T>
constexpr int64_t run_bytes = Isa::lanes * T::bytes;

template <class T, int Count>
LLMRUN_INLINE void multiply_run(const Unpacked& weights, const Line<T>* lines, int64_t block, const Terms<T>& terms, int64_t at) {
    constexpr bool is_signed = has_signed_bytes<T>;
    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
        Int dots[4];
        LLMRUN_UNROLL for (int group = 0; group < 4; ++group) {
            const char* activations = lines[c].bytes + 32 * (block + group * blocks_of_group);
            const Int first = Isa::load_any(activations), second = Isa::load_any(activations + sizeof(Int));
            Int products = Isa::template dot<is_signed>(Isa::begin(Isa::none()), weights.bytes[2 * group], first);
            if (steps_at_once<T> == 1) {
                const Int sums = Isa::end(Isa::none(), products);
                products = Isa::template dot<is_signed>(Isa::begin(sums), weights.bytes[2 * group + 1], second);
                dots[group] = Isa::end(sums, products);
            } else {
                dots[group] = Isa::end(Isa::none(), Isa::template dot<is_signed>(products, weights.bytes[2 * group + 1], second));
            }
        }
        Int sums = Isa::in_order(Isa::sum_fours(dots));
        if (offset_of<T>) {
            sums = Isa::plus(sums, Isa::load_any(lines[c].corrections() + block));
        }
        Isa::store_floats(terms.products(c) + at, Isa::times(Isa::to_floats(sums), weights.scale));
    }
}

// The same blocks of a vector's rows, a row in each lane.
LLMRUN_INLINE void read_terms(const float* from, int64_t blocks, Float* to) {
    LLMRUN_UNROLL for (int i = 0; i < Isa::lanes; ++i) {
        to[i] = Isa::load_floats(from + i * blocks);
    }
    Isa::transpose_floats(to);
}

// Adds what one column has in `count` blocks.
template <class T, int Count>
LLMRUN_INLINE Float add_blocks(Float sum, const float* products, int64_t blocks, const Float* minima, const float* scales,
                               const float* totals, int64_t count = Count) {
    Float terms[Isa::lanes];
    read_terms(products, blocks, terms);
    LLMRUN_UNROLL for (int i = 0; i < Count; ++i) {
        if (i < count) {
            sum = Isa::add_product(terms[i], Isa::every_float_of(scales + i), sum);
            if (T::minima) {
                sum = Isa::add_product(minima[i], Isa::every_float_of(totals + i), sum);
            }
        }
    }
    return sum;
}

// Adds up a vector's rows.
template <class T>
void add_terms(const Terms<T>& terms, const Line<T>* lines, const Product& product, int64_t row, int64_t count) {
    const int64_t blocks = product.depth / 32;
    Float sums[few_columns], minima[Isa::lanes];
    for (int64_t column = 0; column < product.columns; ++column) {
        sums[column] = Isa::no_floats();
    }
    for (int64_t begin = 0; begin < blocks; begin += Isa::lanes) {
        if (T::minima) {
            read_terms(terms.minima() + begin, blocks, minima);
        }
        for (int64_t column = 0; column < product.columns; ++column) {
            const float *products = terms.products(column) + begin, *scales = lines[column].scales() + begin;
            const float* totals = lines[column].corrections() + begin;
            if (blocks - begin >= Isa::lanes) {
                sums[column] = add_blocks<T, Isa::lanes>(sums[column], products, blocks, minima, scales, totals);
            } else {
                sums[column] = add_blocks<T, Isa::lanes>(sums[column], products, blocks, minima, scales, totals, blocks - begin);
            }
        }
    }
    write_rows(product, sums, row, count);
}

template <class T, int Count>
void multiply_few(const Product& product, int64_t first, int64_t last, char* scratch) {
    const Terms<T> terms(scratch, product.depth);
    char* spare = scratch + Terms<T>::size(product.depth, Count);
    const int64_t period = Line<T>::period_of(product.depth);
    Line<T> lines[Count];
    find_lines(product, lines);
    for (int64_t row = first; row < last; row += Isa::lanes) {
        const int64_t count = last - row < Isa::lanes ? last - row : Isa::lanes, bytes = count * product.row_bytes;
        const uint8_t* weights = product.weights + row * product.row_bytes;
        int64_t block = 0;
        for (int64_t at = 0, done = 0; done < bytes; at += Isa::lanes, done += run_bytes<T>) {
            Run run{weights + done};
            if (bytes - done < run_bytes<T>) {
                __builtin_memset(spare, 0, run_bytes<T>);
                __builtin_memcpy(spare, run.first, static_cast<size_t>(bytes - done));
                run.first = reinterpret_cast<const uint8_t*>(spare);
            }
            fetch_ahead(weights + done, run_bytes<T>);
            Unpacked unpacked;
            T::unpack(run, unpacked);
            if constexpr (T::minima) {
                Isa::store_floats(terms.minima() + at, unpacked.minimum);
            }
            multiply_run<T, Count>(unpacked, lines, block, terms, at);
            for (block += Isa::lanes; block >= period;) {
                block -= period;
            }
        }
        add_terms<T>(terms, lines, product, row, count);
    }
}

// The scratch of multiply_few_superblocks(): for each block of 256, the halves of its scale and minimum in every row, and four
// numbers of every row, which make its sum, of each column; then those of the minimum's shares.
template <class T>
struct Fours {
    static constexpr int64_t all = Isa::lanes * 16;  // bytes of every row's four
    static constexpr int64_t heads = Isa::lanes * 4;
    int64_t columns;
    char* first;

    static int64_t block_bytes(int64_t columns) { return heads + columns * all * (1 + T::minima); }
    static int64_t size(int64_t depth, int64_t columns) { return padded(depth / 256 * block_bytes(columns)); }

    char* head(int64_t block) const { return first + block * block_bytes(columns); }
    char* sums(int64_t block, int64_t column) const { return head(block) + heads + column * all; }
    char* shares(int64_t block, int64_t column) const { return sums(block, columns + column); }

    // Where a row's four are, so that Isa::sum_fours() gives the rows in their order.
    static int64_t place(int64_t row) { return (row % 4 * (Isa::lanes / 4) + row / 4) * 16; }
};

template <class T, int Count>
LLMRUN_INLINE void multiply_superblock(const Superblock& weights, const Line<T>* lines, int64_t block, const Fours<T>& fours, int64_t place) {
    constexpr bool is_signed = has_signed_bytes<T>;
    Int whole[Count];
    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
        whole[c] = Isa::none();
    }
    LLMRUN_UNROLL for (int i = 0; i < 8 / blocks_of_vector; ++i) {
        const Int factors = Isa::factors_of(weights.factors, i);
        LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
            const Int activations = Isa::load_any(lines[c].bytes + 256 * block + i * int64_t{sizeof(Int)});
            whole[c] = Isa::template add_with<is_signed, (T::maximum < 64)>(whole[c], weights.bytes[i], activations, factors);
        }
    }
    LLMRUN_UNROLL for (int c = 0; c < Count; ++c) {
        const char* sums = lines[c].sums() + Line<T>::vector * block;
        if constexpr (T::minima) {
            store_four(fours.shares(block, c) + place, products_of_pairs(weights.shares, load_eight(sums)));
        } else if constexpr (offset_of<T>) {
            whole[c] = without_offset<T>(whole[c], Isa::add_pairs(Isa::none(), weights.factors, Isa::load_any(sums)));
        }
        store_four(fours.sums(block, c) + place, Isa::fours(whole[c]));
    }
}

LLMRUN_INLINE Int sum_of_rows(const char* fours) {
    Int x[4];
    LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
        x[i] = Isa::load_any(fours + i * int64_t{sizeof(Int)});
    }
    return Isa::sum_fours(x);
}

// Adds up a vector's rows.
template <class T>
void add_fours(const Fours<T>& fours, const Line<T>* lines, const Product& product, int64_t row, int64_t count) {
    Float sums[few_columns];
    for (int64_t column = 0; column < product.columns; ++column) {
        sums[column] = Isa::no_floats();
    }
    for (int64_t block = 0; block < product.depth / 256; ++block) {
        const Int head = Isa::load_any(fours.head(block));
        const Float scale = Isa::half(head), minimum = Isa::minus(Isa::no_floats(), Isa::half(Isa::template right<16>(head)));
        for (int64_t column = 0; column < product.columns; ++column) {
            const Int whole = sum_of_rows(fours.sums(block, column));
            const Int shares = T::minima ? sum_of_rows(fours.shares(block, column)) : Isa::none();
            const Float activations = Isa::every_float_of(lines[column].scales() + block);
            sums[column] = add_superblock<T>(sums[column], whole, scale, shares, minimum, activations);
        }
    }
    write_rows(product, sums, row, count);
}

template <class T, int Count>
void multiply_few_superblocks(const Product& product, int64_t first, int64_t last, char* scratch) {
    const Fours<T> fours{Count, scratch};
    Line<T> lines[Count];
    find_lines(product, lines);
    for (int64_t row = first; row < last; row += Isa::lanes) {
        const int64_t count = last - row < Isa::lanes ? last - row : Isa::lanes;
        const uint8_t* weights = product.weights + row * product.row_bytes;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t place = Fours<T>::place(i);
            for (int64_t block = 0; block < product.depth / 256; ++block, weights += T::bytes) {
                fetch_ahead(weights, T::bytes);
                Superblock unpacked;
                T::unpack(weights, unpacked);
                __builtin_memcpy(fours.head(block) + 4 * i, weights + T::scale_at, T::minima ? 4 : 2);
                multiply_superblock<T, Count>(unpacked, lines, block, fours, place);
            }
        }
        add_fours<T>(fours, lines, product, row, count);
    }
}

template <class T>
int64_t few_scratch_bytes(int64_t depth, int64_t columns) {
    return has_factors<T> ? Fours<T>::size(depth, columns) : Terms<T>::size(depth, columns) + padded(run_bytes<T>);
}

template <class T, int Count = few_columns>
void multiply_few_of(const Product& product, int64_t first, int64_t last, char* scratch) {
    if (product.columns == Count) {
        if constexpr (has_factors<T>) {
            multiply_few_superblocks<T, Count>(product, first, last, scratch);
        } else {
            multiply_few<T, Count>(product, first, last, scratch);
        }
    } else if constexpr (Count > 1) {
        multiply_few_of<T, Count - 1>(product, first, last, scratch);
    }
}

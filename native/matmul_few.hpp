// Products of few columns, for which reading the weights takes the time: they are read as they lie in memory, a number of rows
// at a time. First each 32 weights' integer product, times its scale; then, transposed, what multiply_tile() adds up, in its order:
// an element is the same among few and among many.

constexpr int64_t few_columns = 4;  // the most: above, tiles are faster
constexpr int64_t bytes_ahead = 8 << 10;  // that are fetched before they are read: processors stop foreseeing at the end of a page

LLMRUN_INLINE int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// A packed column. Behind its last block it begins again, since a vector may hold the end of a row and the beginning of the next.
template <class T>
struct Line {
    int64_t blocks;
    char* bytes;

    static int64_t size(int64_t depth) { return padded((depth / 32 + Isa::lanes) * share<T>); }

    Line() = default;
    Line(const char* packed, int64_t depth, int64_t column)
        : blocks(depth / 32 + Isa::lanes), bytes(const_cast<char*>(packed) + column * size(depth)) {}

    float* scales() const { return reinterpret_cast<float*>(bytes + 32 * blocks); }
    float* corrections() const { return scales() + blocks; }
};

template <class T>
int64_t records_of_line(int64_t depth) {
    return (depth / 32 + Isa::lanes) / (T::block / 32);
}

// Not a part of its caller: GCC 12 makes one counter of the places in a loop, and loses what is written there.
template <class T>
__attribute__((noinline)) void pack_block(const Rounding<T>& rounding, const float* values, const Line<T>& line, int64_t block) {
    int sums[2];
    Isa::quantize(values, rounding.factor, line.bytes + 32 * block, sums);
    line.scales()[block] = rounding.scale;
    rounding.correct(sums, line.corrections() + block, line.blocks);
}

template <class T>
void pack_few(const Columns& from, int64_t depth, char* packed, int64_t first, int64_t last) {
    constexpr int parts = T::block / 32;
    for (int64_t record = first; record < last; ++record) {
        const int64_t column = record / records_of_line<T>(depth), i = record % records_of_line<T>(depth);
        const Line<T> line(packed, depth, column);
        const float* values = from.at(column) + i % (depth / T::block) * T::block;
        const Rounding<T> rounding(values);
        for (int part = 0; part < parts; ++part) {
            pack_block<T>(rounding, values + 32 * part, line, i * parts + part);
        }
    }
}

// The scratch of multiply_few(): for each row of a vector, its blocks' products with each column, and minima.
template <class T>
struct Terms {
    int64_t stride;
    float* first;

    static int64_t stride_of(int64_t depth) { return Isa::lanes * (depth / 32 + 1); }
    static int64_t size(int64_t depth, int64_t columns) {
        return padded((columns * T::parts + T::minima) * stride_of(depth) * int64_t{sizeof(float)});
    }

    Terms(char* scratch, int64_t depth) : stride(stride_of(depth)), first(reinterpret_cast<float*>(scratch)) {}

    float* minima() const { return first; }
    float* products(int64_t column) const { return first + (T::minima + column * T::parts) * stride; }
};

template <class T>
constexpr int64_t run_bytes = Isa::lanes / (T::block / 32) * T::bytes;

template <class T>
int64_t few_scratch_bytes(int64_t depth, int64_t columns) {
    return Terms<T>::size(depth, columns) + padded(run_bytes<T>);
}

template <class T>
LLMRUN_INLINE void multiply_run(const Unpacked<T::parts>& weights, const Line<T>& line, int64_t block, float* products, int64_t stride) {
    constexpr bool is_signed = has_signed_bytes<T>;
    const char* activations = line.bytes + 32 * block;
    Int dots[8], sums[2];
    LLMRUN_UNROLL for (int i = 0; i < 8; ++i) {
        const Int some = Isa::load_any(activations + 32 * i * blocks_of_vector);
        dots[i] = Isa::end<is_signed>(Isa::none(), Isa::dot<is_signed>(Isa::begin<is_signed>(Isa::none()), weights.bytes[i], some));
    }
    Isa::sums_of_halves(dots, sums);
    if (T::parts == 1) {
        sums[0] = Isa::plus(sums[0], sums[1]);
    }
    LLMRUN_UNROLL for (int part = 0; part < T::parts; ++part) {
        if (offset_of<T>) {
            sums[part] = Isa::plus(sums[part], Isa::load_any(line.corrections() + part * line.blocks + block));
        }
        Isa::store_floats(products + part * stride, Isa::times(Isa::to_floats(sums[part]), weights.scale[part]));
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
LLMRUN_INLINE Float add_blocks(Float sum, const float* products, int64_t stride, int64_t blocks, const Float* minima, const float* scales,
                               const float* totals, int64_t count = Count) {
    Float first[Isa::lanes], second[Isa::lanes];
    read_terms(products, blocks, first);
    if (T::parts == 2) {
        read_terms(products + stride, blocks, second);
    }
    LLMRUN_UNROLL for (int i = 0; i < Count; ++i) {
        if (i < count) {
            const Float scale = Isa::every_float_of(scales + i);
            sum = Isa::add_product(first[i], scale, sum);
            if (T::parts == 2) {
                sum = Isa::add_product(second[i], scale, sum);
            }
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
                sums[column] = add_blocks<T, Isa::lanes>(sums[column], products, terms.stride, blocks, minima, scales, totals);
            } else {
                sums[column] = add_blocks<T, Isa::lanes>(sums[column], products, terms.stride, blocks, minima, scales, totals, blocks - begin);
            }
        }
    }
    for (int64_t column = 0; column < product.columns; ++column) {
        float all[Isa::lanes];
        Isa::store_floats(all, sums[column]);
        __builtin_memcpy(product.results.at(column) + row, all, static_cast<size_t>(count) * sizeof(float));
    }
}

template <class T>
void multiply_few(const Product& product, int64_t first, int64_t last, char* scratch) {
    const Terms<T> terms(scratch, product.depth);
    char* spare = scratch + Terms<T>::size(product.depth, product.columns);
    const int64_t blocks = product.depth / 32;
    Line<T> lines[few_columns];
    for (int64_t column = 0; column < product.columns; ++column) {
        lines[column] = Line<T>(product.packed, product.depth, column);
    }
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
            LLMRUN_UNROLL for (int64_t i = 0; i < run_bytes<T>; i += 64) {
                __builtin_prefetch(weights + done + bytes_ahead + i, 0, 2);
            }
            Unpacked<T::parts> unpacked;
            T::unpack(run, unpacked);
            if constexpr (T::minima) {
                Isa::store_floats(terms.minima() + at, unpacked.minimum);
            }
            for (int64_t column = 0; column < product.columns; ++column) {
                multiply_run<T>(unpacked, lines[column], block, terms.products(column) + at, terms.stride);
            }
            for (block += Isa::lanes; block >= blocks;) {
                block -= blocks;
            }
        }
        add_terms<T>(terms, lines, product, row, count);
    }
}

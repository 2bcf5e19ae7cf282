// The three matrix products of a pass, by fused multiply-adds on register tiles (kRows rows x two vectors of columns):
// similarities, weights times values, and transposed weights times values. A product type owns the layout of its
// operands, and its pack functions return whether the data has values that it cannot represent ("wild"). Turning a tile
// of similarities into weights belongs to reducer.inl.h.
// Included once per instruction set, inside its namespace and target region; includes nothing.
//
// Layouts of Fma:
//   rows     [tile][feature][row in tile]
//   panels   [panel][feature][column in panel]
//   values   [panel of features][column][feature in panel]      rows of the matrix itself could share cache sets
//   weights  [panel][tile][row in tile][column in panel]

// kCount numbers that lie next to each other, each the factor of all lanes of a vector. NEON multiplies a vector by one
// lane of another, so there they are loaded together; x86 broadcasts each from memory.
#if defined(__aarch64__)
constexpr int64_t kTogether = 2;  // columns whose weights are loaded together: as many as the registers take
template <class T, int64_t kCount>
struct Factors {
  static constexpr int64_t kPart = kCount < kLanes<T> ? kCount : kLanes<T>;
  static_assert(kCount % kPart == 0, "a part that is not full would read beyond the factors");
  typedef T Several __attribute__((vector_size(kPart * sizeof(T))));
  Several part[kCount / kPart];
  inline __attribute__((always_inline)) explicit Factors(const T* p) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < kCount / kPart; ++i) __builtin_memcpy(&part[i], p + i * kPart, sizeof(Several));
  }
  inline __attribute__((always_inline)) Vec<T> operator[](int64_t i) const { return splat(part[i / kPart][i % kPart]); }
};
#else
constexpr int64_t kTogether = 1;
template <class T, int64_t kCount>
struct Factors {
  const T* p;
  inline __attribute__((always_inline)) explicit Factors(const T* p_) : p(p_) {}
  inline __attribute__((always_inline)) Vec<T> operator[](int64_t i) const { return splat(p[i]); }
};
#endif

// A step of a product: what two lanes add to a sum. Here a lane is one number of each operand; avx512_bf16.inl.h has two.
template <class T>
struct MultiplyAdd {
  static constexpr int64_t kNumbers = 1;
  static inline __attribute__((always_inline)) Vec<T> add(Vec<T> sum, Vec<T> a, Vec<T> b) { return sum + a * b; }
};

// Calls turn(i) for i < count, four in one turn of a loop: counting takes as many instructions as two multiply-adds. By
// hand, because compilers peel off turns for the rest whose sums are not in registers.
template <class Turn>
inline __attribute__((always_inline)) void in_fours(int64_t count, const Turn& turn) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    turn(i);
    turn(i + 1);
    turn(i + 2);
    turn(i + 3);
  }
  for (; i < count; ++i) turn(i);
}

template <class T_, class Step = MultiplyAdd<T_>>
struct Fma {
  using T = T_;
  // With two vectors of columns, the largest tile that fits the registers.
  static constexpr int64_t kRows = FASTCL_TILE_ROWS;
  static constexpr int64_t kColumns = 2 * kLanes<T>;
  static constexpr int64_t kCell = kRows * kColumns;
  static constexpr int64_t kStrip = 256;
  static constexpr bool kRaw = false;            // packed operands are multiplied with their factors
  static constexpr bool kLimits = false;         // weights are multiplied as they are
  static constexpr int64_t kLeastKeptRows = 48;  // with fewer, column sums cost more memory traffic than they save
  static constexpr int64_t kKeptBytes = 32 << 20;
  using Tile = Vec<T>[kRows][2];

  static int64_t whole_panels(int64_t features) { return (features + kColumns - 1) / kColumns * kColumns; }
  static int64_t row_elements(int64_t features) { return kRows * features; }
  static int64_t panel_elements(int64_t features) { return kColumns * features; }
  static int64_t value_elements(int64_t columns, int64_t features) { return columns * whole_panels(features); }
  static int64_t column_sum_elements(int64_t features) { return kColumns * whole_panels(features); }
  static int64_t column_scratch(int64_t tiles, int64_t features) { return tiles * kRows * whole_panels(features); }

  static void begin() {}
  static void end() {}

  // Packs rows [first, first + count) as one tile, and zeros below them.
  static bool pack_rows(Matrix m, const T* factor, int64_t features, int64_t first, int64_t count, T* rows) {
    transpose_rows<T, kRows>(m, factor, features, first, count, rows);
    return false;
  }

  static bool pack_panel(Matrix m, const T* factor, int64_t features, int64_t first, int64_t count, T* panel) {
    transpose_rows<T, kColumns>(m, factor, features, first, count, panel);
    return false;
  }

  // A tile of similarities. The interface allows products that run while the core does something else: `issue` starts
  // one and calls between(done, total) meanwhile, `take` waits for its result, `read` gives a vector of that. Here
  // `take` computes everything, and `issue` only makes the one call.
  using Result = Tile;
  template <class Between>
  static inline __attribute__((always_inline)) void issue(const T*, const T*, int64_t, const Between& between) {
    between(1, 1);
  }
  static inline __attribute__((always_inline)) Vec<T> read(const Result& x, int64_t row, int side,
                                                           T /*factor: in the rows*/) {
    return x[row][side];
  }

  static inline __attribute__((always_inline)) void take(const T* rows, const T* panel, int64_t features, Result& x) {
    sum_chunks(features, x, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
      multiply_chunk(rows + d * kRows, panel + d * kColumns, count, x);
    });
  }

  // Packs rows [first, first + count) of the matrix times their factors; `extra` is one more feature. factor[0] and
  // extra[0] belong to row `first`.
  static bool pack_values(Matrix m, const T* factor, const T* extra, int64_t features, int64_t first, int64_t count,
                          int64_t stride, T* values) {
    const int64_t whole = whole_panels(features + (extra != nullptr ? 1 : 0));
    for (int64_t c = 0; c < count; ++c) {
      const T f = factor != nullptr ? factor[c] : T(1);
      with_row(m, features, first + c, [&](const auto* x) {
        int64_t d = 0;
        for (; d + kColumns <= features; d += kColumns) {
          T* v = values + d * stride + c * kColumns;
          for (int64_t i = 0; i < kColumns; ++i) v[i] = T(widen(x[d + i])) * f;
        }
        if (d == whole) return;
        T* v = values + d * stride + c * kColumns;
        for (int64_t i = 0; i < kColumns; ++i) v[i] = d + i < features ? T(widen(x[d + i])) * f : T(0);
        if (extra != nullptr) v[features - d] = extra[c];
      });
    }
    return false;
  }

  // out += weights * values over one strip of columns.
  static void accumulate(const T* weights, int64_t tiles, int64_t columns, const T* values, int64_t features,
                         const T* /*factor: in the values*/, const T* extra, const T* /*limit*/, T* out) {
    const int64_t wanted = features + (extra != nullptr ? 1 : 0), stride = whole_panels(wanted);
    for (int64_t d = 0; d < wanted; d += kColumns) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const T* w = weights + tile * kCell;
        T* to = out + tile * kRows * stride + d;
        if (wanted - d > kLanes<T>) {
          accumulate_tile<2>(w, tiles * kCell, columns, values + d * kStrip, stride, to);
        } else {
          accumulate_tile<1>(w, tiles * kCell, columns, values + d * kStrip, stride, to);
        }
      }
    }
  }

  // Values for sum_columns.
  static bool pack_column_values(Matrix m, const T* factor, const T* extra, int64_t features, int64_t first,
                                 int64_t count, int64_t tiles, T* values) {
    return pack_values(m, factor, extra, features, first, count, tiles * kRows, values);
  }

  // sums = weights^T * values over the `count` rows of a part, added to the old sums if `add`; the layout of sums is
  // [panel of features][column][feature]. Rows of padding are left out: their weights are NaN in an infinite column.
  static void sum_columns(const T* weights, int64_t count, int64_t tiles, const T* values, int64_t features,
                          const T* /*factor: in the values*/, const T* extra, bool add, T* sums) {
    const int64_t rows = tiles * kRows, wanted = features + (extra != nullptr ? 1 : 0);
    for (int64_t d = 0; d < wanted; d += kColumns) {
      for (int64_t c = 0; c < kColumns; c += kGroup) {
        T* to = sums + d * kColumns + c * kColumns;
        if (wanted - d > kLanes<T>) {
          sum_group<2>(weights + c, count, values + d * rows, add, to);
        } else {
          sum_group<1>(weights + c, count, values + d * rows, add, to);
        }
      }
    }
  }

  static void write_sums(const T* sums, int64_t columns, int64_t features, T* out, T* out_extra) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t d = 0; d < features; d += kColumns) {
        const int64_t count = features - d < kColumns ? features - d : kColumns;
        __builtin_memcpy(out + c * features + d, sums + d * kColumns + c * kColumns, count * sizeof(T));
      }
      const int64_t d = features / kColumns * kColumns;
      if (out_extra != nullptr) out_extra[c] = sums[d * kColumns + c * kColumns + features - d];
    }
  }

 protected:
  // Rows are summed in chunks: a single sum over hundreds of features would have a larger rounding error than the
  // BLAS product it replaces. multiply(d, count) sets x to the products of features [d, d + count).
  template <class Multiply>
  static inline __attribute__((always_inline)) void sum_chunks(int64_t features, Tile& x, const Multiply& multiply) {
    constexpr int64_t kChunk = 64;
    multiply(0, features < kChunk ? features : kChunk);
    for (int64_t d = kChunk; d < features; d += kChunk) {
      alignas(64) T total[kCell];
      store_tile(total, x);
      multiply(d, features - d < kChunk ? features - d : kChunk);
      const Tile& before = *reinterpret_cast<const Tile*>(total);
#pragma GCC unroll 16
      for (int64_t r = 0; r < kRows; ++r) {
        x[r][0] += before[r][0];
        x[r][1] += before[r][1];
      }
    }
  }

  // Columns whose sums are in registers together.
  static constexpr int64_t kGroup = kRows >= 12 && kColumns >= 8 ? 8 : 4;
  static constexpr int64_t kSteps = kColumns / Step::kNumbers;  // of a panel of columns

  static inline __attribute__((always_inline)) void multiply_chunk(const T* rows, const T* panel, int64_t steps,
                                                                   Tile& x) {
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) x[r][0] = x[r][1] = Vec<T>{};
    in_fours(steps, [&](int64_t step) __attribute__((always_inline)) {
      const Vec<T> k0 = load(panel + step * kColumns), k1 = load(panel + step * kColumns + kLanes<T>);
      const Factors<T, kRows> factors(rows + step * kRows);
#pragma GCC unroll 16
      for (int64_t r = 0; r < kRows; ++r) {
        const Vec<T> q = factors[r];
        x[r][0] = Step::add(x[r][0], q, k0);
        x[r][1] = Step::add(x[r][1], q, k1);
      }
    });
  }

  static inline __attribute__((always_inline)) void store_tile(T* to, const Tile& x) {
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
      store(to + r * kColumns, x[r][0]);
      store(to + r * kColumns + kLanes<T>, x[r][1]);
    }
  }

  // One tile of weights times one panel of features, of which kVectors vectors are used. `stride_of_panel` is the distance
  // between the weights of two panels of columns.
  template <int kVectors>
  static inline void accumulate_tile(const T* weights, int64_t stride_of_panel, int64_t steps, const T* values,
                                     int64_t stride, T* out) {
    Vec<T> acc[kRows][kVectors] = {};
    for (int64_t first = 0; first < steps; first += kSteps) {
      const int64_t width = steps - first < kSteps ? steps - first : kSteps;
      in_fours(width / kTogether, [&](int64_t i) __attribute__((always_inline)) {
        add_steps<kVectors, kTogether>(weights + i * kTogether, values + i * kTogether * kColumns, acc);
      });
      for (int64_t c = width / kTogether * kTogether; c < width; ++c) {
        add_steps<kVectors, 1>(weights + c, values + c * kColumns, acc);
      }
      values += width * kColumns;
      weights += stride_of_panel;
    }
    add_tile<kVectors>(acc, stride, out);
  }

  template <int kVectors>
  static inline __attribute__((always_inline)) void add_tile(const Vec<T> (&acc)[kRows][kVectors], int64_t stride,
                                                             T* out) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVectors; ++i) {
        T* to = out + r * stride + i * kLanes<T>;
        store(to, load(to) + acc[r][i]);
      }
    }
  }

  // acc += weights * values over kCount steps.
  template <int kVectors, int64_t kCount>
  static inline __attribute__((always_inline)) void add_steps(const T* weights, const T* values,
                                                              Vec<T> (&acc)[kRows][kVectors]) {
    Vec<T> value[kCount][kVectors];
#pragma GCC unroll 2
    for (int64_t c = 0; c < kCount; ++c) {
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) value[c][i] = load(values + c * kColumns + i * kLanes<T>);
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
      const Factors<T, kCount> w(weights + r * kSteps);
#pragma GCC unroll 2
      for (int64_t c = 0; c < kCount; ++c) {
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) acc[r][i] = Step::add(acc[r][i], w[c], value[c][i]);
      }
    }
  }

  template <int kVectors>
  static inline void sum_group(const T* weights, int64_t steps, const T* values, bool add, T* sums) {
    Vec<T> acc[kGroup][kVectors] = {};
    in_fours(steps, [&](int64_t step) __attribute__((always_inline)) {
      Vec<T> value[kVectors];
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) value[i] = load(values + step * kColumns + i * kLanes<T>);
      const Factors<T, kGroup> w(weights + step * kColumns);
#pragma GCC unroll 8
      for (int64_t c = 0; c < kGroup; ++c) {
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) acc[c][i] = Step::add(acc[c][i], w[c], value[i]);
      }
    });
    for (int64_t c = 0; c < kGroup; ++c) {
      for (int i = 0; i < kVectors; ++i) {
        T* to = sums + c * kColumns + i * kLanes<T>;
        store(to, add ? load(to) + acc[c][i] : acc[c][i]);
      }
    }
  }
};

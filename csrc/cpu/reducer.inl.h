// What a tile of similarities is turned into: weights relative to a running maximum (forward) or to a known sum
// (backward); for pairwise losses, softplus and sigmoid. A reducer has four functions: start and finish a block, weigh a tile, end a strip of columns. Included
// once per instruction set, inside its namespace and target region; includes nothing.

// Weights with a running maximum (forward). The maximum is raised lazily, only when a similarity exceeds it by 2^8:
// weights stay far from overflow and most tiles never touch it.
template <class T, bool kValues>
struct LogSumExp {
  static constexpr T kSlack = 8;

  static void start(const Pass<T>&, Block<T>& b) {
    for (int64_t i = 0; i < kBlockRows * kLanes<T>; ++i) b.sum[i] = b.strip_sum[i] = 0;
    // Finite, so that a first tile of nothing but -inf gives weights 0 and not NaN.
    for (int64_t i = 0; i < kBlockRows; ++i) b.maximum[i] = T(sizeof(T) == 4 ? -1e38 : -1e300);
  }

  static inline __attribute__((always_inline)) void weigh(const Pass<T>& pass, Block<T>& b, int64_t tile, int64_t panel,
                                                          Tile<T>& x) {
    const T* maximum = b.maximum + tile * kTileRows;
    uint32_t above = 0;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) above |= bits_greater(max<T>(x[r][0], x[r][1]), splat(maximum[r]) + kSlack);
    if (__builtin_expect(above != 0, 0)) {
      alignas(64) T copy[kTileRows * kPanelWidth<T>];
      store_tile<T>(copy, x);
      raise(pass, b, tile, panel, copy);
      load_tile<T>(copy, x);
    }
    T* sum = b.strip_sum + tile * kTileRows * kLanes<T>;
    T* weights = b.cell(tile, panel);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      const Vec<T> m = splat(maximum[r]);
      const Vec<T> w0 = exp2<T>(x[r][0] - m), w1 = exp2<T>(x[r][1] - m);
      store(sum + r * kLanes<T>, load(sum + r * kLanes<T>) + (w0 + w1));
      if (kValues) {
        store(weights + r * kPanelWidth<T>, w0);
        store(weights + r * kPanelWidth<T> + kLanes<T>, w1);
      }
    }
  }

  // Moves the maximum of each row that needs it and rescales what was summed relative to the old one.
  static __attribute__((noinline)) void raise(const Pass<T>& pass, Block<T>& b, int64_t tile, int64_t panel,
                                              const T* x) {
    for (int64_t r = 0; r < kTileRows; ++r) {
      const int64_t row = tile * kTileRows + r;
      T highest = b.maximum[row];
      for (int64_t c = 0; c < kPanelWidth<T>; ++c)
        highest = x[r * kPanelWidth<T> + c] > highest ? x[r * kPanelWidth<T> + c] : highest;
      if (!(highest > b.maximum[row] + kSlack)) continue;
      const T factor = std::exp2(b.maximum[row] - highest);
      b.maximum[row] = highest;
      for (int64_t i = 0; i < kLanes<T>; ++i) {
        b.sum[row * kLanes<T> + i] *= factor;
        b.strip_sum[row * kLanes<T> + i] *= factor;
      }
      if (!kValues) continue;
      for (int64_t p = 0; p < panel; ++p) {
        T* weights = b.cell(tile, p) + r * kPanelWidth<T>;
        for (int64_t c = 0; c < kPanelWidth<T>; ++c) weights[c] *= factor;
      }
      T* out = b.out + row * Block<T>::out_features(pass);
      for (int64_t d = 0; d < pass.features; ++d) out[d] *= factor;
    }
  }

  static void end_strip(Block<T>& b) {
    for (int64_t i = 0; i < b.tiles * kTileRows * kLanes<T>; ++i) {
      b.sum[i] += b.strip_sum[i];
      b.strip_sum[i] = 0;
    }
  }

  static void finish(const Pass<T>& pass, Block<T>& b) {
    for (int64_t i = 0; i < b.rows; ++i) {
      const T sum = sum_lanes<T>(load(b.sum + i * kLanes<T>));
      pass.reduced[b.first + i] = T((double(b.maximum[i]) + std::log2(double(sum))) * 0.693147180559945309417232121458);
      if (!kValues) continue;
      const T inverse = sum == 0 ? T(0) : 1 / sum;
      T* out = b.out + i * Block<T>::out_features(pass);
      for (int64_t d = 0; d < pass.features; ++d) out[d] *= inverse;
    }
  }
};

// Weights relative to a known log-sum-exp, which the columns' shift carries (backward).
template <class T>
struct KnownSum {
  static void start(const Pass<T>&, Block<T>&) {}
  static inline __attribute__((always_inline)) void weigh(const Pass<T>&, Block<T>& b, int64_t tile, int64_t panel,
                                                          Tile<T>& x) {
    T* weights = b.cell(tile, panel);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      store(weights + r * kPanelWidth<T>, exp2<T>(x[r][0]));
      store(weights + r * kPanelWidth<T> + kLanes<T>, exp2<T>(x[r][1]));
    }
  }
  static void end_strip(Block<T>&) {}
  static void finish(const Pass<T>&, Block<T>&) {}
};

// log2(1 + t) for t in [0, 1]: 2 atanh(t / (2 + t)) / ln 2 by its series, whose terms fall by 9 each.
template <class T>
inline Vec<T> log2_1p(Vec<T> t) {
  constexpr int kTerms = sizeof(T) == 4 ? 8 : 18;
  constexpr T kScale = T(2 / 0.693147180559945309417232121458);
  const Vec<T> z = t / (t + T(2)), square = z * z;
  Vec<T> p = splat(T(1) / (2 * kTerms - 1));
#pragma GCC unroll 18
  for (int k = kTerms - 1; k > 0; --k) p = p * square + T(1) / (2 * k - 1);
  return p * z * kScale;
}

// exp2(-|x|), from which softplus and sigmoid follow without overflow on either side.
template <class T>
inline Vec<T> exp2_minus_abs(Vec<T> x) {
  return exp2<T>(x > Vec<T>{} ? -x : x);
}

template <class T>
inline Vec<T> sigmoid_of(Vec<T> x, Vec<T> e) {
  return (x > Vec<T>{} ? splat(T(1)) : e) / (e + T(1));
}

// Sum of softplus with weights sigmoid (forward). Nothing is relative to anything, so nothing is ever rescaled.
template <class T, bool kValues>
struct SoftplusSum {
  static void start(const Pass<T>& pass, Block<T>& b) { LogSumExp<T, kValues>::start(pass, b); }

  static inline __attribute__((always_inline)) void weigh(const Pass<T>&, Block<T>& b, int64_t tile, int64_t panel,
                                                          Tile<T>& x) {
    T* sum = b.strip_sum + tile * kTileRows * kLanes<T>;
    T* weights = b.cell(tile, panel);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      Vec<T> total = load(sum + r * kLanes<T>);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Vec<T> e = exp2_minus_abs<T>(x[r][i]);
        total += max<T>(x[r][i], Vec<T>{}) + log2_1p<T>(e);
        if (kValues) store(weights + r * kPanelWidth<T> + i * kLanes<T>, sigmoid_of<T>(x[r][i], e));
      }
      store(sum + r * kLanes<T>, total);
    }
  }

  static void end_strip(Block<T>& b) { LogSumExp<T, kValues>::end_strip(b); }

  static void finish(const Pass<T>& pass, Block<T>& b) {
    for (int64_t i = 0; i < b.rows; ++i) {
      const T sum = sum_lanes<T>(load(b.sum + i * kLanes<T>));
      pass.reduced[b.first + i] = T(double(sum) * 0.693147180559945309417232121458);
    }
  }
};

// Weights sigmoid alone (backward).
template <class T>
struct Sigmoid {
  static void start(const Pass<T>&, Block<T>&) {}
  static inline __attribute__((always_inline)) void weigh(const Pass<T>&, Block<T>& b, int64_t tile, int64_t panel,
                                                          Tile<T>& x) {
    T* weights = b.cell(tile, panel);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        store(weights + r * kPanelWidth<T> + i * kLanes<T>, sigmoid_of<T>(x[r][i], exp2_minus_abs<T>(x[r][i])));
      }
    }
  }
  static void end_strip(Block<T>&) {}
  static void finish(const Pass<T>&, Block<T>&) {}
};

// What a tile of similarities is turned into: weights relative to a running maximum (forward) or to a known sum
// (backward). A reducer has four functions: start and finish a block, weigh a tile, end a strip of columns. Included
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
      pass.lse[b.first + i] = T((double(b.maximum[i]) + std::log2(double(sum))) * 0.693147180559945309417232121458);
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

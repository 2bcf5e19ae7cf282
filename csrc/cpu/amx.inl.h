// The three matrix products of a pass by AMX tiles of bfloat16, with the accuracy of float32. A float32 is the exact
// sum of three bfloat16 parts of 8 bits each. A product of two such sums has nine terms, of which the three smallest
// are below float32's rounding and are left out. A tile product has sixteen times the rate of a fused multiply-add, so
// six of them are still more than twice as fast. 16-bit inputs need fewer: bfloat16 has one part, float16 has two.
// Weights always have three parts. Included once, inside its namespace and target region; includes nothing.
//
// Infinities, NaN, and matrices so large or so small that their parts would leave bfloat16's normal range are reported
// as `wild`; the caller then uses the kernels without AMX.
//
// A tile is 16 rows of 64 bytes: for the left operand 16 x 32 elements, for the right one 16 pairs of rows x 16
// columns. The hardware does not prescribe which two elements make a pair, as long as both operands agree. Here
// elements i and i + 16 of a step of 32 do, so that pairing two vectors is a shift and an or.
//   rows     [tile][step of features][2 halves of 16 rows][part][16 x 32]
//   panels   [panel][step of features][part][2 halves of 16 columns][16 pairs x 16]
//   values   [panel of features][step of columns][part][2 halves of 16 features][16 pairs x 16]
//   weights  [panel][tile][row in tile][column in panel], float32

// 16-bit data is split in kData = 1 (bfloat16) or 2 (float16) parts, float32 in 3.
template <int kData>
struct Amx {
  using T = float;
  static constexpr int64_t kRows = 32, kColumns = 32, kCell = kRows * kColumns;
  static constexpr int64_t kStrip = 128;  // so that the three parts of a tile's weights fit the first-level cache
  // With kRaw factors are applied to the products: 16-bit data times a factor would need more parts. The three parts of
  // a float32 hold its product with a factor.
  static constexpr bool kRaw = kData < 3;
  static constexpr bool kLimits = false;  // every weight has all three parts
  // By tiles, computing similarities again is faster than reading kept weights back from beyond the second-level cache.
  static constexpr int64_t kLeastKeptRows = 256, kKeptBytes = 12 << 20;

  static int64_t steps(int64_t count) { return (count + 31) / 32; }
  static int64_t whole_panels(int64_t features) { return steps(features) * kColumns; }
  static int64_t row_elements(int64_t features) { return steps(features) * 2 * kData * kTileElements; }
  static int64_t panel_elements(int64_t features) { return steps(features) * kData * 2 * kTileElements; }
  static int64_t value_elements(int64_t columns, int64_t features) {
    // The second term is for the parts of the weights of two tiles, which `accumulate` stores behind the values.
    return steps(features) * steps(columns) * kData * 2 * kTileElements + 2 * steps(columns) * 2 * 3 * kTileElements;
  }
  static int64_t column_sum_elements(int64_t features) { return kColumns * whole_panels(features); }
  static int64_t column_scratch(int64_t tiles, int64_t features) {
    return 2 * steps(features) * steps(tiles * kRows) * kData * kTileElements +
           steps(tiles * kRows) * 3 * 2 * kTileElements;
  }

  static void begin() {
    static const TileConfig config;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  static void end() { __asm__ volatile("tilerelease"); }

  static bool pack_rows(Matrix m, const T* factor, int64_t features, int64_t first, int64_t count, T* rows) {
    Range range;
    for (int64_t step = 0; step < steps(features); ++step) {
      for (int64_t r = 0; r < kRows; ++r) {
        float* to = rows + (2 * step + r / 16) * kData * kTileElements + r % 16 * 16;
        if (r < count) {
          pairs_of_row(m, factor, features, first + r, step * 32, to, kTileElements, range);
        } else {
          for (int part = 0; part < kData; ++part) store(to + part * kTileElements, Vec<float>{});
        }
      }
    }
    return range.wild();
  }

  static bool pack_panel(Matrix m, const T* factor, int64_t features, int64_t first, int64_t count, T* panel) {
    Range range;
    for (int64_t step = 0; step < steps(features); ++step) {
      for (int64_t side = 0; side < 2; ++side) {
        alignas(64) float pairs[kData][16][16];
        for (int64_t c = 0; c < 16; ++c) {
          if (side * 16 + c < count) {
            pairs_of_row(m, factor, features, first + side * 16 + c, step * 32, pairs[0][c], kTileElements, range);
          } else {
            for (int part = 0; part < kData; ++part) store(pairs[part][c], Vec<float>{});
          }
        }
        for (int part = 0; part < kData; ++part) {
          Vec<float> v[16];
          for (int64_t c = 0; c < 16; ++c) v[c] = load(pairs[part][c]);
          transpose<float>(v);
          float* to = panel + ((step * kData + part) * 2 + side) * kTileElements;
          for (int64_t p = 0; p < 16; ++p) store(to + p * 16, v[p]);
        }
      }
    }
    return range.wild();
  }

  struct Result {
    alignas(64) float c[4][kTileElements];
  };

  static inline __attribute__((always_inline)) void take(const T*, const T*, int64_t, Result& x) { store_tiles(x.c); }

  template <class Between>
  static inline __attribute__((always_inline)) void issue(const T* rows, const T* panel, int64_t features,
                                                          const Between& between) {
    product<kData, kData>(rows, rows + kData * kTileElements, 2 * kData * kTileElements, panel, steps(features),
                          between);
  }

  static inline __attribute__((always_inline)) Vec<T> read(const Result& x, int64_t row, int side, T factor) {
    const Vec<T> product = load(x.c[row / 16 * 2 + side] + row % 16 * 16);
    return kRaw ? product * factor : product;
  }

  // Rows i and i + 16 of a step make a pair; rows beyond `count` are zeros. `accumulate` applies extra, and with kRaw the
  // factor, whose first element belongs to row `first`.
  static bool pack_values(Matrix m, const T* factor, const T*, int64_t features, int64_t first, int64_t count,
                          int64_t stride, T* values) {
    Range range;
    const T* own = factor != nullptr ? factor - first : nullptr;
    const int64_t blocks = steps(stride);
    for (int64_t step = 0; step < steps(count); ++step) {
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t low = step * 32 + i, high = low + 16;
        for (int64_t d = 0; d < features; d += 16) {
          const Vec<float> a = low < count ? part_of_row(m, own, features, first + low, d) : Vec<float>{};
          const Vec<float> b = high < count ? part_of_row(m, own, features, first + high, d) : Vec<float>{};
          range.meet(a);
          range.meet(b);
          float* to = values + ((d / 32 * blocks + step) * kData * 2 + d / 16 % 2) * kTileElements + i * 16;
          split_pairs<kData>(a, b, to, 2 * kTileElements);
        }
        if ((features + 15) / 16 % 2 != 0) {
          float* to = values + ((features / 32 * blocks + step) * kData * 2 + 1) * kTileElements + i * 16;
          for (int part = 0; part < kData; ++part) store(to + part * 2 * kTileElements, Vec<float>{});
        }
      }
    }
    return range.wild();
  }

  static void accumulate(const T* weights, int64_t tiles, int64_t columns, T* values, int64_t features, const T* factor,
                         const T* extra, const T* /*limit*/, T* out) {
    const int64_t blocks = kStrip / 32, used = steps(columns);
    const int64_t stride = whole_panels(features + (extra != nullptr ? 1 : 0));
    float* parts = values + steps(features + (extra != nullptr ? 1 : 0)) * blocks * kData * 2 * kTileElements;
    Vec<T> factors[kStrip / 32][2];
    for (int64_t step = 0; kRaw && step < used; ++step) {
      // Beyond the last column weights are zero, and factors must not be read.
      for (int64_t side = 0; side < 2; ++side) {
        const int64_t at = step * 32 + side * 16;
        factors[step][side] = factor == nullptr ? splat(1.0f) : load_some<T>(factor + at, columns - at);
      }
    }
    // Splits the weights of one tile into parts, laid out [step][2 halves of 16 rows][part]. A line is one row of one
    // step. The lines of the next tile are split while the products of the present one run.
    const int64_t size = blocks * 6 * kTileElements, lines = used * kRows;
    const auto split = [&](int64_t tile, int64_t from, int64_t to) {
      for (int64_t line = from; line < to; ++line) {
        const int64_t step = line / kRows, r = line % kRows;
        const T* w = weights + (step * tiles + tile) * kCell + r * 32;
        const Vec<T> a = kRaw ? load(w) * factors[step][0] : load(w);
        const Vec<T> b = kRaw ? load(w + 16) * factors[step][1] : load(w + 16);
        split_pairs<3, false>(
            a, b, parts + tile % 2 * size + step * 6 * kTileElements + r / 16 * 3 * kTileElements + r % 16 * 16,
            kTileElements);
      }
    };
    split(0, 0, lines);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      if (extra != nullptr) {
        add_extra<Amx>(weights + tile * kCell, tiles * kCell, columns, extra, stride,
                       out + tile * kRows * stride + features);
      }
      const float* own = parts + tile % 2 * size;
      const int64_t ahead = tile + 1 < tiles ? lines : 0;
      int64_t next = 0;
      for (int64_t d = 0; d < steps(features); ++d) {
        alignas(64) float c[4][kTileElements];
        product<3, kData>(own, own + 3 * kTileElements, 6 * kTileElements,
                          values + d * blocks * kData * 2 * kTileElements, used, [&](int64_t done, int64_t total) {
                            const int64_t until = ahead * (d * total + done) / (steps(features) * total);
                            split(tile + 1, next, until);
                            next = until;
                          });
        store_tiles(c);
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t side = 0; side < 2; ++side) {
            const int64_t at = d * 32 + side * 16, left = features - at;
            T* to = out + (tile * kRows + r) * stride + at;
            const Vec<T> sum = load(c[r / 16 * 2 + side] + r % 16 * 16);
            if (left >= 16) {
              store(to, load(to) + sum);
            } else {  // no whole vector: the extra feature may follow, which add_extra has summed
              for (int64_t i = 0; i < left; ++i) to[i] += sum[i];
            }
          }
        }
      }
    }
  }

  // Left operand of sum_columns: [tile of 16 features][step of rows][part][16 features x 32 rows].
  static bool pack_column_values(Matrix m, const T* factor, const T*, int64_t features, int64_t first, int64_t count,
                                 int64_t tiles, T* values) {
    Range range;
    const T* own = factor - first;
    const int64_t row_steps = steps(tiles * kRows);
    for (int64_t d = 0; d < 2 * steps(features); ++d) {
      for (int64_t step = 0; step < row_steps; ++step) {
        Vec<float> v[2][16];
        for (int64_t r = 0; r < 32; ++r) {
          const int64_t row = step * 32 + r;
          v[r / 16][r % 16] =
              row < count && d * 16 < features ? part_of_row(m, own, features, first + row, d * 16) : Vec<float>{};
          range.meet(v[r / 16][r % 16]);
        }
        transpose<float>(v[0]);
        transpose<float>(v[1]);
        float* to = values + (d * row_steps + step) * kData * kTileElements;
        for (int64_t f = 0; f < 16; ++f) split_pairs<kData>(v[0][f], v[1][f], to + f * 16, kTileElements);
      }
    }
    return range.wild();
  }

  // sums are [feature][column in panel].
  static void sum_columns(const T* weights, int64_t /*count: rows beyond it have factor 0*/, int64_t tiles, T* values,
                          int64_t features, const T* factor, const T* extra, bool add, T* sums) {
    const int64_t rows = tiles * kRows, row_steps = tiles;
    float* parts = values + 2 * steps(features + (extra != nullptr ? 1 : 0)) * row_steps * kData * kTileElements;
    // A line is the pair of rows i and i + 16 of a step.
    int64_t lines = 0;
    const auto split_until = [&](int64_t end) {
      for (; lines < end; ++lines) {
        const int64_t step = lines / 16, i = lines % 16, low = step * 32 + i, high = low + 16;
        for (int side = 0; side < 2; ++side) {
          const Vec<T> a = load(weights + low * 32 + side * 16), b = load(weights + high * 32 + side * 16);
          float* to = parts + (step * 6 + side) * kTileElements + i * 16;
          split_pairs<3, false>(kRaw ? a * factor[low] : a, kRaw ? b * factor[high] : b, to, 2 * kTileElements);
        }
      }
    };
    // The parts of kSteps steps fit the first-level cache. The next kSteps are split while the products run.
    constexpr int64_t kSteps = 4;
    split_until(16 * (row_steps < kSteps ? row_steps : kSteps));
    for (int64_t first = 0; first < row_steps; first += kSteps) {
      const int64_t count = row_steps - first < kSteps ? row_steps - first : kSteps;
      const int64_t begin = lines,
                    ahead = 16 * (row_steps - first - count < kSteps ? row_steps - first - count : kSteps);
      for (int64_t d = 0; d < steps(features); ++d) {
        alignas(64) float c[4][kTileElements];
        const float* left = values + (2 * d * row_steps + first) * kData * kTileElements;
        product<kData, 3>(left, left + row_steps * kData * kTileElements, kData * kTileElements,
                          parts + first * 6 * kTileElements, count, [&](int64_t done, int64_t total) {
                            split_until(begin + ahead * (d * total + done) / (steps(features) * total));
                          });
        store_tiles(c);
        for (int64_t f = 0; f < 32; ++f) {
          for (int64_t side = 0; side < 2; ++side) {
            T* at = sums + (d * 32 + f) * kColumns + side * 16;
            const Vec<T> sum = load(c[f / 16 * 2 + side] + f % 16 * 16);
            store(at, add || first > 0 ? load(at) + sum : sum);
          }
        }
      }
    }
    if (extra == nullptr) return;
    for (int side = 0; side < 2; ++side) {
      T* at = sums + features * kColumns + side * 16;
      Vec<T> sum = add ? load(at) : Vec<T>{};
      for (int64_t r = 0; r < rows; ++r) sum += load(weights + r * 32 + side * 16) * extra[r];
      store(at, sum);
    }
  }

  static void write_sums(const T* sums, int64_t columns, int64_t features, T* out, T* out_extra) {
    for (int64_t d = 0; d < features; d += 16) {
      for (int64_t c = 0; c < columns; c += 16) {
        Vec<T> v[16];
        for (int64_t f = 0; f < 16; ++f) v[f] = load(sums + (d + f) * kColumns + c);
        transpose<T>(v);
        const int64_t width = features - d < 16 ? features - d : 16;
        for (int64_t i = 0; i < 16 && c + i < columns; ++i) {
          __builtin_memcpy(out + (c + i) * features + d, &v[i], width * sizeof(T));
        }
      }
    }
    if (out_extra != nullptr) __builtin_memcpy(out_extra, sums + features * kColumns, columns * sizeof(T));
  }

 private:
  static Vec<float> part_of_row(Matrix m, const T* factor, int64_t features, int64_t row, int64_t d) {
    Vec<float> x = {};
    with_row(m, features, row, [&](const auto* p) { x = load_some<float>(p + d, features - d); });
    return kRaw || factor == nullptr ? x : x * factor[row];
  }

  // Writes features [d, d + 32) of one row as 16 pairs; part k goes to out + k * step.
  static void pairs_of_row(Matrix m, const T* factor, int64_t features, int64_t row, int64_t d, float* out,
                           int64_t step, Range& range) {
    const Vec<float> a = part_of_row(m, factor, features, row, d);
    const Vec<float> b = d + 16 < features ? part_of_row(m, factor, features, row, d + 16) : Vec<float>{};
    range.meet(a);
    range.meet(b);
    split_pairs<kData>(a, b, out, step);
  }
};

// The three matrix products of a pass for bfloat16 rows and columns by AVX512_BF16: one VDPBF16PS adds two products of
// bfloat16 to each of 16 sums of float32, where a multiply-add adds one. The loops are those of Fma; here a lane is a pair
// of bfloat16, and a step two features, two columns or two rows. Products of bfloat16 are exact, and sums are float32.
//
// Weights are rounded to bfloat16, as the inputs are. Those above the reducer's limit get a second part: few do, and only
// the steps of these are done again.
//
// The instruction takes subnormal numbers for zeros. Infinities, NaN, and matrices that are all very large or very small
// are reported as `wild`; the caller then uses the kernels of float32.
// Included once, inside its namespace and target region; includes nothing.
//
//   rows     [tile][pair of features][row in tile]
//   panels   [panel][pair of features][column in panel]
//   values   [panel of features][pair of columns or rows][feature in panel]
//   weights  [panel][tile][row in tile][column in panel], float32, of which the products make pairs

struct MultiplyAddPairs {
  static constexpr int64_t kNumbers = 2;
  static inline __attribute__((always_inline)) Vec<float> add(Vec<float> sum, Vec<float> a, Vec<float> b) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};

struct Pairs : Fma<float, MultiplyAddPairs> {
  static constexpr bool kRaw = true;  // factors are applied to the similarities: data times a factor is no bfloat16
  static constexpr bool kLimits = true;

  static int64_t pairs(int64_t count) { return (count + 1) / 2; }
  // In floats, of which each holds a pair.
  static int64_t row_elements(int64_t features) { return kRows * pairs(features); }
  static int64_t panel_elements(int64_t features) { return kColumns * pairs(features); }
  static int64_t value_elements(int64_t columns, int64_t features) { return pairs(columns) * whole_panels(features); }
  // Behind the values are the weights of a panel.
  static int64_t column_scratch(int64_t tiles, int64_t features) {
    return pairs(tiles * kRows) * (whole_panels(features) + kColumns);
  }

  static bool pack_rows(Matrix m, const T*, int64_t features, int64_t first, int64_t count, T* rows) {
    return pack<kRows>(m, features, first, count, rows);
  }
  static bool pack_panel(Matrix m, const T*, int64_t features, int64_t first, int64_t count, T* panel) {
    return pack<kColumns>(m, features, first, count, panel);
  }

  static inline __attribute__((always_inline)) Vec<T> read(const Result& x, int64_t row, int side, T factor) {
    return x[row][side] * factor;
  }

  static inline __attribute__((always_inline)) void take(const T* rows, const T* panel, int64_t features, Result& x) {
    sum_chunks(features, x, [&](int64_t d, int64_t count) __attribute__((always_inline)) {
      multiply_chunk(rows + row_elements(d), panel + panel_elements(d), pairs(count), x);
    });
  }

  // One bit per lane in which a is greater.
  static __mmask16 above(Vec<T> a, Vec<T> b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ); }

  // Rows 2 i and 2 i + 1 make a pair. `accumulate` applies factor and extra.
  static bool pack_values(Matrix m, const T*, const T*, int64_t features, int64_t first, int64_t count, int64_t stride,
                          T* values) {
    Range range;
    const BFloat16* data = static_cast<const BFloat16*>(m.data) + first * features;
    for (int64_t row = 0; row < count; row += 2) {
      for (int64_t d = 0; d < features; d += kColumns) {
        const __m512i a = some_numbers(data + row * features + d, features - d);
        const __m512i b =
            row + 1 < count ? some_numbers(data + (row + 1) * features + d, features - d) : _mm512_setzero_si512();
        meet(range, a);
        meet(range, b);
        T* to = values + d * pairs(stride) + row / 2 * kColumns;
        store(to, interleaved<0>(a, b));
        store(to + kLanes<T>, interleaved<16>(a, b));
      }
    }
    return range.wild();
  }

  static void accumulate(const T* weights, int64_t tiles, int64_t columns, const T* values, int64_t features,
                         const T* factor, const T* extra, const T* limit, T* out) {
    constexpr int64_t kPanels = kStrip / kColumns, kHalf = kCell / 2;
    const int64_t stride = whole_panels(features + (extra != nullptr ? 1 : 0));
    Vec<T> factors[kPanels][2];
    for (int64_t c = 0; factor != nullptr && c < columns; c += kColumns) {  // beyond the last column weights are zero
      factors[c / kColumns][0] = load_some<T>(factor + c, columns - c);
      const int64_t left = columns - c - kLanes<T>;
      factors[c / kColumns][1] = left > 0 ? load_some<T>(factor + c + kLanes<T>, left) : Vec<T>{};
    }
    alignas(64) T first[kPanels * kHalf], second[kPanels * kHalf];
    int64_t large[kStrip / 2];
    for (int64_t tile = 0; tile < tiles; ++tile) {
      int64_t count = 0;
      for (int64_t c = 0; c < columns; c += kColumns) {
        const T* w = weights + (c / kColumns * tiles + tile) * kCell;
        const Vec<T>* f = factor != nullptr ? factors[c / kColumns] : nullptr;
        T *one = first + c / kColumns * kHalf, *two = second + c / kColumns * kHalf;
        uint64_t met = 0;
        for (int64_t r = 0; r < kRows; ++r) {
          const Vec<T> a = load(w + r * kColumns), b = load(w + r * kColumns + kLanes<T>);
          const Vec<T> most = splat(limit[tile * kRows + r]);
          met |= uint64_t{above(a, most)} | uint64_t{above(b, most)} << kLanes<T>;
          store(one + r * kSteps, f != nullptr ? rounded(a * f[0], b * f[1]) : rounded(a, b));
        }
        if (met == 0) continue;
        for (int64_t r = 0; r < kRows; ++r) {
          Vec<T> a = load(w + r * kColumns), b = load(w + r * kColumns + kLanes<T>);
          if (f != nullptr) {
            a *= f[0];
            b *= f[1];
          }
          store(two + r * kSteps, rest(a, b));
        }
        for (met = (met | met >> 1) & 0x55555555; met != 0; met &= met - 1) {
          large[count++] = (c + __builtin_ctzll(met)) / 2;
        }
      }
      T* to = out + tile * kRows * stride;
      for (int64_t d = 0; d < features; d += kColumns) {
        const T* v = values + d * (kStrip / 2);
        if (features - d > kLanes<T>) {
          accumulate_tile<2>(first, kHalf, pairs(columns), v, stride, to + d);
          if (count != 0) add_large<2>(second, large, count, v, stride, to + d);
        } else {
          accumulate_tile<1>(first, kHalf, pairs(columns), v, stride, to + d);
          if (count != 0) add_large<1>(second, large, count, v, stride, to + d);
        }
      }
      if (extra != nullptr) {
        add_extra<Pairs>(weights + tile * kCell, tiles * kCell, columns, extra, stride, to + features);
      }
    }
  }

  static bool pack_column_values(Matrix m, const T*, const T*, int64_t features, int64_t first, int64_t count,
                                 int64_t tiles, T* values) {
    return pack_values(m, nullptr, nullptr, features, first, count, tiles * kRows, values);
  }

  static void sum_columns(const T* weights, int64_t count, int64_t tiles, T* values, int64_t features, const T* factor,
                          const T* extra, bool add, T* sums) {
    const int64_t all = pairs(tiles * kRows);
    T* parts = values + all * whole_panels(features + (extra != nullptr ? 1 : 0));
    for (int64_t row = 0; row < count; row += 2) {
      const bool both = row + 1 < count;  // a row of padding may have weights of NaN
      for (int64_t c = 0; c < kColumns; c += kLanes<T>) {
        const T* w = weights + row * kColumns + c;
        const Vec<T> low = load(w) * factor[row];
        const Vec<T> high = both ? load(w + kColumns) * factor[row + 1] : Vec<T>{};
        store(parts + row / 2 * kColumns + c, in_pairs(rounded(low, high)));
      }
    }
    for (int64_t d = 0; d < features; d += kColumns) {
      for (int64_t c = 0; c < kColumns; c += kGroup) {
        T* to = sums + d * kColumns + c * kColumns;
        if (features - d > kLanes<T>) {
          sum_group<2>(parts + c, pairs(count), values + d * all, add, to);
        } else {
          sum_group<1>(parts + c, pairs(count), values + d * all, add, to);
        }
      }
    }
    if (extra != nullptr) sum_extra(weights, count, features, extra, add, sums);
  }

 private:
  static __m512i some_numbers(const BFloat16* x, int64_t count) {
    return _mm512_maskz_loadu_epi16(count >= kColumns ? ~0u : (1u << count) - 1, x);
  }

  static void meet(Range& range, __m512i x) {
    range.meet((Vec<T>)((Mask<T>)x << 16));
    range.meet((Vec<T>)((Mask<T>)x & int32_t(0xffff0000)));
  }

  // a[kFirst], b[kFirst], a[kFirst + 1], ...: 16 pairs of the numbers of two vectors.
  template <int kFirst>
  static Vec<T> interleaved(__m512i a, __m512i b) {
    return (Vec<T>)_mm512_permutex2var_epi16(a, places(kFirst, 32), b);
  }

  // Pair i is number i and number i + 16.
  static Vec<T> in_pairs(Vec<T> x) { return (Vec<T>)_mm512_maskz_permutexvar_epi16(~0u, places(0, 16), (__m512i)x); }

  // first, first + by, first + 1, first + 1 + by, ...
  static __m512i places(int first, int by) {
    Mask<T> lane{};
    for (int i = 0; i < kLanes<T>; ++i) lane[i] = (first + i) | (first + i + by) << 16;
    return (__m512i)lane;
  }

  // 32 numbers of bfloat16 in order. The intrinsic takes the upper half first.
  static Vec<T> rounded(Vec<T> a, Vec<T> b) { return (Vec<T>)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

  // Numbers kFirst to kFirst + 15 of 32 as float32: each becomes the upper half of a lane.
  template <int kFirst>
  static Vec<T> wide(Vec<T> x) {
    return (Vec<T>)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, places(kFirst, 0), (__m512i)x);
  }

  // What rounding takes away, rounded as well.
  static Vec<T> rest(Vec<T> a, Vec<T> b) {
    const Vec<T> near = rounded(a, b);
    return rounded(a - wide<0>(near), b - wide<16>(near));
  }

  // Rows [first, first + count) of the matrix as the columns of out[pair of features][kWidth], and zeros beyond them.
  template <int64_t kWidth>
  static bool pack(Matrix m, int64_t features, int64_t first, int64_t count, T* out) {
    Range range;
    const BFloat16* data = static_cast<const BFloat16*>(m.data) + first * features;
    transpose_lanes<T, kWidth>(pairs(features), count, out,
                               [&](int64_t row, int64_t pair) __attribute__((always_inline)) {
                                 const __m512i x = some_numbers(data + row * features + 2 * pair, features - 2 * pair);
                                 meet(range, x);
                                 return (Vec<T>)x;
                               });
    return range.wild();
  }

  // The steps of one tile that have large weights again, with the second parts of the weights.
  template <int kVectors>
  static void add_large(const T* second, const int64_t* large, int64_t count, const T* values, int64_t stride, T* out) {
    Vec<T> acc[kRows][kVectors] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t step = large[i];
      add_steps<kVectors, 1>(second + step / kSteps * (kCell / 2) + step % kSteps, values + step * kColumns, acc);
    }
    add_tile<kVectors>(acc, stride, out);
  }

  // The one more feature, behind the others; Fma::write_sums reads it there.
  static void sum_extra(const T* weights, int64_t count, int64_t features, const T* extra, bool add, T* sums) {
    T sum[kColumns] = {};
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t c = 0; c < kColumns; ++c) sum[c] += weights[row * kColumns + c] * extra[row];
    }
    const int64_t d = features / kColumns * kColumns;
    for (int64_t c = 0; c < kColumns; ++c) {
      T* to = sums + d * kColumns + c * kColumns + features - d;
      *to =
          (add || features % kLanes<T> != 0 ? *to : T(0)) + sum[c];  // a vector that features share is written already
    }
  }
};

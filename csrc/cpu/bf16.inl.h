// Similarities of bfloat16 rows and columns by NEON's products of small matrices: one BFMMLA multiplies 2 rows of 4
// features by 2 columns, 16 multiply-adds, where a fused multiply-add has 4. Products of bfloat16 are exact in float32,
// and sums are float32. Weights times values stay with Fma: the float32 weights would need three bfloat16 parts each.
// Included once, inside its namespace and target region; includes nothing.
//
// BFMMLA takes subnormal numbers for zeros. A matrix that has some is reported as `wild`; the caller then uses the
// kernels of float32.
//
// A step is 4 features, and behind the last feature zeros.
//   rows     [tile][step][pair of rows][2 x 4]
//   panels   [panel][step][pair of columns][2 x 4]

struct Bf16 : Fma<float> {
  static constexpr bool kRaw = true;  // factors are applied to the similarities: data times a factor is no bfloat16
  static constexpr int64_t kStep = 4, kPairs = kRows / 2, kSides = kColumns / 2;

  static int64_t steps(int64_t features) { return (features + kStep - 1) / kStep; }
  // In floats, of which each holds two elements.
  static int64_t row_elements(int64_t features) { return kRows * steps(features) * kStep / 2; }
  static int64_t panel_elements(int64_t features) { return kColumns * steps(features) * kStep / 2; }

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
      multiply_steps(rows + row_elements(d), panel + panel_elements(d), steps(count), x);
    });
  }

 private:
  // Rows [first, first + count) of the matrix, and zeros from there to kWidth.
  template <int64_t kWidth>
  static bool pack(Matrix m, int64_t features, int64_t first, int64_t count, T* out) {
    const BFloat16* data = static_cast<const BFloat16*>(m.data) + first * features;
    auto* to = reinterpret_cast<BFloat16*>(out);
    uint32_t subnormal = 0;
    for (int64_t d = 0; d < features; d += kStep) {
      const int64_t width = features - d < kStep ? features - d : kStep;
      for (int64_t r = 0; r < kWidth; ++r) {
        BFloat16 part[kStep] = {};
        for (int64_t i = 0; r < count && i < width; ++i) part[i] = data[r * features + d + i];
        for (int64_t i = 0; i < kStep; ++i) subnormal |= uint32_t(uint16_t(part[i].bits & 0x7fff) - 1u < 0x7fu);
        __builtin_memcpy(to + (d * kWidth + r * kStep), part, sizeof part);
      }
    }
    return subnormal != 0;
  }

  static inline __attribute__((always_inline)) void multiply_steps(const T* rows, const T* panel, int64_t count,
                                                                   Tile& x) {
    // Of a pair of rows and a pair of columns: row 0 by both columns, then row 1.
    float32x4_t block[kPairs][kSides];
#pragma GCC unroll 16
    for (int64_t p = 0; p < kPairs; ++p) {
#pragma GCC unroll 4
      for (int64_t c = 0; c < kSides; ++c) block[p][c] = vdupq_n_f32(0);
    }
    for (int64_t step = 0; step < count; ++step) {
      bfloat16x8_t column[kSides];
#pragma GCC unroll 4
      for (int64_t c = 0; c < kSides; ++c) __builtin_memcpy(&column[c], panel + c * kStep, sizeof column[c]);
#pragma GCC unroll 16
      for (int64_t p = 0; p < kPairs; ++p) {
        bfloat16x8_t row;
        __builtin_memcpy(&row, rows + p * kStep, sizeof row);
#pragma GCC unroll 4
        for (int64_t c = 0; c < kSides; ++c) block[p][c] = vbfmmlaq_f32(block[p][c], row, column[c]);
      }
      rows += kRows * kStep / 2;
      panel += kColumns * kStep / 2;
    }
#pragma GCC unroll 16
    for (int64_t p = 0; p < kPairs; ++p) {
#pragma GCC unroll 2
      for (int64_t side = 0; side < 2; ++side) {
        const float64x2_t a = vreinterpretq_f64_f32(block[p][2 * side]);
        const float64x2_t b = vreinterpretq_f64_f32(block[p][2 * side + 1]);
        x[2 * p][side] = (Vec<T>)vzip1q_f64(a, b);
        x[2 * p + 1][side] = (Vec<T>)vzip2q_f64(a, b);
      }
    }
  }
};

// Work on rows that needs no similarities: packing, dot products of row pairs, linear combinations of rows.
// Included once per instruction set, inside its namespace and target region; includes nothing.

// a[kFirst], b[kFirst], a[kFirst + 1], b[kFirst + 1], ...
template <class T, int kFirst, int... kAt>
inline __attribute__((always_inline)) Vec<T> interleave(Vec<T> a, Vec<T> b, std::integer_sequence<int, kAt...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (kFirst + kAt / 2 + kAt % 2 * int(kLanes<T>))...);
#else
  return __builtin_shuffle(a, b, Mask<T>{Lane<T>(kFirst + kAt / 2 + kAt % 2 * kLanes<T>)...});
#endif
}

// Transposes L vectors of L lanes: log2(L) perfect shuffles move element (i, j) to (j, i).
template <class T>
inline __attribute__((always_inline)) void transpose(Vec<T> (&v)[kLanes<T>]) {
  constexpr int64_t L = kLanes<T>;
  constexpr std::make_integer_sequence<int, int(L)> lanes{};
#pragma GCC unroll 4
  for (int64_t round = 1; round < L; round *= 2) {
    Vec<T> w[L];
#pragma GCC unroll 16
    for (int64_t i = 0; i < L / 2; ++i) {
      w[2 * i] = interleave<T, 0>(v[i], v[i + L / 2], lanes);
      w[2 * i + 1] = interleave<T, int(L / 2)>(v[i], v[i + L / 2], lanes);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < L; ++i) v[i] = w[i];
  }
}

// Writes `count` rows of `length` lanes as the columns of out[lane][W]; columns from `count` to W are zeros. load_lanes(r, d)
// loads the lanes of row r from d on, those beyond `length` as zeros.
template <class T, int64_t W, class Load>
inline __attribute__((always_inline)) void transpose_lanes(int64_t length, int64_t count, T* out,
                                                           const Load& load_lanes) {
  constexpr int64_t L = kLanes<T>;
  for (int64_t group = 0; group < W; group += L) {
    const int64_t lanes = W - group < L ? W - group : L;
    const int64_t real = count - group < 0 ? 0 : count - group < lanes ? count - group : lanes;
    for (int64_t d = 0; d < length; d += L) {
      const int64_t width = length - d < L ? length - d : L;
      Vec<T> v[L] = {};
      for (int64_t r = 0; r < real; ++r) v[r] = load_lanes(group + r, d);
      transpose<T>(v);
      for (int64_t i = 0; i < width; ++i) __builtin_memcpy(out + (d + i) * W + group, &v[i], lanes * sizeof(T));
    }
  }
}

// The same with the features of rows [first, first + count) of the matrix times their factors.
template <class T, int64_t W>
void transpose_rows(Matrix m, const T* factor, int64_t features, int64_t first, int64_t count, T* out) {
  transpose_lanes<T, W>(features, count, out, [&](int64_t r, int64_t d) __attribute__((always_inline)) {
    Vec<T> v{};
    with_row(m, features, first + r, [&](const auto* x) { v = load_some<T>(x + d, features - d); });
    return factor != nullptr ? v * splat(factor[first + r]) : v;
  });
}

template <class T>
void widen_vector(Matrix m, int64_t count, T* out) {
  with_row(m, 0, 0, [&](const auto* x) {
    for (int64_t i = 0; i < count; ++i) out[i] = T(widen(x[i]));
  });
}

template <class T>
void row_dot(Matrix a, Matrix b, int64_t features, int64_t begin, int64_t end, T* out) {
  for (int64_t row = begin; row < end; ++row) {
    with_row(a, features, row, [&](const auto* x) {
      with_row(b, features, row, [&](const auto* y) {
        // Sixteen independent sums: in a single one each addition would wait for the last, and the error would be
        // larger.
        T part[16] = {};
        int64_t d = 0;
        for (; d + 16 <= features; d += 16) {
          for (int64_t i = 0; i < 16; ++i) part[i] += T(widen(x[d + i])) * T(widen(y[d + i]));
        }
        for (; d < features; ++d) part[0] += T(widen(x[d])) * T(widen(y[d]));
        T sum = 0;
        for (int64_t i = 0; i < 16; ++i) sum += part[i];
        out[row] = sum;
      });
    });
  }
}

template <class T>
void row_combine(const T* u, Matrix x, const T* v, Matrix y, int64_t features, int64_t begin, int64_t end,
                 MutableMatrix out) {
  constexpr int64_t kChunk = 256;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t first = 0; first < features; first += kChunk) {
      const int64_t count = features - first < kChunk ? features - first : kChunk;
      T sum[kChunk];
      with_row(x, features, row, [&](const auto* p) {
        for (int64_t d = 0; d < count; ++d) sum[d] = u[row] * T(widen(p[first + d]));
      });
      if (y.data != nullptr) {
        with_row(y, features, row, [&](const auto* p) {
          for (int64_t d = 0; d < count; ++d) sum[d] += v[row] * T(widen(p[first + d]));
        });
      }
      write_part(out, row * features + first, count, sum);
    }
  }
}

// Work that is linear in the inputs: packing, dot products and combinations of rows.
// Included once per instruction set, inside its namespace and target region; includes nothing.

template <class T>
constexpr int64_t kPanelWidth = 2 * kLanes<T>;

template <class T>
void pack_panels(Matrix m, const T* factor, int64_t rows, int64_t features, int64_t panel_begin, int64_t panel_end,
                 T* panels) {
  constexpr int64_t W = kPanelWidth<T>;
  for (int64_t p = panel_begin; p < panel_end; ++p) {
    T* panel = panels + p * features * W;
    for (int64_t c = 0; c < W; ++c) {
      const int64_t row = p * W + c;
      if (row >= rows) {
        for (int64_t d = 0; d < features; ++d) panel[d * W + c] = 0;
        continue;
      }
      const T f = factor != nullptr ? factor[row] : T(1);
      with_row(m, features, row, [&](const auto* x) {
        for (int64_t d = 0; d < features; ++d) panel[d * W + c] = T(widen(x[d])) * f;
      });
    }
  }
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
        // Independent partial sums: one chain would wait for every addition, and round worse.
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

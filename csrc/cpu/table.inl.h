// Passes over some rows of a table that an optimiser moves: rows lie apart in memory, so each is read and written once,
// and fetched ahead. Included once per instruction set, inside its namespace and target region; includes nothing.

// With a mask, for GCC 12 warns of uninitialised memory in the forms without one.
#if FASTCL_VECTOR_BYTES == 64
inline Vec<float> square_root(Vec<float> v) { return (Vec<float>)_mm512_maskz_sqrt_ps(0xffff, (__m512)v); }
inline Vec<double> square_root(Vec<double> v) { return (Vec<double>)_mm512_maskz_sqrt_pd(0xff, (__m512d)v); }
#elif FASTCL_VECTOR_BYTES == 32
inline Vec<float> square_root(Vec<float> v) { return (Vec<float>)_mm256_sqrt_ps((__m256)v); }
inline Vec<double> square_root(Vec<double> v) { return (Vec<double>)_mm256_sqrt_pd((__m256d)v); }
#else
template <class V>
inline V square_root(V v) {
  for (uint64_t i = 0; i < sizeof(V) / sizeof(v[0]); ++i) v[i] = std::sqrt(v[i]);
  return v;
}
#endif

constexpr int64_t kAhead = 8;  // rows that are fetched ahead

template <class T>
inline void fetch_row(const T* row, int64_t features) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t d = 0; d < features; d += kLine) __builtin_prefetch(row + d);
}

template <class T>
inline void store_some(T* p, Vec<T> v, int64_t count) {
  if (count >= kLanes<T>) return store(p, v);
  for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}

template <class T>
void read_late_rows(const LateRows<T>& r, int64_t begin, int64_t end) {
  constexpr int64_t L = kLanes<T>;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) {
      const int64_t next = r.id[i + kAhead] * r.features;
      fetch_row(r.weight + next, r.features);
      fetch_row(r.first + next, r.features);
      fetch_row(r.second + next, r.features);
    }
    const int64_t id = r.id[i], age = r.step - r.at[id];
    T *w = r.weight + id * r.features, *m = r.first + id * r.features, *v = r.second + id * r.features;
    if (age > 0) {
      const double* owed = r.owed + 2 * (r.at[id] - r.settled);
      const T move = T(owed[0]), near = T(owed[0] > 0 ? r.eps * owed[1] / owed[0] : r.eps);
      const T fade1 = T(age < r.ages ? r.fade[2 * age] : std::pow(r.beta1, double(age)));
      const T fade2 = T(age < r.ages ? r.fade[2 * age + 1] : std::pow(r.beta2, double(age)));
      for (int64_t d = 0; d < r.features; d += L) {
        const int64_t left = r.features - d;
        const Vec<T> first = load_some<T>(m + d, left), second = load_some<T>(v + d, left);
        const Vec<T> moved = load_some<T>(w + d, left) - move * first / (square_root(second) + near);
        store_some(w + d, moved, left);
        store_some(m + d, first * fade1, left);
        store_some(v + d, second * fade2, left);
      }
      r.at[id] = int32_t(r.step);
    }
    if (r.out != nullptr) __builtin_memcpy(r.out + i * r.features, w, r.features * sizeof(T));
  }
}

template <class T>
void step_adam_rows(const AdamRows<T>& r, int64_t begin, int64_t end) {
  constexpr int64_t L = kLanes<T>;
  const T beta1 = T(r.beta1), rest1 = T(1 - r.beta1), beta2 = T(r.beta2), rest2 = T(1 - r.beta2);
  const T rate = T(r.rate), unroot = T(1 / r.root), eps = T(r.eps), scale = T(r.scale);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) {
      const int64_t next = r.id[i + kAhead] * r.features;
      fetch_row(r.weight + next, r.features);
      fetch_row(r.first + next, r.features);
      fetch_row(r.second + next, r.features);
    }
    const int64_t id = r.id[i];
    T *w = r.weight + id * r.features, *m = r.first + id * r.features, *v = r.second + id * r.features;
    for (int64_t d = 0; d < r.features; d += L) {
      const int64_t left = r.features - d;
      const Vec<T> g = load_some<T>(r.grad + i * r.features + d, left) * scale;
      const Vec<T> first = beta1 * load_some<T>(m + d, left) + rest1 * g;
      const Vec<T> second = beta2 * load_some<T>(v + d, left) + rest2 * g * g;
      store_some(m + d, first, left);
      store_some(v + d, second, left);
      const Vec<T> moved = load_some<T>(w + d, left) - rate * first / (square_root(second) * unroot + eps);
      store_some(w + d, moved, left);
    }
    r.at[id] = int32_t(r.step);
  }
}

template <class T>
void step_adagrad_rows(const AdagradRows<T>& r, int64_t begin, int64_t end) {
  constexpr int64_t L = kLanes<T>;
  const T scale = T(r.scale);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) {
      fetch_row(r.weight + r.id[i + kAhead] * r.features, r.features);
      __builtin_prefetch(r.sum + r.id[i + kAhead]);
    }
    const int64_t id = r.id[i];
    const T* grad = r.grad + i * r.features;
    Vec<T> squares = {};
    for (int64_t d = 0; d < r.features; d += L) {
      const Vec<T> g = load_some<T>(grad + d, r.features - d) * scale;
      squares += g * g;
    }
    r.sum[id] += sum_lanes<T>(squares) / T(r.features);
    const T factor = T(r.rate * r.scale) / (std::sqrt(r.sum[id]) + T(r.eps));
    T* w = r.weight + id * r.features;
    for (int64_t d = 0; d < r.features; d += L) {
      const int64_t left = r.features - d;
      store_some(w + d, load_some<T>(w + d, left) - factor * load_some<T>(grad + d, left), left);
    }
  }
}

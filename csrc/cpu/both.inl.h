// Both directions of one square matrix of similarities: log-sum-exps over its rows and over its columns, and the weights
// of both. The matrix is in memory, as torch's product left it.
// Included once per instruction set, inside its namespace and target region; includes nothing.

// The first `count` logits, -inf behind.
template <class T>
inline Vec<T> load_logits(const T* x, int64_t count) {
  if (count >= kLanes<T>) return load(x);
  T wide[kLanes<T>];
  for (int64_t i = 0; i < kLanes<T>; ++i) wide[i] = i < count ? x[i] : -T(__builtin_huge_val());
  return load(wide);
}

template <class T>
inline void store_some(T* x, int64_t count, Vec<T> v) {
  __builtin_memcpy(x, &v, (count < kLanes<T> ? count : kLanes<T>)*sizeof(T));
}

// 2^(x - top); infinite where x is, which exp2 does not take.
template <class T>
inline Vec<T> weight_of(Vec<T> x, Vec<T> top) {
  const Vec<T> infinity = splat(T(__builtin_huge_val()));
  return x == infinity ? infinity : exp2<T>(x - top);
}

// Finite, so that weights in a row of -inf alone are 0, and those beside a logit of +inf are not NaN.
template <class T>
inline Vec<T> finite_top(Vec<T> top) {
  const Vec<T> most = splat(T(sizeof(T) == 4 ? __FLT_MAX__ : __DBL_MAX__));
  return top > most ? most : top < -most ? -most : top;
}

// Rows [begin, end) of the products x [n, n]: scaled to logits in units of log 2, in place, with -inf where ids are equal
// or, without ids, on the diagonal. pos is in natural units; sum is that of the weights relative to top.
template <class T>
void both_rows(T* x, int64_t n, T scale, T log2_scale, const int64_t* id, int64_t begin, int64_t end, T* pos, T* top,
               T* sum) {
  constexpr int64_t L = kLanes<T>;
  constexpr T infinity = T(__builtin_huge_val());
  for (int64_t i = begin; i < end; ++i) {
    T* row = x + i * n;
    pos[i] = row[i] * scale;
    for (int64_t j = 0; j < n; ++j) row[j] *= log2_scale;
    if (id == nullptr) row[i] = -infinity;
    for (int64_t j = 0; id != nullptr && j < n; ++j) row[j] = id[j] == id[i] ? -infinity : row[j];
    Vec<T> highest = splat(-infinity);
    for (int64_t j = 0; j < n; j += L) highest = max<T>(highest, load_logits(row + j, n - j));
    T best = highest[0];
    for (int64_t lane = 1; lane < L; ++lane) best = highest[lane] > best ? highest[lane] : best;
    const Vec<T> base = finite_top<T>(splat(best));
    Vec<T> total = {};
    for (int64_t j = 0; j < n; j += L) total += weight_of<T>(load_logits(row + j, n - j), base);
    top[i] = base[0];
    sum[i] = sum_lanes<T>(total);
  }
}

// The same over columns [begin, end) of logits x [n, n].
template <class T>
void both_columns(const T* x, int64_t n, int64_t begin, int64_t end, T* top, T* sum) {
  constexpr int64_t L = kLanes<T>, kChunk = 256, kStrip = 64;  // two levels keep the rounding of long sums small
  for (int64_t first = begin; first < end; first += kChunk) {
    const int64_t count = end - first < kChunk ? end - first : kChunk;
    Vec<T> base[kChunk / L], total[kChunk / L], part[kChunk / L];
    for (int64_t c = 0; c < count; c += L) base[c / L] = splat(-T(__builtin_huge_val()));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < count; c += L) {
        base[c / L] = max<T>(base[c / L], load_logits(x + i * n + first + c, count - c));
      }
    }
    for (int64_t c = 0; c < count; c += L) {
      base[c / L] = finite_top<T>(base[c / L]);
      total[c / L] = Vec<T>{};
    }
    for (int64_t strip = 0; strip < n; strip += kStrip) {
      for (int64_t c = 0; c < count; c += L) part[c / L] = Vec<T>{};
      for (int64_t i = strip; i < n && i < strip + kStrip; ++i) {
        for (int64_t c = 0; c < count; c += L) {
          part[c / L] += weight_of<T>(load_logits(x + i * n + first + c, count - c), base[c / L]);
        }
      }
      for (int64_t c = 0; c < count; c += L) total[c / L] += part[c / L];
    }
    for (int64_t c = 0; c < count; c += L) {
      store_some(top + first + c, count - c, base[c / L]);
      store_some(sum + first + c, count - c, total[c / L]);
    }
  }
}

// Rows [begin, end) of out_ij = row_factor_i 2^(x_ij - row_top_i) + column_factor_j 2^(x_ij - column_top_j), 0 where ids
// are equal, and `diagonal` on the diagonal.
template <class T>
void both_weights(const T* x, int64_t n, const int64_t* id, int64_t begin, int64_t end, const T* row_top,
                  const T* row_factor, const T* column_top, const T* column_factor, const T* diagonal, T* out) {
  constexpr int64_t L = kLanes<T>;
  for (int64_t i = begin; i < end; ++i) {
    T* row = out + i * n;
    const Vec<T> base = splat(row_top[i]), factor = splat(row_factor[i]);
    for (int64_t j = 0; j < n; j += L) {
      const Vec<T> v = load_logits(x + i * n + j, n - j);
      const Vec<T> there = weight_of<T>(v, base), back = weight_of<T>(v, load_some<T>(column_top + j, n - j));
      store_some(row + j, n - j, there * factor + back * load_some<T>(column_factor + j, n - j));
    }
    for (int64_t j = 0; id != nullptr && j < n; ++j) row[j] = id[j] == id[i] ? T(0) : row[j];
    row[i] = diagonal[i];
  }
}

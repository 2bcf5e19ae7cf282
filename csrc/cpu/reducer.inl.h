// Reducers turn similarities into weights: exp relative to a running maximum (forward) or to a known log-sum-exp
// (backward), and for losses over pairs the sigmoid, with softplus summed. A reducer has six functions: start a walk,
// weigh one row of a tile, say above which limit a weight of a row needs all its bits, end a strip of columns, finish the
// walk, and combine the parts of a row. The template parameter P is the product (product.inl.h), which owns the shape
// of a tile.
// Included once per instruction set, inside its namespace and target region; includes nothing.

// The memory of one walk over a part.
template <class P>
struct Walk {
  using T = typename P::T;
  int64_t tiles;
  int64_t stride;    // of a row of out
  T* out;            // [rows][stride] or null
  T* maximum;        // [rows]
  T* sum;            // [rows][lanes]: sums over the finished strips
  T* strip_sum;      // [rows][lanes]: sums over the present strip; two levels keep the rounding of long sums small
  T* strip_maximum;  // [strips][rows] or null: the maximum to which the kept weights of a strip are relative
  T* weights;        // [panel][tile][cell]: weights of the present strip
  // Weights of row `row` of the part in a panel of the strip.
  T* row(int64_t row, int64_t panel) const { return weights + (panel * tiles * P::kRows + row) * P::kColumns; }
};

// A tile of rows and a panel of columns. Its pointers are copies: those in Walk would be read again after each store.
template <class P>
struct Cell {
  using T = typename P::T;
  int64_t row, panel;  // the first row, and the panel of the strip
  const T* maximum;
  T *sum, *weights;
  Cell(const Walk<P>& w, int64_t tile, int64_t panel_)
      : row(tile * P::kRows),
        panel(panel_),
        maximum(w.maximum + row),
        sum(w.strip_sum + row * kLanes<T>),
        weights(w.row(row, panel)) {}
  inline __attribute__((always_inline)) void add(int64_t r, Vec<T> x) const {
    store(sum + r * kLanes<T>, load(sum + r * kLanes<T>) + x);
  }
  inline __attribute__((always_inline)) void keep(int64_t r, Vec<T> w0, Vec<T> w1) const {
    store(weights + r * P::kColumns, w0);
    store(weights + r * P::kColumns + kLanes<T>, w1);
  }
};

template <class T>
inline void scale_row(T* x, int64_t count, T factor) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// Writes one row of pass.out and pass.out_extra: the sum over the parts of factor(part, row) * its row.
template <class P, class F>
inline void write_row(const Pass<typename P::T>& pass, const Part<typename P::T>* parts, int64_t count, int64_t row,
                      const F& factor) {
  using T = typename P::T;
  constexpr int64_t kChunk = 256;
  const int64_t i = row - parts[0].row_begin;
  const int64_t features = pass.features + (pass.columns.extra != nullptr ? 1 : 0), stride = P::whole_panels(features);
  for (int64_t first = 0; first < features; first += kChunk) {
    const int64_t width = features - first < kChunk ? features - first : kChunk;
    T total[kChunk];
    for (int64_t g = 0; g < count; ++g) {
      const T f = factor(parts[g], i);
      const T* out = parts[g].out + i * stride + first;
      for (int64_t d = 0; d < width; ++d) total[d] = g == 0 ? f * out[d] : total[d] + f * out[d];
    }
    const int64_t wanted = pass.features - first < width ? pass.features - first : width;
    if (pass.out.data != nullptr) write_part(pass.out, row * pass.features + first, wanted, total);
    if (pass.out_extra != nullptr && wanted < width) pass.out_extra[row] = total[wanted];
  }
}

// Weights relative to a running maximum (forward). The maximum is raised only when a similarity exceeds it by more than
// kSlack: weights stay below 2^8, far from overflow, and most tiles leave the maximum alone. A similarity of +inf never
// becomes the maximum. Its weight is 0 and the sum of the row becomes infinite instead; a NaN that follows still turns
// this sum into NaN.
template <class P, bool kWeights>
struct LogSumExp {
  using T = typename P::T;
  static constexpr T kSlack = 8;

  static void start(Walk<P>& w) {
    for (int64_t i = 0; i < w.tiles * P::kRows * kLanes<T>; ++i) w.sum[i] = w.strip_sum[i] = 0;
    // The first maximum is finite: relative to -inf, a first tile that is all -inf would get weights NaN instead of 0.
    for (int64_t i = 0; i < w.tiles * P::kRows; ++i) w.maximum[i] = T(sizeof(T) == 4 ? -1e38 : -1e300);
  }

  // x0 and x1: the similarities of row r of the cell.
  static inline __attribute__((always_inline)) void weigh(Walk<P>& w, const Cell<P>& cell, int64_t r, Vec<T> x0,
                                                          Vec<T> x1) {
    Vec<T> above0 = x0 - cell.maximum[r], above1 = x1 - cell.maximum[r];
    if (__builtin_expect(any_greater(max<T>(above0, above1), splat(kSlack)), 0)) {
      Vec<T> x[2] = {x0, x1};  // copies: taking the address of x0 and x1 would keep these in memory
      raise(w, cell.row + r, cell.panel, x);
      above0 = x[0] - cell.maximum[r];
      above1 = x[1] - cell.maximum[r];
    }
    const Vec<T> w0 = exp2<T>(above0), w1 = exp2<T>(above1);
    cell.add(r, w0 + w1);
    if (kWeights) cell.keep(r, w0, w1);
  }

  // Raises the maximum of a row, rescales all that is relative to the old one, and moves +inf from x to the sum.
  static __attribute__((noinline)) void raise(Walk<P>& w, int64_t row, int64_t panel, Vec<T> (&x)[2]) {
    constexpr T infinity = T(__builtin_huge_val());
    T* sum = w.sum + row * kLanes<T>;
    T highest = w.maximum[row];
    for (int side = 0; side < 2; ++side) {
      for (int64_t i = 0; i < kLanes<T>; ++i) {
        if (x[side][i] == infinity) {
          x[side][i] = -infinity;
          sum[0] += infinity;
        }
        highest = x[side][i] > highest ? x[side][i] : highest;
      }
    }
    if (highest == w.maximum[row]) return;
    const T factor = std::exp2(w.maximum[row] - highest);
    w.maximum[row] = highest;
    if (sum[0] != infinity) scale_row(sum, kLanes<T>, factor);
    scale_row(w.strip_sum + row * kLanes<T>, kLanes<T>, factor);
    if (!kWeights) return;
    for (int64_t p = 0; p < panel; ++p) scale_row(w.row(row, p), P::kColumns, factor);
    if (w.out != nullptr) scale_row(w.out + row * w.stride, w.stride, factor);
  }

  // Where a softmax is nearly all on the positive, its mean and the positive cancel, and the rounding of the one large weight
  // to 16 bits would be larger than what is left. Rounding the weights below this share of the sum so far changes the mean
  // by no more than rounding the columns.
  static T limit(const Walk<P>& w, int64_t row) {
    constexpr T kShare = T(1) / 16;
    return kShare * sum_lanes<T>(load(w.sum + row * kLanes<T>) + load(w.strip_sum + row * kLanes<T>));
  }

  static void end_strip(Walk<P>& w, int64_t strip) {
    for (int64_t i = 0; i < w.tiles * P::kRows * kLanes<T>; ++i) {
      w.sum[i] += w.strip_sum[i];
      w.strip_sum[i] = 0;
    }
    if (w.strip_maximum != nullptr) {
      __builtin_memcpy(w.strip_maximum + strip * w.tiles * P::kRows, w.maximum, w.tiles * P::kRows * sizeof(T));
    }
  }

  // Also rescales the kept weights of strips that ended with a lower maximum.
  static void finish(const Walk<P>& w, const Part<T>& part) {
    const int64_t rows = w.tiles * P::kRows, per_strip = P::kStrip / P::kColumns;
    for (int64_t i = 0; i < rows; ++i) part.sum[i] = sum_lanes<T>(load(w.sum + i * kLanes<T>));
    if (w.strip_maximum == nullptr) return;
    for (int64_t first = part.panel_begin; first < part.panel_end; first += per_strip) {
      const T* maximum = w.strip_maximum + (first - part.panel_begin) / per_strip * rows;
      for (int64_t i = 0; i < rows; ++i) {
        if (maximum[i] == w.maximum[i]) continue;
        const T factor = std::exp2(maximum[i] - w.maximum[i]);
        for (int64_t p = first; p < first + per_strip && p < part.panel_end; ++p) {
          scale_row(part.weights + ((p - part.panel_begin) * rows + i) * P::kColumns, P::kColumns, factor);
        }
      }
    }
  }

  static void combine(const Pass<T>& pass, const Part<T>* parts, int64_t count, int64_t begin, int64_t end) {
    constexpr T infinity = T(__builtin_huge_val());
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row - parts[0].row_begin;
      T highest = parts[0].maximum[i];
      for (int64_t g = 1; g < count; ++g) highest = parts[g].maximum[i] > highest ? parts[g].maximum[i] : highest;
      T sum = 0;
      for (int64_t g = 0; g < count; ++g) {
        const T part = parts[g].sum[i];
        sum += part == infinity ? part : part * std::exp2(parts[g].maximum[i] - highest);
      }
      pass.reduced[row] = T((double(highest) + std::log2(double(sum))) * 0.693147180559945309417232121458);
      // A row whose every column is excluded has a mean of 0. A row with a similarity of +inf has NaN, the value of
      // exp(x - lse) there.
      const T inverse = sum == 0 ? T(0) : sum == infinity ? T(__builtin_nan("")) : 1 / sum;
      for (int64_t g = 0; g < count; ++g) parts[g].sum[i] = inverse * std::exp2(parts[g].maximum[i] - highest);
      if (parts[0].out == nullptr) continue;
      if (sum == 0) {  // weights of 0 times an infinite column have left NaN in out
        const int64_t stride = P::whole_panels(pass.features + (pass.columns.extra != nullptr ? 1 : 0));
        for (int64_t g = 0; g < count; ++g) __builtin_memset(parts[g].out + i * stride, 0, stride * sizeof(T));
      }
      write_row<P>(pass, parts, count, row, [](const Part<T>& p, int64_t j) { return p.sum[j]; });
    }
  }
};

// Weights relative to a known log-sum-exp, which is part of the shift of the columns (backward).
template <class P>
struct KnownSum {
  using T = typename P::T;
  static void start(Walk<P>&) {}
  static inline __attribute__((always_inline)) void weigh(Walk<P>&, const Cell<P>& cell, int64_t r, Vec<T> x0,
                                                          Vec<T> x1) {
    cell.keep(r, exp2<T>(x0), exp2<T>(x1));
  }
  static T limit(const Walk<P>&, int64_t) { return T(__builtin_huge_val()); }  // no weight: nothing cancels these sums
  static void end_strip(Walk<P>&, int64_t) {}
  static void finish(const Walk<P>&, const Part<T>&) {}
  static void combine(const Pass<T>& pass, const Part<T>* parts, int64_t count, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      write_row<P>(pass, parts, count, row, [](const Part<T>&, int64_t) { return T(1); });
    }
  }
};

// log2(1 + t) for t in [0, 1]. float: a minimax polynomial times t, with a relative error of 6.1e-8; it needs no division,
// which takes as long as eight multiply-adds. double: the series of 2 atanh(t / (2 + t)) / ln 2, each term at most a
// ninth of the one before.
inline Vec<float> log2_1p(Vec<float> t) {
  Vec<float> p = splat(0.00754917292f);
  p = p * t - 0.0425670250f;
  p = p * t + 0.112856133f;
  p = p * t - 0.197118919f;
  p = p * t + 0.275641388f;
  p = p * t - 0.358408466f;
  p = p * t + 0.480692957f;
  p = p * t - 0.721340208f;
  p = p * t + 1.44269500f;
  return p * t;
}

inline Vec<double> log2_1p(Vec<double> t) {
  constexpr int kTerms = 18;
  const Vec<double> z = t / (t + 2.0), square = z * z;
  Vec<double> p = splat(1.0 / (2 * kTerms - 1));
#pragma GCC unroll 18
  for (int k = kTerms - 1; k > 0; --k) p = p * square + 1.0 / (2 * k - 1);
  return p * z * (2 / 0.693147180559945309417232121458);
}

// exp2(-|x|), from which softplus and sigmoid are computed without overflow for either sign of x.
template <class T>
inline Vec<T> exp2_minus_abs(Vec<T> x) {
  return exp2<T>(x > Vec<T>{} ? -x : x);
}

template <class T>
inline Vec<T> sigmoid_of(Vec<T> x, Vec<T> e) {
  return (x > Vec<T>{} ? splat(T(1)) : e) / (e + T(1));
}

// Sums softplus; the weights are sigmoids (forward). There is no maximum, and nothing is rescaled.
template <class P, bool kWeights>
struct SoftplusSum {
  using T = typename P::T;
  static void start(Walk<P>& w) { LogSumExp<P, kWeights>::start(w); }

  static inline __attribute__((always_inline)) void weigh(Walk<P>&, const Cell<P>& cell, int64_t r, Vec<T> x0,
                                                          Vec<T> x1) {
    const Vec<T> e0 = exp2_minus_abs<T>(x0), e1 = exp2_minus_abs<T>(x1);
    cell.add(r, (max<T>(x0, Vec<T>{}) + log2_1p(e0)) + (max<T>(x1, Vec<T>{}) + log2_1p(e1)));
    if (kWeights) cell.keep(r, sigmoid_of<T>(x0, e0), sigmoid_of<T>(x1, e1));
  }

  static T limit(const Walk<P>&, int64_t) { return T(__builtin_huge_val()); }  // no weight: nothing cancels these sums
  static void end_strip(Walk<P>& w, int64_t strip) { LogSumExp<P, kWeights>::end_strip(w, strip); }
  static void finish(const Walk<P>& w, const Part<T>& part) {
    for (int64_t i = 0; i < w.tiles * P::kRows; ++i) part.sum[i] = sum_lanes<T>(load(w.sum + i * kLanes<T>));
  }

  static void combine(const Pass<T>& pass, const Part<T>* parts, int64_t count, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double sum = 0;
      for (int64_t g = 0; g < count; ++g) sum += parts[g].sum[row - parts[0].row_begin];
      pass.reduced[row] = T(sum * 0.693147180559945309417232121458);
      for (int64_t g = 0; g < count; ++g) parts[g].sum[row - parts[0].row_begin] = 1;  // kept weights stay as they are
      if (parts[0].out != nullptr) write_row<P>(pass, parts, count, row, [](const Part<T>&, int64_t) { return T(1); });
    }
  }
};

// The weights are sigmoids; nothing is summed over a row (backward).
template <class P>
struct Sigmoid : KnownSum<P> {
  using T = typename P::T;
  static inline __attribute__((always_inline)) void weigh(Walk<P>&, const Cell<P>& cell, int64_t r, Vec<T> x0,
                                                          Vec<T> x1) {
    cell.keep(r, sigmoid_of<T>(x0, exp2_minus_abs<T>(x0)), sigmoid_of<T>(x1, exp2_minus_abs<T>(x1)));
  }
};

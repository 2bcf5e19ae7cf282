// Reducers turn a tile of similarities into logits in units of log 2, then into weights, and keep the sums of a row.
// Must not load tiles or multiply matrices: walk.cuh does.
//
//   forward:   rows = queries, columns = keys;    weight = 2^(x - running maximum)
//   backward:  rows = keys,    columns = queries; weight = scale grad_lse 2^(x - lse of the column)
//
// For losses over pairs softplus(x) is summed, and sigmoid(x) takes the place of the power.
#pragma once
#include "tile.cuh"

namespace fastcl::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kInfinity = __builtin_huge_valf();
constexpr uint32_t kAllLanes = 0xffffffffu;

// What a walk reads and writes. Vectors are indexed by query or key as noted, whether queries are its rows or columns.
struct WalkArgs {
  const void *row_data, *column_data;  // 16-byte aligned rows of row_bytes
  int64_t rows, columns;
  int32_t row_bytes, features, tiles_per_split;
  const float* scale;  // [queries], or [1] with scale_step 0, or null: 1
  int32_t scale_step;
  float factor, log2_factor;
  const float* bias;                  // [keys] or null
  const float *lse, *grad_lse;        // [queries], backward only
  const float* offset;                // [queries] or null, softplus only
  const float* cap;                   // [queries] or null: keys with a greater scaled similarity are left out
  const int64_t *row_id, *column_id;  // of the walk's rows and columns, or null
  float2* state;                      // [splits, rows], forward: (base, sum of weights) with lse = base + log2(sum),
                                      // or (softplus sum, sum of weights)
  float* extra;                       // [splits, rows] or null, backward: gradient of the bias
  float* out;                         // [splits, rows, features], sums of weight * column
};

// The largest maximum that weights are relative to. A logit of +inf exceeds it: its weight, and the row's sum, become
// infinite. Relative to +inf itself they would be inf - inf = NaN.
constexpr float kMostTop = 3e38f;

// x, or NaN for an infinity.
template <class C>
__device__ __forceinline__ C finite_or_nan(C x) {
  return x + (x - x);
}

// The number that multiplies the similarities of a query.
__device__ __forceinline__ float scale_of(const WalkArgs& p, int64_t query, float factor) {
  return finite_or_nan((p.scale != nullptr ? p.scale[query * p.scale_step] : 1.f) * factor);
}

// Reduces v with f over the four lanes that share a row.
template <class F>
__device__ __forceinline__ float over_quad(float v, const F& f) {
  v = f(v, __shfl_xor_sync(kAllLanes, v, 1));
  return f(v, __shfl_xor_sync(kAllLanes, v, 2));
}

// What a walk needs to know of a column that is a key: the bias added to x. -inf excludes the column.
struct KeyColumns {
  using Column = float;
  static constexpr bool kQueryRows = true;
  static __device__ __forceinline__ Column column(const WalkArgs& p, int64_t j) {
    return p.bias != nullptr ? p.bias[j] * kLog2e : 0.f;
  }
  static __device__ __forceinline__ Column outside() { return -kInfinity; }
};

__device__ __forceinline__ float offset_of(const WalkArgs& p, int64_t query) {
  return p.offset != nullptr ? p.offset[query] * kLog2e : 0.f;
}

// Forward. With kShared the four lanes of a row agree on its maximum after every tile, because the product with the
// columns takes the weights of all four. Otherwise each lane keeps a maximum of its own until `finish`.
template <class E, bool kShared>
struct LogSumExp : KeyColumns {
  float scale, sum = 0.f;
  float top = -1e30f;  // finite: relative to -inf, a first tile that is all -inf would get weights NaN instead of 0

  __device__ __forceinline__ LogSumExp() {}
  __device__ __forceinline__ LogSumExp(const WalkArgs& p, int64_t row)
      : scale(row < p.rows ? scale_of(p, row, p.log2_factor) : 0.f) {}
  __device__ __forceinline__ float logit(float dot, const Column& c) const { return fmaf(dot, scale, c); }
  __device__ __forceinline__ float scaled(float dot, const Column&) const { return dot * scale; }

  // Turns the logits of a lane's rows into weights. The caller must multiply the earlier sums of row r by rescale[r].
  // Row r is half r % 2 of the accumulators of fragment r / 2.
  template <int kFrag, int kCols>
  static __device__ __forceinline__ void weigh(LogSumExp (&rows)[2 * kFrag], float (&x)[kFrag][kCols][4], const Column*,
                                               float (&rescale)[2 * kFrag]) {
    UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
      LogSumExp& row = rows[r];
      float best = row.top;
      UNROLL for (int n = 0; n < kCols; ++n) {
        UNROLL for (int c = 0; c < 2; ++c) best = fmaxf(best, x[r / 2][n][r % 2 * 2 + c]);
      }
      best = fminf(best, kMostTop);
      if (kShared) best = over_quad(best, [](float a, float b) { return fmaxf(a, b); });
      const float base = best - E::kHeadroom;
      float part = 0.f;
      UNROLL for (int n = 0; n < kCols; ++n) {
        UNROLL for (int c = 0; c < 2; ++c) {
          float& v = x[r / 2][n][r % 2 * 2 + c];
          part += v = exp2_fast(v - base);
        }
      }
      rescale[r] = exp2_fast(row.top - best);
      row.sum = fmaf(row.sum, rescale[r], part);
      row.top = best;
    }
  }

  // Merges the sums of the lanes of a row. All lanes of the warp must call it together.
  __device__ __forceinline__ void finish() {
    const float best = over_quad(top, [](float a, float b) { return fmaxf(a, b); });
    sum = over_quad(sum * exp2_fast(top - best), [](float a, float b) { return a + b; });
    top = best;
  }
  __device__ __forceinline__ void write(const WalkArgs& p, int64_t at) const {
    p.state[at] = make_float2(top - E::kHeadroom, sum);
  }
  __device__ __forceinline__ float unit() const { return 1.f; }
};

// The sigmoid of x in units of log 2, given t = 2^-|x|. Free of cancellation; NaN gives NaN.
__device__ __forceinline__ float sigmoid(float x, float t) { return __fdividef(x >= 0.f ? 1.f : t, 1.f + t); }

template <class E>
struct SoftplusSum : KeyColumns {
  static constexpr float kUnit = 1.f / (1 << E::kHeadroom);
  float scale, shift, total = 0.f, weight = 0.f;

  __device__ __forceinline__ SoftplusSum() {}
  __device__ __forceinline__ SoftplusSum(const WalkArgs& p, int64_t row)
      : scale(row < p.rows ? scale_of(p, row, p.log2_factor) : 0.f), shift(row < p.rows ? offset_of(p, row) : 0.f) {}
  __device__ __forceinline__ float logit(float dot, const Column& c) const { return fmaf(dot, scale, c + shift); }
  __device__ __forceinline__ float scaled(float dot, const Column&) const { return dot * scale; }

  template <int kFrag, int kCols>
  static __device__ __forceinline__ void weigh(SoftplusSum (&rows)[2 * kFrag], float (&x)[kFrag][kCols][4],
                                               const Column*, float (&rescale)[2 * kFrag]) {
    UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
      float total = 0.f, weight = 0.f;
      UNROLL for (int n = 0; n < kCols; ++n) {
        UNROLL for (int c = 0; c < 2; ++c) {
          float& v = x[r / 2][n][r % 2 * 2 + c];
          const float t = exp2_fast(-fabsf(v));
          total += fmaf(fmaxf(v, 0.f), kLn2, log1pf(t));
          v = sigmoid(v, t);
          weight += v;
          v *= 1.f / kUnit;
        }
      }
      rows[r].total += total;
      rows[r].weight += weight;
      rescale[r] = 1.f;
    }
  }

  __device__ __forceinline__ void finish() {
    const auto add = [](float a, float b) { return a + b; };
    total = over_quad(total, add);
    weight = over_quad(weight, add);
  }
  __device__ __forceinline__ void write(const WalkArgs& p, int64_t at) const {
    p.state[at] = make_float2(total, weight);
  }
  __device__ __forceinline__ float unit() const { return kUnit; }
};

// Backward: the log-sum-exp of every column is known, or none is needed (kSoftplus).
template <class E, bool kSoftplus>
struct KnownSum {
  static constexpr bool kQueryRows = false;
  struct Column {
    float2 logit;   // logit = x * similarity + y (and the row's shift)
    float2 weight;  // 2^logit times x goes into the gradient of the key, times y into that of the bias
  };
  static __device__ __forceinline__ Column column(const WalkArgs& p, int64_t i) {
    // A query whose every key is excluded has a constant lse = -inf: its gradients are 0, even where the loss on top
    // sends NaN. Its logits stay -inf.
    const bool empty = !kSoftplus && p.lse[i] == -kInfinity;
    const float grad = empty ? 0.f : p.grad_lse[i];
    const float shift = kSoftplus ? offset_of(p, i) : empty ? -kInfinity : -p.lse[i] * kLog2e;
    return {make_float2(scale_of(p, i, p.log2_factor), shift), make_float2(grad * scale_of(p, i, p.factor), grad)};
  }
  static __device__ __forceinline__ Column outside() { return {make_float2(0.f, -kInfinity), make_float2(0.f, 0.f)}; }

  float shift, extra = 0.f;
  float in_units = 0x1p-100f;  // the unit of the row's weights, a power of two; for elements of narrow range (kNarrow)

  __device__ __forceinline__ KnownSum() {}
  __device__ __forceinline__ KnownSum(const WalkArgs& p, int64_t row)
      : shift(row < p.rows && p.bias != nullptr ? p.bias[row] * kLog2e : 0.f) {}
  __device__ __forceinline__ float logit(float dot, const Column& c) const {
    return fmaf(dot, c.logit.x, c.logit.y + shift);
  }
  __device__ __forceinline__ float scaled(float dot, const Column& c) const { return dot * c.logit.x; }

  template <int kFrag, int kCols>
  static __device__ __forceinline__ void weigh(KnownSum (&rows)[2 * kFrag], float (&x)[kFrag][kCols][4],
                                               const Column* columns, float (&rescale)[2 * kFrag]) {
    UNROLL for (int n = 0; n < kCols; ++n) {
      UNROLL for (int c = 0; c < 2; ++c) {
        const float2 weight = columns[n * 8 + c].weight;
        UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
          float& v = x[r / 2][n][r % 2 * 2 + c];
          v = kSoftplus ? sigmoid(v, exp2_fast(-fabsf(v))) : exp2_fast(v);
          rows[r].extra = fmaf(v, weight.y, rows[r].extra);
          v *= weight.x;
        }
      }
    }
    UNROLL for (int r = 0; r < 2 * kFrag; ++r) rescale[r] = E::kNarrow ? rows[r].to_units(x[r / 2], r % 2) : 1.f;
  }

  // Divides the weights of half a fragment by the unit of the row, which is raised first if they would exceed 2^15.
  // Returns what the earlier sums of the row must be multiplied by.
  template <int kCols>
  __device__ __forceinline__ float to_units(float (&x)[kCols][4], int half) {
    float largest = 0.f;
    UNROLL for (int n = 0; n < kCols; ++n) {
      UNROLL for (int c = 0; c < 2; ++c) largest = fmaxf(largest, fabsf(x[n][2 * half + c]));
    }
    largest = over_quad(largest, [](float a, float b) { return fmaxf(a, b); });
    const float before = in_units;
    if (largest > in_units * 0x1p15f) in_units = __uint_as_float(__float_as_uint(largest) & 0x7f800000u) * 0x1p-14f;
    const float inverse = 1.f / in_units;
    UNROLL for (int n = 0; n < kCols; ++n) { UNROLL for (int c = 0; c < 2; ++c) x[n][2 * half + c] *= inverse; }
    return before * inverse;
  }

  __device__ __forceinline__ void finish() {
    extra = over_quad(extra, [](float a, float b) { return a + b; });
  }
  __device__ __forceinline__ void write(const WalkArgs& p, int64_t at) const {
    if (p.extra != nullptr) p.extra[at] = extra;
  }
  __device__ __forceinline__ float unit() const { return E::kNarrow ? in_units : 1.f; }
};

}  // namespace fastcl::cuda

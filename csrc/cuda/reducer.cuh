// What a tile of similarities becomes: logits in units of log 2, then weights, and what is known of a row afterwards.
// Tiles, products and memory are in walk.cuh.
//
//   forward:   rows = queries, columns = keys;    weight = 2^(x - running maximum)
//   backward:  rows = keys,    columns = queries; weight = scale grad_lse 2^(x - lse of the column)
//
// and for losses over pairs softplus(x) is summed and the weight is sigmoid(x).
#pragma once
#include "tile.cuh"

namespace fastcl::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kInfinity = __builtin_huge_valf();
constexpr uint32_t kAllLanes = 0xffffffffu;

// What a walk reads and writes. Vectors are those of the problem, whichever side they belong to here.
struct WalkArgs {
  const void *row_data, *column_data;  // 16-byte aligned rows of row_bytes
  int64_t rows, columns;
  int32_t row_bytes, features, tiles_per_split;
  const float* scale;  // [queries], [1] (scale_step 0) or null
  int32_t scale_step;
  float factor, log2_factor;
  const float* bias;                  // [keys] or null
  const float *lse, *grad_lse;        // [queries], backward only
  const float* offset;                // [queries] or null, softplus only
  const int64_t *row_id, *column_id;  // of the walk's rows and columns, or null
  float2* state;                      // [splits, rows], forward: (base, sum of weights), lse = base + log2 sum; or
                                      // (total, sum of weights)
  float* extra;                       // [splits, rows] or null, backward: gradient of the bias
  float* out;                         // [splits, rows, features], sums of weights * columns
};

// The largest maximum that weights are relative to. Logits of +inf are above it: their weights, and so the row's sum, are
// infinite and not inf - inf.
constexpr float kMostTop = 3e38f;

// x, or NaN for an infinity.
template <class C>
__device__ __forceinline__ C finite_or_nan(C x) {
  return x + (x - x);
}

// What the similarities of a query are multiplied by.
__device__ __forceinline__ float scale_of(const WalkArgs& p, int64_t query, float factor) {
  return finite_or_nan((p.scale != nullptr ? p.scale[query * p.scale_step] : 1.f) * factor);
}

// Over the four lanes that share a row.
template <class F>
__device__ __forceinline__ float over_quad(float v, const F& f) {
  v = f(v, __shfl_xor_sync(kAllLanes, v, 1));
  return f(v, __shfl_xor_sync(kAllLanes, v, 2));
}

// Columns that are keys: what is added to x; -inf takes the column out.
struct KeyColumns {
  using Column = float;
  static __device__ __forceinline__ Column column(const WalkArgs& p, int64_t j) {
    return p.bias != nullptr ? p.bias[j] * kLog2e : 0.f;
  }
  static __device__ __forceinline__ Column outside() { return -kInfinity; }
};

__device__ __forceinline__ float offset_of(const WalkArgs& p, int64_t query) {
  return p.offset != nullptr ? p.offset[query] * kLog2e : 0.f;
}

// Forward. With kShared the four lanes of a row agree on its maximum after every tile, as products of weights need;
// without, each keeps its own until the end.
template <class E, bool kShared>
struct LogSumExp : KeyColumns {
  float scale, sum = 0.f;
  float top = -1e30f;  // finite, so that a first tile of nothing but -inf gives weights 0 and not NaN

  __device__ __forceinline__ LogSumExp() {}
  __device__ __forceinline__ LogSumExp(const WalkArgs& p, int64_t row)
      : scale(row < p.rows ? scale_of(p, row, p.log2_factor) : 0.f) {}
  __device__ __forceinline__ float logit(float dot, const Column& c) const { return fmaf(dot, scale, c); }

  // Logits of a lane's rows to weights; answers, by row, what its earlier sums are to be multiplied by. Row r is half
  // r % 2 of the accumulators of fragment r / 2.
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

  // Merges the lanes of a row. All lanes of the warp must come here.
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

// sigmoid(x), where t = 2^-|x|: without cancellation, and NaN for NaN.
__device__ __forceinline__ float sigmoid(float x, float t) { return __fdividef(x >= 0.f ? 1.f : t, 1.f + t); }

template <class E>
struct SoftplusSum : KeyColumns {
  static constexpr float kUnit = 1.f / (1 << E::kHeadroom);
  float scale, shift, total = 0.f, weight = 0.f;

  __device__ __forceinline__ SoftplusSum() {}
  __device__ __forceinline__ SoftplusSum(const WalkArgs& p, int64_t row)
      : scale(row < p.rows ? scale_of(p, row, p.log2_factor) : 0.f), shift(row < p.rows ? offset_of(p, row) : 0.f) {}
  __device__ __forceinline__ float logit(float dot, const Column& c) const { return fmaf(dot, scale, c + shift); }

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

// Backward: the sum of every column's weights is known, or none is needed (kSoftplus).
template <class E, bool kSoftplus>
struct KnownSum {
  struct Column {
    float2 logit;   // multiplies and is added to x
    float2 weight;  // multiplies 2^x: for the gradient of the key, for that of the bias
  };
  static __device__ __forceinline__ Column column(const WalkArgs& p, int64_t i) {
    // A row with nothing in its sum passes nothing on, whatever a loss on top sends into it. Its logits, all -inf, stay.
    const bool empty = !kSoftplus && p.lse[i] == -kInfinity;
    const float grad = empty ? 0.f : p.grad_lse[i];
    const float shift = kSoftplus ? offset_of(p, i) : empty ? -kInfinity : -p.lse[i] * kLog2e;
    return {make_float2(scale_of(p, i, p.log2_factor), shift), make_float2(grad * scale_of(p, i, p.factor), grad)};
  }
  static __device__ __forceinline__ Column outside() { return {make_float2(0.f, -kInfinity), make_float2(0.f, 0.f)}; }

  float shift, extra = 0.f;
  float in_units = 0x1p-100f;  // of the weights, where the element's range is narrow: a power of two

  __device__ __forceinline__ KnownSum() {}
  __device__ __forceinline__ KnownSum(const WalkArgs& p, int64_t row)
      : shift(row < p.rows && p.bias != nullptr ? p.bias[row] * kLog2e : 0.f) {}
  __device__ __forceinline__ float logit(float dot, const Column& c) const {
    return fmaf(dot, c.logit.x, c.logit.y + shift);
  }

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

  // The weights of half a fragment in units of the row, which are raised where they no longer reach.
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

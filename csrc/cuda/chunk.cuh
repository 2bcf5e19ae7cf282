// For more features than a walk can hold in registers: the caller computes the similarities of a chunk of rows by
// torch's matrix product, and the kernels here turn them into lse and weights. They must not multiply matrices. The
// compute type is float32.
#pragma once
#include "rows.cuh"

namespace fastcl::cuda {

// Whether column j is left out of the sum of a row: by its id, or by the row's cap.
__device__ __forceinline__ bool left_out(const Problem& p, float dot, float log2_scale, int64_t row, int64_t j) {
  return excluded(p, row, j) || (p.cap != nullptr && dot * log2_scale > static_cast<const float*>(p.cap)[row] * kLog2e);
}

// The logit of a row and column j in units of log 2; -inf if the column is left out.
__device__ __forceinline__ float chunk_logit(const Problem& p, float dot, float log2_scale, int64_t row, int64_t j) {
  if (left_out(p, dot, log2_scale, row, j)) return -kInfinity;
  float shift = p.bias != nullptr ? static_cast<const float*>(p.bias)[j] * kLog2e : 0.f;
  if (p.offset != nullptr) shift += static_cast<const float*>(p.offset)[row] * kLog2e;
  return fmaf(dot, log2_scale, shift);
}

__device__ __forceinline__ float sigmoid(float x) { return sigmoid(x, exp2_fast(-fabsf(x))); }

// Reduces v over the block with f; every thread gets the result.
template <class F>
__device__ __forceinline__ float over_warps(float v, float* scratch, const F& f) {
  UNROLL for (int lanes = 16; lanes > 0; lanes /= 2) v = f(v, __shfl_xor_sync(kAllLanes, v, lanes));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  v = scratch[0];
  UNROLL for (int w = 1; w < kWarps; ++w) v = f(v, scratch[w]);
  __syncthreads();  // scratch may be used again
  return v;
}

// One block for each row.
__global__ void __launch_bounds__(kThreads) chunk_forward(Problem p, Outputs o, Chunk c) {
  SHARED_ARRAY(float, scratch, kWarps);
  const int64_t row = c.begin + blockIdx.x, first = blockIdx.x * p.columns;
  const float* dots = static_cast<const float*>(c.dots) + first;
  const float scale = scale_at<float>(p, row), log2_scale = scale * kLog2e;
  if (o.pos != nullptr && threadIdx.x < 32) {
    const float dot = warp_dot<float>(p, p.query, p.positive, row);
    if (threadIdx.x == 0) static_cast<float*>(o.pos)[row] = scale * dot;
  }
  const bool pairs = p.reducer == Reducer::kSoftplusSum;
  const auto add = [](float a, float b) { return a + b; };
  float top = -1e30f, sum = 0.f, total = 0.f;  // top is finite: see LogSumExp
  for (int64_t j = threadIdx.x; j < p.columns; j += kThreads) {
    const float x = chunk_logit(p, dots[j], log2_scale, row, j);
    if (pairs) {
      total += fmaf(fmaxf(x, 0.f), kLn2, log1pf(exp2_fast(-fabsf(x))));
      sum += sigmoid(x);
    } else {
      const float best = fminf(fmaxf(top, x), kMostTop);
      sum = fmaf(sum, exp2_fast(top - best), exp2_fast(x - best));
      top = best;
    }
  }
  const float best = over_warps(top, scratch, [](float a, float b) { return fmaxf(a, b); });
  sum = over_warps(pairs ? sum : sum * exp2_fast(top - best), scratch, add);
  if (pairs) total = over_warps(total, scratch, add);
  if (threadIdx.x == 0) {
    static_cast<float*>(o.lse)[row] = pairs ? total : (best + log2f(sum)) * kLn2;
    if (o.sum_weight != nullptr) static_cast<float*>(o.sum_weight)[row] = sum;
  }
  if (c.weights == nullptr) return;
  const float share = sum == 0.f ? 0.f : 1.f / sum;
  for (int64_t j = threadIdx.x; j < p.columns; j += kThreads) {
    const float x = chunk_logit(p, dots[j], log2_scale, row, j);
    write(c.weights, c.dtype, first + j, pairs ? sigmoid(x) : exp2_fast(x - best) * share);
  }
}

// One thread for each column, which goes through `rows_per_block` rows. If the gradient of bias is wanted, these are
// all rows of the chunk: a column's sum must have one owner.
__global__ void __launch_bounds__(kThreads) chunk_backward(Problem p, Gradients g, Chunk c, int64_t rows_per_block) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= p.columns) return;
  const int64_t begin = blockIdx.y * rows_per_block, end = min(begin + rows_per_block, c.count);
  float extra = g.bias != nullptr && c.begin != 0 ? static_cast<float*>(g.bias)[j] : 0.f;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = c.begin + i, at = i * p.columns + j;
    const float scale = scale_at<float>(p, row), grad = static_cast<const float*>(g.grad_lse)[row];
    const float dot = static_cast<const float*>(c.dots)[at], log2_scale = scale * kLog2e;
    const float x = chunk_logit(p, dot, log2_scale, row, j);
    float weight = 0.f;
    if (p.reducer == Reducer::kSoftplusSum) {
      weight = sigmoid(x) * grad;
    } else if (const float lse = static_cast<const float*>(g.lse)[row];
               lse != -kInfinity && !left_out(p, dot, log2_scale, row, j)) {
      weight = exp2_fast(fmaf(-lse, kLog2e, x)) * grad;
    }
    extra += weight;
    if (c.weights != nullptr) write(c.weights, c.dtype, at, weight * scale);
  }
  if (g.bias != nullptr) static_cast<float*>(g.bias)[j] = extra;
}

}  // namespace fastcl::cuda

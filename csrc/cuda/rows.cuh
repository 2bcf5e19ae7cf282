// Kernels that need no similarities: they pack rows for a walk, combine the results of its splits, and compute the
// gradients of query, positive and scale, one warp for each row. The template parameter C is the compute type.
#pragma once
#include "cuda/launch.h"
#include "reducer.cuh"

namespace fastcl::cuda {

template <class C>
__device__ __forceinline__ C read(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat64:
      return static_cast<C>(static_cast<const double*>(data)[i]);
    case DType::kBFloat16:
      return static_cast<C>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
    case DType::kFloat16:
      return static_cast<C>(__half2float(static_cast<const __half*>(data)[i]));
    default:
      return static_cast<C>(static_cast<const float*>(data)[i]);
  }
}

template <class C>
__device__ __forceinline__ void write(void* data, DType dtype, int64_t i, C v) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[i] = static_cast<double>(v);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(static_cast<float>(v));
      break;
    case DType::kFloat16:
      static_cast<__half*>(data)[i] = __float2half(static_cast<float>(v));
      break;
    default:
      static_cast<float*>(data)[i] = static_cast<float>(v);
  }
}

template <class C>
__device__ __forceinline__ C scale_at(const Problem& p, int64_t row) {
  const C* scale = static_cast<const C*>(p.scale);
  return finite_or_nan((scale != nullptr ? scale[p.one_scale ? 0 : row] : C(1)) * static_cast<C>(p.factor));
}

// Whether key j is excluded from the sum of query i: their ids are equal.
__device__ __forceinline__ bool excluded(const Problem& p, int64_t i, int64_t j) {
  return p.row_id != nullptr && p.row_id[i] == p.col_id[j];
}

template <class C>
__device__ __forceinline__ C warp_sum(C v) {
  UNROLL for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(kAllLanes, v, lanes);
  return v;
}

// <a_row, b_row>; every lane gets the result.
template <class C>
__device__ __forceinline__ C warp_dot(const Problem& p, const void* a, const void* b, int64_t row) {
  C sum = 0;
  for (int64_t d = threadIdx.x % 32; d < p.features; d += 32) {
    sum += read<C>(a, p.dtype, row * p.features + d) * read<C>(b, p.dtype, row * p.features + d);
  }
  return warp_sum(sum);
}

// A copy of a matrix whose rows are padded with zeros to whole 16-byte pieces, as cp.async needs them.
struct Packing {
  const void* from;
  unsigned char* to;  // null: the rows of `from` can be read as they are
  int64_t rows;
};

// Each thread copies pieces; blockIdx.y is the matrix.
__global__ void __launch_bounds__(kThreads)
    pack_rows(Packing query, Packing key, int64_t features, int element_bytes, int row_bytes) {
  const Packing p = blockIdx.y == 0 ? query : key;
  if (p.to == nullptr) return;
  const int64_t pieces = row_bytes / 16, per_piece = 16 / element_bytes;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.rows * pieces;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i / pieces, first = i % pieces * per_piece;
    for (int64_t e = 0; e < per_piece; ++e) {
      const int64_t d = first + e, from = row * features + d;
      if (element_bytes == 2) {
        const uint16_t* source = static_cast<const uint16_t*>(p.from);
        reinterpret_cast<uint16_t*>(p.to)[i * 8 + e] = d < features ? source[from] : uint16_t(0);
      } else {
        const uint32_t* source = static_cast<const uint32_t*>(p.from);
        reinterpret_cast<uint32_t*>(p.to)[i * 4 + e] = d < features ? source[from] : 0u;
      }
    }
  }
}

// Writes pos, and combines the splits of a walk to lse and mean_key.
__global__ void __launch_bounds__(kThreads)
    finish_forward(Problem p, Outputs o, const float2* state, const float* sums, int splits) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  if (o.pos != nullptr) {
    const float dot = warp_dot<float>(p, p.query, p.positive, row);
    if (lane == 0) static_cast<float*>(o.pos)[row] = scale_at<float>(p, row) * dot;
  }
  const bool softplus = p.reducer == Reducer::kSoftplusSum;
  float base = -kInfinity, sum = 0.f, total = 0.f;
  for (int s = 0; s < splits; ++s) base = fmaxf(base, state[s * p.rows + row].x);
  for (int s = 0; s < splits; ++s) {
    const float2 part = state[s * p.rows + row];
    total += part.x;
    sum += softplus ? part.y : part.y * exp2_fast(part.x - base);
  }
  if (lane == 0) {
    static_cast<float*>(o.lse)[row] = softplus ? total : (base + log2f(sum)) * kLn2;
    if (o.sum_weight != nullptr) static_cast<float*>(o.sum_weight)[row] = sum;
  }
  if (o.mean_key == nullptr) return;
  // A row whose every column is excluded has a mean of 0. An infinite sum gives NaN (inf * 0), the value of exp(x -
  // lse).
  const float share = softplus ? 1.f : sum == 0.f ? 0.f : 1.f / sum;
  for (int64_t d = lane; d < p.features; d += 32) {
    float mean = 0.f;
    for (int s = 0; s < splits; ++s) {
      const int64_t at = s * p.rows + row;
      mean = fmaf(sums[at * p.features + d], softplus ? 1.f : exp2_fast(state[at].x - base), mean);
    }
    static_cast<float*>(o.mean_key)[row * p.features + d] = mean * share;
  }
}

template <class C>
__device__ __forceinline__ void row_gradients(const Problem& p, const Gradients& g, int64_t row) {
  const int lane = threadIdx.x % 32;
  const C scale = scale_at<C>(p, row);
  const C pos = g.grad_pos != nullptr ? static_cast<const C*>(g.grad_pos)[row] : C(0);
  // A row whose every key is excluded has a constant lse = -inf: its gradients are 0, even where the loss on top sends
  // NaN.
  const bool empty = static_cast<const C*>(g.lse)[row] == static_cast<C>(-kInfinity);
  const C lse = empty ? C(0) : static_cast<const C*>(g.grad_lse)[row];
  C along = 0;
  for (int64_t d = lane; d < p.features; d += 32) {
    const int64_t at = row * p.features + d;
    const C query = read<C>(p.query, p.dtype, at);
    if (g.positive != nullptr) write(g.positive, p.dtype, at, scale * pos * query);
    if (g.query == nullptr && g.scale == nullptr) continue;
    C sent = empty ? C(0) : lse * static_cast<const C*>(g.mean_key)[at];
    if (p.positive != nullptr) sent += pos * read<C>(p.positive, p.dtype, at);
    if (g.query != nullptr) write(g.query, p.dtype, at, scale * sent);
    along += query * sent;
  }
  if (g.scale == nullptr) return;
  along = warp_sum(along);
  if (lane == 0) static_cast<C*>(g.scale)[row] = along * static_cast<C>(p.factor);
}

// The first `key_blocks` blocks add up the `splits` parts of the gradients of key and bias (float64 has no such
// blocks). The other blocks compute the gradients of the rows.
template <class C>
__global__ void __launch_bounds__(kThreads)
    finish_backward(Problem p, Gradients g, const float* sums, const float* extra, int splits, int64_t key_blocks) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (blockIdx.x >= key_blocks) {
    const int64_t row = (blockIdx.x - key_blocks) * kWarps + warp;
    if (row < p.rows) row_gradients<C>(p, g, row);
    return;
  }
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (j >= p.columns) return;
  for (int64_t d = lane; g.key != nullptr && d < p.features; d += 32) {
    float sum = 0.f;
    for (int s = 0; s < splits; ++s) sum += sums[(s * p.columns + j) * p.features + d];
    write(g.key, p.dtype, j * p.features + d, sum);
  }
  if (g.bias != nullptr && lane == 0) {
    float sum = 0.f;
    for (int s = 0; s < splits; ++s) sum += extra[s * p.columns + j];
    static_cast<float*>(g.bias)[j] = sum;
  }
}

}  // namespace fastcl::cuda

// The kernels for float64, for gradient checks and small problems: one block for each row, one thread for each column,
// any number of features. They are written for correctness and need not be fast.
#pragma once
#include "rows.cuh"

namespace fastcl::cuda {

// Reduces v over the block with f; every thread gets the result. `scratch` may be used again after the call.
template <class F>
__device__ __forceinline__ double over_block(double v, double* scratch, const F& f) {
  scratch[threadIdx.x] = v;
  __syncthreads();
  double total = scratch[0];
  for (int t = 1; t < kThreads; ++t) total = f(total, scratch[t]);
  __syncthreads();
  return total;
}

// The logit of query i and key j; -inf, and `out` true, if their ids or the query's cap exclude the pair.
__device__ __forceinline__ double logit(const Problem& p, double scale, int64_t i, int64_t j, bool& out) {
  out = excluded(p, i, j);
  if (out) return -kInfinity;
  const double *query = static_cast<const double*>(p.query) + i * p.features,
               *key = static_cast<const double*>(p.key) + j * p.features;
  double dot = 0;
  for (int64_t d = 0; d < p.features; ++d) dot = fma(query[d], key[d], dot);
  out = p.cap != nullptr && scale * dot > static_cast<const double*>(p.cap)[i];
  if (out) return -kInfinity;
  const double bias = p.bias != nullptr ? static_cast<const double*>(p.bias)[j] : 0.0;
  return scale * dot + bias + (p.offset != nullptr ? static_cast<const double*>(p.offset)[i] : 0.0);
}

__device__ __forceinline__ double softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }

// exp(x - lse) or sigmoid(x), by the reducer. The weights of a row with lse = -inf are 0.
__device__ __forceinline__ double weight_of(const Problem& p, double x, double lse) {
  if (p.reducer == Reducer::kLogSumExp) return lse == -kInfinity ? 0.0 : exp(x - lse);
  const double t = exp(-fabs(x));
  return (x >= 0 ? 1.0 : t) / (1.0 + t);
}

// to[d] += sum over t of weights[t] * rows[t][d], for the up to kThreads rows from `first` on; the first tile
// overwrites `to`. Each thread owns every kThreads-th feature.
__device__ __forceinline__ void add_weighted(double* to, const double* weights, const void* matrix, int64_t first,
                                             int64_t count, int64_t features) {
  const double* rows = static_cast<const double*>(matrix) + first * features;
  const int64_t tile = count - first < kThreads ? count - first : kThreads;
  for (int64_t d = threadIdx.x; d < features; d += kThreads) {
    double sum = first == 0 ? 0.0 : to[d];
    for (int64_t t = 0; t < tile; ++t) sum = fma(weights[t], rows[t * features + d], sum);
    to[d] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) forward_double(Problem p, Outputs o) {
  SHARED_ARRAY(double, scratch, kThreads);
  const int64_t i = blockIdx.x;
  const double scale = scale_at<double>(p, i);
  const auto add = [](double a, double b) { return a + b; };
  constexpr double kMostDouble = 1.7e308;  // plays the part of kMostTop
  const auto most = [](double a, double b) { return a > b ? (a < kMostDouble ? a : kMostDouble) : b; };
  if (o.pos != nullptr) {
    double dot = 0;
    for (int64_t d = i * p.features + threadIdx.x; d < (i + 1) * p.features; d += kThreads) {
      dot += static_cast<const double*>(p.query)[d] * static_cast<const double*>(p.positive)[d];
    }
    dot = over_block(dot, scratch, add);
    if (threadIdx.x == 0) static_cast<double*>(o.pos)[i] = scale * dot;
  }

  const bool pairs = p.reducer == Reducer::kSoftplusSum;
  double top = -1e300, sum = 0, weights = 0;  // top is finite: see LogSumExp
  for (int64_t j = threadIdx.x; j < p.columns; j += kThreads) {
    bool out;
    const double x = logit(p, scale, i, j, out), best = most(x, top);
    sum = pairs ? sum + softplus(x) : sum * exp(top - best) + exp(x - best);
    weights += pairs ? weight_of(p, x, 0) : 0.0;
    top = best;
  }
  const double best = pairs ? 0.0 : over_block(top, scratch, most);
  sum = over_block(pairs ? sum : sum * exp(top - best), scratch, add);
  const double lse = pairs ? sum : best + log(sum);
  if (threadIdx.x == 0) static_cast<double*>(o.lse)[i] = lse;
  if (o.mean_key == nullptr) return;
  if (pairs) {
    weights = over_block(weights, scratch, add);
    if (threadIdx.x == 0) static_cast<double*>(o.sum_weight)[i] = weights;
  }

  double* mean = static_cast<double*>(o.mean_key) + i * p.features;
  for (int64_t d = threadIdx.x; p.columns == 0 && d < p.features; d += kThreads) mean[d] = 0;
  for (int64_t first = 0; first < p.columns; first += kThreads) {
    const int64_t j = first + threadIdx.x;
    bool out;
    scratch[threadIdx.x] = j < p.columns ? weight_of(p, logit(p, scale, i, j, out), lse) : 0.0;
    __syncthreads();
    add_weighted(mean, scratch, p.key, first, p.columns, p.features);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) backward_double(Problem p, Gradients g) {
  SHARED_ARRAY(double, scratch, kThreads);
  const int64_t j = blockIdx.x;
  double* grad = static_cast<double*>(g.key) + j * p.features;
  double extra = 0;
  for (int64_t d = threadIdx.x; g.key != nullptr && p.rows == 0 && d < p.features; d += kThreads) grad[d] = 0;
  for (int64_t first = 0; first < p.rows; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    double weight = 0;
    const double lse = i < p.rows && g.lse != nullptr ? static_cast<const double*>(g.lse)[i] : 0.0;
    if (i < p.rows) {
      const double scale = scale_at<double>(p, i);
      // A row with nothing in its sum passes nothing on, whatever a loss on top sends into it.
      bool out;
      const double x = logit(p, scale, i, j, out);
      if (lse != -kInfinity && !out) weight = weight_of(p, x, lse) * static_cast<const double*>(g.grad_lse)[i];
      extra += weight;
      weight *= scale;
    }
    scratch[threadIdx.x] = weight;
    __syncthreads();
    if (g.key != nullptr) add_weighted(grad, scratch, p.query, first, p.rows, p.features);
    __syncthreads();
  }
  extra = over_block(extra, scratch, [](double a, double b) { return a + b; });
  if (g.bias != nullptr && threadIdx.x == 0) static_cast<double*>(g.bias)[j] = extra;
}

}  // namespace fastcl::cuda

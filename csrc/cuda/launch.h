// The interface between host code and kernels: the op's inputs and outputs as structs of pointers, and functions that
// launch kernels on them. These functions must not use torch, allocate, copy to or from the host, or synchronise, so
// that all of them can be captured into a CUDA graph.
//
// All pointers are to device memory. The "compute type" is double if dtype is kFloat64 and float otherwise. Matrices
// are contiguous; they need no alignment beyond that of their elements. The caller converts inputs first: query, key
// and positive to one `dtype`, vectors to the compute type. Every function returns the first error of its launches.
#pragma once
#include <cstddef>
#include <cstdint>

#include "contrast.h"
#include "cuda/runtime.h"

namespace fastcl::cuda {

// What is computed of a row of logits x = scale <q, k> + bias (+ offset):
//   kLogSumExp:    lse = log sum exp(x);   weights exp(x - lse);  mean_key = sum of weight * key
//   kSoftplusSum:  total = sum softplus(x); weights sigmoid(x);   sum_key = sum of weight * key
enum class Reducer : int32_t { kLogSumExp, kSoftplusSum };

struct Problem {
  int64_t rows, columns, features;
  DType dtype;              // of query, key, positive and their gradients
  bool tf32;                // kFloat32 only: one TF32 product where three would give float32's accuracy
  int32_t multiprocessors;  // of the device; with few rows, the columns are split until every multiprocessor has work
  const void* query;        // [rows, features]
  const void* key;          // [columns, features]; may be null where only gradients of rows are wanted
  const void* positive;     // [rows, features] or null
  const void* scale;        // compute type, [rows] or [1]; null stands for 1
  bool one_scale;           // scale is [1]
  double factor;            // multiplies scale
  const void* bias;         // compute type, [columns] or null
  const int64_t* row_id;    // [rows] or null
  const int64_t* col_id;    // [columns] or null; null if and only if row_id is
  Reducer reducer = Reducer::kLogSumExp;
  const void* offset = nullptr;  // compute type, [rows] or null; softplus sums only
  const void* cap = nullptr;     // compute type, [rows] or null: columns with scale <q, k> above it leave the row's sum
};

// All of the compute type. Null: the output is not wanted. Softplus sums write their total to lse and their sum_key to
// mean_key.
struct Outputs {
  void* pos;                   // [rows]; needs a positive
  void* lse;                   // [rows]; never null
  void* mean_key;              // [rows, features]
  void* sum_weight = nullptr;  // [rows], sums of the weights; softplus sums with mean_key only
};

// For softplus sums grad_lse is the gradient of the total, lse is not read, and only the gradients of key and bias can
// be computed.
struct Gradients {
  const void* grad_pos;  // compute type, [rows] or null
  const void* grad_lse;  // compute type, [rows]
  const void* lse;       // compute type, [rows]
  const void* mean_key;  // compute type, [rows, features]; needed for query and scale
  void* query;           // dtype, [rows, features] or null
  void* positive;        // dtype, [rows, features] or null
  void* scale;           // compute type, [rows] or null: one value a row, also where scale is [1] (the caller sums)
  void* key;             // dtype, [columns, features] or null
  void* bias;            // compute type, [columns] or null
};

// The most features that `forward` takes, and `backward` for key and bias. With more they return an error, and the
// caller must multiply chunk by chunk (below). `backward` computes the gradients of rows for any number of features.
int64_t largest_features(DType);

// Bytes of scratch memory that a call needs, at an address aligned to 256 bytes. If 0, the pointer may be null. The
// memory may be freed when the launches of the call have run.
size_t forward_workspace(const Problem&, const Outputs&);
size_t backward_workspace(const Problem&, const Gradients&);

cudaError_t forward(const Problem&, const Outputs&, void* workspace, cudaStream_t);
cudaError_t backward(const Problem&, const Gradients&, void* workspace, cudaStream_t);

// For many features the caller makes the matrix products, and calls these functions for a chunk of rows at a time.
// `dots` holds <q_i, k_j> of rows [begin, begin + count). `weights` may be the memory of `dots` if both are float32.
// float64 has no chunks: `forward` and `backward` take any number of its features.
struct Chunk {
  int64_t begin, count;
  const void* dots;  // float32, [count, columns]
  void* weights;     // [count, columns] or null
  DType dtype;       // of weights
};

// Writes pos and lse of the rows, and weights = exp(x - lse). The caller multiplies these with key to get mean_key.
cudaError_t forward_chunk(const Problem&, const Outputs&, const Chunk&, cudaStream_t);
// Writes weights = scale * grad_lse * exp(x - lse). The caller multiplies their transpose with query to get the
// gradient of key. The weights must not be float16, whose range is too narrow. The chunk that begins at row 0
// overwrites the gradient of bias, later chunks add to it. The gradients of rows are left to `backward`.
cudaError_t backward_chunk(const Problem&, const Gradients&, const Chunk&, cudaStream_t);

}  // namespace fastcl::cuda

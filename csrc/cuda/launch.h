// The seam between host code and kernels: the op as plain structs of pointers, and functions that launch it. No torch,
// no allocation, no copy to or from the host, no synchronisation: all of it may be captured into a CUDA graph.
//
// All pointers are device memory. "Compute type" is double where dtype is kFloat64, float otherwise. Matrices are
// contiguous, and any alignment of their elements will do. Inputs of different types are converted by the caller first:
// query, key and positive to one `dtype`, vectors to the compute type. Every function returns the first error of its
// launches.
#pragma once
#include <cstddef>
#include <cstdint>

#include "contrast.h"
#include "cuda/runtime.h"

namespace fastcl::cuda {

// What a row of logits x = scale <q, k> + bias (+ offset) becomes, and its weights:
//   log-sum-exp:   log sum exp(x), exp(x - lse); the sums are divided by that of the weights: mean_key
//   softplus sum:  sum softplus(x), sigmoid(x);  the sums are left as they are: sum_key
enum class Reducer : int32_t { kLogSumExp, kSoftplusSum };

struct Problem {
  int64_t rows, columns, features;
  DType dtype;              // of query, key, positive and their gradients
  bool tf32;                // kFloat32 only: one TF32 product where three would give float32's accuracy
  int32_t multiprocessors;  // of the device; few rows are split over their columns until all have work
  const void* query;        // [rows, features]
  const void* key;          // [columns, features]; may be null where only gradients of rows are wanted
  const void* positive;     // [rows, features] or null
  const void* scale;        // compute type, [rows] or [1], or null: 1
  bool one_scale;           // scale is [1]
  double factor;            // multiplies scale
  const void* bias;         // compute type, [columns] or null
  const int64_t* row_id;    // [rows] or null
  const int64_t* col_id;    // [columns] or null, both or neither
  Reducer reducer = Reducer::kLogSumExp;
  const void* offset = nullptr;  // compute type, [rows] or null; of softplus sums only
};

// All of the compute type; null where not wanted.
struct Outputs {
  void* pos;       // [rows], needs positive
  void* lse;       // [rows], always wanted
  void* mean_key;  // [rows, features]
  // Of softplus sums only, whose total goes to lse and whose sum_key to mean_key: [rows], wanted with mean_key.
  void* sum_weight = nullptr;
};

// For softplus sums grad_lse is the gradient of the total, lse is not read, and only key and bias can be asked for.
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

// The most features that forward, and backward for key and bias, take; above, they answer with an error and the caller
// multiplies chunk by chunk (below). Gradients of rows are for any number of features.
int64_t largest_features(DType);

// Bytes of scratch memory, aligned to 256, that a call needs; 0: the pointer may be null. Not read after the call's
// launches have run.
size_t forward_workspace(const Problem&, const Outputs&);
size_t backward_workspace(const Problem&, const Gradients&);

cudaError_t forward(const Problem&, const Outputs&, void* workspace, cudaStream_t);
cudaError_t backward(const Problem&, const Gradients&, void* workspace, cudaStream_t);

// The same for many features, around products that the caller makes: `dots` holds <q_i, k_j> of rows
// [begin, begin + count). Weights may be written over dots where both are float32. Not for float64, whose other
// functions take any number of features.
struct Chunk {
  int64_t begin, count;
  const void* dots;  // float32, [count, columns]
  void* weights;     // [count, columns] or null
  DType dtype;       // of weights
};

// pos and lse of the rows; weights = exp(x - lse), whose product with key is mean_key.
cudaError_t forward_chunk(const Problem&, const Outputs&, const Chunk&, cudaStream_t);
// weights = scale * grad_lse * exp(x - lse), whose transpose times query is the gradient of key; float16 is too narrow
// for them. The gradient of bias is set by the chunk that begins at row 0 and added to by the others. Gradients of rows
// are left to `backward`.
cudaError_t backward_chunk(const Problem&, const Gradients&, const Chunk&, cudaStream_t);

}  // namespace fastcl::cuda

// Tables of the instances of the walk, one for each element type (walk_*.cu), for host code that plans and launches
// them.
#pragma once
#include "cuda/launch.h"

namespace fastcl::cuda {

struct WalkArgs;

struct Walk {
  int rows, columns;  // of a tile
  cudaError_t (*launch)(const WalkArgs&, int splits, cudaStream_t);
};

// The walks of one element type and one largest number of features.
struct Walks {
  Walk lse;       // log-sum-exp, forward without sums
  Walk forward;   // log-sum-exp, forward with sums of weight * column
  Walk backward;  // log-sum-exp, backward
  Walk softplus;  // softplus sum, forward with sums
  Walk sigmoid;   // softplus sum, backward
};

// Entries are for up to 64, 128 and 256 features. Sums of 256 features of 4-byte elements do not fit the registers.
extern const Walks kFloat32Walks[2], kTf32Walks[2], kBFloat16Walks[3], kFloat16Walks[3];

}  // namespace fastcl::cuda

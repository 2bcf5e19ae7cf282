// The instances of the walk, a table for each element type (walk_*.cu): what host code needs to plan and launch them.
#pragma once
#include "cuda/launch.h"

namespace fastcl::cuda {

struct WalkArgs;

struct Walk {
  int rows, columns;  // of a tile
  cudaError_t (*launch)(const WalkArgs&, int splits, cudaStream_t);
};

// Of one element type and for up to so many features.
struct Walks {
  Walk lse;      // forward without sums
  Walk forward;  // with the weighted sums of the columns
  Walk backward;
  Walk softplus;  // as forward
  Walk sigmoid;   // as backward
};

// For up to 64, 128 and 256 features. With 256, sums of 4-byte elements do not fit the registers.
extern const Walks kFloat32Walks[2], kTf32Walks[2], kBFloat16Walks[3], kFloat16Walks[3];

}  // namespace fastcl::cuda

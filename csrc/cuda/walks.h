// The instances of the walk, a table for each element type (walk_*.cu): what host code needs to plan and launch them.
#pragma once
#include "cuda/launch.h"

namespace fastcl::cuda {

struct WalkArgs;

struct Walk {
  int rows, columns;  // of a tile
  cudaError_t (*launch)(const WalkArgs&, int splits, cudaStream_t);
};

constexpr int kDims = 3;  // features up to 64, 128 and 256

struct Walks {
  Walk lse[kDims];      // forward without sums
  Walk forward[kDims];  // with the weighted sums of the columns
  Walk backward[kDims];
};

extern const Walks kFloat32Walks, kTf32Walks, kBFloat16Walks, kFloat16Walks;

}  // namespace fastcl::cuda

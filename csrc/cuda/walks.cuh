// Instantiates the table of walks of one element type. Each type has a file of its own (walk_*.cu), so that they
// compile in parallel.
#pragma once
#include "walk.cuh"
#include "walks.h"

namespace fastcl::cuda {

template <class E, int kDim, class R, bool kOut>
cudaError_t launch_walk(const WalkArgs& args, int splits, cudaStream_t stream) {
  using T = Tile<E, kDim, kOut>;
  constexpr int kShared = T::template shared_bytes<R>();
  const cudaError_t allowed = allow_shared(walk<E, kDim, R, kOut>, kShared);
  if (allowed != cudaSuccess) return allowed;
  const dim3 grid(static_cast<unsigned>((args.rows + T::kRows - 1) / T::kRows), static_cast<unsigned>(splits));
  return FASTCL_LAUNCH((walk<E, kDim, R, kOut>), grid, dim3(kThreads), kShared, stream, args);
}

template <class E, int kDim, class R, bool kOut>
constexpr Walk walk_of() {
  using T = Tile<E, kDim, kOut>;
  return {T::kRows, T::kColumns, launch_walk<E, kDim, R, kOut>};
}

template <class E, int kDim>
constexpr Walks walks_of() {
  return {walk_of<E, kDim, LogSumExp<E, false>, false>(), walk_of<E, kDim, LogSumExp<E, true>, true>(),
          walk_of<E, kDim, KnownSum<E, false>, true>(), walk_of<E, kDim, SoftplusSum<E>, true>(),
          walk_of<E, kDim, KnownSum<E, true>, true>()};
}

}  // namespace fastcl::cuda

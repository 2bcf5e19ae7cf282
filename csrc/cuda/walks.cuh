// Makes the table of walks of one element type; each is included by one walk_*.cu, so that they compile side by side.
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

template <class E>
constexpr Walks walks_of() {
  return {{walk_of<E, 64, LogSumExp<E, false>, false>(), walk_of<E, 128, LogSumExp<E, false>, false>(),
           walk_of<E, 256, LogSumExp<E, false>, false>()},
          {walk_of<E, 64, LogSumExp<E, true>, true>(), walk_of<E, 128, LogSumExp<E, true>, true>(),
           walk_of<E, 256, LogSumExp<E, true>, true>()},
          {walk_of<E, 64, KnownSum<E>, true>(), walk_of<E, 128, KnownSum<E>, true>(),
           walk_of<E, 256, KnownSum<E>, true>()}};
}

}  // namespace fastcl::cuda

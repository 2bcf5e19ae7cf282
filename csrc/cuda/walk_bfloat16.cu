// Instantiates the walks of bfloat16.
#include "walks.cuh"

namespace fastcl::cuda {

const Walks kBFloat16Walks[3] = {walks_of<BFloat16, 64>(), walks_of<BFloat16, 128>(), walks_of<BFloat16, 256>()};

}  // namespace fastcl::cuda

// The walks of bfloat16.
#include "walks.cuh"

namespace fastcl::cuda {

const Walks kBFloat16Walks = walks_of<BFloat16>();

}  // namespace fastcl::cuda

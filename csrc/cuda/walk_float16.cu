// The walks of float16.
#include "walks.cuh"

namespace fastcl::cuda {

const Walks kFloat16Walks = walks_of<Float16>();

}  // namespace fastcl::cuda

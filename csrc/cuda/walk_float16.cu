// Instantiates the walks of float16.
#include "walks.cuh"

namespace fastcl::cuda {

const Walks kFloat16Walks[3] = {walks_of<Float16, 64>(), walks_of<Float16, 128>(), walks_of<Float16, 256>()};

}  // namespace fastcl::cuda

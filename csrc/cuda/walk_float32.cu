// Instantiates the walks of float32 by three TF32 products.
#include "walks.cuh"

namespace fastcl::cuda {

const Walks kFloat32Walks[2] = {walks_of<Float32, 64>(), walks_of<Float32, 128>()};

}  // namespace fastcl::cuda

// Instantiates the walks of float32 by one TF32 product.
#include "walks.cuh"

namespace fastcl::cuda {

const Walks kTf32Walks[2] = {walks_of<Tf32, 64>(), walks_of<Tf32, 128>()};

}  // namespace fastcl::cuda

// The walks of float32 by three TF32 products.
#include "walks.cuh"

namespace fastcl::cuda {

const Walks kFloat32Walks = walks_of<Float32>();

}  // namespace fastcl::cuda

// The walks of float32 by one TF32 product.
#include "walks.cuh"

namespace fastcl::cuda {

const Walks kTf32Walks = walks_of<Tf32>();

}  // namespace fastcl::cuda

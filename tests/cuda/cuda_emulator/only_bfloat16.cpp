// Stands in for the walks of the other types, where a program is built for one of them only.
#include "cuda/walks.h"

namespace fastcl::cuda {

const Walks kFloat32Walks[2] = {}, kTf32Walks[2] = {}, kFloat16Walks[3] = {};

}  // namespace fastcl::cuda

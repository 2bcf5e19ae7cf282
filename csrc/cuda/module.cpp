// The Python module fastcl._C_cuda: tells for which GPU architectures it was compiled, and reads one of torch's
// settings for the host code. The CUDA ops register themselves with torch when the module is loaded.
#include <pybind11/pybind11.h>

#include "cuda/device.h"

namespace fastcl::cuda {

// Called for every op with float32 inputs: like torch itself, an op obeys a setting that changed since the last call,
// even within a compiled graph. Through Python, because the stable C ABI has no function for it.
bool tf32_allowed() {
  const pybind11::gil_scoped_acquire gil;
  return pybind11::module_::import("fastcl._cuda").attr("tf32_allowed")().cast<bool>();
}

}  // namespace fastcl::cuda

PYBIND11_MODULE(_C_cuda, m) {
  m.def("architectures", [] { return FASTCL_CUDA_ARCHS; });  // "80;90": compute capabilities, as setup.py had them
}

// The Python module of the CUDA part: what it was compiled for, and torch's settings as seen from the kernels. Ops
// register themselves when it is loaded.
#include <pybind11/pybind11.h>

#include "cuda/device.h"

namespace fastcl::cuda {

// Asked for at every call with float32 inputs, as torch does: the setting may change at any time, also between the runs
// of a compiled graph. No stable C function tells it.
bool tf32_allowed() {
  const pybind11::gil_scoped_acquire gil;
  return pybind11::module_::import("fastcl._cuda").attr("tf32_allowed")().cast<bool>();
}

}  // namespace fastcl::cuda

PYBIND11_MODULE(_C_cuda, m) {
  m.def("architectures", [] { return FASTCL_CUDA_ARCHS; });  // "80;90": compute capabilities, as setup.py had them
}

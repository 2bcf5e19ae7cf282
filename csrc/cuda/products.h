// Matrix products by torch, on its current stream, for more features than the kernels can hold in registers. Copies
// only to convert types. Must not know a formula.
#pragma once
#include "cuda/device.h"

namespace fastcl::cuda {

// `t` converted to a type and moved to the device; the same tensor if it has both.
inline Tensor converted(const Device& device, const Tensor& t, int32_t dtype) {
  if (t.dtype() == dtype && device.holds(t)) return t.share();
  Tensor out = t.dim() == 2   ? device.empty({t.size(0), t.size(1)}, dtype)
               : t.dim() == 1 ? device.empty({t.size(0)}, dtype)
                              : device.empty({}, dtype);
  call("aten::copy_", "", out, t, int64_t{1});  // non_blocking
  return out;
}

inline Tensor rows(const Tensor& t, int64_t begin, int64_t count) {
  return call("aten::narrow", "", t, int64_t{0}, begin, count);
}
inline Tensor transposed(const Tensor& t) { return call("aten::t", "", t); }

// out = a b, with sums at least as accurate as out's type; a and b are of one type.
inline void multiply(const Device& device, const Tensor& a, const Tensor& b, const Tensor& out) {
  if (a.dtype() == out.dtype()) {
    call("aten::mm", "out", a, b, out);
  } else if (kWideProducts) {
    call("aten::mm", "dtype_out", a, b, int64_t{out.dtype()}, out);
  } else {
    multiply(device, converted(device, a, out.dtype()), converted(device, b, out.dtype()), out);
  }
}

}  // namespace fastcl::cuda

// The op `normalize` on the CPU: divides rows by their length, and computes the gradient of this division (unit.h).
#include "cpu/unit.h"

namespace fastcl {
namespace {

template <class T>
void forward(const Tensor& x, StableIValue* results) {
  const int64_t n = x.size(0), d = x.size(1);
  const Matrix rows = matrix_of(x, n, d, "x");
  Tensor unit = Tensor::empty({n, d}, torch_dtype<T>());
  Tensor inverse = Tensor::empty({n}, torch_dtype<T>());
  divide_by_length<T>(rows, n, d, unit.write<T>(), inverse.write<T>());
  results[0] = unit.release();
  results[1] = inverse.release();
}

template <class T>
void backward(const Tensor& grad, const Tensor& unit, const Tensor& inverse, const Tensor& x, StableIValue* results) {
  const int64_t n = x.size(0), d = x.size(1);
  const Matrix rows = matrix_of(x, n, d, "x");
  vector_of(inverse, n, "inverse");
  check(inverse.dtype() == torch_dtype<T>(), "inverse: expected the compute dtype");
  Tensor grad_x = Tensor::empty({n, d}, x.dtype());
  gradient_of_division<T>(matrix_of(grad, n, d, "grad"), matrix_of(unit, n, d, "unit"), inverse.read<T>(), n, d,
                          MutableMatrix{grad_x.write<void>(), rows.dtype});
  results[0] = grad_x.release();
}

void normalize_forward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]);
  check(x.dim() == 2, "x: expected shape [N, D], got ", x);
  is_double(x) ? forward<double>(x, stack) : forward<float>(x, stack);
}

void normalize_backward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), unit(stack[1]), inverse(stack[2]), x(stack[3]);
  check(x.dim() == 2, "x: expected shape [N, D], got ", x);
  is_double(x) ? backward<double>(grad, unit, inverse, x, stack) : backward<float>(grad, unit, inverse, x, stack);
}

[[maybe_unused]] const bool registered =
    register_ops("CPU", {{"normalize_forward", guarded<normalize_forward, 1, 2>},
                         {"normalize_backward", guarded<normalize_backward, 4, 1>}});

}  // namespace
}  // namespace fastcl

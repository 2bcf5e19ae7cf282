// The op `normalize` on the CPU: divides rows by their length, and computes the gradient of this division. The loops
// are in rows.inl.h.
#include <cmath>

#include "cpu/problem.h"

namespace fastcl {
namespace {

// The rows [n, d] of x and the kernels for their type.
template <class T>
struct Rows {
  int64_t n, d;
  Matrix x;
  const Kernels<T>& kernels;

  explicit Rows(const Tensor& t)
      : n(t.size(0)),
        d(t.size(1)),
        x(matrix_of(t, n, d, "x")),
        kernels(kernels_of<T>(active_isa(), x.dtype, x.dtype)) {}

  template <class F>
  void parallel(const F& f) const {
    parallel_for(0, n, grain(8 * d), f);
  }
};

template <class T>
void forward(const Tensor& x, StableIValue* results) {
  const Rows<T> rows(x);
  Tensor unit = Tensor::empty({rows.n, rows.d}, torch_dtype<T>());
  Tensor inverse = Tensor::empty({rows.n}, torch_dtype<T>());
  T* factor = inverse.write<T>();
  const MutableMatrix out{unit.write<void>(), compute_type<T>()};
  rows.parallel([&](int64_t begin, int64_t end) {
    rows.kernels.row_dot(rows.x, rows.x, rows.d, begin, end, factor);
    // The factor of a zero vector is 0: its direction is undefined, so the row and its gradient are 0 instead of NaN.
    for (int64_t i = begin; i < end; ++i) factor[i] = factor[i] == 0 ? T(0) : 1 / std::sqrt(factor[i]);
    rows.kernels.row_combine(factor, rows.x, nullptr, Matrix{nullptr, DType::kFloat32}, rows.d, begin, end, out);
  });
  results[0] = unit.release();
  results[1] = inverse.release();
}

// (grad - <grad, unit> unit) / |x|
template <class T>
void backward(const Tensor& grad_t, const Tensor& unit_t, const Tensor& inverse_t, const Tensor& x,
              StableIValue* results) {
  const Rows<T> rows(x);
  const Matrix grad = matrix_of(grad_t, rows.n, rows.d, "grad"), unit = matrix_of(unit_t, rows.n, rows.d, "unit");
  vector_of(inverse_t, rows.n, "inverse");
  check(inverse_t.dtype() == torch_dtype<T>(), "inverse: expected the compute dtype");
  const T* inverse = inverse_t.read<T>();
  Tensor grad_x = Tensor::empty({rows.n, rows.d}, x.dtype());
  const MutableMatrix out{grad_x.write<void>(), rows.x.dtype};
  const Buffer<T> along(rows.n);
  rows.parallel([&](int64_t begin, int64_t end) {
    rows.kernels.row_dot(grad, unit, rows.d, begin, end, along.get());
    for (int64_t i = begin; i < end; ++i) along[i] *= -inverse[i];
    rows.kernels.row_combine(inverse, grad, along.get(), unit, rows.d, begin, end, out);
  });
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

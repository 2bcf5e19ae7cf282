// Division of rows by their length, and its gradient, on torch's threads. The loops are in rows.inl.h.
#pragma once
#include <cmath>

#include "cpu/problem.h"

namespace fastcl {

// unit_i = x_i / |x_i| and inverse_i = 1 / |x_i|, for rows x [n, d]. The factor of a zero vector is 0: its direction is
// undefined, so the row and its gradient are 0 instead of NaN.
template <class T>
void divide_by_length(const Matrix& x, int64_t n, int64_t d, T* unit, T* inverse) {
  const Kernels<T>& kernels = kernels_of<T>(active_isa(), x.dtype, x.dtype);
  parallel_for(0, n, grain(8 * d), [&](int64_t begin, int64_t end) {
    kernels.row_dot(x, x, d, begin, end, inverse);
    for (int64_t i = begin; i < end; ++i) inverse[i] = inverse[i] == 0 ? T(0) : 1 / std::sqrt(inverse[i]);
    kernels.row_combine(inverse, x, nullptr, absent_matrix(), d, begin, end, MutableMatrix{unit, compute_type<T>()});
  });
}

// to_i = (grad_i - <grad_i, unit_i> unit_i) / |x_i|, in the dtype of x. `to` may be `grad`.
template <class T>
void gradient_of_division(const Matrix& grad, const Matrix& unit, const T* inverse, int64_t n, int64_t d,
                          const MutableMatrix& to) {
  const Kernels<T>& kernels = kernels_of<T>(active_isa(), to.dtype, to.dtype);
  const Buffer<T> along(n);
  parallel_for(0, n, grain(8 * d), [&](int64_t begin, int64_t end) {
    kernels.row_dot(grad, unit, d, begin, end, along.get());
    for (int64_t i = begin; i < end; ++i) along[i] *= -inverse[i];
    kernels.row_combine(inverse, grad, along.get(), unit, d, begin, end, to);
  });
}

}  // namespace fastcl

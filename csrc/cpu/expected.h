// Backward's use of the gradients of keys and bias that forward summed for the gradient it expected at the rows. Shared
// by the ops `contrast` and `softplus_sum`; each knows which gradient to expect. See docs/explain/expected-gradients.md.
#pragma once
#include <cmath>
#include <limits>

#include "cpu/problem.h"

namespace fastcl {

// What a forward that summed nothing returns as the expected gradient: no gradient is proportional to NaN, so that
// backward computes its own sums.
template <class T>
void expect_nothing(T* expected, int64_t n) {
  for (int64_t i = 0; i < n; ++i) expected[i] = std::numeric_limits<T>::quiet_NaN();
}

// ColumnGradients as backward reads them. expected is null where nothing was summed.
template <class T>
struct Summed {
  const T* expected;
  Matrix key_sum;
  const T* bias_sum;
};

template <class T>
Summed<T> summed_of(const Problem<T>& p, const ColumnGradients& columns, bool bias) {
  if (!present(columns.expected) || (bias && !present(columns.bias_sum))) return {nullptr, absent_matrix(), nullptr};
  const int32_t dtype = torch_dtype<T>();
  vector_of(columns.expected, p.n, "expected");
  check(columns.expected.dtype() == dtype, "expected: expected the compute dtype");
  if (bias) {
    vector_of(columns.bias_sum, p.m, "bias_sum");
    check(columns.bias_sum.dtype() == dtype, "bias_sum: expected the compute dtype");
  }
  return {columns.expected.read<T>(), matrix_of(columns.key_sum, p.m, p.d, "key_sum"),
          bias ? columns.bias_sum.read<T>() : nullptr};
}

// The factor between the gradient that came and the expected one, by least squares. NaN if the two differ by more than
// rounding explains: expected_i may be wrong by the relative error of size(i) roundings.
template <class T, class Size>
double common_factor(const T* came, const T* expected, int64_t n, const Size& size) {
  double both = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) {
    both += static_cast<double>(came[i]) * static_cast<double>(expected[i]);
    squares += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
  }
  const double factor = squares == 0 ? 0 : both / squares;
  for (int64_t i = 0; i < n; ++i) {
    const double e = static_cast<double>(expected[i]);
    const double allowed = 4 * std::numeric_limits<T>::epsilon() * size(i) * std::fabs(factor * e);
    if (!(std::fabs(static_cast<double>(came[i]) - factor * e) <= allowed + std::numeric_limits<T>::min())) {
      return std::numeric_limits<double>::quiet_NaN();
    }
  }
  return factor;
}

// Writes the gradients of key and bias, each where it is not null, from the sums of forward. Returns false, and writes
// nothing, if there are no sums (forward writes none without rows) or the gradient that came is not proportional to the
// expected one.
template <class T, class Size>
bool scale_sums(const Problem<T>& p, const Summed<T>& summed, const T* came, const Size& size, MutableMatrix grad_key,
                T* grad_bias) {
  if (summed.expected == nullptr || p.n == 0) return false;
  const double factor = common_factor(came, summed.expected, p.n, size);
  if (factor != factor) return false;
  const Buffer<T> factors(p.m);
  for (int64_t j = 0; j < p.m; ++j) factors[j] = static_cast<T>(factor);
  if (grad_key.data != nullptr) {
    parallel_for(0, p.m, grain(8 * p.d), [&](int64_t begin, int64_t end) {
      p.kernels.row_combine(factors.get(), summed.key_sum, nullptr, absent_matrix(), p.d, begin, end, grad_key);
    });
  }
  for (int64_t j = 0; grad_bias != nullptr && j < p.m; ++j) grad_bias[j] = factors[j] * summed.bias_sum[j];
  return true;
}

}  // namespace fastcl

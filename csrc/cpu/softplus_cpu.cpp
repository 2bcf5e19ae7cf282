// The op `softplus_sum` on the CPU: turns tensors into a Pass and runs it. The loops are in pass.inl.h and must stay
// there.
#include "cpu/problem.h"

namespace fastcl {
namespace {

template <class T>
void forward(const Inputs& in, const Tensor& offset, bool row_grad, StableIValue* results) {
  const Problem<T> p(in);
  const int32_t dtype = torch_dtype<T>();
  Tensor total = Tensor::empty({p.n}, dtype);
  Tensor sum_key = row_grad ? Tensor::empty({p.n, p.d}, dtype) : Tensor::empty({0}, dtype);
  Tensor sum_weight = Tensor::empty({row_grad ? p.n : 0}, dtype);

  const bool has_offset = present(offset);
  const Buffer<T> row_shift = has_offset ? p.log2_shift(offset, "offset", p.n, p.n) : Buffer<T>(0);
  const Buffer<T> ones(p.m);
  for (int64_t j = 0; j < p.m; ++j) ones[j] = 1;
  Side<T> side = p.by_query(in);
  Pass<T>& pass = side.pass;
  pass.row_shift = has_offset ? row_shift.get() : nullptr;
  pass.columns.extra = row_grad ? ones.get() : nullptr;  // its weighted sum is the sum of the weights
  pass.reduced = total.write<T>();
  pass.out = {row_grad ? sum_key.write<void>() : nullptr, compute_type<T>()};
  pass.out_extra = row_grad ? sum_weight.write<T>() : nullptr;
  p.driver().run(pass, &Kernels<T>::softplus_sum);

  results[0] = total.release();
  results[1] = sum_key.release();
  results[2] = sum_weight.release();
}

// The gradients of key and bias, with the weights computed again. Those of query, scale and offset are made in Python.
template <class T>
void backward(const Inputs& in, const Tensor& grad_t, const Tensor& offset, bool key_grad, bool bias_grad,
              StableIValue* results) {
  const Problem<T> p(in);
  const int32_t dtype = torch_dtype<T>();
  vector_of(grad_t, p.n, "grad");
  check(grad_t.dtype() == dtype, "grad: expected the compute dtype");
  Tensor grad_key = key_grad ? Tensor::empty({p.m, p.d}, in.key.dtype()) : Tensor::empty({0}, dtype);
  Tensor grad_bias = Tensor::empty({bias_grad ? p.m : 0}, dtype);

  const Buffer<T> weight(p.n);
  // Not null even without rows: null would mean that no gradient of the bias is wanted.
  const T* grad = p.n != 0 ? grad_t.read<T>() : weight.get();
  for (int64_t i = 0; i < p.n; ++i) weight[i] = grad[i] * p.scale[i];
  Buffer<T> shift = present(offset) ? p.log2_shift(offset, "offset", p.n, p.padded(p.n)) : Buffer<T>(p.padded(p.n));
  for (int64_t i = 0; i < p.padded(p.n) && !present(offset); ++i) {
    shift[i] = i < p.n ? T(0) : -std::numeric_limits<T>::infinity();
  }
  Side<T> side = p.by_key(in, std::move(shift), weight.get(), bias_grad ? grad : nullptr);
  side.pass.out = {key_grad ? grad_key.write<void>() : nullptr, p.key.dtype};
  side.pass.out_extra = bias_grad ? grad_bias.write<T>() : nullptr;
  if (key_grad || bias_grad) p.driver().run(side.pass, &Kernels<T>::sigmoid);

  results[0] = grad_key.release();
  results[1] = grad_bias.release();
}

void softplus_sum_forward(StableIValue* stack, uint64_t, uint64_t) {
  const SoftplusForwardArguments a(stack);
  if (is_double(a.in.query) || is_double(a.in.key)) {
    forward<double>(a.in, a.offset, a.row_grad, stack);
  } else {
    forward<float>(a.in, a.offset, a.row_grad, stack);
  }
}

void softplus_sum_backward(StableIValue* stack, uint64_t, uint64_t) {
  const SoftplusBackwardArguments a(stack);
  if (is_double(a.grad)) {
    backward<double>(a.in, a.grad, a.offset, a.key_grad, a.bias_grad, stack);
  } else {
    backward<float>(a.in, a.grad, a.offset, a.key_grad, a.bias_grad, stack);
  }
}

[[maybe_unused]] const bool registered =
    register_ops("CPU", {{"softplus_sum_forward", guarded<softplus_sum_forward>},
                         {"softplus_sum_backward", guarded<softplus_sum_backward>}});

}  // namespace
}  // namespace fastcl

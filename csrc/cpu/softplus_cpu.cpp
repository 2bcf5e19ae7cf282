// The op `softplus_sum` on the CPU: turns tensors into a Pass and runs it. The loops are in pass.inl.h and must stay
// there.
#include "cpu/expected.h"

namespace fastcl {
namespace {

template <class T>
void forward(const SoftplusForwardArguments& a, StableIValue* results) {
  const Inputs& in = a.in;
  const Problem<T> p(in);
  const int32_t dtype = torch_dtype<T>();
  const bool columns = a.key_grad || a.bias_grad;
  Tensor total = Tensor::empty({p.n}, dtype);
  Tensor sum_key = a.row_grad ? Tensor::empty({p.n, p.d}, dtype) : Tensor::empty({0}, dtype);
  Tensor sum_weight = Tensor::empty({a.row_grad ? p.n : 0}, dtype);
  Tensor expected = Tensor::empty({columns ? p.n : 0}, dtype);
  Tensor key_sum = columns ? Tensor::empty({p.m, p.d}, dtype) : Tensor::empty({0}, dtype);
  Tensor bias_sum = Tensor::empty({a.bias_grad ? p.m : 0}, dtype);

  const bool has_offset = present(a.offset);
  const Buffer<T> row_shift = has_offset ? p.log2_shift(a.offset, "offset", p.n, p.n) : Buffer<T>(0);
  const Buffer<T> ones(p.m);
  for (int64_t j = 0; j < p.m; ++j) ones[j] = 1;
  Side<T> side = p.by_query(in);
  Pass<T>& pass = side.pass;
  pass.row_shift = has_offset ? row_shift.get() : nullptr;
  pass.columns.extra = a.row_grad ? ones.get() : nullptr;  // its weighted sum is the sum of the weights
  pass.reduced = total.write<T>();
  pass.out = {a.row_grad ? sum_key.write<void>() : nullptr, compute_type<T>()};
  pass.out_extra = a.row_grad ? sum_weight.write<T>() : nullptr;
  const auto driver = p.driver();
  if (columns && p.n != 0 && driver.can_keep(pass)) {
    T* sent = expected.write<T>();
    for (int64_t i = 0; i < p.n; ++i) sent[i] = 1;
    if (present(a.row_weight)) p.kernels.widen_vector(vector_of(a.row_weight, p.n, "row_weight"), p.n, sent);
    const auto factors = [&](int64_t begin, int64_t end, T* factor, T* extra) {
      for (int64_t i = begin; i < end; ++i) {
        extra[i - begin] = sent[i];
        factor[i - begin] = sent[i] * p.scale[i];
      }
    };
    driver.run_with_columns(pass, &Kernels<T>::softplus_sum, factors, p.query, key_sum.write<T>(),
                            a.bias_grad ? bias_sum.write<T>() : nullptr);
  } else {
    driver.run(pass, &Kernels<T>::softplus_sum);
    if (columns) expect_nothing(expected.write<T>(), p.n);
  }

  Tensor* out[] = {&total, &sum_key, &sum_weight, &expected, &key_sum, &bias_sum};
  for (int i = 0; i < 6; ++i) results[i] = out[i]->release();
}

// The gradients of key and bias, with the weights computed again.
template <class T>
void column_gradients(const Problem<T>& p, const Inputs& in, const T* grad, const Tensor& offset,
                      MutableMatrix grad_key, T* grad_bias) {
  const Buffer<T> weight(p.n);
  for (int64_t i = 0; i < p.n; ++i) weight[i] = grad[i] * p.scale[i];
  Buffer<T> shift = present(offset) ? p.log2_shift(offset, "offset", p.n, p.padded(p.n)) : Buffer<T>(p.padded(p.n));
  for (int64_t i = 0; i < p.padded(p.n) && !present(offset); ++i) {
    shift[i] = i < p.n ? T(0) : -std::numeric_limits<T>::infinity();
  }
  Side<T> side = p.by_key(in, std::move(shift), weight.get(), grad_bias != nullptr ? grad : nullptr);
  side.pass.out = grad_key;
  side.pass.out_extra = grad_bias;
  p.driver().run(side.pass, &Kernels<T>::sigmoid);
}

// The gradients of key and bias. Those of query, scale and offset are made in Python.
template <class T>
void backward(const SoftplusBackwardArguments& a, StableIValue* results) {
  const Problem<T> p(a.in);
  const int32_t dtype = torch_dtype<T>();
  vector_of(a.grad, p.n, "grad");
  check(a.grad.dtype() == dtype, "grad: expected the compute dtype");
  Tensor grad_key = a.key_grad ? Tensor::empty({p.m, p.d}, a.in.key.dtype()) : Tensor::empty({0}, dtype);
  Tensor grad_bias = Tensor::empty({a.bias_grad ? p.m : 0}, dtype);

  const Buffer<T> none(p.n);
  // Not null even without rows: null would mean that no gradient of the bias is wanted.
  const T* grad = p.n != 0 ? a.grad.read<T>() : none.get();
  const MutableMatrix key_out{a.key_grad ? grad_key.write<void>() : nullptr, p.key.dtype};
  T* bias_out = a.bias_grad ? grad_bias.write<T>() : nullptr;
  // Both gradients are products of the weight of a row and a few other numbers.
  const auto size = [](int64_t) { return 4.0; };
  if ((a.key_grad || a.bias_grad) &&
      !scale_sums(p, summed_of(p, a.summed, a.bias_grad), grad, size, key_out, bias_out)) {
    column_gradients(p, a.in, grad, a.offset, key_out, bias_out);
  }

  results[0] = grad_key.release();
  results[1] = grad_bias.release();
}

void softplus_sum_forward(StableIValue* stack, uint64_t, uint64_t) {
  const SoftplusForwardArguments a(stack);
  if (is_double(a.in.query) || is_double(a.in.key)) {
    forward<double>(a, stack);
  } else {
    forward<float>(a, stack);
  }
}

void softplus_sum_backward(StableIValue* stack, uint64_t, uint64_t) {
  const SoftplusBackwardArguments a(stack);
  if (is_double(a.grad)) {
    backward<double>(a, stack);
  } else {
    backward<float>(a, stack);
  }
}

[[maybe_unused]] const bool registered =
    register_ops("CPU", {{"softplus_sum_forward", guarded<softplus_sum_forward, 12, 6>},
                         {"softplus_sum_backward", guarded<softplus_sum_backward, 14, 2>}});

}  // namespace
}  // namespace fastcl

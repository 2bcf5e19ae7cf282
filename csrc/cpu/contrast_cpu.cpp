// The op `contrast` on the CPU: makes the tensors of its results. What is in them is computed in contrast_math.h.
#include "cpu/contrast_math.h"

namespace fastcl {
namespace {

template <class T>
void run_forward(const ForwardArguments& a, StableIValue* results) {
  const Problem<T> p(a.in);
  const int32_t dtype = torch_dtype<T>();
  const bool columns = a.expected.key_grad || a.expected.bias_grad;
  Tensor pos = Tensor::empty({p.has_positive ? p.n : 0}, dtype);
  Tensor lse = Tensor::empty({p.n}, dtype);
  Tensor mean_key = a.row_grad ? Tensor::empty({p.n, p.d}, dtype) : Tensor::empty({0}, dtype);
  Tensor expected = Tensor::empty({columns ? p.n : 0}, dtype);
  Tensor key_sum = columns ? Tensor::empty({p.m, p.d}, dtype) : Tensor::empty({0}, dtype);
  Tensor bias_sum = Tensor::empty({a.expected.bias_grad ? p.m : 0}, dtype);
  const auto at = [](bool there, const Tensor& t) { return there ? t.write<T>() : nullptr; };
  forward<T>(a, p,
             {at(p.has_positive, pos), lse.write<T>(), at(a.row_grad, mean_key), at(columns, expected),
              at(columns, key_sum), at(a.expected.bias_grad, bias_sum)});
  Tensor* out[] = {&pos, &lse, &mean_key, &expected, &key_sum, &bias_sum};
  for (int i = 0; i < 6; ++i) results[i] = out[i]->release();
}

template <class T>
void run_backward(const BackwardArguments& a, StableIValue* results) {
  const Inputs& in = a.in;
  const Saved& saved = a.saved;
  const Wanted wanted = a.wanted;
  const Problem<T> p(in);
  const int32_t dtype = torch_dtype<T>();
  const auto empty_like = [&](bool want, int64_t rows, const Tensor& t) {
    return want ? Tensor::empty({rows, p.d}, t.dtype()) : Tensor::empty({0}, dtype);
  };
  Tensor grad_query = empty_like(wanted.query, p.n, in.query);
  Tensor grad_key = empty_like(wanted.key, p.m, in.key);
  Tensor grad_positive = empty_like(wanted.positive, p.n, in.positive);
  Tensor grad_scale = Tensor::empty({wanted.scale ? p.n : 0}, dtype);
  Tensor grad_bias = Tensor::empty({wanted.bias ? p.m : 0}, dtype);

  check_upstream({&a.grad_pos, &a.grad_lse, &saved.lse}, p.n, p.has_positive);
  Came<T> came{a.grad_pos.read<T>(), a.grad_lse.read<T>(), saved.lse.read<T>(), absent_matrix(), {}};
  if (wanted.query || wanted.scale) came.mean_key = matrix_of(saved.mean_key, p.n, p.d, "mean_key");
  if (wanted.key || wanted.bias) came.columns = summed_of(p, saved.columns, wanted.bias);
  const auto out = [](bool want, const Tensor& t, const Matrix& like) {
    return MutableMatrix{want ? t.write<void>() : nullptr, like.dtype};
  };
  backward<T>(in, p, came,
              {out(wanted.query, grad_query, p.query), out(wanted.key, grad_key, p.key),
               out(wanted.positive, grad_positive, p.positive), wanted.scale ? grad_scale.write<T>() : nullptr,
               wanted.bias ? grad_bias.write<T>() : nullptr});
  Tensor* gradients[] = {&grad_query, &grad_key, &grad_positive, &grad_scale, &grad_bias};
  for (int i = 0; i < 5; ++i) results[i] = gradients[i]->release();
}

void contrast_forward(StableIValue* stack, uint64_t, uint64_t) {
  const ForwardArguments a(stack);
  a.in_double() ? run_forward<double>(a, stack) : run_forward<float>(a, stack);
}

void contrast_backward(StableIValue* stack, uint64_t, uint64_t) {
  const BackwardArguments a(stack);
  is_double(a.saved.lse) ? run_backward<double>(a, stack) : run_backward<float>(a, stack);
}

[[maybe_unused]] const bool registered = register_ops(
    "CPU",
    {{"contrast_forward", guarded<contrast_forward, 19, 6>}, {"contrast_backward", guarded<contrast_backward, 21, 5>}});

}  // namespace
}  // namespace fastcl

// The op `contrast` on CUDA: allocates outputs and launches the kernels of launch.h on torch's current stream. Must not
// synchronise with the device.
#include "cuda/operands.h"

namespace fastcl::cuda {
namespace {

void contrast_forward(StableIValue* stack, uint64_t, uint64_t) {
  const ForwardArguments a(stack);
  check(!present(a.frozen.key), "frozen: expected none on CUDA, where other columns are another call");
  const Device device(a.in.query);
  const bool wide = is_double(a.in.query) || is_double(a.in.key) || is_double(a.in.positive);
  const Operands o(device, a.in, wide);
  const Problem& p = o.problem;
  const bool columns = a.expected.key_grad || a.expected.bias_grad;
  Tensor pos = o.empty(o.has_positive, {p.rows}, o.compute);
  Tensor lse = o.empty(true, {p.rows}, o.compute);
  Tensor mean_key = o.empty(a.row_grad, {p.rows, p.features}, o.compute);
  Tensor gradient = o.empty(columns, {p.rows}, o.compute);
  Tensor key_sum = o.empty(columns, {p.columns, p.features}, o.compute);
  Tensor bias_sum = o.empty(a.expected.bias_grad, {p.columns}, o.compute);

  Outputs out{};
  out.pos = pointer(pos, o.has_positive);
  out.lse = pointer(lse, true);
  out.mean_key = pointer(mean_key, a.row_grad);
  run_forward(o, out, mean_key);
  // These kernels do not sum the gradient of the keys in forward. No gradient is proportional to NaN, so backward
  // computes its own sums.
  if (columns) device.fill_nan(gradient, p.rows * (wide ? 8 : 4));

  Tensor* results[] = {&pos, &lse, &mean_key, &gradient, &key_sum, &bias_sum};
  for (int i = 0; i < 6; ++i) stack[i] = results[i]->release();
}

void contrast_backward(StableIValue* stack, uint64_t, uint64_t) {
  const BackwardArguments a(stack);
  const Wanted& wanted = a.wanted;
  const Device device(a.in.query);
  const Operands o(device, a.in, is_double(a.saved.lse));
  const Problem& p = o.problem;
  check_upstream({&a.grad_pos, &a.grad_lse, &a.saved.lse}, a.in.query.size(0), o.has_positive);
  for (const Tensor* t : {&a.grad_pos, &a.grad_lse, &a.saved.lse, &a.saved.mean_key}) {
    check(!present(*t) || device.holds(*t), "gradients: expected the device of query");
  }
  const bool sums = wanted.query || wanted.scale;
  if (sums) {
    const Matrix mean = matrix_of(a.saved.mean_key, p.rows, p.features, "mean_key");
    check(mean.dtype == o.compute, "mean_key: expected the dtype of lse");
  }

  const Tensor grad_query = o.empty(wanted.query, {p.rows, p.features}, o.dtype);
  const Tensor grad_key = o.empty(wanted.key, {p.columns, p.features}, o.key_gradient_dtype());
  const Tensor grad_positive = o.empty(wanted.positive, {p.rows, p.features}, o.dtype);
  Tensor grad_scale = o.empty(wanted.scale, {p.rows}, o.compute);
  Tensor grad_bias = o.empty(wanted.bias, {p.columns}, o.compute);
  Gradients g{};
  g.grad_pos = o.has_positive ? a.grad_pos.read<void>() : nullptr;
  g.grad_lse = a.grad_lse.read<void>();
  g.lse = a.saved.lse.read<void>();
  g.mean_key = sums ? a.saved.mean_key.read<void>() : nullptr;
  g.query = pointer(grad_query, wanted.query);
  g.positive = pointer(grad_positive, wanted.positive);
  g.scale = pointer(grad_scale, wanted.scale);
  g.key = pointer(grad_key, wanted.key);
  g.bias = pointer(grad_bias, wanted.bias);
  run_backward(o, g, grad_key, grad_bias);

  stack[0] = o.finished(grad_query, wanted.query, a.in.query);
  stack[1] = o.finished(grad_key, wanted.key, a.in.key);
  stack[2] = o.finished(grad_positive, wanted.positive, a.in.positive);
  stack[3] = grad_scale.release();
  stack[4] = grad_bias.release();
}

[[maybe_unused]] const bool registered = register_ops(
    kDispatchKey,
    {{"contrast_forward", guarded<contrast_forward, 19, 6>}, {"contrast_backward", guarded<contrast_backward, 21, 5>}});

}  // namespace
}  // namespace fastcl::cuda

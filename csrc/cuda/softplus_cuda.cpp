// The op `softplus_sum` on CUDA: allocates outputs and launches the kernels of launch.h, like contrast_cuda.cpp.
#include "cuda/operands.h"

namespace fastcl::cuda {
namespace {

void softplus_sum_forward(StableIValue* stack, uint64_t, uint64_t) {
  const SoftplusForwardArguments a(stack);
  const Device device(a.in.query);
  const bool wide = is_double(a.in.query) || is_double(a.in.key);
  const Operands o(device, a.in, wide, &a.offset);
  const Problem& p = o.problem;
  const bool columns = a.key_grad || a.bias_grad;
  Tensor total = o.empty(true, {p.rows}, o.compute);
  Tensor sum_key = o.empty(a.row_grad, {p.rows, p.features}, o.compute);
  Tensor sum_weight = o.empty(a.row_grad, {p.rows}, o.compute);
  Tensor expected = o.empty(columns, {p.rows}, o.compute);
  Tensor key_sum = o.empty(columns, {p.columns, p.features}, o.compute);
  Tensor bias_sum = o.empty(a.bias_grad, {p.columns}, o.compute);

  Outputs out{};
  out.lse = pointer(total, true);
  out.mean_key = pointer(sum_key, a.row_grad);
  out.sum_weight = pointer(sum_weight, a.row_grad);
  run_forward(o, out, sum_key);
  // These kernels do not sum the gradient of the keys in forward; contrast_cuda.cpp does the same.
  if (columns) device.fill_nan(expected, p.rows * (wide ? 8 : 4));

  Tensor* results[] = {&total, &sum_key, &sum_weight, &expected, &key_sum, &bias_sum};
  for (int i = 0; i < 6; ++i) stack[i] = results[i]->release();
}

void softplus_sum_backward(StableIValue* stack, uint64_t, uint64_t) {
  const SoftplusBackwardArguments a(stack);
  const Device device(a.in.query);
  const Operands o(device, a.in, is_double(a.grad), &a.offset);
  const Problem& p = o.problem;
  check(vector_of(a.grad, p.rows, "grad").dtype == o.compute, "grad: expected the compute dtype");
  check(!present(a.grad) || device.holds(a.grad), "grad: expected the device of query");
  const Tensor grad_key = o.empty(a.key_grad, {p.columns, p.features}, o.key_gradient_dtype());
  Tensor grad_bias = o.empty(a.bias_grad, {p.columns}, o.compute);

  Gradients g{};
  g.grad_lse = a.grad.read<void>();
  g.key = pointer(grad_key, a.key_grad);
  g.bias = pointer(grad_bias, a.bias_grad);
  run_backward(o, g, grad_key, grad_bias);

  stack[0] = o.finished(grad_key, a.key_grad, a.in.key);
  stack[1] = grad_bias.release();
}

[[maybe_unused]] const bool registered =
    register_ops(kDispatchKey, {{"softplus_sum_forward", guarded<softplus_sum_forward, 12, 6>},
                                {"softplus_sum_backward", guarded<softplus_sum_backward, 14, 2>}});

}  // namespace
}  // namespace fastcl::cuda

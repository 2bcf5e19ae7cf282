// The op `contrast` on the CPU: from tensors to a Pass and back. The loops are in pass.inl.h.
#include "cpu/problem.h"

namespace fastcl {
namespace {

template <class T>
void forward(const Inputs& in, bool row_grad, StableIValue* results) {
  const Problem<T> p(in);
  const int32_t dtype = torch_dtype<T>();
  Tensor pos = Tensor::empty({p.positive.data != nullptr ? p.n : 0}, dtype);
  Tensor lse = Tensor::empty({p.n}, dtype);
  Tensor mean_key = row_grad ? Tensor::empty({p.n, p.d}, dtype) : Tensor::empty({0}, dtype);

  if (p.positive.data != nullptr) {
    T* out = pos.write<T>();
    parallel_for(0, p.n, grain(2 * p.d), [&](int64_t begin, int64_t end) {
      p.kernels.row_dot(p.query, p.positive, p.d, begin, end, out);
      for (int64_t i = begin; i < end; ++i) out[i] *= p.scale[i];
    });
  }

  const bool has_bias = present(in.bias);
  const Buffer<T> panels = p.panels(p.key, nullptr, p.m);
  const Buffer<T> shift = has_bias ? p.log2_shift(in.bias, "bias", p.m, p.padded(p.m)) : Buffer<T>(0);
  const Buffer<Tag<T>> tags = p.tags(p.col_id, p.col_id != nullptr ? p.m : 0);

  Pass<T> pass{};
  pass.rows = p.n;
  pass.features = p.d;
  pass.row_data = p.query;
  pass.row_factor = p.log2_scale.get();
  pass.row_id = p.row_id;
  pass.columns.count = p.m;
  pass.columns.panels = panels.get();
  pass.columns.shift = has_bias ? shift.get() : nullptr;
  pass.columns.values = p.key;
  pass.columns.id = p.col_id;
  pass.columns.tag = p.col_id != nullptr ? tags.get() : nullptr;
  pass.reduced = lse.write<T>();
  pass.out = {row_grad ? mean_key.write<void>() : nullptr, sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64};
  p.run(pass, p.kernels.log_sum_exp);

  results[0] = pos.release();
  results[1] = lse.release();
  results[2] = mean_key.release();
}

struct Wanted {
  bool query, key, positive, scale, bias;
};

// The columns' side: weights are recomputed tile by tile, with keys as rows, so that each key's gradient has one owner.
template <class T>
void key_gradient(const Problem<T>& p, const Inputs& in, const T* grad_lse, const T* lse, const Tensor* grad_key,
                  T* grad_bias) {
  const bool has_bias = present(in.bias);
  Buffer<T> weight(p.n), shift(p.padded(p.n));
  for (int64_t i = 0; i < p.n; ++i) weight[i] = grad_lse[i] * p.scale[i];
  const T infinity = std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < p.padded(p.n); ++i) {
    shift[i] = i >= p.n || lse[i] == -infinity ? -infinity : static_cast<T>(-static_cast<double>(lse[i]) * kLog2e);
  }
  const Buffer<T> panels = p.panels(p.query, p.log2_scale.get(), p.n);
  const Buffer<T> row_shift = has_bias ? p.log2_shift(in.bias, "bias", p.m, p.m) : Buffer<T>(0);
  const Buffer<Tag<T>> tags = p.tags(p.row_id, p.row_id != nullptr ? p.n : 0);

  Pass<T> pass{};
  pass.rows = p.m;
  pass.features = p.d;
  pass.row_data = p.key;
  pass.row_shift = has_bias ? row_shift.get() : nullptr;
  pass.row_id = p.col_id;
  pass.columns.count = p.n;
  pass.columns.panels = panels.get();
  pass.columns.shift = shift.get();
  pass.columns.values = p.query;
  pass.columns.value_factor = weight.get();
  // One more value per column, the upstream gradient itself, sums to the gradient of the bias.
  pass.columns.extra = grad_bias != nullptr ? grad_lse : nullptr;
  pass.columns.id = p.row_id;
  pass.columns.tag = p.row_id != nullptr ? tags.get() : nullptr;
  pass.out = {grad_key != nullptr ? grad_key->write<void>() : nullptr, p.key.dtype};
  pass.out_extra = grad_bias;
  p.run(pass, p.kernels.known_sum);
}

template <class T>
void backward(const Inputs& in, const Tensor& grad_pos_t, const Tensor& grad_lse_t, const Tensor& lse_t,
              const Tensor& mean_key_t, Wanted wanted, StableIValue* results) {
  const Problem<T> p(in);
  const int32_t dtype = torch_dtype<T>();
  const bool has_positive = p.positive.data != nullptr;
  const auto empty_like = [&](bool want, int64_t rows, const Tensor& t) {
    return want ? Tensor::empty({rows, p.d}, t.dtype()) : Tensor::empty({0}, dtype);
  };
  Tensor grad_query = empty_like(wanted.query, p.n, in.query);
  Tensor grad_key = empty_like(wanted.key, p.m, in.key);
  Tensor grad_positive = empty_like(wanted.positive, p.n, in.positive);
  Tensor grad_scale = Tensor::empty({wanted.scale ? p.n : 0}, dtype);
  Tensor grad_bias = Tensor::empty({wanted.bias ? p.m : 0}, dtype);

  for (const auto& [t, name] :
       {std::pair(&grad_pos_t, "grad_pos"), std::pair(&grad_lse_t, "grad_lse"), std::pair(&lse_t, "lse")}) {
    const int64_t length = t == &grad_pos_t && !has_positive ? 0 : p.n;
    vector_of(*t, length, name);
    check(t->dtype() == dtype, std::string(name) + ": expected the dtype of lse");
  }
  const T* grad_pos = grad_pos_t.read<T>();
  // A row with nothing in its sum passes nothing on, whatever a loss on top sends into it.
  Buffer<T> grad_lse(p.n);
  const T *given = grad_lse_t.read<T>(), *lse = lse_t.read<T>();
  for (int64_t i = 0; i < p.n; ++i) {
    grad_lse[i] = lse[i] == -std::numeric_limits<T>::infinity() ? T(0) : given[i];
  }

  const Matrix mean_key =
      wanted.query || wanted.scale ? matrix_of(mean_key_t, p.n, p.d, "mean_key") : Matrix{nullptr, DType::kFloat32};
  Buffer<T> pos_weight(p.n), lse_weight(p.n), dot(p.n);
  parallel_for(0, p.n, grain(8 * p.d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      pos_weight[i] = has_positive ? p.scale[i] * grad_pos[i] : T(0);
      lse_weight[i] = p.scale[i] * grad_lse[i];
    }
    const auto out = [&](const Tensor& t, Matrix like) { return MutableMatrix{t.write<void>(), like.dtype}; };
    if (wanted.query) {
      p.kernels.row_combine(lse_weight.get(), mean_key, pos_weight.get(), p.positive, p.d, begin, end,
                            out(grad_query, p.query));
    }
    if (wanted.positive) {
      p.kernels.row_combine(pos_weight.get(), p.query, nullptr, Matrix{nullptr, DType::kFloat32}, p.d, begin, end,
                            out(grad_positive, p.positive));
    }
    if (wanted.scale) {
      T* g = grad_scale.write<T>();
      p.kernels.row_dot(p.query, mean_key, p.d, begin, end, g);
      for (int64_t i = begin; i < end; ++i) g[i] *= grad_lse[i];
      if (has_positive) {
        p.kernels.row_dot(p.query, p.positive, p.d, begin, end, dot.get());
        for (int64_t i = begin; i < end; ++i) g[i] += grad_pos[i] * dot[i];
      }
      for (int64_t i = begin; i < end; ++i) g[i] *= static_cast<T>(in.factor);
    }
  });
  if (wanted.key || wanted.bias) {
    key_gradient(p, in, grad_lse.get(), lse, wanted.key ? &grad_key : nullptr,
                 wanted.bias ? grad_bias.write<T>() : nullptr);
  }
  Tensor* gradients[] = {&grad_query, &grad_key, &grad_positive, &grad_scale, &grad_bias};
  for (int i = 0; i < 5; ++i) results[i] = gradients[i]->release();
}

void contrast_forward(StableIValue* stack, uint64_t, uint64_t) {
  const Inputs in{Tensor(stack[0]), Tensor(stack[1]), Tensor(stack[2]), Tensor(stack[3]),
                  Tensor(stack[4]), Tensor(stack[5]), Tensor(stack[6]), to_double(stack[7])};
  check(in.query.dim() == 2, "query: expected shape [N, D], got " + shape_of(in.query));
  check(in.key.dim() == 2, "key: expected shape [M, D], got " + shape_of(in.key));
  const bool row_grad = to_bool(stack[8]);
  if (is_double(in.query) || is_double(in.key) || is_double(in.positive)) {
    forward<double>(in, row_grad, stack);
  } else {
    forward<float>(in, row_grad, stack);
  }
}

void contrast_backward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor grad_pos(stack[0]), grad_lse(stack[1]);
  const Inputs in{Tensor(stack[2]), Tensor(stack[3]), Tensor(stack[4]), Tensor(stack[5]),
                  Tensor(stack[6]), Tensor(stack[7]), Tensor(stack[8]), to_double(stack[11])};
  const Tensor lse(stack[9]), mean_key(stack[10]);
  check(in.query.dim() == 2, "query: expected shape [N, D], got " + shape_of(in.query));
  const Wanted wanted{to_bool(stack[12]), to_bool(stack[13]), to_bool(stack[14]), to_bool(stack[15]),
                      to_bool(stack[16])};
  check(in.key.dim() == 2 || !(wanted.key || wanted.bias), "key: expected shape [M, D], got " + shape_of(in.key));
  if (is_double(lse)) {
    backward<double>(in, grad_pos, grad_lse, lse, mean_key, wanted, stack);
  } else {
    backward<float>(in, grad_pos, grad_lse, lse, mean_key, wanted, stack);
  }
}

[[maybe_unused]] const bool registered =
    register_ops("CPU", {{"contrast_forward", contrast_forward}, {"contrast_backward", contrast_backward}});

}  // namespace
}  // namespace fastcl

// The op `contrast` on the CPU: turns tensors into a Pass, runs it, and computes the gradients that are linear in the
// rows. The loops over similarities are in pass.inl.h and must stay there.
#include <cmath>

#include "cpu/expected.h"

namespace fastcl {
namespace {

// log(e^a + e^b), also where both are infinite.
template <class T>
T add_exp(T a, T b) {
  if (a == b) return a + static_cast<T>(0.693147180559945309417232121458);
  return (a > b ? a : b) + std::log1p(std::exp(-std::fabs(a - b)));
}

// The share of a part in the whole, by the logarithms of both.
template <class T>
T share_of(T part, T whole) {
  return part == -std::numeric_limits<T>::infinity() ? T(0) : std::exp(part - whole);
}

// The gradient expected at lse of row i (the formula is at `Expected` in arguments.h).
template <class T>
struct ExpectedGradient {
  const Expected& in;
  const Problem<T>& p;
  Buffer<T> row_shift, rest, weight;

  ExpectedGradient(const Expected& expected, const Problem<T>& problem)
      : in(expected),
        p(problem),
        row_shift(vector(in.row_shift, "row_shift")),
        rest(vector(in.rest, "rest")),
        weight(vector(in.weight, "row_weight")) {}

  Buffer<T> vector(const Tensor& t, const char* name) const {
    Buffer<T> out(present(t) ? p.n : 0);
    if (present(t)) p.kernels.widen_vector(vector_of(t, p.n, name), p.n, out.get());
    return out;
  }

  T operator()(int64_t i, const T* pos, T lse) const {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    if (lse == -infinity) return 0;
    if (lse == infinity)
      return std::numeric_limits<T>::quiet_NaN();  // LogSumExp drops such weights: NaN makes backward recompute them
    T other = static_cast<T>(in.shift);
    if (other != -infinity) other += pos[i];
    if (present(in.row_shift)) other += row_shift[i];
    if (present(in.rest)) other = add_exp(other, rest[i]);
    const T sigmoid = 1 / (1 + std::exp(other - lse));
    return present(in.weight) ? weight[i] * sigmoid : sigmoid;
  }
};

// The sums of the rows over the frozen columns.
template <class T>
struct FrozenSums {
  bool there;
  Buffer<T> lse, mean;  // [n], and [n, d] if rows have gradients

  explicit FrozenSums(const ForwardArguments& a)
      : there(present(a.frozen.key)),
        lse(there ? a.in.query.size(0) : 0),
        mean(there && a.row_grad ? a.in.query.size(0) * a.in.query.size(1) : 0) {
    if (!there) return;
    const auto absent = [] { return Tensor::empty({0}, aoti_torch_dtype_float32()); };
    const bool ids = present(a.frozen.id);
    const Inputs in{a.in.query.share(),  a.frozen.key.share(),  absent(),
                    a.in.scale.share(),  a.frozen.bias.share(), ids ? a.in.row_id.share() : absent(),
                    a.frozen.id.share(), a.in.cap.share(),      a.in.factor};
    const Problem<T> p(in);
    Side<T> side = p.by_query(in);
    side.pass.reduced = lse.get();
    side.pass.out = {a.row_grad ? mean.get() : nullptr, compute_type<T>()};
    p.driver().run(side.pass, &Kernels<T>::log_sum_exp);
  }

  T whole(int64_t i, T part) const { return there ? add_exp(part, lse[i]) : part; }

  // Adds these columns to the results for all others.
  void join(const Problem<T>& p, T* own_lse, T* own_mean) const {
    if (!there) return;
    const Buffer<T> own(p.n), other(p.n);
    parallel_for(0, p.n, grain(8 * p.d), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T total = add_exp(own_lse[i], lse[i]);
        own[i] = share_of(own_lse[i], total);
        other[i] = share_of(lse[i], total);
        own_lse[i] = total;
      }
      if (own_mean == nullptr) return;
      constexpr DType type = compute_type<T>();
      p.kernels.row_combine(own.get(), Matrix{own_mean, type}, other.get(), Matrix{mean.get(), type}, p.d, begin, end,
                            MutableMatrix{own_mean, type});
    });
  }
};

template <class T>
void forward(const ForwardArguments& a, StableIValue* results) {
  const Inputs& in = a.in;
  const Expected& expected = a.expected;
  const Problem<T> p(in);
  const int32_t dtype = torch_dtype<T>();
  const bool columns = expected.key_grad || expected.bias_grad;
  Tensor pos = Tensor::empty({p.has_positive ? p.n : 0}, dtype);
  Tensor lse = Tensor::empty({p.n}, dtype);
  Tensor mean_key = a.row_grad ? Tensor::empty({p.n, p.d}, dtype) : Tensor::empty({0}, dtype);
  Tensor gradient = Tensor::empty({columns ? p.n : 0}, dtype);
  Tensor key_sum = columns ? Tensor::empty({p.m, p.d}, dtype) : Tensor::empty({0}, dtype);
  Tensor bias_sum = Tensor::empty({expected.bias_grad ? p.m : 0}, dtype);

  if (p.has_positive) {
    T* out = pos.write<T>();
    parallel_for(0, p.n, grain(2 * p.d), [&](int64_t begin, int64_t end) {
      p.kernels.row_dot(p.query, p.positive, p.d, begin, end, out);
      for (int64_t i = begin; i < end; ++i) out[i] *= p.scale[i];
    });
  }

  Side<T> side = p.by_query(in);
  Pass<T>& pass = side.pass;
  pass.reduced = lse.write<T>();
  pass.out = {a.row_grad ? mean_key.write<void>() : nullptr, compute_type<T>()};
  const FrozenSums<T> frozen(a);
  const auto driver = p.driver();
  if (columns && p.n != 0 && driver.can_keep(pass)) {
    const ExpectedGradient<T> expect(expected, p);
    T* sent = gradient.write<T>();
    const auto factors = [&](int64_t begin, int64_t end, T* factor, T* extra) {
      for (int64_t i = begin; i < end; ++i) {
        const T whole = frozen.whole(i, pass.reduced[i]);
        sent[i] = expect(i, pos.read<T>(), whole);
        extra[i - begin] = frozen.there ? sent[i] * share_of(pass.reduced[i], whole) : sent[i];
        factor[i - begin] = extra[i - begin] * p.scale[i];
      }
    };
    driver.run_with_columns(pass, &Kernels<T>::log_sum_exp, factors, p.query, key_sum.write<T>(),
                            expected.bias_grad ? bias_sum.write<T>() : nullptr);
  } else {
    driver.run(pass, &Kernels<T>::log_sum_exp);
    if (columns) expect_nothing<T>(gradient, p.n);
  }
  frozen.join(p, pass.reduced, a.row_grad ? mean_key.write<T>() : nullptr);

  Tensor* out[] = {&pos, &lse, &mean_key, &gradient, &key_sum, &bias_sum};
  for (int i = 0; i < 6; ++i) results[i] = out[i]->release();
}

// The gradients of key and bias, with the weights computed again from the saved lse.
template <class T>
void key_gradient(const Problem<T>& p, const Inputs& in, const T* grad_lse, const T* lse, const Tensor* grad_key,
                  T* grad_bias) {
  Buffer<T> weight(p.n), shift(p.padded(p.n));
  for (int64_t i = 0; i < p.n; ++i) weight[i] = grad_lse[i] * p.scale[i];
  const T infinity = std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < p.padded(p.n); ++i) {
    shift[i] = i >= p.n || lse[i] == -infinity ? -infinity : static_cast<T>(-static_cast<double>(lse[i]) * kLog2e);
  }
  // The gradient of the bias is the weighted sum of the upstream gradients: one more feature of the values.
  Side<T> side = p.by_key(in, std::move(shift), weight.get(), grad_bias != nullptr ? grad_lse : nullptr);
  side.pass.out = {grad_key != nullptr ? grad_key->write<void>() : nullptr, p.key.dtype};
  side.pass.out_extra = grad_bias;
  p.driver().run(side.pass, &Kernels<T>::known_sum);
}

template <class T>
void backward(const BackwardArguments& a, StableIValue* results) {
  const Inputs& in = a.in;
  const Saved& saved = a.saved;
  const Wanted wanted = a.wanted;
  const Problem<T> p(in);
  const int32_t dtype = torch_dtype<T>();
  const bool has_positive = p.has_positive;
  const auto empty_like = [&](bool want, int64_t rows, const Tensor& t) {
    return want ? Tensor::empty({rows, p.d}, t.dtype()) : Tensor::empty({0}, dtype);
  };
  Tensor grad_query = empty_like(wanted.query, p.n, in.query);
  Tensor grad_key = empty_like(wanted.key, p.m, in.key);
  Tensor grad_positive = empty_like(wanted.positive, p.n, in.positive);
  Tensor grad_scale = Tensor::empty({wanted.scale ? p.n : 0}, dtype);
  Tensor grad_bias = Tensor::empty({wanted.bias ? p.m : 0}, dtype);

  check_upstream(a, has_positive);
  const T* grad_pos = a.grad_pos.read<T>();
  // A row whose every key is excluded has lse = -inf and constant: its gradients are 0, even where the loss on top
  // sends NaN.
  Buffer<T> grad_lse(p.n);
  const T *given = a.grad_lse.read<T>(), *lse = saved.lse.read<T>();
  const auto empty = [&](int64_t i) { return lse[i] == -std::numeric_limits<T>::infinity(); };
  for (int64_t i = 0; i < p.n; ++i) grad_lse[i] = empty(i) ? T(0) : given[i];

  const Matrix mean_key =
      wanted.query || wanted.scale ? matrix_of(saved.mean_key, p.n, p.d, "mean_key") : Matrix{nullptr, DType::kFloat32};
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
      for (int64_t i = begin; i < end; ++i) g[i] = empty(i) ? T(0) : g[i] * grad_lse[i];
      if (has_positive) {
        p.kernels.row_dot(p.query, p.positive, p.d, begin, end, dot.get());
        for (int64_t i = begin; i < end; ++i) g[i] += grad_pos[i] * dot[i];
      }
      for (int64_t i = begin; i < end; ++i) g[i] *= static_cast<T>(in.factor);
    }
  });
  // An error dx in x changes expected_i = sigmoid(x) by at most |dx| relative, and |x| is at most about
  // |lse_i| + |log expected_i|.
  const auto size = [&](int64_t i) {
    const double e = std::fabs(static_cast<double>(saved.columns.expected.read<T>()[i]));
    return 4 + (e == 0 ? 0 : std::fabs(static_cast<double>(lse[i])) + std::fabs(std::log(e)));
  };
  const Tensor* key_out = wanted.key ? &grad_key : nullptr;
  T* bias_out = wanted.bias ? grad_bias.write<T>() : nullptr;
  if ((wanted.key || wanted.bias) && !scale_sums(p, saved.columns, grad_lse.get(), size, key_out, bias_out)) {
    key_gradient(p, in, grad_lse.get(), lse, key_out, bias_out);
  }
  Tensor* gradients[] = {&grad_query, &grad_key, &grad_positive, &grad_scale, &grad_bias};
  for (int i = 0; i < 5; ++i) results[i] = gradients[i]->release();
}

void contrast_forward(StableIValue* stack, uint64_t, uint64_t) {
  const ForwardArguments a(stack);
  if (is_double(a.in.query) || is_double(a.in.key) || is_double(a.in.positive) || is_double(a.frozen.key)) {
    forward<double>(a, stack);
  } else {
    forward<float>(a, stack);
  }
}

void contrast_backward(StableIValue* stack, uint64_t, uint64_t) {
  const BackwardArguments a(stack);
  if (is_double(a.saved.lse)) {
    backward<double>(a, stack);
  } else {
    backward<float>(a, stack);
  }
}

[[maybe_unused]] const bool registered = register_ops(
    "CPU",
    {{"contrast_forward", guarded<contrast_forward, 19, 6>}, {"contrast_backward", guarded<contrast_backward, 21, 5>}});

}  // namespace
}  // namespace fastcl

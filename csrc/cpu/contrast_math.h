// The arithmetic of the op `contrast` on the CPU: turns inputs into a Pass, runs it, and computes the gradients that are
// linear in the rows. The loops over similarities are in pass.inl.h and must stay there; the ops, which own the tensors,
// are in contrast_cpu.cpp and packed_cpu.cpp.
#pragma once
#include <cmath>

#include "cpu/expected.h"

namespace fastcl {

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

  FrozenSums(const ForwardArguments& a, const Matrix& query)
      : there(present(a.frozen.key)),
        lse(there ? a.in.query.size(0) : 0),
        mean(there && a.row_grad ? a.in.query.size(0) * a.in.query.size(1) : 0) {
    if (!there) return;
    const auto absent = [] { return Tensor::empty({0}, aoti_torch_dtype_float32()); };
    const bool ids = present(a.frozen.id);
    const Inputs in{a.in.query.share(),  a.frozen.key.share(),  absent(),
                    a.in.scale.share(),  a.frozen.bias.share(), ids ? a.in.row_id.share() : absent(),
                    a.frozen.id.share(), a.in.cap.share(),      a.in.factor};
    const Problem<T> p(in, {query, embeddings_of(in).key, absent_matrix()});
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

// Where `forward` writes. Null: absent.
template <class T>
struct Sums {
  T* pos;       // [n], absent without a positive
  T* lse;       // [n]
  T* mean_key;  // [n, d], absent unless the rows have gradients
  T* expected;  // [n], the expected gradient of lse; this and the next are absent unless the columns are summed
  T* key_sum;   // [m, d]
  T* bias_sum;  // [m]
};

template <class T>
void forward(const ForwardArguments& a, const Problem<T>& p, const Sums<T>& to) {
  const Inputs& in = a.in;
  if (p.has_positive) {
    parallel_for(0, p.n, grain(2 * p.d), [&](int64_t begin, int64_t end) {
      p.kernels.row_dot(p.query, p.positive, p.d, begin, end, to.pos);
      for (int64_t i = begin; i < end; ++i) to.pos[i] *= p.scale[i];
    });
  }

  Side<T> side = p.by_query(in);
  Pass<T>& pass = side.pass;
  pass.reduced = to.lse;
  pass.out = {to.mean_key, compute_type<T>()};
  const FrozenSums<T> frozen(a, p.query);
  const auto driver = p.driver();
  const bool columns = to.expected != nullptr;
  if (columns && p.n != 0 && driver.can_keep(pass)) {
    const ExpectedGradient<T> expect(a.expected, p);
    const auto factors = [&](int64_t begin, int64_t end, T* factor, T* extra) {
      for (int64_t i = begin; i < end; ++i) {
        const T whole = frozen.whole(i, pass.reduced[i]);
        to.expected[i] = expect(i, to.pos, whole);
        extra[i - begin] = frozen.there ? to.expected[i] * share_of(pass.reduced[i], whole) : to.expected[i];
        factor[i - begin] = extra[i - begin] * p.scale[i];
      }
    };
    driver.run_with_columns(pass, &Kernels<T>::log_sum_exp, factors, p.query, to.key_sum, to.bias_sum);
  } else {
    driver.run(pass, &Kernels<T>::log_sum_exp);
    if (columns) expect_nothing(to.expected, p.n);
  }
  frozen.join(p, pass.reduced, to.mean_key);
}

// The gradients of key and bias, with the weights computed again from the saved lse.
template <class T>
void key_gradient(const Problem<T>& p, const Inputs& in, const T* grad_lse, const T* lse, MutableMatrix grad_key,
                  T* grad_bias) {
  Buffer<T> weight(p.n), shift(p.padded(p.n));
  for (int64_t i = 0; i < p.n; ++i) weight[i] = grad_lse[i] * p.scale[i];
  const T infinity = std::numeric_limits<T>::infinity();
  for (int64_t i = 0; i < p.padded(p.n); ++i) {
    shift[i] = i >= p.n || lse[i] == -infinity ? -infinity : static_cast<T>(-static_cast<double>(lse[i]) * kLog2e);
  }
  // The gradient of the bias is the weighted sum of the upstream gradients: one more feature of the values.
  Side<T> side = p.by_key(in, std::move(shift), weight.get(), grad_bias != nullptr ? grad_lse : nullptr);
  side.pass.out = grad_key;
  side.pass.out_extra = grad_bias;
  p.driver().run(side.pass, &Kernels<T>::known_sum);
}

// What `backward` reads of the forward pass, and the gradients that come back.
template <class T>
struct Came {
  const T *grad_pos, *grad_lse, *lse;
  Matrix mean_key;
  Summed<T> columns;
};

// Where `backward` writes. Null: not wanted.
template <class T>
struct Gradients {
  MutableMatrix query, key, positive;
  T *scale, *bias;
};

template <class T>
void backward(const Inputs& in, const Problem<T>& p, const Came<T>& came, const Gradients<T>& to) {
  // A row whose every key is excluded has lse = -inf and constant: its gradients are 0, even where the loss on top
  // sends NaN.
  Buffer<T> grad_lse(p.n);
  const auto empty = [&](int64_t i) { return came.lse[i] == -std::numeric_limits<T>::infinity(); };
  for (int64_t i = 0; i < p.n; ++i) grad_lse[i] = empty(i) ? T(0) : came.grad_lse[i];

  Buffer<T> pos_weight(p.n), lse_weight(p.n), dot(p.n);
  parallel_for(0, p.n, grain(8 * p.d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      pos_weight[i] = p.has_positive ? p.scale[i] * came.grad_pos[i] : T(0);
      lse_weight[i] = p.scale[i] * grad_lse[i];
    }
    if (to.query.data != nullptr) {
      p.kernels.row_combine(lse_weight.get(), came.mean_key, pos_weight.get(), p.positive, p.d, begin, end, to.query);
    }
    if (to.positive.data != nullptr) {
      p.kernels.row_combine(pos_weight.get(), p.query, nullptr, absent_matrix(), p.d, begin, end, to.positive);
    }
    if (to.scale != nullptr) {
      T* g = to.scale;
      p.kernels.row_dot(p.query, came.mean_key, p.d, begin, end, g);
      for (int64_t i = begin; i < end; ++i) g[i] = empty(i) ? T(0) : g[i] * grad_lse[i];
      if (p.has_positive) {
        p.kernels.row_dot(p.query, p.positive, p.d, begin, end, dot.get());
        for (int64_t i = begin; i < end; ++i) g[i] += came.grad_pos[i] * dot[i];
      }
      for (int64_t i = begin; i < end; ++i) g[i] *= static_cast<T>(in.factor);
    }
  });
  if (to.key.data == nullptr && to.bias == nullptr) return;
  // An error dx in x changes expected_i = sigmoid(x) by at most |dx| relative, and |x| is at most about
  // |lse_i| + |log expected_i|.
  const auto size = [&](int64_t i) {
    const double e = std::fabs(static_cast<double>(came.columns.expected[i]));
    return 4 + (e == 0 ? 0 : std::fabs(static_cast<double>(came.lse[i])) + std::fabs(std::log(e)));
  };
  if (!scale_sums(p, came.columns, grad_lse.get(), size, to.key, to.bias)) {
    key_gradient(p, in, grad_lse.get(), came.lse, to.key, to.bias);
  }
}

}  // namespace fastcl

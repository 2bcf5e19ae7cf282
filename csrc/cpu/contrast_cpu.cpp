// The op on the CPU: from tensors to a Pass and back. Owns memory and threads; the loops are in pass.inl.h.
#include <cmath>
#include <limits>

#include "checks.h"
#include "contrast.h"
#include "cpu/buffer.h"
#include "cpu/isa.h"
#include "torch_shim.h"

namespace fastcl {
namespace {

constexpr double kLog2e = 1.442695040888963407359924681;
// Below this much work a second thread costs more than it brings (a parallel region is about 1.5 us).
constexpr int64_t kGrainFlops = 1 << 17;

int64_t grain(int64_t flops_per_unit) { return 1 + kGrainFlops / (flops_per_unit + 1); }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Inputs {
  Tensor query, key, positive, scale, bias, row_id, col_id;
  double factor;
};

// What both directions need of the inputs, in the compute type.
template <class T>
struct Problem {
  const Kernels<T>& kernels = kernels_of<T>(active_isa());
  int64_t n, m, d;
  Matrix query, key, positive;  // key and positive may be absent (null data)
  Buffer<T> scale;              // [n]
  Buffer<T> log2_scale;         // [n], scale * log2 e: makes similarities powers of two
  const int64_t *row_id, *col_id;

  explicit Problem(const Inputs& in)
      : n(in.query.size(0)),
        m(in.key.dim() == 2 ? in.key.size(0) : 0),
        d(in.query.size(1)),
        query(matrix_of(in.query, n, d, "query")),
        key(in.key.dim() == 2 ? matrix_of(in.key, m, d, "key") : Matrix{nullptr, DType::kFloat32}),
        positive(in.positive.dim() == 2 ? matrix_of(in.positive, n, d, "positive") : Matrix{nullptr, DType::kFloat32}),
        scale(n),
        log2_scale(n),
        row_id(ids_of(in.row_id, n, "row_id")),
        col_id(ids_of(in.col_id, m, "col_id")) {
    check(col_id == nullptr || row_id != nullptr || n == 0, "row_id: expected both row_id and col_id or neither");
    if (!present(in.scale)) {
      for (int64_t i = 0; i < n; ++i) scale[i] = static_cast<T>(in.factor);
    } else {
      const bool single = in.scale.dim() == 0;
      kernels.widen_vector(vector_of(in.scale, single ? 1 : n, "scale"), single ? 1 : n, scale.get());
      for (int64_t i = n - 1; i >= 0; --i) scale[i] = static_cast<T>((single ? scale[0] : scale[i]) * in.factor);
    }
    for (int64_t i = 0; i < n; ++i) log2_scale[i] = static_cast<T>(scale[i] * kLog2e);
  }

  // bias in units of log 2, filled up to `length` with -inf.
  Buffer<T> log2_bias(const Tensor& bias, int64_t length) const {
    Buffer<T> out(length);
    kernels.widen_vector(vector_of(bias, m, "bias"), m, out.get());
    for (int64_t j = 0; j < m; ++j) out[j] = static_cast<T>(out[j] * kLog2e);
    for (int64_t j = m; j < length; ++j) out[j] = -std::numeric_limits<T>::infinity();
    return out;
  }

  int64_t padded(int64_t columns) const { return ceil_div(columns, kernels.panel_width) * kernels.panel_width; }

  Buffer<T> panels(Matrix columns, const T* factor, int64_t count) const {
    Buffer<T> out(padded(count) * d);
    parallel_for(
        0, ceil_div(count, kernels.panel_width), grain(kernels.panel_width * d * 8),
        [&](int64_t begin, int64_t end) { kernels.pack_panels(columns, factor, count, d, begin, end, out.get()); });
    return out;
  }

  Buffer<Tag<T>> tags(const int64_t* id, int64_t count) const {
    Buffer<Tag<T>> out(padded(count));
    for (int64_t j = 0; j < padded(count); ++j) out[j] = j < count ? tag_of<T>(id[j]) : 0;
    return out;
  }

  void run(const Pass<T>& pass, void (*kernel)(const Pass<T>&, int64_t, int64_t, T*)) const {
    const int64_t tiles = ceil_div(pass.rows, kernels.tile_rows);
    const int64_t flops = 4 * kernels.tile_rows * pass.columns.count * d;
    parallel_for(0, tiles, grain(flops), [&](int64_t begin, int64_t end) {
      Buffer<T> scratch(kernels.scratch_elements(pass));
      kernel(pass, begin, end, scratch.get());
    });
  }
};

template <class T>
int32_t torch_dtype() {
  return sizeof(T) == 4 ? aoti_torch_dtype_float32() : aoti_torch_dtype_float64();
}

bool is_double(const Tensor& t) { return t.dtype() == aoti_torch_dtype_float64(); }

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
  const Buffer<T> shift = has_bias ? p.log2_bias(in.bias, p.padded(p.m)) : Buffer<T>(0);
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
  pass.lse = lse.write<T>();
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
  const Buffer<T> row_shift = has_bias ? p.log2_bias(in.bias, p.m) : Buffer<T>(0);
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
  p.run(pass, p.kernels.weighted_sum);
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

// The op `both_ways` on the CPU: the log-sum-exps over the rows and over the columns of one product, and its gradients.
// The products are torch's; the loops over the similarities are in both.inl.h.
#include <cmath>

#include "cpu/problem.h"

namespace fastcl {
namespace {

// Two matrices [n, d] of one type, which is that of all results.
template <class T>
struct Pair {
  int64_t n;
  const int64_t* id;  // [n] or null
  double scale;
  const Kernels<T>& kernels;

  Pair(const Tensor& query, const Tensor& key, const Tensor& ids, double given)
      : n(query.size(0)),
        id(ids_of(ids, n, "ids")),
        scale(std::isfinite(given) ? given : std::numeric_limits<double>::quiet_NaN()),
        kernels(kernels_of<T>(active_isa(), compute_type<T>(), compute_type<T>())) {
    for (const auto& [t, name] : {std::pair(&query, "query"), std::pair(&key, "key")}) {
      check(matrix_of(*t, n, query.size(1), name).dtype == compute_type<T>(), name,
            ": expected the dtype of both, float32 or float64");
    }
  }
};

const void* values_of(const Tensor& t, std::initializer_list<int64_t> sizes, int32_t dtype, const char* name) {
  check(t.dtype() == dtype, name, ": expected the dtype of query");
  const int64_t rows = sizes.begin()[0];
  return sizes.size() == 2 ? matrix_of(t, rows, sizes.begin()[1], name).data : vector_of(t, rows, name).data;
}

template <class T>
void forward(const Tensor& query, const Tensor& key, const Tensor& ids, double scale, StableIValue* results) {
  const Pair<T> p(query, key, ids, scale);
  const int64_t n = p.n;
  const int32_t dtype = torch_dtype<T>();
  Tensor pos = Tensor::empty({2 * n}, dtype), lse = Tensor::empty({2 * n}, dtype);
  Tensor logits = Tensor::empty({n, n}, dtype), sums = Tensor::empty({4, n}, dtype);
  call("aten::mm", "out", query, call("aten::t", "", key), logits);

  T *x = logits.write<T>(), *row_top = sums.write<T>(), *out = pos.write<T>();
  T *row_sum = row_top + n, *column_top = row_top + 2 * n, *column_sum = row_top + 3 * n;
  parallel_for(0, n, grain(16 * n), [&](int64_t begin, int64_t end) {
    p.kernels.both_rows(x, n, static_cast<T>(p.scale), static_cast<T>(p.scale * kLog2e), p.id, begin, end, out, row_top,
                        row_sum);
  });
  constexpr int64_t kLine = 64 / sizeof(T);
  parallel_for(0, ceil_div(n, kLine), grain(16 * n * kLine), [&](int64_t begin, int64_t end) {
    p.kernels.both_columns(x, n, begin * kLine, std::min(n, end * kLine), column_top, column_sum);
  });
  T* reduced = lse.write<T>();
  for (int64_t i = 0; i < n; ++i) {
    const auto log_sum = [](T top, T sum) { return static_cast<T>((double{top} + std::log2(double{sum})) / kLog2e); };
    out[n + i] = out[i];
    reduced[i] = log_sum(row_top[i], row_sum[i]);
    reduced[n + i] = log_sum(column_top[i], column_sum[i]);
  }
  Tensor* all[] = {&pos, &lse, &logits, &sums};
  for (int i = 0; i < 4; ++i) results[i] = all[i]->release();
}

template <class T>
void backward(const Tensor& grad_pos, const Tensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& ids,
              const Tensor& logits, const Tensor& sums, double scale, bool query_grad, bool key_grad,
              StableIValue* results) {
  const Pair<T> p(query, key, ids, scale);
  const int64_t n = p.n, d = query.size(1);
  const int32_t dtype = torch_dtype<T>();
  const auto* sent = static_cast<const T*>(values_of(grad_lse, {2 * n}, dtype, "grad_lse"));
  const auto* sent_pos = static_cast<const T*>(values_of(grad_pos, {2 * n}, dtype, "grad_pos"));
  const auto* x = static_cast<const T*>(values_of(logits, {n, n}, dtype, "logits"));
  const auto* row_top = static_cast<const T*>(values_of(sums, {4, n}, dtype, "sums"));
  const T *row_sum = row_top + n, *column_top = row_top + 2 * n, *column_sum = row_top + 3 * n;

  const Buffer<T> row(n), column(n), diagonal(n);
  const T s = static_cast<T>(p.scale);
  for (int64_t i = 0; i < n; ++i) {
    // A row with nothing in its sum passes nothing on, whatever a loss on top sends into it.
    row[i] = row_sum[i] == 0 ? T(0) : sent[i] / row_sum[i] * s;
    column[i] = column_sum[i] == 0 ? T(0) : sent[n + i] / column_sum[i] * s;
    diagonal[i] = (sent_pos[i] + sent_pos[n + i]) * s;
  }
  const Tensor weights = Tensor::empty({n, n}, dtype);
  T* w = weights.write<T>();
  parallel_for(0, n, grain(24 * n), [&](int64_t begin, int64_t end) {
    p.kernels.both_weights(x, n, p.id, begin, end, row_top, row.get(), column_top, column.get(), diagonal.get(), w);
  });
  Tensor grad_query = query_grad ? Tensor::empty({n, d}, dtype) : Tensor::empty({0}, dtype);
  Tensor grad_key = key_grad ? Tensor::empty({n, d}, dtype) : Tensor::empty({0}, dtype);
  if (query_grad) call("aten::mm", "out", weights, key, grad_query);
  if (key_grad) call("aten::mm", "out", call("aten::t", "", weights), query, grad_key);
  results[0] = grad_query.release();
  results[1] = grad_key.release();
}

void both_ways_forward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), key(stack[1]), ids(stack[2]);
  const double scale = to_double(stack[3]);
  check(query.dim() == 2, "query: expected shape [N, D], got ", query);
  is_double(query) ? forward<double>(query, key, ids, scale, stack) : forward<float>(query, key, ids, scale, stack);
}

void both_ways_backward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor grad_pos(stack[0]), grad_lse(stack[1]), query(stack[2]), key(stack[3]), ids(stack[4]);
  const Tensor logits(stack[5]), sums(stack[6]);
  const double scale = to_double(stack[7]);
  const bool query_grad = to_bool(stack[8]), key_grad = to_bool(stack[9]);
  check(query.dim() == 2, "query: expected shape [N, D], got ", query);
  const auto run = is_double(query) ? backward<double> : backward<float>;
  run(grad_pos, grad_lse, query, key, ids, logits, sums, scale, query_grad, key_grad, stack);
}

[[maybe_unused]] const bool registered =
    register_ops("CPU", {{"both_ways_forward", guarded<both_ways_forward, 4, 4>},
                         {"both_ways_backward", guarded<both_ways_backward, 10, 2>}});

}  // namespace
}  // namespace fastcl

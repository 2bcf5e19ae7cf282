// The op `maxsim` on the CPU: for each query and document, the sum over the query's tokens of the largest similarity to
// a token of the document, and the gradients of both. The loops over similarities are in best.inl.h.
#include <algorithm>
#include <cstring>

#include "cpu/problem.h"

namespace fastcl {
namespace {

// Tokens [count, tokens, features], of which the first length(i) of item i are real.
struct Tokens {
  int64_t count, tokens, features;
  Matrix data;
  int32_t dtype;           // torch's number for that of data
  const int64_t* lengths;  // [count] or null: all

  Tokens(const Tensor& t, const Tensor& given, const char* name, const char* name_of_lengths) {
    check(t.dim() == 3, name, ": expected shape [*, *, D], got ", t);
    count = t.size(0);
    tokens = t.size(1);
    features = t.size(2);
    check(t.contiguous(), name, ": expected a contiguous tensor");
    data = {t.read<void>(), dtype_of(t, name)};
    dtype = t.dtype();
    check_memory(t, count * tokens * features, bytes_of(data.dtype), name);
    lengths = ids_of(given, count, name_of_lengths);
    for (int64_t i = 0; lengths != nullptr && i < count; ++i) {
      check(lengths[i] >= 0 && lengths[i] <= tokens, name_of_lengths, ": expected 0 to ", tokens, ", got ", lengths[i]);
    }
  }
  int64_t length(int64_t i) const { return lengths != nullptr ? lengths[i] : tokens; }
  int64_t bytes() const { return features * bytes_of(data.dtype); }  // of a token
  Tensor gradient(bool wanted) const {
    return wanted ? Tensor::empty({count, tokens, features}, dtype) : Tensor::empty({0}, dtype);
  }
};

// The real tokens of all queries, one after the other: those of query i are columns start[i] to start[i + 1].
struct RealTokens {
  const Buffer<int64_t> start;
  const Buffer<char> copy;  // where lengths leave gaps between them
  Matrix data;

  explicit RealTokens(const Tokens& q)
      : start(q.count + 1), copy(q.lengths != nullptr ? q.count * q.tokens * q.bytes() : 0), data(q.data) {
    start[0] = 0;
    for (int64_t i = 0; i < q.count; ++i) {
      start[i + 1] = start[i] + q.length(i);
      if (q.lengths == nullptr) continue;
      std::memcpy(copy.get() + start[i] * q.bytes(), static_cast<const char*>(q.data.data) + i * q.tokens * q.bytes(),
                  q.length(i) * q.bytes());
    }
    if (q.lengths != nullptr) data.data = copy.get();
  }
};

// With few documents the queries are divided in chunks as well, so that every thread has some.
template <class T>
void find(const Kernels<T>& k, const Tokens& q, const RealTokens& real, const Tokens& d, std::atomic<bool>& wild,
          T* score, int32_t* place) {
  const int64_t n = q.count, m = d.count, features = q.features;
  const int64_t chunks = std::max<int64_t>(1, std::min(n, ceil_div(threads(), std::max<int64_t>(1, m))));
  std::vector<Pass<T>> passes;
  std::vector<Buffer<T>> packed;
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t begin = real.start[n * c / chunks], end = real.start[n * (c + 1) / chunks];
    Pass<T> pass{};
    pass.features = features;
    pass.row_data = d.data;
    pass.wild = &wild;
    pass.columns.count = end - begin;
    pass.columns.data = {static_cast<const char*>(real.data.data) + begin * q.bytes(), q.data.dtype};
    const int64_t panels = ceil_div(end - begin, k.panel_width), size = k.panel_elements(features);
    packed.emplace_back(panels * size);
    T* to = packed.back().get();
    torch_parallel(0, panels, grain(8 * size),
                   [&](int64_t from, int64_t until) { k.pack_panels(pass, from, until, to + from * size); });
    pass.columns.panels = to;
    passes.push_back(pass);
  }
  const int64_t flops = 2 * ceil_div(real.start[n], chunks) * d.tokens * features;
  torch_parallel(0, m * chunks, grain(flops), [&](int64_t from, int64_t until) {
    int64_t columns = 0;
    for (const Pass<T>& pass : passes) columns = std::max(columns, ceil_div(pass.columns.count, k.panel_width));
    const Buffer<T> best(columns * k.panel_width), scratch(k.best_scratch_elements(d.tokens, features));
    const Buffer<Tag<T>> at(columns * k.panel_width);
    for (int64_t unit = from; unit < until; ++unit) {
      const int64_t j = unit / chunks, c = unit % chunks, first = n * c / chunks;
      const Pass<T>& pass = passes[c];
      Part<T> part{};
      part.row_begin = j * d.tokens;
      part.row_end = part.row_begin + d.length(j);
      part.panel_end = ceil_div(pass.columns.count, k.panel_width);
      k.best_rows(pass, part, scratch.get(), best.get(), at.get());
      for (int64_t i = first; i < n * (c + 1) / chunks; ++i) {
        const int64_t column = real.start[i] - real.start[first], length = q.length(i);
        T total = 0;
        for (int64_t t = 0; t < length; ++t) total += best[column + t];
        score[i * m + j] = total;
        int32_t* own = place + (i * m + j) * q.tokens;
        for (int64_t t = 0; place != nullptr && t < q.tokens; ++t) {
          own[t] = t < length ? static_cast<int32_t>(at[column + t]) : -1;
        }
      }
    }
  });
}

template <class T>
void forward(const Tokens& q, const Tokens& d, bool places, StableIValue* results) {
  check(d.features == q.features, "document: expected ", q.features, " features, got ", d.features);
  check(d.tokens <= std::numeric_limits<int32_t>::max(), "document: expected fewer than 2^31 tokens, got ", d.tokens);
  Tensor score = Tensor::empty({q.count, d.count}, torch_dtype<T>());
  Tensor place = places ? Tensor::empty({q.count, d.count, q.tokens}, aoti_torch_dtype_int32())
                        : Tensor::empty({0}, aoti_torch_dtype_int32());
  const RealTokens real(q);
  const int64_t products = real.start[q.count] * d.count * d.tokens * q.features;
  const Kernels<T>& kernels = kernels_for<T>(d.data.dtype, q.data.dtype, products);
  int32_t* at = places ? place.write<int32_t>() : nullptr;
  std::atomic<bool> wild{false};
  find(kernels, q, real, d, wild, score.write<T>(), at);
  if (wild) find(*kernels.any, q, real, d, wild, score.write<T>(), at);
  results[0] = score.release();
  results[1] = place.release();
}

// Each query token's gradient is a sum over the documents' rows that it chose, each document token's over the query
// tokens that chose it.
template <class T>
void backward(const Tensor& grad, const Tokens& q, const Tokens& d, const Tensor& place, bool query_grad,
              bool document_grad, StableIValue* results) {
  const int64_t n = q.count, m = d.count, tokens = q.tokens, features = q.features;
  check(d.features == features, "document: expected ", features, " features, got ", d.features);
  check(matrix_of(grad, n, m, "grad").dtype == compute_type<T>(), "grad: expected the dtype of the scores");
  check(place.dim() == 3 && place.size(0) == n && place.size(1) == m && place.size(2) == tokens && place.contiguous() &&
            place.dtype() == aoti_torch_dtype_int32(),
        "place: expected a contiguous int32 tensor [", n, ", ", m, ", ", tokens, "], got ", place);
  check_memory(place, n * m * tokens, sizeof(int32_t), "place");
  const T* g = grad.read<T>();
  const int32_t* at = place.read<int32_t>();
  for (int64_t i = 0; i < n * m * tokens; ++i) {
    check(at[i] < d.tokens, "place: expected below ", d.tokens, ", got ", at[i]);
  }
  const Kernels<T>& k = kernels_of<T>(active_isa(), compute_type<T>(), compute_type<T>());
  Tensor grad_query = q.gradient(query_grad), grad_document = d.gradient(document_grad);
  if (query_grad) {
    const MutableMatrix out{grad_query.write<void>(), q.data.dtype};
    torch_parallel(0, n * tokens, grain(2 * m * features), [&](int64_t begin, int64_t end) {
      const Buffer<int64_t> row(m);
      const Buffer<T> weight(m);
      for (int64_t token = begin; token < end; ++token) {
        const int64_t i = token / tokens, t = token % tokens;
        int64_t count = 0;
        for (int64_t j = 0; j < m; ++j) {
          const int64_t u = at[(i * m + j) * tokens + t];
          if (u < 0) continue;
          row[count] = j * d.tokens + u;
          weight[count++] = g[i * m + j];
        }
        k.sum_rows(d.data, features, row.get(), weight.get(), count, token, out);
      }
    });
  }
  if (document_grad) {
    const MutableMatrix out{grad_document.write<void>(), d.data.dtype};
    torch_parallel(0, m, grain(2 * n * tokens * features), [&](int64_t begin, int64_t end) {
      const Buffer<int64_t> row(n * tokens), next(d.tokens + 1);
      const Buffer<T> weight(n * tokens);
      for (int64_t j = begin; j < end; ++j) {
        // Sorted by the document's token, by counting: next[u] is first where the tokens that chose u begin, and at
        // the end where they end.
        std::fill_n(next.get(), d.tokens + 1, 0);
        const auto each = [&](const auto& f) {
          for (int64_t i = 0; i < n; ++i) {
            const int32_t* own = at + (i * m + j) * tokens;
            for (int64_t t = 0; t < tokens; ++t) {
              if (own[t] >= 0) f(i, t, own[t]);
            }
          }
        };
        each([&](int64_t, int64_t, int64_t u) { ++next[u + 1]; });
        for (int64_t u = 0; u < d.tokens; ++u) next[u + 1] += next[u];
        each([&](int64_t i, int64_t t, int64_t u) {
          row[next[u]] = i * tokens + t;
          weight[next[u]++] = g[i * m + j];
        });
        for (int64_t u = 0; u < d.tokens; ++u) {
          const int64_t first = u == 0 ? 0 : next[u - 1];
          k.sum_rows(q.data, features, row.get() + first, weight.get() + first, next[u] - first, j * d.tokens + u, out);
        }
      }
    });
  }
  results[0] = grad_query.release();
  results[1] = grad_document.release();
}

void maxsim_forward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor query(stack[0]), document(stack[1]), query_lengths(stack[2]), lengths(stack[3]);
  const bool places = to_bool(stack[4]);
  const Tokens q(query, query_lengths, "query", "query_lengths"), d(document, lengths, "document", "lengths");
  is_double(query) || is_double(document) ? forward<double>(q, d, places, stack) : forward<float>(q, d, places, stack);
}

void maxsim_backward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor grad(stack[0]), query(stack[1]), document(stack[2]), place(stack[3]);
  const bool query_grad = to_bool(stack[4]), document_grad = to_bool(stack[5]);
  const Tensor all = Tensor::empty({0}, aoti_torch_dtype_int64());
  const Tokens q(query, all, "query", "query_lengths"), d(document, all, "document", "lengths");
  const auto run = is_double(grad) ? backward<double> : backward<float>;
  run(grad, q, d, place, query_grad, document_grad, stack);
}

[[maybe_unused]] const bool registered = register_ops(
    "CPU", {{"maxsim_forward", guarded<maxsim_forward, 5, 2>}, {"maxsim_backward", guarded<maxsim_backward, 6, 2>}});

}  // namespace
}  // namespace fastcl

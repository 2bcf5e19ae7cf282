// Shared by the ops `contrast` and `softplus_sum` on the CPU: converts inputs to the compute type, builds the two
// passes (by query, by key), and runs them on torch's threads. Must not know the formula of an op.
#pragma once
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>

#include "arguments.h"
#include "contrast.h"
#include "cpu/drive.h"
#include "cpu/isa.h"

namespace fastcl {

constexpr double kLog2e = 1.442695040888963407359924681;
// Runs f on torch's threads. If f throws (it allocates memory), the first exception is thrown again here when all
// threads have finished: passed through torch, its message would be lost.
constexpr auto torch_parallel = [](int64_t begin, int64_t end, int64_t grain, const auto& f) {
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  parallel_for(begin, end, grain, [&](int64_t from, int64_t to) {
    try {
      f(from, to);
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  });
  if (failure != nullptr) std::rethrow_exception(failure);
};

// The active kernels. For at most kTiny products, kernels with large tiles (AMX) would mostly compute padding: their
// fallback is faster.
template <class T>
const Kernels<T>& kernels_for(DType rows, DType columns, int64_t products) {
  constexpr int64_t kTiny = 1 << 16;
  const Kernels<T>& active = kernels_of<T>(active_isa(), rows, columns);
  return products <= kTiny && isa_is_automatic() && active.any != nullptr ? *active.any : active;
}

// A pass, and the vectors that it points to.
template <class T>
struct Side {
  Buffer<T> column_shift, row_shift;
  Buffer<Tag<T>> tag;
  Buffer<T> cap;
  Pass<T> pass;
};

inline Matrix absent_matrix() { return {nullptr, DType::kFloat32}; }

// The rows that are multiplied: those of an op's inputs, or others made of them. Key and positive may be absent.
struct Embeddings {
  Matrix query, key, positive;
};

inline Embeddings embeddings_of(const Inputs& in) {
  const int64_t n = in.query.size(0), d = in.query.size(1);
  return {matrix_of(in.query, n, d, "query"),
          in.key.dim() == 2 ? matrix_of(in.key, in.key.size(0), d, "key") : absent_matrix(),
          in.positive.dim() == 2 ? matrix_of(in.positive, n, d, "positive") : absent_matrix()};
}

// The inputs as forward and backward need them: checked, vectors in the compute type.
template <class T>
struct Problem {
  int64_t n, m, d;
  bool has_positive;            // with 0 features a present positive has null data, hence a flag
  Matrix query, key, positive;  // key and positive may be absent
  Buffer<T> scale;              // [n]
  Buffer<T> log2_scale;         // [n], scale * log2 e: makes similarities powers of two
  const int64_t *row_id, *col_id;
  const Kernels<T>& kernels;

  explicit Problem(const Inputs& in) : Problem(in, embeddings_of(in)) {}

  Problem(const Inputs& in, const Embeddings& rows)
      : n(in.query.size(0)),
        m(in.key.dim() == 2 ? in.key.size(0) : 0),
        d(in.query.size(1)),
        has_positive(in.positive.dim() == 2),
        query(rows.query),
        key(rows.key),
        positive(rows.positive),
        scale(n),
        log2_scale(n),
        row_id(ids_of(in.row_id, n, "row_id")),
        col_id(ids_of(in.col_id, m, "col_id")),
        kernels(kernels_for<T>(query.dtype, key.data != nullptr ? key.dtype : query.dtype, n * m * d)) {
    check(col_id == nullptr || row_id != nullptr || n == 0, "row_id: expected both row_id and col_id or neither");
    if (!present(in.scale)) {
      for (int64_t i = 0; i < n; ++i) scale[i] = static_cast<T>(in.factor);
    } else {
      const bool single = in.scale.dim() == 0;
      kernels.widen_vector(vector_of(in.scale, single ? 1 : n, "scale"), single ? 1 : n, scale.get());
      for (int64_t i = n - 1; i >= 0; --i) scale[i] = static_cast<T>((single ? scale[0] : scale[i]) * in.factor);
    }
    for (int64_t i = 0; i < n; ++i) {
      log2_scale[i] = static_cast<T>(scale[i] * kLog2e);
      if (!std::isfinite(log2_scale[i])) scale[i] = log2_scale[i] = std::numeric_limits<T>::quiet_NaN();
    }
  }

  // A vector added to the similarities of `count` rows or columns, in units of log 2 and padded to `length` with -inf.
  Buffer<T> log2_shift(const Tensor& t, const char* name, int64_t count, int64_t length) const {
    Buffer<T> out(length);
    kernels.widen_vector(vector_of(t, count, name), count, out.get());
    for (int64_t j = 0; j < count; ++j) out[j] = static_cast<T>(out[j] * kLog2e);
    for (int64_t j = count; j < length; ++j) out[j] = -std::numeric_limits<T>::infinity();
    return out;
  }

  int64_t padded(int64_t columns) const { return ceil_div(columns, kernels.panel_width) * kernels.panel_width; }

  Buffer<Tag<T>> tags(const int64_t* id, int64_t count) const {
    Buffer<Tag<T>> out(padded(count));
    for (int64_t j = 0; j < padded(count); ++j) out[j] = j < count ? tag_of<T>(id[j]) : 0;
    return out;
  }

  auto driver() const { return Driver(kernels, threads(), torch_parallel); }

  // Queries as rows, keys as columns.
  Side<T> by_query(const Inputs& in) const {
    Side<T> side{present(in.bias) ? log2_shift(in.bias, "bias", m, padded(m)) : Buffer<T>(0),
                 Buffer<T>(0),
                 tags(col_id, col_id != nullptr ? m : 0),
                 present(in.cap) ? log2_shift(in.cap, "cap", n, n) : Buffer<T>(0),
                 {}};
    Pass<T>& pass = side.pass;
    pass.rows = n;
    pass.features = d;
    pass.row_data = query;
    pass.row_factor = log2_scale.get();
    pass.row_id = row_id;
    pass.row_cap = present(in.cap) ? side.cap.get() : nullptr;
    pass.columns.count = m;
    pass.columns.data = key;
    pass.columns.shift = present(in.bias) ? side.column_shift.get() : nullptr;
    pass.columns.id = col_id;
    pass.columns.tag = col_id != nullptr ? side.tag.get() : nullptr;
    return side;
  }

  // Keys as rows, queries as columns, so that each key's gradient has one owner: values are weight_i * query_i.
  Side<T> by_key(const Inputs& in, Buffer<T> query_shift, const T* weight, const T* extra) const {
    Side<T> side{std::move(query_shift),
                 present(in.bias) ? log2_shift(in.bias, "bias", m, m) : Buffer<T>(0),
                 tags(row_id, row_id != nullptr ? n : 0),
                 present(in.cap) ? log2_shift(in.cap, "cap", n, padded(n)) : Buffer<T>(0),
                 {}};
    Pass<T>& pass = side.pass;
    pass.rows = m;
    pass.features = d;
    pass.row_data = key;
    pass.row_shift = present(in.bias) ? side.row_shift.get() : nullptr;
    pass.row_id = col_id;
    pass.columns.count = n;
    pass.columns.data = query;
    pass.columns.factor = log2_scale.get();
    pass.columns.shift = side.column_shift.get();
    pass.columns.cap = present(in.cap) ? side.cap.get() : nullptr;
    pass.columns.value_factor = weight;
    pass.columns.extra = extra;
    pass.columns.id = row_id;
    pass.columns.tag = row_id != nullptr ? side.tag.get() : nullptr;
    return side;
  }
};

template <class T>
constexpr DType compute_type() {
  return sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;
}

template <class T>
int32_t torch_dtype() {
  return sizeof(T) == 4 ? aoti_torch_dtype_float32() : aoti_torch_dtype_float64();
}

}  // namespace fastcl

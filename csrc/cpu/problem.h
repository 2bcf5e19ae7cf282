// What the host code of every op on the CPU shares: inputs in the compute type, packed columns, threads. Owns memory
// and threads; knows no formula.
#pragma once
#include <limits>

#include "checks.h"
#include "contrast.h"
#include "cpu/buffer.h"
#include "cpu/isa.h"
#include "torch_shim.h"

namespace fastcl {

constexpr double kLog2e = 1.442695040888963407359924681;
// Below this much work a second thread costs more than it brings (a parallel region is about 1.5 us).
constexpr int64_t kGrainFlops = 1 << 17;

inline int64_t grain(int64_t flops_per_unit) { return 1 + kGrainFlops / (flops_per_unit + 1); }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

  // What is added to the similarities of `count` rows or columns, in units of log 2, filled up to `length` with -inf.
  Buffer<T> log2_shift(const Tensor& t, const char* name, int64_t count, int64_t length) const {
    Buffer<T> out(length);
    kernels.widen_vector(vector_of(t, count, name), count, out.get());
    for (int64_t j = 0; j < count; ++j) out[j] = static_cast<T>(out[j] * kLog2e);
    for (int64_t j = count; j < length; ++j) out[j] = -std::numeric_limits<T>::infinity();
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

inline bool is_double(const Tensor& t) { return t.dtype() == aoti_torch_dtype_float64(); }

}  // namespace fastcl

// Shared by the ops `contrast` and `softplus_sum` on CUDA: converts the inputs to what launch.h takes, and calls its
// functions, once or, for many features, chunk by chunk around torch's matrix products. Must not know what an op
// returns.
#pragma once
#include <algorithm>

#include "arguments.h"
#include "cuda/launch.h"
#include "cuda/products.h"

namespace fastcl::cuda {

inline int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return aoti_torch_dtype_float64();
    case DType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case DType::kFloat16:
      return aoti_torch_dtype_float16();
    default:
      return aoti_torch_dtype_float32();
  }
}

inline void* pointer(const Tensor& t, bool wanted) { return wanted ? t.write<void>() : nullptr; }

// The inputs converted: matrices to one type, vectors to the compute type, all on one device. The compute type is
// float64 if `wide`.
struct Operands {
  const Device& device;
  DType compute;
  bool has_key, has_positive;
  DType dtype;
  Tensor query, key, positive, scale, bias, cap, offset;
  Problem problem;

  Operands(const Device& on, const Inputs& in, bool wide) : Operands(on, in, wide, nullptr) {}
  Operands(const Device& on, const Inputs& in, bool wide, const Tensor* row_offset)
      : device(on),
        compute(wide ? DType::kFloat64 : DType::kFloat32),
        has_key(in.key.dim() == 2),
        has_positive(in.positive.dim() == 2),
        dtype(common_dtype(in)),
        query(matrix(in.query, in.query.size(0), true, "query", in)),
        key(matrix(in.key, has_key ? in.key.size(0) : 0, has_key, "key", in)),
        positive(matrix(in.positive, in.query.size(0), has_positive, "positive", in)),
        scale(vector(in.scale, in.scale.dim() == 0 ? 1 : in.query.size(0), "scale")),
        bias(vector(in.bias, has_key ? in.key.size(0) : 0, "bias")),
        cap(vector(in.cap, in.query.size(0), "cap")),
        offset(row_offset != nullptr ? vector(*row_offset, in.query.size(0), "offset") : empty(false, {}, compute)),
        problem{} {
    Problem& p = problem;
    p.rows = query.size(0);
    p.columns = has_key ? key.size(0) : 0;
    p.features = query.size(1);
    p.dtype = dtype;
    p.tf32 = dtype == DType::kFloat32 && tf32_allowed();
    p.multiprocessors = device.multiprocessors();
    p.query = query.read<void>();
    p.key = has_key ? key.read<void>() : nullptr;
    p.positive = has_positive ? positive.read<void>() : nullptr;
    p.scale = present(scale) ? scale.read<void>() : nullptr;
    p.one_scale = scale.dim() == 0;
    p.factor = in.factor;
    p.bias = present(bias) ? bias.read<void>() : nullptr;
    p.col_id = ids(in.col_id, p.columns, "col_id");
    const int64_t* row_id = ids(in.row_id, p.rows, "row_id");
    check(p.col_id == nullptr || row_id != nullptr || p.rows == 0,
          "row_id: expected both row_id and col_id or neither");
    p.row_id = p.col_id != nullptr ? row_id : nullptr;  // col_id is null without columns: nothing to exclude
    p.reducer = row_offset != nullptr ? Reducer::kSoftplusSum : Reducer::kLogSumExp;
    p.offset = present(offset) ? offset.read<void>() : nullptr;
    p.cap = present(cap) ? cap.read<void>() : nullptr;
  }

  bool in_chunks() const { return problem.features > largest_features(dtype); }

  // The type of the weights that torch multiplies. In float16, weights below 6e-8 would become 0.
  DType weight_dtype() const { return dtype == DType::kBFloat16 ? dtype : compute; }

  // The type in which the gradient of key is computed.
  DType key_gradient_dtype() const { return in_chunks() ? weight_dtype() : dtype; }

  Tensor empty(bool wanted, std::initializer_list<int64_t> sizes, DType type) const {
    return wanted ? device.empty(sizes, torch_dtype(type)) : device.empty({0}, torch_dtype(compute));
  }

  Tensor as(const Tensor& t, DType type) const { return converted(device, t, torch_dtype(type)); }

  // A gradient converted to the type of its input.
  StableIValue finished(const Tensor& gradient, bool wanted, const Tensor& like) const {
    return (wanted ? converted(device, gradient, like.dtype()) : gradient.share()).release();
  }

 private:
  DType common_dtype(const Inputs& in) const {
    if (compute == DType::kFloat64) return compute;
    const DType first = dtype_of(in.query, "query");
    const bool alike =
        (!has_key || dtype_of(in.key, "key") == first) && (!has_positive || dtype_of(in.positive, "positive") == first);
    return alike ? first : compute;
  }

  Tensor matrix(const Tensor& t, int64_t count, bool given, const char* name, const Inputs& in) const {
    if (!given) return t.share();
    check(device.holds(t), name, ": expected the device of query");
    matrix_of(t, count, in.query.size(1), name);
    return as(t, dtype);
  }

  // A tensor without dimensions may be on the CPU: torch, too, mixes such scalars with CUDA tensors.
  Tensor vector(const Tensor& t, int64_t length, const char* name) const {
    if (!present(t)) return t.share();
    check(t.dim() == 0 || device.holds(t), name, ": expected the device of query");
    vector_of(t, length, name);
    return as(t, compute);
  }

  const int64_t* ids(const Tensor& t, int64_t length, const char* name) const {
    check(!present(t) || device.holds(t), name, ": expected the device of query");
    return length == 0 ? nullptr : ids_of(t, length, name);
  }
};

// The number of lines of `length` logits in a chunk.
inline int64_t chunk_lines(int64_t length) {
  return std::max(kChunkLines, kChunkElements / std::max<int64_t>(length, 1));
}

// The dots and weights of one chunk. They share memory if they are of one type.
struct ChunkBuffers {
  Tensor dots, weights;

  ChunkBuffers(const Operands& o, int64_t lines, int64_t columns, bool wanted)
      : dots(o.empty(true, {lines, columns}, o.compute)),
        weights(o.weight_dtype() == o.compute ? dots.share() : o.empty(wanted, {lines, columns}, o.weight_dtype())) {}
};

inline void forward_in_chunks(const Operands& o, const Outputs& out, const Tensor& sums) {
  const Problem& p = o.problem;
  const bool wanted = out.mean_key != nullptr;
  const Tensor keys = transposed(o.key), values = o.as(o.key, wanted ? o.weight_dtype() : o.dtype);
  const int64_t step = std::min(chunk_lines(p.columns), p.rows);
  const ChunkBuffers buffers(o, step, p.columns, wanted);
  for (int64_t begin = 0; begin < p.rows; begin += step) {
    const int64_t count = std::min(step, p.rows - begin);
    const Tensor dots = rows(buffers.dots, 0, count);
    multiply(o.device, rows(o.query, begin, count), keys, dots);
    const Chunk chunk{begin, count, dots.read<void>(), pointer(buffers.weights, wanted), o.weight_dtype()};
    ok(forward_chunk(p, out, chunk, o.device.stream()));
    if (wanted) multiply(o.device, rows(buffers.weights, 0, count), values, rows(sums, begin, count));
  }
}

// The gradients of key and bias. Chunks are of columns here, so that each column's gradient comes from one product.
inline void columns_in_chunks(const Operands& o, const Gradients& g, const Tensor& grad_key) {
  const Problem& p = o.problem;
  const bool wanted = g.key != nullptr;
  const Tensor values = o.as(o.query, wanted ? o.weight_dtype() : o.dtype);
  const int64_t step = std::min(chunk_lines(p.rows), p.columns);
  for (int64_t begin = 0; begin < p.columns; begin += step) {
    const int64_t count = std::min(step, p.columns - begin);
    Problem part = p;
    part.columns = count;
    part.key = nullptr;
    part.bias = p.bias != nullptr ? static_cast<const float*>(p.bias) + begin : nullptr;
    part.col_id = p.col_id != nullptr ? p.col_id + begin : nullptr;
    Gradients some{};
    some.grad_lse = g.grad_lse;
    some.lse = g.lse;
    some.bias = g.bias != nullptr ? static_cast<float*>(g.bias) + begin : nullptr;
    const ChunkBuffers buffers(o, p.rows, count, wanted);
    multiply(o.device, o.query, transposed(rows(o.key, begin, count)), buffers.dots);
    const Chunk chunk{0, p.rows, buffers.dots.read<void>(), pointer(buffers.weights, wanted), o.weight_dtype()};
    ok(backward_chunk(part, some, chunk, o.device.stream()));
    if (wanted) multiply(o.device, transposed(buffers.weights), values, rows(grad_key, begin, count));
  }
}

// `sums` is the tensor that out.mean_key points to.
inline void run_forward(const Operands& o, const Outputs& out, const Tensor& sums) {
  if (o.problem.rows == 0) return;
  if (o.in_chunks()) {
    forward_in_chunks(o, out, sums);
    return;
  }
  const auto bytes = static_cast<int64_t>(forward_workspace(o.problem, out));
  const Tensor workspace = o.device.empty({bytes}, aoti_torch_dtype_uint8());
  ok(forward(o.problem, out, pointer(workspace, bytes != 0), o.device.stream()));
}

// grad_key and grad_bias are the tensors that g.key and g.bias point to.
inline void run_backward(const Operands& o, const Gradients& g, const Tensor& grad_key, const Tensor& grad_bias) {
  if (o.problem.rows == 0) {
    for (const Tensor* t : {&grad_key, &grad_bias}) call("aten::zero_", "", *t);
    return;
  }
  Gradients direct = g;
  if (o.in_chunks() && (g.key != nullptr || g.bias != nullptr)) {
    columns_in_chunks(o, g, grad_key);
    direct.key = direct.bias = nullptr;
  }
  const void* const wanted[] = {direct.query, direct.positive, direct.scale, direct.key, direct.bias};
  if (std::all_of(std::begin(wanted), std::end(wanted), [](const void* p) { return p == nullptr; })) return;
  const auto bytes = static_cast<int64_t>(backward_workspace(o.problem, direct));
  const Tensor workspace = o.device.empty({bytes}, aoti_torch_dtype_uint8());
  ok(backward(o.problem, direct, pointer(workspace, bytes != 0), o.device.stream()));
}

}  // namespace fastcl::cuda

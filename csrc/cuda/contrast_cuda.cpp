// The op `contrast` on CUDA: from tensors to launches and back. The kernels are behind launch.h; everything here runs on
// torch's current stream and waits for nothing.
#include "arguments.h"
#include "cuda/launch.h"
#include "cuda/products.h"

namespace fastcl::cuda {
namespace {

int32_t torch_dtype(DType dtype) {
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

// The inputs as the kernels take them: matrices of one type, vectors in the compute type, all on one device.
struct Operands {
  const Device& device;
  DType compute;
  bool has_key, has_positive;
  DType dtype;
  Tensor query, key, positive, scale, bias;
  Problem problem;

  Operands(const Device& on, const Inputs& in, DType compute_type)
      : device(on),
        compute(compute_type),
        has_key(in.key.dim() == 2),
        has_positive(in.positive.dim() == 2),
        dtype(common_dtype(in)),
        query(matrix(in.query, in.query.size(0), true, "query", in)),
        key(matrix(in.key, has_key ? in.key.size(0) : 0, has_key, "key", in)),
        positive(matrix(in.positive, in.query.size(0), has_positive, "positive", in)),
        scale(vector(in.scale, in.scale.dim() == 0 ? 1 : in.query.size(0), "scale")),
        bias(vector(in.bias, has_key ? in.key.size(0) : 0, "bias")),
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
    p.row_id = p.col_id != nullptr ? row_id : nullptr;  // without columns there is nothing to exclude
  }

  bool in_chunks() const { return problem.features > largest_features(dtype); }

  // The type of weights that are multiplied by torch. float16 would lose the small ones among many columns.
  DType weight_dtype() const { return dtype == DType::kBFloat16 ? dtype : compute; }

  Tensor empty(bool wanted, std::initializer_list<int64_t> sizes, DType type) const {
    return wanted ? device.empty(sizes, torch_dtype(type)) : device.empty({0}, torch_dtype(compute));
  }

  Tensor as(const Tensor& t, DType type) const { return converted(device, t, torch_dtype(type)); }

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

  // A scale of one number may come from the host's memory.
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

void* pointer(const Tensor& t, bool wanted) { return wanted ? t.write<void>() : nullptr; }

// Lines of logits, each `length` long, that a chunk has.
int64_t lines(int64_t length) { return std::max(kChunkLines, kChunkElements / std::max<int64_t>(length, 1)); }

void forward_in_chunks(const Operands& o, const Outputs& out, const Tensor& mean_key) {
  const Problem& p = o.problem;
  const bool wanted = out.mean_key != nullptr;
  const Tensor keys = transposed(o.key), values = o.as(o.key, wanted ? o.weight_dtype() : o.dtype);
  const int64_t step = std::min(lines(p.columns), p.rows);
  const Tensor all_dots = o.empty(true, {step, p.columns}, o.compute);
  const bool in_place = o.weight_dtype() == o.compute;
  const Tensor all_weights = in_place ? all_dots.share() : o.empty(wanted, {step, p.columns}, o.weight_dtype());
  for (int64_t begin = 0; begin < p.rows; begin += step) {
    const int64_t count = std::min(step, p.rows - begin);
    const Tensor dots = rows(all_dots, 0, count);
    multiply(o.device, rows(o.query, begin, count), keys, dots);
    const Chunk chunk{begin, count, dots.read<void>(), pointer(all_weights, wanted), o.weight_dtype()};
    ok(forward_chunk(p, out, chunk, o.device.stream()));
    if (wanted) multiply(o.device, rows(all_weights, 0, count), values, rows(mean_key, begin, count));
  }
}

// The gradients of key and bias, some columns at a time, so that each belongs to one product. grad_key is of the
// weights' type.
void columns_in_chunks(const Operands& o, const Gradients& g, const Tensor* grad_key) {
  const Problem& p = o.problem;
  const bool wanted = grad_key != nullptr;
  const Tensor values = o.as(o.query, wanted ? o.weight_dtype() : o.dtype);
  const int64_t step = std::min(lines(p.rows), p.columns);
  const size_t element = o.compute == DType::kFloat64 ? 8 : 4;
  for (int64_t begin = 0; begin < p.columns; begin += step) {
    const int64_t count = std::min(step, p.columns - begin);
    const auto from = [&](const void* vector, size_t size) {
      return vector == nullptr ? nullptr : static_cast<const char*>(vector) + static_cast<size_t>(begin) * size;
    };
    Problem part = p;
    part.columns = count;
    part.key = nullptr;
    part.bias = from(p.bias, element);
    part.col_id = reinterpret_cast<const int64_t*>(from(p.col_id, sizeof(int64_t)));
    Gradients some{};
    some.grad_lse = g.grad_lse;
    some.lse = g.lse;
    some.bias = const_cast<char*>(from(g.bias, element));
    const Tensor dots = o.empty(true, {p.rows, count}, o.compute);
    multiply(o.device, o.query, transposed(rows(o.key, begin, count)), dots);
    const bool in_place = o.weight_dtype() == o.compute;
    const Tensor weights = in_place ? dots.share() : o.empty(wanted, {p.rows, count}, o.weight_dtype());
    const Chunk chunk{0, p.rows, dots.read<void>(), pointer(weights, wanted), o.weight_dtype()};
    ok(backward_chunk(part, some, chunk, o.device.stream()));
    if (wanted) multiply(o.device, transposed(weights), values, rows(*grad_key, begin, count));
  }
}

void contrast_forward(StableIValue* stack, uint64_t, uint64_t) {
  const ForwardArguments a(stack);
  const Inputs& in = a.in;
  const Device device(in.query);
  const bool wide = is_double(in.query) || is_double(in.key) || is_double(in.positive);
  const Operands o(device, in, wide ? DType::kFloat64 : DType::kFloat32);
  const Problem& p = o.problem;
  const bool columns = a.expected.key_grad || a.expected.bias_grad;
  Tensor pos = o.empty(o.has_positive, {p.rows}, o.compute);
  Tensor lse = o.empty(true, {p.rows}, o.compute);
  Tensor mean_key = o.empty(a.row_grad, {p.rows, p.features}, o.compute);
  Tensor gradient = o.empty(columns, {p.rows}, o.compute);
  Tensor key_sum = o.empty(columns, {p.columns, p.features}, o.compute);
  Tensor bias_sum = o.empty(a.expected.bias_grad, {p.columns}, o.compute);

  const Outputs out{pointer(pos, o.has_positive), pointer(lse, true), pointer(mean_key, a.row_grad)};
  if (p.rows != 0 && o.in_chunks()) {
    forward_in_chunks(o, out, mean_key);
  } else if (p.rows != 0) {
    const auto bytes = static_cast<int64_t>(forward_workspace(p, out));
    const Tensor workspace = device.empty({bytes}, aoti_torch_dtype_uint8());
    ok(forward(p, out, pointer(workspace, bytes != 0), device.stream()));
  }
  // These kernels sum nothing over columns on the way: a NaN is like no gradient that may come.
  if (columns) device.fill_nan(gradient, p.rows * (wide ? 8 : 4));

  Tensor* results[] = {&pos, &lse, &mean_key, &gradient, &key_sum, &bias_sum};
  for (int i = 0; i < 6; ++i) stack[i] = results[i]->release();
}

void contrast_backward(StableIValue* stack, uint64_t, uint64_t) {
  const BackwardArguments a(stack);
  const Inputs& in = a.in;
  const Wanted& wanted = a.wanted;
  const Device device(in.query);
  const bool wide = is_double(a.saved.lse);
  const Operands o(device, in, wide ? DType::kFloat64 : DType::kFloat32);
  const Problem& p = o.problem;
  check_upstream(a, o.has_positive);
  for (const Tensor* t : {&a.grad_pos, &a.grad_lse, &a.saved.lse, &a.saved.mean_key}) {
    check(!present(*t) || device.holds(*t), "gradients: expected the device of query");
  }
  const bool sums = wanted.query || wanted.scale;
  if (sums) {
    const Matrix mean = matrix_of(a.saved.mean_key, p.rows, p.features, "mean_key");
    check(mean.dtype == o.compute, "mean_key: expected the dtype of lse");
  }

  const bool columns = wanted.key || wanted.bias;
  const DType key_dtype = o.in_chunks() ? o.weight_dtype() : o.dtype;
  Tensor grad_query = o.empty(wanted.query, {p.rows, p.features}, o.dtype);
  Tensor grad_key = o.empty(wanted.key, {p.columns, p.features}, key_dtype);
  Tensor grad_positive = o.empty(wanted.positive, {p.rows, p.features}, o.dtype);
  Tensor grad_scale = o.empty(wanted.scale, {p.rows}, o.compute);
  Tensor grad_bias = o.empty(wanted.bias, {p.columns}, o.compute);

  Gradients g{};
  g.grad_pos = o.has_positive ? a.grad_pos.read<void>() : nullptr;
  g.grad_lse = a.grad_lse.read<void>();
  g.lse = a.saved.lse.read<void>();
  g.mean_key = sums ? a.saved.mean_key.read<void>() : nullptr;
  g.query = pointer(grad_query, wanted.query);
  g.positive = pointer(grad_positive, wanted.positive);
  g.scale = pointer(grad_scale, wanted.scale);
  g.key = pointer(grad_key, wanted.key);
  g.bias = pointer(grad_bias, wanted.bias);
  if (p.rows == 0) {
    for (const Tensor* t : {&grad_key, &grad_bias}) call("aten::zero_", "", *t);
  } else {
    Gradients direct = g;
    if (o.in_chunks()) direct.key = direct.bias = nullptr;
    if (sums || wanted.positive || direct.key != nullptr || direct.bias != nullptr) {
      const auto bytes = static_cast<int64_t>(backward_workspace(p, direct));
      const Tensor workspace = device.empty({bytes}, aoti_torch_dtype_uint8());
      ok(backward(p, direct, pointer(workspace, bytes != 0), device.stream()));
    }
    if (o.in_chunks() && columns) columns_in_chunks(o, g, wanted.key ? &grad_key : nullptr);
  }

  const auto finish = [&](Tensor& gradient, bool want, const Tensor& like) {
    return (want ? converted(device, gradient, like.dtype()) : gradient.share()).release();
  };
  stack[0] = finish(grad_query, wanted.query, in.query);
  stack[1] = finish(grad_key, wanted.key, in.key);
  stack[2] = finish(grad_positive, wanted.positive, in.positive);
  stack[3] = grad_scale.release();
  stack[4] = grad_bias.release();
}

[[maybe_unused]] const bool registered =
    register_ops(kDispatchKey, {{"contrast_forward", contrast_forward}, {"contrast_backward", contrast_backward}});

}  // namespace
}  // namespace fastcl::cuda

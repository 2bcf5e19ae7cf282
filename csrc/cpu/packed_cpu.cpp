// The op `contrast` on the CPU as plain eager code calls it: it may divide rows by their length first, and what its
// backward pass reads is one tensor, because each tensor of an op costs as much as the arithmetic of a small batch. The
// arithmetic is in contrast_math.h and unit.h.
#include "cpu/contrast_math.h"
#include "cpu/unit.h"

namespace fastcl {
namespace {

// Whose rows are divided by their length: nobody's; those of query and positive; those of the keys as well, which may
// be the same rows as query or positive.
enum class Unit : int64_t { kNone, kRows, kKey, kKeyIsQuery, kKeyIsPositive };

Unit unit_of(StableIValue value, const Inputs& in, bool has_key) {
  const auto number = static_cast<int64_t>(value);
  check(number >= 0 && number <= 4, "unit: expected a number from 0 to 4, got ", number);
  const Unit unit = static_cast<Unit>(number);
  check(!has_key || unit < Unit::kKeyIsQuery || in.key.size(0) == in.query.size(0),
        "key: expected the rows of another");
  check(unit != Unit::kKeyIsPositive || in.positive.dim() == 2, "positive: expected shape [N, D]");
  return unit;
}

// Where the parts of `saved` begin, in elements; -1: absent.
struct Layout {
  int64_t mean_key, query, positive, key, by_query, by_positive, by_key, expected, key_sum, bias_sum;
  int64_t size = 0;

  // kept: 0 if no backward pass follows, 1 if it does, 2 if it also needs the keys. columns, bias: as in Expected.
  Layout(const Inputs& in, Unit unit, int64_t kept, bool row_grad, bool columns, bool bias) {
    const int64_t n = in.query.size(0), d = in.query.size(1), m = in.key.dim() == 2 ? in.key.size(0) : 0;
    const bool rows = unit != Unit::kNone, positives = rows && in.positive.dim() == 2;
    const bool keys = unit == Unit::kKey && kept == 2;
    mean_key = part(row_grad, n * d);
    query = part(rows, n * d);
    positive = part(positives, n * d);
    key = part(keys, m * d);
    by_query = part(rows, n);
    by_positive = part(positives, n);
    by_key = part(keys, m);
    expected = part(columns, n);
    key_sum = part(columns, m * d);
    bias_sum = part(bias, m);
  }

 private:
  int64_t part(bool there, int64_t elements) {
    if (!there) return -1;
    const int64_t begin = size;
    size += elements;
    return begin;
  }
};

template <class T>
T* at(T* base, int64_t begin) {
  return begin < 0 ? nullptr : base + begin;
}

template <class T>
Matrix wide(const T* data) {
  return {data, compute_type<T>()};
}

template <class T>
void forward(const ForwardArguments& a, Unit unit, int64_t kept, StableIValue* results) {
  const Inputs& in = a.in;
  const int64_t n = in.query.size(0), d = in.query.size(1), m = in.key.size(0);
  const bool has_positive = in.positive.dim() == 2, bias = a.expected.bias_grad;
  const Layout layout(in, unit, kept, a.row_grad, a.expected.key_grad || bias, bias);
  Tensor pos = Tensor::empty({has_positive ? n : 0}, torch_dtype<T>());
  Tensor lse = Tensor::empty({n}, torch_dtype<T>());
  Tensor saved = Tensor::empty({kept == 0 ? 0 : layout.size}, torch_dtype<T>());
  const Buffer<T> passing(kept == 0 ? layout.size : 0);
  T* base = kept == 0 ? passing.get() : saved.write<T>();

  Embeddings rows = embeddings_of(in);
  const bool own = unit == Unit::kKey && layout.key < 0;
  const Buffer<T> own_key(own ? m * d : 0), own_by(own ? m : 0);
  if (unit != Unit::kNone) {
    divide_by_length(rows.query, n, d, base + layout.query, base + layout.by_query);
    rows.query = wide(base + layout.query);
    if (has_positive) {
      divide_by_length(rows.positive, n, d, base + layout.positive, base + layout.by_positive);
      rows.positive = wide(base + layout.positive);
    }
    if (unit == Unit::kKey) {
      T* key = own ? own_key.get() : base + layout.key;
      divide_by_length(rows.key, m, d, key, own ? own_by.get() : base + layout.by_key);
      rows.key = wide(key);
    }
    if (unit == Unit::kKeyIsQuery) rows.key = rows.query;
    if (unit == Unit::kKeyIsPositive) rows.key = rows.positive;
  }
  forward<T>(a, Problem<T>(in, rows),
             {pos.write<T>(), lse.write<T>(), at(base, layout.mean_key), at(base, layout.expected),
              at(base, layout.key_sum), at(base, layout.bias_sum)});
  results[0] = pos.release();
  results[1] = lse.release();
  results[2] = saved.release();
}

void contrast_packed_forward(StableIValue* stack, uint64_t, uint64_t) {
  const ForwardArguments a(stack);
  const Unit unit = unit_of(stack[19], a.in, true);
  const auto kept = static_cast<int64_t>(stack[20]);
  check(kept >= 0 && kept <= 2, "kept: expected a number from 0 to 2, got ", kept);
  check(kept == 2 || !(a.expected.key_grad || a.expected.bias_grad), "kept: expected 2 with sums over columns");
  check(kept != 0 || !a.row_grad, "kept: expected at least 1 with a gradient of the rows");
  a.in_double() ? forward<double>(a, unit, kept, stack) : forward<float>(a, unit, kept, stack);
}

struct PackedBackwardArguments {
  Tensor grad_pos, grad_lse;
  Inputs in;
  Tensor lse, saved;
  Wanted wanted;
  Unit unit;
  bool column_sums;

  explicit PackedBackwardArguments(const StableIValue* stack)
      : grad_pos(stack[0]),
        grad_lse(stack[1]),
        in{Tensor(stack[2]), Tensor(stack[3]), Tensor(stack[4]), Tensor(stack[5]),    Tensor(stack[6]),
           Tensor(stack[7]), Tensor(stack[8]), Tensor(stack[9]), to_double(stack[12])},
        lse(stack[10]),
        saved(stack[11]),
        wanted{to_bool(stack[13]), to_bool(stack[14]), to_bool(stack[15]), to_bool(stack[16]), to_bool(stack[17])},
        column_sums(to_bool(stack[19])) {
    check_matrices(in, wanted.key || wanted.bias);
    unit = unit_of(stack[18], in, wanted.key || wanted.bias);
    check(in.positive.dim() == 2 || !wanted.positive, "positive: expected shape [N, D], got ", in.positive);
    check(
        in.positive.dim() != 2 || (in.positive.size(0) == in.query.size(0) && in.positive.size(1) == in.query.size(1)),
        "positive: expected the shape of query, got ", in.positive);
    check(in.key.dim() != 2 || in.key.size(1) == in.query.size(1), "key: expected the features of query, got ", in.key);
    check(!wanted.key || unit < Unit::kKeyIsQuery || (unit == Unit::kKeyIsQuery ? wanted.query : wanted.positive),
          "key_grad: expected that of the same rows as well");
  }
};

// The gradient of an input. It is first that of its rows of length 1, in the compute type.
template <class T>
struct Gradient {
  Tensor result;
  DType dtype;
  Buffer<T> wide;
  T* by_unit;  // null: not wanted

  Gradient(bool wanted, const Tensor& input, int64_t n, int64_t d, const char* name, bool unit)
      : result(wanted ? Tensor::empty({n, d}, input.dtype()) : Tensor::empty({0}, torch_dtype<T>())),
        dtype(dtype_of(input, name)),
        wide(wanted && unit && dtype != compute_type<T>() ? n * d : 0),
        by_unit(!wanted                              ? nullptr
                : unit && dtype != compute_type<T>() ? wide.get()
                                                     : result.template write<T>()) {}

  // Where `backward` writes it.
  MutableMatrix target(bool unit) const { return {by_unit, unit ? compute_type<T>() : dtype}; }

  void divide(const Matrix& rows, const T* inverse, int64_t n, int64_t d) const {
    if (by_unit == nullptr) return;
    gradient_of_division<T>({by_unit, compute_type<T>()}, rows, inverse, n, d, {result.template write<void>(), dtype});
  }
};

template <class T>
void backward(const PackedBackwardArguments& a, StableIValue* results) {
  const Inputs& in = a.in;
  const Wanted& wanted = a.wanted;
  const Unit unit = a.unit;
  const bool keys = wanted.key || wanted.bias, sums = a.column_sums && keys;
  const bool rows_divided = unit != Unit::kNone, key_divided = unit > Unit::kRows, shared = unit >= Unit::kKeyIsQuery;
  const Layout layout(in, unit, keys ? 2 : 1, wanted.query || wanted.scale, sums, sums && wanted.bias);
  vector_of(a.saved, layout.size, "saved");
  check(a.saved.dtype() == torch_dtype<T>(), "saved: expected the dtype of lse");
  const int64_t n = in.query.size(0), d = in.query.size(1), m = in.key.dim() == 2 ? in.key.size(0) : 0;
  check_upstream({&a.grad_pos, &a.grad_lse, &a.lse}, n, in.positive.dim() == 2);
  const T* base = a.saved.read<T>();

  Embeddings rows{absent_matrix(), absent_matrix(), absent_matrix()};
  if (!rows_divided) {
    rows = embeddings_of(in);
  } else {
    rows.query = wide(base + layout.query);
    if (layout.positive >= 0) rows.positive = wide(base + layout.positive);
    if (keys) {
      rows.key = unit == Unit::kRows            ? matrix_of(in.key, m, d, "key")
                 : unit == Unit::kKeyIsQuery    ? rows.query
                 : unit == Unit::kKeyIsPositive ? rows.positive
                                                : wide(base + layout.key);
    }
  }
  const Problem<T> p(in, rows);
  Gradient<T> query(wanted.query, in.query, n, d, "query", rows_divided);
  Gradient<T> positive(wanted.positive, in.positive, n, d, "positive", rows_divided);
  Gradient<T> key(wanted.key && !shared, in.key, m, d, "key", key_divided);
  const Buffer<T> part(wanted.key && shared ? m * d : 0);
  Tensor scale = Tensor::empty({wanted.scale ? n : 0}, torch_dtype<T>());
  Tensor bias = Tensor::empty({wanted.bias ? m : 0}, torch_dtype<T>());
  backward<T>(in, p,
              {a.grad_pos.read<T>(),
               a.grad_lse.read<T>(),
               a.lse.read<T>(),
               wide(at(base, layout.mean_key)),
               {at(base, layout.expected), wide(at(base, layout.key_sum)), at(base, layout.bias_sum)}},
              {query.target(rows_divided),
               wanted.key && shared ? MutableMatrix{part.get(), compute_type<T>()} : key.target(key_divided),
               positive.target(rows_divided), wanted.scale ? scale.write<T>() : nullptr,
               wanted.bias ? bias.write<T>() : nullptr});
  if (wanted.key && shared) {
    T* sum = unit == Unit::kKeyIsQuery ? query.by_unit : positive.by_unit;
    parallel_for(0, n, grain(2 * d), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * d; i < end * d; ++i) sum[i] += part[i];
    });
  }
  if (rows_divided) {
    query.divide(rows.query, base + layout.by_query, n, d);
    positive.divide(rows.positive, at(base, layout.by_positive), n, d);
  }
  if (unit == Unit::kKey) key.divide(rows.key, at(base, layout.by_key), m, d);
  Tensor* gradients[] = {&query.result, &key.result, &positive.result, &scale, &bias};
  for (int i = 0; i < 5; ++i) results[i] = gradients[i]->release();
}

void contrast_packed_backward(StableIValue* stack, uint64_t, uint64_t) {
  const PackedBackwardArguments a(stack);
  is_double(a.lse) ? backward<double>(a, stack) : backward<float>(a, stack);
}

[[maybe_unused]] const bool registered =
    register_ops("CPU", {{"contrast_packed_forward", guarded<contrast_packed_forward, 21, 3>},
                         {"contrast_packed_backward", guarded<contrast_packed_backward, 20, 5>}});

}  // namespace
}  // namespace fastcl

// Takes an op's arguments off torch's stack and makes the checks that every device needs. Must not read tensor data:
// the data may be on a GPU.
#pragma once
#include <limits>

#include "checks.h"

namespace fastcl {

struct Inputs {
  Tensor query, key, positive, scale, bias, row_id, col_id;
  Tensor cap;  // [n] or absent: columns whose scaled similarity to a row exceeds the row's cap leave its sum
  double factor;
};

inline bool is_double(const Tensor& t) { return t.dtype() == aoti_torch_dtype_float64(); }

inline void check_matrices(const Inputs& in, bool needs_key = true, bool other_ids = false) {
  check(in.query.dim() == 2, "query: expected shape [N, D], got ", in.query);
  check(in.key.dim() == 2 || (!needs_key && !present(in.key)), "key: expected shape [M, D], got ", in.key);
  // Backward gets no key when neither key nor bias needs a gradient; then there is nothing to exclude.
  const bool columns = in.key.dim() == 2 && in.key.size(0) != 0;
  check(!columns || !present(in.row_id) || present(in.col_id) || other_ids,
        "col_id: expected both row_id and col_id or neither");
  check(in.positive.dim() == 2 || !present(in.positive), "positive: expected shape [N, D] or [0], got ", in.positive);
}

// The gradient that the caller expects to arrive at lse, up to one factor common to all rows:
//   weight_i * sigmoid(lse_i - logaddexp(pos_i + shift + row_shift_i, rest_i))
// which is the derivative by lse_i of
//   weight_i * log(exp(pos_i + shift + row_shift_i) + exp(rest_i) + exp(lse_i)).
// Forward uses it to sum the gradient of the keys while the weights are still in cache. Backward takes those sums only
// if the gradient that arrives is proportional to the expected one.
struct Expected {
  bool key_grad, bias_grad;
  double shift;
  Tensor row_shift, rest, weight;  // [n] or absent
};

// A shift of -inf takes the positive out of the expected gradient. Python passes the lowest double in its place,
// because AOTInductor stores the arguments of an op as JSON, which has no infinity.
inline double shift_of(double given) {
  return given <= std::numeric_limits<double>::lowest() ? -std::numeric_limits<double>::infinity() : given;
}

// More columns, of which none needs a gradient: they count in lse and mean_key, and backward never sees them. They share
// query, scale, row_id and cap with the others.
struct Frozen {
  Tensor key, bias, id;  // [f, d] or absent, and [f] or absent
};

struct ForwardArguments {
  Inputs in;
  bool row_grad;
  Expected expected;
  Frozen frozen;

  explicit ForwardArguments(const StableIValue* stack)
      : in{Tensor(stack[0]), Tensor(stack[1]), Tensor(stack[2]), Tensor(stack[3]),   Tensor(stack[4]),
           Tensor(stack[5]), Tensor(stack[6]), Tensor(stack[7]), to_double(stack[8])},
        row_grad(to_bool(stack[9])),
        expected{to_bool(stack[10]), to_bool(stack[11]), shift_of(to_double(stack[12])),
                 Tensor(stack[13]),  Tensor(stack[14]),  Tensor(stack[15])},
        frozen{Tensor(stack[16]), Tensor(stack[17]), Tensor(stack[18])} {
    check_matrices(in, true, present(frozen.id));
    check(frozen.key.dim() == 2 || !(present(frozen.key) || present(frozen.bias) || present(frozen.id)),
          "frozen: expected shape [F, D], got ", frozen.key);
    check(!present(frozen.id) || present(in.row_id) || in.query.size(0) == 0,
          "row_id: expected one to go with frozen_id");
    const double absent = -std::numeric_limits<double>::infinity();
    check(expected.shift == absent || in.positive.dim() == 2, "shift: expected -inf without a positive");
    const int64_t n = in.query.size(0);
    for (const auto& [t, name] : {std::pair(&expected.row_shift, "row_shift"), std::pair(&expected.rest, "rest"),
                                  std::pair(&expected.weight, "row_weight")}) {
      if (present(*t)) vector_of(*t, n, name);
    }
  }

  bool in_double() const {
    return is_double(in.query) || is_double(in.key) || is_double(in.positive) || is_double(frozen.key);
  }
};

// What a forward pass that expects a gradient at its rows leaves for backward: that gradient [n], and the gradients of
// key [m, d] and bias [m] that follow from it. All absent where nothing was expected.
struct ColumnGradients {
  Tensor expected, key_sum, bias_sum;
};

// The outputs of forward that backward reads.
struct Saved {
  Tensor lse, mean_key;
  ColumnGradients columns;
};

// The inputs that need a gradient.
struct Wanted {
  bool query, key, positive, scale, bias;
};

struct BackwardArguments {
  Tensor grad_pos, grad_lse;
  Inputs in;
  Saved saved;
  Wanted wanted;

  explicit BackwardArguments(const StableIValue* stack)
      : grad_pos(stack[0]),
        grad_lse(stack[1]),
        in{Tensor(stack[2]), Tensor(stack[3]), Tensor(stack[4]), Tensor(stack[5]),    Tensor(stack[6]),
           Tensor(stack[7]), Tensor(stack[8]), Tensor(stack[9]), to_double(stack[15])},
        saved{Tensor(stack[10]), Tensor(stack[11]), {Tensor(stack[12]), Tensor(stack[13]), Tensor(stack[14])}},
        wanted{to_bool(stack[16]), to_bool(stack[17]), to_bool(stack[18]), to_bool(stack[19]), to_bool(stack[20])} {
    check_matrices(in, wanted.key || wanted.bias);
    check(in.positive.dim() == 2 || !wanted.positive, "positive: expected shape [N, D], got ", in.positive);
  }
};

// The inputs of `softplus_sum`. From `first` on the stack has query, key, scale, offset, bias, row_id, col_id, factor.
// The op has no positive and no cap, which Inputs writes as empty tensors of shape [0].
inline Inputs softplus_inputs(const StableIValue* first) {
  return {Tensor(first[0]),
          Tensor(first[1]),
          Tensor::empty({0}, aoti_torch_dtype_float32()),
          Tensor(first[2]),
          Tensor(first[4]),
          Tensor(first[5]),
          Tensor(first[6]),
          Tensor::empty({0}, aoti_torch_dtype_float32()),
          to_double(first[7])};
}

struct SoftplusForwardArguments {
  Tensor offset;  // [n] or absent
  Inputs in;
  bool row_grad;
  bool key_grad, bias_grad;  // whether to sum the gradients of key and bias for the expected gradient of the rows
  Tensor row_weight;         // [n] or absent: that gradient up to one factor common to all rows; absent: all are alike

  explicit SoftplusForwardArguments(const StableIValue* stack)
      : offset(stack[3]),
        in(softplus_inputs(stack)),
        row_grad(to_bool(stack[8])),
        key_grad(to_bool(stack[9])),
        bias_grad(to_bool(stack[10])),
        row_weight(stack[11]) {
    check_matrices(in);
    if (present(row_weight)) vector_of(row_weight, in.query.size(0), "row_weight");
  }
};

struct SoftplusBackwardArguments {
  Tensor grad, offset;
  Inputs in;
  bool key_grad, bias_grad;
  ColumnGradients summed;

  explicit SoftplusBackwardArguments(const StableIValue* stack)
      : grad(stack[0]),
        offset(stack[4]),
        in(softplus_inputs(stack + 1)),
        key_grad(to_bool(stack[9])),
        bias_grad(to_bool(stack[10])),
        summed{Tensor(stack[11]), Tensor(stack[12]), Tensor(stack[13])} {
    check_matrices(in);
  }
};

// What arrives at the backward pass, and the result that it belongs to.
struct Upstream {
  const Tensor *grad_pos, *grad_lse, *lse;
};

// Checks the shapes of the gradients that arrive, and that their dtype is that of lse.
inline void check_upstream(const Upstream& a, int64_t n, bool has_positive) {
  const int32_t dtype = a.lse->dtype();
  check(dtype == aoti_torch_dtype_float32() || is_double(*a.lse), "lse: expected float32 or float64");
  for (const auto& [t, name] :
       {std::pair(a.grad_pos, "grad_pos"), std::pair(a.grad_lse, "grad_lse"), std::pair(a.lse, "lse")}) {
    vector_of(*t, t == a.grad_pos && !has_positive ? 0 : n, name);
    check(t->dtype() == dtype, name, ": expected the dtype of lse");
  }
}

}  // namespace fastcl

// The ops that move the rows of a table on the CPU: late Adam (rows that were away catch up when they are read) and
// row-wise Adagrad. Checks tensors and hands rows to torch's threads; the loops are in table.inl.h. Ids must be distinct:
// two threads would write to the rows of a repeated one.
#include "cpu/problem.h"

namespace fastcl {
namespace {

constexpr int64_t kAges = 4096;  // powers that are tabled; rows of a greater age have them computed

// [n] ids of the rows of a table, checked.
const int64_t* rows_of(const Tensor& ids, int64_t rows) {
  check(ids.dim() == 1 && ids.contiguous() && ids.dtype() == aoti_torch_dtype_int64(),
        "ids: expected a contiguous int64 tensor [n], got ", ids);
  const int64_t n = ids.size(0);
  check_memory(ids, n, sizeof(int64_t), "ids");
  const int64_t* id = ids.read<int64_t>();
  for (int64_t i = 0; i < n; ++i) {
    check(id[i] >= 0 && id[i] < rows, "ids: expected rows 0 to ", rows - 1, ", got ", id[i]);
  }
  return id;
}

template <class T>
T* floats_of(const Tensor& t, int64_t rows, int64_t features, const char* name) {
  const Matrix m = features < 0 ? vector_of(t, rows, name) : matrix_of(t, rows, features, name);
  check(m.dtype == compute_type<T>(), name, ": expected the dtype of the table");
  return t.write<T>();
}

int32_t* steps_of(const Tensor& at, int64_t rows) {
  check(at.dim() == 1 && at.size(0) == rows && at.contiguous() && at.dtype() == aoti_torch_dtype_int32(),
        "at: expected a contiguous int32 tensor [", rows, "], got ", at);
  check_memory(at, rows, sizeof(int32_t), "at");
  return at.write<int32_t>();
}

// Adam's tensors for a table: its weights, both moments, and the step that each row is as of.
struct AdamTable {
  Tensor weight, first, second, at;
  int64_t rows, features;

  AdamTable(StableIValue w, StableIValue m, StableIValue v, StableIValue steps)
      : weight(w), first(m), second(v), at(steps) {
    check(weight.dim() == 2, "weight: expected shape [rows, D], got ", weight);
    rows = weight.size(0);
    features = weight.size(1);
  }

  template <class T, class R>
  void fill(R& r, const int64_t* id) const {
    r.id = id;
    r.features = features;
    r.weight = floats_of<T>(weight, rows, features, "weight");
    r.first = floats_of<T>(first, rows, features, "first");
    r.second = floats_of<T>(second, rows, features, "second");
    r.at = steps_of(at, rows);
  }
};

template <class F>
void over_rows(int64_t n, int64_t features, const F& f) {
  parallel_for(0, n, grain(32 * features), f);
}

template <class T>
StableIValue read_late(const AdamTable& table, const Tensor& ids, const Tensor& owed, int64_t settled, int64_t step,
                       double beta1, double beta2, double eps) {
  const int64_t* id = rows_of(ids, table.rows);
  const int64_t n = ids.size(0);
  LateRows<T> r{};
  table.fill<T>(r, id);
  check(settled <= step, "settled: expected at most the step ", step, ", got ", settled);
  check(owed.dim() == 2 && owed.size(0) >= step - settled, "owed: expected at least ", step - settled, " rows, got ",
        owed);
  check(matrix_of(owed, owed.size(0), 2, "owed").dtype == DType::kFloat64, "owed: expected float64");
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = r.at[id[i]];
    check(at >= settled && at <= step, "at: expected steps ", settled, " to ", step, ", got ", at);
  }
  const int64_t ages = step - settled + 1 < kAges ? step - settled + 1 : kAges;
  const Buffer<double> fade(2 * ages);
  fade[0] = fade[1] = 1;
  for (int64_t age = 1; age < ages; ++age) {
    fade[2 * age] = fade[2 * age - 2] * beta1;
    fade[2 * age + 1] = fade[2 * age - 1] * beta2;
  }
  Tensor out = Tensor::empty({n, table.features}, table.weight.dtype());
  r.owed = owed.read<double>();
  r.settled = settled;
  r.step = step;
  r.fade = fade.get();
  r.ages = ages;
  r.beta1 = beta1;
  r.beta2 = beta2;
  r.eps = eps;
  r.out = out.write<T>();
  const auto pass = kernels_of<T>(active_isa(), compute_type<T>(), compute_type<T>()).read_late_rows;
  over_rows(n, table.features, [&](int64_t begin, int64_t end) { pass(r, begin, end); });
  return out.release();
}

template <class T>
void step_adam(const AdamTable& table, const Tensor& ids, const Tensor& grad, AdamRows<T> r) {
  table.fill<T>(r, rows_of(ids, table.rows));
  r.grad = floats_of<T>(grad, ids.size(0), table.features, "grad");
  const auto pass = kernels_of<T>(active_isa(), compute_type<T>(), compute_type<T>()).step_adam_rows;
  over_rows(ids.size(0), table.features, [&](int64_t begin, int64_t end) { pass(r, begin, end); });
}

template <class T>
void step_adagrad(const Tensor& weight, const Tensor& sum, const Tensor& ids, const Tensor& grad, AdagradRows<T> r) {
  const int64_t rows = weight.size(0), features = weight.size(1);
  r.id = rows_of(ids, rows);
  r.features = features;
  r.weight = floats_of<T>(weight, rows, features, "weight");
  r.sum = floats_of<T>(sum, rows, -1, "sum");
  r.grad = floats_of<T>(grad, ids.size(0), features, "grad");
  const auto pass = kernels_of<T>(active_isa(), compute_type<T>(), compute_type<T>()).step_adagrad_rows;
  over_rows(ids.size(0), features, [&](int64_t begin, int64_t end) { pass(r, begin, end); });
}

int64_t to_int(StableIValue value) { return static_cast<int64_t>(value); }

void read_late_rows(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor ids(stack[0]);
  const AdamTable table(stack[1], stack[2], stack[3], stack[4]);
  const Tensor owed(stack[5]);
  const auto run = is_double(table.weight) ? read_late<double> : read_late<float>;
  stack[0] = run(table, ids, owed, to_int(stack[6]), to_int(stack[7]), to_double(stack[8]), to_double(stack[9]),
                 to_double(stack[10]));
}

void step_adam_rows(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor ids(stack[0]), grad(stack[1]);
  const AdamTable table(stack[2], stack[3], stack[4], stack[5]);
  const auto numbers = [&](auto r) {
    r.step = to_int(stack[6]);
    r.beta1 = to_double(stack[7]);
    r.beta2 = to_double(stack[8]);
    r.eps = to_double(stack[9]);
    r.rate = to_double(stack[10]);
    r.root = to_double(stack[11]);
    r.scale = to_double(stack[12]);
    return r;
  };
  if (is_double(table.weight)) {
    step_adam(table, ids, grad, numbers(AdamRows<double>{}));
  } else {
    step_adam(table, ids, grad, numbers(AdamRows<float>{}));
  }
}

void step_adagrad_rows(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor ids(stack[0]), grad(stack[1]), weight(stack[2]), sum(stack[3]);
  check(weight.dim() == 2, "weight: expected shape [rows, D], got ", weight);
  const auto numbers = [&](auto r) {
    r.rate = to_double(stack[4]);
    r.eps = to_double(stack[5]);
    r.scale = to_double(stack[6]);
    return r;
  };
  if (is_double(weight)) {
    step_adagrad(weight, sum, ids, grad, numbers(AdagradRows<double>{}));
  } else {
    step_adagrad(weight, sum, ids, grad, numbers(AdagradRows<float>{}));
  }
}

[[maybe_unused]] const bool registered = register_ops("CPU", {{"read_late_rows", guarded<read_late_rows, 11, 1>},
                                                              {"step_adam_rows", guarded<step_adam_rows, 13, 0>},
                                                              {"step_adagrad_rows", guarded<step_adagrad_rows, 7, 0>}});

}  // namespace
}  // namespace fastcl

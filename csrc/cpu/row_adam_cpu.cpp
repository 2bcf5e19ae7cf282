// The ops `rows_catch_up` and `rows_move` on the CPU: Adam on some rows of a table, in place. fastcl/row_adam.py says what
// they compute. A row is touched by one pass, so that its weights and moments come from memory once.
#include <cmath>

#include "arguments.h"

namespace fastcl {
namespace {

constexpr int64_t kAhead = 8;  // rows that are asked for before they are needed: which one is next is known

// [rows, d] in place; the three of a step have one shape and type.
template <class T>
T* table_of(const Tensor& t, int64_t rows, int64_t d, const char* name) {
  matrix_of(t, rows, d, name);
  return t.write<T>();
}

template <class T>
struct Tables {
  int64_t rows, d;
  T *weight, *mean, *square;

  Tables(const Tensor& w, const Tensor& m, const Tensor& v)
      : rows(w.size(0)), d(w.size(1)), weight(table_of<T>(w, rows, d, "weight")) {
    check(m.dtype() == w.dtype() && v.dtype() == w.dtype(), "exp_avg, exp_avg_sq: expected the dtype of weight");
    mean = table_of<T>(m, rows, d, "exp_avg");
    square = table_of<T>(v, rows, d, "exp_avg_sq");
  }

  void ask(int64_t row) const {
    for (int64_t at = row * d; at < (row + 1) * d; at += 64 / int64_t(sizeof(T))) {
      __builtin_prefetch(weight + at);
      __builtin_prefetch(mean + at);
      __builtin_prefetch(square + at);
    }
  }
};

// Every id is looked at before anything is written.
const int64_t* checked_ids(const Tensor& ids, int64_t rows) {
  const int64_t n = ids.dim() == 1 ? ids.size(0) : 0;
  const int64_t* id = n == 0 ? nullptr : ids_of(ids, n, "rows");
  for (int64_t i = 0; i < n; ++i) check(id[i] >= 0 && id[i] < rows, "rows: expected ids below ", rows, ", got ", id[i]);
  return id;
}

template <class T>
void catch_up(const Tables<T>& t, const Tensor& rows, const Tensor& at_t, const Tensor& owed_t, const Tensor& fade_t,
              int64_t step, int64_t settled, double eps) {
  const int64_t* id = checked_ids(rows, t.rows);
  const int64_t n = id == nullptr ? 0 : rows.size(0);
  check(at_t.dim() == 1 && at_t.size(0) == t.rows && at_t.contiguous() && at_t.dtype() == aoti_torch_dtype_int64(),
        "at: expected a contiguous int64 tensor [", t.rows, "], got ", at_t);
  check_memory(at_t, t.rows, sizeof(int64_t), "at");
  int64_t* at = at_t.write<int64_t>();
  check(0 <= settled && settled <= step, "settled: expected a step from 0 to ", step, ", got ", settled);
  check(is_double(owed_t) && is_double(fade_t), "owed, fade: expected float64");
  const int64_t ages = step - settled + 1;
  check(owed_t.dim() == 2 && owed_t.size(0) >= ages && fade_t.dim() == 2 && fade_t.size(0) >= ages,
        "owed, fade: expected a row for each of ", ages, " ages");
  matrix_of(owed_t, owed_t.size(0), 2, "owed");
  matrix_of(fade_t, fade_t.size(0), 2, "fade");
  const double *owed = owed_t.read<double>(), *fade = fade_t.read<double>();
  for (int64_t i = 0; i < n; ++i) check(at[id[i]] >= settled, "at: expected no step before ", settled);
  // One after the other: an id that comes twice is up to date the second time.
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) t.ask(id[i + kAhead]);
    const int64_t since = at[id[i]], age = step - since;
    if (age <= 0) continue;
    const double* debt = owed + 2 * (since - settled);
    const T rate = T(debt[0]), near = debt[0] > 0 ? T(eps * (debt[1] / debt[0])) : T(eps);
    const T fade_mean = T(fade[2 * age]), fade_square = T(fade[2 * age + 1]);
    T *w = t.weight + id[i] * t.d, *m = t.mean + id[i] * t.d, *v = t.square + id[i] * t.d;
    for (int64_t j = 0; j < t.d; ++j) {
      w[j] -= rate * (m[j] / (std::sqrt(v[j]) + near));
      m[j] *= fade_mean;
      v[j] *= fade_square;
    }
    at[id[i]] = step;
  }
}

template <class T>
void move(const Tables<T>& t, const Tensor& rows, const Tensor& grad_t, double beta1, double beta2, double rate,
          double root, double eps) {
  const int64_t* id = checked_ids(rows, t.rows);
  const int64_t n = id == nullptr ? 0 : rows.size(0);
  matrix_of(grad_t, n, t.d, "grad");
  const T* grad = n == 0 ? nullptr : grad_t.read<T>();
  const T keep1 = T(beta1), take1 = T(1 - beta1), keep2 = T(beta2), take2 = T(1 - beta2);
  const T scale = T(rate), whole = T(root), near = T(eps);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) t.ask(id[i + kAhead]);
    const T* g = grad + i * t.d;
    T *w = t.weight + id[i] * t.d, *m = t.mean + id[i] * t.d, *v = t.square + id[i] * t.d;
    for (int64_t j = 0; j < t.d; ++j) {
      m[j] = keep1 * m[j] + take1 * g[j];
      v[j] = keep2 * v[j] + take2 * (g[j] * g[j]);
      w[j] -= scale * (m[j] / (std::sqrt(v[j]) / whole + near));
    }
  }
}

bool in_double(const Tensor& weight) {
  check(weight.dim() == 2, "weight: expected shape [R, D], got ", weight);
  const DType dtype = dtype_of(weight, "weight");
  check(dtype == DType::kFloat32 || dtype == DType::kFloat64, "weight: expected float32 or float64");
  return dtype == DType::kFloat64;
}

void rows_catch_up(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor weight(stack[0]), mean(stack[1]), square(stack[2]), at(stack[3]), rows(stack[4]), owed(stack[5]),
      fade(stack[6]);
  const int64_t step = static_cast<int64_t>(stack[7]), settled = static_cast<int64_t>(stack[8]);
  const double eps = to_double(stack[9]);
  if (in_double(weight)) {
    catch_up(Tables<double>(weight, mean, square), rows, at, owed, fade, step, settled, eps);
  } else {
    catch_up(Tables<float>(weight, mean, square), rows, at, owed, fade, step, settled, eps);
  }
}

void rows_move(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor weight(stack[0]), mean(stack[1]), square(stack[2]), rows(stack[3]), grad(stack[4]);
  const double beta1 = to_double(stack[5]), beta2 = to_double(stack[6]), rate = to_double(stack[7]),
               root = to_double(stack[8]), eps = to_double(stack[9]);
  check(grad.dtype() == weight.dtype(), "grad: expected the dtype of weight");
  if (in_double(weight)) {
    move(Tables<double>(weight, mean, square), rows, grad, beta1, beta2, rate, root, eps);
  } else {
    move(Tables<float>(weight, mean, square), rows, grad, beta1, beta2, rate, root, eps);
  }
}

[[maybe_unused]] const bool registered =
    register_ops("CPU", {{"rows_catch_up", rows_catch_up}, {"rows_move", rows_move}});

}  // namespace
}  // namespace fastcl

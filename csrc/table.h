// The structs that host code and CPU kernels share for passes over the rows of a table that an optimiser moves: which
// rows, the state beside them, and the numbers of one step. No torch, no allocation, no arithmetic here.
#pragma once
#include <cstdint>

namespace fastcl {

// Rows that are read after they were away from `at[row]` to `step`. Each of them makes up for the steps that dense Adam
// would have taken with a gradient of zero. Ids are distinct.
template <class T>
struct LateRows {
  const int64_t* id;
  int64_t features;
  T *weight, *first, *second;  // [rows, features]: the table and Adam's two moments
  int32_t* at;                 // [rows]: the step that a row is as of
  // [step - settled][2]: of the rows that were last touched at step settled + a, the sum of what they owe of rates, and
  // of rates times what eps counts for.
  const double* owed;
  int64_t settled, step;
  const double* fade;  // [ages][2]: powers of the two betas
  int64_t ages;
  double beta1, beta2, eps;
  T* out;  // [ids, features] or null: the rows as they are afterwards
};

// Rows with a gradient take a step of Adam.
template <class T>
struct AdamRows {
  const int64_t* id;
  const T* grad;  // [ids, features]
  int64_t features;
  T *weight, *first, *second;
  int32_t* at;
  int64_t step;
  double beta1, beta2, eps;
  double rate, root;  // with the bias corrections of the first and the second moment
  double scale;       // of the gradient
};

// Rows with a gradient take a step of Adagrad with one sum of squares a row.
template <class T>
struct AdagradRows {
  const int64_t* id;
  const T* grad;
  int64_t features;
  T *weight, *sum;  // [rows, features], [rows]
  double rate, eps, scale;
};

}  // namespace fastcl

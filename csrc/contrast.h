// The structs that host code and CPU kernels share: what a pass over the similarity matrix reads and writes, and the
// table of functions that an instruction set offers. No torch, no allocation, no arithmetic here.
//
// One pass serves forward and backward. It walks rows x columns, turns each similarity x = <row, column> into a weight,
// and may sum weight * value over the columns, where the value is a vector of its column:
//   forward:   rows = queries, columns = keys;    weight = exp(x - running maximum);   out = mean key
//   backward:  rows = keys,    columns = queries; weight = exp(x - lse of the column); out = gradient of the key
// For losses over pairs, softplus(x) is summed in place of exp(x), and the weight is sigmoid(x).
// A forward pass may keep its weights and also sum weight * value over the rows, with one value per row (ColumnSums).
// Where the gradients of the rows are known by then, these sums are the gradient of the keys, and no similarity is
// computed twice.
// Similarities are multiplied by log2(e), so that exp(x) is computed as 2^x; comments call this "units of log 2".
#pragma once
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "table.h"

namespace fastcl {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// A contiguous [rows, features] matrix of any supported type.
struct Matrix {
  const void* data;
  DType dtype;
};

struct MutableMatrix {
  void* data;  // null: this output is not wanted
  DType dtype;
};

// A hash of an id, as wide as an element, so that one vector comparison covers one vector of similarities. Only where
// tags are equal are the ids themselves compared.
template <class T>
using Tag = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <class T>
constexpr Tag<T> tag_of(int64_t id) {
  return sizeof(T) == 4 ? static_cast<Tag<T>>(id ^ (id >> 32)) : static_cast<Tag<T>>(id);
}

// Columns are prepared once per call and read by every row.
template <class T>
struct Columns {
  int64_t count;
  Matrix data;            // [count, features]
  const T* factor;        // [count] or null: multiplies a column when it is packed
  const T* panels;        // [panels][panel elements] from pack_panels; null: the walk packs one strip at a time
  const T* shift;         // [panels * panel width] or null: added to x; -inf takes a column out
  const T* cap;           // [panels * panel width] or null: takes out x that exceed it before shifts are added
  const int64_t* id;      // [count] or null
  const Tag<T>* tag;      // [panels * panel width] or null: tags of the ids
  const T* value_factor;  // [count] or null: multiplies the value of a column
  const T* extra;         // [count] or null: one more feature of the values
};

template <class T>
struct Pass {
  int64_t rows;
  int64_t features;
  Matrix row_data;      // [rows, features]
  const T* row_factor;  // [rows] or null: multiplies a row when it is packed
  const T* row_shift;   // [rows] or null: added to x
  const T* row_cap;     // [rows] or null: takes out x that exceed it before shifts are added
  const int64_t* row_id;
  Columns<T> columns;
  T* reduced;               // [rows], forward only: log-sum-exp or softplus sum of a row, in natural units
  MutableMatrix out;        // [rows, features]: sums of weight * value
  T* out_extra;             // [rows] or null: the same sum of columns.extra
  std::atomic<bool>* wild;  // kernels set it when they cannot represent the data; their results are then invalid
};

// A rectangle of the similarity matrix that one thread walks, and the results for its rows. Row buffers are padded to
// whole tiles.
template <class T>
struct Part {
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
  T* maximum;  // [rows]: weights are exp(x - maximum)
  T* sum;      // [rows]: sum of the weights; after `combine`: the factor that normalises them over the whole row
  T* out;      // [rows][out stride] or null: sums of weight * value
  T* weights;  // [panels][tiles][cell] or null: the weights, kept for column sums
};

// For each column of a part with kept weights: the sum over the part's rows of weight * factor * value.
template <class T>
struct ColumnSums {
  Matrix values;    // [rows of the pass, features]
  const T* factor;  // [rows of the part, padded to whole tiles with zeros]: multiplies the value of a row
  const T* extra;   // of the shape of factor, or null: one more feature of the values
  T* sums;          // [panels of the pass][column sum elements]
  bool add;         // adds to `sums` instead of overwriting it
};

template <class T>
struct Reduction {
  void (*walk)(const Pass<T>&, const Part<T>&, T* scratch);
  // Writes the results of rows [begin, end) from the `count` parts that each hold some of their columns.
  void (*combine)(const Pass<T>&, const Part<T>* parts, int64_t count, int64_t begin, int64_t end);
};

// What one instruction set offers for one compute type. Host code owns threads and memory; these functions own the
// loops.
template <class T>
struct Kernels {
  // Kernels to fall back to when the data has values that these cannot represent (inf, NaN, extreme magnitudes). Null
  // if there is no such restriction.
  const Kernels* any;
  int64_t tile_rows;      // rows per register tile: the unit in which rows are split
  int64_t panel_width;    // columns per register tile: the unit in which columns are split
  int64_t strip_columns;  // columns whose weights are computed before they are multiplied with the values
  int64_t cell_elements;  // elements of one tile of weights
  // Weights are kept for column sums if those of least_kept_rows rows fit kept_bytes; otherwise backward computes the
  // similarities again.
  int64_t least_kept_rows, kept_bytes;
  int64_t (*panel_elements)(int64_t features);
  int64_t (*out_stride)(int64_t features);  // here and below, `features` includes the extra feature if there is one
  int64_t (*scratch_elements)(const Pass<T>&, const Part<T>&);
  int64_t (*column_sum_elements)(int64_t features);  // of one panel
  int64_t (*column_scratch_elements)(const Part<T>&, int64_t features);
  // Packs the columns of panels [panel_begin, panel_end); the first of them is written to panels[0].
  void (*pack_panels)(const Pass<T>&, int64_t panel_begin, int64_t panel_end, T* panels);
  // Converts a vector to T.
  void (*widen_vector)(Matrix, int64_t count, T* out);
  // out[i] = <a_i, b_i> over features.
  void (*row_dot)(Matrix a, Matrix b, int64_t features, int64_t begin, int64_t end, T* out);
  // out_i = u_i * x_i + v_i * y_i; y may be absent (null data).
  void (*row_combine)(const T* u, Matrix x, const T* v, Matrix y, int64_t features, int64_t begin, int64_t end,
                      MutableMatrix out);
  // Of maxsim (best.inl.h).
  int64_t (*best_scratch_elements)(int64_t rows, int64_t features);
  void (*best_rows)(const Pass<T>&, const Part<T>&, T* scratch, T* best, Tag<T>* at);
  void (*sum_rows)(Matrix, int64_t features, const int64_t* row, const T* weight, int64_t count, int64_t to,
                   MutableMatrix out);
  // Over the ids [begin, end) of rows that an optimiser moves.
  void (*read_late_rows)(const LateRows<T>&, int64_t begin, int64_t end);
  void (*step_adam_rows)(const AdamRows<T>&, int64_t begin, int64_t end);
  void (*step_adagrad_rows)(const AdagradRows<T>&, int64_t begin, int64_t end);
  Reduction<T> log_sum_exp;   // forward: exp(x) / sum exp(x)
  Reduction<T> known_sum;     // backward: exp(x)
  Reduction<T> softplus_sum;  // forward: sigmoid(x)
  Reduction<T> sigmoid;       // backward: sigmoid(x)
  void (*column_sums)(const Pass<T>&, const Part<T>&, const ColumnSums<T>&, T* scratch);
  // Copies the sums of panels [panel_begin, panel_end) to out [columns, features] and out_extra ([columns] or null).
  void (*write_column_sums)(const T* sums, int64_t columns, int64_t features, int64_t panel_begin, int64_t panel_end,
                            T* out, T* out_extra);
  // Of a square matrix in memory, both directions (both.inl.h).
  void (*both_rows)(T* x, int64_t n, T scale, T log2_scale, const int64_t* id, int64_t begin, int64_t end, T* pos,
                    T* top, T* sum);
  void (*both_columns)(const T* x, int64_t n, int64_t begin, int64_t end, T* top, T* sum);
  void (*both_weights)(const T* x, int64_t n, const int64_t* id, int64_t begin, int64_t end, const T* row_top,
                       const T* row_factor, const T* column_top, const T* column_factor, const T* diagonal, T* out);
};

struct Isa {
  const char* name;
  bool (*supported)();
  Kernels<float> f32;
  Kernels<double> f64;
  // Faster kernels for rows and columns that are both bfloat16 or both float16. Null: f32 serves these types too.
  const Kernels<float>* bf16 = nullptr;
  const Kernels<float>* f16 = nullptr;
  // Whether this set is worth choosing unasked where it is supported. Null: always.
  bool (*pays)() = nullptr;
};

template <class T>
const Kernels<T>& kernels_of(const Isa& isa, DType rows, DType columns) {
  if constexpr (sizeof(T) == 4) {
    if (rows == columns && rows == DType::kBFloat16 && isa.bf16 != nullptr) return *isa.bf16;
    if (rows == columns && rows == DType::kFloat16 && isa.f16 != nullptr) return *isa.f16;
    return isa.f32;
  } else {
    return isa.f64;
  }
}

}  // namespace fastcl

// The vocabulary of the op, shared by host code and kernels: what a pass over the similarity matrix reads and writes.
// Plain structs of pointers and sizes; no torch, no allocation, no arithmetic.
//
// One pass serves forward and backward. It walks rows x columns, turns each similarity x = <row, column> into a weight,
// and may multiply the weights with one vector per column:
//   forward:   rows = queries, columns = keys;    weight = exp(x - running maximum); out = mean key
//   backward:  rows = keys,    columns = queries; weight = exp(x - lse of the column); out = gradient of the key
// and, for losses over pairs, the same with softplus(x) summed and weight = sigmoid(x).
// A forward may keep its weights and multiply them, transposed, with one vector per row as well (ColumnSums): where the
// gradients of the rows are known by then, this is the gradient of the keys, with no similarity computed twice.
// All similarities are in units of log 2, so that the exponential is exp2.
#pragma once
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace fastcl {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// A contiguous [rows, features] matrix of any supported type.
struct Matrix {
  const void* data;
  DType dtype;
};

struct MutableMatrix {
  void* data;  // null: not wanted
  DType dtype;
};

// Ids are compared as tags of the element's width, so that one comparison serves one vector of similarities; equal tags
// are then verified on the ids.
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
  const T* factor;        // [count] or null: multiplies a column as it is packed
  const T* panels;        // [panels][panel elements] from pack_panels; null: packed strip by strip
  const T* shift;         // [panels * panel width] or null: added to x; -inf takes a column out
  const int64_t* id;      // [count] or null
  const Tag<T>* tag;      // [panels * panel width] or null, of the ids
  const T* value_factor;  // [count] or null: multiplies a column where the weights are multiplied with it
  const T* extra;         // [count] or null: one more feature of the values
};

template <class T>
struct Pass {
  int64_t rows;
  int64_t features;
  Matrix row_data;      // [rows, features]
  const T* row_factor;  // [rows] or null: multiplies a row as it is loaded
  const T* row_shift;   // [rows] or null: added to x
  const int64_t* row_id;
  Columns<T> columns;
  T* reduced;               // forward: [rows], what the reducer makes of a row, in natural units
  MutableMatrix out;        // [rows, features], sum of weights * values
  T* out_extra;             // [rows], where columns.extra is given
  std::atomic<bool>* wild;  // set by kernels that cannot take the data they met; what they made of it is void
};

// A rectangle of the similarity matrix, walked by one thread, and what it knows of its rows afterwards. Buffers are as
// long as whole tiles of rows.
template <class T>
struct Part {
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
  T* maximum;  // [rows], what weights are relative to
  T* sum;      // [rows] of weights; after `combine` what makes a weight of this part a share of the whole row
  T* out;      // [rows][out stride] or null
  T* weights;  // [panels][tiles][cell] or null: kept for column sums
};

// For each column of a part with kept weights: the sum over its rows of weight * share * values.
template <class T>
struct ColumnSums {
  Matrix values;    // [rows of the pass, features]
  const T* factor;  // [rows of the part, whole tiles], zero in the padding: multiplies a row of values
  const T* extra;   // the same or null: one more feature of the values
  T* sums;          // [panels of the pass][column sum elements]
  bool add;         // to what is there already
};

template <class T>
struct Reduction {
  void (*walk)(const Pass<T>&, const Part<T>&, T* scratch);
  // Rows [begin, end) from the parts that share them.
  void (*combine)(const Pass<T>&, const Part<T>* parts, int64_t count, int64_t begin, int64_t end);
};

// What one instruction set offers for one element type. Host code owns threads and memory; these own the loops.
template <class T>
struct Kernels {
  const Kernels* any;     // for data that these find wild; null: they take everything
  int64_t tile_rows;      // rows per register tile: the unit in which rows are split
  int64_t panel_width;    // columns per register tile: the unit in which columns are split
  int64_t strip_columns;  // columns between two rounds of values
  int64_t cell_elements;  // of the weights of one tile
  // Kept weights: at least those of so many rows, in at most so many bytes; else similarities are computed again.
  int64_t least_kept_rows, kept_bytes;
  int64_t (*panel_elements)(int64_t features);
  int64_t (*out_stride)(int64_t features);  // features with the extra one
  int64_t (*scratch_elements)(const Pass<T>&, const Part<T>&);
  int64_t (*column_sum_elements)(int64_t features);  // of one panel; features with the extra one
  int64_t (*column_scratch_elements)(const Part<T>&, int64_t features);
  // Columns in panels [begin, end), written from panels[0] on.
  void (*pack_panels)(const Pass<T>&, int64_t panel_begin, int64_t panel_end, T* panels);
  // A vector as T.
  void (*widen_vector)(Matrix, int64_t count, T* out);
  // out[i] = <a_i, b_i> over features.
  void (*row_dot)(Matrix a, Matrix b, int64_t features, int64_t begin, int64_t end, T* out);
  // out_i = u_i * x_i + v_i * y_i; y may be absent (null data).
  void (*row_combine)(const T* u, Matrix x, const T* v, Matrix y, int64_t features, int64_t begin, int64_t end,
                      MutableMatrix out);
  Reduction<T> log_sum_exp;   // forward: exp(x) / sum exp(x)
  Reduction<T> known_sum;     // backward: exp(x)
  Reduction<T> softplus_sum;  // forward: sigmoid(x)
  Reduction<T> sigmoid;       // backward: sigmoid(x)
  void (*column_sums)(const Pass<T>&, const Part<T>&, const ColumnSums<T>&, T* scratch);
  // Sums of panels [begin, end) into rows of `out` [columns, features] and into out_extra [columns] or null.
  void (*write_column_sums)(const T* sums, int64_t columns, int64_t features, int64_t panel_begin, int64_t panel_end,
                            T* out, T* out_extra);
};

struct Isa {
  const char* name;
  bool (*supported)();
  Kernels<float> f32;
  Kernels<double> f64;
  const Kernels<float>* bf16 = nullptr;  // where both sides are of that type, if anything is gained by knowing
  const Kernels<float>* f16 = nullptr;
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

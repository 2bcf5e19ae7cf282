// The vocabulary of the op, shared by host code and kernels: what a pass over the similarity matrix reads and writes.
// Plain structs of pointers and sizes; no torch, no allocation, no arithmetic.
//
// One pass serves forward and backward. It walks rows x columns, turns each similarity x = <row, column> into a weight,
// and may multiply the weights with one vector per column:
//   forward:   rows = queries, columns = keys;    weight = exp(x - running maximum); out = mean key
//   backward:  rows = keys,    columns = queries; weight = exp(x - lse of the column); out = gradient of the key
// and, for losses over pairs, the same with softplus(x) summed and weight = sigmoid(x).
// All similarities are in units of log 2, so that the exponential is exp2.
#pragma once
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
  const T* panels;        // [panels][features][panel width], zero in the padding
  const T* shift;         // [panels * panel width] or null: added to x; -inf takes a column out
  const int64_t* id;      // [count] or null
  const Tag<T>* tag;      // [panels * panel width] or null, of the ids
  Matrix values;          // [count, features], what the weights are multiplied with
  const T* value_factor;  // [count] or null: multiplies a row of values
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
  T* reduced;         // forward: [rows], what the reducer makes of a row, in natural units
  MutableMatrix out;  // [rows, features], sum of weights * values
  T* out_extra;       // [rows], where columns.extra is given
};

// What one instruction set offers for one element type. Host code owns threads and memory; these own the loops.
template <class T>
struct Kernels {
  int64_t tile_rows;    // rows per register tile: the unit in which rows are split over threads
  int64_t panel_width;  // columns per register tile
  int64_t (*scratch_elements)(const Pass<T>&);
  // Columns [begin, end) in panels of `panel_width`; factor [rows] or null.
  void (*pack_panels)(Matrix, const T* factor, int64_t rows, int64_t features, int64_t panel_begin, int64_t panel_end,
                      T* panels);
  // A vector as T.
  void (*widen_vector)(Matrix, int64_t count, T* out);
  // out[i] = <a_i, b_i> over features.
  void (*row_dot)(Matrix a, Matrix b, int64_t features, int64_t begin, int64_t end, T* out);
  // out_i = u_i * x_i + v_i * y_i; y may be absent (null data).
  void (*row_combine)(const T* u, Matrix x, const T* v, Matrix y, int64_t features, int64_t begin, int64_t end,
                      MutableMatrix out);
  // A pass over row tiles [begin, end). Forward with its reducer's weights, and backward with known ones:
  void (*log_sum_exp)(const Pass<T>&, int64_t tile_begin, int64_t tile_end, T* scratch);   // exp(x) / sum exp(x)
  void (*known_sum)(const Pass<T>&, int64_t tile_begin, int64_t tile_end, T* scratch);     // exp(x)
  void (*softplus_sum)(const Pass<T>&, int64_t tile_begin, int64_t tile_end, T* scratch);  // sigmoid(x)
  void (*sigmoid)(const Pass<T>&, int64_t tile_begin, int64_t tile_end, T* scratch);       // sigmoid(x)
};

struct Isa {
  const char* name;
  bool (*supported)();
  Kernels<float> f32;
  Kernels<double> f64;
};

template <class T>
const Kernels<T>& kernels_of(const Isa& isa) {
  if constexpr (sizeof(T) == 4) {
    return isa.f32;
  } else {
    return isa.f64;
  }
}

}  // namespace fastcl

// Checks made just before raw pointers are taken. Python checks the same with better messages; a call of the op that
// bypasses `fastcl.contrast` must fail here instead of reading memory that is not its own.
#pragma once
#include <string>

#include "contrast.h"
#include "torch_shim.h"

namespace fastcl {

inline std::string text(const std::string& part) { return part; }
inline std::string text(int64_t part) { return std::to_string(part); }
inline std::string text(const Tensor& part) {  // its shape
  std::string s = "[";
  for (int64_t i = 0; i < part.dim(); ++i) s += (i != 0 ? ", " : "") + std::to_string(part.size(i));
  return s + "]";
}

// The message is built only when the check fails: for a small problem, building it would cost as much as the
// arithmetic.
template <class... Parts>
void check(bool ok, const Parts&... message) {
  if (!ok) throw std::runtime_error(("fastcl: " + ... + text(message)));
}

inline DType dtype_of(const Tensor& t, const char* name) {
  const int32_t d = t.dtype();
  if (d == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (d == aoti_torch_dtype_float64()) return DType::kFloat64;
  if (d == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (d == aoti_torch_dtype_float16()) return DType::kFloat16;
  throw std::runtime_error(std::string("fastcl: ") + name + ": expected float64, float32, bfloat16 or float16");
}

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// The elements of a contiguous tensor must lie within its storage, which its owner may have freed or cut short.
inline void check_memory(const Tensor& t, int64_t count, int64_t element_bytes, const char* name) {
  check(count == 0 || (t.storage_offset() + count) * element_bytes <= t.storage_bytes(), name,
        ": expected a tensor with memory behind it, got ", t, " whose storage was freed or cut short");
}

// An absent optional tensor is passed with shape [0]. A present vector for 0 rows or columns has the same shape;
// reading it as absent does no harm, because it has no elements.
inline bool present(const Tensor& t) { return t.dim() != 1 || t.size(0) != 0; }

inline Matrix matrix_of(const Tensor& t, int64_t rows, int64_t features, const char* name) {
  check(t.dim() == 2 && t.size(0) == rows && t.size(1) == features, name, ": expected shape [", rows, ", ", features,
        "], got ", t);
  check(t.contiguous(), name, ": expected a contiguous tensor");
  const DType dtype = dtype_of(t, name);
  check_memory(t, rows * features, bytes_of(dtype), name);
  return {t.read<void>(), dtype};
}

inline Matrix vector_of(const Tensor& t, int64_t length, const char* name) {
  check((t.dim() == 1 && t.size(0) == length) || (t.dim() == 0 && length == 1), name, ": expected shape [", length,
        "], got ", t);
  check(t.contiguous(), name, ": expected a contiguous tensor");
  const DType dtype = dtype_of(t, name);
  check_memory(t, length, bytes_of(dtype), name);
  return {t.read<void>(), dtype};
}

inline const int64_t* ids_of(const Tensor& t, int64_t length, const char* name) {
  if (!present(t)) return nullptr;
  check(t.dim() == 1 && t.size(0) == length && t.contiguous() && t.dtype() == aoti_torch_dtype_int64(), name,
        ": expected a contiguous int64 tensor [", length, "], got ", t);
  check_memory(t, length, sizeof(int64_t), name);
  return t.read<int64_t>();
}

}  // namespace fastcl

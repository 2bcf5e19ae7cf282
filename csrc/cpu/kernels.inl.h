// The kernels of one instruction set: the same source for each, compiled in a target region and namespace of its own.
// The includer defines FASTCL_ISA_NAMESPACE, FASTCL_VECTOR_BYTES, FASTCL_TILE_ROWS and, for more than the compiler's
// default target, FASTCL_TARGET. It must include every header that the *.inl.h files need beforehand: inline functions
// of a header first included inside a target region would be compiled with that region's instructions, and the linker
// may choose those copies for code that runs on any processor.

#ifdef FASTCL_TARGET
#define FASTCL_PRAGMA_OF(text) _Pragma(#text)
#define FASTCL_PRAGMA(text) FASTCL_PRAGMA_OF(text)
#if defined(__clang__)
FASTCL_PRAGMA(clang attribute push(__attribute__((target(FASTCL_TARGET))), apply_to = function))
#else
FASTCL_PRAGMA(GCC push_options)
FASTCL_PRAGMA(GCC target(FASTCL_TARGET))
#endif
#endif

namespace fastcl {
namespace FASTCL_ISA_NAMESPACE {
namespace {
// clang-format off: the order matters, each file uses those above it
#include "cpu/vec.inl.h"
#include "cpu/storage.inl.h"
#include "cpu/rows.inl.h"
#include "cpu/both.inl.h"
#include "cpu/table.inl.h"
#include "cpu/product.inl.h"
#if defined(FASTCL_AMX) || defined(FASTCL_PAIRS)
#include "cpu/bf16_parts.inl.h"
#endif
#ifdef FASTCL_AMX
#include "cpu/amx_tiles.inl.h"
#include "cpu/amx.inl.h"
#endif
#ifdef FASTCL_BF16
#include "cpu/bf16.inl.h"
#endif
#ifdef FASTCL_PAIRS
#include "cpu/avx512_bf16.inl.h"
#endif
#include "cpu/best.inl.h"
#include "cpu/reducer.inl.h"
#include "cpu/pass.inl.h"
// clang-format on
}  // namespace
}  // namespace FASTCL_ISA_NAMESPACE
}  // namespace fastcl

#ifdef FASTCL_TARGET
#if defined(__clang__)
FASTCL_PRAGMA(clang attribute pop)
#else
FASTCL_PRAGMA(GCC pop_options)
#endif
#endif

// The kernels of one instruction set: the same source, compiled in the includer's target region and namespace.
// The includer sets FASTCL_ISA_NAMESPACE, FASTCL_VECTOR_BYTES and FASTCL_TILE_ROWS, and includes every header needed
// beforehand: a header first seen inside a target region would leak its instructions into the rest of the program.

namespace fastcl {
namespace FASTCL_ISA_NAMESPACE {
namespace {
// clang-format off: each needs those above it
#include "cpu/vec.inl.h"
#include "cpu/storage.inl.h"
#include "cpu/rows.inl.h"
#include "cpu/product.inl.h"
#ifdef FASTCL_AMX
#include "cpu/amx_tiles.inl.h"
#include "cpu/amx.inl.h"
#endif
#include "cpu/reducer.inl.h"
#include "cpu/pass.inl.h"
// clang-format on
}  // namespace
}  // namespace FASTCL_ISA_NAMESPACE
}  // namespace fastcl

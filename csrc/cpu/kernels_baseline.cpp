// Kernels for the compiler's default target: SSE2 on x86-64, NEON on 64-bit ARM.
#include <cmath>
#include <cstdint>
#include <utility>

#include "contrast.h"

#define FASTCL_ISA_NAMESPACE baseline
#define FASTCL_VECTOR_BYTES 16
#if defined(__aarch64__)
#include <arm_neon.h>
#define FASTCL_TILE_ROWS 12  // of 32 registers
#else
#define FASTCL_TILE_ROWS 4  // of 16 registers
#endif
#include "cpu/kernels.inl.h"

namespace fastcl {
static bool supported() { return true; }

extern const Isa isa_baseline;
const Isa isa_baseline{"baseline", supported, baseline::table<baseline::Fma<float>>(),
                       baseline::table<baseline::Fma<double>>()};
}  // namespace fastcl

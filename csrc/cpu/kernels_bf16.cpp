// Kernels for NEON with products of bfloat16 matrices. All but bfloat16 rows and columns go to the baseline.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "contrast.h"
#include "cpu/features_arm.h"

#if defined(__clang__)
#define FASTCL_TARGET "bf16"
#else
#define FASTCL_TARGET "arch=armv8.2-a+bf16"
#endif
#define FASTCL_ISA_NAMESPACE bf16
#define FASTCL_VECTOR_BYTES 16
#define FASTCL_TILE_ROWS 12
#define FASTCL_BF16
#include "cpu/kernels.inl.h"

namespace fastcl {
extern const Isa isa_baseline;

static const Kernels<float> from_bf16 = bf16::table<bf16::Bf16>(&isa_baseline.f32);

extern const Isa isa_bf16;
const Isa isa_bf16{"bf16", arm_has_bf16, isa_baseline.f32, isa_baseline.f64, &from_bf16};
}  // namespace fastcl
#endif

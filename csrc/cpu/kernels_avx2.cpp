// Kernels for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "contrast.h"

#pragma GCC target("avx2,fma,f16c,bmi2")
#define FASTCL_ISA_NAMESPACE avx2
#define FASTCL_VECTOR_BYTES 32
#define FASTCL_TILE_ROWS 6
#include "cpu/kernels.inl.h"

namespace fastcl {
static bool supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}

extern const Isa isa_avx2;
const Isa isa_avx2{"avx2", supported, avx2::table<avx2::Fma<float>>(), avx2::table<avx2::Fma<double>>()};
}  // namespace fastcl
#endif

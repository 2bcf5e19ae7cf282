// Kernels for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "contrast.h"

#define FASTCL_TARGET "avx2,fma,f16c,bmi2"
#define FASTCL_ISA_NAMESPACE avx2
#define FASTCL_VECTOR_BYTES 32
#define FASTCL_TILE_ROWS 6
#include "cpu/kernels.inl.h"

namespace fastcl {
static bool supported() {
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 &&
                    (ecx & bit_F16C) != 0;  // __builtin_cpu_supports of clang 14 does not know "f16c"
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c && __builtin_cpu_supports("bmi2");
}

extern const Isa isa_avx2;
const Isa isa_avx2{"avx2", supported, avx2::table<avx2::Fma<float>>(), avx2::table<avx2::Fma<double>>()};
}  // namespace fastcl
#endif

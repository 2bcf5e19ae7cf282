// Kernels for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "contrast.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2,prefer-vector-width=512")
#define FASTCL_ISA_NAMESPACE avx512
#define FASTCL_VECTOR_BYTES 64
#define FASTCL_TILE_ROWS 12
#include "cpu/kernels.inl.h"

namespace fastcl {
static bool supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}

extern const Isa isa_avx512;
const Isa isa_avx512{"avx512", supported, avx512::table<avx512::Fma<float>>(), avx512::table<avx512::Fma<double>>()};
}  // namespace fastcl
#endif

// Kernels for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "contrast.h"
#include "cpu/features_x86.h"

#define FASTCL_TARGET "avx2,fma,f16c,bmi2"
#define FASTCL_ISA_NAMESPACE avx2
#define FASTCL_VECTOR_BYTES 32
#define FASTCL_TILE_ROWS 6
#include "cpu/kernels.inl.h"

namespace fastcl {
static bool supported() { return x86().avx2; }

extern const Isa isa_avx2;
const Isa isa_avx2{"avx2", supported, avx2::table<avx2::Fma<float>>(), avx2::table<avx2::Fma<double>>()};
}  // namespace fastcl
#endif

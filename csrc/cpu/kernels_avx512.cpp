// Kernels for AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "contrast.h"
#include "cpu/features_x86.h"

#if defined(__clang__)  // clang uses 512-bit vectors for this target without being told
#define FASTCL_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2"
#else
#define FASTCL_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2,prefer-vector-width=512"
#endif
#define FASTCL_ISA_NAMESPACE avx512
#define FASTCL_VECTOR_BYTES 64
#define FASTCL_TILE_ROWS 12
#include "cpu/kernels.inl.h"

namespace fastcl {
static bool supported() { return x86().avx512; }

extern const Isa isa_avx512;
const Isa isa_avx512{"avx512", supported, avx512::table<avx512::Fma<float>>(), avx512::table<avx512::Fma<double>>()};
}  // namespace fastcl
#endif

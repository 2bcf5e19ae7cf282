// Kernels for AVX-512 with products of pairs of bfloat16. All but bfloat16 rows and columns goes to AVX-512.
#include "cpu/features_x86.h"
#if defined(FASTCL_AVX512_BF16)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "contrast.h"

#if defined(__clang__)  // clang uses 512-bit vectors for this target without being told
#define FASTCL_TARGET "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2"
#else
#define FASTCL_TARGET "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2,prefer-vector-width=512"
#endif
#define FASTCL_ISA_NAMESPACE avx512_bf16
#define FASTCL_VECTOR_BYTES 64
#define FASTCL_TILE_ROWS 12
#define FASTCL_PAIRS
#include "cpu/kernels.inl.h"

namespace fastcl {
extern const Isa isa_avx512;

static bool supported() { return x86().avx512_bf16; }
static bool pays() { return pairs_pay(x86().vendor, x86().family); }

static const Kernels<float> from_bf16 = avx512_bf16::table<avx512_bf16::Pairs>(&isa_avx512.f32);

extern const Isa isa_avx512_bf16;
const Isa isa_avx512_bf16{"avx512_bf16", supported, isa_avx512.f32, isa_avx512.f64, &from_bf16, nullptr, pays};
}  // namespace fastcl
#endif

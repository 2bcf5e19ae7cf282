// Kernels for AMX with bfloat16 tiles. float64 inputs, and values that bfloat16 tiles cannot represent, go to AVX-512.
#if defined(__x86_64__) && defined(__linux__)  // each system has a way of its own to hand out tile registers
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

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
#define FASTCL_ISA_NAMESPACE amx
#define FASTCL_VECTOR_BYTES 64
#define FASTCL_TILE_ROWS 12
#define FASTCL_AMX
#include "cpu/kernels.inl.h"

namespace fastcl {
extern const Isa isa_avx512;

static bool supported() {
  if (!x86().amx) return false;
  // Linux lets a process use tile registers only after a request: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

static const Kernels<float> from_bf16 = amx::table<amx::Amx<1>>(&isa_avx512.f32);
static const Kernels<float> from_f16 = amx::table<amx::Amx<2>>(&isa_avx512.f32);

extern const Isa isa_amx;
const Isa isa_amx{"amx",      supported, amx::table<amx::Amx<3>>(&isa_avx512.f32), amx::table<amx::Fma<double>>(),
                  &from_bf16, &from_f16};
}  // namespace fastcl
#endif

// What a 64-bit ARM processor offers beyond NEON, asked of the operating system: programs may not ask the processor. No
// kernel here.
#pragma once
#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace fastcl {

// Products of matrices of bfloat16 (BFMMLA).
inline bool arm_has_bf16() {
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which old headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found != 0;
#else
  return false;
#endif
}

}  // namespace fastcl
#endif

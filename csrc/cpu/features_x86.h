// What an x86-64 processor and its operating system offer, asked of the processor itself. Not __builtin_cpu_supports: it
// needs a runtime library that not every toolchain brings in working order. No kernel here.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>

namespace fastcl {

// Each with all that the kernels of that name use.
struct X86 {
  bool avx2 = false, avx512 = false, amx = false;

  X86() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return;
    constexpr unsigned kFma = 1u << 12, kXgetbv = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
    constexpr unsigned kFirst = kFma | kXgetbv | kAvx | kF16c;
    if ((c & kFirst) != kFirst) return;
    // The registers that the system saves when it changes threads.
    unsigned saved = 0, high = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return;
    constexpr unsigned kAvx2 = 1u << 5 | 1u << 8;                            // with BMI2
    constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    constexpr unsigned kAmx = 1u << 22 | 1u << 24;                           // BF16, TILE
    constexpr unsigned kSavesYmm = 0x6, kSavesZmm = 0xe6, kSavesTiles = 0x60000;
    avx2 = (saved & kSavesYmm) == kSavesYmm && (b & kAvx2) == kAvx2;
    avx512 = avx2 && (saved & kSavesZmm) == kSavesZmm && (b & kAvx512) == kAvx512;
    amx = avx512 && (saved & kSavesTiles) == kSavesTiles && (d & kAmx) == kAmx;
  }
};

inline const X86& x86() {
  static const X86 found;
  return found;
}

}  // namespace fastcl
#endif

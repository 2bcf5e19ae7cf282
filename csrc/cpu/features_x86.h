// What an x86-64 processor and its operating system offer, asked of the processor itself. Not __builtin_cpu_supports: it
// needs a runtime library that not every toolchain brings in working order. No kernel here.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>

#include <cstring>

// Defined where the compiler knows AVX512_BF16. Elsewhere the instruction set of that name is left out.
#if (defined(__clang__) && __clang_major__ >= 9) || (!defined(__clang__) && __GNUC__ >= 10)
#define FASTCL_AVX512_BF16
#endif

namespace fastcl {

// Each with all that the kernels of that name use.
struct X86 {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx = false;
  char vendor[13] = {};  // such as AuthenticAMD
  unsigned family = 0;

  X86() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(0, &a, &b, &c, &d) == 0) return;
    std::memcpy(vendor, &b, 4);
    std::memcpy(vendor + 4, &d, 4);
    std::memcpy(vendor + 8, &c, 4);
    if (__get_cpuid(1, &a, &b, &c, &d) == 0) return;
    family = (a >> 8 & 15) == 15 ? 15 + (a >> 20 & 255) : a >> 8 & 15;
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
    const bool more = a >= 1;  // a second page of leaf 7
    amx = avx512 && (saved & kSavesTiles) == kSavesTiles && (d & kAmx) == kAmx;
    constexpr unsigned kBf16 = 1u << 5;
    avx512_bf16 = avx512 && more && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kBf16) != 0;
  }
};

inline const X86& x86() {
  static const X86 found;
  return found;
}

// Whether a processor with AVX512_BF16 multiplies bfloat16 faster by it than float32 by multiply-adds. AMD's start as many
// of its instructions in a cycle as multiply-adds, from Zen 4 on (family 25), so that they multiply twice as many numbers.
// Intel's start a quarter as many. Not measured at run time, so that every run of a program takes the same kernels.
inline bool pairs_pay(const char* vendor, unsigned family) {
  return std::strcmp(vendor, "AuthenticAMD") == 0 && family >= 25;
}

}  // namespace fastcl
#endif

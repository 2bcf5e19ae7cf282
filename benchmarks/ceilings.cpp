// Measures the peak rates of one core, with all operands in registers: float32 multiply-adds, bfloat16 multiply-adds by
// avx512_bf16, and AMX tile products. Prints one line of JSON, in multiply-adds per nanosecond; null if the compiler's
// target lacks the instructions.
//
//     g++ -O3 -march=native benchmarks/ceilings.cpp -o ceilings && ./ceilings
#include <immintrin.h>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>

constexpr int kChains = 12;  // independent sums, so that no instruction waits for the one before
constexpr long kSteps = 2'000'000;
constexpr int kRounds = 15;

// Makes the compiler compute each step when its turn comes, and keep the sums in registers.
#define IN_REGISTERS(s)                                                                                          \
  asm volatile(""                                                                                                \
               : "+v"(s[0]), "+v"(s[1]), "+v"(s[2]), "+v"(s[3]), "+v"(s[4]), "+v"(s[5]), "+v"(s[6]), "+v"(s[7]), \
                 "+v"(s[8]), "+v"(s[9]), "+v"(s[10]), "+v"(s[11]))

template <class Body>
void print(const char* name, double each, const char* after, Body body) {
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count());
  }
  std::printf("\"%s\": %.1f%s", name, each / best, after);
}

void print_null(const char* name, const char* after) { std::printf("\"%s\": null%s", name, after); }

int main() {
  std::printf("{");
#if defined(__AVX512F__)
  print("fma", 16.0 * kChains * kSteps, ", ", [] {
    __m512 sum[kChains] = {}, x = _mm512_set1_ps(1e-9f);
    for (long step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) sum[i] = _mm512_fmadd_ps(x, x, sum[i]);
      IN_REGISTERS(sum);
    }
  });
#else
  print_null("fma", ", ");
#endif
#if defined(__AVX512BF16__)
  print("avx512_bf16", 32.0 * kChains * kSteps, ", ", [] {
    __m512 sum[kChains] = {};
    const __m512bh x = (__m512bh)_mm512_set1_epi32(0x30003000);
    for (long step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], x, x);
      IN_REGISTERS(sum);
    }
  });
#else
  print_null("avx512_bf16", ", ");
#endif
#if defined(__AMX_BF16__)
  constexpr long kPermission = 0x1023, kTileData = 18;  // arch_prctl's request for the tile registers
  if (syscall(SYS_arch_prctl, kPermission, kTileData) == 0) {
    struct alignas(64) {
      uint8_t palette = 1, row = 0, unused[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
    alignas(64) uint16_t data[512];
    for (int i = 0; i < 512; ++i) data[i] = static_cast<uint16_t>(0x3c00 + (i * 37 % 512));  // zeros clock higher
    _tile_loadd(4, data, 64);
    _tile_loadd(5, data, 64);
    constexpr long kTileSteps = kSteps / 16;
    print("amx", 16.0 * 16 * 32 * 4 * kTileSteps, "", [] {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (long step = 0; step < kTileSteps; ++step) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
      }
    });
    _tile_release();
  } else {
    print_null("amx", "");
  }
#else
  print_null("amx", "");
#endif
  std::printf("}\n");
}

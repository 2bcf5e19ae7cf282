// The CUDA language and its types as a host compiler takes them, and how sanitizers learn of fibers. Values only:
// nothing here knows of threads.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
void __asan_unpoison_memory_region(const volatile void*, size_t);
void *__tsan_get_current_fiber(), *__tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*), __tsan_switch_to_fiber(void*, unsigned), __tsan_acquire(void*), __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int), AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int), AnnotateIgnoreWritesEnd(const char*, int);
}
#ifdef __SANITIZE_ADDRESS__
#define EMU_ASAN(...) __VA_ARGS__
#else
#define EMU_ASAN(...)
#endif
#ifdef __SANITIZE_THREAD__
#define EMU_TSAN(...) __VA_ARGS__
#else
#define EMU_TSAN(...)
#endif
#define EMU_NOTSAN __attribute__((no_sanitize("thread")))

#define __host__
#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // plain form: works, but is neither poisoned nor guarded; prefer SHARED_ARRAY

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class To, class From>
inline To emu_bits(const From& v) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  std::memcpy(&r, &v, sizeof r);
  return r;
}
inline unsigned __float_as_uint(float f) { return emu_bits<unsigned>(f); }
inline float __uint_as_float(unsigned u) { return emu_bits<float>(u); }
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(unsigned(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float f) {  // to nearest even
  unsigned u = __float_as_uint(f);
  return {uint16_t(f != f ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
inline float __half2float(__half v) { return float(emu_bits<_Float16>(v.bits)); }
inline __half __float2half(float f) { return {emu_bits<uint16_t>(_Float16(f))}; }

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;
constexpr uint32_t emu_all = 0xffffffffu;

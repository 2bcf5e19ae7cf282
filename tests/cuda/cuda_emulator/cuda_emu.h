// Runs CUDA C++ kernels on a CPU, so that their logic can be tested without a GPU (GCC or Clang, x86-64, C++17).
//
// Kernels include device_shim.cuh: CUDA and PTX under nvcc, this file under a host compiler. A CUDA thread is a fiber; one
// block runs at a time; a fiber gives way only inside __syncthreads or a warp collective. emu::seed draws the order:
//   0: warps and lanes ascending, a cp.async lands as late as allowed (at its wait);  1: descending, it lands at once;
//   2 and more: at random. A kernel without races gives bit-identical output for all seeds (float atomics aside).
// What shows which fault:
//   missing barrier        seeds disagree, or NaN; for certain with -fsanitize=thread, where fibers are threads to it,
//                          only __syncthreads and __syncwarp order memory and blocks are unordered: run seeds 0 and 1
//   out of bounds          -fsanitize=address: each shared array is its own heap block; give buffers their exact size
//   uninitialised shared   all bytes start as 0xFF: NaN in float32, float16 and bfloat16, -1 in integers
//   missing cp.async wait  seed 0 reads that
//   emu::Error             divergent barrier or warp collective, early exit, deadlock, bad mask, misaligned or non-shared
//                          operand of ldmatrix or cp.async, more dynamic shared memory taken than the launch gave
// Tensor cores cut sums off as measured by others (emu_warp.h). Not modelled: time, the error of ex2.approx, bank
// conflicts outside ldmatrix, weak memory between blocks, TMA, mbarrier, wgmma, clusters, streams. One launch at a time:
// not for several threads.
#pragma once
#include "emu_warp.h"

#define EMU_LINE int line = __builtin_LINE()
#define __syncthreads() emu::sync_block(__LINE__)
inline void __syncwarp(uint32_t mask = emu_all, EMU_LINE) {
  int p = 0;
  emu::warp_op<int>(mask, "__syncwarp", line, p, nullptr);
}
template <class T>
T __shfl_sync(uint32_t mask, T v, int src, int width = 32, EMU_LINE) {
  return emu::exchange(mask, v, (emu::lane() & ~(width - 1)) + (src & (width - 1)), "__shfl_sync", line);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T v, int x, int width = 32, EMU_LINE) {
  int l = emu::lane(), s = l ^ x;
  return emu::exchange(mask, v, s > (l | (width - 1)) ? l : s, "__shfl_xor_sync", line);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T v, unsigned d, int width = 32, EMU_LINE) {
  int l = emu::lane(), s = l + int(d);
  return emu::exchange(mask, v, s > (l | (width - 1)) ? l : s, "__shfl_down_sync", line);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T v, unsigned d, int width = 32, EMU_LINE) {
  int l = emu::lane(), s = l - int(d);
  return emu::exchange(mask, v, s < (l & ~(width - 1)) ? l : s, "__shfl_up_sync", line);
}
inline uint32_t __ballot_sync(uint32_t mask, int p, EMU_LINE) { return emu::vote(mask, p, line); }
inline int __any_sync(uint32_t mask, int p, EMU_LINE) { return emu::vote(mask, p, line) != 0; }
inline int __all_sync(uint32_t mask, int p, EMU_LINE) { return emu::vote(mask, !p, line) == 0; }
inline void __threadfence() {}  // the integer atomics below are acquire/release instead
inline float atomicAdd(float* p, float v) {
  emu::count(emu::stats.atomics);
  uint32_t *u = reinterpret_cast<uint32_t*>(p), old = __atomic_load_n(u, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(u, &old, __float_as_uint(__uint_as_float(old) + v), false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
  return __uint_as_float(old);
}
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
T atomicAdd(T* p, T v) {
  emu::count(emu::stats.atomics);
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
using std::max;
using std::min;
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }

// ------------------------------------------------------------------------------------------------ as in device_shim.cuh
#define SHARED_ARRAY(T, name, n) \
  static char name##_key;        \
  T(&name)[n] = *reinterpret_cast<T(*)[n]>(emu::shared_region(&name##_key, sizeof(T) * (n), false))
struct SharedCursor {  // dynamic shared memory; the n-th take gives the same array to every thread
  intptr_t taken = 0;
  template <class T>
  T* take(int n) {
    return reinterpret_cast<T*>(emu::shared_region(reinterpret_cast<void*>(++taken), sizeof(T) * n, true));
  }
};
#define SHARED_CURSOR(name) SharedCursor name
#define UNROLL
#define NO_UNROLL
#define FASTCL_LAUNCH(kernel, grid, block, shared, stream, ...) \
  ((void)(stream), emu::try_launch(grid, block, shared, [=] { kernel(__VA_ARGS__); }))
template <class Kernel>
cudaError_t allow_shared(Kernel*, int) {
  return cudaSuccess;
}
inline uint32_t pack_bf16(float low, float high) {
  return uint32_t(__float2bfloat16(high).bits) << 16 | __float2bfloat16(low).bits;
}
inline uint32_t pack_f16(float low, float high) {
  return uint32_t(__float2half(high).bits) << 16 | __float2half(low).bits;
}
template <class T>
T opaque(T v) {
  return v;
}
inline uint32_t load_shared(const void* p) { return *static_cast<const uint32_t*>(p); }
inline float exp2_fast(float x) {
  emu::count(emu::stats.exp2);
  return exp2f(x);
}
inline void cp_async16(void* dst, const void* src, int valid = 16, EMU_LINE) {
  emu::count(emu::stats.cp_async);
  emu::want_shared(dst, "cp.async", line);
  if (valid < 0 || valid > 16 || (valid && reinterpret_cast<uintptr_t>(src) & 15)) {
    emu::fail("cp.async at line %d: bad size or source alignment", line);
  }
  emu::Copy c{dst, src, valid, 0};
  bool late;
  {
    emu::Quiet q;
    c.group = emu::g.cur->group;
    late = emu::seed == 0 || (emu::seed > 1 && (emu::draw() & 1));
    if (late) emu::g.cur->copies.push_back(c);
  }
  if (!late) emu::land(c);
}
inline void cp_async_commit() {
  emu::Quiet q;
  ++emu::g.cur->group;
}
template <int kKeep>
void cp_async_wait() {
  emu::cp_wait(kKeep);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, EMU_LINE) { emu::ldm<false>(r, row, line); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, EMU_LINE) { emu::ldm<true>(r, row, line); }
inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_LINE) {
  emu::mma<emu::kBf16>(c, a, b0, b1, line);
}
inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_LINE) {
  emu::mma<emu::kF16>(c, a, b0, b1, line);
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_LINE) {
  emu::mma<emu::kTf32>(c, a, b0, b1, line);
}

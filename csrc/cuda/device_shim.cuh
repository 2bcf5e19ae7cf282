// The device functions that kernels call, with two implementations: CUDA and PTX under nvcc (sm_80 and later), and an
// emulator under a host compiler, so that kernels can be tested without a GPU. Kernels must not call CUDA directly.
// FAULT_... macros in kernels are never defined in a build of the library: tests/cuda/test_cuda_faults.py defines one
// at a time to check that the tests notice the fault.
#pragma once
#include <cstdint>

#include "contrast.h"
#include "cuda/runtime.h"

#ifndef __CUDACC__
#include "cuda_emu.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

// Shared memory: SHARED_ARRAY is static; SHARED_CURSOR hands out pieces of the launch's dynamic shared memory.
#define SHARED_ARRAY(T, name, n) __shared__ T name[n]
struct SharedCursor {
  unsigned char* p;
  template <class T>
  __device__ __forceinline__ T* take(int n) {
    T* r = reinterpret_cast<T*>(p);
    p += (n * static_cast<int>(sizeof(T)) + 15) & ~15;
    return r;
  }
};
extern __shared__ __align__(1024) unsigned char fastcl_shared[];
#define SHARED_CURSOR(name) \
  SharedCursor name { fastcl_shared }

// Launches a kernel and returns the launch's error. More than 48 KiB of shared memory need allow_shared first.
#define FASTCL_LAUNCH(kernel, grid, block, shared, stream, ...) \
  (kernel<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__), cudaGetLastError())
template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// Asynchronous copy of 16 bytes from global to shared memory. Only the first `valid` bytes are read; zeros replace the
// rest.
__device__ __forceinline__ void cp_async16(void* to, const void* from, int valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kKeep>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kKeep) : "memory");
}
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
// Returns its argument, and hides from the compiler that the value is the same: expressions of it are not moved out of
// a loop, where they would occupy registers.
__device__ __forceinline__ const char* opaque(const char* p) {
  asm volatile("" : "+l"(p));
  return p;
}
__device__ __forceinline__ int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
// A read that stays in program order: a compiler that may move reads issues more of them at once than it has registers.
__device__ __forceinline__ uint32_t load_shared(const void* p) {
  uint32_t r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(shared_address(p)) : "memory");
  return r;
}
// c += A B with float32 accumulators: m16n8k16 for bf16/f16, m16n8k8 for tf32.
#define FASTCL_MMA(name, shape, type)                                                                     \
  __device__ __forceinline__ void name(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                                  \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                             \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                         \
  }
FASTCL_MMA(mma_bf16, "m16n8k16", "bf16")
FASTCL_MMA(mma_f16, "m16n8k16", "f16")
FASTCL_MMA(mma_tf32, "m16n8k8", "tf32")
#undef FASTCL_MMA
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
#endif

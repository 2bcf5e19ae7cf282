// Measures the peak rates of one GPU, with all operands in registers: mma.sync in bfloat16 and TF32, and exp2. Prints
// one line of JSON, in operations per second. bench_gpu.py builds and runs it. Status: it has not run on a GPU yet.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr int kChains = 8;  // independent sums, so that no instruction waits for the one before
constexpr int kSteps = 4096;
constexpr int kThreads = 256;

void ok(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "ceilings: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

#define MMA_KERNEL(name, shape, type)                                               \
  __global__ void __launch_bounds__(kThreads) name(float* out) {                    \
    float c[kChains][4] = {};                                                       \
    const uint32_t a = threadIdx.x, b = threadIdx.x + 1;                            \
    for (int step = 0; step < kSteps; ++step) {                                     \
      _Pragma("unroll") for (int i = 0; i < kChains; ++i) {                         \
        asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type        \
                     ".f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, {%0,%1,%2,%3};"   \
                     : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])   \
                     : "r"(a), "r"(b));                                             \
      }                                                                             \
    }                                                                               \
    float sum = 0;                                                                  \
    for (int i = 0; i < kChains; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3]; \
    out[blockIdx.x * kThreads + threadIdx.x] = sum;                                 \
  }
MMA_KERNEL(mma_bf16, "m16n8k16", "bf16")
MMA_KERNEL(mma_tf32, "m16n8k8", "tf32")

__global__ void __launch_bounds__(kThreads) exponentials(float* out) {
  float x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = -0.001f * static_cast<float>(threadIdx.x + i);
  for (int step = 0; step < kSteps; ++step) {
    _Pragma("unroll") for (int i = 0; i < kChains; ++i) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
  }
  float sum = 0;
  for (int i = 0; i < kChains; ++i) sum += x[i];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// The best of five runs, in operations a second; `each` is what one thread does in a step of one chain.
double rate(void (*kernel)(float*), int blocks, float* out, double each) {
  cudaEvent_t begin, end;
  ok(cudaEventCreate(&begin));
  ok(cudaEventCreate(&end));
  double best = 0;
  for (int run = 0; run < 6; ++run) {
    ok(cudaEventRecord(begin));
    kernel<<<blocks, kThreads>>>(out);
    ok(cudaGetLastError());
    ok(cudaEventRecord(end));
    ok(cudaEventSynchronize(end));
    float ms = 0;
    ok(cudaEventElapsedTime(&ms, begin, end));
    const double done = each * kChains * kSteps * kThreads * blocks;
    if (run != 0) best = std::max(best, done / (static_cast<double>(ms) * 1e-3));  // the first one warms up
  }
  ok(cudaEventDestroy(begin));
  ok(cudaEventDestroy(end));
  return best;
}

int main() {
  int processors = 0;
  ok(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  const int blocks = processors * 8;
  float* out = nullptr;
  ok(cudaMalloc(&out, sizeof(float) * static_cast<size_t>(blocks) * kThreads));
  // A warp's instruction is 2 x 16 x 8 x 16 (or 8) floating-point operations.
  const double bf16 = rate(mma_bf16, blocks, out, 2.0 * 16 * 8 * 16 / 32);
  const double tf32 = rate(mma_tf32, blocks, out, 2.0 * 16 * 8 * 8 / 32);
  const double exp = rate(exponentials, blocks, out, 1.0);
  std::printf("{\"mma bf16\": %.4g, \"mma tf32\": %.4g, \"exp\": %.4g}\n", bf16, tf32, exp);
  ok(cudaFree(out));
}

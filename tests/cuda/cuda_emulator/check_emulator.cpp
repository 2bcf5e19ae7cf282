// The emulator against its specification. Without an argument everything is run that must be right, or must be refused,
// under any build; `check_emulator NAME` runs one planted race, which a build with -fsanitize=thread must report, and
// `check_emulator list` names them.
#include <cstdio>
#include <cstring>
#include <string>

#include "cuda/device_shim.cuh"

static int passed = 0, failed = 0;
static void check(bool ok, const char* what) {
  ok ? ++passed : ++failed;
  if (!ok) printf("FAIL %s\n", what);
}
template <class F>
static void refuses(const char* what, const char* needle, dim3 block, size_t smem, F body) {
  try {
    emu::launch(1, block, smem, body);
    check(false, what);
  } catch (const emu::Error& e) {
    if (!strstr(e.what(), needle)) printf("  (%s)\n", e.what());
    check(strstr(e.what(), needle) != nullptr, what);
  }
}

// Fragment layouts written as thread/value strides into column-major matrices (the form CUTLASS' MMA traits use),
// so that this is a second source next to the row/column formulas of the PTX ISA that the emulator follows.
template <int K>
static int a_index(int lane, int i) {
  return K == 16 ? lane % 4 * 32 + lane / 4 + (i & 1) * 16 + (i >> 1 & 1) * 8 + (i >> 2) * 128
                 : lane % 4 * 16 + lane / 4 + (i & 1) * 8 + (i >> 1) * 64;
}
template <int K>
static int b_index(int lane, int i) {
  return K == 16 ? lane % 4 * 16 + lane / 4 + (i & 1) * 8 + (i >> 1) * 64 : lane % 4 * 8 + lane / 4 + i * 32;
}
static int c_index(int lane, int i) { return lane % 4 * 32 + lane / 4 + (i & 1) * 16 + (i >> 1) * 8; }

template <int K, class Put, class Run>
static void test_mma(const char* name, Put put, Run run) {
  float a[16 * K], b[8 * K], c[16 * 8], d[16 * 8];
  for (int i = 0; i < 16 * K; ++i) a[i] = float((i * 7 + 3) % 23 - 11);  // small integers: every sum is exact
  for (int i = 0; i < 8 * K; ++i) b[i] = float((i * 5 + 1) % 19 - 9);
  for (int i = 0; i < 128; ++i) c[i] = float(i % 13);
  emu::launch(1, 32, 0, [&] {
    int lane = threadIdx.x;
    uint32_t fa[4] = {}, fb[2] = {};
    float fc[4];
    for (int i = 0; i < K / 2; ++i) put(fa, i, a[a_index<K>(lane, i)]);
    for (int i = 0; i < K / 4; ++i) put(fb, i, b[b_index<K>(lane, i)]);
    for (int i = 0; i < 4; ++i) fc[i] = c[c_index(lane, i)];
    run(fc, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; ++i) d[c_index(lane, i)] = fc[i];
  });
  bool ok = true;
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      double want = c[m + 16 * n];
      for (int k = 0; k < K; ++k) want += double(a[m + 16 * k]) * b[n + 8 * k];
      ok &= d[m + 16 * n] == want;
    }
  }
  check(ok, name);
}
static void put16(uint32_t* f, int i, uint16_t h) { f[i / 2] |= uint32_t(h) << (16 * (i & 1)); }

static void run_all() {
  test_mma<16>(
      "mma bf16 layout", [](uint32_t* f, int i, float v) { put16(f, i, __float2bfloat16(v).bits); },
      [](float (&c)[4], uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_bf16(c, a, b0, b1); });
  test_mma<16>(
      "mma f16 layout", [](uint32_t* f, int i, float v) { put16(f, i, __float2half(v).bits); },
      [](float (&c)[4], uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_f16(c, a, b0, b1); });
  test_mma<8>(
      "mma tf32 layout", [](uint32_t* f, int i, float v) { f[i] = __float_as_uint(v); },
      [](float (&c)[4], uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_tf32(c, a, b0, b1); });

  // One and four times the same product: units of 2^-24 are added, what is smaller is cut off, whatever the sign.
  const float terms[] = {0x1p-24f, 0x1.8p-25f, -0x1p-24f, -0x1.8p-25f};
  float sums[4][4];
  emu::launch(1, 32, 0, [&] {
    const uint32_t a[4] = {__float_as_uint(1.f), 0, 0, 0};
    for (int i = 0; i < 4; ++i) {
      float c[4];
      for (float& v : c) v = i < 2 ? 1.f : -1.f;
      mma_tf32(c, a, __float_as_uint(terms[i]), 0);
      if (threadIdx.x == 0) std::memcpy(sums[i], c, sizeof c);
    }
  });
  check(sums[0][0] == 1.f + 0x1p-22f && sums[2][0] == -1.f - 0x1p-22f, "mma adds");
  check(sums[1][0] == 1.f && sums[3][0] == -1.f && sums[0][2] == 1.f, "mma cuts off");

  uint32_t plain[32][4], trans[32][4];
  emu::stats = {};
  emu::launch(1, 32, 1024, [&] {  // a 32 x 8 matrix of 16-bit numbers r * 8 + c, two barriers, then four 8x8 loads
    SHARED_CURSOR(smem);
    uint16_t* t = smem.take<uint16_t>(256);
    for (int c = 0; c < 8; ++c) t[threadIdx.x * 8 + c] = uint16_t(threadIdx.x * 8 + c);
    __syncwarp();
    ldmatrix_x4(plain[threadIdx.x], t + threadIdx.x * 8);
    ldmatrix_x4_trans(trans[threadIdx.x], t + threadIdx.x * 8);
  });
  bool ok = true;
  for (uint32_t l = 0; l < 32; ++l) {
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t e = i * 64 + l / 4 * 8 + l % 4 * 2, f = i * 64 + l % 4 * 16 + l / 4;
      ok &= plain[l][i] == (e | (e + 1) << 16) && trans[l][i] == (f | (f + 8) << 16);
    }
  }
  check(ok, "ldmatrix and .trans");
  check(emu::stats.ldmatrix == 8 && emu::stats.ldmatrix_phases == 8, "ldmatrix counted, no bank conflict");

  int x[64], dn[64], up[64], id[64], w8[64], half[64];
  unsigned bal[64];
  emu::launch(1, dim3(8, 8), 0, [&] {  // 8 x 8 threads: lane and warp follow the linear index
    int t = threadIdx.x + 8 * threadIdx.y, l = t % 32;
    x[t] = __shfl_xor_sync(emu_all, t, 5), dn[t] = __shfl_down_sync(emu_all, t, 3u),
    up[t] = __shfl_up_sync(emu_all, t, 3u);
    id[t] = __shfl_sync(emu_all, t, 9), w8[t] = __shfl_down_sync(emu_all, t, 2u, 8),
    bal[t] = __ballot_sync(emu_all, l % 3 == 0);
    half[t] = l < 16 ? __shfl_xor_sync(0xffffu, t, 1) : __shfl_xor_sync(0xffff0000u, t, 2);
  });
  ok = true;
  unsigned third = 0;
  for (int l = 0; l < 32; l += 3) third |= 1u << l;
  for (int t = 0; t < 64; ++t) {
    int l = t % 32, b = t - l;
    ok &= x[t] == b + (l ^ 5) && dn[t] == (l + 3 < 32 ? t + 3 : t) && up[t] == (l < 3 ? t : t - 3) && id[t] == b + 9 &&
          w8[t] == (l % 8 < 6 ? t + 2 : t) && bal[t] == third && half[t] == b + (l < 16 ? l ^ 1 : l ^ 2);
  }
  check(ok, "shuffles and votes");

  float total = 0;
  unsigned long long tickets = 0;
  emu::launch(dim3(3, 5), 70, 0,
              [&] { atomicAdd(&total, 1.f), atomicAdd(&tickets, 1ull); });  // 70: last warp is not full
  check(total == 3 * 5 * 70 && tickets == 3 * 5 * 70, "atomicAdd");

  unsigned poisoned = 0;
  emu::launch(4, 32, 128, [&] {
    SHARED_ARRAY(float, s, 32);
    SHARED_CURSOR(smem);
    int* d = smem.take<int>(32);
    atomicAdd(&poisoned, unsigned(s[threadIdx.x] != s[threadIdx.x] && d[threadIdx.x] == -1));
    s[threadIdx.x] = 1, d[threadIdx.x] = 1;
  });
  check(poisoned == 4 * 32, "shared memory starts poisoned in every block");

  refuses("barrier on two lines", "divergent __syncthreads", 64, 0, [] {
    if (threadIdx.x < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  });
  refuses("barrier that some skip", "deadlock", 64, 0, [] {
    if (threadIdx.x != 40) __syncthreads();
  });
  refuses("shuffle that some skip", "deadlock", 32, 0, [] {
    if (threadIdx.x != 7) __shfl_xor_sync(emu_all, 1, 1);
  });
  refuses("two collectives at once", "divergent warp collective", 32, 0, [] {
    if (threadIdx.x & 1) {
      __syncwarp();
    } else {
      __shfl_xor_sync(emu_all, 1, 1);
    }
  });
  refuses("lane outside its mask", "not in the mask", 32, 0, [] { __syncwarp(0xffffu); });
  refuses("shuffle from an absent lane", "not taking part", 32, 0, [] {
    if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, 20);
  });
  refuses("misaligned ldmatrix", "not 16-byte aligned", 32, 1024, [] {
    SHARED_CURSOR(m);
    uint32_t r[4];
    ldmatrix_x4(r, m.take<char>(1024) + 8);
  });
  refuses("ldmatrix outside shared", "not in shared memory", 32, 0, [] {
    alignas(16) char b[16] = {};
    uint32_t r[4];
    ldmatrix_x4(r, b);
  });
  refuses("too little dynamic shared", "dynamic shared memory", 32, 64, [] {
    SHARED_CURSOR(m);
    m.take<float>(17);
  });
}

// Planted races; the run's output is of no interest.
float out[128], in[512];
static const struct {
  const char* name;
  uint64_t seed;
  int blocks;
  void (*body)();
} races[] = {
    {"blocks", 0, 2, [] { out[threadIdx.x] = float(blockIdx.x); }},  // both blocks write
    {"warp", 0, 1,
     [] {  // a shuffle gathers the lanes but orders nothing
       SHARED_ARRAY(float, s, 64);
       s[threadIdx.x] = 1;
       __shfl_xor_sync(emu_all, 1, 1);
       out[threadIdx.x] = s[threadIdx.x ^ 1];
     }},
    {"atomic", 0, 1, [] { threadIdx.x ? (void)atomicAdd(out, 1.f) : (void)(out[0] = 0.f); }},
    {"read_write", 0, 1,
     [] {  // the read follows a barrier, the write does not
       SHARED_ARRAY(float, s, 64);
       __syncthreads();
       out[threadIdx.x] = s[63 - threadIdx.x];
       s[threadIdx.x] = 1;
       __syncthreads();
     }},
    {"cp_async_early", 1, 1,
     [] {  // lands in a buffer that others still read
       SHARED_ARRAY(float, s, 256);
       __syncthreads();
       out[threadIdx.x] = s[(63 - threadIdx.x) * 4];
       cp_async16(s + threadIdx.x * 4, in);
       __syncthreads();
     }},
    {"cp_async_late", 0, 1,
     [] {  // waited for after the barrier instead of before
       SHARED_ARRAY(float, s, 256);
       cp_async16(s + threadIdx.x * 4, in);
       cp_async_commit();
       __syncthreads();
       cp_async_wait<0>();
       out[threadIdx.x] = s[(63 - threadIdx.x) * 4];
     }},
    {"ldmatrix", 0, 1,
     [] {  // rows written by the other warp, no barrier
       SHARED_ARRAY(float, s, 256);
       uint32_t r[4];
       s[(63 - threadIdx.x) * 4] = 1;
       ldmatrix_x4(r, s + threadIdx.x * 4);
       out[threadIdx.x] = float(r[0]);
     }},
};

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  for (const auto& race : races) {
    if (wanted == "list") std::puts(race.name);
    if (wanted != race.name) continue;
    emu::seed = race.seed;
    emu::launch(race.blocks, 64, 0, race.body);
    std::printf("%g\n", out[0]);  // so that what the race is about is not optimised away
  }
  if (!wanted.empty()) return 0;
  for (emu::seed = 0; emu::seed < 6; ++emu::seed) run_all();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

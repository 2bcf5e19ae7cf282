// Where threads of the emulator meet or wait: barriers, warp collectives, cp.async, ldmatrix, mma.sync.
#pragma once
#include "emu_block.h"

namespace emu {

inline void sync_block(int line) {
  Quiet q;
  if (g.at_barrier && g.bar_line != line) {
    fail("divergent __syncthreads: line %d while other threads wait at line %d", line, g.bar_line);
  }
  g.bar_line = line;
  [[maybe_unused]] uint64_t* order =
      &g.bar_order[g.bar_gen & 1];  // two in turn: a slow waker must not see the next barrier
  EMU_TSAN(__tsan_release(order);)
  if (++g.at_barrier < g.threads) {
    wait_for("__syncthreads", line);
  } else {
    g.at_barrier = 0, ++g.bar_gen, ++stats.barriers;
    for (Warp& w : g.warps) w.runnable = w.lanes;
  }
  EMU_TSAN(__tsan_acquire(order);)
}
// Gathers the lanes of `mask`; the last to come runs op on all payloads. Without op it is __syncwarp and orders memory.
template <class P>
void warp_op(uint32_t mask, const char* what, int line, P& payload, void (*op)(P* const*, uint32_t)) {
  Quiet q;
  Fiber& f = *g.cur;
  Warp& w = g.warps[f.warp];
  mask &= w.lanes;
  if (!(mask >> f.lane & 1)) fail("%s at line %d: lane %d is not in the mask", what, line, f.lane);
  Meet& m = w.meet[__builtin_ctz(mask)];
  if (m.arrived && (m.mask != mask || m.line != line || std::strcmp(m.what, what))) {
    fail("divergent warp collective: %s at line %d while lanes wait in %s at line %d", what, line, m.what, m.line);
  }
  m.mask = mask, m.what = what, m.line = line, m.arrived |= 1u << f.lane, w.arg[f.lane] = &payload;
  [[maybe_unused]] uint64_t* order = op ? nullptr : &m.order[m.gen & 1];
  EMU_TSAN(if (order) __tsan_release(order);)
  if (m.arrived != mask) {
    wait_for(what, line);
  } else {
    if (op) op(reinterpret_cast<P* const*>(w.arg), mask);
    m.arrived = 0, ++m.gen, ++stats.warp_ops, w.runnable |= mask;
  }
  EMU_TSAN(if (order) __tsan_acquire(order);)
}
template <class T>
struct Exchange {
  T in, out;
  int src;
};
template <class T>
T exchange(uint32_t mask, T v, int src, const char* what, int line) {
  Exchange<T> e{v, v, src};
  warp_op<Exchange<T>>(mask, what, line, e, [](Exchange<T>* const* a, uint32_t m) {
    for (int l = 0; l < 32; ++l) {
      if (m >> l & 1) {
        if (!(m >> a[l]->src & 1)) fail("shuffle reads lane %d, which is not taking part", a[l]->src);
        a[l]->out = a[a[l]->src]->in;
      }
    }
  });
  return e.out;
}
inline uint32_t vote(uint32_t mask, bool p, int line) {
  uint32_t v = p;
  warp_op<uint32_t>(mask, "vote", line, v, [](uint32_t* const* a, uint32_t m) {
    uint32_t b = 0;
    for (int l = 0; l < 32; ++l) b |= m >> l & 1 ? *a[l] << l : 0;
    for (int l = 0; l < 32; ++l) {
      if (m >> l & 1) *a[l] = b;
    }
  });
  return v;
}
inline int lane() {
  Quiet q;
  return g.cur->lane;
}

// A real call, so that the sanitizers' interceptor sees it: GCC expands small memcpys after the TSan pass.
inline void* (*volatile copy_bytes)(void*, const void*, size_t) = &std::memcpy;
inline void land(const Copy& c) {  // counts as accesses of the issuing thread
  static const char zero[16] = {};
  if (c.valid) copy_bytes(c.dst, c.src, c.valid);
  if (c.valid < 16) copy_bytes(static_cast<char*>(c.dst) + c.valid, zero, 16 - c.valid);
}
inline void cp_wait(int keep) {  // lands everything but the newest `keep` groups
  auto due = [keep] {
    Quiet q;
    return !g.cur->copies.empty() && g.cur->copies.front().group < g.cur->group - keep;
  };
  auto pop = [] {
    Quiet q;
    Copy c = g.cur->copies.front();
    g.cur->copies.erase(g.cur->copies.begin());
    return c;
  };
  while (due()) land(pop());
}
struct Ldm {
  const void* row;
  uint32_t in[4], out[4];
};
struct Mma {
  uint32_t a[4], b[2];
  float c[4];
};
enum { kBf16, kF16, kTf32 };
template <int kType>
float element(const uint32_t* regs, int i) {                       // i-th element of a fragment
  if (kType == kTf32) return __uint_as_float(regs[i] & ~0x1fffu);  // the tensor core drops the low 13 bits
  uint16_t h = uint16_t(regs[i >> 1] >> (16 * (i & 1)));
  return kType == kBf16 ? __bfloat162float({h}) : __half2float({h});
}
// c + the sum of the products, as measured on tensor cores by others (Fasi et al., "Numerical behavior of NVIDIA tensor
// cores", 2021): terms are aligned to the largest, what lies below its 25 leading bits is cut off, and so is what lies
// below the 24 bits of the result. Always toward zero.
template <int kTerms>
float add_products(float c, const double* products) {
  double largest = std::fabs(double(c));
  bool finite = std::isfinite(c);
  for (int k = 0; k < kTerms; ++k) {
    finite &= std::isfinite(products[k]);
    largest = std::max(largest, std::fabs(products[k]));
  }
  if (!finite || largest == 0) {
    for (int k = 0; k < kTerms; ++k) c += float(products[k]);
    return c;
  }
  const uint64_t exponent = emu_bits<uint64_t>(largest) >> 52;
  const double to_units = emu_bits<double>((2046 + 24 - exponent) << 52);
  int64_t sum = int64_t(double(c) * to_units);
  for (int k = 0; k < kTerms; ++k) sum += int64_t(products[k] * to_units);
  const double result = double(sum) / to_units;
  const float f = float(result);
  if (std::isinf(f) || !(std::fabs(double(f)) > std::fabs(result))) return f;
  return emu_bits<float>(emu_bits<uint32_t>(f) - 1);
}
template <int kType>
void mma_op(Mma* const* p, uint32_t m) {  // fragment layouts: PTX ISA, m16n8k16 and m16n8k8 .tf32
  constexpr int K = kType == kTf32 ? 8 : 16;
  if (m != emu_all) fail("mma.sync needs all 32 lanes");
  float A[16][K], B[K][8];
  for (int l = 0; l < 32; ++l) {
    int r = l >> 2, t = l & 3;
    for (int i = 0; i < K / 2; ++i) {
      (kType == kTf32 ? A[r + 8 * (i & 1)][t + 4 * (i >> 1)]
                      : A[r + 8 * ((i >> 1) & 1)][2 * t + (i & 1) + 8 * (i >> 2)]) = element<kType>(p[l]->a, i);
    }
    for (int i = 0; i < K / 4; ++i) {
      B[kType == kTf32 ? t + 4 * i : 2 * t + (i & 1) + 8 * (i >> 1)][r] = element<kType>(p[l]->b, i);
    }
  }
  constexpr int kTerms = K / 2;  // added at a time
  for (int r = 0; r < 16; ++r) {
    for (int n = 0; n < 8; ++n) {
      double products[K];
      for (int k = 0; k < K; ++k) products[k] = double(A[r][k]) * double(B[k][n]);
      float& c = p[(r & 7) * 4 + n / 2]->c[(r >> 3) * 2 + (n & 1)];
      c = add_products<kTerms>(add_products<kTerms>(c, products), products + kTerms);
    }
  }
  ++stats.mma;
}
template <int kType>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line) {
  Mma p{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  warp_op<Mma>(emu_all, "mma.sync", line, p, &mma_op<kType>);
  for (int i = 0; i < 4; ++i) c[i] = p.c[i];
}
template <bool kTrans>
void ldm_op(Ldm* const* p, uint32_t m) {
  if (m != emu_all) fail("ldmatrix needs all 32 lanes");
  for (int i = 0; i < 4; ++i) {
    int use[8] = {};  // rows of one matrix in the same 16-byte bank group are served one after the other
    for (int r = 0; r < 8; ++r) ++use[reinterpret_cast<uintptr_t>(p[8 * i + r]->row) / 16 % 8];
    stats.ldmatrix_phases += *std::max_element(use, use + 8), ++stats.ldmatrix;
    auto half = [&](int r, int col) { return p[8 * i + r]->in[col / 2] >> (16 * (col & 1)) & 0xffffu; };
    for (int l = 0; l < 32; ++l) {
      p[l]->out[i] = kTrans ? half(l % 4 * 2, l / 4) | half(l % 4 * 2 + 1, l / 4) << 16 : p[8 * i + l / 4]->in[l % 4];
    }
  }
}
template <bool kTrans>
void ldm(uint32_t (&r)[4], const void* row, int line) {
  want_shared(row, "ldmatrix", line);
  Ldm p{row, {}, {}};
  copy_bytes(p.in, row, 16);
  warp_op<Ldm>(emu_all, "ldmatrix", line, p, &ldm_op<kTrans>);
  for (int i = 0; i < 4; ++i) r[i] = p.out[i];
}
template <class T>
EMU_NOTSAN inline void count(T& c) {
  ++c;
}
}  // namespace emu

// One struct for each element type: how tensor cores multiply two fragments of it in registers. An element must know
// nothing of tiles, reducers or memory.
//
// mma.sync multiplies A [16, K] with B [K, 8], where K elements take 32 bytes, in 16-bit types and in TF32. Of the
// accumulator, lane l holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and 2 (l % 4) + 1.
#pragma once
#include "device_shim.cuh"

namespace fastcl::cuda {

// Operands of the types that are multiplied as they are, without a split into parts.
struct Whole {
  static constexpr bool kSplit = false;
  struct Left {
    uint32_t high[4];
  };
  struct Right {
    uint32_t high[2];
  };
  static __device__ __forceinline__ Left left(const uint32_t (&a)[4]) { return {{a[0], a[1], a[2], a[3]}}; }
  static __device__ __forceinline__ Right right(uint32_t b0, uint32_t b1) { return {{b0, b1}}; }
};

// `weights` converts float32 weights into the left operand of the second product. Its arguments are the accumulators of
// two neighbouring groups of 8 columns, whose layout is already that of A.
template <uint32_t (*kPack)(float, float)>
struct SixteenBits : Whole {
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ Left weights(const float (&w)[4], const float (&next)[4]) {
    return {{kPack(w[0], w[1]), kPack(w[2], w[3]), kPack(next[0], next[1]), kPack(next[2], next[3])}};
  }
};

struct BFloat16 : SixteenBits<pack_bf16> {
  static constexpr int kHeadroom = 0;
  static constexpr bool kNarrow = false;
  static __device__ __forceinline__ void multiply(float (&c)[4], const Left& a, const Right& b) {
    mma_bf16(c, a.high, b.high[0], b.high[1]);
  }
};

// The smallest positive float16 is 6e-8. Weights in (0, 1] are therefore stored 2^kHeadroom times larger, and weights
// of unknown size in units chosen for each row (kNarrow).
struct Float16 : SixteenBits<pack_f16> {
  static constexpr int kHeadroom = 15;
  static constexpr bool kNarrow = true;
  static __device__ __forceinline__ void multiply(float (&c)[4], const Left& a, const Right& b) {
    mma_f16(c, a.high, b.high[0], b.high[1]);
  }
};

// float32 by one TF32 product: the tensor core uses 10 bits of the mantissa and ignores the others.
struct Tf32 : Whole {
  static constexpr int kBytes = 4;
  static constexpr int kHeadroom = 0;
  static constexpr bool kNarrow = false;
  static __device__ __forceinline__ void multiply(float (&c)[4], const Left& a, const Right& b) {
    mma_tf32(c, a.high, b.high[0], b.high[1]);
  }
};

// float32 by three TF32 products: x = high + low, and low * low is below float32's rounding. Tensor cores truncate
// their sums towards zero, an error that would accumulate; sums over more than one product are therefore made by
// ordinary additions, which round.
struct Float32 {
  static constexpr bool kSplit = true;
  static constexpr int kBytes = 4;
  static constexpr int kHeadroom = 0;
  static constexpr bool kNarrow = false;
  struct Left {
    uint32_t high[4], low[4];
  };
  struct Right {
    uint32_t high[2], low[2];
  };
  // The low part of an infinity is NaN, which makes every sum with it NaN.
  static __device__ __forceinline__ void split(uint32_t bits, uint32_t& high, uint32_t& low) {
    high = bits & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high));
  }
  static __device__ __forceinline__ Left left(const uint32_t (&a)[4]) {
    Left r;
    UNROLL for (int i = 0; i < 4; ++i) split(a[i], r.high[i], r.low[i]);
    return r;
  }
  static __device__ __forceinline__ Right right(uint32_t b0, uint32_t b1) {
    Right r;
    split(b0, r.high[0], r.low[0]);
    split(b1, r.high[1], r.low[1]);
    return r;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const Left& a, const Right& b) {
    float sum[4] = {};
    mma_tf32(sum, a.low, b.high[0], b.high[1]);
    mma_tf32(sum, a.high, b.low[0], b.low[1]);
    mma_tf32(sum, a.high, b.high[0], b.high[1]);
    UNROLL for (int i = 0; i < 4; ++i) c[i] += sum[i];
  }
};

}  // namespace fastcl::cuda

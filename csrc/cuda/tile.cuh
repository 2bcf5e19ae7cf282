// Tiles of rows in shared memory: how they get there and how tensor cores read them, as rows (similarities) and as
// columns (the second product). Rows are 16-byte aligned in global memory and zero beyond their features.
#pragma once
#include "element.cuh"

namespace fastcl::cuda {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// The 16-byte chunk is xor-ed with the row, so that eight neighbouring rows lie in eight different bank groups.
template <int kRowBytes>
__device__ __forceinline__ int swizzle(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Starts copying rows [first, first + kRows) of `count`; what lies outside arrives as zero.
template <int kRowBytes, int kRows>
__device__ __forceinline__ void load_rows(unsigned char* tile, const void* matrix, int64_t first, int64_t count,
                                          int row_bytes) {
  constexpr int kChunks = kRowBytes / 16, kPass = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kPass == 0, "a pass covers whole rows");
  const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks;
#ifdef FAULT_ROW_TAIL
  count += 1;
#endif
  const char* from = static_cast<const char*>(matrix) + (first + row) * row_bytes + chunk * 16;
  UNROLL for (int r = 0; r < kRows; r += kPass, from += kPass * row_bytes) {
    const bool inside = first + row + r < count && chunk * 16 < row_bytes;
#ifdef FAULT_SKIP_CHUNK
    if (chunk == kChunks - 1) continue;
#endif
    cp_async16(tile + swizzle<kRowBytes>(row + r, chunk), inside ? from : matrix, inside ? 16 : 0);
  }
}

// 16 rows from `row` on as the left operand, 32 bytes of features from `step` on.
template <class E, int kRowBytes>
__device__ __forceinline__ void left_rows(uint32_t (&a)[4], const unsigned char* tile, int row, int step) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, tile + swizzle<kRowBytes>(row + lane % 16, 2 * step + lane / 16));
}

// acc[f] += (rows of fragment f) (rows of tile)^T. ldmatrix moves a 4-byte element as two 16-bit halves, which gives
// just the fragments of TF32.
template <class E, int kRowBytes, int kFrag, int kCols, class LeftOf>
__device__ __forceinline__ void similarities(float (&acc)[kFrag][kCols][4], const unsigned char* tile,
                                             const LeftOf& left_of) {
  const int lane = threadIdx.x % 32;
  UNROLL for (int s = 0; s < kRowBytes / 32; ++s) {
    typename E::Left left[kFrag];
    UNROLL for (int f = 0; f < kFrag; ++f) left[f] = left_of(f, s);
    UNROLL for (int n = 0; n < kCols; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, tile + swizzle<kRowBytes>(n * 8 + lane % 8 + lane / 16 * 8, 2 * s + lane / 8 % 2));
#ifdef FAULT_FRAGMENT
      const typename E::Right first = E::right(b[0], b[1]), second = E::right(b[3], b[2]);
#else
      const typename E::Right first = E::right(b[0], b[1]), second = E::right(b[2], b[3]);
#endif
      UNROLL for (int f = 0; f < kFrag; ++f) {
        E::multiply(acc[f][n], left[f], first);
        E::multiply(acc[f][n + 1], left[f], second);
      }
    }
  }
}

// out[f] += weights[f] (rows of tile): the columns of the tile's matrix are the columns of the operand.
template <class E, int kRowBytes, int kFrag, int kCols, int kOuts>
__device__ __forceinline__ void weighted_sums(float (&out)[kFrag][kOuts][4], const float (&weights)[kFrag][kCols][4],
                                              const unsigned char* tile) {
  const int lane = threadIdx.x % 32;
  if constexpr (E::kBytes == 2) {
    UNROLL for (int s = 0; s < kCols; s += 2) {
      typename E::Left left[kFrag];
      UNROLL for (int f = 0; f < kFrag; ++f) left[f] = E::weights(weights[f][s], weights[f][s + 1]);
      UNROLL for (int n = 0; n < kOuts; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, tile + swizzle<kRowBytes>(s * 8 + lane % 16, n + lane / 16));
        const typename E::Right first = E::right(b[0], b[1]), second = E::right(b[2], b[3]);
        UNROLL for (int f = 0; f < kFrag; ++f) {
          E::multiply(out[f][n], left[f], first);
          E::multiply(out[f][n + 1], left[f], second);
        }
      }
    }
  } else {
    // A lane has the weights of columns 2q and 2q + 1 of eight, and the product asks for columns q and q + 4. Any order
    // of the columns will do that is the same on both sides: call 2q the q-th and 2q + 1 the (q + 4)-th. Reading every
    // other row also meets every bank once.
    const int group = lane / 4, quad = lane % 4;
    UNROLL for (int s = 0; s < kCols; ++s) {
      typename E::Left left[kFrag];
      UNROLL for (int f = 0; f < kFrag; ++f) {
        const float (&w)[4] = weights[f][s];
        const uint32_t a[4] = {__float_as_uint(w[0]), __float_as_uint(w[2]), __float_as_uint(w[1]),
                               __float_as_uint(w[3])};
        left[f] = E::left(a);
      }
      UNROLL for (int n = 0; n < kOuts; ++n) {
        const int row = s * 8 + 2 * quad, chunk = 2 * n + group / 4, word = group % 4 * 4;
        const uint32_t b0 = *reinterpret_cast<const uint32_t*>(tile + swizzle<kRowBytes>(row, chunk) + word);
        const uint32_t b1 = *reinterpret_cast<const uint32_t*>(tile + swizzle<kRowBytes>(row + 1, chunk) + word);
        const typename E::Right right = E::right(b0, b1);
        UNROLL for (int f = 0; f < kFrag; ++f) E::multiply(out[f][n], left[f], right);
      }
    }
  }
}

}  // namespace fastcl::cuda

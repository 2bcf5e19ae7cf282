// Tiles of rows in shared memory: how they are copied there, and how tensor cores read them, as rows (similarities) and
// as columns (the second product). In global memory, rows must be aligned to 16 bytes and zero beyond their features.
#pragma once
#include "element.cuh"

namespace fastcl::cuda {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// The byte at which a 16-byte chunk of a row lies. The xor puts the same chunk of eight neighbouring rows into eight
// different groups of banks.
template <int kRowBytes>
__device__ __forceinline__ int swizzle(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Where a lane reads its row, in pieces of 32 bytes. Piece i + 4 j lies at at[i] + 128 j: only four addresses are
// computed, the rest are constants added to them. The lane reads 16-byte half `half` of each piece of row `row`.
template <int kRowBytes>
struct LanePieces {
  int at[4];
  __device__ __forceinline__ LanePieces(int row, int half) {
    UNROLL for (int i = 0; i < 4; ++i) at[i] = swizzle<kRowBytes>(row, 2 * i + half);
  }
  __device__ __forceinline__ int operator()(int piece) const { return at[piece & 3] + (piece >> 2) * 128; }
};

// Starts copying rows [first, first + kRows) of a matrix of `count` rows. Rows beyond the matrix, and bytes beyond
// row_bytes, become zeros.
template <int kRowBytes, int kRows>
__device__ __forceinline__ void load_rows(unsigned char* tile, const void* matrix, int64_t first, int64_t count,
                                          int row_bytes) {
  constexpr int kChunks = kRowBytes / 16, kPass = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kPass == 0, "a pass covers whole rows");
  const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks;
#ifdef FAULT_ROW_TAIL
  count += 1;
#endif
  const int left = chunk * 16 < row_bytes ? static_cast<int>(min(count - first, static_cast<int64_t>(kRows))) - row : 0;
  const char* from = static_cast<const char*>(matrix) + (first + row) * row_bytes + chunk * 16;
  const int to = swizzle<kRowBytes>(row, chunk);
  UNROLL for (int r = 0; r < kRows; r += kPass) {
#ifdef FAULT_SKIP_CHUNK
    if (chunk == kChunks - 1) continue;
#endif
    // r is a multiple of kPass, above the bits of `row`: swizzle(row + r) is the swizzle of `row` xor that of r's low
    // bits.
    cp_async16(tile + (to ^ ((r & 7) << 4)) + r * kRowBytes, r < left ? from : matrix, r < left ? 16 : 0);
    from = opaque(from + kPass * row_bytes);
  }
}

// How the lanes of a warp read tiles as operands. Constructed once per kernel, to keep the addresses in registers.
template <class E, int kRowBytes>
struct Operands {
  static constexpr bool kShort = E::kBytes == 2;
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const LanePieces<kRowBytes> left{lane % 16, lane / 16};
  const LanePieces<kRowBytes> right{lane % 8 + lane / 16 * 8, lane / 8 % 2};
  const LanePieces<kRowBytes> values{kShort ? lane % 16 : 2 * quad, kShort ? lane / 16 : group / 4};

  // 16 rows of a tile as the left operand, 32 bytes of features from `step` on.
  __device__ __forceinline__ void rows(uint32_t (&a)[4], const unsigned char* rows, int step) const {
    ldmatrix_x4(a, rows + left(step));
  }

  // acc[f] += (rows of fragment f) (rows of tile)^T. ldmatrix moves 4-byte elements as two 16-bit halves, and the
  // result has the layout of TF32 fragments.
  template <int kFrag, int kCols, class LeftOf>
  __device__ __forceinline__ void similarities(float (&acc)[kFrag][kCols][4], const unsigned char* tile,
                                               const LeftOf& left_of) const {
    UNROLL for (int s = 0; s < kRowBytes / 32; ++s) {
      typename E::Left left[kFrag];
      UNROLL for (int f = 0; f < kFrag; ++f) left[f] = left_of(f, s);
      UNROLL for (int n = 0; n < kCols; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, tile + right(s) + n * 8 * kRowBytes);
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

  // out[f] += weights[f] (rows of tile).
  template <int kFrag, int kCols, int kOuts>
  __device__ __forceinline__ void weighted_sums(float (&out)[kFrag][kOuts][4], const float (&weights)[kFrag][kCols][4],
                                                const unsigned char* tile) const {
    if constexpr (kShort) {
      UNROLL for (int s = 0; s < kCols; s += 2) {
        typename E::Left left[kFrag];
        UNROLL for (int f = 0; f < kFrag; ++f) left[f] = E::weights(weights[f][s], weights[f][s + 1]);
        UNROLL for (int n = 0; n < kOuts; n += 2) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, tile + values(n / 2) + s * 8 * kRowBytes);
          const typename E::Right first = E::right(b[0], b[1]), second = E::right(b[2], b[3]);
          UNROLL for (int f = 0; f < kFrag; ++f) {
            E::multiply(out[f][n], left[f], first);
            E::multiply(out[f][n + 1], left[f], second);
          }
        }
      }
    } else {
      // Of eight columns, a lane has the weights of columns 2q and 2q + 1, but the product takes columns q and q + 4.
      // The order of the columns is free if both operands agree, so column 2q is taken as the q-th and 2q + 1 as the (q
      // + 4)-th. Reading every other row this way also touches every bank once.
      UNROLL for (int s = 0; s < kCols; ++s) {
        typename E::Left left[kFrag];
        UNROLL for (int f = 0; f < kFrag; ++f) {
          const float (&w)[4] = weights[f][s];
          const uint32_t a[4] = {__float_as_uint(w[0]), __float_as_uint(w[2]), __float_as_uint(w[1]),
                                 __float_as_uint(w[3])};
          left[f] = E::left(a);
        }
        UNROLL for (int n = 0; n < kOuts; ++n) {
          const int at = values(n) + group % 4 * 4;  // of row 2q; the chunk of row 2q + 1 differs in its last bit: ^ 16
          const unsigned char* rows = tile + s * 8 * kRowBytes;
          const uint32_t b0 = load_shared(rows + at);
          const uint32_t b1 = load_shared(rows + (at ^ 16) + kRowBytes);
          const typename E::Right right = E::right(b0, b1);
          UNROLL for (int f = 0; f < kFrag; ++f) E::multiply(out[f][n], left[f], right);
        }
      }
    }
  }
};

}  // namespace fastcl::cuda

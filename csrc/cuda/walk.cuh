// One walk over the similarity matrix, which is never stored: tiles of similarities become weights in registers, and
// the weights may be multiplied with the columns (attention with V = K). Forward and backward are the same walk with
// different reducers. The kernels in rows.cuh combine the results of the splits.
//
// One block has 4 warps of 16 * kFrag rows and walks kRows rows against one of gridDim.y runs of column tiles (a
// split). Two tiles of columns take turns in shared memory: one is copied while the other is multiplied.
#pragma once
#include "reducer.cuh"

namespace fastcl::cuda {

// Sizes of the walk for element E, up to kDim features, with (kOut) or without sums of weight * column.
template <class E, int kDim, bool kOut>
struct Tile {
  static constexpr int kRowBytes = kDim * E::kBytes;
  // Fragments of 16 rows for each warp. Two halve the reads of the columns, if the registers have room beside the sums.
  static constexpr int kFrag = !E::kSplit && kDim <= (kOut || E::kBytes == 4 ? 64 : 128) ? 2 : 1;
  static constexpr int kRows = 16 * kFrag * kWarps;
  static constexpr int kColumns = kDim == 256 || (kOut && (kFrag == 2 || (E::kSplit && kDim == 128))) ? 32 : 64;
  // Blocks that must fit a multiprocessor together, which limits the registers. With one fragment the compiler chooses
  // well without a limit (0).
  static constexpr int kMinBlocks = kFrag == 2 ? 2 : 0;
  // Whether rows are read from shared memory once and kept in registers, or read again for every tile.
  static constexpr bool kKeepRows = !E::kSplit && kFrag * kRowBytes <= (kOut ? 256 : 512);
  template <class R>
  static constexpr int shared_bytes() {
    return (kRows + 2 * kColumns) * kRowBytes + 2 * kColumns * static_cast<int>(sizeof(typename R::Column) + 4);
  }
};

__device__ __forceinline__ int tag_of_id(int64_t id) { return static_cast<int>(id ^ (id >> 32)); }

template <class E, int kDim, class R, bool kOut>
__global__ void __launch_bounds__(kThreads, Tile<E, kDim, kOut>::kMinBlocks) walk(WalkArgs p) {
  using T = Tile<E, kDim, kOut>;
  using Column = typename R::Column;
  constexpr int kRowBytes = T::kRowBytes, kFrag = T::kFrag, kColumns = T::kColumns, kCols = kColumns / 8;
  constexpr int kSteps = kRowBytes / 32;
  SHARED_CURSOR(shared);
  unsigned char* row_tile = shared.template take<unsigned char>(T::kRows * kRowBytes);
  unsigned char* column_tiles = shared.template take<unsigned char>(2 * kColumns * kRowBytes);
  Column* column_words = shared.template take<Column>(2 * kColumns);
  int* column_tags = shared.template take<int>(2 * kColumns);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * T::kRows;
  const int tiles = static_cast<int>((p.columns + kColumns - 1) / kColumns);
  const int begin = blockIdx.y * p.tiles_per_split, end = min(tiles, begin + p.tiles_per_split);
  const bool ids = p.row_id != nullptr;

  const auto load_tile = [&](int tile) {
    load_rows<kRowBytes, kColumns>(column_tiles + (tile & 1) * kColumns * kRowBytes, p.column_data,
                                   static_cast<int64_t>(tile) * kColumns, p.columns, p.row_bytes);
  };
  // The reducer's word and the tag of one column, read from global memory a tile ahead and stored for the block later.
  Column word = R::outside();
  int tag = 0;
  const auto read_words = [&](int tile) {
    const int64_t j = static_cast<int64_t>(tile) * kColumns + threadIdx.x;
#ifdef FAULT_TAIL
    const bool inside = threadIdx.x < kColumns && j <= p.columns;
#else
    const bool inside = threadIdx.x < kColumns && j < p.columns;
#endif
    word = inside ? R::column(p, j) : R::outside();
    tag = inside && ids ? tag_of_id(p.column_id[j]) : 0;
  };
  const auto store_words = [&](int tile) {
    if (threadIdx.x >= kColumns) return;
    column_words[(tile & 1) * kColumns + threadIdx.x] = word;
    if (ids) column_tags[(tile & 1) * kColumns + threadIdx.x] = tag;
  };

  load_rows<kRowBytes, T::kRows>(row_tile, p.row_data, first_row, p.rows, p.row_bytes);
  if (begin < end) {
    load_tile(begin);
    read_words(begin);
    store_words(begin);
  }
  cp_async_commit();

  // Row r of a lane (r = 0 .. 2 kFrag - 1) is half r % 2 of the accumulators of fragment r / 2.
  const auto row_of = [&](int r) { return first_row + (warp * kFrag + r / 2) * 16 + r % 2 * 8 + group; };
  R rows[2 * kFrag];
  int row_tag[2 * kFrag] = {};
  UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
    rows[r] = R(p, row_of(r));
    if (ids && row_of(r) < p.rows) row_tag[r] = tag_of_id(p.row_id[row_of(r)]);
  }
  const Operands<E, kRowBytes> operands;
  uint32_t kept[T::kKeepRows ? kFrag : 1][T::kKeepRows ? kSteps : 1][4];
  const auto left_of = [&](int f, int s) {
    if constexpr (T::kKeepRows) {
      return E::left(kept[f][s]);
    } else {
      uint32_t a[4];
      operands.rows(a, row_tile + (warp * kFrag + f) * 16 * kRowBytes, s);
      return E::left(a);
    }
  };
  float out[kFrag][kOut ? kDim / 8 : 1][4] = {};

  NO_UNROLL for (int next = begin; next < end; ++next) {
    const int tile = opaque(next);
#ifdef FAULT_WAR
    if (tile + 1 < end) load_tile(tile + 1);  // too early: others may still read that half
#endif
#ifndef FAULT_NO_WAIT
    cp_async_wait<0>();
#endif
#if defined(FAULT_DIVERGE)
    if (warp != 1 || tile != begin) __syncthreads();
#elif !defined(FAULT_NO_SYNC)
    __syncthreads();  // every thread sees this tile, and has finished reading the one that is overwritten next
#endif
    if (tile + 1 < end) {
#ifndef FAULT_WAR
      load_tile(tile + 1);
#endif
      read_words(tile + 1);
    }
    cp_async_commit();
    if constexpr (T::kKeepRows) {
      if (tile == begin) {
        UNROLL for (int f = 0; f < kFrag; ++f) {
          UNROLL for (int s = 0; s < kSteps; ++s) {
            operands.rows(kept[f][s], row_tile + (warp * kFrag + f) * 16 * kRowBytes, s);
          }
        }
      }
    }

    const unsigned char* columns = column_tiles + (tile & 1) * kColumns * kRowBytes;
    const Column* words = column_words + (tile & 1) * kColumns + 2 * quad;  // of columns 8 n + c
    float x[kFrag][kCols][4] = {};
    operands.similarities(x, columns, left_of);
    if (p.cap == nullptr) {
      UNROLL for (int n = 0; n < kCols; ++n) {
        UNROLL for (int c = 0; c < 2; ++c) {
          const Column w = words[n * 8 + c];
          UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
            float& v = x[r / 2][n][r % 2 * 2 + c];
            v = rows[r].logit(v, w);
          }
        }
      }
    } else {
      // Opaque, so that addresses by row are computed where they are read and hold no registers in the loop.
      const int own = opaque(warp * kFrag * 16 + group);
      UNROLL for (int n = 0; n < kCols; ++n) {
        UNROLL for (int c = 0; c < 2; ++c) {
          const Column w = words[n * 8 + c];
          const int64_t j = static_cast<int64_t>(tile) * kColumns + n * 8 + 2 * quad + c;
          UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
            float& v = x[r / 2][n][r % 2 * 2 + c];
            const int64_t query = R::kQueryRows ? first_row + own + r / 2 * 16 + r % 2 * 8 : j;
            const bool real = query < (R::kQueryRows ? p.rows : p.columns);
            v = real && rows[r].scaled(v, w) > p.cap[query] * kLog2e ? -kInfinity : rows[r].logit(v, w);
          }
        }
      }
    }
    if (tile + 1 == tiles) {
      // Overwrites the logits beyond the last column. Adding -inf would not do: an infinite row times the zeros of the
      // padding is NaN.
#ifdef FAULT_TAIL
      const int left = static_cast<int>(p.columns + 1 - static_cast<int64_t>(tile) * kColumns);
#else
      const int left = static_cast<int>(p.columns - static_cast<int64_t>(tile) * kColumns);
#endif
      UNROLL for (int n = 0; n < kCols; ++n) {
        UNROLL for (int c = 0; c < 2; ++c) {
          UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
            if (n * 8 + 2 * quad + c >= left) x[r / 2][n][r % 2 * 2 + c] = -kInfinity;
          }
        }
      }
    }
    if (ids) {
      // Exclusions are rare: tags are compared first, and ids only if a tag of the warp is equal.
      const int* tags = column_tags + (tile & 1) * kColumns + 2 * quad;
      bool meets = false;
      UNROLL for (int n = 0; n < kCols; ++n) {
        UNROLL for (int c = 0; c < 2; ++c) {
          UNROLL for (int r = 0; r < 2 * kFrag; ++r) meets |= tags[n * 8 + c] == row_tag[r];
        }
      }
      if (__any_sync(kAllLanes, meets)) {  // all lanes take the same branch: the products that follow need whole warps
        const int own = opaque(warp * kFrag * 16 + group);  // as for the cap
        UNROLL for (int n = 0; n < kCols; ++n) {
          UNROLL for (int c = 0; c < 2; ++c) {
            const int64_t j = static_cast<int64_t>(tile) * kColumns + n * 8 + 2 * quad + c;
            UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
              const int64_t i = first_row + own + r / 2 * 16 + r % 2 * 8;
              if (tags[n * 8 + c] == row_tag[r] && j < p.columns && i < p.rows && p.column_id[j] == p.row_id[i]) {
                x[r / 2][n][r % 2 * 2 + c] = -kInfinity;
              }
            }
          }
        }
      }
    }

    float rescale[2 * kFrag];
    R::template weigh<kFrag, kCols>(rows, x, words, rescale);
    if constexpr (kOut) {
      bool rescales = false;
      UNROLL for (int r = 0; r < 2 * kFrag; ++r) rescales |= rescale[r] != 1.f;
      if (__any_sync(kAllLanes, rescales)) {
        UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
          UNROLL for (int n = 0; n < kDim / 8; ++n) {
            UNROLL for (int c = 0; c < 2; ++c) out[r / 2][n][r % 2 * 2 + c] *= rescale[r];
          }
        }
      }
      operands.weighted_sums(out, x, columns);
    }
    if (tile + 1 < end) store_words(tile + 1);
  }

  UNROLL for (int r = 0; r < 2 * kFrag; ++r) {
    rows[r].finish();  // all lanes must call it, even those whose row does not exist
    if (row_of(r) >= p.rows) continue;
    const int64_t at = blockIdx.y * p.rows + row_of(r);
    if (quad == 0) rows[r].write(p, at);
    if constexpr (kOut) {
      float* to = p.out + at * p.features;
      UNROLL for (int n = 0; n < kDim / 8; ++n) {
        UNROLL for (int c = 0; c < 2; ++c) {
          const int d = n * 8 + 2 * quad + c;
          if (d < p.features) to[d] = out[r / 2][n][r % 2 * 2 + c] * rows[r].unit();
        }
      }
    }
  }
}

}  // namespace fastcl::cuda

// Divides a pass among threads and blocks of rows, and owns the buffers of each. Must not use torch (threads are passed
// in as a function) and does no arithmetic on similarities.
//
// A block of rows has a working set that stays in a core's second-level cache. Many rows are divided among the threads.
// With few rows the columns are divided instead, and the parts of a row are combined, so that a small batch against a
// large queue uses every core. Results depend on the number of threads, never on their timing.
#pragma once
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <unistd.h>
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "contrast.h"
#include "cpu/buffer.h"

namespace fastcl {

// Below this many floating-point operations a second thread costs more than it gains: starting a parallel region takes
// about 1.5 us.
constexpr int64_t kGrainFlops = 1 << 17;

inline int64_t grain(int64_t flops_per_unit) { return 1 + kGrainFlops / (flops_per_unit + 1); }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of second-level cache per core, taken to be between 512 KiB and 4 MiB.
inline int64_t cache_bytes() {
  static const int64_t bytes = [] {
    int64_t found = 0;
#if defined(__APPLE__)
    // Of the fast cores, several of which share one cache.
    int32_t sharing = 1;
    size_t size = sizeof found, size_of_sharing = sizeof sharing;
    if (sysctlbyname("hw.perflevel0.l2cachesize", &found, &size, nullptr, 0) != 0) found = 0;
    if (sysctlbyname("hw.perflevel0.cpusperl2", &sharing, &size_of_sharing, nullptr, 0) == 0 && sharing > 0) {
      found /= sharing;
    }
#elif defined(_SC_LEVEL2_CACHE_SIZE)
    found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return std::min<int64_t>(found >= (256 << 10) ? found : 512 << 10, 4 << 20);
  }();
  return bytes;
}

template <class T, class Parallel>
class Driver {
 public:
  // parallel(begin, end, grain, f) calls f(b, e) for ranges that cover [begin, end), on at most `threads` threads.
  Driver(const Kernels<T>& kernels, int64_t threads, const Parallel& parallel)
      : k_(kernels), threads_(threads), parallel_(parallel) {}

  void run(Pass<T> pass, Reduction<T> Kernels<T>::* reduction) const {
    std::atomic<bool> wild{!tame(pass)};
    pass.wild = &wild;
    if (!wild) walk_all(pass, k_.*reduction);
    if (wild) Driver(*k_.any, threads_, parallel_).run(pass, reduction);
  }

  // Whether the pass is large enough for `run_with_columns` to gain, and its weights small enough to be kept.
  bool can_keep(const Pass<T>& pass) const {
    return panels_of(pass) >= kLeastKeptPanels &&
           k_.least_kept_rows * panels_of(pass) * k_.panel_width * int64_t{sizeof(T)} <= k_.kept_bytes;
  }

  // A forward pass that also sums over rows, where share_ij is a weight as the reduction normalises it: exponentials are
  // divided by the sum of their row, sigmoids stay as they are.
  //   out[j]       = sum_i factor_i * share_ij * values_i
  //   out_extra[j] = sum_i extra_i * share_ij
  // factors(begin, end, factor, extra) must write the two factors of rows [begin, end); it is called when pass.reduced
  // of these rows is known.
  template <class Factors>
  void run_with_columns(Pass<T> pass, Reduction<T> Kernels<T>::* reduction, const Factors& factors, Matrix values,
                        T* out, T* out_extra) const {
    std::atomic<bool> wild{!tame(pass)};
    pass.wild = &wild;
    if (!wild) walk_keeping(pass, k_.*reduction, factors, values, out, out_extra);
    if (wild) {
      Driver(*k_.any, threads_, parallel_).run_with_columns(pass, reduction, factors, values, out, out_extra);
    }
  }

 private:
  static constexpr int64_t kLeastPanels = 8;      // of a thread's part, where columns are divided
  static constexpr int64_t kLeastKeptPanels = 2;  // the same where weights are kept: rows cannot be divided there
  static constexpr int64_t kMostRows = 384;       // of a block: more rows hardly reuse the cached values any better
  // Blocks of this many rows are worth their weights leaving the cache: each round of column sums is used enough.
  static constexpr int64_t kEnoughKeptRows = 256;

  // The row buffers of the parts of one block.
  class Rows {
   public:
    Rows(const Driver& driver, const Pass<T>& pass, int64_t tiles, int64_t parts)
        : tile_rows_(driver.k_.tile_rows),
          rows_(tiles * driver.k_.tile_rows),
          total_(pass.rows),
          stride_(pass.out.data != nullptr || pass.out_extra != nullptr
                      ? driver.k_.out_stride(pass.features + (pass.columns.extra != nullptr ? 1 : 0))
                      : 0),
          maximum_(parts * rows_),
          sum_(parts * rows_),
          out_(parts * rows_ * stride_) {}

    Part<T> part(int64_t g, int64_t tile_begin, int64_t tile_end, int64_t panel_begin, int64_t panel_end,
                 T* weights) const {
      return {tile_begin * tile_rows_,
              std::min(tile_end * tile_rows_, total_),
              panel_begin,
              panel_end,
              maximum_.get() + g * rows_,
              sum_.get() + g * rows_,
              stride_ != 0 ? out_.get() + g * rows_ * stride_ : nullptr,
              weights};
    }

   private:
    int64_t tile_rows_, rows_, total_, stride_;
    Buffer<T> maximum_, sum_, out_;
  };

  // Whether kernels with a restricted range can represent the shifts and factors. The data are checked when packed.
  bool tame(const Pass<T>& pass) const {
    if (k_.any == nullptr) return true;
    const Columns<T>& c = pass.columns;
    return tame_shift(c.shift, c.count) && tame_shift(pass.row_shift, pass.rows) &&
           tame_factor(pass.row_factor, pass.rows) && tame_factor(c.factor, c.count) &&
           tame_factor(c.value_factor, c.count);
  }

  static bool tame_shift(const T* x, int64_t count) {
    bool tame = true;
    for (int64_t i = 0; x != nullptr && i < count; ++i) tame &= x[i] < std::numeric_limits<T>::infinity();
    return tame;
  }

  static bool tame_factor(const T* x, int64_t count) {
    T most = 0;
    bool tame = true;
    for (int64_t i = 0; x != nullptr && i < count; ++i) {
      tame &= std::fabs(x[i]) <= T(0x1p60);
      most = std::max(most, std::fabs(x[i]));
    }
    return tame && (most == 0 || most >= T(0x1p-60));
  }

  int64_t panels_of(const Pass<T>& pass) const { return ceil_div(pass.columns.count, k_.panel_width); }

  // The number of row tiles of a block: their packed rows, sums and the weights of a strip fill half of the cache. Kept
  // weights, of `kept` panels, may fill the whole cache and more: with too few rows, adding to the column sums would
  // move more memory than the weights do.
  int64_t block_tiles(const Pass<T>& pass, int64_t kept) const {
    const int64_t columns = std::max(kept * k_.panel_width, k_.strip_columns);
    const int64_t per_row = (2 * pass.features + columns + 64) * int64_t{sizeof(T)};
    const int64_t least = kept != 0
                              ? std::min(k_.kept_bytes / (pass.columns.count * int64_t{sizeof(T)} + 1), kEnoughKeptRows)
                              : 8 * k_.tile_rows;
    const int64_t room = kept != 0 ? cache_bytes() : cache_bytes() / 2;
    const int64_t rows = std::clamp(room / per_row, std::min(least, kMostRows), kMostRows);
    return std::max<int64_t>(1, rows / k_.tile_rows);
  }

  Buffer<T> pack(const Pass<T>& pass) const {
    const int64_t size = k_.panel_elements(pass.features);
    Buffer<T> out(panels_of(pass) * size);
    parallel_(0, panels_of(pass), grain(k_.panel_width * pass.features * 8),
              [&](int64_t begin, int64_t end) { k_.pack_panels(pass, begin, end, out.get() + begin * size); });
    return out;
  }

  void walk_all(Pass<T> pass, const Reduction<T>& reduction) const {
    const int64_t tiles = ceil_div(pass.rows, k_.tile_rows), panels = panels_of(pass);
    const int64_t block = block_tiles(pass, 0);
    const int64_t flops = 4 * k_.tile_rows * pass.columns.count * pass.features;
    const int64_t useful = std::min(threads_, ceil_div(tiles * flops, kGrainFlops));
    // Columns are divided if there are too few rows to give each thread a block, and enough columns for each thread.
    const bool by_columns = useful > 1 && tiles < 2 * block * useful && panels >= useful * kLeastPanels;
    const bool packed_once = tiles > block || (!by_columns && useful > 1);
    const Buffer<T> packed = packed_once ? pack(pass) : Buffer<T>(0);
    pass.columns.panels = packed_once ? packed.get() : nullptr;
    if (by_columns) {
      for (int64_t begin = 0; begin < tiles; begin += block) {
        walk_by_columns(pass, reduction, begin, std::min(begin + block, tiles), useful, nullptr,
                        [](const std::vector<Part<T>>&) {});
      }
      return;
    }
    parallel_(0, tiles, grain(flops), [&](int64_t begin, int64_t end) {
      // Blocks of equal size: a short last block would reuse each panel less.
      const int64_t blocks = ceil_div(end - begin, block);
      const Rows rows(*this, pass, ceil_div(end - begin, blocks), 1);
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t from = begin + (end - begin) * i / blocks, to = begin + (end - begin) * (i + 1) / blocks;
        const Part<T> part = rows.part(0, from, to, 0, panels, nullptr);
        const Buffer<T> scratch(k_.scratch_elements(pass, part));
        reduction.walk(pass, part, scratch.get());
        reduction.combine(pass, &part, 1, part.row_begin, part.row_end);
      }
    });
  }

  template <class Factors>
  void walk_keeping(Pass<T> pass, const Reduction<T>& reduction, const Factors& factors, Matrix values, T* out,
                    T* out_extra) const {
    const int64_t tiles = ceil_div(pass.rows, k_.tile_rows), panels = panels_of(pass);
    const int64_t flops = 6 * pass.rows * pass.columns.count * pass.features;
    const int64_t parts = std::min({threads_, ceil_div(panels, kLeastKeptPanels), ceil_div(flops, kGrainFlops)});
    const int64_t blocks = ceil_div(tiles, block_tiles(pass, ceil_div(panels, parts)));
    const Buffer<T> packed = blocks > 1 ? pack(pass) : Buffer<T>(0);
    pass.columns.panels = blocks > 1 ? packed.get() : nullptr;
    const int64_t block_rows = ceil_div(tiles, blocks) * k_.tile_rows;
    const Buffer<T> weights(ceil_div(tiles, blocks) * panels * k_.cell_elements);
    const Buffer<T> sums(panels * k_.column_sum_elements(pass.features + (out_extra != nullptr ? 1 : 0)));
    const Buffer<T> factor(block_rows), extra(block_rows);
    for (int64_t i = 0; i < blocks; ++i) {
      const auto sum_columns = [&](const std::vector<Part<T>>& rows) {
        factors(rows[0].row_begin, rows[0].row_end, factor.get(), extra.get());
        parallel_(0, parts, 1, [&](int64_t from, int64_t to) {
          for (int64_t g = from; g < to; ++g) {
            sum_part(pass, rows[g], factor.get(), out_extra != nullptr ? extra.get() : nullptr, values, sums.get(),
                     i > 0);
          }
        });
      };
      walk_by_columns(pass, reduction, tiles * i / blocks, tiles * (i + 1) / blocks, parts, weights.get(), sum_columns);
      if (*pass.wild) return;
    }
    parallel_(0, panels, grain(k_.panel_width * pass.features * 8), [&](int64_t begin, int64_t end) {
      k_.write_column_sums(sums.get(), pass.columns.count, pass.features, begin, end, out, out_extra);
    });
  }

  // Walks one block of rows with its columns in `count` parts, combines the parts, and calls then(parts) while their
  // row buffers still exist.
  template <class Then>
  void walk_by_columns(const Pass<T>& pass, const Reduction<T>& reduction, int64_t tile_begin, int64_t tile_end,
                       int64_t count, T* weights, const Then& then) const {
    const int64_t panels = panels_of(pass), tiles = tile_end - tile_begin;
    const Rows rows(*this, pass, tiles, count);
    std::vector<Part<T>> parts;
    for (int64_t g = 0; g < count; ++g) {
      const int64_t from = panels * g / count, to = panels * (g + 1) / count;
      T* own = weights != nullptr ? weights + from * tiles * k_.cell_elements : nullptr;
      parts.push_back(rows.part(g, tile_begin, tile_end, from, to, own));
    }
    parallel_(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const Buffer<T> scratch(k_.scratch_elements(pass, parts[g]));
        reduction.walk(pass, parts[g], scratch.get());
      }
    });
    parallel_(parts[0].row_begin, parts[0].row_end, grain(4 * count * pass.features),
              [&](int64_t begin, int64_t end) { reduction.combine(pass, parts.data(), count, begin, end); });
    then(parts);
  }

  void sum_part(const Pass<T>& pass, const Part<T>& part, const T* factor, const T* extra, Matrix values, T* sums,
                bool add) const {
    const int64_t rows = ceil_div(part.row_end - part.row_begin, k_.tile_rows) * k_.tile_rows;
    const Buffer<T> own(2 * rows);
    for (int64_t r = 0; r < rows; ++r) {
      const bool real = part.row_begin + r < part.row_end;
      own[r] = real ? factor[r] * part.sum[r] : T(0);
      own[rows + r] = real && extra != nullptr ? extra[r] * part.sum[r] : T(0);
    }
    if (k_.any != nullptr && !tame_factor(own.get(), rows)) {
      *pass.wild = true;
      return;
    }
    const ColumnSums<T> columns{values, own.get(), extra != nullptr ? own.get() + rows : nullptr, sums, add};
    const Buffer<T> scratch(k_.column_scratch_elements(part, pass.features + (extra != nullptr ? 1 : 0)));
    k_.column_sums(pass, part, columns, scratch.get());
  }

  const Kernels<T>& k_;
  int64_t threads_;
  const Parallel& parallel_;
};

}  // namespace fastcl

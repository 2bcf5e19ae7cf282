// One pass over the similarity matrix: register tiles of similarities, turned into weights on the spot and multiplied
// with the columns' values before they leave the cache. The N x M matrix is never stored. Included once per instruction
// set, inside its namespace and target region; includes nothing, allocates nothing, starts no thread.
//
// Data flow, per thread and per block of rows:
//   rows      -> a       [tile][feature][row in tile]            loaded once
//   columns   -> panels  [panel][feature][column in panel]       packed once per call, shared by all threads
//   x = a * panel in registers -> reducer -> strip [tile][panel][row][column], a few hundred columns that stay in L2
//   out += strip * values, strip by strip

constexpr int64_t kTileRows = FASTCL_TILE_ROWS;  // with two vectors of columns, the tile that just fits the registers
constexpr int64_t kBlockRows = 96;               // rows per block: enough reuse of each panel
constexpr int64_t kStripColumns = 512;           // with kBlockRows, a strip of 192 KiB in float
constexpr int64_t kBlockTiles = kBlockRows / kTileRows;

template <class T>
using Tile = Vec<T>[kTileRows][2];

// The scratch memory of one thread.
template <class T>
struct Block {
  int64_t first, rows, tiles;  // rows [first, first + rows), the last tile padded
  T* a;
  T* strip;
  T* out;        // [kBlockRows][value_stride]
  T* sum;        // [kBlockRows][lanes], over finished strips
  T* strip_sum;  // the same over the present strip: two levels keep the rounding of long sums small
  T* maximum;    // [kBlockRows], what x is taken relative to
  T* shift;      // [kBlockRows]
  Tag<T>* tag;   // [kBlockRows]

  static int64_t elements(const Pass<T>& pass) {
    return kBlockRows * (pass.features + kStripColumns + pass.columns.value_stride + 2 * kLanes<T> + 3);
  }

  Block(const Pass<T>& pass, T* scratch) {
    const auto take = [&](int64_t per_row) {
      T* p = scratch;
      scratch += kBlockRows * per_row;
      return p;
    };
    a = take(pass.features);
    strip = take(kStripColumns);
    out = take(pass.columns.value_stride);
    sum = take(kLanes<T>);
    strip_sum = take(kLanes<T>);
    maximum = take(1);
    shift = take(1);
    tag = reinterpret_cast<Tag<T>*>(take(1));
  }

  T* cell(int64_t tile, int64_t panel) const {  // panel counts from the strip's first
    return strip + tile * kTileRows * kStripColumns + panel * kTileRows * kPanelWidth<T>;
  }
};

template <class T>
inline __attribute__((always_inline)) void multiply(const T* a, const T* panel, int64_t features, Tile<T>& x) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < kTileRows; ++r) x[r][0] = x[r][1] = Vec<T>{};
  for (int64_t d = 0; d < features; ++d) {
    const Vec<T> k0 = load(panel), k1 = load(panel + kLanes<T>);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      const Vec<T> q = splat(a[r]);
      x[r][0] += q * k0;
      x[r][1] += q * k1;
    }
    a += kTileRows;
    panel += kPanelWidth<T>;
  }
}

template <class T>
inline __attribute__((always_inline)) void load_tile(const T* from, Tile<T>& x) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < kTileRows; ++r) {
    x[r][0] = load(from + r * kPanelWidth<T>);
    x[r][1] = load(from + r * kPanelWidth<T> + kLanes<T>);
  }
}

template <class T>
inline __attribute__((always_inline)) void store_tile(T* to, const Tile<T>& x) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < kTileRows; ++r) {
    store(to + r * kPanelWidth<T>, x[r][0]);
    store(to + r * kPanelWidth<T> + kLanes<T>, x[r][1]);
  }
}

// Weights with a running maximum (forward). The maximum is raised lazily, only when a similarity exceeds it by 2^8:
// weights stay far from overflow and most tiles never touch it.
template <class T>
struct LogSumExp {
  static constexpr T kSlack = 8;

  static void start(const Pass<T>&, Block<T>& b) {
    for (int64_t i = 0; i < kBlockRows * kLanes<T>; ++i) b.sum[i] = b.strip_sum[i] = 0;
    // Finite, so that a first tile of nothing but -inf gives weights 0 and not NaN.
    for (int64_t i = 0; i < kBlockRows; ++i) b.maximum[i] = T(sizeof(T) == 4 ? -1e38 : -1e300);
  }

  static inline __attribute__((always_inline)) void weigh(const Pass<T>& pass, Block<T>& b, int64_t tile, int64_t panel,
                                                          Tile<T>& x) {
    const T* maximum = b.maximum + tile * kTileRows;
    uint32_t above = 0;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) above |= bits_greater(max<T>(x[r][0], x[r][1]), splat(maximum[r]) + kSlack);
    if (__builtin_expect(above != 0, 0)) {
      alignas(64) T copy[kTileRows * kPanelWidth<T>];
      store_tile<T>(copy, x);
      raise(pass, b, tile, panel, copy);
      load_tile<T>(copy, x);
    }
    T* sum = b.strip_sum + tile * kTileRows * kLanes<T>;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      const Vec<T> m = splat(maximum[r]);
      x[r][0] = exp2<T>(x[r][0] - m);
      x[r][1] = exp2<T>(x[r][1] - m);
      store(sum + r * kLanes<T>, load(sum + r * kLanes<T>) + (x[r][0] + x[r][1]));
    }
  }

  // Moves the maximum of each row that needs it and rescales what was summed relative to the old one.
  static __attribute__((noinline)) void raise(const Pass<T>& pass, Block<T>& b, int64_t tile, int64_t panel,
                                              const T* x) {
    for (int64_t r = 0; r < kTileRows; ++r) {
      const int64_t row = tile * kTileRows + r;
      T highest = b.maximum[row];
      for (int64_t c = 0; c < kPanelWidth<T>; ++c)
        highest = x[r * kPanelWidth<T> + c] > highest ? x[r * kPanelWidth<T> + c] : highest;
      if (!(highest > b.maximum[row] + kSlack)) continue;
      const T factor = std::exp2(b.maximum[row] - highest);
      b.maximum[row] = highest;
      for (int64_t i = 0; i < kLanes<T>; ++i) {
        b.sum[row * kLanes<T> + i] *= factor;
        b.strip_sum[row * kLanes<T> + i] *= factor;
      }
      if (pass.out.data == nullptr) continue;
      for (int64_t p = 0; p < panel; ++p) {
        T* weights = b.cell(tile, p) + r * kPanelWidth<T>;
        for (int64_t c = 0; c < kPanelWidth<T>; ++c) weights[c] *= factor;
      }
      T* out = b.out + row * pass.columns.value_stride;
      for (int64_t d = 0; d < pass.columns.value_stride; ++d) out[d] *= factor;
    }
  }

  static void end_strip(Block<T>& b) {
    for (int64_t i = 0; i < b.tiles * kTileRows * kLanes<T>; ++i) {
      b.sum[i] += b.strip_sum[i];
      b.strip_sum[i] = 0;
    }
  }

  static void finish(const Pass<T>& pass, Block<T>& b) {
    for (int64_t i = 0; i < b.rows; ++i) {
      const T sum = sum_lanes<T>(load(b.sum + i * kLanes<T>));
      pass.lse[b.first + i] = T((double(b.maximum[i]) + std::log2(double(sum))) * 0.693147180559945309417232121458);
      if (pass.out.data == nullptr) continue;
      const T inverse = sum == 0 ? T(0) : 1 / sum;
      T* out = b.out + i * pass.columns.value_stride;
      for (int64_t d = 0; d < pass.value_features; ++d) out[d] *= inverse;
    }
  }
};

// Weights relative to a known log-sum-exp, which the columns' shift carries (backward).
template <class T>
struct KnownSum {
  static void start(const Pass<T>&, Block<T>&) {}
  static inline __attribute__((always_inline)) void weigh(const Pass<T>&, Block<T>&, int64_t, int64_t, Tile<T>& x) {
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      x[r][0] = exp2<T>(x[r][0]);
      x[r][1] = exp2<T>(x[r][1]);
    }
  }
  static void end_strip(Block<T>&) {}
  static void finish(const Pass<T>&, Block<T>&) {}
};

template <class T>
void load_block(const Pass<T>& pass, Block<T>& b) {
  for (int64_t i = 0; i < b.tiles * kTileRows; ++i) {
    T* a = b.a + i / kTileRows * kTileRows * pass.features + i % kTileRows;
    const int64_t row = b.first + i;
    const bool real = i < b.rows;
    b.shift[i] = real && pass.row_shift != nullptr ? pass.row_shift[row] : T(0);
    b.tag[i] = real && pass.row_id != nullptr ? tag_of<T>(pass.row_id[row]) : 0;
    if (real) {
      const T factor = pass.row_factor != nullptr ? pass.row_factor[row] : T(1);
      with_row(pass.row_data, pass.features, row, [&](const auto* x) {
        for (int64_t d = 0; d < pass.features; ++d) a[d * kTileRows] = T(widen(x[d])) * factor;
      });
    } else {
      for (int64_t d = 0; d < pass.features; ++d) a[d * kTileRows] = 0;
    }
  }
}

// Tags met: compare the ids themselves and take the equal ones out.
template <class T>
__attribute__((noinline)) void exclude(const Pass<T>& pass, const Block<T>& b, int64_t tile, int64_t panel, T* x) {
  const int64_t first = panel * kPanelWidth<T>;
  const int64_t columns = pass.columns.count - first < kPanelWidth<T> ? pass.columns.count - first : kPanelWidth<T>;
  for (int64_t r = 0; r < kTileRows && tile * kTileRows + r < b.rows; ++r) {
    const int64_t id = pass.row_id[b.first + tile * kTileRows + r];
    for (int64_t c = 0; c < columns; ++c) {
      if (pass.columns.id[first + c] == id) x[r * kPanelWidth<T> + c] = -T(__builtin_huge_val());
    }
  }
}

template <class T>
inline __attribute__((always_inline)) void shift_and_exclude(const Pass<T>& pass, const Block<T>& b, int64_t tile,
                                                             int64_t panel, const T* column_shift, Tile<T>& x) {
  if (column_shift != nullptr) {
    const Vec<T> s0 = load(column_shift), s1 = load(column_shift + kLanes<T>);
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      x[r][0] += s0;
      x[r][1] += s1;
    }
  }
  if (pass.row_shift != nullptr) {
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      const Vec<T> s = splat(b.shift[tile * kTileRows + r]);
      x[r][0] += s;
      x[r][1] += s;
    }
  }
  if (pass.columns.tag != nullptr) {
    Mask<T> t0, t1;
    __builtin_memcpy(&t0, pass.columns.tag + panel * kPanelWidth<T>, sizeof t0);
    __builtin_memcpy(&t1, pass.columns.tag + panel * kPanelWidth<T> + kLanes<T>, sizeof t1);
    uint32_t met = 0;
#pragma GCC unroll 16
    for (int64_t r = 0; r < kTileRows; ++r) {
      const Mask<T> tag = b.tag[tile * kTileRows + r] - Mask<T>{};
      met |= bits_equal(t0, tag) | bits_equal(t1, tag);
    }
    if (__builtin_expect(met != 0, 0)) {
      alignas(64) T copy[kTileRows * kPanelWidth<T>];
      store_tile<T>(copy, x);
      exclude(pass, b, tile, panel, copy);
      load_tile<T>(copy, x);
    }
  }
}

// out += strip * values for one tile and `kVectors` vectors of features.
template <class T, int kVectors>
inline void accumulate(const T* strip, int64_t columns, const T* values, int64_t stride, T* out) {
  Vec<T> acc[kTileRows][kVectors] = {};
  for (int64_t first = 0; first < columns; first += kPanelWidth<T>) {
    const int64_t width = columns - first < kPanelWidth<T> ? columns - first : kPanelWidth<T>;
    for (int64_t c = 0; c < width; ++c) {
      Vec<T> v[kVectors];
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) v[i] = load(values + i * kLanes<T>);
#pragma GCC unroll 16
      for (int64_t r = 0; r < kTileRows; ++r) {
        const Vec<T> w = splat(strip[r * kPanelWidth<T> + c]);
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) acc[r][i] += w * v[i];
      }
      values += stride;
    }
    strip += kTileRows * kPanelWidth<T>;
  }
  for (int64_t r = 0; r < kTileRows; ++r) {
    for (int i = 0; i < kVectors; ++i)
      store(out + r * stride + i * kLanes<T>, load(out + r * stride + i * kLanes<T>) + acc[r][i]);
  }
}

template <class T>
void accumulate_strip(const Pass<T>& pass, Block<T>& b, int64_t first, int64_t columns) {
  const int64_t stride = pass.columns.value_stride;
  const T* values = pass.columns.values + first * stride;
  for (int64_t d = 0; d < stride; d += kPanelWidth<T>) {
    for (int64_t tile = 0; tile < b.tiles; ++tile) {
      T* out = b.out + tile * kTileRows * stride + d;
      if (stride - d >= kPanelWidth<T>) {
        accumulate<T, 2>(b.cell(tile, 0), columns, values + d, stride, out);
      } else {
        accumulate<T, 1>(b.cell(tile, 0), columns, values + d, stride, out);
      }
    }
  }
}

template <class T, class Reducer, bool kValues>
void run_block(const Pass<T>& pass, Block<T>& b) {
  constexpr int64_t W = kPanelWidth<T>;
  const Columns<T>& columns = pass.columns;
  const int64_t panels = (columns.count + W - 1) / W;
  alignas(64) T tail[W];
  for (int64_t c = 0; c < W; ++c) tail[c] = (panels - 1) * W + c < columns.count ? T(0) : -T(__builtin_huge_val());

  load_block(pass, b);
  Reducer::start(pass, b);
  if (kValues) {
    for (int64_t i = 0; i < b.tiles * kTileRows * columns.value_stride; ++i) b.out[i] = 0;
  }
  for (int64_t first = 0; first < columns.count; first += kStripColumns) {
    const int64_t count = columns.count - first < kStripColumns ? columns.count - first : kStripColumns;
    for (int64_t panel = first / W; panel < (first + count + W - 1) / W; ++panel) {
      const T* shift = columns.shift != nullptr          ? columns.shift + panel * W
                       : (panel + 1) * W > columns.count ? tail
                                                         : nullptr;
      for (int64_t tile = 0; tile < b.tiles; ++tile) {
        Tile<T> x;
        multiply<T>(b.a + tile * kTileRows * pass.features, columns.panels + panel * pass.features * W, pass.features,
                    x);
        shift_and_exclude<T>(pass, b, tile, panel, shift, x);
        Reducer::weigh(pass, b, tile, panel - first / W, x);
        if (kValues) store_tile<T>(b.cell(tile, panel - first / W), x);
      }
    }
    if (kValues) accumulate_strip(pass, b, first, count);
    Reducer::end_strip(b);
  }
  Reducer::finish(pass, b);
  if (!kValues) return;
  for (int64_t i = 0; i < b.rows; ++i) {
    const T* out = b.out + i * columns.value_stride;
    if (pass.out.data != nullptr) write_part(pass.out, (b.first + i) * pass.value_features, pass.value_features, out);
    if (pass.out_extra != nullptr) pass.out_extra[b.first + i] = out[pass.value_features];
  }
}

template <class T, class Reducer, bool kValues>
void run_tiles(const Pass<T>& pass, int64_t tile_begin, int64_t tile_end, T* scratch) {
  Block<T> b(pass, scratch);
  // Equal blocks: a short last one would reuse each panel less.
  const int64_t blocks = (tile_end - tile_begin + kBlockTiles - 1) / kBlockTiles;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = tile_begin + (tile_end - tile_begin) * i / blocks;
    const int64_t end = tile_begin + (tile_end - tile_begin) * (i + 1) / blocks;
    b.first = begin * kTileRows;
    b.tiles = end - begin;
    b.rows = (end * kTileRows < pass.rows ? end * kTileRows : pass.rows) - b.first;
    run_block<T, Reducer, kValues>(pass, b);
  }
}

template <class T>
void log_sum_exp(const Pass<T>& pass, int64_t tile_begin, int64_t tile_end, T* scratch) {
  if (pass.out.data != nullptr) {
    run_tiles<T, LogSumExp<T>, true>(pass, tile_begin, tile_end, scratch);
  } else {
    run_tiles<T, LogSumExp<T>, false>(pass, tile_begin, tile_end, scratch);
  }
}

template <class T>
void weighted_sum(const Pass<T>& pass, int64_t tile_begin, int64_t tile_end, T* scratch) {
  run_tiles<T, KnownSum<T>, true>(pass, tile_begin, tile_end, scratch);
}

template <class T>
constexpr Kernels<T> table() {
  return {kLanes<T>,      kTileRows,  kPanelWidth<T>, Block<T>::elements, pack_panels<T>,
          pack_values<T>, row_dot<T>, row_combine<T>, log_sum_exp<T>,     weighted_sum<T>};
}

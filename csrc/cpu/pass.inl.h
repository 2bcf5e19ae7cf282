// One pass over the similarity matrix: register tiles of similarities, turned into weights on the spot and multiplied
// with the columns' values before they leave the cache. The N x M matrix is never stored.
// Included once per instruction set, inside its namespace and target region; includes nothing, allocates nothing,
// starts no thread.
//
// Data flow, per thread and per block of rows:
//   rows      -> a       [tile][feature][row in tile]                  loaded once
//   columns   -> panels  [panel][feature][column in panel]             packed once per call, shared by all threads
//   values    -> v       [panel of features][column][feature in panel] one strip of columns at a time
//   x = a * panel in registers -> reducer -> strip [tile][panel][row][column], a strip of columns that stays in cache
//   out += strip * v, strip by strip

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

// One strip of values, in panels of features: contiguous, where rows of the matrix itself would collide in the cache.
template <class T>
void load_values(const Pass<T>& pass, Block<T>& b, int64_t first, int64_t columns) {
  constexpr int64_t W = kPanelWidth<T>;
  for (int64_t c = 0; c < columns; ++c) {
    const int64_t column = first + c;
    const T factor = pass.columns.value_factor != nullptr ? pass.columns.value_factor[column] : T(1);
    with_row(pass.columns.values, pass.features, column, [&](const auto* x) {
      int64_t d = 0;
      for (; d + W <= pass.features; d += W) {
        T* v = b.v + d * kStripColumns + c * W;
        for (int64_t i = 0; i < W; ++i) v[i] = T(widen(x[d + i])) * factor;
      }
      if (d == Block<T>::out_features(pass)) return;
      T* v = b.v + d * kStripColumns + c * W;
      for (int64_t i = 0; i < W; ++i) v[i] = d + i < pass.features ? T(widen(x[d + i])) * factor : T(0);
      if (pass.columns.extra != nullptr) v[pass.features - d] = pass.columns.extra[column];
    });
  }
}

// out += strip * v for one tile and one panel of features, of which kVectors vectors are used.
template <class T, int kVectors>
inline void accumulate(const T* strip, int64_t columns, const T* v, int64_t stride, T* out) {
  Vec<T> acc[kTileRows][kVectors] = {};
  for (int64_t first = 0; first < columns; first += kPanelWidth<T>) {
    const int64_t width = columns - first < kPanelWidth<T> ? columns - first : kPanelWidth<T>;
    for (int64_t c = 0; c < width; ++c) {
      Vec<T> value[kVectors];
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) value[i] = load(v + i * kLanes<T>);
#pragma GCC unroll 16
      for (int64_t r = 0; r < kTileRows; ++r) {
        const Vec<T> w = splat(strip[r * kPanelWidth<T> + c]);
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) acc[r][i] += w * value[i];
      }
      v += kPanelWidth<T>;
    }
    strip += kTileRows * kPanelWidth<T>;
  }
  for (int64_t r = 0; r < kTileRows; ++r) {
    for (int i = 0; i < kVectors; ++i) {
      T* to = out + r * stride + i * kLanes<T>;
      store(to, load(to) + acc[r][i]);
    }
  }
}

template <class T>
void accumulate_strip(const Pass<T>& pass, Block<T>& b, int64_t first, int64_t columns) {
  const int64_t stride = Block<T>::out_features(pass);
  const int64_t wanted = pass.features + (pass.columns.extra != nullptr ? 1 : 0);
  load_values(pass, b, first, columns);
  for (int64_t d = 0; d < wanted; d += kPanelWidth<T>) {
    for (int64_t tile = 0; tile < b.tiles; ++tile) {
      T* out = b.out + tile * kTileRows * stride + d;
      if (wanted - d > kLanes<T>) {
        accumulate<T, 2>(b.cell(tile, 0), columns, b.v + d * kStripColumns, stride, out);
      } else {
        accumulate<T, 1>(b.cell(tile, 0), columns, b.v + d * kStripColumns, stride, out);
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
    for (int64_t i = 0; i < b.tiles * kTileRows * Block<T>::out_features(pass); ++i) b.out[i] = 0;
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
      }
    }
    if (kValues) accumulate_strip(pass, b, first, count);
    Reducer::end_strip(b);
  }
  Reducer::finish(pass, b);
  if (!kValues) return;
  for (int64_t i = 0; i < b.rows; ++i) {
    const T* out = b.out + i * Block<T>::out_features(pass);
    if (pass.out.data != nullptr) write_part(pass.out, (b.first + i) * pass.features, pass.features, out);
    if (pass.out_extra != nullptr) pass.out_extra[b.first + i] = out[pass.features];
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

// With values where the caller wants them.
template <class T, template <class, bool> class Reducer>
void forward_pass(const Pass<T>& pass, int64_t tile_begin, int64_t tile_end, T* scratch) {
  if (pass.out.data != nullptr) {
    run_tiles<T, Reducer<T, true>, true>(pass, tile_begin, tile_end, scratch);
  } else {
    run_tiles<T, Reducer<T, false>, false>(pass, tile_begin, tile_end, scratch);
  }
}

template <class T>
constexpr Kernels<T> table() {
  return {kTileRows,
          kPanelWidth<T>,
          Block<T>::elements,
          pack_panels<T>,
          widen_vector<T>,
          row_dot<T>,
          row_combine<T>,
          forward_pass<T, LogSumExp>,
          run_tiles<T, KnownSum<T>, true>,
          forward_pass<T, SoftplusSum>,
          run_tiles<T, Sigmoid<T>, true>};
}

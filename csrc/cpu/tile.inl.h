// The register tile (kTileRows rows x two vectors of columns), its product loop, and the scratch memory of a thread's
// block of rows. Included once per instruction set, inside its namespace and target region; includes nothing.

constexpr int64_t kTileRows = FASTCL_TILE_ROWS;  // with two vectors of columns, the tile that just fits the registers
constexpr int64_t kBlockRows = 96;               // rows per block: enough reuse of each panel
constexpr int64_t kStripColumns = 256;           // with kBlockRows, a strip of 96 KiB in float
constexpr int64_t kBlockTiles = kBlockRows / kTileRows;

template <class T>
using Tile = Vec<T>[kTileRows][2];

// The scratch memory of one thread.
template <class T>
struct Block {
  int64_t first, rows, tiles;  // rows [first, first + rows), the last tile padded
  T* a;
  T* strip;
  T* v;
  T* out;        // [kBlockRows][out_features]
  T* sum;        // [kBlockRows][lanes], over finished strips
  T* strip_sum;  // the same over the present strip: two levels keep the rounding of long sums small
  T* maximum;    // [kBlockRows], what x is taken relative to
  T* shift;      // [kBlockRows]
  Tag<T>* tag;   // [kBlockRows]

  // Features of the values, with the extra one, filled up to whole panels.
  static int64_t out_features(const Pass<T>& pass) {
    const int64_t wanted = pass.features + (pass.columns.extra != nullptr ? 1 : 0);
    return (wanted + kPanelWidth<T> - 1) / kPanelWidth<T> * kPanelWidth<T>;
  }

  static int64_t elements(const Pass<T>& pass) {
    const int64_t per_row = pass.features + kStripColumns + out_features(pass) + 2 * kLanes<T> + 3;
    return kBlockRows * per_row + kStripColumns * out_features(pass);
  }

  Block(const Pass<T>& pass, T* scratch) {
    const auto take = [&](int64_t count) {
      T* p = scratch;
      scratch += count;
      return p;
    };
    v = take(kStripColumns * out_features(pass));
    strip = take(kBlockRows * kStripColumns);
    out = take(kBlockRows * out_features(pass));
    sum = take(kBlockRows * kLanes<T>);
    strip_sum = take(kBlockRows * kLanes<T>);
    a = take(kBlockRows * pass.features);
    maximum = take(kBlockRows);
    shift = take(kBlockRows);
    tag = reinterpret_cast<Tag<T>*>(take(kBlockRows));
  }

  T* cell(int64_t tile, int64_t panel) const {  // panel counts from the strip's first
    return strip + tile * kTileRows * kStripColumns + panel * kTileRows * kPanelWidth<T>;
  }
};

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

template <class T>
inline __attribute__((always_inline)) void add_tile(const T* from, Tile<T>& x) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < kTileRows; ++r) {
    x[r][0] += load(from + r * kPanelWidth<T>);
    x[r][1] += load(from + r * kPanelWidth<T> + kLanes<T>);
  }
}

template <class T>
inline __attribute__((always_inline)) void multiply_chunk(const T* a, const T* panel, int64_t features, Tile<T>& x) {
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

// Long rows are summed in chunks: one chain over a thousand features would round worse than the BLAS that users compare
// with.
template <class T>
inline __attribute__((always_inline)) void multiply(const T* a, const T* panel, int64_t features, Tile<T>& x) {
  constexpr int64_t kChunk = 256;
  multiply_chunk<T>(a, panel, features < kChunk ? features : kChunk, x);
  for (int64_t d = kChunk; d < features; d += kChunk) {
    alignas(64) T total[kTileRows * kPanelWidth<T>];
    store_tile<T>(total, x);
    multiply_chunk<T>(a + d * kTileRows, panel + d * kPanelWidth<T>, features - d < kChunk ? features - d : kChunk, x);
    add_tile<T>(total, x);
  }
}

// One walk over a part of the similarity matrix: computes tiles of similarities, turns each into weights at once, and
// multiplies the weights with the values of the columns while they are in cache. Weights are overwritten with every
// strip of columns unless the caller keeps them, so that the N x M matrix is never stored.
// Included once per instruction set, inside its namespace and target region; must not include, allocate or start
// threads.
//
// Data flow, per part (layouts: product.inl.h):
//   rows      -> packed rows    all rows of the part, once
//   columns   -> panels         once per call for all threads, or strip by strip if no other walk needs them
//   values    -> packed values  one strip of columns at a time
//   x = rows * panel, a tile at a time -> reducer -> weights of a strip, which stay in cache
//   out += weights * values, strip by strip

// Hands out pieces of a walk's scratch memory, each on a cache line of its own. With next = null it only counts.
template <class T>
struct Scratch {
  T* next;
  int64_t used = 0;
  T* take(int64_t count) {
    constexpr int64_t line = 64 / sizeof(T);
    const int64_t whole = (count + line - 1) / line * line;
    used += whole;
    T* p = next;
    if (p != nullptr) next += whole;
    return p;
  }
};

template <class P>
struct Memory : Walk<P> {
  using T = typename P::T;
  T *rows, *values, *panels, *shift, *factor, *cap, *limit, *strip;
  Tag<T>* tag;
  int64_t elements;

  // With scratch = null only `elements`, the number of elements of scratch needed, is meaningful.
  Memory(const Pass<T>& pass, const Part<T>& part, T* scratch) {
    Scratch<T> s{scratch};
    const int64_t features = pass.features + (pass.columns.extra != nullptr ? 1 : 0);
    this->tiles = (part.row_end - part.row_begin + P::kRows - 1) / P::kRows;
    this->stride = P::whole_panels(features);
    this->out = part.out;
    this->maximum = part.maximum;
    const int64_t count = this->tiles * P::kRows, panels_a_strip = P::kStrip / P::kColumns;
    const int64_t strips = (part.panel_end - part.panel_begin + panels_a_strip - 1) / panels_a_strip;
    rows = s.take(this->tiles * P::row_elements(pass.features));
    values = part.out != nullptr ? s.take(P::value_elements(P::kStrip, features)) : nullptr;
    panels = pass.columns.panels == nullptr ? s.take(panels_a_strip * P::panel_elements(pass.features)) : nullptr;
    strip = part.weights == nullptr ? s.take(panels_a_strip * this->tiles * P::kCell) : nullptr;
    this->sum = s.take(count * kLanes<T>);
    this->strip_sum = s.take(count * kLanes<T>);
    this->strip_maximum = part.weights != nullptr ? s.take(strips * count) : nullptr;
    shift = s.take(count);
    factor = s.take(count);
    cap = pass.row_cap != nullptr ? s.take(count) : nullptr;
    limit = P::kLimits && part.out != nullptr ? s.take(count) : nullptr;
    tag = reinterpret_cast<Tag<T>*>(s.take(count + kLanes<T>));  // see PanelColumns::meets
    elements = s.used;
  }
};

template <class P>
void load_rows(const Pass<typename P::T>& pass, const Part<typename P::T>& part, Memory<P>& w) {
  using T = typename P::T;
  for (int64_t tile = 0; tile < w.tiles; ++tile) {
    const int64_t first = part.row_begin + tile * P::kRows;
    const int64_t count = part.row_end - first < P::kRows ? part.row_end - first : P::kRows;
    const bool wild = P::pack_rows(pass.row_data, pass.row_factor, pass.features, first, count,
                                   w.rows + tile * P::row_elements(pass.features));
    if (wild) *pass.wild = true;
  }
  for (int64_t i = 0; i < w.tiles * P::kRows; ++i) {
    const int64_t row = part.row_begin + i;
    const bool real = row < part.row_end;
    w.shift[i] = real && pass.row_shift != nullptr ? pass.row_shift[row] : T(0);
    w.factor[i] = real && pass.row_factor != nullptr ? pass.row_factor[row] : T(1);
    if (w.cap != nullptr) w.cap[i] = real ? pass.row_cap[row] : T(0);
    w.tag[i] = real && pass.row_id != nullptr ? tag_of<T>(pass.row_id[row]) : 0;
  }
  __builtin_memset(w.tag + w.tiles * P::kRows, 0, kLanes<T> * sizeof(T));
}

// Sets to -inf the similarities of the columns whose id is the row's. `met` has a bit for each column of the panel
// whose tag is equal. Not inlined: equal tags are rare.
template <class T>
__attribute__((noinline)) void exclude(const Pass<T>& pass, int64_t row, int64_t first, uint64_t met, T* x) {
  for (; met != 0; met &= met - 1) {
    const int64_t c = __builtin_ctzll(met);
    if (first + c < pass.columns.count && pass.columns.id[first + c] == pass.row_id[row]) {
      x[c] = -T(__builtin_huge_val());
    }
  }
}

// The factors, shifts, caps and tags of one panel's columns, in vectors.
template <class P>
struct PanelColumns {
  using T = typename P::T;
  bool factors, shifts, tags, partial;
  bool special;  // something must be done to similarities before they are weighed, apart from tags
  Vec<T> factor[2] = {}, shift[2] = {}, cap[2] = {};
  Mask<T> beyond[2] = {};  // in a partial panel, the lanes beyond the last column
  Mask<T> tag[2];
  Mask<T> lowest = {}, highest = {};  // of the tags, in all lanes

  PanelColumns(const Pass<T>& pass, int64_t panel) {
    const Columns<T>& columns = pass.columns;
    const int64_t first = panel * P::kColumns, left = columns.count - first;
    factors = P::kRaw && columns.factor != nullptr;
    shifts = columns.shift != nullptr;
    tags = columns.tag != nullptr;
    partial = left < P::kColumns;
    special = factors || shifts || partial || pass.row_shift != nullptr;
    for (int i = 0; i < 2; ++i) {
      const int64_t at = first + i * kLanes<T>;
      if (factors) factor[i] = load_some<T>(columns.factor + at, left - i * kLanes<T>);
      if (tags) __builtin_memcpy(&tag[i], columns.tag + at, sizeof tag[i]);
      if (shifts) shift[i] = load(columns.shift + at);
      if (columns.cap != nullptr) cap[i] = load(columns.cap + at);
      for (int64_t c = 0; partial && c < kLanes<T>; ++c) beyond[i][c] = i * kLanes<T> + c < left ? 0 : -1;
    }
    if (!tags) return;
    Lane<T> low = tag[0][0], high = low;
    for (int64_t c = 0; c < P::kColumns; ++c) {
      const Lane<T> one = tag[c / kLanes<T>][c % kLanes<T>];
      low = one < low ? one : low;
      high = one > high ? one : high;
    }
    lowest = low - Mask<T>{};
    highest = high - Mask<T>{};
  }

  // Whether the tag of one of a tile's rows is that of one of the columns. Asked for all rows together, because tags are
  // rarely equal, and first whether one is between the lowest and the highest of the columns, because often the columns
  // are in the order of their ids. Reads a vector from the last row on.
  bool meets(const Tag<T>* rows) const {
    const Mask<T> all = ~Mask<T>{};
    uint32_t within = 0;
    for (int64_t r = 0; r < P::kRows; r += kLanes<T>) {
      Mask<T> tags;
      __builtin_memcpy(&tags, rows + r, sizeof tags);
      within |= bits_equal((Mask<T>)(tags >= lowest) & (Mask<T>)(tags <= highest), all);
    }
    if (within == 0) return false;
    Mask<T> equal = {};
    for (int64_t r = 0; r < P::kRows; ++r) {
      equal |= (Mask<T>)(tag[0] == rows[r] - Mask<T>{}) | (Mask<T>)(tag[1] == rows[r] - Mask<T>{});
    }
    return bits_equal(equal, all) != 0;
  }
};

// What may be done to the similarities of one row of a tile before they are weighed. kCap: the rows or the columns have
// caps.
template <class P, bool kCap>
inline __attribute__((always_inline)) void change_row(const Pass<typename P::T>& pass, const Part<typename P::T>& part,
                                                      const PanelColumns<P>& columns, const Memory<P>& w, int64_t row,
                                                      int64_t panel, Vec<typename P::T>& x0, Vec<typename P::T>& x1) {
  using T = typename P::T;
  if (columns.factors) {
    x0 *= columns.factor[0];
    x1 *= columns.factor[1];
  }
  Mask<T> above[2] = {};
  if constexpr (kCap) {
    above[0] = (Mask<T>)(x0 > (w.cap != nullptr ? splat(w.cap[row]) : columns.cap[0]));
    above[1] = (Mask<T>)(x1 > (w.cap != nullptr ? splat(w.cap[row]) : columns.cap[1]));
  }
  if (columns.shifts) {
    x0 += columns.shift[0];
    x1 += columns.shift[1];
  }
  if (pass.row_shift != nullptr) {
    const Vec<T> s = splat(w.shift[row]);
    x0 += s;
    x1 += s;
  }
  if (columns.partial) {  // adding -inf would not do: an infinite row times the zeros of the padding is NaN
    const Vec<T> out = splat(-T(__builtin_huge_val()));
    x0 = columns.beyond[0] ? out : x0;
    x1 = columns.beyond[1] ? out : x1;
  }
  if constexpr (kCap) {
    const Vec<T> out = splat(-T(__builtin_huge_val()));
    x0 = above[0] ? out : x0;
    x1 = above[1] ? out : x1;
  }
  if (columns.tags) {
    const Mask<T> tag = w.tag[row] - Mask<T>{};
    const uint64_t met = bits_equal(columns.tag[0], tag) | uint64_t{bits_equal(columns.tag[1], tag)} << kLanes<T>;
    if (__builtin_expect(met != 0, 0) && part.row_begin + row < part.row_end) {
      T x[P::kColumns];
      store(x, x0);
      store(x + kLanes<T>, x1);
      exclude(pass, part.row_begin + row, panel * P::kColumns, met, x);
      x0 = load(x);
      x1 = load(x + kLanes<T>);
    }
  }
}

template <class P>
void pack_panels(const Pass<typename P::T>& pass, int64_t panel_begin, int64_t panel_end, typename P::T* panels) {
  const auto& columns = pass.columns;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t first = panel * P::kColumns;
    const int64_t count = columns.count - first < P::kColumns ? columns.count - first : P::kColumns;
    const bool wild = P::pack_panel(columns.data, columns.factor, pass.features, first, count,
                                    panels + (panel - panel_begin) * P::panel_elements(pass.features));
    if (wild) *pass.wild = true;
  }
}

template <class T>
inline const T* offset(const T* p, int64_t by) {
  return p == nullptr ? nullptr : p + by;
}

template <class P, class Reducer, bool kCap = false>
void walk(const Pass<typename P::T>& pass, const Part<typename P::T>& part, typename P::T* scratch) {
  using T = typename P::T;
  constexpr int64_t W = P::kColumns, per_strip = P::kStrip / W;
  const Columns<T>& columns = pass.columns;

  Memory<P> w(pass, part, scratch);
  P::begin();
  load_rows<P>(pass, part, w);
  Reducer::start(w);
  if (part.out != nullptr) __builtin_memset(part.out, 0, w.tiles * P::kRows * w.stride * sizeof(T));
  for (int64_t first = part.panel_begin; first < part.panel_end; first += per_strip) {
    const int64_t end = first + per_strip < part.panel_end ? first + per_strip : part.panel_end;
    w.weights = part.weights != nullptr ? part.weights + (first - part.panel_begin) * w.tiles * P::kCell : w.strip;
    const T* panels = w.panels;
    if (columns.panels == nullptr) {
      pack_panels<P>(pass, first, end, w.panels);
    } else {
      panels = columns.panels + first * P::panel_elements(pass.features);
    }
    const int64_t row_elements = P::row_elements(pass.features), panel_elements = P::panel_elements(pass.features);
    P::issue(w.rows, panels, pass.features, [](int64_t, int64_t) {});
    for (int64_t panel = first; panel < end; ++panel) {
      const PanelColumns<P> known(pass, panel);
      const T* packed = panels + (panel - first) * panel_elements;
      for (int64_t tile = 0; tile < w.tiles; ++tile) {
        typename P::Result x;
        P::take(w.rows + tile * row_elements, packed, pass.features, x);
        const Cell<P> cell(w, tile, panel - first);
        const bool change = kCap || known.special || (known.tags && known.meets(w.tag + tile * P::kRows));
        const auto weigh_one = [&](int64_t r) __attribute__((always_inline)) {
          const int64_t row = tile * P::kRows + r;
          Vec<T> x0 = P::read(x, r, 0, w.factor[row]), x1 = P::read(x, r, 1, w.factor[row]);
          if (change) change_row<P, kCap>(pass, part, known, w, row, panel, x0, x1);
          Reducer::weigh(w, cell, r, x0, x1);
        };
        int64_t next = 0;
        const auto weigh_rows = [&](int64_t done, int64_t total) __attribute__((always_inline)) {
          if (total == 1) {  // a compile-time constant for products whose tile is in registers: the loop is unrolled
#pragma GCC unroll 16
            for (int64_t r = 0; r < P::kRows; ++r) weigh_one(r);
          } else {
            for (; next < P::kRows * done / total; ++next) weigh_one(next);
          }
        };
        // The next product is that of the next tile with this panel, or of the first tile with the next panel.
        const bool turn = tile + 1 == w.tiles;
        if (turn && panel + 1 == end) {
          weigh_rows(1, 1);
        } else {
          P::issue(turn ? w.rows : w.rows + (tile + 1) * row_elements, turn ? packed + panel_elements : packed,
                   pass.features, weigh_rows);
        }
      }
    }
    if (part.out != nullptr) {
      const int64_t last = end * W < columns.count ? end * W : columns.count, count = last - first * W;
      const bool wild =
          P::pack_values(columns.data, offset(columns.value_factor, first * W), offset(columns.extra, first * W),
                         pass.features, first * W, count, P::kStrip, w.values);
      if (wild) *pass.wild = true;
      if constexpr (P::kLimits) {
        for (int64_t i = 0; i < w.tiles * P::kRows; ++i) w.limit[i] = Reducer::limit(w, i);
      }
      P::accumulate(w.weights, w.tiles, count, w.values, pass.features, offset(columns.value_factor, first * W),
                    offset(columns.extra, first * W), w.limit, part.out);
    }
    Reducer::end_strip(w, (first - part.panel_begin) / per_strip);
  }
  Reducer::finish(w, part);
  P::end();
}

template <class P>
int64_t scratch_elements(const Pass<typename P::T>& pass, const Part<typename P::T>& part) {
  return Memory<P>(pass, part, nullptr).elements;
}

// Forward: weights are stored only if the part has sums over its columns or keeps weights for its rows.
template <class P, template <class, bool> class Reducer>
void walk_forward(const Pass<typename P::T>& pass, const Part<typename P::T>& part, typename P::T* scratch) {
  if (part.out != nullptr || part.weights != nullptr) {
    walk<P, Reducer<P, true>>(pass, part, scratch);
  } else {
    walk<P, Reducer<P, false>>(pass, part, scratch);
  }
}

// With caps there are copies of the loops, so that those without pay nothing for them. Softplus sums have no caps.
template <class P>
void walk_log_sum_exp(const Pass<typename P::T>& pass, const Part<typename P::T>& part, typename P::T* scratch) {
  if (pass.row_cap != nullptr) {
    walk<P, LogSumExp<P, true>, true>(pass, part, scratch);
  } else {
    walk_forward<P, LogSumExp>(pass, part, scratch);
  }
}

template <class P>
void walk_known_sum(const Pass<typename P::T>& pass, const Part<typename P::T>& part, typename P::T* scratch) {
  if (pass.columns.cap != nullptr) {
    walk<P, KnownSum<P>, true>(pass, part, scratch);
  } else {
    walk<P, KnownSum<P>>(pass, part, scratch);
  }
}

template <class P>
int64_t column_scratch_elements(const Part<typename P::T>& part, int64_t features) {
  const int64_t tiles = (part.row_end - part.row_begin + P::kRows - 1) / P::kRows;
  return P::column_scratch(tiles, features);
}

template <class P>
void column_sums(const Pass<typename P::T>& pass, const Part<typename P::T>& part,
                 const ColumnSums<typename P::T>& columns, typename P::T* scratch) {
  const int64_t tiles = (part.row_end - part.row_begin + P::kRows - 1) / P::kRows;
  const int64_t features = pass.features + (columns.extra != nullptr ? 1 : 0);
  P::begin();
  const bool wild = P::pack_column_values(columns.values, columns.factor, columns.extra, pass.features, part.row_begin,
                                          part.row_end - part.row_begin, tiles, scratch);
  if (wild) *pass.wild = true;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    P::sum_columns(part.weights + (panel - part.panel_begin) * tiles * P::kCell, part.row_end - part.row_begin, tiles,
                   scratch, pass.features, columns.factor, columns.extra, columns.add,
                   columns.sums + panel * P::column_sum_elements(features));
  }
  P::end();
}

template <class P>
void write_column_sums(const typename P::T* sums, int64_t columns, int64_t features, int64_t panel_begin,
                       int64_t panel_end, typename P::T* out, typename P::T* out_extra) {
  const int64_t size = P::column_sum_elements(features + (out_extra != nullptr ? 1 : 0));
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t first = panel * P::kColumns;
    const int64_t count = columns - first < P::kColumns ? columns - first : P::kColumns;
    P::write_sums(sums + panel * size, count, features, out + first * features,
                  out_extra != nullptr ? out_extra + first : nullptr);
  }
}

// `any`: see Kernels in contrast.h.
template <class P>
constexpr Kernels<typename P::T> table(const Kernels<typename P::T>* any = nullptr) {
  return {any,
          P::kRows,
          P::kColumns,
          P::kStrip,
          P::kCell,
          P::kLeastKeptRows,
          P::kKeptBytes,
          P::panel_elements,
          P::whole_panels,
          scratch_elements<P>,
          P::column_sum_elements,
          column_scratch_elements<P>,
          pack_panels<P>,
          widen_vector<typename P::T>,
          row_dot<typename P::T>,
          row_combine<typename P::T>,
          best_scratch_elements<P>,
          best_rows<P>,
          sum_rows<typename P::T>,
          read_late_rows<typename P::T>,
          step_adam_rows<typename P::T>,
          step_adagrad_rows<typename P::T>,
          {walk_log_sum_exp<P>, LogSumExp<P, true>::combine},
          {walk_known_sum<P>, KnownSum<P>::combine},
          {walk_forward<P, SoftplusSum>, SoftplusSum<P, true>::combine},
          {walk<P, Sigmoid<P>>, Sigmoid<P>::combine},
          column_sums<P>,
          write_column_sums<P>,
          both_rows<typename P::T>,
          both_columns<typename P::T>,
          both_weights<typename P::T>};
}

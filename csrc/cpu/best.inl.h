// The two loops of maxsim: which row of a matrix is most similar to each column, and sums of rows that a list names.
// Included once per instruction set, inside its namespace and target region; includes nothing.

// The larger of two similarities. The first of equal ones stays; NaN stays once it has come.
template <class T>
inline __attribute__((always_inline)) void keep_best(Vec<T> x, Lane<T> row, Vec<T>& best, Mask<T>& at) {
  const Mask<T> better = (Mask<T>)(x > best) | (Mask<T>)(x != x);
  best = better ? x : best;
  at = better ? row - Mask<T>{} : at;
}

template <class P>
int64_t best_scratch_elements(int64_t rows, int64_t features) {
  return (rows + P::kRows - 1) / P::kRows * P::row_elements(features);
}

// For each column of the part's panels, which are packed: the largest similarity to the rows of the part, and the row
// within the part that has it. -inf and -1 where no similarity is above -inf.
template <class P>
void best_rows(const Pass<typename P::T>& pass, const Part<typename P::T>& part, typename P::T* scratch,
               typename P::T* best, Tag<typename P::T>* at) {
  using T = typename P::T;
  constexpr int64_t L = kLanes<T>;
  const int64_t count = part.row_end - part.row_begin, tiles = (count + P::kRows - 1) / P::kRows;
  const int64_t row_elements = P::row_elements(pass.features), panel_elements = P::panel_elements(pass.features);
  const T* panels = pass.columns.panels;

  P::begin();
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = tile * P::kRows, some = count - first < P::kRows ? count - first : P::kRows;
    const bool wild = P::pack_rows(pass.row_data, nullptr, pass.features, part.row_begin + first, some,
                                   scratch + tile * row_elements);
    if (wild) *pass.wild = true;
  }
  if (tiles != 0) {
    P::issue(scratch, panels + part.panel_begin * panel_elements, pass.features, [](int64_t, int64_t) {});
  }
  for (int64_t panel = part.panel_begin; panel < part.panel_end; ++panel) {
    const T* packed = panels + panel * panel_elements;
    Vec<T> top[2];
    Mask<T> where[2];
    top[0] = top[1] = splat(-T(__builtin_huge_val()));
    where[0] = where[1] = Mask<T>{} - 1;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      typename P::Result x;
      P::take(scratch + tile * row_elements, packed, pass.features, x);
      const auto meet_one = [&](int64_t r) __attribute__((always_inline)) {
        const int64_t row = tile * P::kRows + r;
        if (row >= count) return;  // padding
        keep_best<T>(P::read(x, r, 0, T(1)), static_cast<Lane<T>>(row), top[0], where[0]);
        keep_best<T>(P::read(x, r, 1, T(1)), static_cast<Lane<T>>(row), top[1], where[1]);
      };
      int64_t next = 0;
      const auto meet_rows = [&](int64_t done, int64_t total) __attribute__((always_inline)) {
        if (total == 1) {  // as in `walk`: a tile in registers needs an unrolled loop
#pragma GCC unroll 16
          for (int64_t r = 0; r < P::kRows; ++r) meet_one(r);
        } else {
          for (; next < P::kRows * done / total; ++next) meet_one(next);
        }
      };
      const bool turn = tile + 1 == tiles;
      if (turn && panel + 1 == part.panel_end) {
        meet_rows(1, 1);
      } else {
        P::issue(turn ? scratch : scratch + (tile + 1) * row_elements, turn ? packed + panel_elements : packed,
                 pass.features, meet_rows);
      }
    }
    const int64_t first = (panel - part.panel_begin) * P::kColumns;
    for (int side = 0; side < 2; ++side) {
      store(best + first + side * L, top[side]);
      __builtin_memcpy(at + first + side * L, &where[side], sizeof where[side]);
    }
  }
  P::end();
}

// Row `to` of out: the sum over k < count of weight_k times row[k] of m.
template <class T>
void sum_rows(Matrix m, int64_t features, const int64_t* row, const T* weight, int64_t count, int64_t to,
              MutableMatrix out) {
  constexpr int64_t kVectors = 8, kChunk = kVectors * kLanes<T>;
  for (int64_t first = 0; first < features; first += kChunk) {
    const int64_t width = features - first < kChunk ? features - first : kChunk;
    Vec<T> sum[kVectors] = {};
    for (int64_t k = 0; k < count; ++k) {
      const Vec<T> w = splat(weight[k]);
      with_row(m, features, row[k], [&](const auto* x) {
        if (width == kChunk) {
#pragma GCC unroll 8
          for (int64_t i = 0; i < kVectors; ++i) sum[i] += w * load_as<T>(x + first + i * kLanes<T>);
        } else {
          for (int64_t i = 0; i * kLanes<T> < width; ++i) {
            sum[i] += w * load_some<T>(x + first + i * kLanes<T>, width - i * kLanes<T>);
          }
        }
      });
    }
    T values[kChunk];
    __builtin_memcpy(values, sum, sizeof values);
    write_part(out, to * features + first, width, values);
  }
}

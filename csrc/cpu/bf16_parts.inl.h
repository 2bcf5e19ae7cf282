// What the products by bfloat16 parts share (amx.inl.h, avx512_bf16.inl.h): the range of the data that they can represent,
// and the one more feature of the values, which is float32.
// Included once per instruction set, inside its namespace and target region; includes nothing.

// The largest magnitude met, as bits. Compared as integers, infinity and NaN exceed all finite magnitudes.
struct Range {
  Mask<float> most;
  Range() : most{} {}
  void meet(Vec<float> x) {
    const Mask<float> size = (Mask<float>)x & 0x7fffffff;
    most = size > most ? size : most;
  }
  bool wild() const {
    int32_t m = 0;
    for (int64_t i = 0; i < kLanes<float>; ++i) m = most[i] > m ? most[i] : m;
    return m != 0 && (m < (127 - 60) << 23 || m > (127 + 60) << 23);
  }
};

// out[row * stride] += the sum over the columns of weight * extra, for the rows of one tile. `next` is the distance between
// the weights of two panels.
template <class P>
void add_extra(const float* weights, int64_t next, int64_t columns, const float* extra, int64_t stride, float* out) {
  constexpr int64_t L = kLanes<float>, kPanels = P::kStrip / P::kColumns;
  static_assert(P::kColumns == 2 * L, "a row of a panel is two vectors");
  Vec<float> e[kPanels][2] = {};
  for (int64_t first = 0; first < columns; first += P::kColumns) {
    const int64_t left = columns - first;
    e[first / P::kColumns][0] = load_some<float>(extra + first, left);
    if (left > L) e[first / P::kColumns][1] = load_some<float>(extra + first + L, left - L);
  }
  for (int64_t r = 0; r < P::kRows; ++r) {
    Vec<float> sum = {};
    for (int64_t panel = 0; panel * P::kColumns < columns; ++panel) {
      const float* w = weights + panel * next + r * P::kColumns;
      sum += load(w) * e[panel][0] + load(w + L) * e[panel][1];
    }
    out[r * stride] += sum_lanes<float>(sum);
  }
}

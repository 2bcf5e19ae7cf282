// The two operations that amx.inl.h builds on: splitting float32 vectors into pairs of bfloat16 parts, and the product
// of two left and two right tiles. Must know nothing of rows, panels or weights.
// Included once, inside its namespace and target region; includes nothing.

// Inline assembly, because the compilers' intrinsics do not declare that they read and write memory.
#define FASTCL_TILE_ZERO(t) __asm__ volatile("tilezero %tmm" #t)
#define FASTCL_TILE_LOAD(t, from) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(from), "r"(int64_t{64}))
#define FASTCL_TILE_STORE(t, to) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(int64_t{64}) : "memory")
#define FASTCL_TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c)

constexpr int64_t kTileElements = 256;  // floats that take the memory of one tile (1024 bytes)

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

typedef uint32_t Bits __attribute__((vector_size(FASTCL_VECTOR_BYTES)));

// Splits two vectors into parts: lane i of out[part] holds the pair (a_i, b_i) with a in the low half. A third part is
// exact. kNearest: the other parts round to nearest (ties away), so that the second part is at most 2^-9 of the first;
// without, they are cut off, which takes two instructions less for each, and the second is below 2^-7 of the first.
template <int kParts, bool kNearest = true>
inline __attribute__((always_inline)) void split_pairs(Vec<float> a, Vec<float> b, float* out, int64_t step) {
#pragma GCC unroll 3
  for (int part = 0; part < kParts; ++part) {
    Bits pa = (Bits)a, pb = (Bits)b;
    if (part + 1 < kParts || kParts < 3) {
      pa = (pa + (kNearest ? 0x8000u : 0u)) & 0xffff0000u;
      pb = (pb + (kNearest ? 0x8000u : 0u)) & 0xffff0000u;
      a -= (Vec<float>)pa;
      b -= (Vec<float>)pb;
    }
    // The mask on pb: the last part of a number near the end of the range may have bits below a bfloat16's.
    store(out + part * step, (Vec<float>)(pa >> 16 | (pb & 0xffff0000u)));
  }
}

inline __attribute__((always_inline)) void store_tiles(float (&c)[4][kTileElements]) {
  FASTCL_TILE_STORE(0, c[0]);
  FASTCL_TILE_STORE(1, c[1]);
  FASTCL_TILE_STORE(2, c[2]);
  FASTCL_TILE_STORE(3, c[3]);
}

// Sums two left operands [step][part] times two right operands [step][part][side] over `count` steps and the pairs of
// parts that matter; the result for (left, side) stays in tile register 2 * left + side. `stride` is the distance of
// two steps of a left operand. between(done, total) is called after every four tile products. The tile unit works
// through its queue while the core runs other instructions, provided that these follow closely in the instruction
// stream: that is what `between` is for.
template <int kLeft, int kRight, class Between>
inline __attribute__((always_inline)) void product(const float* left0, const float* left1, int64_t stride,
                                                   const float* right, int64_t count, const Between& between) {
  static constexpr int kLeftPart[] = {0, 1, 2, 0, 1, 0}, kRightPart[] = {0, 0, 0, 1, 1, 2};
  __asm__ volatile("" ::: "memory");  // makes the compiler write the operands to memory before the tiles load them
  FASTCL_TILE_ZERO(0);
  FASTCL_TILE_ZERO(1);
  FASTCL_TILE_ZERO(2);
  FASTCL_TILE_ZERO(3);
  int64_t done = 0;
  constexpr int64_t kPairs = (kLeft < 3 ? kLeft : 3) + (kRight > 1 ? (kLeft < 2 ? kLeft : 2) : 0) + (kRight > 2);
  for (int64_t step = 0; step < count; ++step) {
    for (int i = 0; i < 6; ++i) {
      if (kLeftPart[i] >= kLeft || kRightPart[i] >= kRight) continue;
      if (kLeftPart[i] == 0) {
        FASTCL_TILE_LOAD(4, right + kRightPart[i] * 2 * kTileElements);
        FASTCL_TILE_LOAD(5, right + (kRightPart[i] * 2 + 1) * kTileElements);
      }
      FASTCL_TILE_LOAD(6, left0 + kLeftPart[i] * kTileElements);
      FASTCL_TILE_LOAD(7, left1 + kLeftPart[i] * kTileElements);
      FASTCL_TILE_MULTIPLY(0, 6, 4);
      FASTCL_TILE_MULTIPLY(1, 6, 5);
      FASTCL_TILE_MULTIPLY(2, 7, 4);
      FASTCL_TILE_MULTIPLY(3, 7, 5);
      between(++done, count * kPairs);
    }
    left0 += stride;
    left1 += stride;
    right += kRight * 2 * kTileElements;
  }
}

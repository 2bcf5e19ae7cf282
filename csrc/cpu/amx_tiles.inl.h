// What the AMX kernels ask of the tile unit: float32 as pairs of bfloat16 parts, and products of two by two tiles of them.
// Layouts and what is multiplied are amx.inl.h's business.
// Included once, inside its namespace and target region; includes nothing.

// Inline assembly, because the compiler's own macros do not say that they read and write memory.
#define FASTCL_TILE_ZERO(t) __asm__ volatile("tilezero %tmm" #t)
#define FASTCL_TILE_LOAD(t, from) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(from), "r"(int64_t{64}))
#define FASTCL_TILE_STORE(t, to) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(int64_t{64}) : "memory")
#define FASTCL_TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c)

constexpr int64_t kTileElements = 256;  // of a tile, as float

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

typedef uint32_t Bits __attribute__((vector_size(FASTCL_VECTOR_BYTES)));

// The parts of two vectors as pairs: lane i of out[part] holds (a_i, b_i) with a in the low half. Parts round to nearest
// (ties away), so the second is at most 2^-9 of the first; the third is exact.
template <int kParts>
inline __attribute__((always_inline)) void split_pairs(Vec<float> a, Vec<float> b, float* out, int64_t step) {
#pragma GCC unroll 3
  for (int part = 0; part < kParts; ++part) {
    Bits pa = (Bits)a, pb = (Bits)b;
    if (part + 1 < kParts || kParts < 3) {
      pa = (pa + 0x8000u) & 0xffff0000u;
      pb = (pb + 0x8000u) & 0xffff0000u;
      a -= (Vec<float>)pa;
      b -= (Vec<float>)pb;
    }
    // Masked again: what is left of a number near the end of the range has bits below a bfloat16's.
    store(out + part * step, (Vec<float>)(pa >> 16 | (pb & 0xffff0000u)));
  }
}

inline __attribute__((always_inline)) void store_tiles(float (&c)[4][kTileElements]) {
  FASTCL_TILE_STORE(0, c[0]);
  FASTCL_TILE_STORE(1, c[1]);
  FASTCL_TILE_STORE(2, c[2]);
  FASTCL_TILE_STORE(3, c[3]);
}

// Tiles 2 left + side: two left operands [step][part], `stride` from step to step, times right [step][part][side]; all
// pairs of parts that matter. between(done, total) is called after each four tile products: the tiles' unit works
// through those on its own, but only if what shall go on meanwhile comes soon enough in the stream of instructions.
template <int kLeft, int kRight, class Between>
inline __attribute__((always_inline)) void product(const float* left0, const float* left1, int64_t stride,
                                                   const float* right, int64_t count, const Between& between) {
  static constexpr int kLeftPart[] = {0, 1, 2, 0, 1, 0}, kRightPart[] = {0, 0, 0, 1, 1, 2};
  __asm__ volatile("" ::: "memory");  // what was written to the operands is in memory
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

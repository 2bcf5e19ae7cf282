// The vector type of one instruction set, and the operations that the compiler's vector extensions lack. Included once
// per instruction set, inside its namespace and target region; includes nothing.

template <class T>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(FASTCL_VECTOR_BYTES)));
  typedef int32_t lane;
  typedef int32_t mask __attribute__((vector_size(FASTCL_VECTOR_BYTES)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(FASTCL_VECTOR_BYTES)));
  typedef int64_t lane;
  typedef int64_t mask __attribute__((vector_size(FASTCL_VECTOR_BYTES)));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
using Lane = typename VecOf<T>::lane;
template <class T>
using Mask = typename VecOf<T>::mask;
template <class T>
constexpr int64_t kLanes = FASTCL_VECTOR_BYTES / sizeof(T);

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
inline void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}

template <class T>
inline Vec<T> splat(T x) {
  return x - Vec<T>{};
}

template <class T>
inline Vec<T> max(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

template <class T>
inline T sum_lanes(Vec<T> v) {
  T s = 0;
  for (int64_t i = 0; i < kLanes<T>; ++i) s += v[i];
  return s;
}

// One bit per lane in which the comparison holds. By intrinsics, because compilers reduce a lane mask with slow code.
#if FASTCL_VECTOR_BYTES == 64
inline uint32_t bits_greater(Vec<float> a, Vec<float> b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
}
inline uint32_t bits_greater(Vec<double> a, Vec<double> b) {
  return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GT_OQ);
}
inline uint32_t bits_equal(Mask<float> a, Mask<float> b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
inline uint32_t bits_equal(Mask<double> a, Mask<double> b) { return _mm512_cmpeq_epi64_mask((__m512i)a, (__m512i)b); }
#elif FASTCL_VECTOR_BYTES == 32
inline uint32_t bits_greater(Vec<float> a, Vec<float> b) { return _mm256_movemask_ps((__m256)(a > b)); }
inline uint32_t bits_greater(Vec<double> a, Vec<double> b) { return _mm256_movemask_pd((__m256d)(a > b)); }
inline uint32_t bits_equal(Mask<float> a, Mask<float> b) { return _mm256_movemask_ps((__m256)(a == b)); }
inline uint32_t bits_equal(Mask<double> a, Mask<double> b) { return _mm256_movemask_pd((__m256d)(a == b)); }
#elif defined(__aarch64__)
inline uint32_t bits_greater(Vec<float> a, Vec<float> b) {
  return vaddvq_u32((uint32x4_t)(a > b) & uint32x4_t{1, 2, 4, 8});
}
inline uint32_t bits_greater(Vec<double> a, Vec<double> b) {
  return uint32_t(vaddvq_u64((uint64x2_t)(a > b) & uint64x2_t{1, 2}));
}
inline uint32_t bits_equal(Mask<float> a, Mask<float> b) {
  return vaddvq_u32((uint32x4_t)(a == b) & uint32x4_t{1, 2, 4, 8});
}
inline uint32_t bits_equal(Mask<double> a, Mask<double> b) {
  return uint32_t(vaddvq_u64((uint64x2_t)(a == b) & uint64x2_t{1, 2}));
}
#else
template <class M>
inline uint32_t lane_bits(M m) {
  uint32_t bits = 0;
  for (uint64_t i = 0; i < sizeof(M) / sizeof(m[0]); ++i) bits |= uint32_t(m[i] != 0) << i;
  return bits;
}
inline uint32_t bits_greater(Vec<float> a, Vec<float> b) { return lane_bits(a > b); }
inline uint32_t bits_greater(Vec<double> a, Vec<double> b) { return lane_bits(a > b); }
inline uint32_t bits_equal(Mask<float> a, Mask<float> b) { return lane_bits(a == b); }
inline uint32_t bits_equal(Mask<double> a, Mask<double> b) { return lane_bits(a == b); }
#endif

// 2^f for |f| <= 1/2. float: a minimax polynomial that is exactly 1 at 0; its relative error is 2.6e-9 with the
// coefficients as printed and 1.6e-8 with the coefficients rounded to float. double: a Taylor polynomial with a
// relative error of 1.3e-19.
inline Vec<float> exp2_fraction(Vec<float> f) {
  Vec<float> p = splat(0.0001534581216f);
  p = p * f + 0.001339993118f;
  p = p * f + 0.009618488956f;
  p = p * f + 0.05550328777f;
  p = p * f + 0.2402264689f;
  p = p * f + 0.6931472057f;
  return p * f + 1.0f;
}

inline Vec<double> exp2_fraction(Vec<double> f) {
  constexpr double kLn2 = 0.693147180559945309417232121458;
  // Horner form of sum (f ln 2)^k / k!.
  const Vec<double> y = f * kLn2;
  Vec<double> p = splat(1.0);
  for (int k = 14; k > 0; --k) p = p * (y * (1.0 / k)) + 1.0;
  return p;
}

// 2^x. Results below the normal range are exactly 0: a masked column (x = -inf) adds nothing, and no subnormal number
// slows the products down. NaN stays NaN. 2^x must not overflow.
template <class T>
inline Vec<T> exp2(Vec<T> x) {
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr T kLowest = kSingle ? T(-126) : T(-1022);
  // 1.5 * 2^(mantissa bits): adding it rounds to an integer.
  constexpr T kRound = kSingle ? T(12582912) : T(6755399441055744);
  constexpr int kMantissa = kSingle ? 23 : 52;
  constexpr Lane<T> kBias = kSingle ? 127 : 1023;
  const Mask<T> under = x < kLowest;
  const Vec<T> rounded = (under ? splat(kLowest) : x) + kRound;
  const Vec<T> fraction = x - (rounded - kRound);
  const Vec<T> power = (Vec<T>)(((Mask<T>)rounded << kMantissa) + (kBias << kMantissa));
  return under ? Vec<T>{} : exp2_fraction(fraction) * power;
}

#if FASTCL_VECTOR_BYTES == 64
template <>
inline Vec<float> exp2<float>(Vec<float> x) {
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_maskz_roundscale_ps(normal, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (Vec<float>)_mm512_maskz_scalef_ps(normal, (__m512)exp2_fraction(x - (Vec<float>)whole), whole);
}
#endif

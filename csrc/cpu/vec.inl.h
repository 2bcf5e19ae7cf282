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

// The second if one of them is NaN.
template <class T>
inline Vec<T> max(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// By an intrinsic, because the compiler does not find the instruction where one operand is a constant.
#if FASTCL_VECTOR_BYTES == 32
template <>
inline Vec<float> max<float>(Vec<float> a, Vec<float> b) {
  return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
}
#endif

template <class T>
inline T sum_lanes(Vec<T> v) {
  T s = 0;
  for (int64_t i = 0; i < kLanes<T>; ++i) s += v[i];
  return s;
}

// Comparisons: whether one holds for any lane, or one bit per lane in which it holds. By intrinsics, because compilers
// reduce a lane mask with slow code.
#if FASTCL_VECTOR_BYTES == 64
inline bool any_greater(Vec<float> a, Vec<float> b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
}
inline bool any_greater(Vec<double> a, Vec<double> b) {
  return _mm512_cmp_pd_mask((__m512d)a, (__m512d)b, _CMP_GT_OQ) != 0;
}
inline uint32_t bits_equal(Mask<float> a, Mask<float> b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
inline uint32_t bits_equal(Mask<double> a, Mask<double> b) { return _mm512_cmpeq_epi64_mask((__m512i)a, (__m512i)b); }
#elif FASTCL_VECTOR_BYTES == 32
inline bool any_greater(Vec<float> a, Vec<float> b) {
  const __m256 greater = _mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ);
  return _mm256_testz_ps(greater, greater) == 0;
}
inline bool any_greater(Vec<double> a, Vec<double> b) {
  const __m256d greater = _mm256_cmp_pd((__m256d)a, (__m256d)b, _CMP_GT_OQ);
  return _mm256_testz_pd(greater, greater) == 0;
}
inline uint32_t bits_equal(Mask<float> a, Mask<float> b) { return _mm256_movemask_ps((__m256)(a == b)); }
inline uint32_t bits_equal(Mask<double> a, Mask<double> b) { return _mm256_movemask_pd((__m256d)(a == b)); }
#elif defined(__aarch64__)
inline bool any_greater(Vec<float> a, Vec<float> b) { return vmaxvq_u32((uint32x4_t)(a > b)) != 0; }
inline bool any_greater(Vec<double> a, Vec<double> b) { return vmaxvq_u32((uint32x4_t)(a > b)) != 0; }
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
inline bool any_greater(Vec<float> a, Vec<float> b) { return lane_bits(a > b) != 0; }
inline bool any_greater(Vec<double> a, Vec<double> b) { return lane_bits(a > b) != 0; }
inline uint32_t bits_equal(Mask<float> a, Mask<float> b) { return lane_bits(a == b); }
inline uint32_t bits_equal(Mask<double> a, Mask<double> b) { return lane_bits(a == b); }
#endif

// kTimes * 2^f for |f| <= 1/2. float: a minimax polynomial that is exactly 1 at 0; its relative error is 2.6e-9 with the
// coefficients as printed and 1.6e-8 with the coefficients rounded to float. double: a Taylor polynomial with a
// relative error of 1.3e-19.
template <int kTimes>
inline Vec<float> exp2_fraction(Vec<float> f) {
  Vec<float> p = splat(kTimes * 0.0001534581216f);
  p = p * f + kTimes * 0.001339993118f;
  p = p * f + kTimes * 0.009618488956f;
  p = p * f + kTimes * 0.05550328777f;
  p = p * f + kTimes * 0.2402264689f;
  p = p * f + kTimes * 0.6931472057f;
  return p * f + kTimes * 1.0f;
}

template <int kTimes>
inline Vec<double> exp2_fraction(Vec<double> f) {
  constexpr double kLn2 = 0.693147180559945309417232121458;
  // Horner form of sum (f ln 2)^k / k!.
  const Vec<double> y = f * kLn2;
  Vec<double> p = splat(1.0);
  for (int k = 14; k > 0; --k) p = p * (y * (1.0 / k)) + 1.0;
  return p * double(kTimes);
}

// 2^x. Results below about the lowest normal number are exactly 0: a masked column (x = -inf) adds nothing, and no
// subnormal number slows the products down. NaN stays NaN. 2^x must not overflow.
template <class T>
inline Vec<T> exp2(Vec<T> x) {
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr int kMantissa = kSingle ? 23 : 52;
  constexpr T kLowest = kSingle ? T(-126) : T(-1022);
  // Adding 1.5 * 2^(mantissa bits) rounds to an integer n. The rest is the exponent's bias less 1, so that the lowest
  // bits of the sum are the exponent of 2^(n - 1). Those of the lowest n are 0: its power is 0.
  constexpr T kRound = (kSingle ? T(12582912) : T(6755399441055744)) - kLowest;
  const Vec<T> bounded = max<T>(splat(kLowest), x);
  const Vec<T> rounded = bounded + kRound;
  const Vec<T> half = (Vec<T>)((Mask<T>)rounded << kMantissa);
  return exp2_fraction<2>(bounded - (rounded - kRound)) * half;
}

#if FASTCL_VECTOR_BYTES == 64
template <>
inline Vec<float> exp2<float>(Vec<float> x) {
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_maskz_roundscale_ps(normal, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (Vec<float>)_mm512_maskz_scalef_ps(normal, (__m512)exp2_fraction<1>(x - (Vec<float>)whole), whole);
}
#endif

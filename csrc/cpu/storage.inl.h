// Converts between the storage types (float32, float64, bfloat16, float16) and the compute types (float, double). All
// arithmetic elsewhere is on compute types. Included once per instruction set, inside its namespace and target region;
// includes nothing.

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }
inline void narrow(double x, float* out) { *out = float(x); }
inline void narrow(float x, double* out) { *out = x; }

inline void narrow(float x, BFloat16* out) {
  const uint32_t bits = bits_of(x);
  // Rounds to nearest even. NaN is treated apart: rounding could carry its bits over into those of infinity.
  out->bits = x != x ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if FASTCL_VECTOR_BYTES >= 32
inline float widen(Float16 x) { return _cvtsh_ss(x.bits); }
inline void narrow(float x, Float16* out) { out->bits = _cvtss_sh(x, 0); }
#elif defined(__aarch64__)
inline float widen(Float16 x) {
  __fp16 half;
  __builtin_memcpy(&half, &x, sizeof half);
  return half;
}
inline void narrow(float x, Float16* out) {
  const __fp16 half = x;
  __builtin_memcpy(out, &half, sizeof half);
}
#else
inline float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t rest = uint32_t(x.bits & 0x7fff) << 13;
  if (rest >= 0x0f800000) return float_of(sign | 0x7f800000 | rest);  // infinity and NaN
  // Scaling by 2^112 moves the exponent bias and normalises subnormals in one step.
  return float_of(bits_of(float_of(rest) * 0x1p112f) | sign);
}

inline void narrow(float x, Float16* out) {
  const uint32_t bits = bits_of(x);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    out->bits = sign | 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520 and above round to infinity
    out->bits = sign | 0x7c00;
  } else if (magnitude < 0x38800000) {
    // Below 2^-14 the result is subnormal: adding 1/2 aligns its last bit with that of the float, and rounds.
    out->bits = sign | uint16_t(bits_of(float_of(magnitude) + 0.5f) - 0x3f000000);
  } else {
    out->bits = sign | uint16_t((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
  }
}
#endif

inline void narrow(double x, BFloat16* out) { narrow(float(x), out); }
inline void narrow(double x, Float16* out) { narrow(float(x), out); }

// Loads one vector of elements of any storage type as compute type.
template <class T, class S>
inline Vec<T> load_as(const S* x) {
  T wide[kLanes<T>];
  for (int64_t i = 0; i < kLanes<T>; ++i) wide[i] = T(widen(x[i]));
  return load(wide);
}
template <>
inline Vec<float> load_as<float>(const float* x) {
  return load(x);
}
template <>
inline Vec<double> load_as<double>(const double* x) {
  return load(x);
}
#if FASTCL_VECTOR_BYTES == 64
template <>
inline Vec<float> load_as<float>(const Float16* x) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
#elif FASTCL_VECTOR_BYTES == 32
template <>
inline Vec<float> load_as<float>(const Float16* x) {
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
#elif defined(__aarch64__)
template <>
inline Vec<float> load_as<float>(const Float16* x) {
  return (Vec<float>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&x->bits)));
}
template <>
inline Vec<float> load_as<float>(const BFloat16* x) {
  return (Vec<float>)vshlq_n_u32(vmovl_u16(vld1_u16(&x->bits)), 16);
}
#endif

// Loads the first `count` elements and fills the other lanes with zeros; does not read beyond them.
template <class T, class S>
inline Vec<T> load_some(const S* x, int64_t count) {
  if (count >= kLanes<T>) return load_as<T>(x);
  T wide[kLanes<T>] = {};
  for (int64_t i = 0; i < count; ++i) wide[i] = T(widen(x[i]));
  return load(wide);
}

// Calls f with a typed pointer to row `row` of the matrix.
template <class F>
inline void with_row(Matrix m, int64_t features, int64_t row, const F& f) {
  switch (m.dtype) {
    case DType::kFloat32:
      return f(static_cast<const float*>(m.data) + row * features);
    case DType::kFloat64:
      return f(static_cast<const double*>(m.data) + row * features);
    case DType::kBFloat16:
      return f(static_cast<const BFloat16*>(m.data) + row * features);
    case DType::kFloat16:
      return f(static_cast<const Float16*>(m.data) + row * features);
  }
}

// Writes `count` values to the matrix from element `first` on.
template <class T>
inline void write_part(MutableMatrix m, int64_t first, int64_t count, const T* values) {
  const auto write = [&](auto* out) {
    for (int64_t i = 0; i < count; ++i) narrow(values[i], out + first + i);
  };
  switch (m.dtype) {
    case DType::kFloat32:
      return write(static_cast<float*>(m.data));
    case DType::kFloat64:
      return write(static_cast<double*>(m.data));
    case DType::kBFloat16:
      return write(static_cast<BFloat16*>(m.data));
    case DType::kFloat16:
      return write(static_cast<Float16*>(m.data));
  }
}

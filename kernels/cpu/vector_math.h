// Sixteen floats at a time: AVX-512 where the compiler targets it, plain loops that it can vectorise elsewhere.
//
// Owns arithmetic on registers and nothing else. Everything is inline; the extension is compiled on the machine it runs on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PAGEDD_AVX512 1
#include <immintrin.h>
#endif

namespace pagedd::cpu {

constexpr int kLanes = 16;

#if PAGEDD_AVX512

struct Vec {
  __m512 v;
  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec all(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_half(const uint16_t* p) {  // IEEE float16
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float max() const { return _mm512_reduce_max_ps(v); }
};
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_power_of_two(Vec a, Vec exponent) { return {_mm512_scalef_ps(a.v, exponent.v)}; }

#else

struct Vec {
  float v[kLanes];
  static Vec all(float x) {
    Vec r;
    for (float& lane : r.v) lane = x;
    return r;
  }
  static Vec zero() { return all(0.0f); }
  static Vec load(const float* p) {
    Vec r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static Vec load_half(const uint16_t* p) {
    Vec r;
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t sign = uint32_t(p[i] & 0x8000) << 16, magnitude = p[i] & 0x7fff;
      // Rebias the exponent by multiplication: subnormal halves come out right as well.
      uint32_t bits = magnitude << 13;
      float value;
      std::memcpy(&value, &bits, 4);
      value *= 0x1p112f;
      std::memcpy(&bits, &value, 4);
      bits |= sign;
      std::memcpy(&r.v[i], &bits, 4);
    }
    return r;
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  float sum() const {
    float s = 0;
    for (float lane : v) s += lane;
    return s;
  }
  float max() const {
    float m = v[0];
    for (float lane : v) m = lane > m ? lane : m;
    return m;
  }
};
#define PAGEDD_LANEWISE(signature, expression)            \
  inline Vec signature {                                  \
    Vec r;                                                \
    for (int i = 0; i < kLanes; ++i) r.v[i] = expression; \
    return r;                                             \
  }
PAGEDD_LANEWISE(operator+(Vec a, Vec b), a.v[i] + b.v[i])
PAGEDD_LANEWISE(operator-(Vec a, Vec b), a.v[i] - b.v[i])
PAGEDD_LANEWISE(operator*(Vec a, Vec b), a.v[i] * b.v[i])
PAGEDD_LANEWISE(operator/(Vec a, Vec b), a.v[i] / b.v[i])
PAGEDD_LANEWISE(fma(Vec a, Vec b, Vec c), a.v[i] * b.v[i] + c.v[i])
PAGEDD_LANEWISE(abs(Vec a), std::fabs(a.v[i]))
PAGEDD_LANEWISE(max(Vec a, Vec b), a.v[i] > b.v[i] ? a.v[i] : b.v[i])
PAGEDD_LANEWISE(min(Vec a, Vec b), a.v[i] < b.v[i] ? a.v[i] : b.v[i])
PAGEDD_LANEWISE(round(Vec a), std::nearbyint(a.v[i]))
PAGEDD_LANEWISE(scale_by_power_of_two(Vec a, Vec exponent), std::ldexp(a.v[i], int(exponent.v[i])))
#undef PAGEDD_LANEWISE

#endif

// e^x, relative error below 2e-7 on [-87, 88]; 0 far below, never NaN for finite x.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7.
inline Vec exp(Vec x) {
  x = min(max(x, Vec::all(-104.0f)), Vec::all(88.7f));
  const Vec n = round(x * Vec::all(1.44269504088896341f));
  Vec r = fma(n, Vec::all(-0.693145751953125f), x);
  r = fma(n, Vec::all(-1.42860682030941723e-6f), r);
  Vec p = Vec::all(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, Vec::all(c));
  return scale_by_power_of_two(p, n);
}

// x · sigmoid(x)
inline Vec silu(Vec x) { return x / (Vec::all(1.0f) + exp(Vec::zero() - x)); }

// float → bfloat16, round to nearest even; NaN stays NaN.
inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace pagedd::cpu

// Sixteen floats at a time: one register with AVX-512, two with AVX2, four of what the compiler has elsewhere.
//
// Owns arithmetic on registers and nothing else. Everything is inline; the extension is compiled on the machine it runs on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PAGEDD_AVX512 1
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PAGEDD_AVX2 1
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

#if PAGEDD_AVX2
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif
constexpr int kParts = kLanes / kPartLanes;
typedef float Part __attribute__((vector_size(kPartLanes * 4)));
typedef int32_t IntPart __attribute__((vector_size(kPartLanes * 4)));
typedef uint16_t HalfPart __attribute__((vector_size(kPartLanes * 2)));

struct Vec {
  Part part[kParts];
  static Vec all(float x) {
    Vec r;
    for (Part& part : r.part) part = Part{} + x;
    return r;
  }
  static Vec zero() { return all(0.0f); }
  static Vec load(const float* p) {
    Vec r;
    for (int i = 0; i < kParts; ++i) std::memcpy(&r.part[i], p + i * kPartLanes, sizeof(Part));
    return r;
  }
  static Vec load_half(const uint16_t* p) {
    Vec r;
    for (int i = 0; i < kParts; ++i) {
#if PAGEDD_AVX2
      r.part[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * kPartLanes)));
#else
      HalfPart bits;
      std::memcpy(&bits, p + i * kPartLanes, sizeof bits);
      const IntPart wide = __builtin_convertvector(bits, IntPart), magnitude = wide & 0x7fff;
      // Rebias the exponent by multiplication: subnormal halves come out right as well; infinity and NaN do not.
      const IntPart finite = IntPart(Part(magnitude << 13) * 0x1p112f);
      const IntPart infinite = (magnitude << 13) | 0x7f800000;
      r.part[i] = Part((magnitude >= 0x7c00 ? infinite : finite) | ((wide & 0x8000) << 16));
#endif
    }
    return r;
  }
  void store(float* p) const { std::memcpy(p, part, sizeof part); }
  float sum() const {
    float lanes[kLanes];
    store(lanes);
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
  }
  float max() const {
    float lanes[kLanes];
    store(lanes);
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
  }
};
#define PAGEDD_PARTWISE(signature, expression)                  \
  inline Vec signature {                                        \
    Vec r;                                                      \
    for (int i = 0; i < kParts; ++i) r.part[i] = expression;    \
    return r;                                                   \
  }
PAGEDD_PARTWISE(operator+(Vec a, Vec b), a.part[i] + b.part[i])
PAGEDD_PARTWISE(operator-(Vec a, Vec b), a.part[i] - b.part[i])
PAGEDD_PARTWISE(operator*(Vec a, Vec b), a.part[i] * b.part[i])
PAGEDD_PARTWISE(operator/(Vec a, Vec b), a.part[i] / b.part[i])
#if PAGEDD_AVX2
PAGEDD_PARTWISE(fma(Vec a, Vec b, Vec c), _mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]))
// The second where one is NaN.
PAGEDD_PARTWISE(max(Vec a, Vec b), _mm256_max_ps(a.part[i], b.part[i]))
PAGEDD_PARTWISE(min(Vec a, Vec b), _mm256_min_ps(a.part[i], b.part[i]))
PAGEDD_PARTWISE(round(Vec a), _mm256_round_ps(a.part[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#else
PAGEDD_PARTWISE(fma(Vec a, Vec b, Vec c), a.part[i] * b.part[i] + c.part[i])
PAGEDD_PARTWISE(max(Vec a, Vec b), a.part[i] > b.part[i] ? a.part[i] : b.part[i])
PAGEDD_PARTWISE(min(Vec a, Vec b), a.part[i] < b.part[i] ? a.part[i] : b.part[i])
// Below 2²², as all that is rounded here: adding this leaves no place for a fraction.
PAGEDD_PARTWISE(round(Vec a), (a.part[i] + 0x1.8p23f) - 0x1.8p23f)
#endif
PAGEDD_PARTWISE(abs(Vec a), Part(IntPart(a.part[i]) & 0x7fffffff))
// In two steps: the result may be subnormal where a power of two is not.
inline Vec scale_by_power_of_two(Vec a, Vec exponent) {
  for (int i = 0; i < kParts; ++i) {
    const IntPart whole = __builtin_convertvector(exponent.part[i], IntPart), half = whole >> 1;
    a.part[i] = a.part[i] * Part((half + 127) << 23) * Part((whole - half + 127) << 23);
  }
  return a;
}
#undef PAGEDD_PARTWISE

#endif

// Whole numbers from -128 to 255 as bytes, signed or not.
inline void store_bytes(Vec x, void* to) {
#if PAGEDD_AVX512
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
#else
  float lanes[kLanes];
  x.store(lanes);
  uint8_t bytes[kLanes];
  for (int i = 0; i < kLanes; ++i) bytes[i] = uint8_t(int32_t(lanes[i]));
  std::memcpy(to, bytes, sizeof bytes);
#endif
}

// Sixteen pairs of bfloat16: the first numbers of all, and the second.
inline void load_bfloat16_pairs(const void* from, Vec& first, Vec& second) {
#if PAGEDD_AVX512
  const __m512i pairs = _mm512_loadu_si512(from);
  first = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  second = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))))};
#else
  for (int i = 0; i < kParts; ++i) {
    IntPart pairs;
    std::memcpy(&pairs, static_cast<const uint8_t*>(from) + i * sizeof pairs, sizeof pairs);
    first.part[i] = Part(pairs << 16);
    second.part[i] = Part(pairs & int(0xffff0000));
  }
#endif
}

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

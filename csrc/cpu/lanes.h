// One register of the instruction set being compiled, as GCC/Clang vector types: the kernels are written once with
// operators, and only what has no operator is spelled per set. For *_kernels.cpp alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace distopt::DISTOPT_ISA {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * lanes)));
typedef std::uint16_t Shorts __attribute__((vector_size(2 * lanes)));
typedef float HalfFloats __attribute__((vector_size(2 * lanes)));
typedef double Doubles __attribute__((vector_size(4 * lanes)));

constexpr std::int32_t magnitude_bits = 0x7fffffff;

template <class Vector, class T>
inline Vector load(const T* at) {
  Vector v;
  std::memcpy(&v, at, sizeof v);
  return v;
}

template <class Vector, class T>
inline void store(T* at, Vector v) {
  std::memcpy(at, &v, sizeof v);
}

// Bit j is set where lane j of the mask (0 or -1) is.
inline unsigned bits_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE2__)
  return static_cast<unsigned>(_mm_movemask_ps((__m128)mask));
#else
  unsigned bits = 0;
  for (int j = 0; j < lanes; ++j) bits |= static_cast<unsigned>(mask[j] & 1) << j;
  return bits;
#endif
}

// float32 -> float16 bits, round to nearest even; NaN stays NaN.
inline Shorts to_half(Floats x) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Ints bits = (Ints)x;
  const Ints magnitude = bits & magnitude_bits;
  // Below 2^-14 halves have a fixed spacing of 2^-24: that of floats in [0.5, 1), so the addition rounds.
  const Ints tiny = (Ints)((Floats)magnitude + 0.5f) - 0x3f000000;
  const Ints normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
  Ints half = magnitude < (113 << 23) ? tiny : normal;
  half = magnitude >= 0x47800000 ? Ints{} + 0x7c00 : half;
  half = magnitude > 0x7f800000 ? Ints{} + 0x7e00 : half;
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000), Shorts);
#endif
}

inline Floats from_half(Shorts half) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)half);
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps((__m128i)half);
#else
  const Ints wide = __builtin_convertvector(half, Ints);
  const Ints magnitude = (wide & 0x7fff) << 13;
  // Multiplying by 2^112 moves the exponent bias from 15 to 127 and makes subnormal halves normal.
  const Ints finite = (Ints)((Floats)magnitude * 0x1p112f);
  const Ints value = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite;
  return (Floats)(value | ((wide & 0x8000) << 16));
#endif
}

// float32 -> bfloat16 bits, round to nearest even; NaN stays NaN.
inline Shorts to_bfloat16(Floats x) {
  const Ints bits = (Ints)x;
  const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Ints quiet = bits | 0x00400000;
  const Ints half = ((bits & magnitude_bits) > 0x7f800000 ? quiet : rounded) >> 16;
  return __builtin_convertvector(half & 0xffff, Shorts);
}

inline Floats from_bfloat16(Shorts half) { return (Floats)(__builtin_convertvector(half, Ints) << 16); }

}  // namespace distopt::DISTOPT_ISA

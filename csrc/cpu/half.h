// Casts between float32 and 16-bit floats, a register at a time. Included by sources that are compiled per set.
#pragma once

#include "cpu/vectors.h"
#include "kernels/cuda/shared.h"

namespace distopt::DISTOPT_ISA {
namespace {

// As many as a register has float32.
typedef std::uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));

// Both round to nearest even; NaN stays NaN.
struct Half {
  static constexpr std::int32_t becomes_zero = float16_zero_key;

  static Shorts encode(Floats x) {
#if defined(__AVX512F__)  // with a mask, because GCC 12 warns about its own unmasked intrinsics
    return (Shorts)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(DISTOPT_NEON)
    const auto wide = load_as<float32x4x2_t>(&x);
    return (Shorts)vcvt_high_f16_f32(vcvt_f16_f32(wide.val[0]), wide.val[1]);
#else
    const Ints bits = (Ints)x;
    const Ints magnitude = bits & top_key;
    // Below 2^-14 halves have a fixed spacing of 2^-24: that of floats in [0.5, 1), so the addition rounds.
    const Ints tiny = (Ints)((Floats)magnitude + 0.5f) - 0x3f000000;
    const Ints normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
    Ints half = magnitude < (113 << 23) ? tiny : normal;
    half = magnitude >= 0x47800000 ? Ints{} + 0x7c00 : half;
    half = magnitude > nonfinite_key ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : half;
    return __builtin_convertvector(half | ((bits >> 16) & 0x8000), Shorts);
#endif
  }

  static Floats decode(Shorts x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps((__m128i)x);
#elif defined(DISTOPT_NEON)
    const auto half = (float16x8_t)x;
    const float32x4x2_t wide = {{vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)}};
    return load_as<Floats>(&wide);
#else
    const Ints wide = __builtin_convertvector(x, Ints);
    const Ints magnitude = (wide & 0x7fff) << 13;
    // Multiplying by 2^112 moves the exponent bias from 15 to 127 and makes subnormal halves normal.
    const Ints finite = (Ints)((Floats)magnitude * 0x1p112f);
    const Ints special = magnitude | (magnitude > 0x0f800000 ? Ints{} + 0x7fc00000 : Ints{} + nonfinite_key);
    return (Floats)((magnitude >= 0x0f800000 ? special : finite) | ((wide & 0x8000) << 16));
#endif
  }
};

struct BFloat16 {
  static constexpr std::int32_t becomes_zero = bfloat16_zero_key;

  static Shorts encode(Floats x) {
    const Ints bits = (Ints)x;
    const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Ints quiet = bits | 0x00400000;  // a NaN must not round to infinity
    return __builtin_convertvector((((bits & top_key) > nonfinite_key ? quiet : rounded) >> 16) & 0xffff, Shorts);
  }

  static Floats decode(Shorts x) { return (Floats)(__builtin_convertvector(x, Ints) << 16); }
};

}  // namespace
}  // namespace distopt::DISTOPT_ISA

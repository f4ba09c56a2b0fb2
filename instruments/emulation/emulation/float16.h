// 16-bit floats, converted as the hardware does it, to nearest even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

inline unsigned short float_to_half(float x) {
  const auto sign = static_cast<unsigned short>(std::signbit(x) ? 0x8000 : 0);
  const double magnitude = std::fabs(static_cast<double>(x));
  if (x != x) return 0x7fff;
  if (magnitude >= 65520) return sign | 0x7c00;
  // The spacing of float16 around the value; below 2^-14 it stays at 2^-24.
  const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<unsigned short>(sign | (steps + (exponent + 14) * 1024));
}

inline float half_to_float(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  if (exponent == 31) value = fraction ? NAN : INFINITY;
  return static_cast<float>(bits & 0x8000 ? -value : value);
}

inline unsigned short float_to_bfloat16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float bfloat16_to_float(unsigned short bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// float16 of the emulated device: conversions as the hardware does them, to nearest even.
#pragma once

#include <cmath>

struct __half {
  unsigned short bits;
};

inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline __half __float2half_rn(float x) {
  const auto sign = static_cast<unsigned short>(std::signbit(x) ? 0x8000 : 0);
  const double magnitude = std::fabs(static_cast<double>(x));
  if (x != x) return {0x7fff};
  if (magnitude >= 65520) return {static_cast<unsigned short>(sign | 0x7c00)};
  // The spacing of float16 around the value; below 2^-14 it stays at 2^-24.
  int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  double steps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  if (steps == 2048) steps = 1024, ++exponent;
  const int number = static_cast<int>(steps) + (exponent + 14) * 1024;
  return {static_cast<unsigned short>(sign | number)};
}

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  double value = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  if (exponent == 31) value = fraction ? NAN : INFINITY;
  return static_cast<float>(x.bits & 0x8000 ? -value : value);
}

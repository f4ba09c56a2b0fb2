// bfloat16 of the emulated device: conversions as the hardware does them, to nearest even.
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  unsigned short bits;
};

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  const unsigned rest = bits & 0xffff, odd = bits >> 16 & 1;
  return {static_cast<unsigned short>((bits >> 16) + (rest > 0x8000 || (rest == 0x8000 && odd)))};
}

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

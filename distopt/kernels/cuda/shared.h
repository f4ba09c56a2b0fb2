// Keys of floats, and their meaning: shared by the kernels of CPU and GPU.
//
// The *key* of x is the bit pattern of |x|, a non-negative int32 that orders as |x| does, with infinity and then NaN on
// top; selection compares keys, so a NaN is never lost.
#pragma once

#include <cstdint>

namespace distopt {

constexpr std::int32_t top_key = 0x7fffffff;            // no number's key is above it; as a mask it cuts off the sign
constexpr std::int32_t nonfinite_key = 0x7f800000;      // infinity; NaN is above
constexpr std::int32_t float16_zero_key = 0x33000000;   // 2^-25, half the smallest subnormal, and below: becomes zero
constexpr std::int32_t bfloat16_zero_key = 0x00008000;  // the same for bfloat16

}  // namespace distopt

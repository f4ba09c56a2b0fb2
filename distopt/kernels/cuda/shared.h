// Constants and rules of the kernels on CPU and GPU. NVRTC compiles this file too, so it includes nothing.
//
// The *key* of x is the bit pattern of |x|, a non-negative int32 that orders as |x| does, with infinity and then NaN on
// top; selection compares keys, so a NaN is never lost.
#pragma once

namespace distopt {

constexpr int top_key = 0x7fffffff;            // no number's key is above it; as a mask it cuts off the sign
constexpr int nonfinite_key = 0x7f800000;      // infinity; NaN is above
constexpr int float16_zero_key = 0x33000000;   // 2^-25, half the smallest subnormal, and below: becomes zero
constexpr int bfloat16_zero_key = 0x00008000;  // the same for bfloat16

// The sample from which a selection estimates its bound: see csrc/base/select_rules.h.
constexpr unsigned sample_group = 8, most_strata = 2048;

}  // namespace distopt

// Dense passes over a bucket: casts to and from 16-bit floats, its norm, and whether it is finite.
#pragma once

#include "base/isa.h"
#include "base/types.h"

namespace distopt {

struct CastCounts {
  std::size_t overflowed = 0;   // |in * scale| > limit, infinities included: became +-limit
  std::size_t underflowed = 0;  // not zero before, zero after
  std::size_t nan = 0;          // stayed NaN
};

struct CodecKernels {
  // out[i] = in[i] * scale, clamped to +-limit, rounded to nearest even as float16 or bfloat16. `limit` is a finite
  // value of that type. With a residual (else null), residual[i] + in[i] takes the place of in[i], and what the
  // rounding lost of it goes to new_residual, perhaps the same array: residual[i] + in[i] - out[i] / scale.
  CastCounts (*encode16)(const float* in, const float* residual, float* new_residual, std::uint16_t* out, std::size_t n,
                         float scale, float limit, DType type);
  // out[i] = in[i] * scale.
  void (*decode16)(const std::uint16_t* in, float* out, std::size_t n, float scale, DType type);
  // Sum of squares, accumulated in float64.
  double (*squared_norm)(const float* x, std::size_t n);
  // Index of the first element that is NaN or beyond +-limit, or n.
  std::size_t (*first_beyond_32)(const float* x, std::size_t n, float limit);
  std::size_t (*first_beyond_64)(const double* x, std::size_t n, double limit);
};

DISTOPT_DECLARE_KERNELS(CodecKernels, codec_kernels)

}  // namespace distopt

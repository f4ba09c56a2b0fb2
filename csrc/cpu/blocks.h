// An array in blocks of integers of a few bits. The same input gives the same bytes on every processor, and the same
// bytes the same floats.
#pragma once

#include "base/isa.h"
#include "base/types.h"

namespace distopt {

// Blocks of quantized_block elements, the last one filled up with zeros, as integers q of `bits` (8, 4 or 2), |q| <=
// bound = 2^(bits - 1) - 1. On the wire, a block is its scale, a float32 (element = q * scale), then its bytes: with n
// of these, byte i has the elements i, i + n, i + 2 n ..., each as q + bound, the first in its lowest bits.
constexpr std::size_t quantized_block = 256;
inline std::size_t block_bytes(int bits) {
  return sizeof(float) + quantized_block / 8 * static_cast<std::size_t>(bits);
}
inline std::size_t blocks_bytes(std::size_t n, int bits) {
  return (n + quantized_block - 1) / quantized_block * block_bytes(bits);
}

// To nearest even; or up with the probability of what rounding down would lose.
struct Rounding {
  bool is_stochastic = false;
  std::uint32_t seed = 0;  // of the numbers drawn, by the index of the element
};

struct BlockKernels {
  // Encodes `in`, or residual + in; what the encoding loses of it goes to new_residual, perhaps the same array (else
  // both are null). Returns the index of the first element that is NaN or infinite, or n; the bytes are of no use then.
  std::size_t (*encode)(const float* in, const float* residual, float* new_residual, std::uint8_t* out, std::size_t n,
                        int bits, Rounding rounding);
  // out[i] = element i times factor, or that is added to it.
  void (*decode)(const std::uint8_t* in, float* out, std::size_t n, int bits, float factor, bool adds);
};

DISTOPT_DECLARE_KERNELS(BlockKernels, block_kernels)

}  // namespace distopt

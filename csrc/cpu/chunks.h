// The largest elements of every chunk of an array, in a few bits each. The same input gives the same bytes on every
// processor, and the same bytes the same floats.
#pragma once

#include "base/types.h"

namespace distopt {

// Of every chunk of top_chunk elements the k of largest magnitude; of the last one, which may be shorter, a like share,
// rounded up. On the wire, a chunk is the lowest and the highest level of magnitudes, both bfloat16; the positions,
// ascending, of 12 bits; the values, of `bits` (2, 4, 8 or 16): the sign in the lowest bit, then the number of the
// level, of 2^(bits - 1) at equal distances. Positions and values begin at a byte; the first are in its lowest bits.
constexpr std::size_t top_chunk = 4096;
inline std::size_t chunk_count(std::size_t m, std::size_t k) { return (m * k + top_chunk - 1) / top_chunk; }
inline std::size_t chunk_bytes(std::size_t count, int bits) {
  return 4 + (count * 12 + 7) / 8 + (count * static_cast<std::size_t>(bits) + 7) / 8;
}
inline std::size_t chunks_bytes(std::size_t n, std::size_t k, int bits) {
  const std::size_t rest = n % top_chunk;
  return n / top_chunk * chunk_bytes(k, bits) + (rest ? chunk_bytes(chunk_count(rest, k), bits) : 0);
}

// Encodes `in`, or residual + in; what is not sent of it goes to new_residual, perhaps the same array (else both are
// null). Returns the index of the first element that is NaN or infinite, or n; the bytes are of no use then.
std::size_t encode_chunks(const float* in, const float* residual, float* new_residual, std::uint8_t* out, std::size_t n,
                          std::size_t k, int bits);
// Elements of out become the sum of `lists` encoded arrays, one after another `stride` bytes apart, times factor.
void decode_chunks(const std::uint8_t* in, std::size_t lists, std::size_t stride, float* out, std::size_t n,
                   std::size_t k, int bits, float factor);

}  // namespace distopt

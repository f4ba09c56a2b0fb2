#include "cpu/blocks.h"

#include "cpu/vectors.h"
#include "kernels/cuda/shared.h"

namespace distopt::DISTOPT_ISA {
namespace {

using Words = Lanes<std::uint32_t>::type;

// The first multiple of 1 is next to 1.5 * 2^23: adding that rounds to nearest even.
constexpr float rounds_to_integer = 0x1.8p23f;

// 0 <= number < 1, by the finalizer of MurmurHash3, whose every input bit changes every output bit with probability
// 1/2.
inline Floats random(Words index, std::uint32_t seed) {
  Words h = (index ^ seed) * 0x9e3779b1u;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  return __builtin_convertvector((Ints)(h >> 8), Floats) * 0x1p-24f;
}

template <std::size_t... I>
inline Words lane_numbers(std::index_sequence<I...>) {
  return Words{I...};
}

// The sums of residual and input, in `x`, and the largest of their keys.
std::int32_t sum_block(const float* in, const float* residual, std::size_t m, float* x) {
  __builtin_memcpy(x, in, m * sizeof *x);
  __builtin_memset(x + m, 0, (quantized_block - m) * sizeof *x);
  if (residual)
    for (std::size_t i = 0; i < m; ++i) x[i] += residual[i];
  Ints largest = {};
  for (Index i = 0; i < Index{quantized_block}; i += kLanes<float>) {
    const Ints key = (Ints)load_as<Floats>(x + i) & top_key;
    largest = key > largest ? key : largest;
  }
  std::int32_t top = 0;
  for (Index j = 0; j < kLanes<float>; ++j) top = largest[j] > top ? largest[j] : top;
  return top;
}

template <int bits>
void pack(const std::int32_t* codes, std::uint8_t* out) {
  constexpr std::size_t n = quantized_block * bits / 8;
  for (std::size_t i = 0; i < n; ++i) {
    std::int32_t byte = 0;
    for (std::size_t j = 0; j < 8 / bits; ++j) byte |= codes[i + j * n] << (j * bits);
    out[i] = static_cast<std::uint8_t>(byte);
  }
}

template <int bits>
std::size_t encode_as(const float* in, const float* residual, float* new_residual, std::uint8_t* out, std::size_t n,
                      Rounding rounding) {
  constexpr std::int32_t bound = (1 << (bits - 1)) - 1;
  std::size_t first_bad = n;
  alignas(64) float x[quantized_block];
  alignas(64) std::int32_t codes[quantized_block];
  for (std::size_t begin = 0; begin < n; begin += quantized_block, out += block_bytes(bits)) {
    const std::size_t m = n - begin < quantized_block ? n - begin : quantized_block;
    const std::int32_t top = sum_block(in + begin, residual ? residual + begin : nullptr, m, x);
    if (top >= nonfinite_key && first_bad == n) {
      std::size_t i = 0;
      while ((load_as<std::int32_t>(x + i) & top_key) < nonfinite_key) ++i;
      first_bad = begin + i;
    }
    float scale = load_as<float>(&top) / bound;
    if (scale < 0x1p-126f) scale = 0;  // its inverse would be infinite
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (Index i = 0; i < Index{quantized_block}; i += kLanes<float>) {
      const Floats value = load_as<Floats>(x + i);
      Floats scaled = value * inverse;
      if (rounding.is_stochastic) {
        const Words index =
            lane_numbers(LaneNumbers<float>{}) + static_cast<std::uint32_t>(begin + static_cast<std::size_t>(i));
        scaled += random(index, rounding.seed) - 0.5f;
      }
      Floats q = (scaled + rounds_to_integer) - rounds_to_integer;
      q = q > Floats{} + float(bound) ? Floats{} + float(bound) : q;
      q = q < Floats{} - float(bound) ? Floats{} - float(bound) : q;
      store(codes + i, __builtin_convertvector(q, Ints) + bound);
      store(x + i, value - q * scale);
    }
    if (new_residual) __builtin_memcpy(new_residual + begin, x, m * sizeof *x);
    store(out, scale);
    pack<bits>(codes, out + sizeof scale);
  }
  return first_bad;
}

std::size_t encode_blocks(const float* in, const float* residual, float* new_residual, std::uint8_t* out, std::size_t n,
                          int bits, Rounding rounding) {
  if (bits == 8) return encode_as<8>(in, residual, new_residual, out, n, rounding);
  if (bits == 4) return encode_as<4>(in, residual, new_residual, out, n, rounding);
  return encode_as<2>(in, residual, new_residual, out, n, rounding);
}

template <int bits>
void decode_as(const std::uint8_t* in, float* out, std::size_t n, float factor, bool adds) {
  constexpr std::int32_t bound = (1 << (bits - 1)) - 1;
  constexpr std::size_t bytes = quantized_block * bits / 8;
  alignas(64) float x[quantized_block];
  for (std::size_t begin = 0; begin < n; begin += quantized_block, in += block_bytes(bits)) {
    const float scale = load_as<float>(in);
    const std::uint8_t* codes = in + sizeof scale;
    for (std::size_t j = 0; j < 8 / bits; ++j)
      for (std::size_t i = 0; i < bytes; ++i) {
        const std::int32_t q = ((codes[i] >> (j * bits)) & ((1 << bits) - 1)) - bound;
        x[j * bytes + i] = static_cast<float>(q) * scale * factor;
      }
    const std::size_t m = n - begin < quantized_block ? n - begin : quantized_block;
    if (adds)
      for (std::size_t i = 0; i < m; ++i) out[begin + i] += x[i];
    else
      __builtin_memcpy(out + begin, x, m * sizeof *x);
  }
}

void decode_blocks(const std::uint8_t* in, float* out, std::size_t n, int bits, float factor, bool adds) {
  if (bits == 8) return decode_as<8>(in, out, n, factor, adds);
  if (bits == 4) return decode_as<4>(in, out, n, factor, adds);
  decode_as<2>(in, out, n, factor, adds);
}

}  // namespace

const BlockKernels& block_kernels() {
  static constexpr BlockKernels table = {&encode_blocks, &decode_blocks};
  return table;
}

}  // namespace distopt::DISTOPT_ISA

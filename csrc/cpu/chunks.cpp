#include "cpu/chunks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "cpu/sparse.h"
#include "kernels/cuda/shared.h"

namespace distopt {
namespace {

template <class T>
T bits_as(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Levels of magnitudes, as a decoder knows them.
struct Levels {
  float lowest, distance;

  float value(unsigned code) const {
    const float magnitude = lowest + static_cast<float>(code >> 1) * distance;
    return code & 1 ? -magnitude : magnitude;
  }
};

std::uint16_t to_bfloat16(float x) {  // of a finite x >= 0: nearest even, but never infinite
  const std::uint32_t bits = bits_as<std::uint32_t>(&x);
  return static_cast<std::uint16_t>(std::min(bits + 0x7fff + ((bits >> 16) & 1), 0x7f7fffffu) >> 16);
}

float from_bfloat16(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  return bits_as<float>(&bits);
}

Levels levels_of(const std::uint8_t* in, int bits) {
  const float lowest = from_bfloat16(bits_as<std::uint16_t>(in)),
              highest = from_bfloat16(bits_as<std::uint16_t>(in + 2));
  return {lowest, (highest - lowest) / static_cast<float>((1 << (bits - 1)) - 1)};
}

// Lowest and highest level for these values. Of two levels, each is the mean of the magnitudes nearer to it than to
// the other end of their range, which halves the squared error of the ends themselves.
std::pair<float, float> range_of(const float* values, std::size_t count, int bits) {
  float low = std::fabs(values[0]), high = low;
  for (std::size_t j = 1; j < count; ++j) {
    low = std::min(low, std::fabs(values[j]));
    high = std::max(high, std::fabs(values[j]));
  }
  if (bits > 2 || low == high) return {low, high};
  const float middle = low + (high - low) / 2;
  double sums[2] = {};
  std::size_t counts[2] = {};
  for (std::size_t j = 0; j < count; ++j) {
    const float magnitude = std::fabs(values[j]);
    sums[magnitude > middle] += magnitude;
    ++counts[magnitude > middle];
  }
  const auto mean = [&](int side) { return static_cast<float>(sums[side] / static_cast<double>(counts[side])); };
  return {mean(0), counts[1] ? mean(1) : high};
}

// Numbers of a few bits, one behind the other.
class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* out) : out_(out) {}
  void put(unsigned value, int bits) {
    word_ |= std::uint64_t{value} << held_;
    for (held_ += bits; held_ >= 8; held_ -= 8, word_ >>= 8) *out_++ = static_cast<std::uint8_t>(word_);
  }
  std::uint8_t* end() {
    if (held_) put(0, 8 - held_);
    return out_;
  }

 private:
  std::uint8_t* out_;
  std::uint64_t word_ = 0;
  int held_ = 0;
};

class BitReader {
 public:
  explicit BitReader(const std::uint8_t* in) : in_(in) {}
  unsigned take(int bits) {
    for (; held_ < bits; held_ += 8) word_ |= std::uint64_t{*in_++} << held_;
    const auto value = static_cast<unsigned>(word_ & ((1u << bits) - 1));
    word_ >>= bits;
    held_ -= bits;
    return value;
  }

 private:
  const std::uint8_t* in_;
  std::uint64_t word_ = 0;
  int held_ = 0;
};

// The selected elements of a chunk, with room for what the kernels of selection write beyond.
struct Chosen {
  std::int32_t indices[top_chunk + gather_slack];
  float values[top_chunk + gather_slack];
};

// Selects the `count` largest of the m elements of `from`, whose sums the first kernel makes. `floor` is a key
// that some more elements of the chunk before exceeded; it becomes that of this one.
void select(const Source& from, std::size_t m, std::size_t count, std::int32_t& floor, Chosen& chosen) {
  const SelectKernels& kernels = select_kernels();
  const float* x = from.residual ? from.new_residual : from.grad;
  std::size_t found = kernels.gather(from, m, floor, chosen.indices, chosen.values, top_chunk + gather_slack);
  if (found < count) found = kernels.gather({x}, m, -1, chosen.indices, chosen.values, top_chunk + gather_slack);
  std::int32_t keys[top_chunk];
  for (std::size_t i = 0; i < found; ++i) keys[i] = key_of(chosen.values[i]);
  std::nth_element(keys, keys + (count - 1), keys + found, std::greater<>());
  const std::int32_t edge = keys[count - 1];
  const auto above = static_cast<std::size_t>(std::count_if(keys, keys + count, [=](auto key) { return key > edge; }));
  kernels.keep(chosen.values, chosen.indices, found, edge, count - above, chosen.indices, chosen.values);
  floor = std::max(edge - (1 << 20), -1);  // 6 to 12 % lower
}

std::uint8_t* pack_chunk(const Chosen& chosen, std::size_t count, int bits, std::uint8_t* out, float* residual) {
  const auto [low, high] = range_of(chosen.values, count, bits);
  const std::uint16_t range[] = {to_bfloat16(low), to_bfloat16(high)};
  std::memcpy(out, range, sizeof range);
  const Levels levels = levels_of(out, bits);
  const float inverse = levels.distance > 0 ? 1 / levels.distance : 0, most = static_cast<float>((1 << (bits - 1)) - 1);
  BitWriter positions(out + 4);
  for (std::size_t j = 0; j < count; ++j) positions.put(static_cast<unsigned>(chosen.indices[j]), 12);
  BitWriter values(positions.end());
  for (std::size_t j = 0; j < count; ++j) {
    const float x = chosen.values[j];
    const float place = (std::fabs(x) - levels.lowest) * inverse + 0.5f;
    const auto level = static_cast<unsigned>(place > 0 ? std::min(place, most) : 0);
    const unsigned code = level << 1 | (x < 0);
    values.put(code, bits);
    if (residual) residual[chosen.indices[j]] = x - levels.value(code);
  }
  return values.end();
}

}  // namespace

std::size_t encode_chunks(const float* in, const float* residual, float* new_residual, std::uint8_t* out, std::size_t n,
                          std::size_t k, int bits) {
  std::size_t first_bad = n;
  std::int32_t floor = -1;
  Chosen chosen;
  for (std::size_t begin = 0; begin < n; begin += top_chunk) {
    const std::size_t m = std::min(top_chunk, n - begin), count = chunk_count(m, k);
    Source from{in + begin};
    if (residual) {
      from.residual = residual + begin;
      from.new_residual = new_residual + begin;
    }
    select(from, m, count, floor, chosen);
    for (std::size_t j = 0; j < count && first_bad == n; ++j)  // the largest keys
      if (key_of(chosen.values[j]) >= nonfinite_key) {
        const float* x = residual ? from.new_residual : from.grad;
        std::size_t i = 0;
        while (key_of(x[i]) < nonfinite_key) ++i;
        first_bad = begin + i;
      }
    out = first_bad == n ? pack_chunk(chosen, count, bits, out, residual ? new_residual + begin : nullptr)
                         : out + chunk_bytes(count, bits);
  }
  return first_bad;
}

void decode_chunks(const std::uint8_t* in, std::size_t lists, std::size_t stride, float* out, std::size_t n,
                   std::size_t k, int bits, float factor) {
  for (std::size_t begin = 0; begin < n; begin += top_chunk) {
    const std::size_t m = std::min(top_chunk, n - begin), count = chunk_count(m, k);
    std::memset(out + begin, 0, m * sizeof *out);
    for (std::size_t list = 0; list < lists; ++list) {
      const std::uint8_t* chunk = in + list * stride;
      const Levels levels = levels_of(chunk, bits);
      BitReader positions(chunk + 4), values(chunk + 4 + (count * 12 + 7) / 8);
      for (std::size_t j = 0; j < count; ++j) {
        const std::size_t i = positions.take(12);
        const float value = levels.value(values.take(bits)) * factor;
        if (i < m) out[begin + i] += value;  // a position of another rank's making must not leave the array
      }
    }
    in += chunk_bytes(count, bits);
  }
}

}  // namespace distopt

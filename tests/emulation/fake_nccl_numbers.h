// The arithmetic of fake_nccl.cpp: sums in rank order, 16-bit floats in float32 with one rounding at the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "nccl/api.h"

namespace fake {

using distopt::nccl::DataType;
using distopt::nccl::RedOp;

inline std::size_t item_bytes(DataType type) {
  if (type == DataType::int8 || type == DataType::uint8) return 1;
  if (type == DataType::float16 || type == DataType::bfloat16) return 2;
  return type == DataType::int64 || type == DataType::float64 ? 8 : 4;
}

// -- numbers
// -----------------------------------------------------------------------------------------------------------
inline float from_half(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  float value = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (h & 0x8000) != 0 ? -value : value;
}

inline std::uint16_t to_half(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // ties to even
  return static_cast<std::uint16_t>(sign | (((exponent + 14) << 10) + steps));
}

inline float from_bfloat(std::uint16_t b) {
  const std::uint32_t bits = static_cast<std::uint32_t>(b) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline std::uint16_t to_bfloat(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
T combine(T a, T b, RedOp op) {
  if (op == RedOp::max) return std::fmax(a, b);  // passes over NaN, as NCCL does
  if (op == RedOp::min) return std::fmin(a, b);
  return op == RedOp::prod ? a * b : a + b;
}
template <class T>
T combine_integers(T a, T b, RedOp op) {
  if (op == RedOp::max) return std::max(a, b);
  if (op == RedOp::min) return std::min(a, b);
  const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
  return static_cast<T>(op == RedOp::prod ? x * y : x + y);
}

template <class Wide, class T, class In, class Out, class Both>
void reduce_as(const std::vector<const char*>& inputs, char* out, std::size_t count, RedOp op, In widen, Out narrow,
               Both both) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto at = [&](const char* data) {
      T value;
      std::memcpy(&value, data + i * sizeof(T), sizeof(T));
      return static_cast<Wide>(widen(value));
    };
    Wide total = at(inputs[0]);
    for (std::size_t r = 1; r < inputs.size(); ++r) total = both(total, at(inputs[r]), op);
    if (op == RedOp::avg) total = total / static_cast<Wide>(inputs.size());
    const T result = narrow(total);
    std::memcpy(out + i * sizeof(T), &result, sizeof(T));
  }
}

inline void reduce(const std::vector<const char*>& inputs, char* out, std::size_t count, DataType type, RedOp op) {
  const auto same = [](auto value) { return value; };
  switch (type) {
    case DataType::float32:
      return reduce_as<float, float>(inputs, out, count, op, same, same, combine<float>);
    case DataType::float64:
      return reduce_as<double, double>(inputs, out, count, op, same, same, combine<double>);
    case DataType::float16:
      return reduce_as<float, std::uint16_t>(inputs, out, count, op, from_half, to_half, combine<float>);
    case DataType::bfloat16:
      return reduce_as<float, std::uint16_t>(inputs, out, count, op, from_bfloat, to_bfloat, combine<float>);
    case DataType::int8:
      return reduce_as<std::int8_t, std::int8_t>(inputs, out, count, op, same, same, combine_integers<std::int8_t>);
    case DataType::uint8:
      return reduce_as<std::uint8_t, std::uint8_t>(inputs, out, count, op, same, same, combine_integers<std::uint8_t>);
    case DataType::int32:
      return reduce_as<std::int32_t, std::int32_t>(inputs, out, count, op, same, same, combine_integers<std::int32_t>);
    case DataType::int64:
      return reduce_as<std::int64_t, std::int64_t>(inputs, out, count, op, same, same, combine_integers<std::int64_t>);
  }
}

}  // namespace fake

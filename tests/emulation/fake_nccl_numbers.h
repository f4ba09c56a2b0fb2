// The arithmetic of fake_nccl.cpp: sums in rank order, 16-bit floats in float32 with one rounding at the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "emulation/float16.h"
#include "nccl/api.h"

namespace fake {

using distopt::nccl::DataType;
using distopt::nccl::RedOp;

inline std::size_t item_bytes(DataType type) {
  if (type == DataType::int8 || type == DataType::uint8) return 1;
  if (type == DataType::float16 || type == DataType::bfloat16) return 2;
  return type == DataType::int64 || type == DataType::float64 ? 8 : 4;
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
      return reduce_as<float, std::uint16_t>(inputs, out, count, op, half_to_float, float_to_half, combine<float>);
    case DataType::bfloat16:
      return reduce_as<float, std::uint16_t>(inputs, out, count, op, bfloat16_to_float, float_to_bfloat16,
                                             combine<float>);
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

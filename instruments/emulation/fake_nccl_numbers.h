// The arithmetic of fake_nccl.cpp: sums in rank order, 16-bit floats in float32 with one rounding at the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
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
  if constexpr (std::is_floating_point_v<T>) {
    if (op == RedOp::max) return std::fmax(a, b);  // passes over NaN, as NCCL does
    if (op == RedOp::min) return std::fmin(a, b);
    return op == RedOp::prod ? a * b : a + b;
  } else {
    if (op == RedOp::max) return std::max(a, b);
    if (op == RedOp::min) return std::min(a, b);
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
    return static_cast<T>(op == RedOp::prod ? x * y : x + y);
  }
}

template <class T, class In, class Out>
void reduce_as(const std::vector<const char*>& inputs, char* out, std::size_t count, RedOp op, In widen, Out narrow) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto at = [&](const char* data) {
      T value;
      std::memcpy(&value, data + i * sizeof(T), sizeof(T));
      return widen(value);
    };
    auto total = at(inputs[0]);
    for (std::size_t r = 1; r < inputs.size(); ++r) total = combine(total, at(inputs[r]), op);
    if (op == RedOp::avg) total = total / static_cast<decltype(total)>(inputs.size());
    const T result = narrow(total);
    std::memcpy(out + i * sizeof(T), &result, sizeof(T));
  }
}

inline void reduce(const std::vector<const char*>& inputs, char* out, std::size_t count, DataType type, RedOp op) {
  const auto plain = [&](auto kind) {
    const auto same = [](decltype(kind) value) { return value; };
    reduce_as<decltype(kind)>(inputs, out, count, op, same, same);
  };
  switch (type) {
    case DataType::float32:
      return plain(float{});
    case DataType::float64:
      return plain(double{});
    case DataType::float16:
      return reduce_as<std::uint16_t>(inputs, out, count, op, half_to_float, float_to_half);
    case DataType::bfloat16:
      return reduce_as<std::uint16_t>(inputs, out, count, op, bfloat16_to_float, float_to_bfloat16);
    case DataType::int8:
      return plain(std::int8_t{});
    case DataType::uint8:
      return plain(std::uint8_t{});
    case DataType::int32:
      return plain(std::int32_t{});
    case DataType::int64:
      return plain(std::int64_t{});
  }
}

}  // namespace fake

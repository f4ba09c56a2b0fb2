// The collectives, element types and reductions of the wire, shared by every communicator.
#pragma once

#include <cstddef>
#include <cstdint>

namespace distopt {

enum class DType : std::int32_t { float32 = 0, float64, float16, bfloat16, int32, int64, int8, uint8, int16, boolean };
enum class RedOp : std::int32_t { sum = 0, max, min, mean, product, bit_and, bit_or, bit_xor };
enum class OpKind : std::uint8_t {
  barrier,
  all_reduce,
  reduce_scatter,
  all_gather,
  all_gather_ragged,
  broadcast,
  empty,
  all_to_all_ragged
};

inline bool reduces(OpKind kind) { return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter; }
// Whether counts may differ between ranks.
inline bool is_ragged(OpKind kind) { return kind == OpKind::all_gather_ragged || kind == OpKind::all_to_all_ragged; }

constexpr std::size_t label_bytes = 32;

// A collective as one rank has called it.
struct Call {
  std::int32_t rank;  // in the job
  OpKind kind;
  std::uint8_t dtype, op;
  bool looks;         // for NaN and infinity
  std::int32_t root;  // the source of a broadcast
  std::uint64_t number, count;
  char label[label_bytes];
};

inline bool is_float(DType dtype) { return dtype <= DType::bfloat16; }
// Floats have means, and the other types have operations on bits.
inline bool can_reduce(DType dtype, RedOp op) {
  return op == RedOp::mean ? is_float(dtype) : op < RedOp::bit_and || !is_float(dtype);
}

// Whether partial results have the type's own precision: 16-bit floats are summed in float32, and rounded once.
inline bool rounds_each_operation(DType dtype) { return dtype != DType::float16 && dtype != DType::bfloat16; }

// Where a sum is NaN or infinite: the first such element, and the rank at fault, which is the first whose own value is
// not finite or, where a sum of finite values overflowed, the first whose value has the largest magnitude.
struct Nonfinite {
  static constexpr std::uint64_t nowhere = UINT64_MAX;
  std::uint64_t index = nowhere;
  std::int32_t rank = -1;
};

inline std::size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16:
      return 2;
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
    default:
      return 4;
  }
}

}  // namespace distopt

// The arguments of one collective, arrays included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace distopt {

// Contiguous bytes in memory.
struct ByteSpan {
  char* data = nullptr;
  std::size_t bytes = 0;
};

// Pointers are to whole arrays: the input of reduce_scatter and the output of all_gather hold world_size parts of
// `count` elements.
struct Arguments {
  OpKind kind = OpKind::barrier;
  DType dtype = DType::float32;
  RedOp op = RedOp::sum;
  int root = 0;
  std::uint64_t count = 0;
  const char* input = nullptr;
  char* output = nullptr;
  std::string label;
  // all_to_all_ragged, and any ragged one of NCCL: the part for each rank, which is only read; `count` is their sum.
  std::vector<ByteSpan> parts;
  bool looks = false;    // for NaN and infinity
  bool refused = false;  // `empty` only: see Descriptor; set on every rank once the collective has ended

  // Whether `looks` is allowed: in sums and means of types that are added as they are.
  bool may_look() const {
    return (op == RedOp::sum || op == RedOp::mean) && (dtype == DType::float32 || dtype == DType::float64);
  }
  std::size_t part_bytes() const { return count * item_bytes(dtype); }
  // Sizes of the memory at `input` and `output`, in a world of `world_size` ranks.
  std::size_t input_bytes(int world_size) const {
    if (input == nullptr) return 0;
    return kind == OpKind::reduce_scatter ? part_bytes() * static_cast<std::size_t>(world_size) : part_bytes();
  }
  std::size_t output_bytes(int world_size) const {
    if (output == nullptr) return 0;
    return kind == OpKind::all_gather ? part_bytes() * static_cast<std::size_t>(world_size) : part_bytes();
  }
};

// Whether one of two collectives writes memory that the other reads or writes, so that the later must wait for the
// first.
bool conflict(const Arguments& a, const Arguments& b, int world_size);

}  // namespace distopt

// What a caller asks of a communicator: one collective.
#pragma once

#include <cstdint>
#include <string>

#include "base/types.h"

namespace distopt {

enum class OpKind : std::uint8_t {
  barrier,
  all_reduce,
  reduce_scatter,
  all_gather,
  all_gather_ragged,
  broadcast,
  empty,
  all_to_all_ragged  // NCCL only
};

// What the caller asked for. Pointers are to whole arrays: the input of reduce_scatter and the output of all_gather
// hold world_size parts of `count` elements.
struct Request {
  OpKind kind = OpKind::barrier;
  DType dtype = DType::float32;
  RedOp op = RedOp::sum;
  int root = 0;
  std::uint64_t count = 0;
  const char* input = nullptr;
  char* output = nullptr;
  std::string label;
  bool looks = false;    // for NaN and infinity: all_reduce, sum or mean of float32 or float64
  bool refused = false;  // of `empty`: see Descriptor; on every rank once the operation has ended
};

}  // namespace distopt

// Selection of large elements from a float32 array.
//
// The *key* of x is the bit pattern of |x|, a non-negative int32 that orders as |x| does, with infinity and then NaN on
// top; selection compares keys, so a NaN is never lost. `floor` is a key, or -1, which all keys exceed.
#pragma once

#include "base/isa.h"
#include "base/types.h"

namespace distopt {

// The values to select from; the selection computes them in the same pass over the memory.
struct Source {
  const float* grad;
  const float* residual = nullptr;  // if given: new_residual[i] = residual[i] + scale * grad[i] is selected from
  const float* momentum = nullptr;  // if given too: new_momentum[i] = decay * momentum[i] + scale * grad[i], and
                                    // new_residual[i] = residual[i] + new_momentum[i]
  float scale = 1;
  float decay = 0;
  float* new_residual = nullptr;  // given with residual; may be that array, or grad
  float* new_momentum = nullptr;  // the same with momentum
};

struct SelectKernels {
  // Lists the elements with key > floor, indices ascending, and returns how many there are. If that is more than
  // capacity - gather_slack, the lists hold only a part of them; the accumulation is complete in any case.
  std::size_t (*gather)(const Source& from, std::size_t n, std::int32_t floor, std::int32_t* indices, float* values,
                        std::size_t capacity);
  // Lists the elements of x with key > floor, and the first `ties` of those with key == floor; returns how many. Their
  // indices are ids[i], or i where `ids` is null. The lists may be ids and x themselves; else they need room for
  // gather_slack more.
  std::size_t (*keep)(const float* x, const std::int32_t* ids, std::size_t n, std::int32_t floor, std::size_t ties,
                      std::int32_t* indices, float* values);
};

// Room behind the last entry of a list: kernels store whole registers, and gather checks its room once per chunk.
constexpr std::size_t gather_chunk = 512;
constexpr std::size_t gather_slack = gather_chunk + 16;

DISTOPT_DECLARE_KERNELS(SelectKernels, select_kernels)

}  // namespace distopt

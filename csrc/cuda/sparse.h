// Sums of sparse lists on the GPU, enqueued on the stream.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace distopt::cuda {

// dense[indices] = 0
void clear_at(float* dense, const std::int32_t* indices, std::size_t count, cudaStream_t stream);

// Lists of ascending indices, one after the other; the pointers are device memory, the struct is the host's.
struct SparseLists {
  static constexpr unsigned most = 32;
  const std::int32_t* indices[most];
  const float* values[most];
  unsigned counts[most];
  unsigned size = 0;
};

// dense[lo ... hi - 1] = (if `add`: itself +) the sum, list after list, of value * scale. Writes every element once,
// whether or not an entry falls on it.
void scatter_sum(float* dense, const SparseLists& lists, std::size_t lo, std::size_t hi, float scale, bool add,
                 cudaStream_t stream);

}  // namespace distopt::cuda

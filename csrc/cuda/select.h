// Selection of large elements from a float32 array on the GPU, and sums of such lists, with the meaning that
// cpu/sparse.h gives it. Everything is enqueued on the stream; results are in device memory and valid in its order.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/codec.h"

namespace distopt::cuda {

// The values to select from, as in cpu/select.h; the selection computes them in the same pass.
struct Source {
  const float* grad;
  const float* residual = nullptr;
  const float* momentum = nullptr;
  float scale = 1;
  const float* device_scale = nullptr;  // if given, a factor in device memory, in place of `scale`
  float decay = 0;
  float* new_residual = nullptr;
  float* new_momentum = nullptr;
};

// All passes below note in findings->from_bad where the first element is that is not finite.

// new_residual and new_momentum as a selection would leave them. Needs a residual. Per element 8 bytes read and 4
// written, with momentum 12 and 8.
void accumulate(const Source& from, std::size_t n, Findings* findings, cudaStream_t stream);

// Lists the k largest, 1 <= k <= n < 2^31: cpu/sparse.h. Reads (and accumulates) every element once and the few
// candidates several times; where the estimate fails every element up to six times. `workspace` has room for
// select_workspace(n, candidate_capacity(n, k)) bytes, `indices` and `values` for k.
void top_k(const Source& from, std::size_t n, std::size_t k, std::int32_t* indices, float* values, void* workspace,
           Findings* findings, cudaStream_t stream);

// Lists the elements with |x| >= bound and NaN. Where findings->selected exceeds `capacity`, the room in the lists,
// they are not written: repeat with more room, without the accumulation. `workspace` has room for select_workspace(n,
// capacity) bytes. Reads (and accumulates) every element once.
void threshold(const Source& from, std::size_t n, float bound, std::int32_t* indices, float* values,
               std::size_t capacity, void* workspace, Findings* findings, cudaStream_t stream);

std::size_t select_workspace(std::size_t n, std::size_t capacity);

// Throws std::invalid_argument if int32 indices do not reach n elements, as the selections do.
void require_int32(std::size_t n);

// -- sums of sparse lists ---------------------------------------------------------------------------------------------
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

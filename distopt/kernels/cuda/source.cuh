// Input of the selections on the GPU, and the accumulation that they do while they read it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/float_keys.h"
#include "cuda/device.h"
#include "cuda/select.h"

namespace distopt::cuda {

inline bool takes_vectors(const Source& from) {
  return is_aligned(from.grad, 16) && is_aligned(from.residual, 16) && is_aligned(from.momentum, 16) &&
         is_aligned(from.new_residual, 16) && is_aligned(from.new_momentum, 16);
}

__device__ inline std::int32_t key_of(float x) { return __float_as_int(x) & top_key; }

__device__ inline float scale_of(const Source& from) { return from.device_scale ? *from.device_scale : from.scale; }

// The sum that is selected from, in the CPU's order of operations. `momentum` becomes the new one.
__device__ inline float accumulated(const Source& from, float scale, float grad, float residual, float& momentum) {
  float x = __fmul_rn(grad, scale);
  if (from.momentum) x = momentum = __fadd_rn(x, __fmul_rn(momentum, from.decay));
  return __fadd_rn(x, residual);
}

__device__ inline Four load(const float* at, unsigned available, bool vectors) {
  if (vectors && available >= 4) return unit_at<4>(at);
  Four x{};
#pragma unroll
  for (unsigned c = 0; c < 4; ++c)
    if (c < available) x.e[c] = at[c];
  return x;
}

__device__ inline void store(float* at, const Four& x, unsigned available, bool vectors) {
  if (vectors && available >= 4) {
    unit_at<4>(at) = x;
    return;
  }
#pragma unroll
  for (unsigned c = 0; c < 4; ++c)
    if (c < available) at[c] = x.e[c];
}

// Four elements of the values to select from, accumulated and stored.
__device__ inline Four accumulate_four(const Source& from, float scale, std::size_t at, unsigned available,
                                       bool vectors) {
  Four x = load(from.grad + at, available, vectors);
  if (!from.residual) return x;
  const Four left = load(from.residual + at, available, vectors);
  Four m{};
  if (from.momentum) m = load(from.momentum + at, available, vectors);
#pragma unroll
  for (int c = 0; c < 4; ++c) x.e[c] = accumulated(from, scale, x.e[c], left.e[c], m.e[c]);
  if (from.momentum) store(from.new_momentum + at, m, available, vectors);
  store(from.new_residual + at, x, available, vectors);
  return x;
}

// Handles four elements of `n` from `at` on.
__device__ inline void report_nonfinite(const Four& x, std::size_t at, std::size_t n, Findings* findings) {
  if (max(max(key_of(x.e[0]), key_of(x.e[1])), max(key_of(x.e[2]), key_of(x.e[3]))) < nonfinite_key) return;
#pragma unroll
  for (unsigned c = 4; c-- > 0;)
    if (key_of(x.e[c]) >= nonfinite_key) atomicMax(&findings->from_bad, static_cast<unsigned long long>(n - at - c));
}

}  // namespace distopt::cuda

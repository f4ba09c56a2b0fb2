// What the selections on the GPU read, and the accumulation that they do on the way.
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

__device__ inline float4 load(const float* at, unsigned available, bool vectors) {
  if (vectors && available >= 4) return *reinterpret_cast<const float4*>(at);
  float4 v = make_float4(0, 0, 0, 0);
  if (available > 0) v.x = at[0];
  if (available > 1) v.y = at[1];
  if (available > 2) v.z = at[2];
  if (available > 3) v.w = at[3];
  return v;
}

__device__ inline void store(float* at, float4 v, unsigned available, bool vectors) {
  if (vectors && available >= 4) {
    *reinterpret_cast<float4*>(at) = v;
    return;
  }
  if (available > 0) at[0] = v.x;
  if (available > 1) at[1] = v.y;
  if (available > 2) at[2] = v.z;
  if (available > 3) at[3] = v.w;
}

// Four elements of what is selected from, accumulated and stored.
__device__ inline float4 accumulate_four(const Source& from, float scale, std::size_t at, unsigned available,
                                         bool vectors) {
  float4 x = load(from.grad + at, available, vectors);
  if (!from.residual) return x;
  const float4 left = load(from.residual + at, available, vectors);
  float4 m = make_float4(0, 0, 0, 0);
  if (from.momentum) m = load(from.momentum + at, available, vectors);
  x.x = accumulated(from, scale, x.x, left.x, m.x);
  x.y = accumulated(from, scale, x.y, left.y, m.y);
  x.z = accumulated(from, scale, x.z, left.z, m.z);
  x.w = accumulated(from, scale, x.w, left.w, m.w);
  if (from.momentum) store(from.new_momentum + at, m, available, vectors);
  store(from.new_residual + at, x, available, vectors);
  return x;
}

// For four elements of `n` from `at` on.
__device__ inline void report_nonfinite(float4 x, std::size_t at, std::size_t n, Findings* findings) {
  const std::int32_t keys[4] = {key_of(x.x), key_of(x.y), key_of(x.z), key_of(x.w)};
  if (max(max(keys[0], keys[1]), max(keys[2], keys[3])) < nonfinite_key) return;
  for (unsigned c = 4; c-- > 0;)
    if (keys[c] >= nonfinite_key) atomicMax(&findings->from_bad, static_cast<unsigned long long>(n - at - c));
}

}  // namespace distopt::cuda

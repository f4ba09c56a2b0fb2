// Input of the selections, the accumulation that they do while they read it, and the findings of all passes.
#pragma once

#include "device.cuh"

#ifdef __CUDACC_RTC__  // elsewhere the emulator has them; CUDA's headers may not be installed
__device__ inline unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ inline float half_to_float(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ inline unsigned short float_to_bfloat16(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

// The results of a pass, in device memory; a rank sends the first three to the others: see distopt/kernels/base.py.
struct Findings {
  unsigned long long selected, overflowed, from_bad, underflowed;
};

// The values to select from, as in csrc/cpu/select.h; the selection computes them in the same pass.
struct Source {
  const float* grad;
  const float* residual;  // or null; momentum needs it
  const float* momentum;  // or null
  float scale;
  const float* device_scale;  // if given, a factor in device memory, in place of `scale`
  float decay;
  float* new_residual;
  float* new_momentum;
};

__device__ inline int key_of(float x) { return __float_as_int(x) & top_key; }

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
__device__ inline Four accumulate_four(const Source& from, float scale, size_t at, unsigned available, bool vectors) {
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
__device__ inline void report_nonfinite(const Four& x, size_t at, size_t n, Findings* findings) {
  if (max(max(key_of(x.e[0]), key_of(x.e[1])), max(key_of(x.e[2]), key_of(x.e[3]))) < nonfinite_key) return;
#pragma unroll
  for (unsigned c = 4; c-- > 0;)
    if (key_of(x.e[c]) >= nonfinite_key) atomicMax(&findings->from_bad, static_cast<unsigned long long>(n - at - c));
}

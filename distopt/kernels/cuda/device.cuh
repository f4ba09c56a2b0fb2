// Tools of all kernels: how threads share elements, rows and planes, and sums over a block in a fixed order.
#pragma once

#include "shared.h"

using namespace distopt;

constexpr unsigned block_threads = 256;
constexpr unsigned all_lanes = 0xffffffff;
constexpr unsigned warp_count = block_threads / 32;

__device__ inline double not_a_number() { return __longlong_as_double(0x7ff8000000000000); }

// The data of one memory access: one element, or several, aligned to their size or, if that is more, to 16 bytes.
template <class E, unsigned count>
struct alignas(count * sizeof(E) < 16 ? count * sizeof(E) : 16) Unit {
  E e[count];
};
using Four = Unit<float, 4>;

// Whether units of arrays may be accessed; null is no array.
template <class... E>
__device__ bool are_aligned(const E*... arrays) {
  return (reinterpret_cast<size_t>(arrays) | ...) % 16 == 0;
}

// The first `available` elements of a unit, and zeros.
template <unsigned count, class E>
__device__ Unit<E, count> load(const E* at, unsigned available, bool aligned) {
  if (aligned && available >= count) return *reinterpret_cast<const Unit<E, count>*>(at);
  Unit<E, count> x{};
#pragma unroll
  for (unsigned c = 0; c < count; ++c)
    if (c < available) x.e[c] = at[c];
  return x;
}

template <unsigned count, class E>
__device__ void store(E* at, const Unit<E, count>& x, unsigned available, bool aligned) {
  if (aligned && available >= count) {
    *reinterpret_cast<Unit<E, count>*>(at) = x;
    return;
  }
#pragma unroll
  for (unsigned c = 0; c < count; ++c)
    if (c < available) at[c] = x.e[c];
}

__device__ inline size_t thread_index() { return size_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline size_t thread_stride() { return size_t{gridDim.x} * blockDim.x; }

// Calls f(i) for each i < count, in one of the threads of the first dimension of the grid.
template <class F>
__device__ void for_each(size_t count, F f) {
  for (size_t i = thread_index(); i < count; i += thread_stride()) f(i);
}

// Calls f(first, available) for each four elements, of which fewer are available at the end. Not unrolled: many threads
// keep memory busy, and need their registers.
template <class F>
__device__ void for_each_four(size_t n, F f) {
#pragma unroll 1
  for (size_t first = thread_index() * 4; first < n; first += thread_stride() * 4)
    f(first, static_cast<unsigned>(min(n - first, size_t{4})));
}

// Calls f(plane) for each plane, in as many threads as share its elements by `for_each`. The second dimension of the
// grid is the planes, so that threads divide by widths alone.
template <class F>
__device__ void for_planes(size_t planes, F f) {
  for (unsigned plane = blockIdx.y; plane < planes; plane += gridDim.y) f(plane);
}

// The results of a pass, in device memory; a rank sends the first three to the others: see distopt/kernels/base.py.
struct Findings {
  unsigned long long selected, overflowed, from_bad, underflowed;
};

__device__ inline int key_of(float x) { return __float_as_int(x) & top_key; }

// Images in memory: [images, channels, pixels].
struct Batch {
  int images, channels;
};

__device__ inline size_t planes_of(Batch batch) { return size_t(batch.images) * batch.channels; }

// A NaN passes through: hiding one here would hide a diverged run.
template <class T>
__device__ inline T rectify(T x) {
  return x < T(0) ? T(0) : x;
}

// Sum over the block, always in the same order; valid in thread 0. All threads must call it.
template <unsigned threads, class T>
__device__ T block_sum(T value) {
  __shared__ T of_warp[threads / 32];
  for (unsigned step = 16; step; step /= 2) value += __shfl_down_sync(all_lanes, value, step);
  __syncthreads();  // an earlier sum may still be read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  T total{};
  if (threadIdx.x == 0)
    for (unsigned w = 0; w < threads / 32; ++w) total += of_warp[w];
  return total;
}

// For `launch_lanes`: the row whose columns this thread shares with its neighbours, of which it is number `own_lane`.
__device__ inline size_t row_of(unsigned lanes) { return thread_index() / lanes; }
__device__ inline unsigned own_lane(unsigned lanes) { return threadIdx.x % lanes; }

// Sum over the lanes of a row, always in the same order; valid in its first. All threads must call it.
template <class T>
__device__ T sum_lanes(T value, unsigned lanes) {
  if (lanes == block_threads) return block_sum<block_threads>(value);
  for (unsigned step = lanes / 2; step; step /= 2) value += __shfl_down_sync(all_lanes, value, step);
  return value;
}

// For rows of one lane or a warp: the value of the first lane, and the maximum, valid in the first. All threads must
// call.
template <class T>
__device__ T from_first(T value, unsigned lanes) {
  return lanes == 1 ? value : __shfl_sync(all_lanes, value, 0);
}
__device__ inline float maximum_of_lanes(float value, unsigned lanes) {
  for (unsigned step = lanes / 2; step; step /= 2) {
    const float other = __shfl_down_sync(all_lanes, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// Sum of the values of the lanes up to this one. All lanes must call it.
template <class T>
__device__ T warp_scan(T value) {
  for (unsigned step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(all_lanes, value, step);
    if (threadIdx.x % 32 >= step) value += other;
  }
  return value;
}

// Sum of the values of the threads before this one; `total` is the sum over all. All threads must call it.
template <unsigned threads, class T>
__device__ T block_scan(T value, T& total) {
  __shared__ T of_warp[threads / 32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T sum = warp_scan(value);
  __syncthreads();
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  const T own = lane < threads / 32 ? of_warp[lane] : T{}, up_to = warp_scan(own);
  total = __shfl_sync(all_lanes, up_to, 31);
  return __shfl_sync(all_lanes, up_to - own, warp) + sum - value;
}

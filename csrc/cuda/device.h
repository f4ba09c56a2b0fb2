// What the kernels on the GPU share: launch sizes, and sums over a block in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/check.h"

namespace distopt::gpu {

constexpr unsigned block_threads = 256;
constexpr unsigned all_lanes = 0xffffffff;

inline unsigned blocks_of(std::size_t items, std::size_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// Blocks for a grid-stride loop over `items`: as many as the device holds at a time, so that what a block does once at
// its end is done seldom.
inline unsigned stride_blocks(std::size_t items) {
  int device = 0, processors = 0;
  DISTOPT_CUDA_CHECK(cudaGetDevice(&device));
  DISTOPT_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const std::size_t held = static_cast<std::size_t>(processors) * (2048 / block_threads);
  const std::size_t wanted = (items + block_threads - 1) / block_threads;
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted < held ? wanted : held);
}

template <class T>
bool is_aligned(const T* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
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

// Sum of the values of the threads before this one; `total` is that of all. All threads must call it.
template <unsigned threads, class T>
__device__ T block_scan(T value, T& total) {
  __shared__ T of_warp[threads / 32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sum = value;
  for (unsigned step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(all_lanes, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  T before{};
  total = T{};
  for (unsigned w = 0; w < threads / 32; ++w) {
    if (w == warp) before = total;
    total += of_warp[w];
  }
  return before + sum - value;
}

}  // namespace distopt::gpu

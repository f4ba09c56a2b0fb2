// Tools of all kernels on the GPU: launches and their sizes, and sums over a block in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "cuda/check.h"
#include "cuda/launch.h"

namespace distopt::cuda {

constexpr unsigned block_threads = 256;
constexpr unsigned all_lanes = 0xffffffff;
constexpr int warp_count = block_threads / 32;
constexpr unsigned grid_limit = 65535;  // of the second dimension; kernels go round

using std::exp;
using std::log;
using std::sqrt;

// Of namespace scope: device code may read such constants, but not call the functions that make them.
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

inline unsigned blocks_of(std::size_t items, std::size_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

// Blocks for a grid-stride loop over `items`: as many as the device holds at a time, so that the work
// at the end of a block is rare.
inline unsigned stride_blocks(std::size_t items) {
  int device = 0, processors = 0;
  DISTOPT_CUDA_CHECK(cudaGetDevice(&device));
  DISTOPT_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const std::size_t held = static_cast<std::size_t>(processors) * (2048 / block_threads);
  const std::size_t wanted = (items + block_threads - 1) / block_threads;
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted < held ? wanted : held);
}

// Blocks for one thread per element; beyond the limit, threads loop.
inline unsigned grid_for(std::size_t count) {
  const std::size_t blocks = (count + block_threads - 1) / block_threads;
  return static_cast<unsigned>(blocks < (1u << 24) ? blocks : 1u << 24);
}

// The data of one memory access: one element, or several, aligned to their size or, if that is more, to 16 bytes.
template <class E, int count>
struct alignas(count * sizeof(E) < 16 ? count * sizeof(E) : 16) Unit {
  E e[count];
};
using Four = Unit<float, 4>;

template <int count, class E>
__device__ const Unit<E, count>& unit_at(const E* first) {
  return *reinterpret_cast<const Unit<E, count>*>(first);
}

template <int count, class E>
__device__ Unit<E, count>& unit_at(E* first) {
  return *reinterpret_cast<Unit<E, count>*>(first);
}

template <class T>
bool is_aligned(const T* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

__device__ inline std::size_t thread_index() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline std::size_t thread_stride() { return std::size_t{gridDim.x} * blockDim.x; }

template <class F>
__global__ void each_kernel(F f, std::size_t count) {
  for (std::size_t i = thread_index(); i < count; i += thread_stride()) f(i);
}

// Calls f(i) on the device for each i < count; launches nothing if count is 0.
template <class F>
void launch_each(std::size_t count, cudaStream_t stream, F f) {
  if (count) launch(&each_kernel<F>, grid_for(count), block_threads, stream, f, count);
}

// A number that the compiler knows.
template <int number>
struct Width {
  __device__ constexpr operator int() const { return number; }
};

// Calls f(width, first) on the device for elements first ... first + width - 1, until it has had all: `unit` of them at
// a time if the arrays are `aligned` for that, and one where fewer are left.
template <int unit, class F>
void launch_units(std::size_t count, bool aligned, cudaStream_t stream, F f) {
  const std::size_t units = aligned ? count / unit : 0, rest = units * unit;
  launch_each(units + (count - rest), stream, [=] __device__(std::size_t i) {
    if (i < units)
      f(Width<unit>(), i * unit);
    else
      f(Width<1>(), rest + (i - units));
  });
}

template <class F>
__global__ void planes_kernel(F f, std::size_t planes) {
  for (unsigned plane = blockIdx.y; plane < planes; plane += gridDim.y) f(plane);
}

// Calls f(plane) on the device for each plane, in as many threads as share its `pixels`, which f deals out by
// thread_index() and thread_stride(); launches nothing for an empty grid.
template <class F>
void launch_planes(std::size_t planes, std::size_t pixels, cudaStream_t stream, F f) {
  const dim3 grid(grid_for(pixels), static_cast<unsigned>(planes < grid_limit ? planes : grid_limit));
  if (pixels && planes) launch(&planes_kernel<F>, grid, block_threads, stream, f, planes);
}

// A NaN passes through: hiding one here would hide a diverged run.
template <class T>
__device__ inline T rectify(T x) {
  return x < T(0) ? T(0) : x;
}

template <class T>
__device__ inline T rectify_gradient(T dy, T y) {
  return y <= T(0) ? T(0) : dy;
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

}  // namespace distopt::cuda

// What the kernels of cuda_compute_kernels.cu and cuda_image_kernels.cu share.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "cuda/device.h"
#include "cuda/launch.h"

namespace distopt::cuda {

using std::exp;
using std::log;
using std::sqrt;

using gpu::block_threads;

// Of namespace scope: device code may read such constants, and may not call what makes them.
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

constexpr int warp_count = block_threads / 32;
constexpr unsigned grid_limit = 65535;  // of the second dimension; kernels go round

// Blocks for one thread per element; beyond the limit threads go round.
inline dim3 grid_for(std::size_t count) {
  const std::size_t blocks = (count + block_threads - 1) / block_threads;
  return dim3(static_cast<unsigned>(blocks < (1u << 24) ? blocks : 1u << 24));
}

// Blocks for one thread per pixel, and rows of the grid for planes.
inline dim3 grid_for_planes(std::size_t pixels, std::size_t planes) {
  return dim3(grid_for(pixels).x, static_cast<unsigned>(planes < grid_limit ? planes : grid_limit));
}

// Starts a kernel with one thread per element; no elements are no launch.
template <class Kernel, class... Arguments>
void launch_each(Kernel* kernel, std::size_t count, cudaStream_t stream, const Arguments&... arguments) {
  if (count) launch(kernel, grid_for(count), dim3(block_threads), stream, arguments...);
}

__device__ inline std::size_t thread_index() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline std::size_t thread_stride() { return std::size_t{gridDim.x} * blockDim.x; }

// A NaN passes through: hiding one here would hide a diverged run.
template <class T>
__device__ inline T rectify(T x) {
  return x < T(0) ? T(0) : x;
}

template <class T>
__device__ inline T rectify_gradient(T dy, T y) {
  return y <= T(0) ? T(0) : dy;
}

}  // namespace distopt::cuda

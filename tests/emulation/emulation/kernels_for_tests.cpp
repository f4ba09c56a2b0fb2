// A library of kernels for tests/unit/test_emulator.py: what the emulator must get right, and faults that it must show.
#include <cuda_runtime.h>

namespace {

// Sums 256 numbers by halves; without its barriers a thread would meet sums that are not complete yet.
template <bool barriers>
__global__ void tree_kernel(const int* in, int* out) {
  __shared__ int sums[256];
  sums[threadIdx.x] = in[blockIdx.x * 256 + threadIdx.x];
  for (unsigned step = 128; step; step /= 2) {
    if (barriers) __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}

// Every thread takes its left neighbour's number and then leaves its own there for the right one; the barrier in
// between keeps a write from overtaking a read.
template <bool barrier>
__global__ void rotate_kernel(int* numbers) {
  const int left = numbers[(threadIdx.x + 255) % 256];
  if (barrier) __syncthreads();
  numbers[threadIdx.x] = left;
}

__global__ void diverged_kernel(int*) {
  if (threadIdx.x < 16)
    __ballot_sync(0xffffffff, 1);
  else
    __shfl_sync(0xffffffff, 1, 0);
}

__global__ void waiting_kernel(int*) {
  if (threadIdx.x == 0) __syncwarp(0x3);
}

template <class... P>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, std::uintptr_t stream, P... arguments) {
  emulation::launch(kernel, grid, block, reinterpret_cast<cudaStream_t>(stream), std::tuple<P...>(arguments...));
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default"))) void

EXPORT run_tree(bool barriers, const int* in, int* out, unsigned blocks, std::uintptr_t stream) {
  launch(barriers ? &tree_kernel<true> : &tree_kernel<false>, blocks, 256, stream, in, out);
}
EXPORT run_rotate(bool barrier, int* numbers, std::uintptr_t stream) {
  launch(barrier ? &rotate_kernel<true> : &rotate_kernel<false>, 1, 256, stream, numbers);
}
EXPORT run_diverged(int* out, std::uintptr_t stream) { launch(&diverged_kernel, 1, 32, stream, out); }
EXPORT run_waiting(int* out, std::uintptr_t stream) { launch(&waiting_kernel, 1, 32, stream, out); }
extern "C" __attribute__((visibility("default"))) int synchronize(std::uintptr_t stream) {
  return cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream));
}

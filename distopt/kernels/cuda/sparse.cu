// Sums of sparse lists.
#include "device.cuh"

constexpr unsigned tile = 4096;  // of the dense array, in shared memory; see gpu.py

// The number of indices below the bound; all lanes of a warp look at the ends of as many parts at a time, since every
// look waits for memory.
__device__ unsigned lower_bound(const int* indices, unsigned count, long long bound) {
  const unsigned lane = threadIdx.x % 32;
  unsigned low = 0, end = count;  // it is one of low ... end
  while (low < end) {
    const unsigned part = (end - low + 31) / 32, last = low + lane * part + part - 1;
    const bool below = last < end && indices[last] < bound;
    low += part * __popc(__ballot_sync(all_lanes, below));
    end = min(low + part - 1, end);  // the last one of the next part is not below
  }
  return low;
}

// Lists of ascending indices, one after the other.
struct SparseLists {
  const int* indices[32];
  const float* values[32];
  unsigned counts[32];
  unsigned size;
};

// dense[lo ... hi - 1] = (if `add`: itself +) the sum, list after list, of value * scale; writes every element once.
// One block per tile of the dense array, which is summed up in shared memory. Within a list no two entries meet, so
// only the step from list to list needs a barrier.
__global__ void __launch_bounds__(block_threads)
    scatter(float* dense, SparseLists lists, size_t lo, size_t hi, float scale, bool add) {
  alignas(16) __shared__ float sums[tile];
  __shared__ unsigned bounds[2 * 32];
  const size_t begin = lo + size_t{blockIdx.x} * tile, end = min(begin + tile, hi);
  const auto size = static_cast<unsigned>(end - begin);
  const bool aligned = are_aligned(dense + begin);
  for (unsigned i = threadIdx.x * 4; i < size; i += block_threads * 4)
    store(sums + i, add ? load<4>(dense + begin + i, size - i, aligned) : Four{}, 4, true);
  for (unsigned b = threadIdx.x / 32; b < 2 * lists.size; b += warp_count) {
    const size_t bound = b % 2 ? end : begin;
    const unsigned found = lower_bound(lists.indices[b / 2], lists.counts[b / 2], static_cast<long long>(bound));
    if (threadIdx.x % 32 == 0) bounds[b] = found;
  }
  __syncthreads();
  for (unsigned r = 0; r < lists.size; ++r) {
    for (unsigned j = bounds[2 * r] + threadIdx.x; j < bounds[2 * r + 1]; j += block_threads) {
      float& sum = sums[static_cast<size_t>(lists.indices[r][j]) - begin];
      sum = __fadd_rn(sum, __fmul_rn(lists.values[r][j], scale));
    }
    __syncthreads();
  }
  for (unsigned i = threadIdx.x * 4; i < size; i += block_threads * 4)
    store(dense + begin + i, load<4>(sums + i, 4, true), size - i, aligned);
}

#include "cuda/device.h"
#include "cuda/source.h"

// Accumulation without a selection, and sums of sparse lists.
namespace distopt::cuda {
namespace {

constexpr unsigned tile = 4096;  // of the dense array, in shared memory

__global__ void __launch_bounds__(block_threads)
    accumulate_kernel(Source from, std::size_t n, bool vectors, Findings* findings) {
  const float scale = scale_of(from);
  for (std::size_t at = thread_index() * 4; at < n; at += thread_stride() * 4) {
    const unsigned available = static_cast<unsigned>(min(n - at, std::size_t{4}));
    const Four x = accumulate_four(from, scale, at, available, vectors);
    report_nonfinite(x, at, n, findings);
  }
}

// -- sparse lists -----------------------------------------------------------------------------------------------------
// The number of indices below the bound; all lanes of a warp look at the ends of as many parts at a time, since every
// look waits for memory.
__device__ unsigned lower_bound(const std::int32_t* indices, unsigned count, std::int64_t bound) {
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

// One block per tile of the dense array, which is summed up in shared memory. Within a list no two entries meet, so
// only the step from list to list needs a barrier.
__global__ void __launch_bounds__(block_threads) scatter_kernel(float* dense, SparseLists lists, std::size_t lo,
                                                                std::size_t hi, bool vectors, float scale, bool add) {
  alignas(16) __shared__ float sums[tile];
  __shared__ unsigned bounds[2 * SparseLists::most];
  const std::size_t begin = lo + std::size_t{blockIdx.x} * tile, end = min(begin + tile, hi);
  const auto size = static_cast<unsigned>(end - begin);
  for (unsigned i = threadIdx.x * 4; i < size; i += block_threads * 4)
    unit_at<4>(sums + i) = add ? load(dense + begin + i, size - i, vectors) : Four{};
  for (unsigned b = threadIdx.x / 32; b < 2 * lists.size; b += warp_count) {
    const std::size_t bound = b % 2 ? end : begin;
    const unsigned found = lower_bound(lists.indices[b / 2], lists.counts[b / 2], static_cast<std::int64_t>(bound));
    if (threadIdx.x % 32 == 0) bounds[b] = found;
  }
  __syncthreads();
  for (unsigned r = 0; r < lists.size; ++r) {
    for (unsigned j = bounds[2 * r] + threadIdx.x; j < bounds[2 * r + 1]; j += block_threads) {
      float& sum = sums[static_cast<std::size_t>(lists.indices[r][j]) - begin];
      sum = __fadd_rn(sum, __fmul_rn(lists.values[r][j], scale));
    }
    __syncthreads();
  }
  for (unsigned i = threadIdx.x * 4; i < size; i += block_threads * 4)
    store(dense + begin + i, unit_at<4>(sums + i), size - i, vectors);
}

}  // namespace

void accumulate(const Source& from, std::size_t n, Findings* findings, cudaStream_t stream) {
  require(from.residual, "there is nothing to accumulate in without a residual");
  DISTOPT_CUDA_CHECK(cudaMemsetAsync(findings, 0, sizeof *findings, stream));
  if (n)
    launch(&accumulate_kernel, stride_blocks(n / 4), block_threads, stream, from, n, takes_vectors(from), findings);
}

void clear_at(float* dense, const std::int32_t* indices, std::size_t count, cudaStream_t stream) {
  launch_each(count, stream, [=] __device__(std::size_t i) { dense[indices[i]] = 0; });
}

void scatter_sum(float* dense, const SparseLists& lists, std::size_t lo, std::size_t hi, float scale, bool add,
                 cudaStream_t stream) {
  if (lo < hi)
    launch(&scatter_kernel, blocks_of(hi - lo, tile), block_threads, stream, dense, lists, lo, hi,
           is_aligned(dense + lo, 16), scale, add);
}

}  // namespace distopt::cuda

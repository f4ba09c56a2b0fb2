#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "base/float_keys.h"
#include "cuda/codec.h"
#include "cuda/device.h"
#include "cuda/source.h"

// Sums and products are spelled as intrinsics where the CPU's bits count: nvcc would contract operators to FMA.
namespace distopt::cuda {
namespace {

struct Half {
  static constexpr int becomes_zero = float16_zero_key;
  static __device__ unsigned short encode(float x) { return __half_as_ushort(__float2half_rn(x)); }
  static __device__ float decode(unsigned short x) { return __half2float(__ushort_as_half(x)); }
};

struct BFloat16 {
  static constexpr int becomes_zero = bfloat16_zero_key;
  static __device__ unsigned short encode(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  static __device__ float decode(unsigned short x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
};

// Findings of one thread.
struct Tally {
  unsigned overflowed = 0, underflowed = 0;
  unsigned long long from_bad = 0;
};

// `unit` elements at a time: 8, in 16-byte accesses, or 1.
template <class Type, bool with_residual, int unit>
__device__ void encode_unit(const float* in, const float* residual, float* new_residual, unsigned short* out,
                            std::size_t first, std::size_t n, float scale, float limit, Tally& tally) {
  Unit<float, unit> x = unit_at<unit>(in + first), left;
  Unit<unsigned short, unit> encoded;
  if (with_residual) left = unit_at<unit>(residual + first);
#pragma unroll
  for (int i = 0; i < unit; ++i) {
    if (with_residual) x.e[i] = __fadd_rn(x.e[i], left.e[i]);
    const float scaled = __fmul_rn(x.e[i], scale);
    const int magnitude = __float_as_int(scaled) & top_key;
    const bool over = __int_as_float(magnitude) > limit;
    encoded.e[i] = Type::encode(over ? copysignf(limit, scaled) : scaled);
    bool bad = x.e[i] != x.e[i];
    if (with_residual) {
      left.e[i] = __fsub_rn(x.e[i], __fmul_rn(Type::decode(encoded.e[i]), __fdiv_rn(1.0f, scale)));
      bad = (__float_as_int(left.e[i]) & top_key) >= nonfinite_key;
    }
    tally.overflowed += over;
    tally.underflowed += magnitude <= Type::becomes_zero && x.e[i] != 0;
    if (bad && n - first - i > tally.from_bad) tally.from_bad = n - first - i;
  }
  unit_at<unit>(out + first) = encoded;
  if (with_residual) unit_at<unit>(new_residual + first) = left;
}

template <class Type, bool with_residual, int unit>
__global__ void __launch_bounds__(block_threads)
    encode_kernel(const float* in, const float* residual, float* new_residual, unsigned short* out, std::size_t n,
                  float scale, float limit, Findings* findings) {
  Tally tally;
  const std::size_t thread = thread_index(), stride = thread_stride();
  for (std::size_t u = thread; u < n / unit; u += stride)
    encode_unit<Type, with_residual, unit>(in, residual, new_residual, out, u * unit, n, scale, limit, tally);
  if (unit > 1 && thread < n % unit)
    encode_unit<Type, with_residual, 1>(in, residual, new_residual, out, n - n % unit + thread, n, scale, limit, tally);
  if (tally.from_bad) atomicMax(&findings->from_bad, tally.from_bad);
  // Both counts in one sum; a block sees fewer than 2^31 elements of either kind.
  const auto both =
      block_sum<block_threads>(static_cast<unsigned long long>(tally.overflowed) << 32 | tally.underflowed);
  if (threadIdx.x == 0 && both) {
    atomicAdd(&findings->overflowed, both >> 32);
    atomicAdd(&findings->underflowed, both & 0xffffffff);
  }
}

// The grid depends on n alone, so that every device adds in the same order.
__global__ void __launch_bounds__(block_threads)
    norm_parts_kernel(const float* x, std::size_t n, bool vectors, double* parts) {
  double sums[4] = {};
  const std::size_t thread = thread_index(), stride = thread_stride();
  for (std::size_t first = thread * 4; first < n; first += stride * 4) {
    const Four v = load(x + first, static_cast<unsigned>(min(n - first, std::size_t{4})), vectors);
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[c] = __fma_rn(double{v.e[c]}, double{v.e[c]}, sums[c]);
  }
  const double total = block_sum<block_threads>(sums[0] + sums[1] + (sums[2] + sums[3]));
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

__global__ void __launch_bounds__(block_threads)
    norm_kernel(const double* parts, unsigned count, double* norm, float* scale, double limit) {
  double sum = 0;
  for (unsigned i = threadIdx.x; i < count; i += block_threads) sum += parts[i];
  const double total = block_sum<block_threads>(sum);
  if (threadIdx.x != 0) return;
  *norm = total;
  const double root = sqrt(total);
  // A norm that is NaN or infinite must not scale the element away that an error is about to name.
  if (scale) *scale = limit < root && root - root == 0 ? static_cast<float>(limit / root) : 1.0f;
}

template <class Real>
__global__ void __launch_bounds__(block_threads)
    beyond_kernel(const Real* x, std::size_t n, bool vectors, Real limit, unsigned long long* from_bad) {
  const auto beyond = [limit](Real value) { return !((value <= limit) & (-limit <= value)); };  // NaN, too
  constexpr int unit = 16 / sizeof(Real);
  const std::size_t thread = thread_index(), stride = thread_stride();
  const std::size_t units = vectors ? n / unit : 0;
  std::size_t bad = n;
  for (std::size_t u = thread; u < units && bad == n; u += stride) {
    const Unit<Real, unit> elements = unit_at<unit>(x + u * unit);
#pragma unroll
    for (int i = unit; i-- > 0;)
      if (beyond(elements.e[i])) bad = u * unit + i;
  }
  for (std::size_t i = units * unit + thread; i < n && bad == n; i += stride)
    if (beyond(x[i])) bad = i;
  if (bad != n) atomicMax(from_bad, static_cast<unsigned long long>(n - bad));
}

template <class Type, bool with_residual>
void encode(const float* in, const float* residual, float* new_residual, std::uint16_t* out, std::size_t n, float scale,
            float limit, Findings* findings, cudaStream_t stream) {
  if (is_aligned(in, 16) && is_aligned(residual, 16) && is_aligned(new_residual, 16) && is_aligned(out, 16))
    launch(&encode_kernel<Type, with_residual, 8>, stride_blocks(n / 8), block_threads, stream, in, residual,
           new_residual, out, n, scale, limit, findings);
  else
    launch(&encode_kernel<Type, with_residual, 1>, stride_blocks(n), block_threads, stream, in, residual, new_residual,
           out, n, scale, limit, findings);
}

template <class Type>
void decode(const std::uint16_t* in, float* out, std::size_t n, float scale, cudaStream_t stream) {
  launch_units<4>(n, is_aligned(in, 8) && is_aligned(out, 16), stream, [=] __device__(auto width, std::size_t first) {
    const Unit<std::uint16_t, width> encoded = unit_at<width>(in + first);
    Unit<float, width> x;
#pragma unroll
    for (int i = 0; i < width; ++i) x.e[i] = __fmul_rn(Type::decode(encoded.e[i]), scale);
    unit_at<width>(out + first) = x;
  });
}

template <class Real>
void find_beyond(const Real* x, std::size_t n, Real limit, unsigned long long* from_bad, cudaStream_t stream) {
  DISTOPT_CUDA_CHECK(cudaMemsetAsync(from_bad, 0, sizeof *from_bad, stream));
  if (n)
    launch(&beyond_kernel<Real>, stride_blocks(n / 4), block_threads, stream, x, n, is_aligned(x, 16), limit, from_bad);
}

}  // namespace

void encode16(const float* in, const float* residual, float* new_residual, std::uint16_t* out, std::size_t n,
              float scale, float limit, DType type, Findings* findings, cudaStream_t stream) {
  DISTOPT_CUDA_CHECK(cudaMemsetAsync(findings, 0, sizeof *findings, stream));
  if (!n) return;
  const auto chosen = type == DType::float16 ? (residual ? &encode<Half, true> : &encode<Half, false>)
                                             : (residual ? &encode<BFloat16, true> : &encode<BFloat16, false>);
  chosen(in, residual, new_residual, out, n, scale, limit, findings, stream);
}

void decode16(const std::uint16_t* in, float* out, std::size_t n, float scale, DType type, cudaStream_t stream) {
  if (type == DType::float16)
    decode<Half>(in, out, n, scale, stream);
  else
    decode<BFloat16>(in, out, n, scale, stream);
}

void squared_norm(const float* x, std::size_t n, double* workspace, double* norm, float* scale, double limit,
                  cudaStream_t stream) {
  const unsigned wanted = blocks_of(n, std::size_t{4} * block_threads);
  const unsigned blocks = wanted < 1 ? 1 : wanted < squared_norm_parts ? wanted : squared_norm_parts;
  launch(&norm_parts_kernel, blocks, block_threads, stream, x, n, is_aligned(x, 16), workspace);
  launch(&norm_kernel, 1, block_threads, stream, workspace, blocks, norm, scale, limit);
}

template <class Real>
void find_nonfinite(const Real* x, std::size_t n, unsigned long long* from_bad, cudaStream_t stream) {
  find_beyond(x, n, std::numeric_limits<Real>::max(), from_bad, stream);
}

template <class Real>
void mark_beyond(Real* x, std::size_t n, double limit, unsigned long long* from_bad, cudaStream_t stream) {
  find_beyond(x, n, static_cast<Real>(limit), from_bad, stream);
  constexpr Real mark = std::numeric_limits<Real>::quiet_NaN();
  launch_each(n ? 1 : 0, stream, [=] __device__(std::size_t) {
    if (*from_bad) *x = mark;
  });
}

template void find_nonfinite(const float*, std::size_t, unsigned long long*, cudaStream_t);
template void find_nonfinite(const double*, std::size_t, unsigned long long*, cudaStream_t);
template void mark_beyond(float*, std::size_t, double, unsigned long long*, cudaStream_t);
template void mark_beyond(double*, std::size_t, double, unsigned long long*, cudaStream_t);

}  // namespace distopt::cuda

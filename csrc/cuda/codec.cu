#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <type_traits>

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

// `unit` elements at a time: 8, in 16-byte accesses, or 1.
__device__ void load(const float* at, float (&x)[1]) { x[0] = *at; }
__device__ void load(const unsigned short* at, unsigned short (&x)[1]) { x[0] = *at; }
__device__ void store(float* at, const float (&x)[1]) { *at = x[0]; }
__device__ void store(unsigned short* at, const unsigned short (&x)[1]) { *at = x[0]; }

__device__ void load(const float* at, float (&x)[8]) {
  const float4 low = reinterpret_cast<const float4*>(at)[0], high = reinterpret_cast<const float4*>(at)[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ void store(float* at, const float (&x)[8]) {
  reinterpret_cast<float4*>(at)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(at)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ void load(const unsigned short* at, unsigned short (&x)[8]) {
  const uint4 packed = *reinterpret_cast<const uint4*>(at);
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = static_cast<unsigned short>(words[i / 2] >> 16 * (i % 2));
}

__device__ void store(unsigned short* at, const unsigned short (&x)[8]) {
  const auto pair = [&](int i) { return static_cast<unsigned>(x[i]) | static_cast<unsigned>(x[i + 1]) << 16; };
  *reinterpret_cast<uint4*>(at) = make_uint4(pair(0), pair(2), pair(4), pair(6));
}

// What one thread has found.
struct Tally {
  unsigned overflowed = 0, underflowed = 0;
  unsigned long long from_bad = 0;
};

template <class Type, bool with_residual, int unit>
__device__ void encode_unit(const float* in, const float* residual, float* new_residual, unsigned short* out,
                            std::size_t first, std::size_t n, float scale, float limit, Tally& tally) {
  float x[unit], left[unit];
  unsigned short encoded[unit];
  load(in + first, x);
  if (with_residual) load(residual + first, left);
#pragma unroll
  for (int i = 0; i < unit; ++i) {
    if (with_residual) x[i] = __fadd_rn(x[i], left[i]);
    const float scaled = __fmul_rn(x[i], scale);
    const int magnitude = __float_as_int(scaled) & top_key;
    const bool over = __int_as_float(magnitude) > limit;
    encoded[i] = Type::encode(over ? copysignf(limit, scaled) : scaled);
    bool bad = x[i] != x[i];
    if (with_residual) {
      left[i] = __fsub_rn(x[i], __fmul_rn(Type::decode(encoded[i]), __fdiv_rn(1.0f, scale)));
      bad = (__float_as_int(left[i]) & top_key) >= nonfinite_key;
    }
    tally.overflowed += over;
    tally.underflowed += magnitude <= Type::becomes_zero && x[i] != 0;
    if (bad && n - first - i > tally.from_bad) tally.from_bad = n - first - i;
  }
  store(out + first, encoded);
  if (with_residual) store(new_residual + first, left);
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

template <class Type, int unit>
__global__ void __launch_bounds__(block_threads)
    decode_kernel(const unsigned short* in, float* out, std::size_t n, float scale) {
  const auto decode = [=](auto& encoded, auto& x, std::size_t first) {
    load(in + first, encoded);
    int i = 0;
    for (const unsigned short element : encoded) x[i++] = __fmul_rn(Type::decode(element), scale);
    store(out + first, x);
  };
  const std::size_t thread = thread_index(), stride = thread_stride();
  for (std::size_t u = thread; u < n / unit; u += stride) {
    unsigned short encoded[unit];
    float x[unit];
    decode(encoded, x, u * unit);
  }
  if (unit > 1 && thread < n % unit) {
    unsigned short encoded[1];
    float x[1];
    decode(encoded, x, n - n % unit + thread);
  }
}

// The grid depends on n alone, so that every device adds in the same order.
__global__ void __launch_bounds__(block_threads)
    norm_parts_kernel(const float* x, std::size_t n, bool vectors, double* parts) {
  double sums[4] = {};
  const std::size_t thread = thread_index(), stride = thread_stride();
  for (std::size_t first = thread * 4; first < n; first += stride * 4) {
    const float4 v = cuda::load(x + first, static_cast<unsigned>(min(n - first, std::size_t{4})), vectors);
    const double a = v.x, b = v.y, c = v.z, d = v.w;
    sums[0] = __fma_rn(a, a, sums[0]);
    sums[1] = __fma_rn(b, b, sums[1]);
    sums[2] = __fma_rn(c, c, sums[2]);
    sums[3] = __fma_rn(d, d, sums[3]);
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
  using Vector = std::conditional_t<std::is_same_v<Real, float>, float4, double2>;
  const auto beyond = [limit](Real value) { return !((value <= limit) & (-limit <= value)); };  // NaN, too
  constexpr std::size_t unit = sizeof(Vector) / sizeof(Real);
  const std::size_t thread = thread_index(), stride = thread_stride();
  const std::size_t units = vectors ? n / unit : 0;
  std::size_t bad = n;
  for (std::size_t u = thread; u < units && bad == n; u += stride) {
    const Vector vector = reinterpret_cast<const Vector*>(x)[u];
    Real elements[unit];
    memcpy(elements, &vector, sizeof vector);
#pragma unroll
    for (std::size_t i = unit; i-- > 0;)
      if (beyond(elements[i])) bad = u * unit + i;
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
  if (is_aligned(in, 16) && is_aligned(out, 16))
    launch(&decode_kernel<Type, 8>, stride_blocks(n / 8), block_threads, stream, in, out, n, scale);
  else
    launch(&decode_kernel<Type, 1>, stride_blocks(n), block_threads, stream, in, out, n, scale);
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
  if (!n) return;
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

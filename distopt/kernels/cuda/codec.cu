// Dense passes over a bucket, with the meaning that csrc/cpu/codec.h gives them. Sums and products are spelled as
// intrinsics where the CPU's bits count: an operator could be contracted to FMA.
#include "source.cuh"

struct Half {
  static constexpr int becomes_zero = float16_zero_key;
  static __device__ unsigned short encode(float x) { return float_to_half(x); }
  static __device__ float decode(unsigned short x) { return half_to_float(x); }
};

struct BFloat16 {
  static constexpr int becomes_zero = bfloat16_zero_key;
  static __device__ unsigned short encode(float x) { return float_to_bfloat16(x); }
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
                            size_t first, size_t n, float scale, float limit, Tally& tally) {
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

// csrc/cpu/codec.h: encode16. Unusable is NaN, and with a residual also what leaves one that is not finite. Per element
// 4 bytes read and 2 written; with a residual 8 and 6.
template <class Type, bool with_residual, int unit>
__global__ void __launch_bounds__(block_threads)
    encode(const float* in, const float* residual, float* new_residual, unsigned short* out, size_t n, float scale,
           float limit, Findings* findings) {
  Tally tally;
  const size_t thread = thread_index(), stride = thread_stride();
  for (size_t u = thread; u < n / unit; u += stride)
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

// csrc/cpu/codec.h: decode16. Per element 2 bytes read, 4 written.
template <class Type>
__global__ void decode(const unsigned short* in, float* out, size_t n, float scale, bool aligned) {
  for_units(n, aligned, [&](auto width, size_t first) {
    const Unit<unsigned short, width> encoded = unit_at<width>(in + first);
    Unit<float, width> x;
#pragma unroll
    for (int i = 0; i < width; ++i) x.e[i] = __fmul_rn(Type::decode(encoded.e[i]), scale);
    unit_at<width>(out + first) = x;
  });
}

// The sums of squares of all blocks. The grid depends on n alone, so that every device adds in the same order.
__global__ void __launch_bounds__(block_threads) norm_parts(const float* x, size_t n, bool vectors, double* parts) {
  double sums[4] = {};
  const size_t thread = thread_index(), stride = thread_stride();
  for (size_t first = thread * 4; first < n; first += stride * 4) {
    const Four v = load(x + first, static_cast<unsigned>(min(n - first, size_t{4})), vectors);
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[c] = __fma_rn(double{v.e[c]}, double{v.e[c]}, sums[c]);
  }
  const double total = block_sum<block_threads>(sums[0] + sums[1] + (sums[2] + sums[3]));
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

// One block: norm[0] = sum of squares in float64; *scale = limit / sqrt(norm) if that is below 1, else 1.
__global__ void __launch_bounds__(block_threads)
    norm_and_scale(const double* parts, unsigned count, double* norm, float* scale, double limit) {
  double sum = 0;
  for (unsigned i = threadIdx.x; i < count; i += block_threads) sum += parts[i];
  const double total = block_sum<block_threads>(sum);
  if (threadIdx.x != 0) return;
  *norm = total;
  const double root = sqrt(total);
  // A norm that is NaN or infinite must not scale the element away that an error is about to name.
  *scale = limit < root && root - root == 0 ? static_cast<float>(limit / root) : 1.0f;
}

// *from_bad as in Findings, of elements that are NaN or beyond +-limit. Reads once.
template <class T>
__global__ void __launch_bounds__(block_threads)
    find_beyond(const T* x, size_t n, T limit, unsigned long long* from_bad, bool aligned) {
  size_t bad = n;
  for_units(n, aligned, [&](auto width, size_t first) {
    const Unit<T, width> values = unit_at<width>(x + first);
#pragma unroll
    for (int i = width; i-- > 0;)
      if (!((values.e[i] <= limit) & (-limit <= values.e[i]))) bad = min(bad, first + i);  // NaN, too
  });
  if (bad != n) atomicMax(from_bad, static_cast<unsigned long long>(n - bad));
}

// Dense passes over a bucket, with the meaning that csrc/cpu/codec.h gives them. Sums and products are spelled as
// intrinsics where the CPU's bits count: an operator could be contracted to FMA.
#include "device.cuh"

#ifdef __CUDACC_RTC__  // elsewhere the emulator has them; CUDA's headers may not be installed
__device__ inline unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ inline float half_to_float(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ inline unsigned short float_to_bfloat16(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

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

// csrc/cpu/codec.h: encode16. Unusable is NaN, and with a residual also what leaves one that is not finite. Per element
// 4 bytes read and 2 written; with a residual, which may be null, 8 and 6.
template <class Type>
__global__ void __launch_bounds__(block_threads, 8)
    encode(const float* in, const float* residual, float* new_residual, unsigned short* out, size_t n, float scale,
           float limit, Findings* findings) {
  unsigned overflowed = 0, underflowed = 0;
  size_t from_bad = 0;
  const bool aligned = are_aligned(in, residual, new_residual) && are_aligned(out);
  for_each_four(n, [&](size_t first, unsigned available) {
    Four x = load<4>(in + first, available, aligned), left{};
    Unit<unsigned short, 4> encoded;
    if (residual) left = load<4>(residual + first, available, aligned);
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (residual) x.e[i] = __fadd_rn(x.e[i], left.e[i]);
      const float scaled = __fmul_rn(x.e[i], scale);
      const int magnitude = key_of(scaled);
      const bool over = __int_as_float(magnitude) > limit;
      encoded.e[i] = Type::encode(over ? copysignf(limit, scaled) : scaled);
      bool bad = key_of(x.e[i]) > nonfinite_key;
      if (residual) {
        left.e[i] = __fsub_rn(x.e[i], __fmul_rn(Type::decode(encoded.e[i]), __fdiv_rn(1.0f, scale)));
        bad = key_of(left.e[i]) >= nonfinite_key;
      }
      overflowed += over;
      underflowed += magnitude <= Type::becomes_zero && key_of(x.e[i]) != 0;
      if (bad) from_bad = max(from_bad, n - first - i);
    }
    store(out + first, encoded, available, aligned);
    if (residual) store(new_residual + first, left, available, aligned);
  });
  if (from_bad) atomicMax(&findings->from_bad, from_bad);
  // Both counts in one sum; a block sees fewer than 2^31 elements of either kind.
  const auto both = block_sum<block_threads>(static_cast<unsigned long long>(overflowed) << 32 | underflowed);
  if (threadIdx.x == 0 && both) {
    atomicAdd(&findings->overflowed, both >> 32);
    atomicAdd(&findings->underflowed, both & 0xffffffff);
  }
}

// csrc/cpu/codec.h: decode16. Per element 2 bytes read, 4 written.
template <class Type>
__global__ void decode(const unsigned short* in, float* out, size_t n, float scale) {
  const bool aligned = are_aligned(in) && are_aligned(out);
  for_each_four(n, [&](size_t first, unsigned available) {
    const Unit<unsigned short, 4> encoded = load<4>(in + first, available, aligned);
    Four x;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) x.e[i] = __fmul_rn(Type::decode(encoded.e[i]), scale);
    store(out + first, x, available, aligned);
  });
}

// The sums of squares of all blocks. The grid depends on n alone, so that every device adds in the same order.
__global__ void __launch_bounds__(block_threads) norm_parts(const float* x, size_t n, double* parts) {
  double sums[4] = {};
  const bool aligned = are_aligned(x);
  for_each_four(n, [&](size_t first, unsigned available) {
    const Four v = load<4>(x + first, available, aligned);
#pragma unroll
    for (unsigned c = 0; c < 4; ++c) sums[c] = __fma_rn(double{v.e[c]}, double{v.e[c]}, sums[c]);
  });
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
__global__ void __launch_bounds__(block_threads)
    find_beyond(const float* x, size_t n, float limit, unsigned long long* from_bad) {
  size_t bad = 0;
  const bool aligned = are_aligned(x);
  for_each_four(n, [&](size_t first, unsigned available) {
    const Four values = load<4>(x + first, available, aligned);
#pragma unroll
    for (unsigned c = 0; c < 4; ++c)
      if (!(fabsf(values.e[c]) <= limit)) bad = max(bad, n - first - c);  // NaN, too
  });
  if (bad) atomicMax(from_bad, bad);
}

// The headers of several buckets: the first three findings of each rank.
struct Headers {
  const unsigned long long* at[32];
};

// One block: *flag = whether from_bad of any rank is above 0 in one of `count` buckets; or was true before, if `adds`.
__global__ void __launch_bounds__(block_threads) any_bad(Headers all, int count, int ranks, bool adds, bool* flag) {
  int found = 0;
  for (int i = int(threadIdx.x); i < count * ranks; i += block_threads)
    found += all.at[i / ranks][i % ranks * 3 + 2] != 0;
  found = block_sum<block_threads>(found);
  if (threadIdx.x == 0) *flag = found != 0 || (adds && *flag);
}

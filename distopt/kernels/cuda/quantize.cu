// Arrays in a few bits an element, with the bytes that csrc/cpu/blocks.h and csrc/cpu/chunks.h give them.
#include "device.cuh"

constexpr unsigned quantized_block = block_threads;  // an element for each thread
constexpr unsigned top_chunk = 4096;
constexpr unsigned own_elements = top_chunk / block_threads;  // of a thread, one after another

__device__ inline unsigned read_16(const unsigned char* at) { return at[0] | at[1] << 8; }
__device__ inline void write_16(unsigned char* at, unsigned value) {
  at[0] = static_cast<unsigned char>(value);
  at[1] = static_cast<unsigned char>(value >> 8);
}

// 0 <= number < 1, from an index and a seed.
__device__ inline float random_number(unsigned index, unsigned seed) {
  unsigned h = (index ^ seed) * 0x9e3779b1u;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  return __fmul_rn(static_cast<float>(h >> 8), 0x1p-24f);
}

// csrc/cpu/blocks.h: encode. Per element 4 bytes read, with a residual, which may be null, 8 and 4 written.
__global__ void __launch_bounds__(block_threads)
    encode_blocks(const float* in, const float* residual, float* new_residual, unsigned char* out, size_t n,
                  unsigned bits, bool is_stochastic, unsigned seed, Findings* findings) {
  __shared__ unsigned top;
  __shared__ unsigned char codes[quantized_block];
  const unsigned bytes = quantized_block / 8 * bits, per_byte = 8 / bits;
  const auto bound = static_cast<float>((1 << (bits - 1)) - 1);
  for (size_t block = blockIdx.x; block * quantized_block < n; block += gridDim.x) {
    const size_t i = block * quantized_block + threadIdx.x;
    float x = i < n ? in[i] : 0;
    if (residual && i < n) x = __fadd_rn(x, residual[i]);
    if (threadIdx.x == 0) top = 0;
    __syncthreads();
    atomicMax(&top, static_cast<unsigned>(key_of(x)));
    if (key_of(x) >= nonfinite_key) atomicMax(&findings->from_bad, n - i);
    __syncthreads();
    float scale = __fdiv_rn(__uint_as_float(top), bound);
    if (scale < 0x1p-126f) scale = 0;
    float scaled = __fmul_rn(x, scale > 0 ? __fdiv_rn(1.0f, scale) : 0.0f);
    if (is_stochastic) scaled = __fadd_rn(scaled, __fsub_rn(random_number(static_cast<unsigned>(i), seed), 0.5f));
    const float q = fmaxf(-bound, fminf(bound, rintf(scaled)));
    codes[threadIdx.x] = static_cast<unsigned char>(static_cast<int>(q) + static_cast<int>(bound));
    if (residual && i < n) new_residual[i] = __fsub_rn(x, __fmul_rn(q, scale));
    __syncthreads();
    unsigned char* own = out + block * (sizeof scale + bytes);
    if (threadIdx.x < 2)
      write_16(own + 2 * threadIdx.x, static_cast<unsigned>(__float_as_int(scale)) >> (16 * threadIdx.x));
    if (threadIdx.x < bytes) {
      unsigned byte = 0;
      for (unsigned j = 0; j < per_byte; ++j) byte |= codes[threadIdx.x + j * bytes] << (j * bits);
      own[sizeof scale + threadIdx.x] = static_cast<unsigned char>(byte);
    }
    __syncthreads();
  }
}

// csrc/cpu/blocks.h: decode.
__global__ void decode_blocks(const unsigned char* in, float* out, size_t n, unsigned bits, float factor, bool adds) {
  const unsigned bytes = quantized_block / 8 * bits;
  const int bound = (1 << (bits - 1)) - 1;
  for_each(n, [&](size_t i) {
    const unsigned char* own = in + i / quantized_block * (sizeof(float) + bytes);
    const unsigned j = i % quantized_block;
    const float scale = __uint_as_float(read_16(own) | read_16(own + 2) << 16);
    const int q = (own[sizeof(float) + j % bytes] >> (j / bytes * bits) & ((1 << bits) - 1)) - bound;
    const float x = __fmul_rn(__fmul_rn(static_cast<float>(q), scale), factor);
    out[i] = adds ? __fadd_rn(out[i], x) : x;
  });
}

// -- chunks -----------------------------------------------------------------------------------------------------------
struct Levels {
  float lowest, distance;

  __device__ Levels(unsigned low, unsigned high, unsigned bits)
      : lowest(__uint_as_float(low << 16)),
        distance(__fdiv_rn(__fsub_rn(__uint_as_float(high << 16), lowest), static_cast<float>((1 << (bits - 1)) - 1))) {
  }
  __device__ float value(unsigned code) const {
    const float magnitude = __fadd_rn(lowest, __fmul_rn(static_cast<float>(code >> 1), distance));
    return code & 1 ? -magnitude : magnitude;
  }
};

__device__ inline unsigned to_bfloat16(float x) {  // of a finite x >= 0: nearest even, but never infinite
  const unsigned bits = static_cast<unsigned>(__float_as_int(x));
  return min(bits + 0x7fff + ((bits >> 16) & 1), 0x7f7fffffu) >> 16;
}

__device__ inline unsigned chunk_count(unsigned m, unsigned k) { return (m * k + top_chunk - 1) / top_chunk; }
__device__ inline unsigned values_begin(unsigned count) { return 4 + (count * 12 + 7) / 8; }
__device__ inline size_t chunk_bytes(unsigned count, unsigned bits) {
  return values_begin(count) + (count * bits + 7) / 8;
}

// Byte number `at` of numbers of `bits` bits, one behind the other.
template <class F>
__device__ unsigned char packed_byte(unsigned at, unsigned count, unsigned bits, F number) {
  unsigned byte = 0;
  for (unsigned bit = at * 8; bit < at * 8 + 8 && bit / bits < count;) {
    const unsigned skipped = bit % bits;
    byte |= number(bit / bits) >> skipped << (bit - at * 8);
    bit += bits - skipped;
  }
  return static_cast<unsigned char>(byte);
}

__device__ inline unsigned unpacked(const unsigned char* in, unsigned j, unsigned bits) {
  unsigned word = 0;
  const unsigned begin = j * bits / 8, end = (j * bits + bits + 7) / 8;
  for (unsigned byte = begin; byte < end; ++byte) word |= static_cast<unsigned>(in[byte]) << (8 * (byte - begin));
  return word >> (j * bits % 8) & ((1u << bits) - 1);
}

// The number of keys of the block's threads for which `fits` holds; in all threads.
template <class F>
__device__ unsigned count_keys(const int* keys, F fits) {
  unsigned own = 0, total;
#pragma unroll
  for (unsigned j = 0; j < own_elements; ++j) own += fits(keys[j]);
  block_scan<block_threads>(own, total);
  return total;
}

// The lowest and the highest level of these values, in one thread: sums in the order of the CPU's give its bits.
__device__ void range_of(const float* x, const unsigned short* chosen, unsigned count, unsigned bits, unsigned* range) {
  float low = fabsf(x[chosen[0]]), high = low;
  for (unsigned j = 1; j < count; ++j) {
    low = fminf(low, fabsf(x[chosen[j]]));
    high = fmaxf(high, fabsf(x[chosen[j]]));
  }
  if (bits == 2 && low != high) {
    const float middle = __fadd_rn(low, __fdiv_rn(__fsub_rn(high, low), 2.0f));
    double lower = 0, upper = 0;
    unsigned n_upper = 0;
    for (unsigned j = 0; j < count; ++j) {
      const float magnitude = fabsf(x[chosen[j]]);
      if (magnitude > middle) {
        upper += magnitude;
        ++n_upper;
      } else {
        lower += magnitude;
      }
    }
    low = static_cast<float>(lower / (count - n_upper));
    if (n_upper) high = static_cast<float>(upper / n_upper);
  }
  range[0] = to_bfloat16(low);
  range[1] = to_bfloat16(high);
}

// csrc/cpu/chunks.h: encode_chunks. One block for each chunk. Without a number of blocks for a multiprocessor, ptxas
// spills registers.
__global__ void __launch_bounds__(block_threads, 4)
    encode_chunks(const float* in, const float* residual, float* new_residual, unsigned char* out, size_t n, unsigned k,
                  unsigned bits, Findings* findings) {
  __shared__ float x[top_chunk];
  __shared__ unsigned short chosen[top_chunk];
  __shared__ unsigned range[2];
  const size_t begin = size_t{blockIdx.x} * top_chunk;
  const auto m = static_cast<unsigned>(min(n - begin, size_t{top_chunk}));
  const unsigned count = chunk_count(m, k), first = threadIdx.x * own_elements;
  for (unsigned i = threadIdx.x; i < m; i += block_threads) {
    x[i] = residual ? __fadd_rn(__fmul_rn(in[begin + i], 1.0f), residual[begin + i]) : in[begin + i];
    if (key_of(x[i]) >= nonfinite_key) atomicMax(&findings->from_bad, n - begin - i);
  }
  __syncthreads();
  int keys[own_elements];
#pragma unroll
  for (unsigned j = 0; j < own_elements; ++j) keys[j] = first + j < m ? key_of(x[first + j]) : -1;
  int edge = 0;  // the key of the last one chosen, bit by bit
  for (int bit = 1 << 30; bit; bit >>= 1)
    if (count_keys(keys, [&](int key) { return key >= (edge | bit); }) >= count) edge |= bit;
  const unsigned above = count_keys(keys, [&](int key) { return key > edge; });
  unsigned ties = 0, total;
#pragma unroll
  for (unsigned j = 0; j < own_elements; ++j) ties += keys[j] == edge;
  unsigned ties_before = block_scan<block_threads>(ties, total);
  unsigned own = 0;
#pragma unroll
  for (unsigned j = 0; j < own_elements; ++j)
    own += keys[j] > edge || (keys[j] == edge && ties_before++ < count - above);
  ties_before -= ties;
  unsigned place = block_scan<block_threads>(own, total);
#pragma unroll
  for (unsigned j = 0; j < own_elements; ++j)
    if (keys[j] > edge || (keys[j] == edge && ties_before++ < count - above))
      chosen[place++] = static_cast<unsigned short>(first + j);
  __syncthreads();
  if (threadIdx.x == 0) range_of(x, chosen, count, bits, range);
  __syncthreads();
  const Levels levels(range[0], range[1], bits);
  const float inverse = levels.distance > 0 ? __fdiv_rn(1.0f, levels.distance) : 0.0f;
  const auto most = static_cast<float>((1 << (bits - 1)) - 1);
  const auto code_of = [&](unsigned j) {
    const float value = x[chosen[j]];
    const float at = __fadd_rn(__fmul_rn(__fsub_rn(fabsf(value), levels.lowest), inverse), 0.5f);
    return static_cast<unsigned>(at > 0 ? fminf(at, most) : 0.0f) << 1 | (value < 0);
  };
  unsigned char* bytes = out + blockIdx.x * chunk_bytes(chunk_count(top_chunk, k), bits);
  if (threadIdx.x < 2) write_16(bytes + 2 * threadIdx.x, range[threadIdx.x]);
  const unsigned values = values_begin(count), end = static_cast<unsigned>(chunk_bytes(count, bits));
  for (unsigned i = threadIdx.x + 4; i < values; i += block_threads)
    bytes[i] = packed_byte(i - 4, count, 12, [&](unsigned j) { return static_cast<unsigned>(chosen[j]); });
  for (unsigned i = threadIdx.x + values; i < end; i += block_threads)
    bytes[i] = packed_byte(i - values, count, bits, code_of);
  if (!residual) return;
  for (unsigned i = threadIdx.x; i < m; i += block_threads) new_residual[begin + i] = x[i];
  __syncthreads();
  for (unsigned j = threadIdx.x; j < count; j += block_threads)
    new_residual[begin + chosen[j]] = __fsub_rn(x[chosen[j]], levels.value(code_of(j)));
}

// csrc/cpu/chunks.h: decode_chunks. One block for each chunk; only the step from list to list needs a barrier.
__global__ void __launch_bounds__(block_threads)
    decode_chunks(const unsigned char* in, unsigned lists, size_t stride, float* out, size_t n, unsigned k,
                  unsigned bits, float factor) {
  __shared__ float sums[top_chunk];
  const size_t begin = size_t{blockIdx.x} * top_chunk;
  const auto m = static_cast<unsigned>(min(n - begin, size_t{top_chunk}));
  const unsigned count = chunk_count(m, k);
  for (unsigned i = threadIdx.x; i < m; i += block_threads) sums[i] = 0;
  __syncthreads();
  in += blockIdx.x * chunk_bytes(chunk_count(top_chunk, k), bits);
  for (unsigned list = 0; list < lists; ++list, in += stride) {
    const Levels levels(read_16(in), read_16(in + 2), bits);
    for (unsigned j = threadIdx.x; j < count; j += block_threads) {
      const unsigned i = unpacked(in + 4, j, 12), code = unpacked(in + values_begin(count), j, bits);
      if (i < m) sums[i] = __fadd_rn(sums[i], __fmul_rn(levels.value(code), factor));
    }
    __syncthreads();
  }
  for (unsigned i = threadIdx.x; i < m; i += block_threads) out[begin + i] = sums[i];
}

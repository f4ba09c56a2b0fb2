// CUDA's language for kernels: qualifiers, built-in variables, vector types, synchronisation, atomics.
//
// The threads of a block are fibers of one OS thread. They run in turn, each until it has to wait for its warp, and the
// warps too, each until it has to wait for the block, so an access that no barrier orders meets a value that is too old
// or too new. Blocks run one after another, in ascending order in every second launch and in descending order in the
// others.
#pragma once

#include <math.h>  // unlike <cmath>, with the overloads of C++ in the global namespace

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float16.h"

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ thread_local  // in a function: static as well

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;

namespace emulation {

// Waits for all threads of the block that have not ended.
void block_barrier();
// Waits for all lanes, which must be those of `mask`; their values, by lane. `operation` tells apart what may not meet.
const std::uint64_t* warp_exchange(const char* operation, unsigned mask, std::uint64_t value);
unsigned lane();

template <class T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The value of lane `source`, or the own one where that is not `inside` of the warp.
template <class T>
T shuffle(const char* operation, unsigned mask, T value, int source, bool inside) {
  const std::uint64_t* all = warp_exchange(operation, mask, to_bits(value));
  return inside ? from_bits<T>(all[source & 31]) : value;
}

}  // namespace emulation

// -- synchronisation
inline void __syncthreads() { emulation::block_barrier(); }
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned mask, int value) {
  const std::uint64_t* all = emulation::warp_exchange("__ballot_sync", mask, value != 0);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulation::shuffle("__shfl_sync", mask, value, source, true);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const int source = static_cast<int>(emulation::lane()) - static_cast<int>(delta);
  return emulation::shuffle("__shfl_up_sync", mask, value, source, source >= 0);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const int source = static_cast<int>(emulation::lane()) + static_cast<int>(delta);
  return emulation::shuffle("__shfl_down_sync", mask, value, source, source < 32);
}

template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  const std::uint64_t* all = emulation::warp_exchange("__reduce_add_sync", mask, emulation::to_bits(value));
  T total{};
  for (int i = 0; i < 32; ++i) total += emulation::from_bits<T>(all[i]);
  return total;
}

// -- bits
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __float_as_int(float x) { return emulation::from_bits<int>(emulation::to_bits(x)); }
inline float __int_as_float(int x) { return emulation::from_bits<float>(emulation::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return emulation::from_bits<float>(emulation::to_bits(x)); }
inline double __longlong_as_double(long long x) { return emulation::from_bits<double>(emulation::to_bits(x)); }

// -- arithmetic with a stated rounding: what nvcc does not contract
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

// -- atomics
namespace emulation {
// The fibers of a grid share one OS thread, but grids of several streams may run at a time.
template <class T, class Change>
T atomic(T* at, Change change) {
  static_assert(std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>, "CUDA has no such atomics");
  T before;
  __atomic_load(at, &before, __ATOMIC_RELAXED);
  T after;
  do after = change(before);
  while (!__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
  return before;
}
}  // namespace emulation

// The value is converted to the type of the target, as by functions of that type.
template <class T>
T atomicAdd(T* at, std::common_type_t<T> x) {
  return emulation::atomic(at, [=](T old) { return old + x; });
}
template <class T>
T atomicMax(T* at, std::common_type_t<T> x) {
  return emulation::atomic(at, [=](T old) { return max(old, x); });
}
template <class T>
T atomicExch(T* at, std::common_type_t<T> x) {
  return emulation::atomic(at, [=](T) { return x; });
}

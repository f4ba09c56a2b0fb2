// The SIMD vocabulary of the kernels: one register of the instruction set being compiled, as GCC/Clang vector types.
// Kernels are written once with operators, and only functions without an operator are written per set.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(DISTOPT_NEON)
#include <arm_neon.h>
#endif

#include <type_traits>
#include <utility>

#include "base/types.h"

namespace distopt::DISTOPT_ISA {
namespace {

using Index = std::ptrdiff_t;

constexpr Index smaller(Index a, Index b) { return a < b ? a : b; }
inline Index larger(Index a, Index b) { return a > b ? a : b; }
inline Index clamp(Index value, Index low, Index high) { return value < low ? low : value > high ? high : value; }

#if defined(__AVX512F__)
constexpr Index kVectorBytes = 64;
#elif defined(__AVX2__) || defined(DISTOPT_NEON)
// With NEON a pair of registers, of which there are as many as AVX2 has: the same tiles and algorithms, and so the
// same bits.
constexpr Index kVectorBytes = 32;
#else
constexpr Index kVectorBytes = 16;
#endif

template <class T>
struct Lanes {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vec = typename Lanes<T>::type;
// Integers as wide as T: results of comparisons of Vec<T>.
template <class T>
using IntegerVec = Vec<std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>>;
template <class T>
constexpr Index kLanes = kVectorBytes / sizeof(T);
// Lanes of the widest set. Every set uses this number where it decides the order of a sum.
template <class T>
constexpr Index kMostLanes = 64 / sizeof(T);

using Floats = Vec<float>;
using Ints = IntegerVec<float>;

// The elements I of `low` and `high`, one vector after the other. GCC has Clang's function from version 12 on.
template <std::size_t... I, class V>
inline V shuffle(V low, V high, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(low, high, int(I)...);
#else
  using Element = std::remove_reference_t<decltype(low[0])>;
  using Integer = std::conditional_t<sizeof(Element) == 4, std::int32_t, std::int64_t>;
  typedef Integer Which __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(low, high, Which{Integer(I)...});
#endif
}

// The value at `p`, of any alignment: V is a register, a part of one, or a scalar.
template <class V, class T>
inline V load_as(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
inline Vec<T> load(const T* p) {
  return load_as<Vec<T>>(p);
}

template <class T, class V>
inline void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
template <class T>
inline __m256i lane_mask(unsigned lanes) {
  if constexpr (sizeof(T) == 4) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(lanes)), bit), bit);
  } else {
    const __m256i bit = _mm256_setr_epi64x(1, 2, 4, 8);
    return _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(lanes), bit), bit);
  }
}
#endif

// The lanes whose bit is set; the other lanes are 0 and their memory is not touched.
template <class T>
inline Vec<T> load_lanes(const T* p, unsigned lanes) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_maskz_loadu_ps(__mmask16(lanes), p);
  if constexpr (sizeof(T) == 8) return (Vec<T>)_mm512_maskz_loadu_pd(__mmask8(lanes), p);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_maskload_ps(p, lane_mask<T>(lanes));
  if constexpr (sizeof(T) == 8) return (Vec<T>)_mm256_maskload_pd(p, lane_mask<T>(lanes));
#else
  Vec<T> v = {};
  for (Index i = 0; i < kLanes<T>; ++i)
    if (lanes >> i & 1) v[i] = p[i];
  return v;
#endif
}

// The first `count` lanes, count <= kLanes.
template <class T>
inline Vec<T> load_some(const T* p, Index count) {
#if !defined(__AVX512F__)  // there a mask costs nothing
  if (count == kLanes<T>) return load(p);
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (count == kLanes<T> / 2) return (Vec<T>)_mm256_zextps128_ps256(_mm_loadu_ps(reinterpret_cast<const float*>(p)));
#endif
  return load_lanes(p, (1u << count) - 1);
}

template <class T>
inline void store_some(T* p, Vec<T> v, Index count) {
#if !defined(__AVX512F__)
  if (count == kLanes<T>) return store(p, v);
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (count == kLanes<T> / 2) return _mm_storeu_ps(reinterpret_cast<float*>(p), _mm256_castps256_ps128((__m256)v));
#endif
  const unsigned lanes = (1u << count) - 1;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, __mmask16(lanes), (__m512)v);
  if constexpr (sizeof(T) == 8) _mm512_mask_storeu_pd(p, __mmask8(lanes), (__m512d)v);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) _mm256_maskstore_ps(p, lane_mask<T>(lanes), (__m256)v);
  if constexpr (sizeof(T) == 8) _mm256_maskstore_pd(p, lane_mask<T>(lanes), (__m256d)v);
#else
  for (Index i = 0; i < kLanes<T>; ++i)
    if (lanes >> i & 1) p[i] = v[i];
#endif
}

// c + a * b. The build forbids contraction (element-wise updates must agree between processors); products of matrices
// differ in order between BLAS kernels anyhow, so they ask for the fused instruction.
inline Vec<float> multiply_add(float a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_fmadd_ps(_mm512_set1_ps(a), (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#elif defined(DISTOPT_NEON)
  const auto factor = load_as<float32x4x2_t>(&b);
  auto sum = load_as<float32x4x2_t>(&c);
  sum.val[0] = vfmaq_n_f32(sum.val[0], factor.val[0], a);
  sum.val[1] = vfmaq_n_f32(sum.val[1], factor.val[1], a);
  return load_as<Vec<float>>(&sum);
#else
  return c + a * b;
#endif
}

inline Vec<double> multiply_add(double a, Vec<double> b, Vec<double> c) {
#if defined(__AVX512F__)
  return (Vec<double>)_mm512_fmadd_pd(_mm512_set1_pd(a), (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  return (Vec<double>)_mm256_fmadd_pd(_mm256_set1_pd(a), (__m256d)b, (__m256d)c);
#elif defined(DISTOPT_NEON)
  const auto factor = load_as<float64x2x2_t>(&b);
  auto sum = load_as<float64x2x2_t>(&c);
  sum.val[0] = vfmaq_n_f64(sum.val[0], factor.val[0], a);
  sum.val[1] = vfmaq_n_f64(sum.val[1], factor.val[1], a);
  return load_as<Vec<double>>(&sum);
#else
  return c + a * b;
#endif
}

// 0 ... kLanes - 1
template <class T>
using LaneNumbers = std::make_index_sequence<kLanes<T>>;

// Even and odd elements of p[0 ... 2 count), count <= kLanes, apart.
template <class T, std::size_t... I>
inline void load_pairs(const T* p, Index count, Vec<T>& even, Vec<T>& odd, std::index_sequence<I...>) {
  const Vec<T> low = load_some(p, smaller(2 * count, kLanes<T>));
  const Vec<T> high = 2 * count > kLanes<T> ? load_some(p + kLanes<T>, 2 * count - kLanes<T>) : Vec<T>{};
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {  // four instructions, where GCC 12 takes six for the general form
    even = (Vec<T>)_mm256_permute4x64_pd((__m256d)_mm256_shuffle_ps((__m256)low, (__m256)high, 0x88), 0xd8);
    odd = (Vec<T>)_mm256_permute4x64_pd((__m256d)_mm256_shuffle_ps((__m256)low, (__m256)high, 0xdd), 0xd8);
    return;
  }
#endif
  even = shuffle(low, high, std::index_sequence<(2 * I)...>());
  odd = shuffle(low, high, std::index_sequence<(2 * I + 1)...>());
}

template <class T, std::size_t... I>
inline void store_pairs(T* p, Vec<T> even, Vec<T> odd, Index count, std::index_sequence<I...>) {
  const Vec<T> low = shuffle(even, odd, std::index_sequence<(I / 2 + I % 2 * kLanes<T>)...>());
  const Vec<T> high = shuffle(even, odd, std::index_sequence<((I + kLanes<T>) / 2 + I % 2 * kLanes<T>)...>());
  store_some(p, low, smaller(2 * count, kLanes<T>));
  if (2 * count > kLanes<T>) store_some(p + kLanes<T>, high, 2 * count - kLanes<T>);
}

// The first `count` lanes from and to single bytes.
template <class T>
inline IntegerVec<T> load_bytes(const std::uint8_t* p, Index count) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_maskz_loadu_epi8(__mmask16((1u << count) - 1), p);
  if constexpr (sizeof(T) == 4) return (IntegerVec<T>)_mm512_maskz_cvtepu8_epi32(__mmask16(-1), bytes);
  if constexpr (sizeof(T) == 8) return (IntegerVec<T>)_mm512_maskz_cvtepu8_epi64(__mmask8(-1), bytes);
#elif defined(__AVX2__)
  std::uint64_t bytes = 0;
  if (count == kLanes<T>)
    __builtin_memcpy(&bytes, p, kLanes<T>);
  else if (count == kLanes<T> / 2)
    __builtin_memcpy(&bytes, p, kLanes<T> / 2);
  else
    for (Index i = 0; i < count; ++i) bytes |= std::uint64_t(p[i]) << 8 * i;
  if constexpr (sizeof(T) == 4) return (IntegerVec<T>)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(std::int64_t(bytes)));
  if constexpr (sizeof(T) == 8) return (IntegerVec<T>)_mm256_cvtepu8_epi64(_mm_cvtsi64_si128(std::int64_t(bytes)));
#endif
  IntegerVec<T> v = {};
  for (Index i = 0; i < count; ++i) v[i] = p[i];
  return v;
}

template <class T>
inline void store_bytes(std::uint8_t* p, IntegerVec<T> v, Index count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_mask_cvtepi32_storeu_epi8(p, __mmask16((1u << count) - 1), (__m512i)v);
  if constexpr (sizeof(T) == 8) return _mm512_mask_cvtepi64_storeu_epi8(p, __mmask8((1u << count) - 1), (__m512i)v);
#elif defined(__AVX2__)
  // Byte 0 of each lane, to the bottom of each half.
  const __m256i lowest =
      _mm256_setr_epi8(0, sizeof(T) == 4 ? 4 : 8, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                       sizeof(T) == 4 ? 4 : 8, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i halves = _mm256_shuffle_epi8((__m256i)v, lowest);
  constexpr int half_bits = 4 * kLanes<T>;
  const auto low = std::uint64_t(std::uint32_t(_mm256_extract_epi32(halves, 0))) & ((1ull << half_bits) - 1);
  std::uint64_t bytes = low | std::uint64_t(std::uint32_t(_mm256_extract_epi32(halves, 4))) << half_bits;
  if (count == kLanes<T>) {
    __builtin_memcpy(p, &bytes, kLanes<T>);
    return;
  }
  if (count == kLanes<T> / 2) {
    __builtin_memcpy(p, &bytes, kLanes<T> / 2);
    return;
  }
  for (Index i = 0; i < count; ++i, bytes >>= 8) p[i] = std::uint8_t(bytes);
  return;
#endif
  for (Index i = 0; i < count; ++i) p[i] = std::uint8_t(v[i]);
}

// Bit j is set if lane j of the mask (0 or -1) is -1.
inline unsigned bits_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE2__)
  return static_cast<unsigned>(_mm_movemask_ps((__m128)mask));
#elif defined(DISTOPT_NEON)
  const auto lanes = load_as<uint32x4x2_t>(&mask);
  const uint32x4_t low = {1, 2, 4, 8}, high = {16, 32, 64, 128};
  return vaddvq_u32(vorrq_u32(vandq_u32(lanes.val[0], low), vandq_u32(lanes.val[1], high)));
#else
  unsigned bits = 0;
  for (Index j = 0; j < kLanes<float>; ++j) bits |= static_cast<unsigned>(mask[j] & 1) << j;
  return bits;
#endif
}

}  // namespace
}  // namespace distopt::DISTOPT_ISA

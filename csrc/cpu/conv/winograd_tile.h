// The transforms of Winograd's minimal filtering on tiles of 8 x 8, for 8 channels at a time; see winograd.h.
#pragma once

#include "cpu/vectors.h"

namespace distopt::DISTOPT_ISA {
namespace {

constexpr Index kTile = 8, kFrequencies = kTile * kTile;

// The same element of 8 channels.
typedef float Eight __attribute__((vector_size(32)));
// In memory; GCC 12 copies 32 bytes by halves, which a load of the whole then has to wait for.
typedef float EightAnywhere __attribute__((vector_size(32), aligned(4), may_alias));

// Rows belong to the points 0, 1, -1, 2, -2, 1/2, -1/2 and infinity. Rows 1, 3 and 5 differ from the next row only
// in the signs of odd columns.
template <Index K>
struct Transform {
  float at[kTile][K];
};

constexpr Transform<8> kInput = {{{1, 0, -5.25f, 0, 5.25f, 0, -1, 0},
                                  {0, 1, 1, -4.25f, -4.25f, 1, 1, 0},
                                  {0, -1, 1, 4.25f, -4.25f, -1, 1, 0},
                                  {0, 0.5f, 0.25f, -2.5f, -1.25f, 2, 1, 0},
                                  {0, -0.5f, 0.25f, 2.5f, -1.25f, -2, 1, 0},
                                  {0, 2, 4, -2.5f, -5, 0.5f, 1, 0},
                                  {0, -2, 4, 2.5f, -5, -0.5f, 1, 0},
                                  {0, -1, 0, 5.25f, 0, -5.25f, 0, 1}}};  // B^T

// The powers 0 ... K - 1 of each point, times a factor.
template <Index K>
constexpr Transform<K> powers(const float (&factor)[kTile]) {
  constexpr float points[kTile - 1] = {0, 1, -1, 2, -2, 0.5f, -0.5f};
  Transform<K> m = {};
  for (Index i = 0; i < kTile - 1; ++i) {
    float power = factor[i];
    for (Index k = 0; k < K; ++k, power *= points[i]) m.at[i][k] = power;
  }
  m.at[kTile - 1][K - 1] = factor[kTile - 1];
  return m;
}

template <Index K>
constexpr Transform<K> kWeight = powers<K>({1, -2.f / 9, -2.f / 9, 1.f / 90, 1.f / 90, 32.f / 45, 32.f / 45, 1});  // G
template <Index K>
constexpr Transform<K> kOutput = powers<K>({1, 1, 1, 1, 1, 1, 1, 1});  // A

// A sum of multiples; the factors are constants once the loops below are unrolled, and zeros vanish.
struct Accumulator {
  Eight value = {};
  bool started = false;

  void add(float factor, Eight x) {
    if (factor == 0) return;
    value = started ? fused(factor, x, value) : factor * x;
    started = true;
  }

  static Eight fused(float factor, Eight x, Eight sum) {
#if defined(__FMA__)
    return (Eight)_mm256_fmadd_ps(_mm256_set1_ps(factor), (__m256)x, (__m256)sum);
#elif defined(DISTOPT_NEON)
    return multiply_add(factor, x, sum);
#else
    return sum + factor * x;
#endif
  }
};

// out = m in, of vectors that are `in_step` and `out_step` apart.
template <const auto& m, Index K>
inline void expand(const Eight* in, Index in_step, Eight* out, Index out_step) {
  Accumulator first, last;
#pragma GCC unroll 8
  for (Index k = 0; k < K; ++k) {
    first.add(m.at[0][k], in[k * in_step]);
    last.add(m.at[kTile - 1][k], in[k * in_step]);
  }
  out[0] = first.value;
  out[(kTile - 1) * out_step] = last.value;
#pragma GCC unroll 8
  for (Index i = 1; i < kTile - 1; i += 2) {
    Accumulator even, odd;
#pragma GCC unroll 8
    for (Index k = 0; k < K; ++k) (k % 2 ? odd : even).add(m.at[i][k], in[k * in_step]);
    out[i * out_step] = even.value + odd.value;
    out[(i + 1) * out_step] = even.value - odd.value;
  }
}

// out = m^T in.
template <const auto& m, Index K>
inline void contract(const Eight* in, Index in_step, Eight* out, Index out_step) {
  Eight sum[3], difference[3];
#pragma GCC unroll 8
  for (Index i = 0; i < 3; ++i) {
    const Eight plus = in[(2 * i + 1) * in_step], minus = in[(2 * i + 2) * in_step];
    sum[i] = plus + minus;
    difference[i] = plus - minus;
  }
#pragma GCC unroll 8
  for (Index k = 0; k < K; ++k) {
    Accumulator total;
    total.add(m.at[0][k], in[0]);
#pragma GCC unroll 8
    for (Index i = 0; i < 3; ++i) total.add(m.at[2 * i + 1][k], k % 2 ? difference[i] : sum[i]);
    total.add(m.at[kTile - 1][k], in[(kTile - 1) * in_step]);
    out[k * out_step] = total.value;
  }
}

#if defined(__AVX2__)
inline __m256i first_lanes(Index count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// The first `count` of 8 elements; the other lanes are 0.
inline Eight load_eight(const float* p, Index count) {
#if defined(__AVX2__)
  if (count == kTile) return (Eight)_mm256_loadu_ps(p);
  if (count == kTile / 2) return (Eight)_mm256_zextps128_ps256(_mm_loadu_ps(p));
  return (Eight)_mm256_maskload_ps(p, first_lanes(count));
#else
  Eight v = {};
  __builtin_memcpy(&v, p, count * sizeof(float));
  return v;
#endif
}

inline void store_eight(float* p, Eight v, Index count) {
  if (count == kTile) {
    *reinterpret_cast<EightAnywhere*>(p) = v;
    return;
  }
#if defined(__AVX2__)
  if (count == kTile / 2) return _mm_storeu_ps(p, _mm256_castps256_ps128((__m256)v));
#endif
  float lanes[kTile];
  __builtin_memcpy(lanes, &v, sizeof v);
  const float* from = lanes;
  if (count & 4) __builtin_memcpy(p, from, 4 * sizeof(float)), p += 4, from += 4;
  if (count & 2) __builtin_memcpy(p, from, 2 * sizeof(float)), p += 2, from += 2;
  if (count & 1) *p = *from;
}

// The lower halves of two vectors, and the upper half of one as a lower one.
inline Eight join_halves(Eight low, Eight high) {
  return shuffle(low, high, std::index_sequence<0, 1, 2, 3, 8, 9, 10, 11>());
}
inline Eight upper_half(Eight v) { return shuffle(v, v, std::index_sequence<4, 5, 6, 7, 4, 5, 6, 7>()); }

inline void transpose(Eight (&v)[kTile]) {
#if defined(__AVX2__)
  __m256 pairs[kTile], quads[kTile];
#pragma GCC unroll 8
  for (Index i = 0; i < kTile; i += 2) {
    pairs[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
  }
#pragma GCC unroll 8
  for (Index i = 0; i < kTile; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
#pragma GCC unroll 8
  for (Index i = 0; i < 4; ++i) {
    v[i] = (Eight)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    v[i + 4] = (Eight)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
#else
  float from[kTile][kTile], to[kTile][kTile];
  __builtin_memcpy(from, v, sizeof from);
  for (Index i = 0; i < kTile; ++i)
    for (Index j = 0; j < kTile; ++j) to[j][i] = from[i][j];
  __builtin_memcpy(v, to, sizeof to);
#endif
}

// Rows of a block that are transposed at a time.
template <Index K>
constexpr Index kRows = K == kTile / 2 ? 2 : 1;

// Up to 8 planes of an array, and the part of a block of K x K that exists.
struct PlaneBlock {
  Index plane, row;  // steps, in elements
  Index planes, rows, columns;
};

// out[frequency] = m (the block) m^T, of 8 planes; missing elements count as 0.
template <const auto& m, Index K>
void expand_block(const PlaneBlock& b, const float* from, float* out, Index slice) {
  Eight half[kTile][K], all[kTile];
  {
    Eight pixels[K][K];
    const auto load_row = [&](Index y, Index plane) {
      return y < b.rows && plane < b.planes ? load_eight(from + plane * b.plane + y * b.row, b.columns) : Eight{};
    };
    for (Index y = 0; y < K; y += kRows<K>) {
      Eight row[kTile];
      for (Index i = 0; i < kTile; ++i) {
        row[i] = load_row(y, i);
        if constexpr (kRows<K> == 2) row[i] = join_halves(row[i], load_row(y + 1, i));
      }
      transpose(row);
#pragma GCC unroll 8
      for (Index x = 0; x < kRows<K> * K; ++x) pixels[y + x / K][x % K] = row[x];
    }
    for (Index x = 0; x < K; ++x) expand<m, K>(&pixels[0][x], K, &half[0][x], K);
  }
  for (Index i = 0; i < kTile; ++i) {
    expand<m, K>(half[i], 1, all, 1);
#pragma GCC unroll 8
    for (Index j = 0; j < kTile; ++j, out += slice) *reinterpret_cast<EightAnywhere*>(out) = all[j];
  }
}

// The block m^T in[frequency] m of 8 planes: calls f(plane, row, its K elements, the rest of the lanes being
// undefined).
template <const auto& m, Index K, class F>
void contract_block(const PlaneBlock& b, const float* in, Index slice, bool relu, F f) {
  Eight half[K][kTile];
  for (Index j = 0; j < kTile; ++j) {
    Eight column[kTile];
#pragma GCC unroll 8
    for (Index i = 0; i < kTile; ++i) column[i] = *reinterpret_cast<const EightAnywhere*>(in + (i * kTile + j) * slice);
    contract<m, K>(column, 1, &half[0][j], kTile);
  }
  for (Index y = 0; y < b.rows; y += kRows<K>) {
    Eight row[kTile] = {};
#pragma GCC unroll 2
    for (Index i = 0; i < kRows<K>; ++i) contract<m, K>(half[y + i], 1, row + i * K, 1);
#pragma GCC unroll 8
    for (Index i = 0; relu && i < kTile; ++i) row[i] = row[i] < 0 ? Eight{} : row[i];  // a NaN stays
    transpose(row);
    for (Index i = 0; i < b.planes; ++i) {
      f(i, y, row[i]);
      if (kRows<K> == 2 && y + 1 < b.rows) f(i, y + 1, upper_half(row[i]));
    }
  }
}

}  // namespace
}  // namespace distopt::DISTOPT_ISA

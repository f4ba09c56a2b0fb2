// Convolution of stride 1 by Winograd's minimal filtering, F(4 x 4, 5 x 5) and F(6 x 6, 3 x 3), on tiles of 8 x 8
// pixels (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, sections 4.1 and 4.2). A tile
// d gives
//
//   y = A^T ((G g G^T) * (B^T d B)) A    where * multiplies the 64 "frequencies" of a tile, each for itself,
//
// and the sum over channels makes a product of matrices of each frequency. A tile takes 64 multiplications for 400 of
// the direct sum with 5 x 5, 324 with 3 x 3. Backward is the adjoint of each step. For float32 only: the results are
// wrong by about 2e-6 of their deviation, where the direct sum errs by 1e-7. Included by conv_kernels.cpp.
#pragma once

#include "conv_kernels.h"
#include "gemm_tile.h"

namespace distopt::DISTOPT_ISA {
namespace {

constexpr Index kTile = 8, kFrequencies = kTile * kTile;

// The same element of 8 channels.
typedef float Eight __attribute__((vector_size(32)));

// Rows belong to the points 0, 1, -1, 2, -2, 1/2, -1/2 and infinity. Rows 1, 3 and 5 differ from the next in nothing
// but the signs of odd columns.
template <Index K>
struct Matrix {
  float at[kTile][K];
};

constexpr Matrix<8> kInput = {{{1, 0, -5.25f, 0, 5.25f, 0, -1, 0},
                               {0, 1, 1, -4.25f, -4.25f, 1, 1, 0},
                               {0, -1, 1, 4.25f, -4.25f, -1, 1, 0},
                               {0, 0.5f, 0.25f, -2.5f, -1.25f, 2, 1, 0},
                               {0, -0.5f, 0.25f, 2.5f, -1.25f, -2, 1, 0},
                               {0, 2, 4, -2.5f, -5, 0.5f, 1, 0},
                               {0, -2, 4, 2.5f, -5, -0.5f, 1, 0},
                               {0, -1, 0, 5.25f, 0, -5.25f, 0, 1}}};  // B^T

// The powers 0 ... K - 1 of each point, times a factor.
template <Index K>
constexpr Matrix<K> powers(const float (&factor)[kTile]) {
  constexpr float points[kTile - 1] = {0, 1, -1, 2, -2, 0.5f, -0.5f};
  Matrix<K> m = {};
  for (Index i = 0; i < kTile - 1; ++i) {
    float power = factor[i];
    for (Index k = 0; k < K; ++k, power *= points[i]) m.at[i][k] = power;
  }
  m.at[kTile - 1][K - 1] = factor[kTile - 1];
  return m;
}

template <Index K>
constexpr Matrix<K> kWeight = powers<K>({1, -2.f / 9, -2.f / 9, 1.f / 90, 1.f / 90, 32.f / 45, 32.f / 45, 1});  // G
template <Index K>
constexpr Matrix<K> kOutput = powers<K>({1, 1, 1, 1, 1, 1, 1, 1});  // A

// A sum of multiples; the factors are constants once the loops below are unrolled, and zeros vanish.
struct Sum {
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
#else
    return sum + factor * x;
#endif
  }
};

// out = m in, of vectors that are `in_step` and `out_step` apart.
template <const auto& m, Index K>
inline void expand(const Eight* in, Index in_step, Eight* out, Index out_step) {
  Sum first, last;
#pragma GCC unroll 8
  for (Index k = 0; k < K; ++k) {
    first.add(m.at[0][k], in[k * in_step]);
    last.add(m.at[kTile - 1][k], in[k * in_step]);
  }
  out[0] = first.value;
  out[(kTile - 1) * out_step] = last.value;
#pragma GCC unroll 8
  for (Index i = 1; i < kTile - 1; i += 2) {
    Sum even, odd;
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
    Sum total;
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
  return (Eight)(count == kTile ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_lanes(count)));
#else
  Eight v = {};
  __builtin_memcpy(&v, p, count * sizeof(float));
  return v;
#endif
}

inline void store_eight(float* p, Eight v, Index count) {
  if (count == kTile) {
    __builtin_memcpy(p, &v, sizeof v);
    return;
  }
  float lanes[kTile];
  __builtin_memcpy(lanes, &v, sizeof v);
  const float* from = lanes;
  if (count & 4) __builtin_memcpy(p, from, 4 * sizeof(float)), p += 4, from += 4;
  if (count & 2) __builtin_memcpy(p, from, 2 * sizeof(float)), p += 2, from += 2;
  if (count & 1) *p = *from;
}

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

// Up to 8 planes of an array, and the part of a block of K x K that exists.
struct Block {
  Index plane, row;  // steps, in elements
  Index planes, rows, columns;
};

// out[frequency] = m (the block) m^T, of 8 planes; what does not exist counts as 0.
template <const auto& m, Index K>
void expand_block(const Block& b, const float* from, float* out, Index slice) {
  Eight half[kTile][K], all[kTile];
  {
    Eight pixels[K][K];
    for (Index y = 0; y < K; ++y) {
      Eight row[kTile];
      for (Index i = 0; i < kTile; ++i)
        row[i] = y < b.rows && i < b.planes ? load_eight(from + i * b.plane + y * b.row, b.columns) : Eight{};
      transpose(row);
      for (Index x = 0; x < K; ++x) pixels[y][x] = row[x];
    }
    for (Index x = 0; x < K; ++x) expand<m, K>(&pixels[0][x], K, &half[0][x], K);
  }
  for (Index i = 0; i < kTile; ++i) {
    expand<m, K>(half[i], 1, all, 1);
    for (Index j = 0; j < kTile; ++j, out += slice) __builtin_memcpy(out, &all[j], sizeof(Eight));
  }
}

// The block m^T in[frequency] m of 8 planes: calls f(plane, row, its K elements, the rest of the lanes being
// undefined).
template <const auto& m, Index K, class F>
void contract_block(const Block& b, const float* in, Index slice, F f) {
  Eight half[K][kTile];
  for (Index j = 0; j < kTile; ++j) {
    Eight column[kTile];
    for (Index i = 0; i < kTile; ++i) __builtin_memcpy(&column[i], in + (i * kTile + j) * slice, sizeof(Eight));
    contract<m, K>(column, 1, &half[0][j], kTile);
  }
  for (Index y = 0; y < b.rows; ++y) {
    Eight row[kTile] = {};
    contract<m, K>(half[y], 1, row, 1);
    transpose(row);
    for (Index i = 0; i < b.planes; ++i) f(i, y, row[i]);
  }
}

inline Index round_up(Index n, Index step) { return (n + step - 1) / step * step; }

// R: rows and columns of the weight.
template <Index R>
class Winograd {
 public:
  explicit Winograd(const ConvShape& shape)
      : s_(shape),
        across_((s_.ow + kEdge - 1) / kEdge),
        per_image_((s_.oh + kEdge - 1) / kEdge * across_),
        tiles_(s_.n * per_image_),
        c_row_(round_up(s_.c, kWidth)),
        m_row_(round_up(s_.m, kWidth)),
        chunk_(clamp(kChunkElements / (c_row_ + m_row_), 6, larger(6, tiles_))) {}

  // Whether it saves much: few channels leave the transforms too little work to share, and tiles may not fit.
  bool pays() const {
    return s_.kh == R && s_.kw == R && s_.sh == 1 && s_.sw == 1 && s_.c >= kTile && s_.m >= kTile &&
           s_.c * s_.m <= kMostWeights && 2 * per_image_ * kFrequencies <= s_.oh * s_.ow * R * R;
  }

  Index work_size() const { return kFrequencies * (c_slice() + m_slice() + cm_slice() + mc_slice()) + kLine; }

  // `y_of(n)` tells where image n goes, and `done(n)` is called once it is there.
  template <class Where, class Done>
  void forward(const float* x, const float* weight, const float* bias, bool relu, float* work, Where y_of, Done done) {
    take(work);
    for (Index c = 0; c < s_.c; ++c)
      expand_weight(weight + c * R * R, s_.c * R * R, s_.m, cm_ + c * m_row_, cm_slice());
    for (Index first = 0; first < tiles_; first += chunk_) {
      const Index count = smaller(chunk_, tiles_ - first);
      for (Index t = 0; t < count; ++t) expand_input(x, first + t, c_ + t * c_row_);
      for (Index f = 0; f < kFrequencies; ++f)
        multiply_rows<float>(count, s_.c, {c_ + f * c_slice(), c_row_, 1}, cm_ + f * cm_slice(), m_row_,
                             m_ + f * m_slice(), m_row_, m_row_ / kLanes<float>, false);
      for (Index t = first; t < first + count; ++t) {
        const Index n = t / per_image_;
        contract_output(m_ + (t - first) * m_row_, t % per_image_, bias, relu, y_of(n));
        if ((t + 1) % per_image_ == 0) done(n);
      }
    }
  }

  // `slope_of(n)` gives the gradient of image n before ReLU; it is called once for each, in order. `db` and `dx` may be
  // null.
  template <class Slope>
  void backward(Slope slope_of, const float* x, const float* weight, float* dw, float* db, float* dx, float* work) {
    take(work);
    __builtin_memset(cm_, 0, kFrequencies * cm_slice() * sizeof(float));
    if (db) __builtin_memset(db, 0, s_.m * sizeof(float));
    if (dx) {
      __builtin_memset(dx, 0, s_.n * s_.c * s_.h * s_.w * sizeof(float));
      for (Index m = 0; m < s_.m; ++m)
        expand_weight(weight + m * s_.c * R * R, R * R, s_.c, mc_ + m * c_row_, mc_slice());
    }
    const float* slope = nullptr;
    for (Index first = 0; first < tiles_; first += chunk_) {
      const Index count = smaller(chunk_, tiles_ - first);
      for (Index t = first; t < first + count; ++t) {
        if (t % per_image_ == 0) slope = slope_of(t / per_image_);
        expand_input(x, t, c_ + (t - first) * c_row_);
        expand_slope(slope, t % per_image_, m_ + (t - first) * m_row_);
      }
      for (Index f = 0; f < kFrequencies; ++f) {
        float *const c = c_ + f * c_slice(), *const m = m_ + f * m_slice();
        multiply_rows<float>(s_.c, count, {c, 1, c_row_}, m, m_row_, cm_ + f * cm_slice(), m_row_,
                             m_row_ / kLanes<float>, true);
        if (dx)
          multiply_rows<float>(count, s_.m, {m, m_row_, 1}, mc_ + f * mc_slice(), c_row_, c, c_row_,
                               c_row_ / kLanes<float>, false);
      }
      for (Index t = 0; t < count; ++t) {
        if (dx) contract_input(c_ + t * c_row_, first + t, dx);
        for (Index m = 0; db && m < s_.m; ++m) db[m] += m_[kOnes * m_slice() + t * m_row_ + m];
      }
    }
    for (Index c = 0; c < s_.c; ++c) contract_weight(cm_ + c * m_row_, dw + c * R * R);
  }

 private:
  static constexpr Index kEdge = kTile - R + 1;  // of a tile's output
  static constexpr Index kOnes = 1 * kTile + 1;  // the frequency of point 1, which sums a tile's output
  static constexpr Index kLine = 64 / sizeof(float);
  static constexpr Index kWidth = kLanes<float> > kTile ? kLanes<float> : kTile;
  // Input and output channels of all tiles of a chunk, 1 MiB over all frequencies: each chunk reads and writes the
  // whole gradient of the weight, which costs more than leaving the second cache.
  static constexpr Index kChunkElements = (1 << 20) / sizeof(float) / kFrequencies;
  // Weights of which the frequencies, twice as many as these times 64, take 32 MiB.
  static constexpr Index kMostWeights = 256 * 256;

  // The elements of one frequency lie together: a chunk's input [tile][c] and output [tile][m], the weight [c][m] and
  // transposed [m][c]. The line between keeps frequencies from competing for a few sets of the cache.
  Index c_slice() const { return chunk_ * c_row_ + kLine; }
  Index m_slice() const { return chunk_ * m_row_ + kLine; }
  Index cm_slice() const { return s_.c * m_row_ + kLine; }
  Index mc_slice() const { return s_.m * c_row_ + kLine; }

  void take(float* work) {
    const auto address = reinterpret_cast<std::uintptr_t>(work);
    c_ = work + (64 - address % 64) % 64 / sizeof(float);
    m_ = c_ + kFrequencies * c_slice();
    cm_ = m_ + kFrequencies * m_slice();
    mc_ = cm_ + kFrequencies * cm_slice();
  }

  // Calls f(channel, block, element) for each 8 channels of a tile, whose element (0, 0) is at `element` of its image.
  template <class F>
  static void for_channels(Index tile_y, Index tile_x, Index edge, Index channels, Index rows, Index columns, F f) {
    const Index y = tile_y * kEdge, x = tile_x * kEdge;
    for (Index c = 0; c < channels; c += kTile)
      f(c,
        Block{rows * columns, columns, smaller(kTile, channels - c), smaller(edge, rows - y),
              smaller(edge, columns - x)},
        (c * rows + y) * columns + x);
  }

  template <class F>
  void for_input(Index tile, F f) const {
    for_channels(tile / across_, tile % across_, kTile, s_.c, s_.h, s_.w, f);
  }

  template <class F>
  void for_output(Index tile, F f) const {
    for_channels(tile / across_, tile % across_, kEdge, s_.m, s_.oh, s_.ow, f);
  }

  void expand_input(const float* x, Index tile, float* out) const {
    x += tile / per_image_ * s_.c * s_.h * s_.w;
    for_input(tile % per_image_, [&](Index c, const Block& block, Index at) {
      expand_block<kInput, kTile>(block, x + at, out + c, c_slice());
    });
  }

  void contract_input(const float* in, Index tile, float* dx) const {
    dx += tile / per_image_ * s_.c * s_.h * s_.w;
    for_input(tile % per_image_, [&](Index c, const Block& block, Index at) {
      contract_block<kInput, kTile>(block, in + c, c_slice(), [&](Index plane, Index row, Eight v) {
        float* const to = dx + at + plane * block.plane + row * block.row;
        store_eight(to, load_eight(to, block.columns) + v, block.columns);
      });
    });
  }

  void expand_slope(const float* slope, Index tile, float* out) const {
    for_output(tile, [&](Index m, const Block& block, Index at) {
      expand_block<kOutput<kEdge>, kEdge>(block, slope + at, out + m, m_slice());
    });
  }

  void contract_output(const float* in, Index tile, const float* bias, bool relu, float* y) const {
    for_output(tile, [&](Index m, const Block& block, Index at) {
      contract_block<kOutput<kEdge>, kEdge>(block, in + m, m_slice(), [&](Index plane, Index row, Eight v) {
        if (bias) v += bias[m + plane];
        if (relu) v = v < 0 ? Eight{} : v;  // a NaN stays
        store_eight(y + at + plane * block.plane + row * block.row, v, block.columns);
      });
    });
  }

  // Of `planes` weights that are `plane` elements apart.
  static void expand_weight(const float* weight, Index plane, Index planes, float* out, Index slice) {
    for (Index p = 0; p < planes; p += kTile)
      expand_block<kWeight<R>, R>({plane, R, smaller(kTile, planes - p), R, R}, weight + p * plane, out + p, slice);
  }

  // Of all outputs and one input channel.
  void contract_weight(const float* in, float* dw) const {
    const Index plane = s_.c * R * R;
    for (Index m = 0; m < s_.m; m += kTile)
      contract_block<kWeight<R>, R>(
          {plane, R, smaller(kTile, s_.m - m), R, R}, in + m, cm_slice(),
          [&](Index i, Index row, Eight v) { store_eight(dw + (m + i) * plane + row * R, v, R); });
  }

  const ConvShape& s_;
  const Index across_, per_image_, tiles_;  // tiles: in a row of them, of an image, of all images
  const Index c_row_, m_row_;               // channels, rounded up to whole vectors
  const Index chunk_;                       // tiles at a time
  float *c_ = nullptr, *m_ = nullptr, *cm_ = nullptr, *mc_ = nullptr;
};

}  // namespace
}  // namespace distopt::DISTOPT_ISA

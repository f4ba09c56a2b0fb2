// Convolution of stride 1 by Winograd's minimal filtering, F(4 x 4, 5 x 5) and F(6 x 6, 3 x 3), on tiles of 8 x 8
// pixels (Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, sections 4.1 and 4.2). A tile
// d gives
//
//   y = A^T ((G g G^T) * (B^T d B)) A    where * multiplies the 64 "frequencies" of a tile one by one,
//
// and the sum over channels is a matrix product for each frequency. A tile takes 64 multiplications; the direct sum
// takes 400 with 5 x 5, and 324 with 3 x 3. The backward pass is the adjoint of each step. For float32 only: the error
// is about 2e-6 standard deviations of the results, and 1e-7 by the direct sum. Included by conv.cpp.
#pragma once

#include "cpu/conv.h"
#include "cpu/conv/winograd_tile.h"
#include "cpu/gemm.h"

namespace distopt::DISTOPT_ISA {
namespace {

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
        chunk_(clamp(kChunkElements / most_of_tile(), 6, larger(6, tiles_))) {}

  // Whether it saves much: few channels leave the transforms too little work to share, and tiles may not fit.
  bool pays() const {
    return s_.kh == R && s_.kw == R && s_.sh == 1 && s_.sw == 1 && s_.c >= kTile && s_.m >= kTile &&
           s_.c * s_.m <= kMostWeights && 2 * per_image_ * kFrequencies <= s_.oh * s_.ow * R * R;
  }

  Index work_size() const { return kFrequencies * (c_slice() + m_slice() + cm_slice() + mc_slice()) + kLine; }

  // `y_of(n)` is the address for image n, and `done(n)` is called once it is there.
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

  // Overwrites `dw` and `db`, and adds to `dx`; each may be null. `slope_of(n)` gives the gradient of image n before
  // ReLU; it is called once for each, in order.
  template <class Slope>
  void backward(Slope slope_of, const float* x, const float* weight, float* dw, float* db, float* dx, float* work) {
    take(work);
    if (dw) __builtin_memset(cm_, 0, kFrequencies * cm_slice() * sizeof(float));
    if (db) __builtin_memset(db, 0, s_.m * sizeof(float));
    for (Index m = 0; dx && m < s_.m; ++m)
      expand_weight(weight + m * s_.c * R * R, R * R, s_.c, mc_ + m * c_row_, mc_slice());
    const float* slope = nullptr;
    for (Index first = 0; first < tiles_; first += chunk_) {
      const Index count = smaller(chunk_, tiles_ - first);
      for (Index t = first; t < first + count; ++t) {
        if (t % per_image_ == 0) slope = slope_of(t / per_image_);
        if (dw) expand_input(x, t, c_ + (t - first) * c_row_);
        expand_slope(slope, t % per_image_, m_ + (t - first) * m_row_);
      }
      for (Index f = 0; f < kFrequencies; ++f) {
        float *const c = c_ + f * c_slice(), *const m = m_ + f * m_slice();
        if (dw)
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
    for (Index c = 0; dw && c < s_.c; ++c) contract_weight(cm_ + c * m_row_, dw + c * R * R);
  }

 private:
  static constexpr Index kEdge = kTile - R + 1;  // of a tile's output
  static constexpr Index kOnes = 1 * kTile + 1;  // the frequency of point 1, which sums a tile's output
  static constexpr Index kLine = 64 / sizeof(float);
  static constexpr Index kWidth = kLanes<float> > kTile ? kLanes<float> : kTile;
  // Input and output channels of all tiles of a chunk, 1 MiB over all frequencies: each chunk reads and writes the
  // whole gradient of the weight, which costs more than exceeding the L2 cache.
  static constexpr Index kChunkElements = (1 << 20) / sizeof(float) / kFrequencies;
  // Elements of the largest weight: its frequencies, 64 for each and in two layouts, take 32 MiB.
  static constexpr Index kMostWeights = 256 * 256;

  // The chunks determine the order of sums, so they have one size on every instruction set.
  Index most_of_tile() const { return round_up(s_.c, kMostLanes<float>) + round_up(s_.m, kMostLanes<float>); }

  // The elements of one frequency lie together: a chunk's input [tile][c] and output [tile][m], the weight [c][m] and
  // transposed [m][c]. An odd number of cache lines keeps frequencies from competing for a few sets of the cache.
  static Index slice(Index elements) { return ((elements + kLine - 1) / kLine | 1) * kLine; }
  Index c_slice() const { return slice(chunk_ * c_row_); }
  Index m_slice() const { return slice(chunk_ * m_row_); }
  Index cm_slice() const { return slice(s_.c * m_row_); }
  Index mc_slice() const { return slice(s_.m * c_row_); }

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
        PlaneBlock{rows * columns, columns, smaller(kTile, channels - c), smaller(edge, rows - y),
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
    x += tile / per_image_ * s_.next_image;
    for_input(tile % per_image_, [&](Index c, const PlaneBlock& block, Index at) {
      expand_block<kInput, kTile>(block, x + at, out + c, c_slice());
    });
  }

  void contract_input(const float* in, Index tile, float* dx) const {
    dx += tile / per_image_ * s_.next_image;
    for_input(tile % per_image_, [&](Index c, const PlaneBlock& block, Index at) {
      contract_block<kInput, kTile>(block, in + c, c_slice(), false, [&](Index plane, Index row, Eight v) {
        float* const to = dx + at + plane * block.plane + row * block.row;
        store_eight(to, load_eight(to, block.columns) + v, block.columns);
      });
    });
  }

  void expand_slope(const float* slope, Index tile, float* out) const {
    for_output(tile, [&](Index m, const PlaneBlock& block, Index at) {
      expand_block<kOutput<kEdge>, kEdge>(block, slope + at, out + m, m_slice());
    });
  }

  void contract_output(float* in, Index tile, const float* bias, bool relu, float* y) const {
    // The frequency of point 1 reaches all outputs equally.
    for (Index m = 0; bias && m < s_.m; ++m) in[kOnes * m_slice() + m] += bias[m];
    for_output(tile, [&](Index m, const PlaneBlock& block, Index at) {
      contract_block<kOutput<kEdge>, kEdge>(block, in + m, m_slice(), relu, [&](Index plane, Index row, Eight v) {
        store_eight(y + at + plane * block.plane + row * block.row, v, block.columns);
      });
    });
  }

  // Of `planes` weights that are `plane` elements apart.
  static void expand_weight(const float* weight, Index plane, Index planes, float* out, Index slice) {
    for (Index p = 0; p < planes; p += kTile)
      expand_block<kWeight<R>, R>({plane, R, smaller(kTile, planes - p), R, R}, weight + p * plane, out + p, slice);
  }

  // The gradients of the weights of all outputs for one input channel.
  void contract_weight(const float* in, float* dw) const {
    const Index plane = s_.c * R * R;
    for (Index m = 0; m < s_.m; m += kTile)
      contract_block<kWeight<R>, R>(
          {plane, R, smaller(kTile, s_.m - m), R, R}, in + m, cm_slice(), false,
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

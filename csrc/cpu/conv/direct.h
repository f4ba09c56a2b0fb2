// Convolution of stride 1 of images with few channels, which stay in the L1 cache: nothing is lowered. Included by
// conv.cpp.
//
// Forward, the rows of B are the image itself, moved by a tap. Backward after max pooling, only the largest of a window
// has a gradient, so the gradient of the weight is a sum of patches, one for each pooled pixel, where dense products
// would multiply mostly zeros.
#pragma once

#include "cpu/conv/lowering.h"

namespace distopt::DISTOPT_ISA {
namespace {

template <class T>
class DirectConv {
 public:
  explicit DirectConv(const ConvShape& shape) : s_(shape), taps_(s_.c * s_.kh * s_.kw) {}

  bool pays_forward() const {
    return s_.c <= kMostChannels && s_.sh == 1 && s_.sw == 1 && s_.ow >= kLanes<T> && taps_ <= kPanelRows;
  }

  // Whether the direct sum pays for the gradient of the weight.
  bool pays_backward(const Pooling* pooling) const {
    return pooling && s_.c <= kMostChannels && s_.sh == 1 && s_.sw == 1 && s_.kw <= kMostColumns && s_.kh <= kMostRows;
  }

  // As Winograd::forward(), without scratch memory.
  template <class Where, class Done>
  void forward(const T* x, const T* weight, const T* bias, bool relu, Where y_of, Done done) const {
    Offsets taps;  // where x has each tap of the first pixel
    for_taps(s_, 0, taps_, [&](Index i, Index offset) { taps.offset[i] = offset; });
    for (Index n = 0; n < s_.n; ++n, x += s_.next_image) {
      forward_image(taps.offset, x, weight, bias, relu, y_of(n));
      done(n);
    }
  }

  Index work_size() const { return s_.m * s_.c * s_.kh * kLanes<T>; }

  // Begins the sum over images of the gradient of the weight, which `work` holds, each row of it in a vector.
  void begin(T* work) const { __builtin_memset(work, 0, work_size() * sizeof(T)); }

  // One image: `slope[m][pooled pixel]` is the gradient before ReLU.
  void backward(const PoolShape& pool, const T* slope, const std::uint8_t* taken, const T* x, T* work) const {
    Index place[kPlaces];  // of a pixel in its window, which has no more
    for (Index i = 0; i < pool.kh * pool.kw; ++i) place[i] = i / pool.kw * s_.w + i % pool.kw;
    const Index pooled = pool.oh * pool.ow;
    for (Index m = 0; m < s_.m; ++m, slope += pooled, taken += pooled)
      for (Index c = 0; c < s_.c; ++c, work += s_.kh * kLanes<T>)
        add_patches<kMostRows>(pool, slope, taken, place, x + c * s_.h * s_.w, work);
  }

  void finish(const T* work, T* dw) const {
    for (Index row = 0; row < s_.m * s_.c * s_.kh; ++row, work += kLanes<T>, dw += s_.kw)
      __builtin_memcpy(dw, work, s_.kw * sizeof(T));
  }

 private:
  static constexpr Index kMostChannels = 4, kMostRows = 7, kPlaces = 256;
  // A vector of AVX2: on each set with fused multiply-add the same algorithm, and so the same bits.
  static constexpr Index kMostColumns = smaller(kVectorBytes, 32) / sizeof(T);

  void forward_image(const Index* offset, const T* x, const T* weight, const T* bias, bool relu, T* y) const {
    constexpr Index lanes = kLanes<T>;
    const Index vectors = (s_.ow + lanes - 1) / lanes, widest = smaller(kWidestTile, s_.ow / lanes);
    const Index parts = (vectors + widest - 1) / widest;
    for (Index oy = 0; oy < s_.oh; ++oy, x += s_.w, y += s_.ow) {
      for (Index part = 0; part < parts; ++part) {
        const Index first = part * vectors / parts, count = (part + 1) * vectors / parts - first;
        // The last part begins earlier where it would end behind the row, and computes some pixels twice.
        const Index ox = smaller(first * lanes, s_.ow - count * lanes);
        with_width<kWidestTile>(count, [&](auto width) {
          strip_of<T, width>(s_.m, taps_, {weight, taps_, 1}, Scattered<T>{x + ox, offset}, y + ox, s_.oh * s_.ow,
                             width * lanes, {false, bias, relu});
        });
      }
    }
  }

  template <Index Rows>
  void add_patches(const PoolShape& pool, const T* slope, const std::uint8_t* taken, const Index* place, const T* x,
                   T* sums) const {
    if constexpr (Rows > 1)
      if (s_.kh < Rows) return add_patches<Rows - 1>(pool, slope, taken, place, x, sums);
    constexpr Index lanes = kLanes<T>;
    const unsigned mask = (1u << s_.kw) - 1;
    Vec<T> sum[Rows];
#pragma GCC unroll 8
    for (Index r = 0; r < Rows; ++r) sum[r] = load(sums + r * lanes);
    for (Index oy = 0; oy < pool.oh; ++oy, slope += pool.ow, taken += pool.ow) {
      const T* window = x + (oy * pool.sh - pool.ph) * s_.w - pool.pw;
      for (Index ox = 0; ox < pool.ow; ++ox, window += pool.sw) {
        const T* const patch = window + place[taken[ox]];
#pragma GCC unroll 8
        for (Index r = 0; r < Rows; ++r) sum[r] = multiply_add(slope[ox], load_lanes(patch + r * s_.w, mask), sum[r]);
      }
    }
#pragma GCC unroll 8
    for (Index r = 0; r < Rows; ++r) store(sums + r * lanes, sum[r]);
  }

  const ConvShape& s_;
  const Index taps_;
};

}  // namespace
}  // namespace distopt::DISTOPT_ISA

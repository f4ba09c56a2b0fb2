// Convolution of any shape as products of matrices: each image is lowered, panel by panel. Included by conv.cpp.
#pragma once

#include "cpu/conv.h"
#include "cpu/gemm.h"

namespace distopt::DISTOPT_ISA {
namespace {

// An element of the lowered image has two coordinates, and its place in x is the sum of what they contribute:
// lowered(tap, pixel) = x[tap.offset + pixel.offset], where a tap is (c, ky, kx) and a pixel (oy, ox). Along the
// columns of a panel consecutive offsets make runs, of at most one vector and inside one strip.
struct Run {
  Index column, count, offset;  // the place in a row of the panel, by packed_column(); and in x
};

template <class T>
struct Runs {
  Run runs[kPanel<T>];
  Index count = 0;

  void add(Index column, Index offset) {
    Run* last = count ? &runs[count - 1] : nullptr;
    if (last && last->offset + last->count == offset && last->count < kLanes<T> && column % kStrip<T> != 0)
      ++last->count;
    else
      runs[count++] = {packed_column<T>(column), 1, offset};
  }
};

struct Offsets {
  Index offset[kPanelRows];
};

// Calls f(i, offset) for the pixels first + i, i < count.
template <class F>
inline void for_pixels(const ConvShape& s, Index first, Index count, F f) {
  Index oy = first / s.ow, ox = first % s.ow;
  for (Index i = 0; i < count; ++i) {
    f(i, oy * s.sh * s.w + ox * s.sw);
    if (++ox == s.ow) ox = 0, ++oy;
  }
}

// Calls f(i, offset) for the taps first + i, i < count.
template <class F>
inline void for_taps(const ConvShape& s, Index first, Index count, F f) {
  Index kx = first % s.kw, ky = first / s.kw % s.kh, c = first / s.kw / s.kh;
  for (Index i = 0; i < count; ++i) {
    f(i, (c * s.h + ky) * s.w + kx);
    if (++kx < s.kw) continue;
    kx = 0;
    if (++ky == s.kh) ky = 0, ++c;
  }
}

// The number of elements is a constant in each instance, so that the copy needs no loop.
template <class T, Index N = kLanes<T>>
inline void copy_run(const Run& run, const T* x, const Offsets& rows, Index n_rows, T* b) {
  if (run.count == N) {
    for (Index r = 0; r < n_rows; ++r)
      __builtin_memcpy(b + r * kStrip<T> + run.column, x + rows.offset[r] + run.offset, N * sizeof(T));
    return;
  }
  if constexpr (N > 1) copy_run<T, N - 1>(run, x, rows, n_rows, b);
}

// The packed panel b[r][column] = x[row offset + column offset].
template <class T>
void lower(const T* x, const Offsets& rows, Index n_rows, const Runs<T>& columns, T* b) {
  for (Index i = 0; i < columns.count; ++i) copy_run<T>(columns.runs[i], x, rows, n_rows, b);
}

// Kernels that are wider have no fast path in raise().
constexpr Index kWidestRaised = 32;

inline std::uint64_t bits_between(Index first, Index last) { return (1ull << last) - (1ull << first); }

// The adjoint, for whole channels: adds b[(c, ky, kx)][pixel - first] to dx[c]. It gathers, a vector of a row of dx
// from all taps: neighbouring taps overlap in dx, and a load that overlaps a store in flight would have to wait for it.
template <class T>
void raise(const ConvShape& s, Index first, Index count, Index channels, const T* b, T* dx) {
  constexpr Index lanes = kLanes<T>;
  const Index top = first / s.ow, bottom = (first + count - 1) / s.ow;
  for (Index c = 0; c < channels; ++c, b += s.kh * s.kw * kPanel<T>, dx += s.h * s.w) {
    for (Index iy = top; iy < bottom + s.kh; ++iy) {
      for (Index ix = 0; ix < s.w; ix += lanes) {
        T* const to = dx + iy * s.w + ix;
        const Index width = smaller(s.w - ix, lanes);
        Vec<T> sum = load_some(to, width);
        for (Index oy = larger(top, iy - s.kh + 1); oy <= smaller(bottom, iy); ++oy) {
          // The pixels of this row begin at column `origin`; [left, right) of them are in the panel.
          const Index origin = oy * s.ow - first, left = larger(0, -origin), right = smaller(s.ow, count - origin);
          // Bit 32 + i: tap 0 reaches lane i. Each further tap reaches one lane further.
          std::uint64_t reached = bits_between(clamp(left - ix + 32, 0, 63), clamp(right - ix + 32, 0, 63));
          const T* from = b + (iy - oy) * s.kw * kPanel<T> + origin + ix;
          for (Index kx = 0; kx < s.kw; ++kx, from += kPanel<T> - 1, reached <<= 1)
            sum += load_lanes(from, unsigned(reached >> 32));
        }
        if (width == lanes)
          store(to, sum);
        else
          store_some(to, sum, width);
      }
    }
  }
}

// The same for any shape, element by element.
template <class T>
void raise_scattered(const ConvShape& s, Index first, Index count, Index channels, const T* b, T* dx) {
  for_taps(s, 0, channels * s.kh * s.kw, [&](Index k, Index tap) {
    for_pixels(s, first, count, [&](Index i, Index pixel) { dx[tap + pixel] += b[k * kPanel<T> + i]; });
  });
}

// Channels of dx that are raised at once: whole ones, in at most kPanelRows rows of a panel unless one alone takes
// more.
inline Index channels_at_once(const ConvShape& s) { return clamp(kPanelRows / (s.kh * s.kw), 1, s.c); }

// g[m][pixel] = dy; adds to db[m], which has kMostLanes partial sums.
template <class T>
void pack_gradient(const ConvShape& s, Index columns, const T* dy, T* db, T* g) {
  constexpr Index lanes = kLanes<T>, vectors = kMostLanes<T> / lanes;
  const Index row = s.oh * s.ow;
  for (Index m = 0; m < s.m; ++m, dy += row, g += kPanel<T>, db += kMostLanes<T>) {
    Vec<T> sum[vectors];
#pragma GCC unroll 4
    for (Index i = 0; i < vectors; ++i) sum[i] = load(db + i * lanes);
    for (Index j = 0; j < columns; j += kMostLanes<T>) {
#pragma GCC unroll 4
      for (Index i = 0; i < vectors; ++i) {
        const Index at = j + i * lanes;
        const Vec<T> slope = load_some(dy + at, clamp(columns - at, 0, lanes));
        store(g + at, slope);
        sum[i] += slope;
      }
    }
#pragma GCC unroll 4
    for (Index i = 0; i < vectors; ++i) store(db + i * lanes, sum[i]);
  }
}

// dw += the product of a panel of g and the lowered image, for the pixels [first, first + count).
template <class T>
void backward_weight(const ConvShape& s, Index first, Index count, const T* g, const T* x, T* dw, T* b) {
  const Index inner = s.c * s.kh * s.kw;
  Offsets pixels;
  for_pixels(s, first, count, [&](Index i, Index offset) { pixels.offset[i] = offset; });
  for (Index k = 0; k < inner; k += kPanel<T>) {
    const Index columns = smaller(inner - k, kPanel<T>);
    Runs<T> taps;
    for_taps(s, k, columns, [&](Index i, Index offset) { taps.add(i, offset); });
    lower(x, pixels, count, taps, b);
    multiply_panel<T>(s.m, count, {g, kPanel<T>, 1}, packed(b), dw + k, inner, columns, {true, nullptr, false});
  }
}

template <class T>
void backward_input(const ConvShape& s, Index first, Index count, const T* g, const T* weight, T* dx, T* b) {
  const Index taps = s.kh * s.kw, at_once = channels_at_once(s);
  for (Index c = 0; c < s.c; c += at_once) {
    const Index channels = smaller(s.c - c, at_once);
    multiply_panel<T>(channels * taps, s.m, {weight + c * taps, 1, s.c * taps}, in_rows(g), b, kPanel<T>, count,
                      {false, nullptr, false});
    (s.sh == 1 && s.sw == 1 && s.kw <= kWidestRaised ? raise<T> : raise_scattered<T>)(s, first, count, channels, b,
                                                                                      dx + c * s.h * s.w);
  }
}

template <class T>
void clear(T* x, Index count) {
  __builtin_memset(x, 0, count * sizeof(T));
}

template <class T>
class Lowering {
 public:
  explicit Lowering(const ConvShape& shape) : s_(shape), inner_(s_.c * s_.kh * s_.kw), pixels_(s_.oh * s_.ow) {}

  Index work_size() const {
    return (s_.m + larger(kPanelRows, channels_at_once(s_) * s_.kh * s_.kw)) * kPanel<T> + s_.m * kMostLanes<T>;
  }

  // As Winograd::forward().
  template <class Where, class Done>
  void forward(const T* x, const T* weight, const T* bias, bool relu, T* work, Where y_of, Done done) const {
    Offsets taps;
    for (Index n = 0; n < s_.n; ++n, x += s_.next_image) {
      T* const y = y_of(n);
      for (Index p = 0; p < pixels_; p += kPanel<T>) {
        const Index columns = smaller(pixels_ - p, kPanel<T>);
        Runs<T> runs;
        for_pixels(s_, p, columns, [&](Index i, Index offset) { runs.add(i, offset); });
        for (Index k = 0; k < inner_; k += kPanelRows) {
          const Index rows = smaller(inner_ - k, kPanelRows);
          const bool last = k + rows == inner_;
          for_taps(s_, k, rows, [&](Index i, Index offset) { taps.offset[i] = offset; });
          lower(x, taps, rows, runs, work);
          multiply_panel<T>(s_.m, rows, {weight + k, inner_, 1}, packed(work), y + p, pixels_, columns,
                            {k > 0, last ? bias : nullptr, last && relu});
        }
      }
      done(n);
    }
  }

  // As Winograd::backward().
  template <class Slope>
  void backward(Slope slope_of, const T* x, const T* weight, T* dw, T* db, T* dx, T* work) const {
    T *const db_lanes = work, *const g = db_lanes + s_.m * kMostLanes<T>, *const b = g + s_.m * kPanel<T>;
    clear(db_lanes, s_.m * kMostLanes<T>);
    if (dw) clear(dw, s_.m * inner_);
    for (Index n = 0; n < s_.n; ++n) {
      const T* const slope = slope_of(n);
      for (Index p = 0; p < pixels_; p += kPanel<T>) {
        const Index count = smaller(pixels_ - p, kPanel<T>);
        pack_gradient(s_, count, slope + p, db_lanes, g);
        if (dw) backward_weight(s_, p, count, g, x + n * s_.next_image, dw, b);
        if (dx) backward_input(s_, p, count, g, weight, dx + n * s_.next_image, b);
      }
    }
    for (Index m = 0; db && m < s_.m; ++m) {
      db[m] = 0;
      for (Index j = 0; j < kMostLanes<T>; ++j) db[m] += db_lanes[m * kMostLanes<T> + j];
    }
  }

 private:
  const ConvShape& s_;
  const Index inner_, pixels_;
};

}  // namespace
}  // namespace distopt::DISTOPT_ISA

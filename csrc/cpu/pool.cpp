#include "cpu/pool.h"

#include "cpu/vectors.h"

namespace distopt::DISTOPT_ISA {
namespace {

// One tap of a window along one axis: the outputs [first, last) that find it inside the image, at
// output * stride + origin.
struct Reach {
  Index first, last, origin;

  Reach(Index tap, Index stride, Index padding, Index size, Index outputs) : origin(tap - padding) {
    first = origin < 0 ? (-origin + stride - 1) / stride : 0;
    last = size - origin > 0 ? (size - origin - 1) / stride + 1 : 0;
    if (last > outputs) last = outputs;
  }
};

// Calls f(tap, oy, first, last, offset) for each tap of each row of windows: the outputs [first, last) of row oy find
// the tap at offset + output * s.sw in the image.
template <class F>
inline void for_window_rows(const PoolShape& s, F f) {
  for (Index oy = 0; oy < s.oh; ++oy) {
    for (Index ky = 0; ky < s.kh; ++ky) {
      const Index iy = oy * s.sh - s.ph + ky;
      if (iy < 0 || iy >= s.h) continue;
      for (Index kx = 0; kx < s.kw; ++kx) {
        const Reach reach(kx, s.sw, s.pw, s.w, s.ow);
        f(ky * s.kw + kx, oy, reach.first, reach.last, iy * s.w + reach.origin);
      }
    }
  }
}

// Windows of 2 x 2 that do not overlap: the common case.
inline bool is_halving(const PoolShape& s) {
  return s.kh == 2 && s.kw == 2 && s.sh == 2 && s.sw == 2 && s.ph == 0 && s.pw == 0;
}

// Calls f(ox, count) for vectors of a row of outputs. The last one begins earlier where it would end behind the row,
// since computing some outputs twice costs less than a part of a vector.
template <class T, class F>
inline void for_vectors(Index outputs, F f) {
  constexpr Index lanes = kLanes<T>;
  Index ox = 0;
  for (; ox + lanes <= outputs; ox += lanes) f(ox, lanes);
  if (ox < outputs) outputs < lanes ? f(ox, outputs - ox) : f(outputs - lanes, lanes);
}

template <class T>
void halve(const PoolShape& s, const T* x, T* y, std::uint8_t* taken) {
  for (Index plane = 0; plane < s.planes; ++plane, x += s.h * s.w) {
    for (Index oy = 0; oy < s.oh; ++oy, y += s.ow, taken += s.ow) {
      const T* row = x + 2 * oy * s.w;
      for_vectors<T>(s.ow, [&](Index ox, Index count) {
        Vec<T> best = {}, others[3] = {};
        load_pairs(row + 2 * ox, count, best, others[0], LaneNumbers<T>{});
        load_pairs(row + s.w + 2 * ox, count, others[1], others[2], LaneNumbers<T>{});
        IntegerVec<T> place = {};
        for (int i = 0; i < 3; ++i) {
          const IntegerVec<T> take = (others[i] > best) | (others[i] != others[i]);
          best = take ? others[i] : best;
          place = take ? IntegerVec<T>{} + (i + 1) : place;
        }
        store_some(y + ox, best, count);
        store_bytes<T>(taken + ox, place, count);
      });
    }
  }
}

template <class T>
void halve_backward(const PoolShape& s, const T* dy, const std::uint8_t* taken, T* dx) {
  for (Index plane = 0; plane < s.planes; ++plane, dx += s.h * s.w) {
    for (Index oy = 0; oy < s.oh; ++oy, dy += s.ow, taken += s.ow) {
      T* row = dx + 2 * oy * s.w;
      for_vectors<T>(s.ow, [&](Index ox, Index count) {
        const Vec<T> slope = load_some(dy + ox, count), none = {};
        const IntegerVec<T> place = load_bytes<T>(taken + ox, count);
        store_pairs(row + 2 * ox, place == 0 ? slope : none, place == 1 ? slope : none, count, LaneNumbers<T>{});
        store_pairs(row + s.w + 2 * ox, place == 2 ? slope : none, place == 3 ? slope : none, count, LaneNumbers<T>{});
      });
    }
  }
}

template <class T>
void max_pool(const PoolShape& s, const T* x, T* y, std::uint8_t* taken) {
  if (is_halving(s)) return halve(s, x, y, taken);
  const Index outputs = s.oh * s.ow;
  for (Index plane = 0; plane < s.planes; ++plane, x += s.h * s.w, y += outputs, taken += outputs) {
    for (Index oy = 0; oy < s.oh; ++oy) {
      const Index top = oy * s.sh < s.ph ? s.ph - oy * s.sh : 0;
      for (Index ox = 0; ox < s.ow; ++ox) {
        const Index left = ox * s.sw < s.pw ? s.pw - ox * s.sw : 0;
        y[oy * s.ow + ox] = -__builtin_inf();
        taken[oy * s.ow + ox] = std::uint8_t(top * s.kw + left);
      }
    }
    for_window_rows(s, [&](Index tap, Index oy, Index first, Index last, Index offset) {
      const T* __restrict__ from = x + offset;
      T* __restrict__ best = y + oy * s.ow;
      std::uint8_t* __restrict__ place = taken + oy * s.ow;
      for (Index ox = first; ox < last; ++ox) {
        const T value = from[ox * s.sw], old = best[ox];
        const bool take = value > old || value != value;
        best[ox] = take ? value : old;
        place[ox] = take ? std::uint8_t(tap) : place[ox];
      }
    });
  }
}

template <class T>
void max_pool_backward(const PoolShape& s, const T* dy, const std::uint8_t* taken, T* dx) {
  if (is_halving(s) && s.h == 2 * s.oh && s.w == 2 * s.ow) return halve_backward(s, dy, taken, dx);
  const Index outputs = s.oh * s.ow;
  __builtin_memset(dx, 0, s.planes * s.h * s.w * sizeof(T));
  for (Index plane = 0; plane < s.planes; ++plane, dx += s.h * s.w, dy += outputs, taken += outputs) {
    for_window_rows(s, [&](Index tap, Index oy, Index first, Index last, Index offset) {
      T* __restrict__ to = dx + offset;
      const T* __restrict__ slope = dy + oy * s.ow;
      const std::uint8_t* __restrict__ place = taken + oy * s.ow;
      for (Index ox = first; ox < last; ++ox) to[ox * s.sw] += place[ox] == tap ? slope[ox] : T(0);
    });
  }
}

template <class T>
void avg_pool(const PoolShape& s, const T* x, T* y) {
  const T share = T(1) / T(s.kh * s.kw);
  const Index outputs = s.oh * s.ow;
  __builtin_memset(y, 0, s.planes * outputs * sizeof(T));
  for (Index plane = 0; plane < s.planes; ++plane, x += s.h * s.w, y += outputs) {
    for_window_rows(s, [&](Index, Index oy, Index first, Index last, Index offset) {
      const T* __restrict__ from = x + offset;
      T* __restrict__ sum = y + oy * s.ow;
      for (Index ox = first; ox < last; ++ox) sum[ox] += from[ox * s.sw] * share;
    });
  }
}

template <class T>
void avg_pool_backward(const PoolShape& s, const T* dy, T* dx) {
  const T share = T(1) / T(s.kh * s.kw);
  const Index outputs = s.oh * s.ow;
  __builtin_memset(dx, 0, s.planes * s.h * s.w * sizeof(T));
  for (Index plane = 0; plane < s.planes; ++plane, dx += s.h * s.w, dy += outputs) {
    for_window_rows(s, [&](Index, Index oy, Index first, Index last, Index offset) {
      T* __restrict__ to = dx + offset;
      const T* __restrict__ slope = dy + oy * s.ow;
      for (Index ox = first; ox < last; ++ox) to[ox * s.sw] += slope[ox] * share;
    });
  }
}

template <class T>
constexpr PoolTable<T> pool_table = {&max_pool<T>, &max_pool_backward<T>, &avg_pool<T>, &avg_pool_backward<T>};

}  // namespace

const PoolKernels& pool_kernels() {
  static constexpr PoolKernels table = {pool_table<float>, pool_table<double>};
  return table;
}

}  // namespace distopt::DISTOPT_ISA

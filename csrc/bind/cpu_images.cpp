#include <nanobind/stl/tuple.h>

#include "bind/arrays.h"
#include "bind/gil.h"
#include "bind/rooms.h"
#include "cpu/conv.h"
#include "cpu/pool.h"

namespace distopt {
namespace {

// Windows of a kernel along one axis.
Index windows(Index size, Index kernel, Index stride, Index padding) {
  if (size < 1 || kernel < 1 || stride < 1 || padding < 0 || kernel > size + 2 * padding)
    throw std::invalid_argument("a kernel of " + std::to_string(kernel) + ", stride " + std::to_string(stride) +
                                " and padding " + std::to_string(padding) + " do not fit a side of " +
                                std::to_string(size));
  return (size + 2 * padding - kernel) / stride + 1;
}

template <class T>
ConvShape conv_shape(const Array<const T, 4>& x, const Array<const T, 4>& w, Pair stride) {
  const Index h = x.shape(2), width = x.shape(3), kh = w.shape(2), kw = w.shape(3);
  // Each group has as many channels of x as w has.
  const Index groups = w.shape(1) && x.shape(1) > w.shape(1) ? x.shape(1) / w.shape(1) : 1;
  const ConvShape s{Index(x.shape(0)),
                    Index(x.shape(1)) / groups,
                    h,
                    width,
                    Index(w.shape(0)) / groups,
                    kh,
                    kw,
                    stride.first,
                    stride.second,
                    windows(h, kh, stride.first, 0),
                    windows(width, kw, stride.second, 0),
                    groups,
                    Index(x.shape(1)) * h * width};
  need(x, "x", {s.n, groups * s.c, s.h, s.w});
  need(w, "w", {groups * s.m, s.c, s.kh, s.kw});
  return s;
}

PoolShape pool_shape(Index planes, Index h, Index w, Pair kernel, Pair stride, Pair padding) {
  const auto [kh, kw] = kernel;
  const auto [ph, pw] = padding;
  if (2 * ph > kh || 2 * pw > kw || kh * kw > 256)
    throw std::invalid_argument("pooling needs at most 256 elements in a window and padding of at most half of it");
  return {planes,
          h,
          w,
          kh,
          kw,
          stride.first,
          stride.second,
          ph,
          pw,
          windows(h, kh, stride.first, ph),
          windows(w, kw, stride.second, pw)};
}

template <class A>
PoolShape pool_shape(const A& x, Pair kernel, Pair stride, Pair padding) {
  return pool_shape(x.shape(0) * x.shape(1), x.shape(2), x.shape(3), kernel, stride, padding);
}

// The places of the maxima in their windows, then kernel, stride and padding of the pooling.
using MaxPooling = std::tuple<Array<std::uint8_t, 4>, Pair, Pair, Pair>;

// A convolution, with max pooling in the same pass if that is given: y and dy then have the pooled size.
template <class T>
struct Conv {
  ConvShape shape;
  std::optional<Pooling> pooling;

  Conv(const Array<const T, 4>& x, const Array<const T, 4>& w, Pair stride, const std::optional<MaxPooling>& pool)
      : shape(conv_shape<T>(x, w, stride)) {
    if (!pool) return;
    const auto& [taken, kernel, pool_stride, padding] = *pool;
    pooling = Pooling{pool_shape(shape.m, shape.oh, shape.ow, kernel, pool_stride, padding), taken.data()};
    need_output(taken, "taken");
  }

  template <class A>
  void need_output(const A& array, const char* name) const {
    if (pooling)
      need(array, name, {shape.n, kernels(), pooling->shape.oh, pooling->shape.ow});
    else
      need(array, name, {shape.n, kernels(), shape.oh, shape.ow});
  }

  Index kernels() const { return shape.groups * shape.m; }
  const Pooling* pooling_or_null() const { return pooling ? &*pooling : nullptr; }
  T* work() const { return scratch<T>(table_of<T>(conv_kernels()).work_size(shape, pooling_or_null())); }
};

template <class T>
void conv2d(Array<const T, 4> x, Array<const T, 4> w, std::optional<Array<const T, 1>> b, Array<T, 4> y, Pair stride,
            bool relu, std::optional<MaxPooling> pooling) {
  const Conv<T> conv(x, w, stride, pooling);
  need(b, "b", {conv.kernels()});
  conv.need_output(y, "y");
  const WithoutGil unlocked;
  table_of<T>(conv_kernels())
      .forward(conv.shape, x.data(), w.data(), data_of(b), y.data(), relu, conv.pooling_or_null(), conv.work());
}

template <class T>
void conv2d_backward(Array<const T, 4> dy, std::optional<Array<const T, 4>> y, Array<const T, 4> x, Array<const T, 4> w,
                     std::optional<Array<T, 4>> dw, std::optional<Array<T, 1>> db, std::optional<Array<T, 4>> dx,
                     Pair stride, std::optional<MaxPooling> pooling) {
  const Conv<T> conv(x, w, stride, pooling);
  const ConvShape& s = conv.shape;
  conv.need_output(dy, "dy");
  conv.need_output(y, "y");
  need(dw, "dw", {conv.kernels(), s.c, s.kh, s.kw});
  need(db, "db", {conv.kernels()});
  need(dx, "dx", {s.n, s.groups * s.c, s.h, s.w});
  const WithoutGil unlocked;
  table_of<T>(conv_kernels())
      .backward(s, dy.data(), data_of(y), x.data(), w.data(), data_of(dw), data_of(db), data_of(dx),
                conv.pooling_or_null(), conv.work());
}

template <class T>
void max_pool2d(Array<const T, 4> x, Array<T, 4> y, Array<std::uint8_t, 4> taken, Pair kernel, Pair stride,
                Pair padding) {
  const PoolShape s = pool_shape(x, kernel, stride, padding);
  need(y, "y", {Index(x.shape(0)), Index(x.shape(1)), s.oh, s.ow});
  need(taken, "taken", {Index(x.shape(0)), Index(x.shape(1)), s.oh, s.ow});
  const WithoutGil unlocked;
  table_of<T>(pool_kernels()).max_pool(s, x.data(), y.data(), taken.data());
}

template <class T>
void max_pool2d_backward(Array<const T, 4> dy, Array<const std::uint8_t, 4> taken, Array<T, 4> dx, Pair kernel,
                         Pair stride, Pair padding) {
  const PoolShape s = pool_shape(dx, kernel, stride, padding);
  need(dy, "dy", {Index(dx.shape(0)), Index(dx.shape(1)), s.oh, s.ow});
  need(taken, "taken", {Index(dx.shape(0)), Index(dx.shape(1)), s.oh, s.ow});
  const WithoutGil unlocked;
  table_of<T>(pool_kernels()).max_pool_backward(s, dy.data(), taken.data(), dx.data());
}

template <class T>
void avg_pool2d(Array<const T, 4> x, Array<T, 4> y, Pair kernel, Pair stride, Pair padding) {
  const PoolShape s = pool_shape(x, kernel, stride, padding);
  need(y, "y", {Index(x.shape(0)), Index(x.shape(1)), s.oh, s.ow});
  const WithoutGil unlocked;
  table_of<T>(pool_kernels()).avg_pool(s, x.data(), y.data());
}

template <class T>
void avg_pool2d_backward(Array<const T, 4> dy, Array<T, 4> dx, Pair kernel, Pair stride, Pair padding) {
  const PoolShape s = pool_shape(dx, kernel, stride, padding);
  need(dy, "dy", {Index(dx.shape(0)), Index(dx.shape(1)), s.oh, s.ow});
  const WithoutGil unlocked;
  table_of<T>(pool_kernels()).avg_pool_backward(s, dy.data(), dx.data());
}

template <class T>
void bind_images(nb::module_& m) {
  define(m, "conv2d", &conv2d<T>, {"x", "w", "b", "y", "stride", "relu", "pooling"});
  define(m, "conv2d_backward", &conv2d_backward<T>, {"dy", "y", "x", "w", "dw", "db", "dx", "stride", "pooling"});
  define(m, "max_pool2d", &max_pool2d<T>, {"x", "y", "taken", "kernel", "stride", "padding"});
  define(m, "max_pool2d_backward", &max_pool2d_backward<T>, {"dy", "taken", "dx", "kernel", "stride", "padding"});
  define(m, "avg_pool2d", &avg_pool2d<T>, {"x", "y", "kernel", "stride", "padding"});
  define(m, "avg_pool2d_backward", &avg_pool2d_backward<T>, {"dy", "dx", "kernel", "stride", "padding"});
}

}  // namespace

void bind_cpu_images(nb::module_& m) {
  bind_images<float>(m);
  bind_images<double>(m);
}

}  // namespace distopt

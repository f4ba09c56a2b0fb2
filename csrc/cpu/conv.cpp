#include "cpu/conv.h"

#include "base/tick.h"
#include "cpu/conv/direct.h"
#include "cpu/conv/lowering.h"
#include "cpu/conv/winograd.h"

// Which algorithm computes a convolution, and the steps around each: groups, ReLU backward, and pooling.
namespace distopt::DISTOPT_ISA {
namespace {

// f(the algorithm for a shape that DirectConv is not for).
template <class T, class F>
auto with_algorithm(const ConvShape& s, F f) {
  if constexpr (sizeof(T) == 4) {
    if (Winograd<5> winograd(s); winograd.pays()) return f(winograd);
    if (Winograd<3> winograd(s); winograd.pays()) return f(winograd);
  }
  Lowering<T> lowering(s);
  return f(lowering);
}

template <class T>
Index panels_size(const ConvShape& s) {
  return with_algorithm<T>(s, [](const auto& algorithm) { return algorithm.work_size(); });
}

// Elements of a group: its share of an image of x, its weights, and its share of an image of y.
inline Index image_in(const ConvShape& s) { return s.c * s.h * s.w; }
inline Index weights_of(const ConvShape& s) { return s.m * s.c * s.kh * s.kw; }
inline Index image_size(const ConvShape& s, const Pooling* pooling) {
  return s.m * (pooling ? pooling->shape.oh * pooling->shape.ow : s.oh * s.ow);
}

// The panels, then an image at its full size, then the gradient of a pooled one; or the first and the last alone.
template <class T>
Index work_size(const ConvShape& s, const Pooling* pooling) {
  const Index pooled = pooling ? image_size(s, pooling) : 0;
  return larger(panels_size<T>(s) + image_size(s, nullptr), DirectConv<T>(s).work_size()) + pooled;
}

template <class T>
const PoolTable<T>& pool_table() {
  if constexpr (sizeof(T) == 4) return pool_kernels().f32;
  if constexpr (sizeof(T) == 8) return pool_kernels().f64;
}

template <class T>
T* advanced(T* pointer, Index count) {
  return pointer ? pointer + count : nullptr;
}

// Calls f(number, pooling) for every group. An image has the values of all groups, one group after the other.
template <class F>
void for_groups(const ConvShape& s, const Pooling* pooling, F f) {
  for (Index group = 0; group < s.groups; ++group) {
    if (!pooling) {
      f(group, pooling);
      continue;
    }
    const Pooling own{pooling->shape, pooling->taken + group * image_size(s, pooling)};
    f(group, &own);
  }
}

template <class T>
void forward_group(const ConvShape& s, const T* x, const T* weight, const T* bias, T* out, bool relu,
                   const Pooling* pooling, T* work) {
  const Index size = image_size(s, pooling), step = s.groups * size;
  T* const full = work + panels_size<T>(s);
  const auto y_of = [&](Index n) { return pooling ? full : out + n * step; };
  const auto done = [&](Index n) {
    if (pooling) pool_table<T>().max_pool(pooling->shape, full, out + n * step, pooling->taken + n * step);
  };
  if (const DirectConv<T> direct(s); direct.pays_forward()) return direct.forward(x, weight, bias, relu, y_of, done);
  with_algorithm<T>(s, [&](auto& algorithm) { algorithm.forward(x, weight, bias, relu, work, y_of, done); });
}

template <class T>
void forward(const ConvShape& s, const T* x, const T* weight, const T* bias, T* y, bool relu, const Pooling* pooling,
             T* work) {
  for_groups(s, pooling, [&](Index group, const Pooling* own) {
    forward_group(s, x + group * image_in(s), weight + group * weights_of(s), advanced(bias, group * s.m),
                  y + group * image_size(s, pooling), relu, own, work);
  });
}

template <class T>
T sum_of(const T* x, Index count) {
  T lanes[kMostLanes<T>] = {};
  Index i = 0;
  for (; i + kMostLanes<T> <= count; i += kMostLanes<T>)
    for (Index j = 0; j < kMostLanes<T>; ++j) lanes[j] += x[i + j];
  T sum = 0;
  for (; i < count; ++i) sum += x[i];
  for (const T lane : lanes) sum += lane;
  return sum;
}

// The gradient of image n, of `size` elements, before ReLU: dy itself, or in `work`. After pooling it is that of the
// pooled image: the largest of a window lets its gradient pass if it is positive, so that the pooled y is enough.
template <class T>
const T* before_relu(const ConvShape& s, Index size, const T* dy, const T* y, Index n, T* work) {
  dy += n * s.groups * size;
  if (!y) return dy;
  y += n * s.groups * size;
  for (Index i = 0; i < size; ++i) work[i] = y[i] <= 0 ? T(0) : dy[i];
  return work;
}

// That gradient before pooling, in `work`.
template <class T>
const T* unpool(const ConvShape& s, const T* dy, const T* y, const Pooling& pooling, Index n, T* work) {
  const Index size = image_size(s, &pooling);
  const T* const slope = before_relu(s, size, dy, y, n, work + image_size(s, nullptr));
  pool_table<T>().max_pool_backward(pooling.shape, slope, pooling.taken + n * s.groups * size, work);
  return work;
}

// The gradient of image n before pooling and ReLU.
template <class T>
const T* slope_of(const ConvShape& s, const T* dy, const T* y, const Pooling* pooling, Index n, T* work) {
  return pooling ? unpool(s, dy, y, *pooling, n, work) : before_relu(s, image_size(s, nullptr), dy, y, n, work);
}

template <class T>
void backward_weight_pooled(const ConvShape& s, const DirectConv<T>& direct, const T* dy, const T* y, const T* x, T* dw,
                            T* db, const Pooling& pooling, T* work) {
  const Index size = image_size(s, &pooling), pooled = size / s.m;
  T* const masked = work + direct.work_size();
  direct.begin(work);
  if (db) clear(db, s.m);
  for (Index n = 0; n < s.n; ++n, x += s.next_image) {
    tick();
    const T* const slope = before_relu(s, size, dy, y, n, masked);
    direct.backward(pooling.shape, slope, pooling.taken + n * s.groups * size, x, work);
    for (Index m = 0; db && m < s.m; ++m) db[m] += sum_of(slope + m * pooled, pooled);
  }
  direct.finish(work, dw);
}

template <class T>
void backward_group(const ConvShape& s, const T* dy, const T* y, const T* x, const T* weight, T* dw, T* db, T* dx,
                    const Pooling* pooling, T* work) {
  if (const DirectConv<T> direct(s); dw && !dx && direct.pays_backward(pooling))
    return backward_weight_pooled(s, direct, dy, y, x, dw, db, *pooling, work);
  const auto gradient = [&](Index n) {
    tick();
    return slope_of(s, dy, y, pooling, n, work + panels_size<T>(s));
  };
  with_algorithm<T>(s, [&](auto& algorithm) { algorithm.backward(gradient, x, weight, dw, db, dx, work); });
}

template <class T>
void backward(const ConvShape& s, const T* dy, const T* y, const T* x, const T* weight, T* dw, T* db, T* dx,
              const Pooling* pooling, T* work) {
  if (dx) clear(dx, s.n * s.next_image);
  for_groups(s, pooling, [&](Index group, const Pooling* own) {
    const Index in = group * image_in(s), out = group * image_size(s, pooling), weights = group * weights_of(s);
    backward_group(s, dy + out, advanced(y, out), x + in, weight + weights, advanced(dw, weights),
                   advanced(db, group * s.m), advanced(dx, in), own, work);
  });
}

template <class T>
constexpr ConvTable<T> table_of = {&work_size<T>, &forward<T>, &backward<T>};

const ConvKernels table = {table_of<float>, table_of<double>};

}  // namespace

const ConvKernels& conv_kernels() { return table; }

}  // namespace distopt::DISTOPT_ISA

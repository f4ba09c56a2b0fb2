// Layers, losses and updates on the GPU for Python: device addresses, counts and a stream, all as integers.
// distopt/nn/kernels checks shapes and types before it calls.
#include <nanobind/stl/array.h>

#include <array>

#include "bind/cuda.h"
#include "cuda/layers.h"

namespace nb = nanobind;

namespace distopt {

// h, w, kh, kw, sh, sw, ph, pw, oh, ow
template <>
struct Passed<cuda::Window> {
  using Type = std::array<int, 10>;
  static cuda::Window take(const Type& s) { return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9]}; }
};

template <>
struct Passed<cuda::Batch> {
  using Type = std::array<int, 2>;
  static cuda::Batch take(const Type& s) { return {s[0], s[1]}; }
};

#define DISTOPT_DEFINE(name) define_typed(m, #name, &cuda::name<float>, &cuda::name<double>)

void bind_cuda_numerics(nb::module_& m) {
  DISTOPT_DEFINE(lower);
  DISTOPT_DEFINE(gather_columns);
  DISTOPT_DEFINE(spread);
  DISTOPT_DEFINE(collect);
  DISTOPT_DEFINE(channel_sums);
  DISTOPT_DEFINE(max_pool);
  DISTOPT_DEFINE(max_pool_backward);
  DISTOPT_DEFINE(avg_pool);
  DISTOPT_DEFINE(avg_pool_backward);
  DISTOPT_DEFINE(relu);
  DISTOPT_DEFINE(relu_backward);
  DISTOPT_DEFINE(sigmoid);
  DISTOPT_DEFINE(sigmoid_backward);
  DISTOPT_DEFINE(add_bias);
  DISTOPT_DEFINE(column_sums);
  DISTOPT_DEFINE(channel_moments);
  DISTOPT_DEFINE(normalize);
  DISTOPT_DEFINE(normalize_backward);
  DISTOPT_DEFINE(softmax);
  DISTOPT_DEFINE(cross_entropy);
  DISTOPT_DEFINE(cross_entropy_backward);
  DISTOPT_DEFINE(sgd);
  DISTOPT_DEFINE(adam);
  DISTOPT_DEFINE(rmsprop);
  DISTOPT_DEFINE(adagrad);
}

#undef DISTOPT_DEFINE

}  // namespace distopt

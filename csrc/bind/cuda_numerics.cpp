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

#define DISTOPT_DEFINE(name) define_typed(m, #name, &cuda::name<float>, &cuda::name<double>);

void bind_cuda_numerics(nb::module_& m) {
  DISTOPT_IMAGE_KERNELS(DISTOPT_DEFINE)
  DISTOPT_ARRAY_KERNELS(DISTOPT_DEFINE)
  DISTOPT_UPDATE_KERNELS(DISTOPT_DEFINE)
  m.attr("channel_blocks") = cuda::channel_blocks;
}

#undef DISTOPT_DEFINE

}  // namespace distopt

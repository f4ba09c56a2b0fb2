// Pooling of images, N, C, H, W. All sizes are in elements.
#pragma once

#include "base/isa.h"
#include "base/types.h"

namespace distopt {

// Pooling of `planes` (N times C) images.
struct PoolShape {
  std::ptrdiff_t planes, h, w, kh, kw, sh, sw, ph, pw, oh, ow;
};

template <class T>
struct PoolTable {
  // `taken` receives the place of the maximum in its window, ky * kw + kx; the border is never taken.
  void (*max_pool)(const PoolShape& shape, const T* x, T* y, std::uint8_t* taken);
  void (*max_pool_backward)(const PoolShape& shape, const T* dy, const std::uint8_t* taken, T* dx);
  // The border counts as zeros.
  void (*avg_pool)(const PoolShape& shape, const T* x, T* y);
  void (*avg_pool_backward)(const PoolShape& shape, const T* dy, T* dx);
};

using PoolKernels = Both<PoolTable>;

DISTOPT_DECLARE_KERNELS(PoolKernels, pool_kernels)

}  // namespace distopt

// Two-dimensional convolution on images that already carry their zero border.
#pragma once

#include "base/isa.h"
#include "base/types.h"
#include "cpu/pool.h"

namespace distopt {

// x[n, groups c, h, w] * weight[groups m, c, kh, kw] -> y[n, groups m, oh, ow], with oh = (h - kh) / sh + 1, and the
// same for ow: each run of m kernels sees its own run of c channels. All in elements.
struct ConvShape {
  std::ptrdiff_t n, c, h, w, m, kh, kw, sh, sw, oh, ow, groups;
  std::ptrdiff_t next_image;  // from an image of a group in x to its next one
};

// Max pooling in the same pass: each image is pooled while the cache holds it, and its full size stays in scratch
// memory.
struct Pooling {
  PoolShape shape;      // of one image of a group: m planes of oh x ow
  std::uint8_t* taken;  // for all images, see PoolTable; written forward, read backward
};

template <class T>
struct ConvTable {
  // Elements of the scratch memory that the two functions below need. `pooling` may be null in all three.
  std::ptrdiff_t (*work_size)(const ConvShape& shape, const Pooling* pooling);
  // y = convolution + bias, then ReLU if asked, then pooling if asked. `bias` may be null.
  void (*forward)(const ConvShape& shape, const T* x, const T* weight, const T* bias, T* y, bool relu,
                  const Pooling* pooling, T* work);
  // Overwrites dw, db and dx; each may be null. `y` is the output of a forward with ReLU, else null.
  void (*backward)(const ConvShape& shape, const T* dy, const T* y, const T* x, const T* weight, T* dw, T* db, T* dx,
                   const Pooling* pooling, T* work);
};

using ConvKernels = Both<ConvTable>;

DISTOPT_DECLARE_KERNELS(ConvKernels, conv_kernels)

}  // namespace distopt

// The linear layer y[n, out] = x[n, in] w[in, out] + bias[out].
#pragma once

#include "base/isa.h"
#include "base/types.h"

namespace distopt {

struct LinearShape {
  std::ptrdiff_t n, in, out;
};

template <class T>
struct LinearTable {
  // Elements of the scratch memory that the two functions below need.
  std::ptrdiff_t (*work_size)(const LinearShape& shape);
  // With ReLU if asked. `bias` may be null.
  void (*forward)(const LinearShape& shape, const T* x, const T* w, const T* bias, T* y, bool relu, T* work);
  // Overwrites dw, db and dx; each may be null. `y` is the output of a forward with ReLU, else null.
  void (*backward)(const LinearShape& shape, const T* dy, const T* y, const T* x, const T* w, T* dw, T* db, T* dx,
                   T* work);
};

using LinearKernels = Both<LinearTable>;

DISTOPT_DECLARE_KERNELS(LinearKernels, linear_kernels)

}  // namespace distopt

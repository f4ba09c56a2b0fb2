// Reductions of n equally long arrays, element by element in rank order.
#pragma once

#include "base/isa.h"
#include "base/types.h"

namespace distopt {

struct ReduceKernels {
  // For every i < count: out[i] = ((in[0][i] op in[1][i]) op in[2][i]) ... ; mean divides the sum by n.
  // 16-bit floats accumulate in float32 and round once, to nearest even. Integer sums and products wrap around; of
  // booleans, sum and max are "or", product and min "and". In max and min the first NaN wins, and the first of equal
  // values (0 and -0). `outs` are n_outs arrays that all receive the result; each may be one of the inputs. Arrays need
  // not be aligned. The type and the operation must fit: see can_reduce.
  // With `look`, a sum or mean of float32 or float64 is searched for NaN and infinity; the place in `ins` is the rank.
  Nonfinite (*reduce)(void* const* outs, int n_outs, const void* const* ins, int n_ins, std::size_t count, DType dtype,
                      RedOp op, bool look);
  // memcpy for long arrays. glibc's uses `rep movsb` for them, which takes several times as long on AMD's Zen 3 if the
  // target does not begin at a cache line (https://lunnova.dev/articles/ryzen-slow-short-rep-mov); NumPy's do not.
  void (*copy)(void* to, const void* from, std::size_t bytes);
};

DISTOPT_DECLARE_KERNELS(ReduceKernels, reduce_kernels)

}  // namespace distopt

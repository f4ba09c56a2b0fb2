// Dense passes over a bucket on the GPU, with the meaning that cpu/codec.h gives them. Everything is enqueued on
// the stream; results are in device memory and valid in its order.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace distopt::cuda {

// The results of an encoding pass, in device memory; a rank sends the first three to the others.
struct Findings {
  unsigned long long selected;     // entries in the list
  unsigned long long overflowed;   // as in CastCounts
  unsigned long long from_bad;     // elements from the first unusable one to the end of the bucket; 0: all are usable
  unsigned long long underflowed;  // as in CastCounts
};

// cpu/codec.h: encode16. Unusable is NaN, and with a residual also what leaves one that is not finite. Per element 4
// bytes read and 2 written; with a residual 8 and 6.
void encode16(const float* in, const float* residual, float* new_residual, std::uint16_t* out, std::size_t n,
              float scale, float limit, DType type, Findings* findings, cudaStream_t stream);

// cpu/codec.h: decode16. Per element 2 bytes read, 4 written.
void decode16(const std::uint16_t* in, float* out, std::size_t n, float scale, DType type, cudaStream_t stream);

// norm[0] = sum of squares in float64, always in the same order; `workspace` has room for squared_norm_parts. If
// `scale` is given, *scale = limit / sqrt(norm) if that is below 1, else 1, also if the norm is not finite.
// Reads once.
constexpr unsigned squared_norm_parts = 1024;
void squared_norm(const float* x, std::size_t n, double* workspace, double* norm, float* scale, double limit,
                  cudaStream_t stream);

// *from_bad as in Findings, of float or double. Reads once.
template <class Real>
void find_nonfinite(const Real* x, std::size_t n, unsigned long long* from_bad, cudaStream_t stream);

// The same for elements that are NaN or beyond +-limit; if there is one, x[0] becomes NaN. Reads once.
template <class Real>
void mark_beyond(Real* x, std::size_t n, double limit, unsigned long long* from_bad, cudaStream_t stream);

}  // namespace distopt::cuda

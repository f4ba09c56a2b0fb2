#include "bind/cuda.h"

#include <cuda_runtime.h>

#include "cuda/check.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  m.doc() = "GPU kernels of distopt. Importing it needs no driver.";
  m.def("runtime_version", [] { return CUDART_VERSION; }, "CUDA version of the build, as 1000 * major + 10 * minor.");
  distopt::bind_cuda_codec(m);
  distopt::bind_cuda_numerics(m);
  distopt::bind_cuda_step(m);
}

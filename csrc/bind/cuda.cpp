#include "bind/cuda.h"

#include <cuda_runtime.h>

#include "cuda/check.h"

namespace nb = nanobind;

#ifdef DISTOPT_EMULATED
namespace emulation {
void bind(nb::module_& parent);
}
#endif

NB_MODULE(_cuda, m) {
  m.doc() = "NCCL communicator and GPU kernels of distopt. Importing it needs no driver.";
  m.def("runtime_version", [] { return CUDART_VERSION; }, "CUDA version of the build, as 1000 * major + 10 * minor.");
  distopt::bind_nccl(m);
  distopt::bind_cuda_codec(m);
  distopt::bind_cuda_numerics(m);
  distopt::bind_cuda_step(m);
#ifdef DISTOPT_EMULATED
  emulation::bind(m);
#endif
}

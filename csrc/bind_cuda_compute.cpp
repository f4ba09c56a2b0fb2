#include "bind_cuda.h"

namespace distopt {

void bind_cuda_compute(nanobind::module_&) {}

}  // namespace distopt

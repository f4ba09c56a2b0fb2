#include "bind_cuda.h"

namespace distopt {

void bind_cuda_codec(nanobind::module_&) {}

}  // namespace distopt

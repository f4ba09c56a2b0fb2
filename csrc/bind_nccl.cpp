#include "bind_cuda.h"

namespace distopt {

void bind_nccl(nanobind::module_&) {}

}  // namespace distopt

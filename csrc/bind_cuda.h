// One function per binding file; bind_cuda.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace distopt {

void bind_nccl(nanobind::module_& m);
void bind_cuda_codec(nanobind::module_& m);
void bind_cuda_compute(nanobind::module_& m);

}  // namespace distopt

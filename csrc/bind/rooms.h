// One function per binding file; core.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace distopt {

void bind_shm(nanobind::module_& m);
void bind_net(nanobind::module_& m);  // after shm, whose classes it takes
void bind_nccl(nanobind::module_& m);
void bind_cpu_elementwise(nanobind::module_& m);
void bind_cpu_images(nanobind::module_& m);
void bind_cpu_codec(nanobind::module_& m);

}  // namespace distopt

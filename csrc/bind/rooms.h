// One function per binding file; bind_core.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace distopt {

void bind_shm(nanobind::module_& m);
void bind_compute(nanobind::module_& m);
void bind_images(nanobind::module_& m);
void bind_codec(nanobind::module_& m);

}  // namespace distopt

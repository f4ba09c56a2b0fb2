// Errors of the communicators as Python exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

#include "base/errors.h"

namespace distopt {

inline void raise_as_python(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ShmError& error) {
    static const char* const names[] = {"CommunicatorError", "UsageError",   "LaunchError",   "CommunicatorClosedError",
                                        "PeerLostError",     "StalledError", "MismatchError", "WireMemoryError"};
    namespace nb = nanobind;
    const nb::object type = nb::module_::import_("distopt.errors").attr(names[static_cast<int>(error.kind())]);
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace distopt

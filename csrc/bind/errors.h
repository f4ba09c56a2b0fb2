// Errors of the communicators as Python exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <iterator>
#include <string>

#include "base/errors.h"

namespace distopt {

// Classes of distopt.errors, in the order of ErrorKind.
inline constexpr const char* error_names[] = {"CommunicatorError",       "UsageError",      "LaunchError",
                                              "CommunicatorClosedError", "PeerLostError",   "StalledError",
                                              "MismatchError",           "WireMemoryError", "TransportError"};

inline ErrorKind kind_of(const std::string& name) {
  for (int kind = 0; kind < static_cast<int>(std::size(error_names)); ++kind)
    if (name == error_names[kind]) return static_cast<ErrorKind>(kind);
  return ErrorKind::other;
}

inline void raise_as_python(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const CommunicatorError& error) {
    namespace nb = nanobind;
    const nb::object type = nb::module_::import_("distopt.errors").attr(error_names[static_cast<int>(error.kind())]);
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace distopt

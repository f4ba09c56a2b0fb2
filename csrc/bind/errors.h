// Errors of the communicators as Python exceptions, and the calls to Python during their waits.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/errors.h"
#include "base/patience.h"
#include "bind/gil.h"
#include "host/describe.h"

namespace distopt {

// Classes of distopt.errors, in the order of ErrorKind.
inline constexpr const char* error_names[] = {"CommunicatorError",       "UsageError",      "LaunchError",
                                              "CommunicatorClosedError", "PeerLostError",   "StalledError",
                                              "MismatchError",           "WireMemoryError", "TransportError"};

// distopt.errors.Process, which is a tuple.
using ProcessFields = std::tuple<int, std::string, int>;

inline std::vector<Process> processes_of(const std::vector<ProcessFields>& tuples) {
  std::vector<Process> processes;
  for (const auto& [rank, host, pid] : tuples) processes.push_back({rank, host, pid});
  return processes;
}

inline nanobind::object as_python(const ErrorFields& failure) {
  namespace nb = nanobind;
  const nb::module_ errors = nb::module_::import_("distopt.errors");
  const nb::object type = errors.attr(error_names[static_cast<int>(failure.kind)]);
  if (failure.kind == ErrorKind::usage || failure.kind == ErrorKind::launch) return type(failure.text());
  nb::list ranks, calls;
  for (const Process& one : failure.ranks) ranks.append(errors.attr("Process")(one.rank, one.host, one.pid));
  for (const Call& call : failure.calls)
    calls.append(errors.attr("Call")(call.rank, kind_name(call.kind), call.number, call.count, dtype_name(call.dtype),
                                     reduces(call.kind) ? op_name(call.op) : "", call.root, call.label));
  return type(failure.fact, nb::arg("cure") = failure.cure, nb::arg("ranks") = nb::tuple(ranks),
              nb::arg("calls") = nb::tuple(calls));
}

inline void raise_as_python(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const CommunicatorError& error) {
    try {
      const nanobind::object raised = as_python(error.failure());
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    } catch (nanobind::python_error& other) {  // of a signal's handler, which ran during the wait
      other.restore();
    }
  }
}

// A function that takes the text of a warning.
using Warn = nanobind::typed<nanobind::callable, nanobind::object(std::string)>;

inline Hooks make_hooks(Warn warn) {
  namespace nb = nanobind;
  // Shared, so that the last to let go need not hold the GIL.
  std::shared_ptr<nb::callable> callable(new nb::callable(std::move(warn)), [](nb::callable* pointer) {
    if (!Py_IsInitialized()) return;  // leaked at the end of the process
    const WithGil gil;
    delete pointer;
  });
  Hooks hooks;
  hooks.check_signals = [] {
    const WithGil gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
  hooks.warn = [callable](const std::string& text) {
    const WithGil gil;
    (*callable)(text);
  };
  return hooks;
}

}  // namespace distopt

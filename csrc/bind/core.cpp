#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>

#include "base/early_exit.h"
#include "base/isa.h"
#include "base/watchdog.h"
#include "bind/rooms.h"

namespace nb = nanobind;

namespace {

nb::dict build_info() {
  nb::dict info;
  info["compiler"] = DISTOPT_COMPILER;
  info["flags"] = DISTOPT_FLAGS;
  return info;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native CPU kernels and the communicators over shared memory, MPI and NCCL of distopt.";
  m.def("supported_isas", &distopt::supported_isas, "Instruction sets that this build and this processor have.");
  m.def("isa", [] { return distopt::isa_name(distopt::current_isa()); }, "The instruction set in force.");
  m.def("set_isa", &distopt::set_isa, nb::arg("name"), "Choose an instruction set by name (tests, diagnosis).");
  m.def("build_info", &build_info, "Compiler and flags of this build.");
  m.def(
      "fence", [] { std::atomic_thread_fence(std::memory_order_seq_cst); },
      "Order this thread's earlier accesses to shared memory before its later ones, on every processor.");
  m.def("refuse_early_exit", &distopt::refuse_early_exit, nb::arg("text"),
        "Have C's exit(0) say `text` and end this process with code 1; an empty text takes that back.");
  m.def("exit_after", &distopt::exit_after, nb::arg("pid"), nb::arg("fd"),
        "Have C's exit hang up the socket `fd`, and wait for this process's child `pid`.");
  // At the end of the process, daemon threads and other packages may still hold objects.
  nb::set_leak_warnings(false);
  m.def("set_leak_warnings", &nb::set_leak_warnings, nb::arg("value"),
        "Whether objects left at exit are reported (tests); by default they are not.");
  m.def("remove_mpich_files", &distopt::remove_mpich_files, nb::arg("pid") = 0,
        "Remove what MPICH would leave in /dev/shm if this process, or another, were killed.");
  nb::class_<distopt::Watchdog>(m, "Watchdog", "Ends the process with a message, unless it is stopped in time.")
      .def(nb::init<double, std::string, int, std::vector<distopt::Watchdog::Sign>>(), nb::arg("seconds"),
           nb::arg("text"), nb::arg("exit_code"), nb::arg("signs") = std::vector<distopt::Watchdog::Sign>(),
           "`signs`: descriptors, each with the text that is true once it can be read.")
      .def("stop", &distopt::Watchdog::stop);
  distopt::bind_shm(m);
  distopt::bind_net(m);
  distopt::bind_nccl(m);
  distopt::bind_cpu_elementwise(m);
  distopt::bind_cpu_images(m);
  distopt::bind_cpu_codec(m);
}

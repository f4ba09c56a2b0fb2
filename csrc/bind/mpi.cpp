#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/buffers.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/rooms.h"
#include "mpi/communicator.h"

namespace distopt {
namespace {

using mpi::HierarchicalCollective;
using mpi::Hierarchy;
using mpi::MpiCollective;
using mpi::MpiCommunicator;
using mpi::RidingSum;
using Plain = WithArrays<MpiCollective>;
using TwoLevels = WithArrays<HierarchicalCollective>;
using Riding = WithArrays<RidingSum>;

struct MpiWork {
  nb::object communicator;  // the Python object, which has the attribute `waits`
  std::shared_ptr<MpiCollective> collective;
};

MpiCommunicator& communicator_of(const MpiWork& work) { return *nb::inst_ptr<MpiCommunicator>(work.communicator); }

MpiWork start(MpiCommunicator& communicator, std::shared_ptr<MpiCollective> collective) {
  {
    const WithoutGil unlocked;
    communicator.start(collective);
  }
  return {nb::find(communicator), std::move(collective)};
}

MpiWork start(MpiCommunicator& communicator, Arguments arguments, Buffers buffers) {
  if (std::shared_ptr<Hierarchy> levels = communicator.hierarchy_for(arguments))
    return start(communicator,
                 std::make_shared<TwoLevels>(std::move(arguments), std::move(buffers), std::move(levels)));
  if (communicator.rides(arguments))
    return start(communicator, std::make_shared<Riding>(std::move(arguments), std::move(buffers)));
  return start(communicator, std::make_shared<Plain>(std::move(arguments), std::move(buffers)));
}

bool done(const MpiWork& work) {
  {
    const WithoutGil unlocked;
    if (communicator_of(work).test(*work.collective)) return true;
  }
  work.communicator.attr("waits").attr("polled")();
  return false;
}

// Short waits end here; distopt/comm/mpi/waits.py continues long ones.
void wait(const MpiWork& work, std::optional<double> timeout) {
  {
    const WithoutGil unlocked;
    const double quiet_seconds = std::min(timeout.value_or(yield_seconds), yield_seconds);
    if (communicator_of(work).wait(*work.collective, quiet_seconds)) return;
  }
  work.communicator.attr("waits").attr("wait_for")(work.collective, timeout);
}

// Addresses of MPI handles, as numbers.
using Address = std::uintptr_t;

std::shared_ptr<MpiCommunicator> create(std::string module, Address communicator, Address byte,
                                        std::size_t handle_bytes, std::size_t status_bytes, int rank,
                                        const std::vector<ProcessFields>& processes, std::size_t inline_bytes,
                                        std::size_t chunk_bytes) {
  const auto at = [](Address address) { return reinterpret_cast<const void*>(address); };
  return std::make_shared<MpiCommunicator>(
      mpi::Library{std::move(module), at(communicator), at(byte), handle_bytes, status_bytes}, rank,
      processes_of(processes), inline_bytes, chunk_bytes);
}

void use_hierarchy(MpiCommunicator& communicator, std::size_t local, std::vector<int> between, std::size_t host,
                   std::shared_ptr<ShmCommunicator> scatter, std::shared_ptr<ShmCommunicator> collect) {
  communicator.use_hierarchy(std::make_shared<Hierarchy>(
      Hierarchy{local, {std::move(between), host}, std::move(scatter), std::move(collect)}));
}

void fail(MpiCommunicator& communicator, const std::string& kind, std::string fact, std::string cure,
          const std::vector<ProcessFields>& ranks) {
  const auto* const named = std::find(std::begin(error_names), std::end(error_names), kind);
  communicator.fail(
      {static_cast<ErrorKind>(named - error_names), std::move(fact), std::move(cure), processes_of(ranks)});
  communicator.progress();  // which throws it
}

// The wait as text, and the ranks that have not arrived.
using Late = std::pair<std::string, std::vector<ProcessFields>>;

// `tell` gives the wait in words, and the processes that have not arrived.
void check_patience(MpiCommunicator& communicator, Patience& patience, double waited,
                    nb::typed<nb::callable, Late()> tell, Warn warn) {
  patience.check(
      waited,
      [&]() -> Waiting {
        const auto [text, late] = nb::cast<Late>(tell());
        return {text, processes_of(late)};
      },
      [&](const std::string& text) { warn(text); },
      [&](ErrorFields failure) { communicator.fail(std::move(failure)); });
  communicator.progress();
}

}  // namespace

void bind_mpi(nb::module_& m) {
  nb::class_<Patience>(m, "Patience", "How long one wait goes on, and what it says.")
      .def("__init__",
           [](Patience* made, double timeout, double warning) { new (made) Patience(Limits{timeout, warning}); });
  m.attr("yield_seconds") = yield_seconds;
  m.def("pause", &pause, nb::arg("quiet_seconds"), nb::call_guard<WithoutGil>(),
        "Yield the core or sleep between two polls, nothing having moved for that long.");
  nb::class_<MpiCollective>(m, "MpiCollective", "A collective over MPI.")
      .def_prop_ro("sequence", &MpiCollective::sequence)
      .def_prop_ro("unheard", &MpiCollective::unheard, "Ranks that are not known to have begun it.")
      .def("__str__", &MpiCollective::description);
  nb::class_<MpiWork>(m, "MpiWork", nb::sig("class MpiWork(distopt.comm.work.Work)"),
                      "A collective over MPI under way.")
      .def("done", &done, "Local. Move all operations forward without waiting; return whether this one has finished.")
      .def("wait", &wait, nb::arg("timeout") = nb::none(), "Wait for the end, at most `timeout` seconds.")
      .def_prop_ro("nonfinite", [](const MpiWork&) { return nb::none(); });
  using MpiRaggedWork = RaggedWork<MpiWork, MpiCollective>;
  nb::class_<MpiRaggedWork, MpiWork>(m, "MpiRaggedWork",
                                     nb::sig("class MpiRaggedWork(MpiWork, distopt.comm.work.RaggedWork)"),
                                     "A ragged collective over MPI under way.")
      .def_prop_ro("parts", &MpiRaggedWork::take_parts, "See `RaggedWork.parts`.");

  nb::class_<MpiCommunicator> communicator(
      m, "MpiCommunicator", "Collectives over the ranks of several hosts; arguments are trusted.", nb::dynamic_attr());
  communicator
      .def(nb::new_(&create), nb::arg("module"), nb::arg("communicator"), nb::arg("byte"), nb::arg("handle_bytes"),
           nb::arg("status_bytes"), nb::arg("rank"), nb::arg("processes"), nb::arg("inline_bytes"),
           nb::arg("chunk_bytes"))
      .def("use_hierarchy", &use_hierarchy, nb::arg("local"), nb::arg("between"), nb::arg("host"), nb::arg("scatter"),
           nb::arg("collect"), "See Hierarchy in csrc/mpi/hierarchy.h.")
      .def("progress", &MpiCommunicator::progress, nb::call_guard<WithoutGil>())
      .def("wait_on", &MpiCommunicator::wait_on, nb::call_guard<WithoutGil>(), nb::arg("operation"),
           nb::arg("quiet_seconds"),
           "Wait until the collective has ended, nothing has moved for that long, or 0.1 s have passed; return whether "
           "it has ended.")
      .def_prop_ro("quiet_seconds", &MpiCommunicator::quiet_seconds, "For how long nothing has moved.")
      .def("check_patience", &check_patience, nb::arg("patience"), nb::arg("waited"), nb::arg("tell"), nb::arg("warn"),
           "Warn or raise an error, if it is time to. `tell` gives the wait in words, and the processes awaited.")
      .def("fail", &fail, nb::arg("kind"), nb::arg("fact"), nb::arg("cure"), nb::arg("ranks"),
           "Raise an error, now and in all later calls.")
      .def("close", &MpiCommunicator::close)
      .def_prop_ro("oldest", &MpiCommunicator::oldest,
                   nb::for_getter(nb::sig("def oldest(self) -> MpiCollective | None")),
                   "The oldest operation that has not ended, or None.")
      .def_prop_ro("inline_bytes", &MpiCommunicator::inline_bytes, "Size of the data that travel with an announcement.")
      .def_prop_ro("last_agreed", &MpiCommunicator::last_agreed,
                   "The last operation that all ranks have begun, in words.")
      .def_prop_ro("scratch_count", &MpiCommunicator::scratch_count, "Number of unused buffers (tests).");
  bind_collectives<MpiCommunicator, MpiCollective>(
      communicator, [](auto&&... given) { return start(std::forward<decltype(given)>(given)...); });
}

}  // namespace distopt

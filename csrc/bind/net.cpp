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
#include "net/communicator.h"
#include "net/mpi.h"
#include "net/ucx.h"

namespace distopt {
namespace {

using net::HierarchicalCollective;
using net::Hierarchy;
using net::NetCollective;
using net::NetCommunicator;
using net::Transport;
using net::UcxWorker;
using Plain = WithArrays<NetCollective>;
using TwoLevels = WithArrays<HierarchicalCollective>;

struct NetWork {
  nb::object communicator;  // the Python object, which has the attribute `waits`
  std::shared_ptr<NetCollective> collective;
};

NetCommunicator& communicator_of(const NetWork& work) { return *nb::inst_ptr<NetCommunicator>(work.communicator); }

NetWork start(NetCommunicator& communicator, std::shared_ptr<NetCollective> collective) {
  {
    const WithoutGil unlocked;
    communicator.start(collective);
  }
  return {nb::find(communicator), std::move(collective)};
}

NetWork start(NetCommunicator& communicator, Arguments arguments, Buffers buffers) {
  if (std::shared_ptr<Hierarchy> levels = communicator.hierarchy_for(arguments))
    return start(communicator,
                 std::make_shared<TwoLevels>(std::move(arguments), std::move(buffers), std::move(levels)));
  return start(communicator, std::make_shared<Plain>(std::move(arguments), std::move(buffers)));
}

bool done(const NetWork& work) {
  {
    const WithoutGil unlocked;
    if (communicator_of(work).test(*work.collective)) return true;
  }
  work.communicator.attr("waits").attr("polled")();
  return false;
}

// Short waits end here; distopt/comm/net/waits.py continues long ones.
void wait(const NetWork& work, std::optional<double> timeout) {
  {
    const WithoutGil unlocked;
    const double quiet_seconds = std::min(timeout.value_or(yield_seconds), yield_seconds);
    if (communicator_of(work).wait(*work.collective, quiet_seconds)) return;
  }
  work.communicator.attr("waits").attr("wait_for")(work.collective, timeout);
}

// A message of Python's. It keeps the memory of the message until it has ended.
struct Transfer {
  Buffers buffers;
  bool done = false;
};

// A transport for messages of Python's.
class NetChannel {
 public:
  explicit NetChannel(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}
  ~NetChannel() {
    if (moving_.empty()) return;
    const auto transport = transport_;
    transport->keep(
        std::make_shared<std::pair<decltype(moving_), decltype(transport_)>>(std::move(moving_), transport));
  }
  NetChannel(const NetChannel&) = delete;
  NetChannel& operator=(const NetChannel&) = delete;

  std::shared_ptr<Transfer> send(nb::handle array, int to, int tag) {
    auto transfer = std::make_shared<Transfer>();
    const Py_buffer& data = transfer->buffers.add(array, 0);
    transport_->send(static_cast<const char*>(data.buf), static_cast<std::size_t>(data.len), to, {tag}, transfer->done);
    return keep(std::move(transfer));
  }
  std::shared_ptr<Transfer> receive(nb::handle array, int from, int tag) {
    auto transfer = std::make_shared<Transfer>();
    const Py_buffer& data = transfer->buffers.add(array, PyBUF_WRITABLE);
    transport_->receive(static_cast<char*>(data.buf), static_cast<std::size_t>(data.len), from, {tag}, transfer->done);
    return keep(std::move(transfer));
  }
  int probe(int tag) { return transport_->probe(tag); }
  void poll() {
    if (!moving_.empty() && transport_->poll()) {
      const auto has_ended = [](const auto& transfer) { return transfer->done; };
      moving_.erase(std::remove_if(moving_.begin(), moving_.end(), has_ended), moving_.end());
    }
  }
  bool moves() const { return !moving_.empty(); }

 private:
  std::shared_ptr<Transfer> keep(std::shared_ptr<Transfer> transfer) {
    if (!transfer->done) moving_.push_back(transfer);
    return transfer;
  }

  std::vector<std::shared_ptr<Transfer>> moving_;  // kept if they do not end: the network may write to them
  std::shared_ptr<Transport> transport_;
};

// Addresses of MPI handles, as numbers.
using Address = std::uintptr_t;

std::shared_ptr<Transport> open_mpi(std::string module, Address communicator, Address byte, std::size_t handle_bytes,
                                    std::size_t status_bytes, std::size_t source_offset, int any_source) {
  const auto at = [](Address address) { return reinterpret_cast<const void*>(address); };
  return net::make_mpi_transport(
      {std::move(module), at(communicator), at(byte), handle_bytes, status_bytes, source_offset, any_source});
}

std::shared_ptr<NetCommunicator> create(std::shared_ptr<Transport> transport, int rank,
                                        const std::vector<ProcessFields>& processes, std::size_t inline_bytes,
                                        std::size_t chunk_bytes, bool is_far) {
  return std::make_shared<NetCommunicator>(std::move(transport), rank, processes_of(processes), inline_bytes,
                                           chunk_bytes, is_far);
}

void use_hierarchy(NetCommunicator& communicator, std::size_t local, std::vector<int> between, std::size_t host,
                   std::shared_ptr<ShmCommunicator> scatter, std::shared_ptr<ShmCommunicator> collect) {
  communicator.use_hierarchy(std::make_shared<Hierarchy>(
      Hierarchy{local, {std::move(between), host}, std::move(scatter), std::move(collect)}));
}

void fail(NetCommunicator& communicator, const std::string& kind, std::string fact, std::string cure,
          const std::vector<ProcessFields>& ranks) {
  const auto* const named = std::find(std::begin(error_names), std::end(error_names), kind);
  communicator.fail(
      {static_cast<ErrorKind>(named - error_names), std::move(fact), std::move(cure), processes_of(ranks)});
  communicator.require_usable();  // which throws it
}

// The wait as text, and the ranks that have not arrived.
using Late = std::pair<std::string, std::vector<ProcessFields>>;

// `describe` gives the wait in words, and the processes that have not arrived.
void check_patience(NetCommunicator& communicator, Patience& patience, double waited,
                    nb::typed<nb::callable, Late()> describe, Warn warn) {
  patience.check(
      waited,
      [&]() -> Waiting {
        const auto [text, late] = nb::cast<Late>(describe());
        return {text, processes_of(late)};
      },
      [&](const std::string& text) { warn(text); },
      [&](ErrorFields failure) { communicator.fail(std::move(failure)); });
  communicator.assist();
}

}  // namespace

void bind_net(nb::module_& m) {
  nb::class_<Patience>(m, "Patience", "How long one wait goes on, and what it says.")
      .def("__init__",
           [](Patience* made, double timeout, double warning) { new (made) Patience(Limits{timeout, warning}); });
  m.attr("yield_seconds") = yield_seconds;
  m.def("pause", &pause, nb::arg("quiet_seconds"), nb::call_guard<WithoutGil>(),
        "Yield the core or sleep between two polls, nothing having moved for that long.");
  nb::class_<NetCollective>(m, "NetCollective", "A collective over a network.")
      .def_prop_ro("sequence", &NetCollective::sequence)
      .def_prop_ro("unheard", &NetCollective::unheard, "Ranks that are not known to have begun it.")
      .def("__str__", &NetCollective::description);
  nb::class_<NetWork>(m, "NetWork", nb::sig("class NetWork(distopt.comm.work.Work)"),
                      "A collective over a network under way.")
      .def("done", &done, "Local. Move all operations forward without waiting; return whether this one has finished.")
      .def("wait", &wait, nb::arg("timeout") = nb::none(), "Wait for the end, at most `timeout` seconds.")
      .def_prop_ro("nonfinite", [](const NetWork&) { return nb::none(); });
  using NetRaggedWork = RaggedWork<NetWork, NetCollective>;
  nb::class_<NetRaggedWork, NetWork>(m, "NetRaggedWork",
                                     nb::sig("class NetRaggedWork(NetWork, distopt.comm.work.RaggedWork)"),
                                     "A ragged collective over a network under way.")
      .def_prop_ro("parts", &NetRaggedWork::take_parts, "See `RaggedWork.parts`.");

  nb::class_<Transport>(m, "Transport", "A channel between the ranks of a communicator.")
      .def_prop_ro("lost", &Transport::lost, "Ranks that can no longer be reached, as far as the network knows.");
  nb::class_<Transfer>(m, "Transfer", "A message under way.").def_ro("done", &Transfer::done);
  nb::class_<NetChannel>(m, "NetChannel", "Messages of bytes over a transport; for one thread at a time.")
      .def(nb::init<std::shared_ptr<Transport>>(), nb::arg("transport"))
      .def("send", &NetChannel::send, nb::arg("array"), nb::arg("to"), nb::arg("tag"))
      .def("receive", &NetChannel::receive, nb::arg("array"), nb::arg("source"), nb::arg("tag"))
      .def("probe", &NetChannel::probe, nb::arg("tag"),
           "A rank that has sent a message of this tag which no receive awaits; -1 if there is none.")
      .def("poll", &NetChannel::poll, "Move messages forward.")
      .def_prop_ro("moves", &NetChannel::moves, "Whether a message has not ended.");
  m.def("open_mpi", &open_mpi, nb::arg("module"), nb::arg("communicator"), nb::arg("byte"), nb::arg("handle_bytes"),
        nb::arg("status_bytes"), nb::arg("source_offset"), nb::arg("any_source"),
        "A transport over a communicator of MPI; the arguments are addresses and sizes.");
  using Options = std::vector<std::pair<std::string, std::string>>;
  nb::class_<UcxWorker>(m, "UcxWorker", "UCX in this process.")
      .def(nb::new_([](const std::string& library, const Options& options) {
             return std::make_shared<UcxWorker>(library, options);
           }),
           nb::arg("library"), nb::arg("options"))
      .def_prop_ro("version", &UcxWorker::version)
      .def_prop_ro(
          "address",
          [](const UcxWorker& worker) { return nb::bytes(worker.address().data(), worker.address().size()); },
          "By which other processes reach this one.")
      .def(
          "open",
          [](UcxWorker& worker, std::uint64_t number, int rank, const std::vector<nb::bytes>& addresses, int streams) {
            std::vector<std::string> texts;
            for (const nb::bytes& one : addresses) texts.emplace_back(one.c_str(), one.size());
            return std::shared_ptr<Transport>(worker.open(number, rank, texts, streams));
          },
          nb::arg("number"), nb::arg("rank"), nb::arg("addresses"), nb::arg("streams") = 1,
          "See UcxWorker in csrc/net/ucx.h.")
      .def_prop_ro("longest_round_trip", &UcxWorker::longest_round_trip, nb::call_guard<WithoutGil>(),
                   "In seconds, as measured by the operating system; see UcxWorker in csrc/net/ucx.h.")
      .def("stop", &UcxWorker::stop, nb::arg("cuts") = false, nb::call_guard<WithoutGil>(),
           "End its thread; before the process ends. `cuts`: its connections end later without a wait for the others.");
  nb::class_<NetCommunicator> communicator(
      m, "NetCommunicator", "Collectives over the ranks of several hosts; arguments are trusted.", nb::dynamic_attr());
  communicator
      .def(nb::new_(&create), nb::arg("transport"), nb::arg("rank"), nb::arg("processes"), nb::arg("inline_bytes"),
           nb::arg("chunk_bytes"), nb::arg("is_far") = false)
      .def("use_hierarchy", &use_hierarchy, nb::arg("local"), nb::arg("between"), nb::arg("host"), nb::arg("scatter"),
           nb::arg("collect"), "See Hierarchy in csrc/net/hierarchy.h.")
      .def("progress", &NetCommunicator::progress, nb::call_guard<WithoutGil>())
      .def("assist", &NetCommunicator::assist, nb::call_guard<WithoutGil>(),
           "Move collectives forward, unless another thread is in the communicator.")
      .def("wait_on", &NetCommunicator::wait_on, nb::call_guard<WithoutGil>(), nb::arg("operation"),
           nb::arg("quiet_seconds"),
           "Wait until the collective has ended, nothing has moved for that long, or 0.1 s have passed; return whether "
           "it has ended.")
      .def("pause", &NetCommunicator::pause, nb::call_guard<WithoutGil>(), nb::arg("quiet_seconds"),
           "Sleep between two turns of a wait in which nothing has moved for that long.")
      .def_prop_ro("quiet_seconds", &NetCommunicator::quiet_seconds, "For how long nothing has moved.")
      .def("check_patience", &check_patience, nb::arg("patience"), nb::arg("waited"), nb::arg("describe"),
           nb::arg("warn"),
           "Warn or raise an error, if it is time to. `describe` gives the wait in words, and the processes awaited.")
      .def("fail", &fail, nb::arg("kind"), nb::arg("fact"), nb::arg("cure"), nb::arg("ranks"),
           "Raise an error, now and in all later calls.")
      .def("close", &NetCommunicator::close, nb::call_guard<WithoutGil>())
      .def_prop_ro("oldest", &NetCommunicator::oldest,
                   nb::for_getter(nb::sig("def oldest(self) -> NetCollective | None")),
                   "The oldest operation that has not ended, or None.")
      .def_prop_ro("inline_bytes", &NetCommunicator::inline_bytes, "Size of the data that travel with an announcement.")
      .def_prop_ro("last_agreed", &NetCommunicator::last_agreed,
                   "The last operation that all ranks have begun, in words.")
      .def_prop_ro("scratch_count", &NetCommunicator::scratch_count, "Number of unused buffers (tests).");
  bind_collectives<NetCommunicator, NetCollective>(
      communicator, [](auto&&... given) { return start(std::forward<decltype(given)>(given)...); }, &wait);
}

}  // namespace distopt

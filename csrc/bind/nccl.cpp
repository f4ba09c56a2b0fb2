#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <utility>

#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/rooms.h"
#include "nccl/communicator.h"

namespace nb = nanobind;

namespace distopt {
namespace {

using Address = std::uintptr_t;
using Shared = std::shared_ptr<NcclCommunicator>;
using Parts = std::vector<std::pair<Address, std::size_t>>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

cuda::Stream* stream_of(Address handle) { return at<cuda::Stream>(handle); }

struct NcclWork {
  Shared communicator;
  NcclCommunicator::Work collective;
};

// Not a Board itself: nanobind's pointer to one would hold an object of Python, which a thread of the communicator,
// often the last that lets go, could not free when the interpreter has ended.
struct NcclBoard {
  std::shared_ptr<Board> board;
};

// What is sent and received: an array each, or the parts of ragged ones. `count` is as in Arguments.
NcclOperation operation(const std::string& kind, const Parts& sent, const Parts& received, std::size_t count, int dtype,
                        int op, int root, const char* label) {
  Arguments arguments = make_arguments(kind.c_str(), dtype, label, op, root);
  arguments.count = count;
  const auto pieces_of = [&arguments](const Parts& parts) {
    std::vector<ByteSpan> pieces;
    for (const auto& [address, size] : parts) pieces.push_back({at<char>(address), size * item_bytes(arguments.dtype)});
    return pieces;
  };
  arguments.parts = pieces_of(sent);
  std::vector<ByteSpan> pieces = pieces_of(received);
  return {std::move(arguments), std::move(pieces)};
}

NcclWork start(Shared communicator, const nb::list& operations, Address stream) {
  std::vector<NcclOperation> given;
  for (const nb::handle each : operations) given.push_back(nb::cast<const NcclOperation&>(each));
  const WithoutGil unlocked;
  auto collective = communicator->start(std::move(given), stream_of(stream));
  return {std::move(communicator), std::move(collective)};
}

Shared create(const std::string& path, nb::bytes id, int rank, int world_size, const NcclBoard& board, double timeout,
              double stall_warning, Warn warn) {
  nccl::UniqueId unique_id;
  if (id.size() != sizeof(unique_id)) throw std::invalid_argument("an id of NCCL has 128 bytes");
  std::memcpy(&unique_id, id.c_str(), sizeof(unique_id));
  Hooks hooks = make_hooks(std::move(warn));
  const WithoutGil unlocked;
  return NcclCommunicator::connect(nccl::load(path), unique_id, rank, world_size, board.board,
                                   Limits{timeout, stall_warning}, std::move(hooks));
}

nb::bytes unique_id(const std::string& path) {
  const nccl::NcclApi& api = nccl::load(path);
  nccl::UniqueId id;
  if (const nccl::Result result = api.get_unique_id(&id); result != nccl::Result::success)
    throw std::runtime_error(std::string("ncclGetUniqueId failed: ") + api.get_error_string(result));
  return nb::bytes(&id, sizeof(id));
}

int driver_version() {
  int version = 0;
  cuda::driver().driver_get_version(&version);
  return version;
}

void bind_work(nb::module_& m) {
  nb::class_<NcclWork>(m, "NcclWork", "A collective of NCCL under way.")
      .def(
          "done", [](NcclWork& work) { return work.communicator->done(*work.collective); },
          nb::call_guard<WithoutGil>(), "Local. Whether the result is there.")
      .def(
          "join", [](NcclWork& work, Address stream) { work.communicator->join(*work.collective, stream_of(stream)); },
          nb::arg("stream"), nb::call_guard<WithoutGil>(), "Local. What `stream` does from now on sees the result.")
      .def(
          "wait", [](NcclWork& work, double timeout) { work.communicator->wait(*work.collective, timeout); },
          nb::arg("timeout"), nb::call_guard<WithoutGil>(), "Wait on the host, at most `timeout` seconds.");
  nb::class_<NcclBoard>(m, "NcclBoard", "Where the ranks of one host see each other.")
      .def(
          "__init__",
          [](NcclBoard* board, int fd, int rank, const std::vector<ProcessFields>& processes) {
            new (board) NcclBoard{std::make_shared<Board>(fd, rank, processes_of(processes))};
          },
          nb::arg("fd"), nb::arg("rank"), nb::arg("processes"));
  nb::class_<NcclOperation>(m, "NcclOperation", "A collective of NCCL to be started.");
}

}  // namespace

void bind_nccl(nb::module_& m) {
  bind_work(m);
  nb::class_<NcclCommunicator> communicator(m, "NcclCommunicator",
                                            "Collectives over NCCL on device pointers; arguments are trusted.");
  communicator
      .def(nb::new_(&create), nb::arg("path"), nb::arg("unique_id"), nb::arg("rank"), nb::arg("world_size"),
           nb::arg("board"), nb::arg("timeout"), nb::arg("stall_warning"), nb::arg("warn"))
      .def("start", &start, nb::arg("operations"), nb::arg("stream"),
           nb::sig("def start(self, operations: list[NcclOperation], stream: int) -> NcclWork"),
           "Collective. Start operations as one, behind what `stream` holds.")
      .def_prop_ro("failed", &NcclCommunicator::failed, nb::call_guard<WithoutGil>(),
                   "Local. Whether it has failed, here or on another rank of this host.")
      .def("abort", &NcclCommunicator::abort, nb::arg("reason"), nb::call_guard<WithoutGil>())
      .def("close", &NcclCommunicator::close, nb::call_guard<WithoutGil>());

  m.def("nccl_operation", &operation, nb::arg("kind"), nb::arg("sent"), nb::arg("received"), nb::arg("count"),
        nb::arg("dtype"), nb::arg("op"), nb::arg("root"), nb::arg("label"),
        "A collective on device pointers; an array, or a part of a ragged one, is (address, count).");
  m.def(
      "nccl_version", [](const std::string& path) { return nccl::load(path).version; }, nb::arg("path"),
      nb::call_guard<WithoutGil>(), "Version of the NCCL at an absolute path, as 10000 * major + 100 * minor + patch.");
  m.def("nccl_unique_id", &unique_id, nb::arg("path"), "128 bytes that the ranks of one communicator share.");
  m.def("cuda_driver_version", &driver_version, nb::call_guard<WithoutGil>(),
        "The CUDA version that the driver supports, as 1000 * major + 10 * minor.");
}

}  // namespace distopt

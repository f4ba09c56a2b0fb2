#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bind/buffers.h"
#include "bind/errors.h"
#include "bind/gil.h"
#include "bind/rooms.h"
#include "cpu/reduce.h"
#include "shm/communicator.h"

namespace distopt {
namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

struct ShmWork {
  std::shared_ptr<ShmCommunicator> communicator;
  std::shared_ptr<ShmCollective> collective;
};

// To release Python's lock and to take it again costs as much as a small collective. So an operation that ends within
// microseconds keeps it.
ShmWork start(ShmCommunicator& communicator, std::shared_ptr<ShmCollective> collective) {
  if (!communicator.start(collective)) {
    const WithoutGil unlocked;
    communicator.progress();
  }
  return {communicator.shared_from_this(), std::move(collective)};
}

ShmWork start(ShmCommunicator& communicator, Arguments arguments, Buffers buffers) {
  return start(communicator, std::make_shared<WithArrays<ShmCollective>>(std::move(arguments), std::move(buffers)));
}

void wait(const ShmWork& work, std::optional<double> timeout) {
  ShmCommunicator& communicator = *work.communicator;
  if (communicator.wait_briefly(*work.collective)) return;
  const WithoutGil unlocked;
  communicator.wait(*work.collective, timeout.value_or(communicator.default_timeout()));
}

nb::ndarray<nb::numpy> empty(ShmCommunicator& communicator, std::size_t count, int dtype,
                             std::uint64_t bytes_available) {
  std::shared_ptr<char> memory;
  {
    const WithoutGil unlocked;
    memory = communicator.empty(count, static_cast<DType>(dtype), bytes_available);
  }
  return flat_array(std::move(memory), count, static_cast<DType>(dtype));
}

class HeldMessage : public Message {
 public:
  HeldMessage(bool sends, int peer, std::int64_t tag, DType dtype, const Py_buffer& view, Buffers buffers)
      : Message(sends, peer, tag, dtype, static_cast<char*>(view.buf),
                static_cast<std::size_t>(view.len) / item_bytes(dtype)),
        buffers_(std::move(buffers)) {}

 private:
  Buffers buffers_;
};

struct ShmMessage {
  std::shared_ptr<ShmCommunicator> communicator;
  std::shared_ptr<Message> message;
};

ShmMessage start_message(ShmCommunicator& communicator, bool sends, nb::handle array, int peer, std::int64_t tag,
                         int dtype) {
  Buffers buffers;
  const Py_buffer view = buffers.add(array, sends ? 0 : PyBUF_WRITABLE);
  auto message = std::make_shared<HeldMessage>(sends, peer, tag, static_cast<DType>(dtype), view, std::move(buffers));
  const WithoutGil unlocked;
  communicator.messages().start(message);
  return {communicator.shared_from_this(), std::move(message)};
}

std::shared_ptr<ShmCommunicator> create(int fd, int rank, const std::vector<ProcessFields>& processes, double timeout,
                                        double stall_warning, Warn warn) {
  return std::make_shared<ShmCommunicator>(fd, rank, processes_of(processes), Limits{timeout, stall_warning},
                                           make_hooks(std::move(warn)));
}

std::optional<std::pair<int, std::uint64_t>> rank_and_index(const Nonfinite& found) {
  if (found.index == Nonfinite::nowhere) return {};
  return std::pair(static_cast<int>(found.rank), found.index);
}

auto reduce(const std::vector<Array>& outputs, const std::vector<Input>& inputs, int dtype, int op, bool look) {
  std::vector<void*> outs;
  std::vector<const void*> ins;
  for (const Array& array : outputs) outs.push_back(array.data());
  for (const Input& array : inputs) ins.push_back(array.data());
  const auto check = [&](const auto& array) {
    if (array.nbytes() != inputs.at(0).nbytes() || array.itemsize() != item_bytes(static_cast<DType>(dtype)))
      throw std::invalid_argument("all arrays must have the same size and the item size of the type");
  };
  for (const Array& array : outputs) check(array);
  for (const Input& array : inputs) check(array);
  const WithoutGil unlocked;
  return rank_and_index(reduce_kernels().reduce(outs.data(), static_cast<int>(outs.size()), ins.data(),
                                                static_cast<int>(ins.size()), inputs.at(0).size(),
                                                static_cast<DType>(dtype), static_cast<RedOp>(op), look));
}

void copy(const Array& to, const Input& from) {
  if (to.nbytes() != from.nbytes()) throw std::invalid_argument("both arrays must have the same size");
  const WithoutGil unlocked;
  reduce_kernels().copy(to.data(), from.data(), from.nbytes());
}

void bind_works(nb::module_& m) {
  nb::class_<ShmWork>(m, "ShmWork", nb::sig("class ShmWork(distopt.comm.work.Work)"),
                      "A collective under way in shared memory.")
      .def(
          "done", [](ShmWork& work) { return work.communicator->test(*work.collective); }, nb::call_guard<WithoutGil>(),
          "Local. Move the operation forward without waiting; return whether it has finished.")
      .def("wait", &wait, nb::arg("timeout") = nb::none(), "Wait for the end, at most `timeout` seconds.")
      .def_prop_ro(
          "nonfinite", [](const ShmWork& work) { return rank_and_index(work.collective->nonfinite()); },
          "See `Work.nonfinite`.");

  using ShmRaggedWork = RaggedWork<ShmWork, ShmCollective>;
  nb::class_<ShmRaggedWork, ShmWork>(m, "ShmRaggedWork",
                                     nb::sig("class ShmRaggedWork(ShmWork, distopt.comm.work.RaggedWork)"),
                                     "A ragged collective under way in shared memory.")
      .def_prop_ro("parts", &ShmRaggedWork::take_parts, "See `RaggedWork.parts`.");

  nb::class_<ShmMessage>(m, "ShmMessage", nb::sig("class ShmMessage(distopt.comm.work.MessageWork)"),
                         "A message under way in shared memory.")
      .def(
          "done", [](ShmMessage& work) { return work.communicator->messages().test(*work.message); },
          nb::call_guard<WithoutGil>(),
          "Local. Move messages forward without waiting; return whether this one has ended.")
      .def(
          "wait",
          [](ShmMessage& work, std::optional<double> timeout) {
            ShmCommunicator& communicator = *work.communicator;
            communicator.messages().wait(*work.message, timeout.value_or(communicator.default_timeout()));
          },
          nb::arg("timeout") = nb::none(), nb::call_guard<WithoutGil>(), "Wait for the end, at most `timeout` seconds.")
      .def_prop_ro(
          "source", [](const ShmMessage& work) { return work.message->finished() ? work.message->peer() : -1; },
          "See `MessageWork.source`.")
      .def_prop_ro("nonfinite", [](const ShmMessage&) { return nb::none(); });
}

void bind_communicator(nb::module_& m) {
  nb::class_<ShmCommunicator> communicator(m, "ShmCommunicator",
                                           "Collectives over the ranks of one host; arguments are trusted.");
  communicator
      .def(nb::new_(&create), nb::arg("fd"), nb::arg("rank"), nb::arg("processes"), nb::arg("timeout"),
           nb::arg("stall_warning"), nb::arg("warn"))
      .def("count_cores", &ShmCommunicator::count_cores)
      .def("use_wire_memory_of", &ShmCommunicator::use_wire_memory_of, nb::keep_alive<1, 2>())
      .def("empty", &empty)
      .def("start_message", &start_message, nb::arg("sends"), nb::arg("array"), nb::arg("peer"), nb::arg("tag"),
           nb::arg("dtype"))
      .def("progress", &ShmCommunicator::progress, nb::call_guard<WithoutGil>())
      // Without the lock, which a thread that has the turn may need to release an array.
      .def("close", &ShmCommunicator::close, nb::call_guard<WithoutGil>());
  bind_collectives<ShmCommunicator, ShmCollective>(
      communicator, [](auto&&... given) { return start(std::forward<decltype(given)>(given)...); }, &wait);
}

}  // namespace

void bind_shm(nb::module_& m) {
  nb::register_exception_translator(raise_as_python);
  bind_works(m);
  bind_communicator(m);

  m.def("create_segment", &create_segment, nb::arg("world_size"), nb::arg("chunk_bytes"),
        nb::arg("named_fallback") = false, "Descriptor of the memory that the ranks of one host are to share.");
  m.def(
      "reduce", &reduce, nb::arg("outputs"), nb::arg("inputs"), nb::arg("dtype"), nb::arg("op"),
      nb::arg("look") = false,
      "Element-wise reduction of equally long arrays in the order given, written to every output (tests, benchmarks). "
      "With `look`: as `Work.nonfinite`, with the place in `inputs` as the rank.");
  m.def("copy", &copy, nb::arg("to"), nb::arg("from_"), "Bytes of one array into another (tests).");
}

}  // namespace distopt

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

#include "bind/errors.h"
#include "bind/rooms.h"
#include "shm/communicator.h"
#include "shm/reduce.h"

namespace nb = nanobind;

namespace distopt {
namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

// Contiguous arrays by the buffer protocol: a fraction of the time that DLPack takes, and held until released.
class Buffers {
 public:
  Buffers() = default;
  Buffers(Buffers&& other) noexcept : count_(std::exchange(other.count_, 0)) {
    std::copy_n(other.views_, count_, views_);
  }
  ~Buffers() {
    if (count_ == 0 || !Py_IsInitialized()) return;  // at the end of the process the arrays are gone already
    nb::gil_scoped_acquire gil;                      // the last to let go may be a thread that waits without it
    for (int i = 0; i < count_; ++i) PyBuffer_Release(&views_[i]);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // nullptr, with a Python error set, if the array has no such buffer.
  const Py_buffer* try_add(nb::handle array, int flags) {
    Py_buffer& view = views_[count_];
    if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS | flags) != 0) return nullptr;
    ++count_;
    return &view;
  }
  const Py_buffer& add(nb::handle array, int flags) {
    const Py_buffer* view = try_add(array, flags);
    if (view == nullptr) throw nb::python_error();
    return *view;
  }

 private:
  Py_buffer views_[2];
  int count_ = 0;
};

// An operation and, in the same allocation, what keeps its arrays alive.
class HeldOperation : public Operation {
 public:
  HeldOperation(Request request, Buffers buffers) : Operation(std::move(request)), buffers_(std::move(buffers)) {}

 private:
  Buffers buffers_;
};

// An all_gather_ragged and the memory that its results arrive in.
class RaggedOperation final : public HeldOperation {
 public:
  using HeldOperation::HeldOperation;
  // To be called once, when it has finished: every rank's elements, which are the caller's from now on.
  std::vector<std::shared_ptr<char>> take() { return std::move(memory_); }

 private:
  std::vector<char*> allocate(const std::vector<std::uint64_t>& counts) override {
    std::vector<char*> outputs;
    for (std::uint64_t count : counts) {
      // At least one byte, so that no array is at the null address.
      memory_.emplace_back(new char[count * item_bytes(request().dtype) + 1], std::default_delete<char[]>());
      outputs.push_back(memory_.back().get());
    }
    return outputs;
  }

  std::vector<std::shared_ptr<char>> memory_;
};

struct ShmWork {
  std::shared_ptr<ShmCommunicator> communicator;
  std::shared_ptr<Operation> operation;
};

Request make_request(OpKind kind, int dtype, const char* label) {
  Request request;
  request.kind = kind;
  request.dtype = static_cast<DType>(dtype);
  request.label = label;
  return request;
}

// Letting others have the interpreter and taking it back costs as much as a small collective on its own. So what ends
// within microseconds keeps it.
ShmWork start(ShmCommunicator& communicator, std::shared_ptr<Operation> operation) {
  if (!communicator.start(operation)) {
    nb::gil_scoped_release release;
    communicator.progress();
  }
  return {communicator.shared_from_this(), std::move(operation)};
}

ShmWork start(ShmCommunicator& communicator, Request request, Buffers buffers) {
  return start(communicator, std::make_shared<HeldOperation>(std::move(request), std::move(buffers)));
}

void wait(ShmCommunicator& communicator, const Operation& operation, std::optional<double> timeout) {
  if (communicator.wait_briefly(operation)) return;
  nb::gil_scoped_release release;
  communicator.wait(operation, timeout.value_or(communicator.default_timeout()));
}

// `array` is the input; `out` the output, or None where the operation works in place.
ShmWork start(ShmCommunicator& communicator, Request request, nb::handle array, nb::handle out) {
  Buffers buffers;
  const Py_buffer& input = buffers.add(array, out.is_none() ? PyBUF_WRITABLE : 0);
  const Py_buffer& output = out.is_none() ? input : buffers.add(out, PyBUF_WRITABLE);
  const Py_buffer& part = request.kind == OpKind::reduce_scatter ? output : input;
  request.input = static_cast<const char*>(input.buf);
  request.output = static_cast<char*>(output.buf);
  request.count = static_cast<std::size_t>(part.len) / item_bytes(request.dtype);
  return start(communicator, std::move(request), std::move(buffers));
}

ShmWork all_reduce(ShmCommunicator& communicator, nb::handle array, int dtype, int op, const char* label, bool looks) {
  Request request = make_request(OpKind::all_reduce, dtype, label);
  request.looks = looks;
  request.op = static_cast<RedOp>(op);
  return start(communicator, std::move(request), array, nb::none());
}

bool equals(nb::handle text, const char* name) {
  return PyUnicode_Check(text.ptr()) && PyUnicode_CompareWithASCIIString(text.ptr(), name) == 0;
}

// The element type of a buffer, if its format tells, `wire` (a name or None) agrees, and it is aligned. A format of the
// other byte order has two characters.
std::optional<DType> plain_dtype(const Py_buffer& view, nb::handle wire) {
  struct Plain {
    char format;
    Py_ssize_t bytes;
    DType dtype;
    const char* name;
  };
  constexpr Plain types[] = {{'f', 4, DType::float32, "float32"}, {'d', 8, DType::float64, "float64"},
                             {'e', 2, DType::float16, "float16"}, {'i', 4, DType::int32, "int32"},
                             {'l', 8, DType::int64, "int64"},     {'q', 8, DType::int64, "int64"}};
  if (view.format == nullptr || view.format[0] == 0 || view.format[1] != 0) return {};
  for (const Plain& type : types)
    if (view.format[0] == type.format && view.itemsize == type.bytes && (wire.is_none() || equals(wire, type.name)) &&
        reinterpret_cast<std::uintptr_t>(view.buf) % static_cast<std::uintptr_t>(type.bytes) == 0)
      return type.dtype;
  return {};
}

std::optional<RedOp> plain_op(nb::handle op, DType dtype) {
  const bool integer = dtype == DType::int32 || dtype == DType::int64;
  if (equals(op, "sum")) return RedOp::sum;
  if (equals(op, "mean") && !integer) return RedOp::mean;
  if (equals(op, "max")) return RedOp::max;
  if (equals(op, "min")) return RedOp::min;
  return {};
}

nb::object all_reduce_plain(ShmCommunicator& communicator, nb::handle array, nb::handle op, nb::handle wire,
                            nb::handle label, bool looks) {
  Buffers buffers;
  const Py_buffer* view = buffers.try_add(array, PyBUF_WRITABLE | PyBUF_FORMAT);
  Py_ssize_t length = 0;
  const char* text = view == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(label.ptr(), &length);
  if (text == nullptr) {
    PyErr_Clear();
    return nb::none();
  }
  const std::optional<DType> dtype = plain_dtype(*view, wire);
  const std::optional<RedOp> reduction = dtype ? plain_op(op, *dtype) : std::nullopt;
  if (!reduction) return nb::none();
  const bool sums = *reduction == RedOp::sum || *reduction == RedOp::mean;
  const bool wide = *dtype == DType::float32 || *dtype == DType::float64;
  if (looks && !(sums && wide)) return nb::none();
  Request request;
  request.kind = OpKind::all_reduce;
  request.dtype = *dtype;
  request.op = *reduction;
  request.looks = looks;
  request.count = static_cast<std::size_t>(view->len) / item_bytes(*dtype);
  request.input = request.output = static_cast<char*>(view->buf);
  request.label.assign(text, static_cast<std::size_t>(length));
  return nb::cast(start(communicator, std::move(request), std::move(buffers)));
}

ShmWork reduce_scatter(ShmCommunicator& communicator, nb::handle array, nb::handle out, int dtype, int op,
                       const char* label) {
  Request request = make_request(OpKind::reduce_scatter, dtype, label);
  request.op = static_cast<RedOp>(op);
  return start(communicator, std::move(request), array, out);
}

ShmWork all_gather(ShmCommunicator& communicator, nb::handle array, nb::handle out, int dtype, const char* label) {
  return start(communicator, make_request(OpKind::all_gather, dtype, label), array, out);
}

ShmWork broadcast(ShmCommunicator& communicator, nb::handle array, int root, int dtype, const char* label) {
  Request request = make_request(OpKind::broadcast, dtype, label);
  request.root = root;
  return start(communicator, std::move(request), array, nb::none());
}

nb::dlpack::dtype storage_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return nb::dtype<double>();
    case DType::float16:
      return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    case DType::bfloat16:
      return nb::dtype<std::uint16_t>();
    case DType::int32:
      return nb::dtype<std::int32_t>();
    case DType::int64:
      return nb::dtype<std::int64_t>();
    default:
      return nb::dtype<float>();
  }
}

// A flat NumPy array on memory that `owner` keeps alive.
nb::object flat_array(std::shared_ptr<char> memory, std::size_t count, DType dtype) {
  void* data = memory.get();
  auto* owner = new std::shared_ptr<char>(std::move(memory));
  nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<char>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy>(data, {count}, capsule, {}, storage_of(dtype)));
}

nb::object empty(ShmCommunicator& communicator, std::size_t count, int dtype, std::uint64_t bytes_available) {
  std::shared_ptr<char> memory;
  {
    nb::gil_scoped_release release;
    memory = communicator.empty(count, static_cast<DType>(dtype), bytes_available);
  }
  return flat_array(std::move(memory), count, static_cast<DType>(dtype));
}

// `parts` are made when they are first asked for.
struct ShmRaggedWork : ShmWork {
  std::shared_ptr<RaggedOperation> ragged;
  nb::object parts;
};

ShmRaggedWork all_gather_ragged(ShmCommunicator& communicator, nb::handle array, int dtype, const char* label) {
  Request request = make_request(OpKind::all_gather_ragged, dtype, label);
  Buffers buffers;
  const Py_buffer& input = buffers.add(array, 0);
  request.input = static_cast<const char*>(input.buf);
  request.count = static_cast<std::size_t>(input.len) / item_bytes(request.dtype);
  auto operation = std::make_shared<RaggedOperation>(std::move(request), std::move(buffers));
  return {start(communicator, operation), operation, nb::none()};
}

nb::object parts_of(ShmRaggedWork& work) {
  if (!work.operation->finished())
    throw ShmError(ErrorKind::usage, "the parts have not arrived; call wait() before parts is read");
  if (work.parts.is_none()) {
    const std::vector<std::uint64_t>& counts = work.operation->counts();
    std::vector<std::shared_ptr<char>> memory = work.ragged->take();
    nb::list parts;
    for (std::size_t q = 0; q < counts.size(); ++q)
      parts.append(flat_array(std::move(memory[q]), counts[q], work.operation->request().dtype));
    work.parts = parts;
  }
  return work.parts;
}

void barrier(ShmCommunicator& communicator) {
  const ShmWork work = start(communicator, Request{}, Buffers());
  wait(communicator, *work.operation, {});
}

std::shared_ptr<ShmCommunicator> create(int fd, int rank, std::vector<std::string> names, double timeout,
                                        double stall_warning, nb::callable warn) {
  Hooks hooks;
  hooks.check_signals = [] {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  };
  hooks.warn = [warn](const std::string& text) {
    nb::gil_scoped_acquire gil;
    warn(text);
  };
  return std::make_shared<ShmCommunicator>(fd, rank, std::move(names), Limits{timeout, stall_warning},
                                           std::move(hooks));
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
  nb::gil_scoped_release release;
  const ReduceKernels& kernels = reduce_kernels();
  const auto run = [&](auto kernel) {
    return kernel(outs.data(), static_cast<int>(outs.size()), ins.data(), static_cast<int>(ins.size()),
                  inputs.at(0).size(), static_cast<DType>(dtype), static_cast<RedOp>(op));
  };
  if (look) return rank_and_index(run(kernels.reduce_and_look));
  run(kernels.reduce);
  return rank_and_index({});
}

void copy(const Array& to, const Input& from) {
  if (to.nbytes() != from.nbytes()) throw std::invalid_argument("both arrays must have the same size");
  nb::gil_scoped_release release;
  reduce_kernels().copy(to.data(), from.data(), from.nbytes());
}

}  // namespace

void bind_shm(nb::module_& m) {
  nb::register_exception_translator(raise_as_python);

  nb::class_<ShmWork>(m, "ShmWork", "A collective under way in shared memory.")
      .def(
          "done", [](ShmWork& work) { return work.communicator->test(*work.operation); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Local. Move the operation forward without waiting; whether it has finished.")
      .def(
          "wait",
          [](ShmWork& work, std::optional<double> timeout) { wait(*work.communicator, *work.operation, timeout); },
          nb::arg("timeout") = nb::none(), "Wait for the end, at most `timeout` seconds.")
      .def_prop_ro(
          "nonfinite", [](const ShmWork& work) { return rank_and_index(work.operation->nonfinite()); },
          "See `Work.nonfinite`.");

  nb::class_<ShmRaggedWork, ShmWork>(m, "ShmRaggedWork", "An all_gather_ragged under way in shared memory.")
      .def_prop_ro("parts", &parts_of, "See `RaggedWork.parts`.");

  nb::class_<ShmCommunicator>(m, "ShmCommunicator", "Collectives over the ranks of one host; arguments are trusted.")
      .def(nb::new_(&create), nb::arg("fd"), nb::arg("rank"), nb::arg("names"), nb::arg("timeout"),
           nb::arg("stall_warning"), nb::arg("warn"))
      .def("count_cores", &ShmCommunicator::count_cores)
      .def("use_wire_memory_of", &ShmCommunicator::use_wire_memory_of, nb::keep_alive<1, 2>())
      .def("empty", &empty)
      .def("all_reduce", &all_reduce)
      .def("all_reduce_plain", &all_reduce_plain, nb::arg("array"), nb::arg("op"), nb::arg("wire").none(),
           nb::arg("label"), nb::arg("find_nonfinite"),
           "all_reduce of an array whose buffer says all; None, without having started anything, of another one or if "
           "an argument is wrong.")
      .def("reduce_scatter", &reduce_scatter)
      .def("all_gather", &all_gather)
      .def("all_gather_ragged", &all_gather_ragged)
      .def("broadcast", &broadcast)
      .def("barrier", &barrier)
      .def("progress", &ShmCommunicator::progress, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &ShmCommunicator::close);

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

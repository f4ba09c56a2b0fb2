// Arrays that a collective holds, and the arguments made from them, for the bindings of communicators.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bind/gil.h"
#include "host/arguments.h"
#include "host/describe.h"

namespace distopt {

namespace nb = nanobind;

// Contiguous arrays by the buffer protocol: a fraction of the time that DLPack takes, and held until released.
class Buffers {
 public:
  Buffers() = default;
  Buffers(Buffers&& other) noexcept : count_(std::exchange(other.count_, 0)) {
    std::copy_n(other.views_, count_, views_);
  }
  ~Buffers() {
    if (count_ == 0 || !Py_IsInitialized()) return;  // at the end of the process the arrays are gone already
    const WithGil gil;                               // the last to let go may be a thread that waits without it
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

// A collective and, in the same allocation, the Buffers (one or several) that keep its arrays alive.
template <typename Collective, typename Arrays = Buffers>
class WithArrays : public Collective {
 public:
  template <typename... Others>
  WithArrays(Arguments arguments, Arrays arrays, Others&&... others)
      : Collective(std::move(arguments), std::forward<Others>(others)...), arrays_(std::move(arrays)) {}

 private:
  Arrays arrays_;
};

// Parts of a ragged collective: one for each rank, or a single one for all.
inline std::vector<Buffers> hold_parts(Arguments& arguments, const std::vector<nb::object>& arrays) {
  std::vector<Buffers> held;
  for (const nb::object& array : arrays) {
    const Py_buffer& view = held.emplace_back().add(array, 0);
    arguments.parts.push_back({static_cast<char*>(view.buf), static_cast<std::size_t>(view.len)});
    arguments.count += arguments.parts.back().bytes / item_bytes(arguments.dtype);
  }
  if (arguments.kind != OpKind::all_gather_ragged) return held;
  arguments.input = arguments.parts.at(0).data;
  arguments.parts.clear();
  return held;
}

// A collective in place has `out` equal to `array`.
inline Buffers hold_arrays(Arguments& arguments, nb::handle array, nb::handle out) {
  Buffers held;
  const Py_buffer& input = held.add(array, out.is(array) ? PyBUF_WRITABLE : 0);
  const Py_buffer& output = out.is(array) ? input : held.add(out, PyBUF_WRITABLE);
  arguments.input = static_cast<const char*>(input.buf);
  arguments.output = static_cast<char*>(output.buf);
  arguments.count = static_cast<std::size_t>(std::min(input.len, output.len)) / item_bytes(arguments.dtype);
  return held;
}

inline bool equals(nb::handle text, const char* name) {
  return PyUnicode_Check(text.ptr()) && PyUnicode_CompareWithASCIIString(text.ptr(), name) == 0;
}

// The element type of a buffer, if its format has one, `wire` (a name or None) fits, and it is aligned. A format of the
// other byte order has two characters.
inline std::optional<DType> plain_dtype(const Py_buffer& view, nb::handle wire) {
  constexpr std::pair<char, DType> types[] = {
      {'f', DType::float32}, {'d', DType::float64}, {'e', DType::float16}, {'i', DType::int32}, {'l', DType::int64},
      {'q', DType::int64},   {'b', DType::int8},    {'B', DType::uint8},   {'h', DType::int16}, {'?', DType::boolean}};
  if (view.format == nullptr || view.format[0] == 0 || view.format[1] != 0) return {};
  for (const auto& [format, dtype] : types)
    if (view.format[0] == format && static_cast<std::size_t>(view.itemsize) == item_bytes(dtype) &&
        (wire.is_none() || equals(wire, dtype_name(static_cast<std::uint8_t>(dtype)))) &&
        reinterpret_cast<std::uintptr_t>(view.buf) % item_bytes(dtype) == 0)
      return dtype;
  return {};
}

inline std::optional<RedOp> plain_op(nb::handle op, DType dtype) {
  for (const RedOp code :
       {RedOp::sum, RedOp::mean, RedOp::max, RedOp::min, RedOp::product, RedOp::bit_and, RedOp::bit_or, RedOp::bit_xor})
    if (equals(op, op_name(static_cast<std::uint8_t>(code))))
      return can_reduce(dtype, code) ? std::optional(code) : std::nullopt;
  return {};
}

// An all_reduce of an array whose buffer says all; none if it does not or if an argument is wrong.
inline std::optional<Arguments> plain_all_reduce(Buffers& buffers, nb::handle array, nb::handle op, nb::handle wire,
                                                 nb::handle label) {
  const Py_buffer* view = buffers.try_add(array, PyBUF_WRITABLE | PyBUF_FORMAT);
  Py_ssize_t length = 0;
  const char* text = view == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(label.ptr(), &length);
  if (text == nullptr) {
    PyErr_Clear();
    return {};
  }
  const std::optional<DType> dtype = plain_dtype(*view, wire);
  const std::optional<RedOp> reduction = dtype ? plain_op(op, *dtype) : std::nullopt;
  if (!reduction) return {};
  Arguments arguments;
  arguments.kind = OpKind::all_reduce;
  arguments.dtype = *dtype;
  arguments.op = *reduction;
  arguments.count = static_cast<std::size_t>(view->len) / item_bytes(*dtype);
  arguments.input = arguments.output = static_cast<char*>(view->buf);
  arguments.label.assign(text, static_cast<std::size_t>(length));
  return arguments;
}

// Notes a collective that is about to start in the flight record, with the text `place` unless that is negative.
template <typename Communicator>
void note(Communicator& on, const Arguments& arguments, std::int64_t place) {
  if (place >= 0)
    on.flight().note(on.next_number(), arguments.count, static_cast<std::uint8_t>(arguments.kind),
                     static_cast<std::uint8_t>(arguments.dtype), static_cast<std::uint32_t>(place));
}

inline nb::dlpack::dtype storage_of(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const Code code = dtype == DType::boolean                             ? Code::Bool
                    : dtype == DType::bfloat16 || dtype == DType::uint8 ? Code::UInt
                    : is_float(dtype)                                   ? Code::Float
                                                                        : Code::Int;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * item_bytes(dtype)), 1};
}

// A flat NumPy array on memory that `owner` keeps alive.
inline nb::ndarray<nb::numpy> flat_array(std::shared_ptr<char> memory, std::size_t count, DType dtype) {
  void* data = memory.get();
  auto* owner = new std::shared_ptr<char>(std::move(memory));
  nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<char>*>(p); });
  return {data, {count}, capsule, {}, storage_of(dtype)};
}

// A ragged collective that allocates the memory in which data arrive; the caller owns it after take().
template <typename Collective>
class Receiving : public WithArrays<Collective, std::vector<Buffers>> {
 public:
  using WithArrays<Collective, std::vector<Buffers>>::WithArrays;
  // To be called once, when it has finished: every rank's elements, as arrays.
  nb::list take() {
    nb::list parts;
    for (std::size_t q = 0; q < memory_.size(); ++q)
      parts.append(flat_array(std::move(memory_[q]), this->counts()[q], this->arguments().dtype));
    return parts;
  }

 private:
  std::vector<char*> allocate(const std::vector<std::uint64_t>& counts) override {
    std::vector<char*> outputs;
    for (std::uint64_t count : counts) {
      // At least one byte, so that no array is at the null address.
      memory_.emplace_back(new char[count * item_bytes(this->arguments().dtype) + 1], std::default_delete<char[]>());
      outputs.push_back(memory_.back().get());
    }
    return outputs;
  }

  std::vector<std::shared_ptr<char>> memory_;
};

// A ragged collective under way. `parts` are made when they are first read.
template <typename Work, typename Collective>
struct RaggedWork : Work {
  std::shared_ptr<Receiving<Collective>> received;
  nb::object parts;

  nb::object take_parts() {
    if (!received->finished())
      throw CommunicatorError(ErrorKind::usage, "the parts have not arrived; call wait() before parts is read");
    if (parts.is_none()) parts = received->take();
    return parts;
  }
};

// Bindings common to both communicators of _core. `start` begins a collective, given the communicator and either
// a collective or its arguments and arrays, and returns its work, for which `wait` waits; `Collective` is the class of
// ragged collectives. Arrays are contiguous; types and reductions are the codes of distopt.comm.base.
template <typename Communicator, typename Collective, typename Class, typename Start, typename Wait>
void bind_collectives(Class& cls, Start start, Wait wait) {
  cls.def("start", [start](Communicator& on, const char* kind, nb::handle array, nb::handle out, int dtype, int op,
                           int root, const char* label, bool looks) {
    Arguments arguments = make_arguments(kind, dtype, label, op, root);
    arguments.looks = looks;
    Buffers held = hold_arrays(arguments, array, out);
    return start(on, std::move(arguments), std::move(held));
  });
  cls.def("start_ragged", [start](Communicator& on, const char* kind, const std::vector<nb::object>& arrays, int dtype,
                                  const char* label) {
    Arguments arguments = make_arguments(kind, dtype, label);
    std::vector<Buffers> held = hold_parts(arguments, arrays);
    auto collective = std::make_shared<Receiving<Collective>>(std::move(arguments), std::move(held));
    auto work = start(on, collective);
    return RaggedWork<decltype(work), Collective>{std::move(work), std::move(collective), nb::none()};
  });
  cls.def(
      "all_reduce_plain",
      [start](Communicator& on, nb::handle array, nb::handle op, nb::handle wire, nb::handle label, bool looks,
              std::int64_t place) {
        Buffers held;
        std::optional<Arguments> arguments = plain_all_reduce(held, array, op, wire, label);
        using Work = decltype(start(on, std::move(*arguments), std::move(held)));
        if (!arguments || (looks && !(Communicator::finds_nonfinite && arguments->may_look())))
          return std::optional<Work>();
        arguments->looks = looks;
        note(on, *arguments, place);
        return std::optional<Work>(start(on, std::move(*arguments), std::move(held)));
      },
      nb::arg("array"), nb::arg("op"), nb::arg("wire").none(), nb::arg("label"), nb::arg("find_nonfinite"),
      nb::arg("place"),
      "all_reduce of an array whose buffer says all; None, without having started anything, of another one or if an "
      "argument is wrong. It is noted in the flight record with the text `place`, unless that is negative.");
  cls.def(
      "reduce_memory",
      [start, wait](Communicator& on, nb::handle owner, std::uintptr_t address, std::uint64_t count, int dtype, int op,
                    double timeout, std::int64_t place) {
        Arguments arguments = make_arguments("all_reduce", dtype, "", op);
        arguments.count = count;
        arguments.input = arguments.output = reinterpret_cast<char*>(address);
        note(on, arguments, place);
        try {
          wait(start(on, std::move(arguments), Buffers()), timeout);
        } catch (...) {
          owner.inc_ref();  // for good: the collective may still write there
          throw;
        }
      },
      nb::arg("owner"), nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"), nb::arg("timeout"),
      nb::arg("place"), "See `NativeCommunicator.reduce_memory`.");
  cls.def("barrier", [start](Communicator& on) { return start(on, Arguments{}, Buffers()); });
  cls.def_prop_ro("next_number", &Communicator::next_number, "The number of the operation that is started next.");
  cls.def(
      "record_in",
      [](Communicator& on, nb::handle memory, std::size_t counter, std::size_t records, std::size_t n_records,
         std::size_t group, std::uint16_t index) {
        Buffers buffers;
        const Py_buffer& view = buffers.add(memory, PyBUF_WRITABLE);
        on.flight().use(static_cast<char*>(view.buf), {counter, records, n_records, group, index});
      },
      nb::arg("memory"), nb::arg("counter"), nb::arg("records"), nb::arg("n_records"), nb::arg("group"),
      nb::arg("index"), "From now on, note operations there: see csrc/base/flight.h. The memory must stay.");
}

}  // namespace distopt

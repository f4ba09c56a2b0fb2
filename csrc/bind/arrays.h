// The common part of the bindings of array kernels: array types, shape checks, definitions that never convert an array.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace distopt {

namespace nb = nanobind;

using Index = std::ptrdiff_t;
using Pair = std::pair<Index, Index>;
template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T>
using Dense = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

template <class A>
void need(const A& array, const char* name, std::initializer_list<Index> shape) {
  bool same = array.ndim() == shape.size();
  std::string wanted, found;
  size_t i = 0;
  for (Index size : shape) {
    wanted += (i ? ", " : "") + std::to_string(size);
    same = same && Index(array.shape(i)) == size;
    ++i;
  }
  if (same) return;
  for (i = 0; i < array.ndim(); ++i) found += (i ? ", " : "") + std::to_string(array.shape(i));
  throw std::invalid_argument(std::string(name) + " has shape (" + found + "); expected (" + wanted + ")");
}

template <class A>
void need(const std::optional<A>& array, const char* name, std::initializer_list<Index> shape) {
  if (array) need(*array, name, shape);
}

template <class A, class B>
void need_same_size(const A& array, const char* name, const B& other) {
  if (array.size() != other.size())
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.size()) + " elements; expected " +
                                std::to_string(other.size()));
}

template <class A>
auto data_of(const std::optional<A>& array) {
  return array ? array->data() : nullptr;
}

// The kernels of a family for the type T.
template <class T, class Kernels>
const auto& table_of(const Kernels& kernels) {
  if constexpr (std::is_same_v<T, float>)
    return kernels.f32;
  else
    return kernels.f64;
}

// Scratch memory that lives as long as the thread and only grows: fresh memory in each step would cost page faults.
template <class T>
T* scratch(size_t count) {
  thread_local std::unique_ptr<T[]> memory;
  thread_local size_t held = 0;
  if (count > held) {
    memory.reset();
    held = 0;
    memory.reset(new T[count]);
    held = count;
  }
  return memory.get();
}

template <class A>
auto argument(const char* name) {
  constexpr bool scalar = std::is_arithmetic_v<A> || std::is_same_v<A, Pair>;
  if constexpr (scalar) return nb::arg(name);
  // A converted copy would receive the result in place of the caller's array.
  if constexpr (!scalar) return nb::arg(name).noconvert();
}

template <class R, class... A, size_t... I>
void define(nb::module_& m, const char* name, R (*function)(A...), const char* const (&names)[sizeof...(A)],
            std::index_sequence<I...>) {
  m.def(name, function, argument<A>(names[I])...);
}

template <class R, class... A>
void define(nb::module_& m, const char* name, R (*function)(A...), const char* const (&names)[sizeof...(A)]) {
  define(m, name, function, names, std::index_sequence_for<A...>{});
}

}  // namespace distopt

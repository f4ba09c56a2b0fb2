// One function per binding file; cuda.cpp calls them all. And how CuPy's addresses, streams and types, which Python
// passes as integers, are taken. A part is (address, count).
#pragma once

#include <cuda_runtime.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "base/types.h"

namespace distopt {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_of(Address handle) { return reinterpret_cast<cudaStream_t>(handle); }

// How Python passes an argument of type A. Pointers and streams are integers.
template <class A>
struct Passed {
  using Type = A;
  static A take(A value) { return value; }
};

template <class A>
struct Passed<A*> {
  using Type = Address;
  static A* take(Address value) { return at<A>(value); }
};

template <class A>
using PassedAs = Passed<std::decay_t<A>>;

template <class... A>
void define(nanobind::module_& m, const char* name, void (*function)(A...), const char* doc) {
  m.def(name, [function](typename PassedAs<A>::Type... a) { function(PassedAs<A>::take(a)...); }, doc);
}

// A kernel for two element types; the first argument of the function in Python selects one.
template <class... A, class... B>
void define_typed(nanobind::module_& m, const char* name, void (*single)(A...), void (*twice)(B...),
                  const char* doc = "") {
  const auto call = [=](int dtype, typename PassedAs<A>::Type... a) {
    if (dtype == static_cast<int>(DType::float32)) return single(PassedAs<A>::take(a)...);
    if (dtype == static_cast<int>(DType::float64)) return twice(PassedAs<B>::take(a)...);
    throw std::invalid_argument("kernels compute in float32 and float64, not in type " + std::to_string(dtype));
  };
  m.def(name, call, doc);
}

void bind_cuda_codec(nanobind::module_& m);
void bind_cuda_numerics(nanobind::module_& m);
void bind_cuda_step(nanobind::module_& m);

}  // namespace distopt

// One function per binding file; cuda.cpp calls them all. And how CuPy's addresses, streams and types, which Python
// passes as integers, are taken.
#pragma once

#include <cuda_runtime.h>
#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/types.h"

namespace distopt {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_of(Address handle) { return reinterpret_cast<cudaStream_t>(handle); }

// Calls f with a zero of the element type.
template <class F>
void with_type(int dtype, F f) {
  if (dtype == static_cast<int>(DType::float32)) return f(0.0f);
  if (dtype == static_cast<int>(DType::float64)) return f(0.0);
  throw std::invalid_argument("kernels compute in float32 and float64, not in type " + std::to_string(dtype));
}

template <class F, class... A, class... Extra>
void define_as(void (F::*)(float, A...) const, nanobind::module_& m, const char* name, F f, const Extra&... extra) {
  m.def(
      name, [f](int dtype, A... a) { with_type(dtype, [&](auto zero) { f(zero, a...); }); }, nanobind::arg("dtype"),
      extra...);
}

// A function of Python whose first argument is the type; `f` gets a zero of that type in its place.
template <class F, class... Extra>
void define_typed(nanobind::module_& m, const char* name, F f, const Extra&... extra) {
  define_as(&F::template operator()<float>, m, name, f, extra...);
}

void bind_nccl(nanobind::module_& m);
void bind_cuda_codec(nanobind::module_& m);
void bind_cuda_elementwise(nanobind::module_& m);
void bind_cuda_images(nanobind::module_& m);
void bind_cuda_step(nanobind::module_& m);

}  // namespace distopt

// One function per binding file; bind_cuda.cpp calls them all. And how CuPy's addresses and streams, which Python
// passes as integers, are taken.
#pragma once

#include <cuda_runtime.h>
#include <nanobind/nanobind.h>

#include <cstdint>

namespace distopt {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline cudaStream_t stream_of(Address handle) { return reinterpret_cast<cudaStream_t>(handle); }

void bind_nccl(nanobind::module_& m);
void bind_cuda_codec(nanobind::module_& m);
void bind_cuda_compute(nanobind::module_& m);
void bind_cuda_step(nanobind::module_& m);

}  // namespace distopt

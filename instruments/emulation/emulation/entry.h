// The stand-in for NVRTC adds this to the sources that it compiles: CUDA's language, and entries to their kernels.
#pragma once

#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "device_code.h"
#include "nccl/driver.h"

namespace emulation {

// Runs the body once for every thread of the grid, when the stream gets there. Returns a Status.
int launch(distopt::cuda::Stream* stream, dim3 grid, dim3 block, std::function<void()> body);

struct Launch {
  unsigned grid[3], block[3];
  distopt::cuda::Stream* stream;
  std::size_t count;             // of the arguments
  const void* const* arguments;  // as bytes, each of the size beside it
  const std::size_t* sizes;
};

constexpr int wrong_count = -1, wrong_argument = -2;  // -2 - i: argument i

// Whether the argument has the size of the parameter. A pointer is null or, as an address, a large number.
template <class P>
bool take(const Launch& launch, std::size_t i, P& value) {
  if (launch.sizes[i] != sizeof(P)) return false;
  std::memcpy(static_cast<void*>(&value), launch.arguments[i], sizeof(P));
  if constexpr (std::is_pointer_v<P>) return !value || reinterpret_cast<std::uintptr_t>(value) > 0xffff;
  return true;
}

template <class... P, std::size_t... i>
int enter(void (*kernel)(P...), const Launch& launch, std::index_sequence<i...>) {
  if (launch.count != sizeof...(P)) return wrong_count;
  std::tuple<P...> values;
  int wrong = 0;
  static_cast<void>(
      ((take(launch, i, std::get<i>(values)) || (wrong = wrong_argument - static_cast<int>(i), false)) && ...));
  if (wrong) return wrong;
  const auto& [x, y, z] = launch.grid;
  const auto& [bx, by, bz] = launch.block;
  return emulation::launch(launch.stream, {x, y, z}, {bx, by, bz}, [=] { std::apply(kernel, values); });
}

template <class... P>
int enter(void (*kernel)(P...), const Launch& launch) {
  return enter(kernel, launch, std::index_sequence_for<P...>());
}

}  // namespace emulation

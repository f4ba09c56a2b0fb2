// Starts kernels, with the same source for nvcc and for the emulator of the tests.
#pragma once

#include <cuda_runtime.h>

#include <tuple>
#include <utility>

#include "cuda/check.h"

namespace distopt {

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, Arguments&&... arguments) {
  std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
#ifdef DISTOPT_EMULATED
  DISTOPT_CUDA_CHECK(emulation::launch(kernel, grid, block, stream, std::move(values)));
#else
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {static_cast<void*>(&value)...};
        DISTOPT_CUDA_CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, 0, stream));
      },
      values);
#endif
}

}  // namespace distopt

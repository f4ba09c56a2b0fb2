// How work gets into an emulated stream.
#pragma once

#include <functional>
#include <tuple>
#include <utility>

namespace emulation {

// Something that a stream does. It returns whether it is finished; if not, it is called again.
using Step = std::function<bool()>;

cudaError_t enqueue_step(cudaStream_t stream, Step step);

cudaError_t check_configuration(dim3 grid, dim3 block);
// Runs the body once for every thread of the grid.
void run_grid(dim3 grid, dim3 block, const std::function<void()>& body);

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   std::tuple<Parameters...> arguments) {
  if (const cudaError_t code = check_configuration(grid, block)) return code;
  return enqueue_step(stream, [=] {
    run_grid(grid, block, [&] { std::apply(kernel, arguments); });
    return true;
  });
}

}  // namespace emulation

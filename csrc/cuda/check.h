// Errors of the CUDA runtime as exceptions that name the expression, and of arguments.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace distopt {

inline void check_cuda(cudaError_t code, const char* expression) {
  if (code == cudaSuccess) return;
  throw std::runtime_error(std::string(expression) + ": " + cudaGetErrorString(code) + " (CUDA error " +
                           std::to_string(static_cast<int>(code)) + ")");
}

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace distopt

#define DISTOPT_CUDA_CHECK(expression) ::distopt::check_cuda((expression), #expression)

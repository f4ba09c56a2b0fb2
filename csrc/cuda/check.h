// Errors of the CUDA runtime as exceptions that name the expression.
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

}  // namespace distopt

#define DISTOPT_CUDA_CHECK(expression) ::distopt::check_cuda((expression), #expression)

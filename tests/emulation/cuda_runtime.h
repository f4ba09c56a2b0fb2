// The CUDA runtime on the CPU, as far as csrc/ uses it. For tests.
#pragma once

#define CUDART_VERSION 13000

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

// Errors and devices.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>

#include "runtime.h"

namespace emulation {

thread_local int current_device = 0;
thread_local bool has_context = false;

namespace {

int physical_devices() {
  const char* text = std::getenv("DISTOPT_EMULATED_GPUS");
  return text ? std::atoi(text) : 8;
}

// Physical numbers of the visible devices.
std::vector<int> visible_devices() {
  const int physical = physical_devices();
  std::vector<int> visible;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  std::istringstream listed(text ? text : "");
  for (std::string number; std::getline(listed, number, ',');)
    if (std::stoi(number) < physical) visible.push_back(std::stoi(number));
  for (int i = 0; i < physical && !text; ++i) visible.push_back(i);
  return visible;
}

}  // namespace

cudaError_t require_device(int device) {
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count)) return code;
  return device >= 0 && device < count ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t check_configuration(dim3 grid, dim3 block) {
  if (const cudaError_t code = require_device(current_device)) return code;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  const bool fits = threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x >= 1 && grid.x <= 0x7fffffff &&
                    grid.y >= 1 && grid.y <= 65535 && grid.z >= 1 && grid.z <= 65535;
  return fits ? cudaSuccess : cudaErrorInvalidConfiguration;
}

}  // namespace emulation

using namespace emulation;

const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorNoDevice ? "cudaErrorNoDevice" : "an error of the emulated CUDA";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (physical_devices() < 0) return cudaErrorInsufficientDriver;
  *count = static_cast<int>(visible_devices().size());
  return *count ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t code = require_device(current_device)) return code;
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t code = require_device(device)) return code;
  current_device = device;
  has_context = true;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t code = require_device(current_device)) return code;
  synchronize_device(current_device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (const cudaError_t code = require_device(device)) return code;
  if (length < 13) return cudaErrorInvalidValue;
  const int bus = visible_devices()[static_cast<std::size_t>(device)] + 1;
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02X:00.0", static_cast<unsigned>(bus));
  return cudaSuccess;
}

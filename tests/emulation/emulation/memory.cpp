// Memory and copies.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "runtime.h"

namespace emulation {
namespace {

enum class Place { pageable, pinned, device, beyond };

Place place_of(const void* pointer, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const auto at = reinterpret_cast<std::uintptr_t>(pointer);
  auto found = runtime().allocations.upper_bound(at);
  if (found == runtime().allocations.begin()) return Place::pageable;
  --found;
  if (at >= found->first + std::max<std::size_t>(found->second.bytes, 1)) return Place::pageable;
  if (at + bytes > found->first + found->second.bytes) return Place::beyond;
  return found->second.memory == Memory::device ? Place::device : Place::pinned;
}

cudaError_t allocate(void** pointer, std::size_t bytes, Memory memory) {
  if (const cudaError_t code = require_device(current_device)) return code;
  has_context = true;
  *pointer = nullptr;
  if (!bytes) return cudaSuccess;
  void* const at = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!at) return cudaErrorMemoryAllocation;
  std::memset(at, 0xff, bytes);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().allocations[reinterpret_cast<std::uintptr_t>(at)] = {bytes, memory, current_device};
  *pointer = at;
  return cudaSuccess;
}

}  // namespace
}  // namespace emulation

using namespace emulation;

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) { return allocate(pointer, bytes, Memory::device); }
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  Allocation allocation{};
  {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const auto found = runtime().allocations.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == runtime().allocations.end() || found->second.memory != Memory::device) return cudaErrorInvalidValue;
    allocation = found->second;
  }
  synchronize_device(allocation.device);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().allocations.erase(reinterpret_cast<std::uintptr_t>(pointer));
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) { return allocate(pointer, bytes, Memory::pinned); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int, cudaStream_t stream) {
  if (!bytes) return cudaSuccess;
  const Place target = place_of(to, bytes), source = place_of(from, bytes);
  if (target == Place::beyond || source == Place::beyond) return cudaErrorInvalidValue;
  const auto step = [=] { return std::memmove(to, from, bytes) == to; };
  if (const cudaError_t code = enqueue_node(stream, {cudaGraphNodeTypeMemcpy, to, from, step})) return code;
  const bool pageable = target == Place::pageable || source == Place::pageable;
  return pageable ? synchronize_stream(stream) : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (!bytes) return cudaSuccess;
  if (place_of(to, bytes) != Place::device) return cudaErrorInvalidValue;
  const auto step = [=] { return std::memset(to, value, bytes) == to; };
  return enqueue_node(stream, {cudaGraphNodeTypeMemset, to, nullptr, step});
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Place place = place_of(pointer, 1);
  attributes->type = place == Place::pinned   ? cudaMemoryTypeHost
                     : place == Place::device ? cudaMemoryTypeDevice
                                              : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

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
  const Lock lock(runtime().mutex);
  const auto at = reinterpret_cast<std::uintptr_t>(pointer);
  auto found = runtime().allocations.upper_bound(at);
  if (found == runtime().allocations.begin()) return Place::pageable;
  --found;
  if (at >= found->first + std::max<std::size_t>(found->second.bytes, 1)) return Place::pageable;
  if (at + bytes > found->first + found->second.bytes) return Place::beyond;
  return found->second.pinned ? Place::pinned : Place::device;
}

Status allocate(void** pointer, std::size_t bytes, bool pinned) {
  if (!context) return invalid_context;
  *pointer = nullptr;
  if (!bytes) return Status::success;
  void* const at = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!at) return out_of_memory;
  std::memset(at, 0xff, bytes);
  const Lock lock(runtime().mutex);
  runtime().allocations[reinterpret_cast<std::uintptr_t>(at)] = {bytes, pinned, current_device()};
  *pointer = at;
  return Status::success;
}

}  // namespace
}  // namespace emulation

using namespace emulation;

#define EXPORT extern "C"

EXPORT Status cuMemAlloc_v2(void** pointer, std::size_t bytes) { return allocate(pointer, bytes, false); }
EXPORT Status cuMemAllocHost_v2(void** pointer, std::size_t bytes) { return allocate(pointer, bytes, true); }
// Waits for the device, as the real one does.
EXPORT Status cuMemFree_v2(void* pointer) {
  const auto at = reinterpret_cast<std::uintptr_t>(pointer);
  int device = 0;
  {
    const Lock lock(runtime().mutex);
    const auto found = runtime().allocations.find(at);
    if (found == runtime().allocations.end() || found->second.pinned) return invalid_value;
    device = found->second.device;
  }
  synchronize_device(device);
  const Lock lock(runtime().mutex);
  runtime().allocations.erase(at);
  std::free(pointer);
  return Status::success;
}

// Pageable host memory makes the host wait, as on a real device; pinned memory is read and written when its turn comes.
EXPORT Status cuMemcpyAsync(void* to, const void* from, std::size_t bytes, Stream* stream) {
  if (!bytes) return Status::success;
  const Place target = place_of(to, bytes), source = place_of(from, bytes);
  if (target == Place::beyond || source == Place::beyond) return invalid_value;
  const Status status = enqueue(stream, {[=] { return std::memmove(to, from, bytes) == to; }, to, from});
  const bool pageable = target == Place::pageable || source == Place::pageable;
  return pageable && status == Status::success ? synchronize(stream) : status;
}
EXPORT Status cuMemsetD8Async(void* to, int value, std::size_t bytes, Stream* stream) {
  if (!bytes) return Status::success;
  if (place_of(to, bytes) != Place::device) return invalid_value;
  return enqueue(stream, {[=] { return std::memset(to, value, bytes) == to; }});
}

// The type of memory alone: 1 is the host's, if pinned, 2 the device's.
EXPORT Status cuPointerGetAttribute(int* type, int, const void* pointer) {
  const Place place = place_of(pointer, 1);
  *type = place == Place::pinned ? 1 : place == Place::device ? 2 : 0;
  return Status::success;
}
// CUDA_MEMCPY3D in words: from each base on the type of memory, the address on the host, and that on the device.
EXPORT Status cuGraphMemcpyNodeGetParams(const Node* node, std::size_t* words) {
  const auto put = [&](std::size_t base, const void* pointer) {
    const bool on_host = place_of(pointer, 1) == Place::pinned;
    words[base] = on_host ? 1 : 4;  // host, or unified, which the address tells more of
    words[base + (on_host ? 1 : 2)] = reinterpret_cast<std::size_t>(pointer);
  };
  put(4, node->from);
  put(15, node->to);
  return Status::success;
}

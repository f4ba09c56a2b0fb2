// Devices, memory, streams and events.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "graphs.h"

namespace emulation {
namespace {

using Clock = std::chrono::steady_clock;
struct Queue;

// A point in a queue: after its first `tasks` tasks.
struct Position {
  std::shared_ptr<Queue> queue;
  std::uint64_t tasks = 0;
};

struct Task {
  std::vector<Position> after;
  Step step;
};

struct Queue {
  int device = 0;
  bool blocking = true;  // ordered with the legacy stream
  int priority = 0;
  std::deque<Task> tasks;
  std::uint64_t added = 0, finished = 0;
  bool running = false;  // some thread is in the first task
  std::thread::id runner;
  std::shared_ptr<Recording> recording;  // null: work is run
};

struct Mark {  // what an event was recorded at
  Position position;
  Clock::time_point time;
  // Recorded: in which recording, and after how much work of which queue.
  std::shared_ptr<Recording> recording;
  std::size_t work = 0;
};

struct EventState {
  int device = 0;
  bool timing = true;
  std::shared_ptr<Mark> mark;  // null: never recorded
};

enum class Memory { device, pinned };

struct Allocation {
  std::size_t bytes;
  Memory memory;
  int device;
};

struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uintptr_t, std::shared_ptr<Queue>> streams;
  std::map<std::uintptr_t, EventState> events;
  std::map<int, std::shared_ptr<Queue>> legacy;
  std::map<std::uintptr_t, Allocation> allocations;
  std::uintptr_t next_handle = 0x1000;
};

// Never destroyed: other static objects may hold streams.
Runtime& runtime() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t report(cudaError_t code) {
  if (code != cudaSuccess && code != cudaErrorNotReady) last_error = code;
  return code;
}

// -- devices ----------------------------------------------------------------------------------------------------------
int physical_devices() {
  const char* text = std::getenv("DISTOPT_EMULATED_GPUS");
  return text ? std::atoi(text) : 8;
}

// Physical numbers of the visible devices. As CUDA does it, what follows the first wrong entry does not count.
std::vector<int> visible_devices() {
  const int physical = physical_devices();
  std::vector<int> visible;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int i = 0; i < physical; ++i) visible.push_back(i);
    return visible;
  }
  for (char* end = nullptr;; text = end + 1) {
    const long number = std::strtol(text, &end, 10);
    if (end == text || number < 0 || number >= physical) break;
    visible.push_back(static_cast<int>(number));
    if (*end != ',') break;
  }
  return visible;
}

cudaError_t require_device(int device) {
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count)) return code;
  return device >= 0 && device < count ? cudaSuccess : cudaErrorInvalidDevice;
}

// -- queues -----------------------------------------------------------------------------------------------------------
// Runs what comes before `to`; false where that is not finished and `wait` is not set.
bool advance(const Position& to, bool wait) {
  Runtime& r = runtime();
  std::unique_lock<std::mutex> lock(r.mutex);
  Queue& queue = *to.queue;
  while (queue.finished < to.tasks) {
    if (queue.running) {
      if (queue.runner == std::this_thread::get_id()) {
        std::fprintf(stderr, "emulated CUDA: a task waits for its own stream\n");
        std::abort();
      }
      if (!wait) return false;
      r.changed.wait(lock);
      continue;
    }
    queue.running = true;
    queue.runner = std::this_thread::get_id();
    Task& task = queue.tasks.front();  // stays where it is while others append
    lock.unlock();
    const bool finished = std::all_of(task.after.begin(), task.after.end(),
                                      [&](const Position& position) { return advance(position, wait); }) &&
                          task.step();
    Task done;
    if (finished) std::swap(done, task);
    lock.lock();
    queue.running = false;
    if (finished) {
      queue.tasks.pop_front();
      ++queue.finished;
    }
    r.changed.notify_all();
    if (finished) continue;
    if (!wait) return false;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
  return true;
}

std::shared_ptr<Queue>& legacy_queue(int device) {
  std::shared_ptr<Queue>& queue = runtime().legacy[device];
  if (!queue) {
    queue = std::make_shared<Queue>();
    queue->device = device;
  }
  return queue;
}

// The queue behind a handle, or null. The lock is held.
std::shared_ptr<Queue> find(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return legacy_queue(current_device);
  const auto found = runtime().streams.find(reinterpret_cast<std::uintptr_t>(stream));
  return found == runtime().streams.end() ? nullptr : found->second;
}

Position end_of(const std::shared_ptr<Queue>& queue) { return {queue, queue->added}; }

// The lock is held.
void append(const std::shared_ptr<Queue>& queue, Task task) {
  const auto follow = [&](const std::shared_ptr<Queue>& other) {
    if (other != queue && other->device == queue->device && other->added > other->finished)
      task.after.push_back(end_of(other));
  };
  const std::shared_ptr<Queue>& legacy = legacy_queue(queue->device);
  if (queue == legacy) {
    for (const auto& entry : runtime().streams)
      if (entry.second->blocking) follow(entry.second);
  } else if (queue->blocking) {
    follow(legacy);
  }
  queue->tasks.push_back(std::move(task));
  ++queue->added;
}

// Whether work on the default stream would have to wait for a stream that records. The lock is held.
bool meets_recording(const std::shared_ptr<Queue>& queue) {
  if (queue != legacy_queue(queue->device)) return false;
  bool meets = false;
  for (const auto& entry : runtime().streams) {
    const Queue& other = *entry.second;
    if (!other.recording || !other.blocking || other.device != queue->device) continue;
    other.recording->invalid = true;
    meets = true;
  }
  return meets;
}

// The lock is held.
cudaError_t record(Queue& queue, Node node) {
  Recording& recording = *queue.recording;
  if (recording.invalid) return cudaErrorStreamCaptureInvalidated;
  recording.graph.nodes.push_back(std::move(node));
  if (recording.origin != &queue) ++recording.unjoined[&queue];
  return cudaSuccess;
}

cudaError_t add(cudaStream_t stream, Task task, Node node) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  if (queue->recording) {
    node.step = std::move(task.step);
    return record(*queue, std::move(node));
  }
  if (meets_recording(queue)) return cudaErrorStreamCaptureImplicit;
  append(queue, std::move(task));
  return cudaSuccess;
}

// What a synchronisation with the stream waits for. A legacy stream waits for the blocking ones too.
cudaError_t ends_of(cudaStream_t stream, std::vector<Position>& ends) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  if (queue->recording) {
    queue->recording->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  if (meets_recording(queue)) return cudaErrorStreamCaptureImplicit;
  ends.push_back(end_of(queue));
  if (queue == legacy_queue(queue->device))
    for (const auto& entry : runtime().streams)
      if (entry.second->blocking && entry.second->device == queue->device) ends.push_back(end_of(entry.second));
  return cudaSuccess;
}

cudaError_t synchronize_stream(cudaStream_t stream, bool wait) {
  std::vector<Position> ends;
  if (const cudaError_t code = ends_of(stream, ends)) return code;
  bool finished = true;
  for (const Position& end : ends) finished = advance(end, wait) && finished;
  return finished ? cudaSuccess : cudaErrorNotReady;
}

void synchronize_device(int device) {
  std::vector<Position> ends;
  {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    ends.push_back(end_of(legacy_queue(device)));
    for (const auto& entry : runtime().streams)
      if (entry.second->device == device) ends.push_back(end_of(entry.second));
  }
  for (const Position& end : ends) advance(end, true);
}

cudaError_t find_mark(cudaEvent_t event, std::shared_ptr<Mark>& mark) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const auto found = runtime().events.find(reinterpret_cast<std::uintptr_t>(event));
  if (found == runtime().events.end()) return cudaErrorInvalidResourceHandle;
  mark = found->second.mark;
  return cudaSuccess;
}

// As `find_mark`, for those who look at the event from the host.
cudaError_t find_reached_mark(cudaEvent_t event, std::shared_ptr<Mark>& mark) {
  const cudaError_t code = find_mark(event, mark);
  if (code != cudaSuccess || !mark || !mark->recording) return code;
  mark->recording->invalid = true;
  return cudaErrorCapturedEvent;
}

// -- memory -----------------------------------------------------------------------------------------------------------
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
  if (const cudaError_t code = require_device(current_device)) return report(code);
  *pointer = nullptr;
  if (!bytes) return cudaSuccess;
  if (unsafe_call_forbidden()) return report(cudaErrorStreamCaptureUnsupported);
  void* const at = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (!at) return report(cudaErrorMemoryAllocation);
  std::memset(at, 0xff, bytes);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().allocations[reinterpret_cast<std::uintptr_t>(at)] = {bytes, memory, current_device};
  *pointer = at;
  return cudaSuccess;
}

cudaError_t release(void* pointer, Memory memory) {
  if (!pointer) return cudaSuccess;
  if (unsafe_call_forbidden()) return report(cudaErrorStreamCaptureUnsupported);
  Allocation allocation{};
  {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const auto found = runtime().allocations.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == runtime().allocations.end() || found->second.memory != memory) return report(cudaErrorInvalidValue);
    allocation = found->second;
  }
  synchronize_device(allocation.device);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  runtime().allocations.erase(reinterpret_cast<std::uintptr_t>(pointer));
  std::free(pointer);
  return cudaSuccess;
}

// A stream waits for an event that was recorded in a recording: it becomes part of that, or joins its work to it.
cudaError_t join_recording(cudaStream_t stream, const Mark& mark) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  Recording& recording = *mark.recording;
  if (recording.ended) return cudaErrorCapturedEvent;
  if (recording.invalid) return cudaErrorStreamCaptureInvalidated;
  if (queue->recording && queue->recording != mark.recording) return cudaErrorStreamCaptureIsolation;
  queue->recording = mark.recording;
  if (recording.origin != queue.get()) {
    recording.unjoined.try_emplace(queue.get(), 1);  // even without any work it has to be waited for
    return cudaSuccess;
  }
  const auto other = recording.unjoined.find(mark.position.queue.get());
  if (other != recording.unjoined.end() && other->second <= mark.work) other->second = 0;
  return cudaSuccess;
}

bool fits(Place place, bool device) { return device ? place == Place::device : place != Place::device; }

cudaError_t check_copy(Place to, Place from, cudaMemcpyKind kind) {
  if (to == Place::beyond || from == Place::beyond) return cudaErrorInvalidValue;
  if (kind == cudaMemcpyDefault) return cudaSuccess;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return fits(to, to_device) && fits(from, from_device) ? cudaSuccess : cudaErrorInvalidValue;
}

std::uintptr_t new_handle() { return runtime().next_handle += 0x10; }

}  // namespace

cudaError_t enqueue_step(cudaStream_t stream, Step step) { return report(add(stream, {{}, std::move(step)}, {})); }

namespace {
cudaError_t enqueue_node(cudaStream_t stream, Node node, std::function<void()> task) {
  return report(add(stream,
                    {{},
                     [task = std::move(task)] {
                       task();
                       return true;
                     }},
                    std::move(node)));
}
}  // namespace

cudaError_t enqueue(cudaStream_t stream, std::function<void()> task) {
  return enqueue_node(stream, {}, std::move(task));
}

cudaError_t check_configuration(dim3 grid, dim3 block) {
  if (const cudaError_t code = require_device(current_device)) return report(code);
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  const bool fits = threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x >= 1 && grid.x <= 0x7fffffff &&
                    grid.y >= 1 && grid.y <= 65535 && grid.z >= 1 && grid.z <= 65535;
  return fits ? cudaSuccess : report(cudaErrorInvalidConfiguration);
}

}  // namespace emulation

using namespace emulation;

// -- errors and devices
// -------------------------------------------------------------------------------------------------
const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnmatched:
      return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureUnjoined:
      return "cudaErrorStreamCaptureUnjoined: capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
      return "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend on a capturing blocking "
             "stream";
    case cudaErrorCapturedEvent:
      return "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorStreamCaptureWrongThread:
      return "cudaErrorStreamCaptureWrongThread";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t code) { return cudaGetErrorName(code); }

cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = physical_devices() < 0 ? 0 : CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (physical_devices() < 0) return report(cudaErrorInsufficientDriver);
  *count = static_cast<int>(visible_devices().size());
  return *count ? cudaSuccess : report(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t code = require_device(current_device)) return report(code);
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t code = require_device(device)) return report(code);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t code = require_device(current_device)) return report(code);
  if (unsafe_call_forbidden()) return report(cudaErrorStreamCaptureUnsupported);
  synchronize_device(current_device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const cudaError_t code = require_device(device)) return report(code);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 1;  // so that grid-stride loops go round
      return cudaSuccess;
    case cudaDevAttrPciBusId:
      *value = visible_devices()[static_cast<std::size_t>(device)] + 1;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrPciDeviceId:
    case cudaDevAttrPciDomainId:
    case cudaDevAttrComputeCapabilityMinor:
    case cudaDevAttrMemoryPoolsSupported:
      *value = 0;
      return cudaSuccess;
  }
  return report(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  int bus = 0;
  if (const cudaError_t code = cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, device)) return code;
  if (length < 13) return report(cudaErrorInvalidValue);
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02X:00.0", static_cast<unsigned>(bus));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  if (const cudaError_t code = require_device(current_device)) return report(code);
  *free = std::size_t{8} << 30;
  *total = std::size_t{16} << 30;
  return cudaSuccess;
}

// -- memory
// ---------------------------------------------------------------------------------------------------------------
cudaError_t cudaMalloc(void** pointer, std::size_t bytes) { return allocate(pointer, bytes, Memory::device); }
cudaError_t cudaFree(void* pointer) { return release(pointer, Memory::device); }
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes) { return allocate(pointer, bytes, Memory::pinned); }
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) { return cudaMallocHost(pointer, bytes); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer, Memory::pinned); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (!bytes) return cudaSuccess;
  const Place target = place_of(to, bytes), source = place_of(from, bytes);
  if (const cudaError_t code = check_copy(target, source, kind)) return report(code);
  const Node node{cudaGraphNodeTypeMemcpy, to, from, {}};
  if (const cudaError_t code = enqueue_node(stream, node, [=] { std::memmove(to, from, bytes); })) return code;
  const bool pageable = target == Place::pageable || source == Place::pageable;
  return pageable ? report(synchronize_stream(stream, true)) : cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (unsafe_call_forbidden()) return report(cudaErrorStreamCaptureUnsupported);
  if (const cudaError_t code = cudaMemcpyAsync(to, from, bytes, kind, nullptr)) return code;
  return report(synchronize_stream(nullptr, true));
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (!bytes) return cudaSuccess;
  if (place_of(to, bytes) != Place::device) return report(cudaErrorInvalidValue);
  const Node node{cudaGraphNodeTypeMemset, to, nullptr, {}};
  return enqueue_node(stream, node, [=] { std::memset(to, value, bytes); });
}

cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// -- streams
// --------------------------------------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (const cudaError_t code = require_device(current_device)) return report(code);
  if (flags > cudaStreamNonBlocking) return report(cudaErrorInvalidValue);
  auto queue = std::make_shared<Queue>();
  queue->device = current_device;
  queue->blocking = flags == cudaStreamDefault;
  queue->priority = priority;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::uintptr_t handle = new_handle();
  runtime().streams[handle] = std::move(queue);
  *stream = reinterpret_cast<cudaStream_t>(handle);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  return report(runtime().streams.erase(reinterpret_cast<std::uintptr_t>(stream)) ? cudaSuccess
                                                                                  : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return report(synchronize_stream(stream, true)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return report(synchronize_stream(stream, false)); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::shared_ptr<Mark> mark;
  if (const cudaError_t code = find_mark(event, mark)) return report(code);
  if (!mark) return cudaSuccess;
  if (mark->recording) return report(join_recording(stream, *mark));
  {
    const std::lock_guard<std::mutex> lock(runtime().mutex);
    const std::shared_ptr<Queue> queue = find(stream);
    if (queue && queue->recording) {
      queue->recording->invalid = true;
      return report(cudaErrorStreamCaptureIsolation);
    }
  }
  return report(add(stream, {{mark->position}, [] { return true; }}, {}));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return enqueue_node(stream, {cudaGraphNodeTypeHost, nullptr, nullptr, {}}, [=] { function(argument); });
}

// -- recordings
// -----------------------------------------------------------------------------------------------------------
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Place place = place_of(pointer, 1);
  attributes->type = place == Place::pinned   ? cudaMemoryTypeHost
                     : place == Place::device ? cudaMemoryTypeDevice
                                              : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return report(cudaErrorInvalidResourceHandle);
  if (queue->recording || queue == legacy_queue(queue->device)) return report(cudaErrorStreamCaptureUnsupported);
  auto recording = std::make_shared<Recording>();
  recording->mode = mode;
  recording->thread = std::this_thread::get_id();
  recording->origin = queue.get();
  recording_begun(recording);
  queue->recording = std::move(recording);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return report(cudaErrorInvalidResourceHandle);
  const std::shared_ptr<Recording> recording = queue->recording;
  if (!recording || recording->origin != queue.get()) return report(cudaErrorStreamCaptureUnmatched);
  if (recording->mode != cudaStreamCaptureModeRelaxed && recording->thread != std::this_thread::get_id())
    return report(cudaErrorStreamCaptureWrongThread);
  for (const auto& entry : runtime().streams)
    if (entry.second->recording == recording) entry.second->recording = nullptr;
  recording->ended = true;
  recording_ended(*recording);
  if (recording->invalid) return report(cudaErrorStreamCaptureInvalidated);
  for (const auto& entry : recording->unjoined)
    if (entry.second) return report(cudaErrorStreamCaptureUnjoined);
  *graph = new Graph(std::move(recording->graph));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return report(cudaErrorInvalidResourceHandle);
  *status = !queue->recording           ? cudaStreamCaptureStatusNone
            : queue->recording->invalid ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

// -- events
// ---------------------------------------------------------------------------------------------------------------
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (const cudaError_t code = require_device(current_device)) return report(code);
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::uintptr_t handle = new_handle();
  runtime().events[handle] = {current_device, !(flags & cudaEventDisableTiming), nullptr};
  *event = reinterpret_cast<cudaEvent_t>(handle);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  return report(runtime().events.erase(reinterpret_cast<std::uintptr_t>(event)) ? cudaSuccess
                                                                                : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const auto found = runtime().events.find(reinterpret_cast<std::uintptr_t>(event));
  const std::shared_ptr<Queue> queue = find(stream);
  if (found == runtime().events.end() || !queue || queue->device != found->second.device)
    return report(cudaErrorInvalidResourceHandle);
  auto mark = std::make_shared<Mark>();
  if (queue->recording) {
    if (queue->recording->invalid) return report(cudaErrorStreamCaptureInvalidated);
    mark->position = end_of(queue);
    mark->recording = queue->recording;
    const auto work = queue->recording->unjoined.find(queue.get());
    mark->work = work == queue->recording->unjoined.end() ? 0 : work->second;
    found->second.mark = std::move(mark);
    return cudaSuccess;
  }
  if (meets_recording(queue)) return report(cudaErrorStreamCaptureImplicit);
  append(queue, {{}, [mark] {
                   mark->time = Clock::now();
                   return true;
                 }});
  mark->position = end_of(queue);
  found->second.mark = std::move(mark);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::shared_ptr<Mark> mark;
  if (const cudaError_t code = find_reached_mark(event, mark)) return report(code);
  if (mark) advance(mark->position, true);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (unsafe_call_forbidden()) return report(cudaErrorStreamCaptureUnsupported);
  std::shared_ptr<Mark> mark;
  if (const cudaError_t code = find_reached_mark(event, mark)) return report(code);
  return !mark || advance(mark->position, false) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  std::shared_ptr<Mark> from, to;
  if (const cudaError_t code = find_mark(start, from)) return report(code);
  if (const cudaError_t code = find_mark(stop, to)) return report(code);
  if (!from || !to) return report(cudaErrorInvalidResourceHandle);
  if (!advance(from->position, false) || !advance(to->position, false)) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
  return cudaSuccess;
}

extern "C" int emulation_launch(void* stream, void (*run)(const void*), const void* arguments, std::size_t bytes) {
  const auto* first = static_cast<const char*>(arguments);
  const std::vector<char> copy(first, first + bytes);
  return enqueue(static_cast<cudaStream_t>(stream), [=] { run(copy.data()); });
}

extern "C" int emulation_enqueue(void* stream, int (*step)(void*), void* argument) {
  cudaStreamCaptureStatus status{};
  if (const cudaError_t code = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status)) return code;
  // A step of the fake NCCL has an end, so it could be run only once.
  if (status != cudaStreamCaptureStatusNone) return report(cudaErrorStreamCaptureUnsupported);
  return enqueue_step(static_cast<cudaStream_t>(stream), [=] { return step(argument) != 0; });
}

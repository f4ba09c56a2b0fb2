// Streams and events.
#include "runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace emulation {

// Never destroyed: other static objects may hold streams.
Runtime& runtime() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

namespace {

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

// Whether the queue records, which is invalid from here on.
bool disturbs(Queue& queue) {
  if (queue.recording) queue.recording->invalid = true;
  return queue.recording != nullptr;
}

// The ends that synchronising the stream waits for. A legacy stream waits for the blocking ones too.
cudaError_t ends_of(cudaStream_t stream, std::vector<Position>& ends) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  if (disturbs(*queue)) return cudaErrorStreamCaptureUnsupported;
  ends.push_back(end_of(queue));
  if (queue == legacy_queue(queue->device))
    for (const auto& entry : runtime().streams)
      if (entry.second->blocking && entry.second->device == queue->device) ends.push_back(end_of(entry.second));
  return cudaSuccess;
}

cudaError_t find_event(cudaEvent_t event, Position& position) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const auto found = runtime().events.find(reinterpret_cast<std::uintptr_t>(event));
  if (found == runtime().events.end()) return cudaErrorInvalidResourceHandle;
  position = found->second.position;
  return cudaSuccess;
}

}  // namespace

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
  if (stream == nullptr) return legacy_queue(current_device);
  const auto found = runtime().streams.find(reinterpret_cast<std::uintptr_t>(stream));
  return found == runtime().streams.end() ? nullptr : found->second;
}

Position end_of(const std::shared_ptr<Queue>& queue) { return {queue, queue->added}; }

cudaError_t synchronize_stream(cudaStream_t stream) {
  std::vector<Position> ends;
  if (const cudaError_t code = ends_of(stream, ends)) return code;
  for (const Position& end : ends) advance(end, true);
  return cudaSuccess;
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

namespace {
std::uintptr_t new_handle() { return runtime().next_handle += 0x10; }
}  // namespace

cudaError_t enqueue_node(cudaStream_t stream, Node node) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  if (queue->recording)
    queue->recording->graph.nodes.push_back(std::move(node));
  else
    append(queue, {{}, std::move(node.step)});
  return cudaSuccess;
}

cudaError_t enqueue_step(cudaStream_t stream, Step step) {
  Node node;
  node.step = std::move(step);
  return enqueue_node(stream, std::move(node));
}

}  // namespace emulation

using namespace emulation;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  if (const cudaError_t code = require_device(current_device)) return code;
  if (flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
  auto queue = std::make_shared<Queue>();
  queue->device = current_device;
  queue->blocking = flags != cudaStreamNonBlocking;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::uintptr_t handle = new_handle();
  runtime().streams[handle] = std::move(queue);
  *stream = reinterpret_cast<cudaStream_t>(handle);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  return runtime().streams.erase(reinterpret_cast<std::uintptr_t>(stream)) ? cudaSuccess
                                                                           : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return synchronize_stream(stream); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Position position;
  if (const cudaError_t code = find_event(event, position)) return code;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  if (disturbs(*queue)) return cudaErrorStreamCaptureUnsupported;
  if (position.queue) append(queue, {{position}, [] { return true; }});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const cudaError_t code = require_device(current_device)) return code;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::uintptr_t handle = new_handle();
  runtime().events[handle] = {current_device, {}};
  *event = reinterpret_cast<cudaEvent_t>(handle);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  return runtime().events.erase(reinterpret_cast<std::uintptr_t>(event)) ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const auto found = runtime().events.find(reinterpret_cast<std::uintptr_t>(event));
  const std::shared_ptr<Queue> queue = find(stream);
  if (found == runtime().events.end() || !queue || queue->device != found->second.device)
    return cudaErrorInvalidResourceHandle;
  if (disturbs(*queue)) return cudaErrorStreamCaptureUnsupported;
  append(queue, {{}, [] { return true; }});
  found->second.position = end_of(queue);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Position position;
  if (const cudaError_t code = find_event(event, position)) return code;
  if (position.queue) advance(position, true);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Position position;
  if (const cudaError_t code = find_event(event, position)) return code;
  return !position.queue || advance(position, false) ? cudaSuccess : cudaErrorNotReady;
}

extern "C" int emulation_launch(void* stream, void (*run)(const void*), const void* arguments, std::size_t bytes) {
  const auto* first = static_cast<const char*>(arguments);
  const std::vector<char> copy(first, first + bytes);
  return enqueue_step(static_cast<cudaStream_t>(stream), [=] {
    run(copy.data());
    return true;
  });
}

extern "C" int emulation_enqueue(void* stream, int (*step)(void*), void* argument) {
  int recording = 0;
  if (const cudaError_t code = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &recording)) return code;
  // A step of the fake NCCL has an end, so it could be run only once.
  if (recording) return cudaErrorStreamCaptureUnsupported;
  return enqueue_step(static_cast<cudaStream_t>(stream), [=] { return step(argument) != 0; });
}

// The work of streams.
#include "runtime.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace emulation {

// Never destroyed: other static objects may hold streams.
Runtime& runtime() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

std::shared_ptr<Queue> find(Stream* stream) {
  if (stream != nullptr) {
    const auto found = runtime().streams.find(stream);
    return found == runtime().streams.end() ? nullptr : found->second;
  }
  if (!context) return nullptr;
  std::shared_ptr<Queue>& queue = runtime().streams[reinterpret_cast<Stream*>(context - 1)];
  if (!queue) {
    queue = std::make_shared<Queue>();
    queue->device = current_device();
  }
  return queue;
}

Position end_of(const std::shared_ptr<Queue>& queue) { return {queue, queue->added}; }

void append(const std::shared_ptr<Queue>& queue, Task task) {
  queue->tasks.push_back(std::move(task));
  ++queue->added;
}

bool disturbs(Queue& queue) {
  queue.invalid = true;
  return queue.recording != nullptr;
}

bool advance(const Position& to, bool wait) {
  if (!to.queue) return true;
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
    const bool finished = advance(task.after, wait) && task.step();
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

Status enqueue(Stream* stream, Node node) {
  const Lock lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return invalid_handle;
  if (queue->recording)
    queue->recording->push_back(std::move(node));
  else
    append(queue, {std::move(node.step), {}});
  return Status::success;
}

Status synchronize(Stream* stream) {
  Position end;
  {
    const Lock lock(runtime().mutex);
    const std::shared_ptr<Queue> queue = find(stream);
    if (!queue) return invalid_handle;
    if (disturbs(*queue)) return capture_unsupported;
    end = end_of(queue);
  }
  advance(end, true);
  return Status::success;
}

void synchronize_device(int device) {
  std::vector<Position> ends;
  {
    const Lock lock(runtime().mutex);
    for (const auto& entry : runtime().streams)
      if (entry.second->device == device) ends.push_back(end_of(entry.second));
  }
  for (const Position& end : ends) advance(end, true);
}

}  // namespace emulation

using namespace emulation;

// For the fake NCCL, which looks it up by its name. `step` is called, possibly often, until it returns other than 0: 0
// says that it has to wait, for another rank say. It must not block, or queries of the stream would.
extern "C" int emulation_enqueue(Stream* stream, int (*step)(void*), void* argument) {
  CaptureStatus recording{};
  const Status status = cuStreamIsCapturing(stream, &recording);
  if (status != Status::success) return static_cast<int>(status);
  // A step of the fake NCCL has an end, so it could be run only once.
  if (recording != CaptureStatus::none) return static_cast<int>(capture_unsupported);
  return static_cast<int>(enqueue(stream, {[=] { return step(argument) != 0; }}));
}

// For the fake cuBLAS, and for functions of Python: `run` gets a copy of the arguments, as often as a graph with it is
// launched.
extern "C" Status emulation_launch(Stream* stream, void (*run)(const void*), const char* arguments, std::size_t bytes) {
  make_context();
  const std::vector<char> copy(arguments, arguments + bytes);
  return enqueue(stream, {[=] {
                   run(copy.data());
                   return true;
                 }});
}

// Shared by the parts of the emulated runtime: devices.cpp, memory.cpp, runtime.cpp (streams and events), graphs.cpp.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace emulation {

// -- graphs -----------------------------------------------------------------------------------------------------------
struct Node {
  cudaGraphNodeType type = cudaGraphNodeTypeKernel;
  void* to = nullptr;  // of copies
  const void* from = nullptr;
  Step step;
};

struct Graph {
  std::vector<Node> nodes;
};

// The work of a stream, in order. It becomes a graph.
struct Recording {
  Graph graph;
  bool invalid = false;
};

// -- streams and events -----------------------------------------------------------------------------------------------
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
  std::deque<Task> tasks;
  std::uint64_t added = 0, finished = 0;
  bool running = false;  // some thread is in the first task
  std::thread::id runner;
  std::unique_ptr<Recording> recording;  // null: work is run
};

struct EventState {
  int device = 0;
  Position position;  // without a queue: never recorded
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

Runtime& runtime();

// Of this thread.
extern thread_local int current_device;
extern thread_local bool has_context;  // the runtime makes one when it needs it

cudaError_t require_device(int device);
void synchronize_device(int device);

// The queue behind a handle, or null. The lock is held.
std::shared_ptr<Queue> find(cudaStream_t stream);
std::shared_ptr<Queue>& legacy_queue(int device);
Position end_of(const std::shared_ptr<Queue>& queue);
cudaError_t enqueue_node(cudaStream_t stream, Node node);
cudaError_t synchronize_stream(cudaStream_t stream);

}  // namespace emulation

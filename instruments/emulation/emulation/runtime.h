// CUDA's driver on the CPU, as far as distopt needs it: the same kernels run, and can fail, without a GPU.
//
// Streams are lazy queues, run adversarially: a task runs only when something synchronises with its stream or with an
// event recorded behind it, or when a stream that waits for such an event gets that far. A missing event therefore
// gives a wrong result instead of a race that is lost once a year. Queries make progress, so that polling loops end.
// New device memory is filled with NaN. Any thread may drive any stream; one task of a stream runs at a time.
//
// Functions have the names of the driver, and the parameters that csrc/nccl declares. Devices differ by their numbers
// alone: all have the memory of the host.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "nccl/driver.h"

using distopt::cuda::CaptureMode;
using distopt::cuda::CaptureStatus;
using distopt::cuda::Context;
using distopt::cuda::Event;
using distopt::cuda::Status;
using distopt::cuda::Stream;

#define EMULATION_DECLARE(field, symbol, ...) extern "C" Status symbol(__VA_ARGS__);
DISTOPT_CUDA_DRIVER(EMULATION_DECLARE)

namespace emulation {

constexpr Status invalid_value{1}, out_of_memory{2}, invalid_context{201}, invalid_handle{400},
    capture_unsupported{900}, capture_invalidated{901};

// -- streams ----------------------------------------------------------------------------------------------------------
// Something that a stream does. It returns whether it is finished; if not, it is called again.
using Step = std::function<bool()>;

// A step in a graph, with the addresses of a copy.
struct Node {
  Step step;
  void* to = nullptr;
  const void* from = nullptr;
};
using Graph = std::vector<Node>;

struct Queue;

// A point in a queue: after its first `tasks` tasks. Without a queue, there is nothing to wait for.
struct Position {
  std::shared_ptr<Queue> queue;
  std::uint64_t tasks = 0;
};

struct Task {
  Step step;
  Position after;
};

struct Queue {
  int device = 0;
  std::deque<Task> tasks;
  std::uint64_t added = 0, finished = 0;
  bool running = false;  // some thread is in the first task
  std::thread::id runner;
  std::unique_ptr<Graph> recording;  // null: work is run
  bool invalid = false;              // the recording: a recorded stream takes work alone
};

struct RecordedEvent {
  int device = 0;
  Position position;
};

// Bytes of device memory, or of pinned memory of the host.
struct Allocation {
  std::size_t bytes;
  bool pinned;
  int device;
};

struct Runtime {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Stream*, std::shared_ptr<Queue>> streams;  // the default streams by the numbers of their devices
  std::map<Event*, RecordedEvent> events;
  std::map<std::uintptr_t, Allocation> allocations;
  std::uintptr_t next_handle = 0x1000;  // handles are numbers in disguise: a stale one is an error, not a crash
};

using Lock = std::lock_guard<std::mutex>;

Runtime& runtime();

// The context of this thread: 1 + the number of its device, or 0. The driver makes none.
extern thread_local std::intptr_t context;
// As CUDA's runtime makes one where a thread has none; CuPy and cuBLAS call it.
inline void make_context() { context = context ? context : 1; }
inline int current_device() { return context ? static_cast<int>(context) - 1 : 0; }

// The lock is held. The queue behind a handle, or null; the default stream is that of the current context.
std::shared_ptr<Queue> find(Stream* stream);
Position end_of(const std::shared_ptr<Queue>& queue);
void append(const std::shared_ptr<Queue>& queue, Task task);
// Whether the queue records, which is invalid from here on.
bool disturbs(Queue& queue);

// The lock is not held. Runs what comes before `to`; false where that is not finished and `wait` is not set.
bool advance(const Position& to, bool wait);
Status enqueue(Stream* stream, Node node);
Status synchronize(Stream* stream);
void synchronize_device(int device);

}  // namespace emulation

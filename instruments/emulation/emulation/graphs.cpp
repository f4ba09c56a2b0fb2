// Recordings of streams, and the graphs that they become.
#include <memory>
#include <utility>

#include "runtime.h"

using namespace emulation;

#define EXPORT extern "C"

EXPORT Status cuStreamBeginCapture_v2(Stream* stream, int) {
  const Lock lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return invalid_handle;
  if (queue->recording || stream == nullptr) return capture_unsupported;
  queue->recording = std::make_unique<Graph>();
  queue->invalid = false;
  return Status::success;
}

EXPORT Status cuStreamEndCapture(Stream* stream, Graph** graph) {
  *graph = nullptr;
  const Lock lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return invalid_handle;
  std::unique_ptr<Graph> recording = std::move(queue->recording);
  if (!recording || queue->invalid) return capture_invalidated;
  *graph = recording.release();
  return Status::success;
}

EXPORT Status cuStreamIsCapturing(Stream* stream, CaptureStatus* status) {
  const Lock lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return invalid_handle;
  *status = static_cast<CaptureStatus>(queue->recording != nullptr);
  return Status::success;
}
EXPORT Status cuThreadExchangeStreamCaptureMode(CaptureMode*) { return Status::success; }

EXPORT Status cuGraphInstantiate(Graph** executable, const Graph* graph) {
  *executable = new Graph(*graph);
  return Status::success;
}
EXPORT Status cuGraphLaunch(const Graph* executable, Stream* stream) {
  for (const Node& node : *executable)
    if (const Status status = enqueue(stream, node); status != Status::success) return status;
  return Status::success;
}
// An executable one, too.
EXPORT Status cuGraphDestroy(Graph* graph) {
  delete graph;
  return Status::success;
}

// The nodes of a graph are asked for twice: how many there are, then which.
EXPORT Status cuGraphGetNodes(const Graph* graph, const Node** nodes, std::size_t* count) {
  *count = graph->size();
  for (std::size_t i = 0; nodes && i < *count; ++i) nodes[i] = &(*graph)[i];
  return Status::success;
}
EXPORT Status cuGraphNodeGetType(const Node* node, int* type) {
  *type = node->from ? 1 : 0;  // a copy, or a kernel
  return Status::success;
}

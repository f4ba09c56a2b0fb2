// Recordings of streams, and the graphs that they become.
#include <memory>
#include <utility>

#include "runtime.h"

using namespace emulation;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  if (queue->recording || queue == legacy_queue(queue->device)) return cudaErrorStreamCaptureUnsupported;
  queue->recording = std::make_unique<Recording>();
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  const std::unique_ptr<Recording> recording = std::move(queue->recording);
  if (!recording || recording->invalid) return cudaErrorStreamCaptureInvalidated;
  *graph = new Graph(std::move(recording->graph));
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int* status) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  *status = queue->recording ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new Graph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  for (const Node& node : executable->nodes)
    if (const cudaError_t code = enqueue_node(stream, node)) return code;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

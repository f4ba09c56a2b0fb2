// Recordings of streams, and the graphs that they become.
#include <algorithm>
#include <memory>
#include <utility>

#include "runtime.h"

namespace emulation {
namespace {

std::vector<std::shared_ptr<Recording>> recordings;  // under the lock
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

}  // namespace

bool unsafe_call_forbidden() {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  bool forbidden = false;
  for (const std::shared_ptr<Recording>& recording : recordings) {
    const bool own = recording->thread == std::this_thread::get_id();
    if (std::max(recording->mode, mode_of_thread) >
        (own ? cudaStreamCaptureModeThreadLocal : cudaStreamCaptureModeGlobal))
      continue;
    recording->invalid = true;
    forbidden = true;
  }
  return forbidden;
}

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

cudaError_t record(Queue& queue, Node node) {
  Recording& recording = *queue.recording;
  if (recording.invalid) return cudaErrorStreamCaptureInvalidated;
  recording.graph.nodes.push_back(std::move(node));
  return cudaSuccess;
}

}  // namespace emulation

using namespace emulation;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  if (queue->recording || queue == legacy_queue(queue->device)) return cudaErrorStreamCaptureUnsupported;
  auto recording = std::make_shared<Recording>();
  recording->mode = mode;
  recording->thread = std::this_thread::get_id();
  recordings.push_back(recording);
  queue->recording = std::move(recording);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  const std::shared_ptr<Recording> recording = queue->recording;
  if (!recording) return cudaErrorStreamCaptureUnmatched;
  if (recording->mode != cudaStreamCaptureModeRelaxed && recording->thread != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  queue->recording = nullptr;
  recordings.erase(std::remove(recordings.begin(), recordings.end(), recording), recordings.end());
  if (recording->invalid) return cudaErrorStreamCaptureInvalidated;
  *graph = new Graph(std::move(recording->graph));
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard<std::mutex> lock(runtime().mutex);
  const std::shared_ptr<Queue> queue = find(stream);
  if (!queue) return cudaErrorInvalidResourceHandle;
  *status = !queue->recording           ? cudaStreamCaptureStatusNone
            : queue->recording->invalid ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new Graph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  for (const Node& node : executable->nodes)
    if (const cudaError_t code = enqueue_step(stream, node.step)) return code;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

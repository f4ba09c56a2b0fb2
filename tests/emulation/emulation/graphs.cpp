// Graphs, and what recordings forbid. How streams record is in runtime.cpp.
#include "graphs.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace emulation {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local std::vector<std::shared_ptr<Recording>> own;

}  // namespace

bool unsafe_call_forbidden() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
  bool forbidden = false;
  for (const std::shared_ptr<Recording>& recording : own) {
    if (recording->mode == cudaStreamCaptureModeRelaxed) continue;
    recording->invalid = true;
    forbidden = true;
  }
  return forbidden;
}

void recording_begun(const std::shared_ptr<Recording>& recording) { own.push_back(recording); }

void recording_ended(const Recording& recording) {
  own.erase(std::remove_if(own.begin(), own.end(), [&](const auto& each) { return each.get() == &recording; }),
            own.end());
}

}  // namespace emulation

using namespace emulation;

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  if (!nodes) {
    *count = graph->nodes.size();
    return cudaSuccess;
  }
  *count = std::min(*count, graph->nodes.size());
  for (std::size_t i = 0; i < *count; ++i) nodes[i] = &graph->nodes[i];
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = node->type;
  return cudaSuccess;
}

cudaError_t cudaGraphMemcpyNodeGetParams(cudaGraphNode_t node, cudaMemcpy3DParms* parameters) {
  if (node->type != cudaGraphNodeTypeMemcpy) return cudaErrorInvalidValue;
  *parameters = {{const_cast<void*>(node->from)}, {node->to}};
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

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const std::unique_ptr<Graph> owner(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaGraphExecDestroy(graph); }

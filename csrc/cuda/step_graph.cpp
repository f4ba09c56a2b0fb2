#include "cuda/step_graph.h"

#include <stdexcept>
#include <type_traits>
#include <vector>

#include "cuda/check.h"

namespace distopt {
namespace {

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { static_cast<void>(cudaGraphDestroy(graph)); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;

bool on_host(const void* pointer) {
  cudaPointerAttributes attributes{};
  DISTOPT_CUDA_CHECK(cudaPointerGetAttributes(&attributes, pointer));
  return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeUnregistered;
}

void refuse_host(cudaGraphNode_t node) {
  cudaGraphNodeType type{};
  DISTOPT_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
  if (type == cudaGraphNodeTypeHost) throw std::runtime_error("the step calls a function of the host");
  if (type != cudaGraphNodeTypeMemcpy) return;
  cudaMemcpy3DParms copy{};
  DISTOPT_CUDA_CHECK(cudaGraphMemcpyNodeGetParams(node, &copy));
  if (on_host(copy.srcPtr.ptr)) throw std::runtime_error("the step copies from the host, where values may change");
  if (on_host(copy.dstPtr.ptr)) throw std::runtime_error("the step copies to the host");
}

}  // namespace

GraphPiece::GraphPiece(cudaGraph_t graph) {
  DISTOPT_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes_));
  if (!nodes_) return;
  std::vector<cudaGraphNode_t> nodes(nodes_);
  DISTOPT_CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &nodes_));
  for (cudaGraphNode_t node : nodes) refuse_host(node);
  DISTOPT_CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
}

GraphPiece::~GraphPiece() {
  if (executable_) static_cast<void>(cudaGraphExecDestroy(executable_));
}

void GraphPiece::launch(cudaStream_t stream) const {
  if (executable_) DISTOPT_CUDA_CHECK(cudaGraphLaunch(executable_, stream));
}

void begin_capture(cudaStream_t stream) {
  DISTOPT_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

std::unique_ptr<GraphPiece> end_capture(cudaStream_t stream) {
  cudaGraph_t recorded = nullptr;
  const cudaError_t code = cudaStreamEndCapture(stream, &recorded);
  const Graph graph(recorded);
  DISTOPT_CUDA_CHECK(code);
  return std::make_unique<GraphPiece>(graph.get());
}

void abort_capture(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus status{};
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone) {
    cudaGraph_t recorded = nullptr;
    static_cast<void>(cudaStreamEndCapture(stream, &recorded));
    if (recorded) static_cast<void>(cudaGraphDestroy(recorded));
  }
  static_cast<void>(cudaGetLastError());  // the next check of a kernel's launch would find the error of the recording
}

Relaxed::Relaxed() { DISTOPT_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&before_)); }
Relaxed::~Relaxed() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&before_)); }

}  // namespace distopt

// The functions of the driver that csrc/nccl and distopt/nn/replay/capture.py call, over the emulated runtime.
#include "nccl/driver.h"

#include "runtime.h"

using distopt::cuda::CaptureMode;
using distopt::cuda::CaptureStatus;
using distopt::cuda::Context;
using distopt::cuda::Event;
using distopt::cuda::Status;
using distopt::cuda::Stream;

#define EXPORT extern "C"
// The functions that csrc/nccl looks up, with its own parameters.
#define DECLARE(field, symbol, ...) EXPORT Status symbol(__VA_ARGS__);
DISTOPT_CUDA_DRIVER(DECLARE)

namespace {

constexpr Status invalid_context{201};

Status status_of(cudaError_t code) { return static_cast<Status>(code); }
cudaStream_t stream_of(Stream* stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(Event* event) { return reinterpret_cast<cudaEvent_t>(event); }

// Unlike the runtime, the driver makes no context; a null stream is one of the current context.
template <class Call>
Status in_context(Call call) {
  return emulation::has_context ? status_of(call()) : invalid_context;
}
template <class Call>
Status on_stream(Stream* stream, Call call) {
  return stream != nullptr || emulation::has_context ? status_of(call()) : invalid_context;
}

}  // namespace

EXPORT Status cuGetErrorName(Status status, const char** text) {
  *text = status == invalid_context ? "CUDA_ERROR_INVALID_CONTEXT" : "an error of the emulated driver";
  return Status::success;
}
EXPORT Status cuDriverGetVersion(int* version) {
  *version = 13000;
  return Status::success;
}

// The address of a context is the number of its device and 1.
EXPORT Status cuCtxGetCurrent(Context** context) {
  *context =
      emulation::has_context ? reinterpret_cast<Context*>(std::intptr_t{emulation::current_device} + 1) : nullptr;
  return Status::success;
}
EXPORT Status cuCtxSetCurrent(Context* context) {
  if (context == nullptr) {
    emulation::has_context = false;
    return Status::success;
  }
  return status_of(cudaSetDevice(static_cast<int>(reinterpret_cast<std::intptr_t>(context) - 1)));
}
EXPORT Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return in_context([] { return cudaSuccess; });
}

EXPORT Status cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
  return in_context(
      [=] { return cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream), flags, priority); });
}
EXPORT Status cuStreamDestroy_v2(Stream* stream) { return status_of(cudaStreamDestroy(stream_of(stream))); }
EXPORT Status cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
  return on_stream(stream, [=] { return cudaStreamWaitEvent(stream_of(stream), event_of(event), flags); });
}
EXPORT Status cuStreamIsCapturing(Stream* stream, CaptureStatus* status) {
  int found = 0;
  const Status told = on_stream(stream, [&] { return cudaStreamIsCapturing(stream_of(stream), &found); });
  *status = static_cast<CaptureStatus>(found);
  return told;
}

EXPORT Status cuThreadExchangeStreamCaptureMode(CaptureMode*) { return Status::success; }

EXPORT Status cuEventCreate(Event** event, unsigned flags) {
  return in_context([=] { return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), flags); });
}
EXPORT Status cuEventDestroy_v2(Event* event) { return status_of(cudaEventDestroy(event_of(event))); }
EXPORT Status cuEventRecord(Event* event, Stream* stream) {
  return on_stream(stream, [=] { return cudaEventRecord(event_of(event), stream_of(stream)); });
}
EXPORT Status cuEventQuery(Event* event) { return status_of(cudaEventQuery(event_of(event))); }

// The nodes of a graph are asked for twice: how many there are, then which.
EXPORT Status cuGraphGetNodes(cudaGraph_t graph, const emulation::Node** nodes, std::size_t* count) {
  *count = graph->nodes.size();
  for (std::size_t i = 0; nodes && i < *count; ++i) nodes[i] = &graph->nodes[i];
  return Status::success;
}
EXPORT Status cuGraphNodeGetType(const emulation::Node* node, cudaGraphNodeType* type) {
  *type = node->type;
  return Status::success;
}
// CUDA_MEMCPY3D in words: from each base on the type of memory, the address on the host, and that on the device.
EXPORT Status cuGraphMemcpyNodeGetParams(const emulation::Node* node, std::size_t* words) {
  const auto put = [&](std::size_t base, const void* pointer) {
    cudaPointerAttributes attributes{};
    static_cast<void>(cudaPointerGetAttributes(&attributes, pointer));
    const bool on_host = attributes.type == cudaMemoryTypeHost;
    words[base] = on_host ? 1 : 4;  // host, or unified, which the address tells more of
    words[base + (on_host ? 1 : 2)] = reinterpret_cast<std::size_t>(pointer);
  };
  put(4, node->from);
  put(15, node->to);
  return Status::success;
}

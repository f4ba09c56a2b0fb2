// The CUDA runtime on the CPU, as far as distopt needs it: the same kernels run, and can fail, without a GPU.
//
// Streams are lazy queues, run adversarially: a task runs only when something synchronises with its stream or with an
// event recorded behind it, or when a stream that waits for such an event gets that far. A missing event therefore
// gives a wrong result instead of a race that is lost once a year. Queries make progress, so that polling loops end.
// New device memory is filled with NaN. Any thread may drive any stream; one task of a stream runs at a time.
//
// There are $DISTOPT_EMULATED_GPUS devices (default 8; 0: none; -1: no driver); CUDA_VISIBLE_DEVICES restricts them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulation/device_code.h"

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
};

namespace emulation {
struct Stream;
struct Event;
}  // namespace emulation

// Handles are numbers in disguise: a stale one is an error, not a crash.
using cudaStream_t = emulation::Stream*;
using cudaEvent_t = emulation::Event*;

constexpr unsigned cudaStreamNonBlocking = 1;

extern "C" {  // for ctypes

const char* cudaGetErrorString(cudaError_t code);

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device);

cudaError_t cudaMalloc(void** pointer, std::size_t bytes);
cudaError_t cudaFree(void* pointer);  // waits for the device, as the real one does
cudaError_t cudaMallocHost(void** pointer, std::size_t bytes);
// Pageable host memory makes the host wait, as on a real device; pinned memory is read and written when its turn comes.
// The kind is cudaMemcpyDefault, 4.
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, cudaStream_t stream = 0);
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream = 0);

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);  // what is in it still runs when something depends on it
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);

}  // extern "C"

// -- graphs: a recorded stream takes work alone; all else that is asked of it makes the recording invalid
enum cudaGraphNodeType : int {
  cudaGraphNodeTypeKernel = 0,
  cudaGraphNodeTypeMemcpy = 1,
  cudaGraphNodeTypeMemset = 2,
};
enum cudaMemoryType : int {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
};
struct cudaPointerAttributes {
  cudaMemoryType type;
};

namespace emulation {
struct Graph;
}  // namespace emulation
using cudaGraph_t = emulation::Graph*;
using cudaGraphExec_t = emulation::Graph*;

extern "C" {
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int* status);  // 1: it does
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);  // an executable one, too
}  // extern "C"

#include "emulation/launch.h"

// For the fake NCCL, a library of its own: dlsym(RTLD_DEFAULT, "emulation_enqueue") finds it. `step` is called,
// possibly often, until it returns other than 0: 0 says that it has to wait, for another rank say. It must not block,
// or queries of the stream would. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int emulation_enqueue(void* stream, int (*step)(void*),
                                                                        void* argument);
// For the fake cuBLAS: `run` gets a copy of the arguments, as often as a graph with it is launched. Returns a
// cudaError_t.
extern "C" __attribute__((visibility("default"))) int emulation_launch(void* stream, void (*run)(const void*),
                                                                       const void* arguments, std::size_t bytes);

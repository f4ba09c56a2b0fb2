// Compares the declarations of nccl/driver.h with those of cuda.h.
#include "nccl/driver.h"

#include <cuda.h>

#include <cstddef>
#include <string_view>
#include <utility>

#include "alike.h"

namespace distopt::cuda {
namespace {

// cuda.h replaces names of functions by those of later versions, whose parameters may be others.
#define TEXT(symbol) #symbol
#define LINKED(symbol) std::string_view(TEXT(symbol))
static_assert(LINKED(cuStreamDestroy) == "cuStreamDestroy_v2");
static_assert(LINKED(cuEventDestroy) == "cuEventDestroy_v2");
#define COMPARE(field, symbol, ...)                                                                     \
  static_assert(LINKED(symbol) == #symbol, #symbol " is called otherwise");                             \
  static_assert(CalledAlike<decltype(std::declval<Driver>().field.status), decltype(&::symbol)>::value, \
                #symbol " is declared otherwise");
DISTOPT_CUDA_DRIVER(COMPARE)

EQUAL(Status::success, CUDA_SUCCESS);
EQUAL(Status::not_ready, CUDA_ERROR_NOT_READY);
EQUAL(CaptureStatus::none, CU_STREAM_CAPTURE_STATUS_NONE);
EQUAL(stream_non_blocking, CU_STREAM_NON_BLOCKING);
EQUAL(event_disable_timing, CU_EVENT_DISABLE_TIMING);

// What distopt/nn/replay/capture.py reads.
EQUAL(1, CU_GRAPH_NODE_TYPE_MEMCPY);
EQUAL(3, CU_GRAPH_NODE_TYPE_HOST);
EQUAL(1, CU_MEMORYTYPE_HOST);
EQUAL(4, CU_MEMORYTYPE_UNIFIED);
static_assert(sizeof(CUDA_MEMCPY3D) == 25 * 8);
static_assert(offsetof(CUDA_MEMCPY3D, srcMemoryType) == 4 * 8 && offsetof(CUDA_MEMCPY3D, srcDevice) == 6 * 8);
static_assert(offsetof(CUDA_MEMCPY3D, dstMemoryType) == 15 * 8 && offsetof(CUDA_MEMCPY3D, dstDevice) == 17 * 8);

}  // namespace
}  // namespace distopt::cuda

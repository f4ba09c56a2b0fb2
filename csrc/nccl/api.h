// The part of NCCL that is used: own declarations. It is loaded at run time, so that building needs no NCCL.
// They hold from 2.18 to 2.32; tests/unit/test_native_abi.py compares them with nccl.h.
#pragma once

#include <climits>
#include <cstddef>
#include <string>

#include "nccl/driver.h"

namespace distopt::nccl {

constexpr int oldest_version = 21800;  // 10000 * major + 100 * minor + patch

struct Comm;  // opaque

enum class Result : int {
  success = 0,
  unhandled_cuda_error,
  system_error,
  internal_error,
  invalid_argument,
  invalid_usage,
  remote_error,
  in_progress,
};

enum class DataType : int { int8 = 0, uint8, int32, int64 = 4, float16 = 6, float32, float64, bfloat16 };
enum class RedOp : int { sum = 0, prod, max, min, avg };

struct UniqueId {
  char internal[128];
};

// ncclConfig_t of 2.18. Later versions append fields, and determine the fields by `size` and `version`.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = oldest_version;
  int blocking = INT_MIN;  // INT_MIN: undefined, the library's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// X(field, symbol, result, parameters)
#define DISTOPT_NCCL(X)                                                                                          \
  X(get_version, ncclGetVersion, Result, (int*))                                                                 \
  X(get_unique_id, ncclGetUniqueId, Result, (UniqueId*))                                                         \
  X(get_error_string, ncclGetErrorString, const char*, (Result))                                                 \
  X(get_last_error, ncclGetLastError, const char*, (Comm*))                                                      \
  X(comm_init_rank_config, ncclCommInitRankConfig, Result, (Comm**, int, UniqueId, int, Config*))                \
  X(comm_get_async_error, ncclCommGetAsyncError, Result, (Comm*, Result*))                                       \
  X(comm_finalize, ncclCommFinalize, Result, (Comm*))                                                            \
  X(comm_destroy, ncclCommDestroy, Result, (Comm*))                                                              \
  X(comm_abort, ncclCommAbort, Result, (Comm*))                                                                  \
  X(all_reduce, ncclAllReduce, Result, (const void*, void*, std::size_t, DataType, RedOp, Comm*, cuda::Stream*)) \
  X(reduce_scatter, ncclReduceScatter, Result,                                                                   \
    (const void*, void*, std::size_t, DataType, RedOp, Comm*, cuda::Stream*))                                    \
  X(all_gather, ncclAllGather, Result, (const void*, void*, std::size_t, DataType, Comm*, cuda::Stream*))        \
  X(broadcast, ncclBroadcast, Result, (const void*, void*, std::size_t, DataType, int, Comm*, cuda::Stream*))    \
  X(send, ncclSend, Result, (const void*, std::size_t, DataType, int, Comm*, cuda::Stream*))                     \
  X(recv, ncclRecv, Result, (void*, std::size_t, DataType, int, Comm*, cuda::Stream*))                           \
  X(group_start, ncclGroupStart, Result, ())                                                                     \
  X(group_end, ncclGroupEnd, Result, ())

struct NcclApi {
#define DISTOPT_NCCL_FIELD(field, symbol, result, parameters) result(*field) parameters = nullptr;
  DISTOPT_NCCL(DISTOPT_NCCL_FIELD)
#undef DISTOPT_NCCL_FIELD
  int version = 0;
  std::string path;
};

// Loads the library at an absolute path (a bare name would load the first libnccl on the search path); it is never
// unloaded, because it has threads of its own. Throws std::runtime_error with the reason.
const NcclApi& load(const std::string& path);

// Library and version, e.g. "2.27.5".
std::string dotted(int version);

}  // namespace distopt::nccl

// A communicator of NCCL that several threads use, and its end.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>

#include "nccl/api.h"

namespace distopt::nccl {

// Runs `body` in a thread of its own, in that context. Who does not wait for the result leaves the thread behind.
std::future<Result> run_apart(cuda::Context* context, std::function<Result()> body);

// Every thread that is in NCCL with `comm` holds a reference. The last one to go ends it: by ncclCommAbort, which frees
// what another thread in NCCL would use, or, if `orderly`, by ncclCommFinalize and ncclCommDestroy, which wait
// for the threads that NCCL has for this rank.
struct Opened {
  Opened(const NcclApi& api, cuda::Context* context, double seconds) : api(api), context(context), seconds(seconds) {}
  // Returns after 2 * `seconds` at the latest.
  ~Opened();
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  const NcclApi& api;
  cuda::Context* const context;
  const double seconds;
  Comm* comm = nullptr;
  std::atomic<bool> orderly{false};
  // Whether NCCL has not come back in time from the end.
  const std::shared_ptr<std::atomic<bool>> late = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace distopt::nccl

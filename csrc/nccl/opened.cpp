#include "nccl/opened.h"

#include <chrono>
#include <thread>
#include <utility>

namespace distopt::nccl {

std::future<Result> run_apart(cuda::Context* context, std::function<Result()> body) {
  std::packaged_task<Result()> task([context, body = std::move(body)] {
    static_cast<void>(cuda::driver().ctx_set_current.status(context));
    return body();
  });
  std::future<Result> future = task.get_future();
  std::thread(std::move(task)).detach();
  return future;
}

Opened::~Opened() {
  if (comm == nullptr) return;
  const auto ended = run_apart(context, [&api = api, comm = comm, orderly = orderly.load()] {
    const bool finalized = orderly && api.comm_finalize(comm) == Result::success;
    return finalized ? api.comm_destroy(comm) : api.comm_abort(comm);
  });
  *late = ended.wait_for(std::chrono::duration<double>(2 * seconds)) != std::future_status::ready;
}

}  // namespace distopt::nccl

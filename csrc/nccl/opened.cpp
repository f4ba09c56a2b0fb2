#include "nccl/opened.h"

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <utility>

namespace distopt::nccl {
namespace {

// Runs `body` in a thread of its own; returns whether it has returned in time. If not, it continues by itself.
bool run_bounded(double seconds, std::function<void()> body) {
  auto finished = std::make_shared<std::promise<void>>();
  auto future = finished->get_future();
  std::thread([body = std::move(body), finished] {
    body();
    finished->set_value();
  }).detach();
  return future.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready;
}

}  // namespace

Opened::~Opened() {
  if (comm == nullptr) return;
  *late = !run_bounded(2 * seconds, [&api = api, comm = comm, context = context, orderly = orderly.load()] {
    static_cast<void>(cuda::driver().ctx_set_current.status(context));
    const bool finalized = orderly && api.comm_finalize(comm) == Result::success;
    static_cast<void>(finalized ? api.comm_destroy(comm) : api.comm_abort(comm));
  });
}

}  // namespace distopt::nccl

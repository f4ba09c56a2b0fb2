// Streams and events.
#include "runtime.h"

using namespace emulation;

#define EXPORT extern "C"

namespace {
template <class Handle>
Handle* new_handle() {
  return reinterpret_cast<Handle*>(runtime().next_handle += 0x10);
}
}  // namespace

EXPORT Status cuStreamCreateWithPriority(Stream** stream, unsigned flags, int) {
  if (!context) return invalid_context;
  // The emulator has no streams that are ordered with the default one.
  if (flags != distopt::cuda::stream_non_blocking) return invalid_value;
  const Lock lock(runtime().mutex);
  *stream = new_handle<Stream>();
  runtime().streams[*stream] = std::make_shared<Queue>();
  runtime().streams[*stream]->device = current_device();
  return Status::success;
}
// What is in it still runs when something depends on it.
EXPORT Status cuStreamDestroy_v2(Stream* stream) {
  const Lock lock(runtime().mutex);
  return runtime().streams.erase(stream) ? Status::success : invalid_handle;
}
EXPORT Status cuStreamSynchronize(Stream* stream) { return synchronize(stream); }
EXPORT Status cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  const Lock lock(runtime().mutex);
  const auto found = runtime().events.find(event);
  const std::shared_ptr<Queue> queue = find(stream);
  if (found == runtime().events.end() || !queue) return invalid_handle;
  if (disturbs(*queue)) return capture_unsupported;
  append(queue, {[] { return true; }, found->second.position});
  return Status::success;
}

EXPORT Status cuEventCreate(Event** event, unsigned) {
  if (!context) return invalid_context;
  const Lock lock(runtime().mutex);
  *event = new_handle<Event>();
  runtime().events[*event] = {current_device(), {}};
  return Status::success;
}
EXPORT Status cuEventDestroy_v2(Event* event) {
  const Lock lock(runtime().mutex);
  return runtime().events.erase(event) ? Status::success : invalid_handle;
}
EXPORT Status cuEventRecord(Event* event, Stream* stream) {
  const Lock lock(runtime().mutex);
  const auto found = runtime().events.find(event);
  const std::shared_ptr<Queue> queue = find(stream);
  if (found == runtime().events.end() || !queue || queue->device != found->second.device) return invalid_handle;
  if (disturbs(*queue)) return capture_unsupported;
  append(queue, {[] { return true; }, {}});
  found->second.position = end_of(queue);
  return Status::success;
}

namespace {
Status reach(Event* event, bool wait) {
  Position position;
  {
    const Lock lock(runtime().mutex);
    const auto found = runtime().events.find(event);
    if (found == runtime().events.end()) return invalid_handle;
    position = found->second.position;
  }
  return advance(position, wait) ? Status::success : Status::not_ready;
}
}  // namespace

EXPORT Status cuEventSynchronize(Event* event) { return reach(event, true); }
EXPORT Status cuEventQuery(Event* event) { return reach(event, false); }

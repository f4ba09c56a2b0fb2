// A libnccl.so.2 whose ranks are processes of one machine and whose device memory is the host's, for tests.
//
// It behaves as a blocking NCCL at its worst: a call that connects ranks, as the first with the same arguments or the
// first message to a peer, waits for them without end; a collective runs when its stream gets there, and never ends if
// the ranks disagree. Two threads in one communicator, or an abort below a thread, end the process. Environment:
//   FAKE_NCCL_RECORD=path            every call becomes a line of path.<rank>
//   FAKE_NCCL_FAIL=ncclSend:5        that function returns 5
//   FAKE_NCCL_SLEEP=ncclSend:0.5     that function takes half a second
//   FAKE_NCCL_CONNECTED=1            ranks are connected at first, as before NCCL 2.22
//   FAKE_NCCL_FOLDER=path            where ranks meet, in place of /dev/shm: a file stays if one does not come
//   FAKE_NCCL_ASYNC_ERROR=7:6        from the 7th collective on, ncclCommGetAsyncError says 6, and none ends
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_nccl_transport.h"

using distopt::nccl::Config;
using distopt::nccl::Result;
using distopt::nccl::UniqueId;
using namespace fake;

namespace {

std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The value of "function:value" if the function is this one.
std::string setting_of(const char* name, const char* function) {
  const std::string text = setting(name);
  const std::size_t colon = text.find(':');
  return colon != std::string::npos && text.substr(0, colon) == function ? text.substr(colon + 1) : "";
}

int step(void* argument) {
  auto* queued = static_cast<Queued*>(argument);
  if (!queued->channel->aborted && !queued->advance()) return 0;
  --queued->channel->unfinished;
  delete queued;
  return 1;
}

}  // namespace

namespace distopt::nccl {
struct Comm {
  std::shared_ptr<Channel> channel = std::make_shared<Channel>();
  std::FILE* record = nullptr;
  std::set<std::string> connected;  // arguments
  std::atomic<int> inside{0};       // threads
  bool finalized = false;
};
}  // namespace distopt::nccl

using distopt::nccl::Comm;

namespace {

thread_local int depth = 0;
struct Group {
  Comm* comm = nullptr;
  distopt::cuda::Stream* stream = nullptr;
  std::vector<Task> collectives;
  std::vector<Message> messages;
  Result failed = Result::success;  // what a call in the group has returned: the end returns it, too
};
thread_local Group group;

void record(Comm* comm, const char* format, ...) {
  if (comm == nullptr || comm->record == nullptr) return;
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(comm->record, format, arguments);
  va_end(arguments);
  std::fprintf(comm->record, " depth=%d\n", depth);
  std::fflush(comm->record);
}

// Sleeps and returns as the environment asks; success by default.
Result told(const char* function) {
  if (const std::string seconds = setting_of("FAKE_NCCL_SLEEP", function); !seconds.empty())
    std::this_thread::sleep_for(std::chrono::duration<double>(std::atof(seconds.c_str())));
  const std::string code = setting_of("FAKE_NCCL_FAIL", function);
  const Result result = code.empty() ? Result::success : static_cast<Result>(std::atoi(code.c_str()));
  if (depth > 0 && result != Result::success) group.failed = result;
  return result;
}

bool hangs_from_here(const Channel& channel) {
  const std::string text = setting("FAKE_NCCL_ASYNC_ERROR");
  return !text.empty() && channel.started >= static_cast<std::uint64_t>(std::atoll(text.c_str()));
}

void enqueue(Comm* comm, distopt::cuda::Stream* stream, std::function<bool()> advance) {
  using Enqueue = int (*)(void*, int (*)(void*), void*);
  static const auto emulation_enqueue = reinterpret_cast<Enqueue>(::dlsym(RTLD_DEFAULT, "emulation_enqueue"));
  if (emulation_enqueue == nullptr) die("load the emulated libcuda.so.1 with RTLD_GLOBAL before");
  Channel& channel = *comm->channel;
  ++channel.started;
  ++channel.unfinished;
  if (hangs_from_here(channel)) advance = [] { return false; };
  auto* queued = new Queued{comm->channel, std::move(advance)};
  if (emulation_enqueue(stream, step, queued) != 0) std::abort();
}

// A thread in a call of NCCL, which only one may be at a time.
class Inside {
 public:
  explicit Inside(Comm* comm) : comm_(comm) {
    if (comm_->inside++ != 0) die("two threads use one communicator");
  }
  ~Inside() { --comm_->inside; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Comm* comm_;
};

template <class Condition>
void wait_until(Condition condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// Waits for all ranks, at the first call with these arguments.
void connect(Comm* comm, const Call& call) {
  char key[80];
  std::snprintf(key, sizeof key, "%d %zu %d %d %d", static_cast<int>(call.kind), call.count,
                static_cast<int>(call.type), static_cast<int>(call.op), call.root);
  if (!setting("FAKE_NCCL_CONNECTED").empty() || !comm->connected.insert(key).second) return;
  const Channel& channel = *comm->channel;
  const std::uint64_t mine = ++channel.slots[channel.rank].connections;
  wait_until([&] { return channel.all([=](const Slot& slot) { return slot.connections >= mine; }); });
}

void connect(const Channel& channel, const std::vector<Message>& messages) {
  const auto pipe_of = [&](const Message& m) -> Pipe& {
    return m.sends ? channel.pipe(channel.rank, m.peer) : channel.pipe(m.peer, channel.rank);
  };
  for (const Message& message : messages) (message.sends ? pipe_of(message).sender : pipe_of(message).receiver) = 1;
  wait_until([&] {
    for (const Message& message : messages)
      if (pipe_of(message).sender == 0 || pipe_of(message).receiver == 0) return false;
    return true;
  });
}

Result run_group() {
  const Group made = std::exchange(group, {});
  if (made.failed != Result::success || made.comm == nullptr) return made.failed;
  const Inside inside(made.comm);
  for (const Task& task : made.collectives) connect(made.comm, task.call);
  connect(*made.comm->channel, made.messages);
  for (const Task& task : made.collectives) enqueue(made.comm, made.stream, in_turn(*made.comm->channel, task));
  if (!made.messages.empty()) enqueue(made.comm, made.stream, exchange(*made.comm->channel, made.messages));
  return Result::success;
}

Result collective(const char* function, Comm* comm, distopt::cuda::Stream* stream, const Task& task) {
  if (const Result result = told(function); result != Result::success) return result;
  group.comm = comm;
  group.stream = stream;
  group.collectives.push_back(task);
  return depth == 0 ? run_group() : Result::success;
}

Task reduction(Comm* comm, Call call, const void* in, void* out) {
  const Channel* channel = comm->channel.get();
  const std::size_t part_bytes = call.count * item_bytes(call.type);
  const std::size_t parts = call.kind == Kind::reduce_scatter ? static_cast<std::size_t>(channel->size) : 1;
  const std::size_t first = parts == 1 ? 0 : part_bytes * static_cast<std::size_t>(channel->rank);
  return {call, in, parts * part_bytes, [=] {
            std::vector<const char*> inputs;
            for (int r = 0; r < channel->size; ++r) inputs.push_back(channel->data_of(r) + first);
            reduce(inputs, static_cast<char*>(out), call.count, call.type, call.op);
          }};
}

Task copying(Comm* comm, Call call, const void* in, void* out) {
  const Channel* channel = comm->channel.get();
  const std::size_t n_bytes = call.count * item_bytes(call.type);
  const bool gathers = call.kind == Kind::all_gather;
  return {call, in, gathers || channel->rank == call.root ? n_bytes : 0, [=] {
            auto* to = static_cast<char*>(out);
            for (int r = 0; r < channel->size; ++r)
              if (gathers || r == call.root) to = std::copy_n(channel->data_of(r), n_bytes, to);
          }};
}

}  // namespace

// -- the functions of nccl.h ------------------------------------------------------------------------------------------
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Result ncclGetVersion(int* version) {
  *version = 23203;
  return Result::success;
}

EXPORT Result ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  for (std::size_t i = 0; i < 24; i += 8) std::snprintf(id->internal + i, 9, "%08x", random());
  return Result::success;
}

EXPORT const char* ncclGetErrorString(Result result) {
  static const char* const names[] = {"no error",
                                      "unhandled cuda error",
                                      "unhandled system error",
                                      "internal error",
                                      "invalid argument",
                                      "invalid usage",
                                      "remote process exited or there was a network error",
                                      "NCCL operation in progress"};
  return names[static_cast<int>(result)];
}

EXPORT const char* ncclGetLastError(Comm*) { return "told by the fake\n"; }

EXPORT Result ncclCommInitRankConfig(Comm** out, int size, UniqueId id, int rank, Config* config) {
  if (const Result result = told("ncclCommInitRankConfig"); result != Result::success) return result;
  if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 1 || rank >= size)
    return Result::invalid_argument;
  auto comm = std::make_unique<Comm>();
  Channel& channel = *comm->channel;
  channel.rank = rank;
  channel.size = size;
  const std::string folder = setting("FAKE_NCCL_FOLDER");
  channel.path = (folder.empty() ? "/dev/shm" : folder) + "/fake-nccl-" + id.internal;
  const std::size_t bytes = channel.bytes();
  const int fd = ::open(channel.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return Result::system_error;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (memory == MAP_FAILED) return Result::system_error;
  channel.slots = static_cast<Slot*>(memory);
  channel.slots[rank].joined = 1;
  if (const std::string path = setting("FAKE_NCCL_RECORD"); !path.empty())
    comm->record = std::fopen((path + "." + std::to_string(rank)).c_str(), "a");
  record(comm.get(), "ncclCommInitRankConfig size=%d rank=%d version=%u", size, rank, config->version);
  wait_until([&] { return channel.all([](const Slot& slot) { return slot.joined != 0; }); });
  ::unlink(channel.path.c_str());
  *out = comm.release();
  return Result::success;
}

EXPORT Result ncclCommGetAsyncError(Comm* comm, Result* result) {
  const std::string text = setting("FAKE_NCCL_ASYNC_ERROR");
  *result = hangs_from_here(*comm->channel) ? static_cast<Result>(std::atoi(text.c_str() + text.find(':') + 1))
                                            : Result::success;
  return Result::success;
}

EXPORT Result ncclCommFinalize(Comm* comm) {
  const Inside inside(comm);
  record(comm, "ncclCommFinalize");
  if (const Result result = told("ncclCommFinalize"); result != Result::success) return result;
  wait_until([&] { return comm->channel->unfinished == 0; });
  comm->finalized = true;
  return Result::success;
}

EXPORT Result ncclCommDestroy(Comm* comm) {
  record(comm, "ncclCommDestroy");
  if (!comm->finalized || comm->inside != 0) return Result::invalid_usage;
  if (comm->record != nullptr) std::fclose(comm->record);
  delete comm;
  return Result::success;
}

EXPORT Result ncclCommAbort(Comm* comm) {
  record(comm, "ncclCommAbort");
  if (comm->inside != 0) die("an abort while a thread is in NCCL");
  if (const Result result = told("ncclCommAbort"); result != Result::success) return result;
  comm->channel->aborted = true;
  if (comm->record != nullptr) std::fclose(comm->record);
  delete comm;
  return Result::success;
}

EXPORT Result ncclAllReduce(const void* in, void* out, std::size_t count, DataType type, RedOp op, Comm* comm,
                            distopt::cuda::Stream* stream) {
  record(comm, "ncclAllReduce in_place=%d count=%zu type=%d op=%d", in == out, count, type, op);
  return collective("ncclAllReduce", comm, stream, reduction(comm, {Kind::all_reduce, count, type, op, 0}, in, out));
}

EXPORT Result ncclReduceScatter(const void* in, void* out, std::size_t count, DataType type, RedOp op, Comm* comm,
                                distopt::cuda::Stream* stream) {
  record(comm, "ncclReduceScatter count=%zu type=%d op=%d", count, type, op);
  return collective("ncclReduceScatter", comm, stream,
                    reduction(comm, {Kind::reduce_scatter, count, type, op, 0}, in, out));
}

EXPORT Result ncclAllGather(const void* in, void* out, std::size_t count, DataType type, Comm* comm,
                            distopt::cuda::Stream* stream) {
  record(comm, "ncclAllGather count=%zu type=%d", count, type);
  return collective("ncclAllGather", comm, stream,
                    copying(comm, {Kind::all_gather, count, type, RedOp::sum, 0}, in, out));
}

EXPORT Result ncclBroadcast(const void* in, void* out, std::size_t count, DataType type, int root, Comm* comm,
                            distopt::cuda::Stream* stream) {
  record(comm, "ncclBroadcast count=%zu type=%d root=%d", count, type, root);
  return collective("ncclBroadcast", comm, stream,
                    copying(comm, {Kind::broadcast, count, type, RedOp::sum, root}, in, out));
}

EXPORT Result ncclSend(const void* data, std::size_t count, DataType type, int peer, Comm* comm,
                       distopt::cuda::Stream* stream) {
  record(comm, "ncclSend count=%zu type=%d peer=%d", count, type, peer);
  if (depth == 0) return Result::invalid_usage;  // a lone send to a peer that sends, too, would hang
  group.comm = comm;
  group.stream = stream;
  group.messages.push_back({static_cast<char*>(const_cast<void*>(data)), count * item_bytes(type), peer, true});
  return told("ncclSend");
}

EXPORT Result ncclRecv(void* data, std::size_t count, DataType type, int peer, Comm* comm,
                       distopt::cuda::Stream* stream) {
  record(comm, "ncclRecv count=%zu type=%d peer=%d", count, type, peer);
  if (depth == 0) return Result::invalid_usage;
  group.comm = comm;
  group.stream = stream;
  group.messages.push_back({static_cast<char*>(data), count * item_bytes(type), peer, false});
  return told("ncclRecv");
}

EXPORT Result ncclGroupStart() {
  ++depth;
  return Result::success;
}

EXPORT Result ncclGroupEnd() {
  if (depth == 0) return Result::invalid_usage;
  return --depth == 0 ? run_group() : Result::success;
}

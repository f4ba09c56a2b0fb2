// A libnccl.so.2 whose ranks are processes of one machine and whose device memory is the host's, for tests.
//
// It behaves as a non-blocking NCCL at its worst: each call says "in progress", and takes effect only when the caller
// asks again; a collective runs when its stream gets there, and never ends if the ranks disagree. Environment:
//   FAKE_NCCL_VERSION=21700          what ncclGetVersion says
//   FAKE_NCCL_RECORD=path            every call becomes a line of path.<rank>
//   FAKE_NCCL_FAIL=ncclSend:5        that function returns 5
//   FAKE_NCCL_SLEEP=ncclSend:0.5     that function takes half a second
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
#include <deque>
#include <functional>
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
  std::deque<std::function<void()>> pending;  // what takes effect when the caller has asked often enough
  int questions = 0;
  bool finalized = false;
  int registered = 0;
};
}  // namespace distopt::nccl

using distopt::nccl::Comm;

namespace {

thread_local int depth = 0;
struct Group {
  Comm* comm = nullptr;
  distopt::cuda::Stream* stream = nullptr;
  std::vector<std::function<void()>> collectives;
  std::vector<Message> messages;
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
  return code.empty() ? Result::success : static_cast<Result>(std::atoi(code.c_str()));
}

bool hangs_from_here(const Channel& channel) {
  const std::string text = setting("FAKE_NCCL_ASYNC_ERROR");
  return !text.empty() && channel.started >= static_cast<std::uint64_t>(std::atoll(text.c_str()));
}

void enqueue(Comm* comm, distopt::cuda::Stream* stream, std::function<bool()> advance) {
  using Enqueue = int (*)(void*, int (*)(void*), void*);
  static const auto emulation_enqueue = reinterpret_cast<Enqueue>(::dlsym(RTLD_DEFAULT, "emulation_enqueue"));
  if (emulation_enqueue == nullptr) {
    std::fprintf(stderr, "fake NCCL: load the emulated libcuda.so.1 with RTLD_GLOBAL before\n");
    std::abort();
  }
  Channel& channel = *comm->channel;
  ++channel.started;
  ++channel.unfinished;
  if (hangs_from_here(channel)) advance = [] { return false; };
  auto* queued = new Queued{comm->channel, std::move(advance)};
  if (emulation_enqueue(stream, step, queued) != 0) std::abort();
}

// Takes effect at once inside a group, and after some questions outside.
Result later(const char* function, Comm* comm, std::function<void()> effect) {
  if (const Result result = told(function); result != Result::success) return result;
  if (!comm->pending.empty()) return Result::invalid_usage;  // the last call is still in progress
  comm->pending.push_back(std::move(effect));
  comm->questions = 0;
  return Result::in_progress;
}

Result collective(const char* function, Comm* comm, distopt::cuda::Stream* stream, const Task& task) {
  auto effect = [=] { enqueue(comm, stream, in_rounds(*comm->channel, task)); };
  if (depth == 0) return later(function, comm, effect);
  if (const Result result = told(function); result != Result::success) return result;
  group.comm = comm;
  group.stream = stream;
  group.collectives.push_back(effect);
  return Result::success;
}

// Rounds through a buffer of n_bytes, as much as fits a mailbox at a time.
struct Chunks {
  std::size_t n_bytes;
  std::size_t begin(std::uint64_t round) const { return std::min(n_bytes, round * mailbox_bytes); }
  std::size_t size(std::uint64_t round) const { return std::min(mailbox_bytes, n_bytes - begin(round)); }
  bool last(std::uint64_t round) const { return begin(round + 1) == n_bytes; }
};

Task reduction(Comm* comm, Call call, const void* in, void* out) {
  Channel* channel = comm->channel.get();
  const std::size_t item = item_bytes(call.type);
  const std::size_t parts = call.kind == Kind::reduce_scatter ? static_cast<std::size_t>(channel->size) : 1;
  const std::size_t part_bytes = call.count * item;
  const Chunks chunks{parts * part_bytes};
  const std::size_t first = parts == 1 ? 0 : part_bytes * static_cast<std::size_t>(channel->rank);
  // The result goes to the output at the end: the input may overlap it.
  auto result = std::make_shared<std::vector<char>>(part_bytes);
  return {call,
          [=](std::uint64_t round, char* mailbox) {
            std::memcpy(mailbox, static_cast<const char*>(in) + chunks.begin(round), chunks.size(round));
          },
          [=](std::uint64_t round) {
            const std::size_t begin = std::max(first, chunks.begin(round));
            const std::size_t end = std::min(first + part_bytes, chunks.begin(round) + chunks.size(round));
            if (begin < end) {
              std::vector<const char*> inputs;
              for (int r = 0; r < channel->size; ++r)
                inputs.push_back(channel->slots[r].data + (begin - chunks.begin(round)));
              reduce(inputs, result->data() + (begin - first), (end - begin) / item, call.type, call.op);
            }
            if (chunks.last(round)) std::memcpy(out, result->data(), part_bytes);
            return chunks.last(round);
          }};
}

Task copying(Comm* comm, Call call, const void* in, void* out) {
  Channel* channel = comm->channel.get();
  const Chunks chunks{call.count * item_bytes(call.type)};
  const bool gathers = call.kind == Kind::all_gather;
  return {call,
          [=](std::uint64_t round, char* mailbox) {
            if (gathers || channel->rank == call.root)
              std::memcpy(mailbox, static_cast<const char*>(in) + chunks.begin(round), chunks.size(round));
          },
          [=](std::uint64_t round) {
            for (int r = 0; r < channel->size; ++r) {
              if (!gathers && r != call.root) continue;
              const std::size_t row = gathers ? static_cast<std::size_t>(r) * chunks.n_bytes : 0;
              std::memcpy(static_cast<char*>(out) + row + chunks.begin(round), channel->slots[r].data,
                          chunks.size(round));
            }
            return chunks.last(round);
          }};
}

}  // namespace

// -- the functions of nccl.h
// -------------------------------------------------------------------------------------------
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Result ncclGetVersion(int* version) {
  const std::string text = setting("FAKE_NCCL_VERSION");
  *version = text.empty() ? 23203 : std::atoi(text.c_str());
  return Result::success;
}

EXPORT Result ncclGetUniqueId(UniqueId* id) {
  if (const Result result = told("ncclGetUniqueId"); result != Result::success) return result;
  std::memset(id, 0, sizeof(*id));
  std::FILE* random = std::fopen("/dev/urandom", "rb");
  unsigned char bytes[12];
  const bool ok = random != nullptr && std::fread(bytes, 1, sizeof(bytes), random) == sizeof(bytes);
  if (random != nullptr) std::fclose(random);
  if (!ok) return Result::system_error;
  for (std::size_t i = 0; i < sizeof(bytes); ++i) std::snprintf(id->internal + 2 * i, 3, "%02x", bytes[i]);
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
  if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 0 || rank >= size)
    return Result::invalid_argument;
  auto comm = std::make_unique<Comm>();
  Channel& channel = *comm->channel;
  channel.rank = rank;
  channel.size = size;
  channel.path = std::string("/dev/shm/fake-nccl-") + id.internal;
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
  *out = comm.release();
  return Result::in_progress;
}

EXPORT Result ncclCommGetAsyncError(Comm* comm, Result* result) {
  Channel& channel = *comm->channel;
  *result = Result::success;
  const std::string text = setting("FAKE_NCCL_ASYNC_ERROR");
  if (hangs_from_here(channel)) {
    *result = static_cast<Result>(std::atoi(text.c_str() + text.find(':') + 1));
  } else if (!channel.complete()) {
    *result = Result::in_progress;
  } else if (!channel.path.empty()) {
    ::unlink(channel.path.c_str());
    channel.path.clear();
  } else if (!comm->pending.empty()) {
    *result = Result::in_progress;
    if (++comm->questions >= 2) {
      const std::function<void()> effect = std::move(comm->pending.front());
      comm->pending.pop_front();
      effect();
    }
  } else if (comm->finalized && channel.unfinished != 0) {
    *result = Result::in_progress;
  }
  return Result::success;
}

EXPORT Result ncclCommFinalize(Comm* comm) {
  record(comm, "ncclCommFinalize registered=%d", comm->registered);
  if (const Result result = told("ncclCommFinalize"); result != Result::success) return result;
  if (!comm->pending.empty()) return Result::invalid_usage;
  comm->finalized = true;
  return Result::in_progress;
}

EXPORT Result ncclCommDestroy(Comm* comm) {
  record(comm, "ncclCommDestroy");
  if (!comm->finalized || comm->channel->unfinished != 0) return Result::invalid_usage;
  if (comm->record != nullptr) std::fclose(comm->record);
  delete comm;
  return Result::success;
}

EXPORT Result ncclCommAbort(Comm* comm) {
  record(comm, "ncclCommAbort");
  if (const Result result = told("ncclCommAbort"); result != Result::success) return result;
  comm->channel->aborted = true;
  if (!comm->channel->path.empty()) ::unlink(comm->channel->path.c_str());
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
  if (--depth != 0) return Result::success;
  const Group made = std::exchange(group, {});
  if (made.comm == nullptr) return Result::success;
  return later("ncclGroupEnd", made.comm, [made] {
    for (const auto& effect : made.collectives) effect();
    if (!made.messages.empty()) enqueue(made.comm, made.stream, exchange(*made.comm->channel, made.messages));
  });
}

EXPORT Result ncclMemAlloc(void** memory, std::size_t bytes) {
  if (const Result result = told("ncclMemAlloc"); result != Result::success) return result;
  *memory = std::malloc(bytes);
  if (*memory == nullptr) return Result::unhandled_cuda_error;
  std::memset(*memory, 0xff, bytes);
  return Result::success;
}

EXPORT Result ncclMemFree(void* memory) {
  std::free(memory);
  return Result::success;
}

EXPORT Result ncclCommRegister(Comm* comm, void* memory, std::size_t bytes, void** handle) {
  record(comm, "ncclCommRegister bytes=%zu", bytes);
  if (const Result result = told("ncclCommRegister"); result != Result::success) return result;
  ++comm->registered;
  *handle = memory;
  return Result::success;
}

EXPORT Result ncclCommDeregister(Comm* comm, void*) {
  --comm->registered;
  record(comm, "ncclCommDeregister left=%d", comm->registered);
  return Result::success;
}

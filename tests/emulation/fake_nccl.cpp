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

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/nccl_api.h"

using distopt::nccl::Config;
using distopt::nccl::DataType;
using distopt::nccl::RedOp;
using distopt::nccl::Result;
using distopt::nccl::UniqueId;

namespace {

constexpr std::size_t mailbox_bytes = 1 << 18;

enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast };

// What all ranks must give alike.
struct Call {
  Kind kind;
  std::size_t count;
  DataType type;
  RedOp op;
  int root;
};
bool operator==(const Call& a, const Call& b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op && a.root == b.root;
}

struct Slot {
  std::atomic<int> joined;
  std::atomic<std::uint64_t> written, read;  // rounds
  Call call;
  char data[mailbox_bytes];
};

// From one rank to another.
struct Pipe {
  std::atomic<std::uint64_t> written, read;  // messages
  char data[mailbox_bytes];
};

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

std::size_t item_bytes(DataType type) {
  if (type == DataType::float16 || type == DataType::bfloat16) return 2;
  return type == DataType::int64 || type == DataType::float64 ? 8 : 4;
}

// -- numbers
// -----------------------------------------------------------------------------------------------------------
float from_half(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  float value = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (h & 0x8000) != 0 ? -value : value;
}

std::uint16_t to_half(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // ties to even
  return static_cast<std::uint16_t>(sign | (((exponent + 14) << 10) + steps));
}

float from_bfloat(std::uint16_t b) {
  const std::uint32_t bits = static_cast<std::uint32_t>(b) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

std::uint16_t to_bfloat(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
T combine(T a, T b, RedOp op) {
  if (op == RedOp::max) return std::fmax(a, b);  // passes over NaN, as NCCL does
  if (op == RedOp::min) return std::fmin(a, b);
  return a + b;
}
template <class T>
T combine_integers(T a, T b, RedOp op) {
  if (op == RedOp::max) return std::max(a, b);
  if (op == RedOp::min) return std::min(a, b);
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
}

template <class Wide, class T, class In, class Out, class Both>
void reduce_as(const std::vector<const char*>& inputs, char* out, std::size_t count, RedOp op, In widen, Out narrow,
               Both both) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto at = [&](const char* data) {
      T value;
      std::memcpy(&value, data + i * sizeof(T), sizeof(T));
      return static_cast<Wide>(widen(value));
    };
    Wide total = at(inputs[0]);
    for (std::size_t r = 1; r < inputs.size(); ++r) total = both(total, at(inputs[r]), op);
    if (op == RedOp::avg) total = total / static_cast<Wide>(inputs.size());
    const T result = narrow(total);
    std::memcpy(out + i * sizeof(T), &result, sizeof(T));
  }
}

void reduce(const std::vector<const char*>& inputs, char* out, std::size_t count, DataType type, RedOp op) {
  const auto same = [](auto value) { return value; };
  switch (type) {
    case DataType::float32:
      return reduce_as<float, float>(inputs, out, count, op, same, same, combine<float>);
    case DataType::float64:
      return reduce_as<double, double>(inputs, out, count, op, same, same, combine<double>);
    case DataType::float16:
      return reduce_as<float, std::uint16_t>(inputs, out, count, op, from_half, to_half, combine<float>);
    case DataType::bfloat16:
      return reduce_as<float, std::uint16_t>(inputs, out, count, op, from_bfloat, to_bfloat, combine<float>);
    case DataType::int32:
      return reduce_as<std::int32_t, std::int32_t>(inputs, out, count, op, same, same, combine_integers<std::int32_t>);
    case DataType::int64:
      return reduce_as<std::int64_t, std::int64_t>(inputs, out, count, op, same, same, combine_integers<std::int64_t>);
  }
}

}  // namespace

// -- communicators
// -----------------------------------------------------------------------------------------------------
namespace {

// One part of a collective at a time travels through the mailboxes. Both are called once for every round.
struct Task {
  Call call;
  std::function<void(std::uint64_t round, char* mailbox)> write;
  std::function<bool(std::uint64_t round)> read;  // whether it was the last round
};

struct Channel {
  int rank = 0, size = 0;
  Slot* slots = nullptr;
  std::string path;
  std::atomic<bool> aborted{false};
  std::atomic<int> unfinished{0};
  std::uint64_t rounds = 0;   // that have ended
  std::uint64_t started = 0;  // collectives

  ~Channel() {
    if (slots != nullptr) ::munmap(slots, bytes());
  }
  std::size_t bytes() const {
    const auto n = static_cast<std::size_t>(size);
    return n * sizeof(Slot) + n * n * sizeof(Pipe);
  }
  Pipe& pipe(int from, int to) const { return reinterpret_cast<Pipe*>(slots + size)[from * size + to]; }
  bool complete() const {
    for (int r = 0; r < size; ++r)
      if (slots[r].joined.load() == 0) return false;
    return true;
  }
};

struct Queued {
  std::shared_ptr<Channel> channel;
  std::function<bool()> advance;  // whether it has ended
};

// Round after round of a task, as far as the other ranks have come.
std::function<bool()> in_rounds(Channel& channel, Task task) {
  struct State {
    Task task;
    std::uint64_t round = 0;
    bool written = false, mismatch = false;
  };
  auto state = std::make_shared<State>();
  state->task = std::move(task);
  return [&channel, state] {
    Slot& own = channel.slots[channel.rank];
    while (!state->mismatch) {
      const std::uint64_t now = channel.rounds + 1;
      if (!state->written) {
        for (int r = 0; r < channel.size; ++r)
          if (channel.slots[r].read.load() < channel.rounds) return false;
        own.call = state->task.call;
        state->task.write(state->round, own.data);
        own.written.store(now);
        state->written = true;
      }
      for (int r = 0; r < channel.size; ++r)
        if (channel.slots[r].written.load() < now) return false;
      for (int r = 0; r < channel.size; ++r) state->mismatch |= !(channel.slots[r].call == own.call);
      if (state->mismatch) break;
      const bool last = state->task.read(state->round++);
      channel.rounds = now;
      own.read.store(now);
      state->written = false;
      if (last) return true;
    }
    return false;  // for ever, as the real one might
  };
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

// To or from a peer.
struct Message {
  char* data;
  std::size_t n_bytes;
  int peer;
  bool sends;
};

thread_local int depth = 0;
struct Group {
  Comm* comm = nullptr;
  cudaStream_t stream = nullptr;
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

// What the environment wants of this function; success if nothing.
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

void enqueue(Comm* comm, cudaStream_t stream, std::function<bool()> advance) {
  using Enqueue = int (*)(void*, int (*)(void*), void*);
  static const auto emulation_enqueue = reinterpret_cast<Enqueue>(::dlsym(RTLD_DEFAULT, "emulation_enqueue"));
  if (emulation_enqueue == nullptr) {
    std::fprintf(stderr, "fake NCCL: load distopt._cuda with RTLD_GLOBAL before\n");
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

Result collective(const char* function, Comm* comm, cudaStream_t stream, const Task& task) {
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

// The messages of one group: all move at once, each as far as its peer has come.
std::function<bool()> exchange(Channel& channel, std::vector<Message> messages) {
  return [&channel, messages = std::move(messages)]() mutable {
    bool done = true;
    for (Message& message : messages) {
      Pipe& pipe = message.sends ? channel.pipe(channel.rank, message.peer) : channel.pipe(message.peer, channel.rank);
      while (message.n_bytes != 0 && (pipe.written.load() == pipe.read.load()) == message.sends) {
        const std::size_t size = std::min(message.n_bytes, mailbox_bytes);
        message.sends ? std::memcpy(pipe.data, message.data, size) : std::memcpy(message.data, pipe.data, size);
        ++(message.sends ? pipe.written : pipe.read);
        message.data += size;
        message.n_bytes -= size;
      }
      done = done && message.n_bytes == 0;
    }
    return done;
  };
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
                            cudaStream_t stream) {
  record(comm, "ncclAllReduce in_place=%d count=%zu type=%d op=%d", in == out, count, type, op);
  return collective("ncclAllReduce", comm, stream, reduction(comm, {Kind::all_reduce, count, type, op, 0}, in, out));
}

EXPORT Result ncclReduceScatter(const void* in, void* out, std::size_t count, DataType type, RedOp op, Comm* comm,
                                cudaStream_t stream) {
  record(comm, "ncclReduceScatter count=%zu type=%d op=%d", count, type, op);
  return collective("ncclReduceScatter", comm, stream,
                    reduction(comm, {Kind::reduce_scatter, count, type, op, 0}, in, out));
}

EXPORT Result ncclAllGather(const void* in, void* out, std::size_t count, DataType type, Comm* comm,
                            cudaStream_t stream) {
  record(comm, "ncclAllGather count=%zu type=%d", count, type);
  return collective("ncclAllGather", comm, stream,
                    copying(comm, {Kind::all_gather, count, type, RedOp::sum, 0}, in, out));
}

EXPORT Result ncclBroadcast(const void* in, void* out, std::size_t count, DataType type, int root, Comm* comm,
                            cudaStream_t stream) {
  record(comm, "ncclBroadcast count=%zu type=%d root=%d", count, type, root);
  return collective("ncclBroadcast", comm, stream,
                    copying(comm, {Kind::broadcast, count, type, RedOp::sum, root}, in, out));
}

EXPORT Result ncclSend(const void* data, std::size_t count, DataType type, int peer, Comm* comm, cudaStream_t stream) {
  record(comm, "ncclSend count=%zu type=%d peer=%d", count, type, peer);
  if (depth == 0) return Result::invalid_usage;  // a lone send to a peer that sends, too, would hang
  group.comm = comm;
  group.stream = stream;
  group.messages.push_back({static_cast<char*>(const_cast<void*>(data)), count * item_bytes(type), peer, true});
  return told("ncclSend");
}

EXPORT Result ncclRecv(void* data, std::size_t count, DataType type, int peer, Comm* comm, cudaStream_t stream) {
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

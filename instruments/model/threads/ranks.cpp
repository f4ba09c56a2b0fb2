// The communicator in shared memory with its ranks as threads, for ThreadSanitizer: `make sanitize-threads`.
// All ranks draw the same collectives; each checks its results, and writes over its arrays as soon as it may.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/reduce.h"
#include "shm/communicator.h"

#if defined(__x86_64__)  // one set of instructions is enough here
namespace distopt::avx2 {
const ReduceKernels& reduce_kernels() { return portable::reduce_kernels(); }
}  // namespace distopt::avx2
namespace distopt::avx512 {
const ReduceKernels& reduce_kernels() { return portable::reduce_kernels(); }
}  // namespace distopt::avx512
#endif

namespace {

using namespace distopt;

constexpr std::size_t chunk_bytes = 4096;

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "WRONG: %s\n", what.c_str());
  std::_Exit(1);
}

class RaggedCollective final : public ShmCollective {
 public:
  using ShmCollective::ShmCollective;
  std::vector<std::vector<float>> parts;

 private:
  std::vector<char*> allocate(const std::vector<std::uint64_t>& counts) override {
    std::vector<char*> outputs;
    for (std::uint64_t count : counts) parts.emplace_back(count);
    for (auto& part : parts) outputs.push_back(reinterpret_cast<char*>(part.data()));
    return outputs;
  }
};

float value(int rank, int number, std::size_t i) { return static_cast<float>((7 * number + 3 * rank + i) % 1000); }

// One collective under way.
struct Started {
  std::shared_ptr<ShmCollective> operation;
  int number;
  std::uint64_t count;
  float* in;
  float* out;
  std::vector<float> in_memory, out_memory;
};

class Rank {
 public:
  Rank(int fd, int rank, int size, Limits limits)
      : rank_(rank),
        size_(size),
        communicator_(std::make_shared<ShmCommunicator>(fd, rank, processes(size), limits, hooks())) {}

  ShmCommunicator& communicator() { return *communicator_; }

  void allocate_wire() {
    for (auto& block : wire_) block = communicator_->empty(wire_count, DType::float32, ~std::uint64_t{0});
  }

  // Messages around the ring of ranks, both ways, beside the collectives; larger ones than the ring of bytes holds.
  void exchange(int rounds) {
    constexpr std::uint64_t counts[] = {0, 1, 300, 40000};
    for (int round = 1; round <= rounds; ++round) {
      std::vector<std::shared_ptr<Message>> under_way;
      std::vector<std::vector<float>> arrays;
      arrays.reserve(4);
      const std::uint64_t count = counts[round % static_cast<int>(std::size(counts))];
      for (const int step : {1, size_ - 1}) {
        std::vector<float>& sent = arrays.emplace_back(count);
        for (std::size_t i = 0; i < count; ++i) sent[i] = value(rank_, round + step, i);
        std::vector<float>& came = arrays.emplace_back(count, -1.0f);
        under_way.push_back(message(true, (rank_ + step) % size_, step, sent));
        under_way.push_back(message(false, (rank_ + size_ - step) % size_, step, came));
      }
      for (auto message = under_way.rbegin(); message != under_way.rend(); ++message)
        communicator_->messages().wait(**message, 60);
      for (const int at : {0, 1})
        for (std::size_t i = 0; i < count; ++i) {
          const int step = at == 0 ? 1 : size_ - 1;
          require(arrays[2 * at + 1][i] == value((rank_ + size_ - step) % size_, round + step, i), "a message");
        }
    }
  }

  // `common` gives all ranks the same numbers, `own` does not.
  void run(int operations, unsigned seed) {
    std::mt19937 common(seed), own(seed * 31 + static_cast<unsigned>(rank_));
    std::vector<std::unique_ptr<Started>> started;
    for (int number = 1; number <= operations; ++number) {
      while (started.size() >= wire_.size()) end(started, own() % started.size());
      started.push_back(start(number, common));
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
      while (!started.empty() && own() % 2 == 0) end(started, own() % started.size());
    }
    while (!started.empty()) end(started, 0);
  }

 private:
  static constexpr std::uint64_t wire_count = 8192;

  static std::vector<Process> processes(int size) {
    std::vector<Process> result;
    for (int q = 0; q < size; ++q) result.push_back({q, "host", 0});
    return result;
  }
  static Hooks hooks() {
    return {[] {}, [](const std::string&) {}};
  }

  std::shared_ptr<Message> message(bool sends, int peer, std::int64_t tag, std::vector<float>& array) {
    char* const data = reinterpret_cast<char*>(array.data());
    auto made = std::make_shared<Message>(sends, peer, tag, DType::float32, data, array.size());
    communicator_->messages().start(made);
    return made;
  }

  std::unique_ptr<Started> start(int number, std::mt19937& common) {
    constexpr OpKind kinds[] = {OpKind::barrier,        OpKind::all_reduce, OpKind::all_reduce,
                                OpKind::reduce_scatter, OpKind::all_gather, OpKind::all_gather_ragged,
                                OpKind::broadcast};
    constexpr std::uint64_t counts[] = {1, 17, 900, 2000, 8000};
    auto made = std::make_unique<Started>();
    Arguments arguments;
    arguments.kind = kinds[common() % std::size(kinds)];
    arguments.root = static_cast<int>(common() % static_cast<unsigned>(size_));
    arguments.looks = arguments.kind == OpKind::all_reduce && common() % 2 == 0;
    const bool wire = common() % 2 == 0;
    const std::uint64_t n = static_cast<std::uint64_t>(size_);
    made->number = number;
    made->count = arguments.kind == OpKind::barrier ? 0 : counts[common() % std::size(counts)] / n + 1;
    const bool scatters = arguments.kind == OpKind::reduce_scatter;
    const bool apart = scatters || arguments.kind == OpKind::all_gather;
    const std::uint64_t in_count = made->count * (scatters ? n : 1);
    made->in_memory.resize(in_count);
    made->out_memory.resize(apart ? made->count * n : 0);
    // Every block of wire memory serves one operation at a time: that many are under way at most.
    made->in = wire ? reinterpret_cast<float*>(free_block()) : made->in_memory.data();
    made->out = apart ? made->out_memory.data() : made->in;
    for (std::size_t i = 0; i < in_count; ++i) made->in[i] = value(rank_, number, i);
    arguments.count = made->count;
    arguments.input = reinterpret_cast<char*>(made->in);
    arguments.output = arguments.kind == OpKind::all_gather_ragged ? nullptr : reinterpret_cast<char*>(made->out);
    if (arguments.kind == OpKind::barrier) arguments.input = arguments.output = nullptr;
    made->operation = arguments.kind == OpKind::all_gather_ragged ? std::make_shared<RaggedCollective>(arguments)
                                                                  : std::make_shared<ShmCollective>(arguments);
    if (!communicator_->start(made->operation)) communicator_->progress();
    return made;
  }

  void end(std::vector<std::unique_ptr<Started>>& started, std::size_t at) {
    Started& mine = *started[at];
    const Arguments& arguments = mine.operation->arguments();
    if (!communicator_->wait_briefly(*mine.operation)) communicator_->wait(*mine.operation, 60);
    const auto sum = [&](std::size_t i) {
      float total = 0;
      for (int q = 0; q < size_; ++q) total += value(q, mine.number, i);
      return total;
    };
    const std::string what = "result of " + describe(arguments, mine.operation->sequence());
    for (std::size_t i = 0; i < mine.count; ++i) {
      if (arguments.kind == OpKind::all_reduce) require(mine.out[i] == sum(i), what);
      if (arguments.kind == OpKind::reduce_scatter)
        require(mine.out[i] == sum(mine.count * static_cast<std::size_t>(rank_) + i), what);
      if (arguments.kind == OpKind::broadcast) require(mine.out[i] == value(arguments.root, mine.number, i), what);
      for (int q = 0; q < size_ && arguments.kind == OpKind::all_gather; ++q)
        require(mine.out[mine.count * static_cast<std::size_t>(q) + i] == value(q, mine.number, i), what);
    }
    for (int q = 0; q < size_ && arguments.kind == OpKind::all_gather_ragged; ++q) {
      const std::vector<float>& part =
          static_cast<RaggedCollective&>(*mine.operation).parts[static_cast<std::size_t>(q)];
      for (std::size_t i = 0; i < part.size(); ++i) require(part[i] == value(q, mine.number, i), what);
    }
    for (std::size_t i = 0; i < mine.count; ++i) mine.in[i] = mine.out[i] = -1;
    for (auto& user : users_)
      if (user.first == reinterpret_cast<char*>(mine.in)) user.second = false;
    started.erase(started.begin() + static_cast<std::ptrdiff_t>(at));
  }

  char* free_block() {
    if (users_.empty())
      for (auto& block : wire_) users_.emplace_back(block.get(), false);
    for (auto& user : users_)
      if (!std::exchange(user.second, true)) return user.first;
    std::abort();
  }

  int rank_;
  int size_;
  std::shared_ptr<ShmCommunicator> communicator_;
  std::array<std::shared_ptr<char>, 5> wire_;
  std::vector<std::pair<char*, bool>> users_;  // of wire_: whether an operation uses the block
};

// Runs `body` on every rank. The ranks meet once, when all have joined.
template <typename Body>
void on_ranks(int size, Limits limits, Body body) {
  const int fd = create_segment(size, chunk_bytes, false);
  pthread_barrier_t joined;
  pthread_barrier_init(&joined, nullptr, static_cast<unsigned>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      const std::string path = "/proc/self/fd/" + std::to_string(fd);
      Rank rank(::open(path.c_str(), O_RDWR | O_CLOEXEC), r, size, limits);
      pthread_barrier_wait(&joined);
      rank.communicator().count_cores();
      body(rank, r);
    });
  for (std::thread& thread : threads) thread.join();
  pthread_barrier_destroy(&joined);
  ::close(fd);
}

// The ranks run until one of them gives up; the others must say so, with one cause.
void one_leaves(int size, unsigned seed) {
  on_ranks(size, {60, 60}, [&](Rank& rank, int r) {
    try {
      rank.allocate_wire();
      rank.run(r == 0 ? 20 : 40, seed);
      require(r == 0, "rank " + std::to_string(r) + " went on without rank 0");
    } catch (const CommunicatorError& error) {
      require(error.kind() == ErrorKind::closed, error.what());
      require(std::string(error.what()).find("rank 0 (host host, pid 0) closed its communicator") == 0, error.what());
    }
    rank.communicator().close();
  });
}

// All find at the same time that they do not call the same.
void mismatch(int size, unsigned seed) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  on_ranks(size, {60, 60}, [&](Rank& rank, int r) {
    try {
      rank.allocate_wire();
      rank.run(40, seed + (r == 0 ? 1 : 0));
    } catch (const CommunicatorError& error) {
      require(error.kind() == ErrorKind::mismatch, error.what());
      texts[static_cast<std::size_t>(r)] = error.what();
    }
  });
  for (const std::string& text : texts)
    require(!text.empty() && text == texts[0], "the ranks give other causes: " + text);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  for (int round = 0; round < rounds; ++round)
    for (int size : {2, 3, 4}) {
      const unsigned seed = static_cast<unsigned>(100 * round + size);
      on_ranks(size, {60, 0.001}, [&](Rank& rank, int) {  // warns, and so reads what others do, at every long wait
        rank.allocate_wire();
        std::thread beside([&] { rank.exchange(4); });
        rank.run(100, seed);
        beside.join();
      });
      one_leaves(size, seed);
      mismatch(size, seed);
    }
  std::printf("%d rounds with 2, 3 and 4 ranks\n", rounds);
}

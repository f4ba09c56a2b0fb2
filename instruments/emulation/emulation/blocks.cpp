// Grids on one OS thread: every thread of a block is a fiber.
#undef _FORTIFY_SOURCE  // its longjmp takes another stack for a fault
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "entry.h"
#include "runtime.h"

thread_local uint3 threadIdx;
thread_local uint3 blockIdx;
thread_local dim3 blockDim;
thread_local dim3 gridDim;

namespace emulation {
namespace {

constexpr std::size_t stack_bytes = 128 << 10;

[[noreturn]] void die(const char* fact, const char* operation) {
  std::fprintf(stderr, "emulated kernel, block (%u, %u, %u), thread (%u, %u, %u): %s in %s\n", blockIdx.x, blockIdx.y,
               blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, fact, operation);
  std::abort();
}

// Lanes that meet: one call of __shfl_sync, for example. All lanes take part.
struct Warp {
  const char* operation = nullptr;
  unsigned arrived = 0, to_leave = 0;
  std::uint64_t values[32] = {};
};

// Contexts only start fibers: swapcontext would make two system calls at every switch.
struct Fiber {
  ucontext_t start{};
  jmp_buf state;
  bool started = false;
  void* stack = nullptr;
  unsigned thread = 0;     // number in the block
  bool suspended = false;  // in the middle of that thread

  Fiber() {
    stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) die("no memory for a stack", "mmap");
  }
  ~Fiber() { munmap(stack, stack_bytes); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
};

// The block that this OS thread runs. A fiber runs one thread after the other; only where a thread has to wait does the
// next one get another fiber, so that code without barriers never switches.
class Block {
 public:
  void run(unsigned threads, const std::function<void()>& body) {
    threads_ = alive_ = threads;
    next_ = arrived_ = 0;
    body_ = &body;
    warps_.assign((threads + 31) / 32, Warp());
    received_.resize(threads);
    for (; alive_; forward_ = !forward_) {
      const unsigned before = progress_;
      // Fibers in use are in ascending order of their threads. Each warp runs until it has to wait for others, in every
      // second round the last one first, so that a warp overtakes all others that no barrier holds back.
      const auto fiber = [&, used = used_](std::size_t i) -> Fiber& { return *fibers_[forward_ ? i : used - 1 - i]; };
      for (std::size_t i = 0, end = 0, used = used_; i < used; i = end) {
        unsigned seen;
        do {
          seen = progress_;
          for (end = i; end < used && fiber(end).thread / 32 == fiber(i).thread / 32; ++end) resume(fiber(end));
        } while (progress_ != seen);
      }
      while (next_ < threads_) {
        if (used_ == fibers_.size()) fibers_.push_back(std::make_unique<Fiber>());
        resume(*fibers_[used_]);
        if (fibers_[used_]->suspended) ++used_;
      }
      if (progress_ == before && alive_) die("the threads wait for each other", "a barrier or warp operation");
    }
    used_ = 0;
  }

  void barrier() {
    const unsigned generation = generation_;
    ++arrived_;
    ++progress_;
    release_if_complete();
    while (generation_ == generation) suspend();
  }

  const std::uint64_t* exchange(const char* operation, unsigned mask, std::uint64_t value) {
    const unsigned thread = current_->thread, lanes = std::min(threads_ - thread / 32 * 32, 32u);
    if (mask != 0xffffffff) die("a mask leaves lanes out", operation);
    Warp& warp = warps_[thread / 32];
    while (warp.to_leave) suspend();  // some have not seen the values of the meeting before
    if (warp.arrived && std::strcmp(warp.operation, operation) != 0)
      die("lanes meet in different operations", operation);
    warp.operation = operation;
    warp.values[thread % 32] = value;
    ++progress_;
    if (++warp.arrived == lanes) {
      warp.arrived = 0;
      warp.to_leave = lanes;
    }
    while (!warp.to_leave) suspend();
    std::memcpy(received_[thread].values, warp.values, sizeof warp.values);
    --warp.to_leave;
    return received_[thread].values;
  }

  unsigned lane() const { return current_->thread % 32; }

 private:
  struct Values {
    std::uint64_t values[32];
  };
  void release_if_complete() {
    if (!arrived_ || arrived_ < alive_) return;
    arrived_ = 0;
    ++generation_;
    ++progress_;
  }

  void resume(Fiber& fiber) {
    current_ = &fiber;
    if (fiber.suspended) {
      enter(fiber.thread);
    } else if (next_ == threads_) {
      return;
    }
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.started) _longjmp(fiber.state, 1);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack;
    fiber.start.uc_stack.ss_size = stack_bytes;
    makecontext(&fiber.start, &Block::fiber_main, 0);
    setcontext(&fiber.start);
  }

  void leave(Fiber& fiber) {
    if (_setjmp(fiber.state) == 0) _longjmp(scheduler_, 1);
  }

  void suspend() {
    Fiber& fiber = *current_;
    fiber.suspended = true;
    leave(fiber);
    fiber.suspended = false;
  }

  void enter(unsigned thread) const {
    threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y)};
  }

  void take_threads() {
    Fiber& fiber = *current_;
    for (;;) {
      while (next_ < threads_) {
        fiber.thread = next_++;
        enter(fiber.thread);
        (*body_)();
        --alive_;
        ++progress_;
        release_if_complete();
      }
      leave(fiber);  // until the next block
    }
  }

  static void fiber_main();

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::size_t used_ = 0;  // fibers that have been suspended in this block
  bool forward_ = true;   // the order of the warps
  jmp_buf scheduler_;
  Fiber* current_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  std::vector<Warp> warps_;
  std::vector<Values> received_;
  unsigned threads_ = 0, next_ = 0, alive_ = 0, progress_ = 0;
  unsigned arrived_ = 0, generation_ = 0;
};

Block& block() {
  thread_local Block block;
  return block;
}

void Block::fiber_main() { block().take_threads(); }

}  // namespace

void block_barrier() { block().barrier(); }

const std::uint64_t* warp_exchange(const char* operation, unsigned mask, std::uint64_t value) {
  return block().exchange(operation, mask, value);
}

unsigned lane() { return block().lane(); }

namespace {
// Runs the body once for every thread of the grid.
void run_grid(dim3 grid, dim3 block_size, const std::function<void()>& body) {
  static std::atomic<unsigned> launches{0};
  const bool forward = launches.fetch_add(1) % 2 == 0;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  gridDim = grid;
  blockDim = block_size;
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t b = forward ? i : blocks - 1 - i;
    blockIdx = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                static_cast<unsigned>(b / grid.x / grid.y)};
    block().run(block_size.x * block_size.y * block_size.z, body);
  }
}
}  // namespace

int launch(Stream* stream, dim3 grid, dim3 block, std::function<void()> body) {
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  const bool fits = threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x >= 1 && grid.x <= 0x7fffffff &&
                    grid.y >= 1 && grid.y <= 65535 && grid.z >= 1 && grid.z <= 65535;
  if (!fits) return static_cast<int>(invalid_value);
  make_context();
  return static_cast<int>(enqueue(stream, {[=] {
                                    run_grid(grid, block, body);
                                    return true;
                                  }}));
}

}  // namespace emulation

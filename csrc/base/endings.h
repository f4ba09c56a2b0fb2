// When the last collectives of a communicator ended on this rank.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace distopt {

// Pairs of a time in nanoseconds, by the clock that all processes of a host share, and a number of a collective plus
// one. They lie in memory that other processes read at any moment; distopt/flight.py gives and reads it.
class Endings {
 public:
  // The memory outlives this object. Without any, nothing is noted.
  void use(void* memory, std::size_t bytes) {
    words_ = static_cast<Word*>(memory);
    pairs_ = bytes / (2 * sizeof(Word));
  }

  void note(std::uint64_t number) {
    if (pairs_ == 0) return;
    Word* pair = words_ + 2 * (number % pairs_);
    const std::chrono::nanoseconds now = std::chrono::steady_clock::now().time_since_epoch();
    pair[0].store(static_cast<std::uint64_t>(now.count()), std::memory_order_relaxed);
    pair[1].store(number + 1, std::memory_order_release);
  }

 private:
  using Word = std::atomic<std::uint64_t>;
  Word* words_ = nullptr;
  std::size_t pairs_ = 0;
};

}  // namespace distopt

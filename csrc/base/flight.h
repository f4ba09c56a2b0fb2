// The flight record of a communicator, in memory that other processes read at any moment. distopt/recorder/ring.py
// allocates and reads this memory, and writes to it in the same layout.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace distopt {

class Flight {
 public:
  // Where its parts begin, in bytes.
  struct Layout {
    std::size_t counter;
    std::size_t records;
    std::size_t n_records;
    std::size_t group;  // the number of its last collective plus one, a word, and then the endings
    std::uint16_t index;
  };

  // The memory outlives this object. Without any, nothing is noted.
  void use(char* memory, const Layout& layout) {
    counter_ = reinterpret_cast<std::uint64_t*>(memory + layout.counter);
    records_ = reinterpret_cast<Record*>(memory + layout.records);
    group_ = reinterpret_cast<Word*>(memory + layout.group);
    n_records_ = layout.n_records;
    index_ = layout.index;
  }

  // A collective is about to start. Holds Python's lock, since all communicators of a process have one counter.
  void note(std::uint64_t number, std::uint64_t count, std::uint8_t kind, std::uint8_t dtype, std::uint32_t text) {
    if (n_records_ == 0) return;
    Record& record = records_[*counter_ % n_records_];
    record = {now(), number, count, text, index_, kind, dtype, *counter_ + 1};
    *counter_ += 1;
    group_[0].store(number + 1, std::memory_order_release);
  }

  // It has ended. Endings are pairs of a time and a number of a collective plus one.
  void note_end(std::uint64_t number) {
    if (n_records_ == 0) return;
    Word* pair = group_ + 2 + 2 * (number % n_records_);
    pair[0].store(now(), std::memory_order_relaxed);
    pair[1].store(number + 1, std::memory_order_release);
  }

 private:
  using Word = std::atomic<std::uint64_t>;
  struct Record {
    std::uint64_t at, number, count;
    std::uint32_t text;
    std::uint16_t group;
    std::uint8_t kind, dtype;
    std::uint64_t place;
  };
  static_assert(sizeof(Record) == 40);

  // In nanoseconds, by the clock that all processes of a host share.
  static std::uint64_t now() {
    const std::chrono::nanoseconds time = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(time.count());
  }

  std::uint64_t* counter_ = nullptr;
  Record* records_ = nullptr;
  Word* group_ = nullptr;
  std::size_t n_records_ = 0;
  std::uint16_t index_ = 0;
};

}  // namespace distopt

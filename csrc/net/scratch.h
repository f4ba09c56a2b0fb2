// Scratch memory, aligned to cache lines.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace distopt::net {

class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(std::size_t bytes) : data_(static_cast<char*>(::operator new(bytes, alignment))), bytes_(bytes) {}

  char* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr std::align_val_t alignment{64};
  struct Free {
    void operator()(char* data) const { ::operator delete(data, alignment); }
  };

  std::unique_ptr<char, Free> data_;
  std::size_t bytes_ = 0;
};

// Scratch memory of ended collectives, for later ones: fresh memory costs page faults.
class ScratchPool {
 public:
  Scratch take(std::size_t bytes) {
    for (std::size_t i = free_.size(); i-- > 0;) {
      if (free_[i].bytes() < bytes) continue;
      Scratch found = std::move(free_[i]);
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      return found;
    }
    if (!free_.empty()) free_.pop_back();  // too small for the current need
    return Scratch(bytes);
  }
  void give(Scratch memory) {
    if (memory.data() != nullptr) free_.push_back(std::move(memory));
  }
  std::size_t size() const { return free_.size(); }

 private:
  std::vector<Scratch> free_;
};

}  // namespace distopt::net

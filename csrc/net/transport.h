// Messages between the ranks of a communicator. An object is a channel of its own: what it sends, no other receives.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace distopt::net {

// Tags that every transport has: 0 ... tag_count - 1.
constexpr int tag_count = 1 << 15;

// `stream` is below Transport::streams().
struct Tag {
  int number;
  int stream = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Connections between any two ranks. Each keeps the order of its messages, and none that of another.
  virtual int streams() const { return 1; }
  // Both only start; `done` becomes true in a later poll. Data and `done` must stay where they are until then. Between
  // two ranks, messages of one tag arrive in the order of sending. Throws CommunicatorError.
  virtual void send(const char* data, std::size_t bytes, int to, Tag tag, bool& done) = 0;
  // `bytes` is the size of the buffer.
  virtual void receive(char* data, std::size_t bytes, int from, Tag tag, bool& done) = 0;
  // A rank that has sent a message of this tag, on stream 0, which no receive awaits; -1 if there is none.
  virtual int probe(int tag) = 0;
  // Moves bytes, as nothing else does; returns whether anything has ended.
  virtual bool poll() = 0;
  // Sleeps until bytes may have come, at most so long; false, and at once, if they would not wake it.
  virtual bool rest(double) { return false; }
  // Hands all that was sent to the operating system, which delivers it after the end of this process. Waits a moment.
  virtual void flush() {}
  // Ranks that the network has lost, as far as it knows.
  virtual std::vector<int> lost() const { return {}; }
  // Keeps what the network may still write to: for good, if the connections last as long as the process.
  virtual void keep(std::shared_ptr<void> memory) {
    static auto& kept = *new std::vector<std::shared_ptr<void>>;
    kept.push_back(std::move(memory));
  }
};

}  // namespace distopt::net

// Messages between the ranks of a communicator. An object is a channel of its own: what it sends, no other receives.
#pragma once

#include <cstddef>
#include <vector>

namespace distopt::net {

// Tags that every transport has: 0 ... tag_count - 1.
constexpr int tag_count = 1 << 15;

class Transport {
 public:
  virtual ~Transport() = default;

  // Both only start; `done` becomes true in a later poll. Data and `done` must stay where they are until then. Between
  // two ranks, messages of one tag arrive in the order of sending. Throws CommunicatorError.
  virtual void send(const char* data, std::size_t bytes, int to, int tag, bool& done) = 0;
  // `bytes` is the size of the buffer.
  virtual void receive(char* data, std::size_t bytes, int from, int tag, bool& done) = 0;
  // A rank that has sent a message of this tag which no receive awaits; -1 if there is none.
  virtual int probe(int tag) = 0;
  // Moves bytes, as nothing else does; returns whether anything has ended.
  virtual bool poll() = 0;
  // Hands all that was sent to the operating system, which delivers it after the end of this process. Waits a moment.
  virtual void flush() {}
  // Ranks that can no longer be reached, as far as the network knows.
  virtual std::vector<int> lost() const { return {}; }
};

}  // namespace distopt::net

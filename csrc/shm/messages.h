// Messages between two ranks of a host, apart from the collectives and from their order.
//
// Each rank streams what it sends to another through a ring of bytes of that pair: an envelope, then the data. So
// messages between two ranks arrive in the order of sending; a message that is not awaited yet is put aside, to
// delay no other. start(), test() and wait() move the bytes of all messages.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "base/turn.h"
#include "host/describe.h"

namespace distopt {

// A message that this rank sends or receives. Derived classes may keep the array alive.
class Message {
 public:
  static constexpr int anyone = -1;

  // `peer`: where to, or where from.
  Message(bool sends, int peer, std::int64_t tag, DType dtype, char* data, std::uint64_t count)
      : sends_(sends), peer_(peer), tag_(tag), dtype_(dtype), data_(data), count_(count) {}
  virtual ~Message() = default;
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  bool sends() const { return sends_; }
  int peer() const { return peer_; }
  std::int64_t tag() const { return tag_; }
  DType dtype() const { return dtype_; }
  char* data() const { return data_; }
  std::uint64_t count() const { return count_; }
  std::size_t bytes() const { return count_ * item_bytes(dtype_); }
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  // Whether it can receive what rank `from` has sent with this tag.
  bool takes(int from, std::int64_t tag) const { return tag == tag_ && (peer_ == from || peer_ == anyone); }
  // Called once it has been received, with the rank that sent it.
  void finish(int peer) {
    peer_ = peer;
    finished_.store(true, std::memory_order_release);
  }

 private:
  const bool sends_;
  int peer_;
  const std::int64_t tag_;
  const DType dtype_;
  char* const data_;
  const std::uint64_t count_;
  std::atomic<bool> finished_{false};
};

class Messages {
 public:
  // `require_open` throws where this rank may not send any more; `help_collectives` moves those that are under way.
  Messages(Segment& segment, Peers& peers, const Limits& limits, const Hooks& hooks, std::function<void()> require_open,
           std::function<void()> help_collectives);

  // All of these throw CommunicatorError, and may be called while another thread is in a collective. test() and
  // wait() throw the failure of any rank; start() does not.
  void start(std::shared_ptr<Message> message);
  bool test(const Message& message);
  void wait(const Message& message, double timeout_seconds);

  // Moves all messages for a rank that waits for something else, or polls it, unless another thread does; returns
  // whether any message is under way.
  bool help();

  // Forgets all messages under way. No thread moves one while the turn is held. Throws if another thread waits.
  Turn::Held close();

 private:
  class Wait;

  struct Envelope {
    std::int64_t tag;
    std::uint64_t count;
    std::uint32_t dtype;
  };
  // The messages to one rank, and how far they have been sent: envelope, then data.
  struct Outgoing {
    std::deque<std::shared_ptr<Message>> queue;
    std::size_t done = 0;
  };
  // Data that arrives from a rank: into a message that awaits it, or aside.
  struct Incoming {
    Envelope envelope{};
    bool begun = false;
    std::size_t done = 0;  // of the data
    std::shared_ptr<Message> into;
    std::unique_ptr<char[]> aside;

    std::size_t bytes() const { return envelope.count * item_bytes(static_cast<DType>(envelope.dtype)); }
  };
  struct Aside {
    int from;
    Envelope envelope;
    std::unique_ptr<char[]> data;
  };

  Turn::Held take_turn();
  void advance();
  bool push(int to);
  bool pull(int from);
  Incoming begin(int from, const Envelope& envelope);
  void await(const std::shared_ptr<Message>& message);
  void check(const Envelope& envelope, int from, const Message& message);
  void ring(int rank) const;
  bool listen(std::uint64_t heard, double seconds) const;
  void check_peers(const Message& message, double waited, Patience& patience);
  std::vector<int> awaited(const Message& message) const;
  std::string describe(const Message& message) const;

  Segment& segment_;
  Peers& peers_;
  const Limits& limits_;
  const Hooks& hooks_;
  std::function<void()> require_open_, help_collectives_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::deque<Aside> aside_;
  std::deque<std::shared_ptr<Message>> awaiting_;
  std::atomic<bool> under_way_{false};
  std::vector<std::thread::id> waiting_;  // a thread for each wait, in no order
  Turn turn_;
};

}  // namespace distopt

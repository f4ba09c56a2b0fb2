// How the ranks of fake_nccl.cpp exchange data: mailboxes in a file of shared memory.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_nccl_numbers.h"

namespace fake {

// As much as a rank sends at a time; the file has holes where nothing is written.
constexpr std::size_t mailbox_bytes = 1 << 24;

[[noreturn]] inline void die(const char* fact) {
  std::fprintf(stderr, "fake NCCL: %s\n", fact);
  std::abort();
}

enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast };

// Must be equal on all ranks.
struct Call {
  Kind kind;
  std::size_t count;
  DataType type;
  RedOp op;
  int root;
};
inline bool operator==(const Call& a, const Call& b) {
  return a.kind == b.kind && a.count == b.count && a.type == b.type && a.op == b.op && a.root == b.root;
}

using Counter = std::atomic<std::uint64_t>;

struct Mailbox {
  Counter written, read;  // collectives, or messages
  char data[mailbox_bytes];

  void write(const void* from, std::size_t n_bytes) {
    if (n_bytes > mailbox_bytes) die("a mailbox is too small");
    std::memcpy(data, from, n_bytes);
    ++written;
  }
};

struct Slot {
  Counter joined, connections;
  Call call;
  Mailbox mailbox;
};

// From one rank to another.
struct Pipe {
  Counter sender, receiver;  // whether they have connected
  Mailbox mailbox;
};

struct Channel {
  int rank = 0, size = 0;
  Slot* slots = nullptr;
  std::string path;
  std::atomic<bool> aborted{false};
  std::atomic<int> unfinished{0};
  std::uint64_t started = 0;  // collectives

  ~Channel() {
    if (slots != nullptr) ::munmap(slots, bytes());
  }
  std::size_t bytes() const {
    const auto n = static_cast<std::size_t>(size);
    return n * sizeof(Slot) + n * n * sizeof(Pipe);
  }
  Pipe& pipe(int from, int to) const { return reinterpret_cast<Pipe*>(slots + size)[from * size + to]; }
  const char* data_of(int r) const { return slots[r].mailbox.data; }
  template <class Condition>
  bool all(Condition condition) const {
    return std::all_of(slots, slots + size, condition);
  }
};

struct Queued {
  std::shared_ptr<Channel> channel;
  std::function<bool()> advance;  // whether it has ended
};

struct Task {
  Call call;
  const void* in;  // for the mailbox
  std::size_t in_bytes;
  std::function<void()> read;  // the mailboxes of all ranks
};

inline std::function<bool()> in_turn(Channel& channel, Task task) {
  return [&channel, task = std::move(task), written = false]() mutable {
    Slot& own = channel.slots[channel.rank];
    const std::uint64_t before = own.mailbox.read;
    if (!written) {
      if (!channel.all([=](const Slot& slot) { return slot.mailbox.read >= before; })) return false;
      own.call = task.call;
      own.mailbox.write(task.in, task.in_bytes);
      written = true;
    }
    if (!channel.all([=](const Slot& slot) { return slot.mailbox.written > before; })) return false;
    // If the calls differ it never ends, as the real one might not.
    if (!channel.all([&](const Slot& slot) { return slot.call == own.call; })) return false;
    task.read();
    ++own.mailbox.read;
    return true;
  };
}

// To or from a peer.
struct Message {
  char* data;
  std::size_t n_bytes;
  int peer;
  bool sends;
};

// The messages of one group, each as soon as its peer has come.
inline std::function<bool()> exchange(Channel& channel, std::vector<Message> messages) {
  return [&channel, messages = std::move(messages)]() mutable {
    const auto moves = [&channel](const Message& message) {
      Mailbox& mailbox =
          (message.sends ? channel.pipe(channel.rank, message.peer) : channel.pipe(message.peer, channel.rank)).mailbox;
      if ((mailbox.written == mailbox.read) != message.sends) return false;
      if (message.sends) {
        mailbox.write(message.data, message.n_bytes);
      } else {
        std::memcpy(message.data, mailbox.data, message.n_bytes);
        ++mailbox.read;
      }
      return true;
    };
    messages.erase(std::remove_if(messages.begin(), messages.end(), moves), messages.end());
    return messages.empty();
  };
}

}  // namespace fake

// How the ranks of fake_nccl.cpp exchange data: mailboxes in a file of shared memory.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_nccl_numbers.h"

namespace fake {

constexpr std::size_t mailbox_bytes = 1 << 16;

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

struct Slot {
  std::atomic<int> joined, connections;
  std::atomic<std::uint64_t> written, read;  // rounds
  Call call;
  char data[mailbox_bytes];
};

// From one rank to another.
struct Pipe {
  std::atomic<int> sender, receiver;         // whether they have connected
  std::atomic<std::uint64_t> written, read;  // messages
  char data[mailbox_bytes];
};

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
inline std::function<bool()> in_rounds(Channel& channel, Task task) {
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

// To or from a peer.
struct Message {
  char* data;
  std::size_t n_bytes;
  int peer;
  bool sends;
};

// The messages of one group: all move at once, each as far as its peer has come.
inline std::function<bool()> exchange(Channel& channel, std::vector<Message> messages) {
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

}  // namespace fake

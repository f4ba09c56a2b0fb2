// Messages through UCX, which is loaded at run time. All channels of a process share one worker, and those to one
// process share its connections.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "net/transport.h"
#include "net/ucx_api.h"

namespace distopt::net {

class UcxPeer;

// UCX moves bytes when it is called. A thread calls it where no other does, such as during a backward pass of PyTorch;
// it sleeps while a rank waits in a collective, which calls it all the time.
class UcxWorker : public std::enable_shared_from_this<UcxWorker> {
 public:
  // `options`: names, without their prefix, and values of UCX's variables. Throws CommunicatorError.
  UcxWorker(const std::string& library, const std::vector<std::pair<std::string, std::string>>& options);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  // Bytes by which other processes reach this one.
  const std::string& address() const { return address_; }
  const std::string& version() const { return api_.version; }
  // A channel between processes, whose addresses stand in the order of their ranks, with `streams` connections between
  // any two. `number` is equal on all of them, and belongs to no other channel of any.
  std::unique_ptr<Transport> open(std::uint64_t number, int rank, const std::vector<std::string>& addresses,
                                  int streams);
  // The longest time there and back, in seconds, that the operating system has measured on any connection; 0 if it has
  // measured none. It counts no time in which a process waits for a core.
  double longest_round_trip();
  // Hands all that was sent to the operating system, and ends the thread. To be called before the process ends.
  // `cuts`: all connections end without a wait for the other processes, which may be gone, and for good: nothing writes
  // to memory of its channels any more.
  void stop(bool cuts = false);

 private:
  friend class UcxPeer;
  friend class UcxTransport;

  // The lock. Throws in a forked child, where another thread of the parent may hold it for ever.
  std::unique_lock<std::mutex> entered();
  std::shared_ptr<UcxPeer> reach(const std::string& address, int stream);
  // With the lock held.
  void progress();
  void finish(const std::vector<void*>& requests);  // waits for them, a moment, and frees them
  void begin_to_move();

  // Without it. Sleeps until bytes may move, at most so long.
  void rest(double seconds);

  void move_unattended();
  void check(ucx::Status status, const char* action) const;

  const ucx::Api& api_;
  ucx::Context* context_ = nullptr;
  ucx::Worker* worker_ = nullptr;
  std::string address_;
  int event_ = -1;  // readable when bytes may move
  // They stay until they fail: if one process closed a connection that the other one still uses, the next channel of
  // both would begin with a broken one.
  std::map<std::pair<std::string, int>, std::shared_ptr<UcxPeer>> peers_;  // by address and stream
  std::mutex mutex_;  // of the worker, and of all that its callbacks write
  std::thread thread_;
  std::condition_variable wanted_;            // by the thread, which sleeps while nothing moves
  bool sleeps_ = false, stops_ = false;       // the thread
  bool is_cut_ = false;                       // all connections have ended
  std::vector<std::shared_ptr<void>> kept_;   // the network may write to it until then, and UCX's requests may
  std::atomic<std::int64_t> attended_ns_{0};  // when a rank called UCX last
  std::size_t n_under_way_ = 0;               // requests of all channels
  bool has_ended_ = false;                    // one of them, in the last progress
  int resting_ = 0;                           // threads in rest()
  std::int64_t moved_ns_ = 0;                 // when a request began last
  std::int64_t marked_ns_ = 0;                // when the thread looked last for new sockets
  const ForkGuard fork_guard_;
};

}  // namespace distopt::net

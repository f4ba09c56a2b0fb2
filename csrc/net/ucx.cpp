#include "net/ucx.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "base/errors.h"
#include "base/tick.h"

namespace distopt::net {
namespace {

// A tag of UCX: number of the channel, stream, rank of the sender, tag.
constexpr int tag_bits = 15, rank_bits = 13, stream_bits = 4;
constexpr std::uint64_t rank_mask = ((std::uint64_t{1} << rank_bits) - 1) << tag_bits;

// The thread begins to move bytes when no rank has for so long, and looks again after as long.
constexpr std::int64_t unattended_ns = 500'000;
// It looks at least so often whether the worker stops.
constexpr int longest_poll_ms = 10;
// With nothing under way and nothing begun for so long, it sleeps until something begins.
constexpr std::int64_t idle_ns = 50'000'000;
// Programs that a rank starts must not have its sockets, either; new ones are looked for after so long.
constexpr std::int64_t mark_ns = 500'000'000;
// For messages that are still on their way when a connection closes.
constexpr double flush_seconds = 1.0;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

thread_local bool is_helper = false;  // the thread of a worker

// Calls `act` with each descriptor that an epoll descriptor watches, in depth, and at last with itself. Allocates
// nothing, because it runs in forked children.
template <typename Act>
void for_each_watched(int epoll, Act act) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fdinfo/%d", epoll);
  const int info = ::open(path, O_RDONLY | O_CLOEXEC);
  if (info < 0) return;
  char text[4096];
  std::size_t kept = 0;  // of an unfinished line
  for (ssize_t got; (got = ::read(info, text + kept, sizeof text - 1 - kept)) > 0;) {
    text[kept + static_cast<std::size_t>(got)] = 0;
    char* line = text;
    for (char* end; (end = std::strchr(line, '\n')) != nullptr; line = end + 1)
      if (std::strncmp(line, "tfd:", 4) == 0)
        for_each_watched(static_cast<int>(std::strtol(line + 4, nullptr, 10)), act);
    kept = std::strlen(line);
    if (kept >= sizeof text - 1) kept = 0;
    std::memmove(text, line, kept);
  }
  ::close(info);
  act(epoll);
}

// A forked child has copies of a rank's sockets. While it lives, such as a worker of a DataLoader, the end of the rank
// would close none of them, and no other rank would notice it. UCX does not say which they are; but it watches them.
class Sockets {
 public:
  static void add(int event) {
    const std::lock_guard<std::mutex> lock(all().mutex);
    all().events.push_back(event);
  }
  static void remove(int event) {
    const std::lock_guard<std::mutex> lock(all().mutex);
    auto& events = all().events;
    events.erase(std::remove(events.begin(), events.end(), event), events.end());
  }

 private:
  struct All {
    std::mutex mutex;
    std::vector<int> events;
  };

  static All& all() {
    static All& made = *new All;
    static const int registered = ::pthread_atfork([] { made.mutex.lock(); }, [] { made.mutex.unlock(); },
                                                   [] {
                                                     for (const int event : made.events)
                                                       for_each_watched(event, ::close);
                                                     made.events.clear();
                                                     made.mutex.unlock();
                                                   });
    (void)registered;
    return made;
  }
};

}  // namespace

// A connection to one process, which all channels to it share.
class UcxPeer {
 public:
  UcxPeer(UcxWorker& worker, const std::string& address) : worker_(worker) {
    ucx::EndpointParams params;
    params.address = reinterpret_cast<const ucx::Address*>(address.data());
    params.on_error = [](void* peer, ucx::Endpoint*, ucx::Status status) {
      static_cast<UcxPeer*>(peer)->failure_ = status;
    };
    params.argument = this;
    worker_.check(worker_.api_.ep_create(worker_.worker_, &params, &endpoint_), "connect");
  }
  UcxPeer(const UcxPeer&) = delete;
  UcxPeer& operator=(const UcxPeer&) = delete;
  ~UcxPeer() {
    if (worker_.fork_guard_.forked()) return;
    const std::lock_guard<std::mutex> lock(worker_.mutex_);
    close(failure_ != ucx::ok);
  }

  // With the lock held; idempotent.
  void close(bool by_force) {
    if (endpoint_ == nullptr) return;
    ucx::RequestParams params;
    if (by_force) {
      params.fields = ucx::RequestParams::with_flags;
      params.flags = ucx::close_by_force;
      failure_ = failure_ == ucx::ok ? ucx::not_connected : failure_;
    }
    worker_.finish({worker_.api_.ep_close(std::exchange(endpoint_, nullptr), &params)});
  }

  // Begins to hand over what was sent.
  void* flush() const {
    const ucx::RequestParams params;
    return failure_ == ucx::ok ? worker_.api_.ep_flush(endpoint_, &params) : nullptr;
  }

  ucx::Endpoint* endpoint() const { return endpoint_; }
  // The reason why it cannot be reached any more; ok before.
  ucx::Status failure() const { return failure_; }

 private:
  UcxWorker& worker_;
  ucx::Endpoint* endpoint_ = nullptr;
  ucx::Status failure_ = ucx::ok;
};

// Once a peer is lost, sends to it end as if they had succeeded, and receives from it stay under way: `lost` tells.
class UcxTransport final : public Transport {
 public:
  UcxTransport(std::shared_ptr<UcxWorker> worker, std::uint64_t number, int rank,
               const std::vector<std::string>& addresses, int streams)
      : worker_(std::move(worker)), number_(number), rank_(rank), streams_(streams), peers_(addresses.size()) {
    for (std::size_t i = 0; i < addresses.size(); ++i)
      for (int stream = 0; stream < streams && static_cast<int>(i) != rank; ++stream)
        peers_[i].push_back(worker_->reach(addresses[i], stream));
  }
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;
  ~UcxTransport() override {
    if (worker_->fork_guard_.forked()) return;
    const std::lock_guard<std::mutex> lock(worker_->mutex_);
    // UCX may read and write their memory until then. What cannot be cancelled is on its way, and short.
    if (!worker_->is_cut_)
      for (const auto& one : under_way_)
        if (!one->ended) worker_->api_.request_cancel(worker_->worker_, one->request);
    const std::int64_t end = now_ns() + static_cast<std::int64_t>(flush_seconds * 1e9);
    while (!worker_->is_cut_ && !under_way_.empty() && now_ns() < end) {
      worker_->progress();
      while (!under_way_.empty() && under_way_.front()->ended) under_way_.pop_front();
    }
    for (auto& one : under_way_) worker_->kept_.push_back(std::move(one));
  }

  int streams() const override { return streams_; }

  void send(const char* data, std::size_t bytes, int to, Tag tag, bool& done) override {
    const auto lock = worker_->entered();
    const UcxPeer& peer = *peers_[static_cast<std::size_t>(to)][static_cast<std::size_t>(tag.stream)];
    ucx::RequestParams params;
    params.sent = [](void* request, ucx::Status status, void* argument) { end(request, status, argument); };
    if (peer.failure() == ucx::ok)
      post(done, false, params,
           [&] { return worker_->api_.tag_send(peer.endpoint(), data, bytes, wide(rank_, tag), &params); });
    else
      done = true;
  }

  void receive(char* data, std::size_t bytes, int from, Tag tag, bool& done) override {
    const auto lock = worker_->entered();
    ucx::RequestParams params;
    params.received = [](void* request, ucx::Status status, const ucx::TagInfo*, void* argument) {
      end(request, status, argument);
    };
    post(done, true, params, [&] {
      return worker_->api_.tag_receive(worker_->worker_, data, bytes, wide(from, tag), ~std::uint64_t{0}, &params);
    });
  }

  int probe(int tag) override {
    const auto lock = worker_->entered();
    worker_->progress();
    ucx::TagInfo info{};
    if (worker_->api_.tag_probe(worker_->worker_, wide(0, {tag}), ~rank_mask, 0, &info) == nullptr) return -1;
    return static_cast<int>((info.tag & rank_mask) >> tag_bits);
  }

  bool poll() override {
    const auto lock = worker_->entered();
    if (!is_helper) worker_->attended_ns_.store(now_ns(), std::memory_order_relaxed);
    worker_->progress();
    bool any = false;
    for (const auto& one : under_way_) {
      if (!one->ended || one->done == nullptr) continue;
      if (one->status != ucx::ok && !one->is_lost)
        throw CommunicatorError(ErrorKind::transport,
                                std::string("UCX failed: ") + worker_->api_.status_string(one->status));
      if (!one->is_lost || !one->receives) *one->done = true;
      one->done = nullptr;
      any = true;
    }
    while (!under_way_.empty() && under_way_.front()->done == nullptr) under_way_.pop_front();
    return any;
  }

  bool rest(double seconds) override {
    worker_->rest(seconds);
    return true;
  }

  void flush() override {
    const auto lock = worker_->entered();
    std::vector<void*> requests;
    for (const auto& streams : peers_)
      for (const auto& peer : streams) requests.push_back(peer->flush());
    worker_->finish(requests);
  }

  void keep(std::shared_ptr<void> memory) override {
    if (worker_->fork_guard_.forked()) return Transport::keep(std::move(memory));
    const std::lock_guard<std::mutex> lock(worker_->mutex_);
    if (!worker_->is_cut_) worker_->kept_.push_back(std::move(memory));
  }

  std::vector<int> lost() const override {
    const auto lock = worker_->entered();
    std::vector<int> ranks;
    for (std::size_t i = 0; i < peers_.size(); ++i)
      if (std::any_of(peers_[i].begin(), peers_[i].end(), [](const auto& peer) { return peer->failure() != ucx::ok; }))
        ranks.push_back(static_cast<int>(i));
    return ranks;
  }

 private:
  struct UnderWay {
    UcxWorker* worker;
    bool* done;  // nullptr: it has been set
    void* request = nullptr;
    bool receives = false, ended = false, is_lost = false;
    ucx::Status status = ucx::ok;
  };

  static void end(void* request, ucx::Status status, void* argument) {
    auto& one = *static_cast<UnderWay*>(argument);
    one.ended = true;
    one.status = status;
    one.is_lost = ucx::is_connection_failure(status);
    --one.worker->n_under_way_;
    one.worker->has_ended_ = true;
    one.worker->api_.request_free(request);
  }

  template <typename Start>
  void post(bool& done, bool receives, ucx::RequestParams& params, Start start) {
    done = false;
    auto one = std::make_unique<UnderWay>();
    one->worker = worker_.get();
    one->done = &done;
    one->receives = receives;
    params.fields = ucx::RequestParams::with_callback | ucx::RequestParams::with_argument;
    params.argument = one.get();
    one->request = start();
    if (ucx::is_request(one->request)) {
      under_way_.push_back(std::move(one));
      worker_->begin_to_move();
      return;
    }
    const ucx::Status status = ucx::status_of(one->request);
    if (status != ucx::ok && !ucx::is_connection_failure(status)) worker_->check(status, "send or receive");
    done = true;
  }

  std::uint64_t wide(int rank, Tag tag) const {
    const std::uint64_t channel = number_ << stream_bits | static_cast<std::uint64_t>(tag.stream);
    return channel << (tag_bits + rank_bits) | static_cast<std::uint64_t>(rank) << tag_bits |
           static_cast<std::uint64_t>(tag.number);
  }

  const std::shared_ptr<UcxWorker> worker_;
  const std::uint64_t number_;
  const int rank_, streams_;
  std::vector<std::vector<std::shared_ptr<UcxPeer>>> peers_;  // by rank and stream
  std::deque<std::unique_ptr<UnderWay>> under_way_;
};

UcxWorker::UcxWorker(const std::string& library, const std::vector<std::pair<std::string, std::string>>& options)
    : api_(ucx::load(library)) {
  ucx::Config* config = nullptr;
  check(api_.config_read(nullptr, nullptr, &config), "read its settings");
  for (const auto& [name, value] : options) check(api_.config_modify(config, name.c_str(), value.c_str()), "set");
  const ucx::ContextParams params;
  const ucx::Status status = api_.init(1, 12, &params, config, &context_);
  api_.config_release(config);
  check(status, "begin");
  const ucx::WorkerParams worker_params;
  check(api_.worker_create(context_, &worker_params, &worker_), "make a worker");
  check(api_.worker_get_efd(worker_, &event_), "wake a thread");
  Sockets::add(event_);
  ucx::Address* address = nullptr;
  std::size_t bytes = 0;
  check(api_.worker_get_address(worker_, &address, &bytes), "give its address");
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  api_.worker_release_address(worker_, address);
  thread_ = std::thread([this] { move_unattended(); });
}

UcxWorker::~UcxWorker() {
  if (fork_guard_.forked()) {  // neither the thread nor the connections are this process's
    if (thread_.joinable()) thread_.detach();
    return;
  }
  stop();
  peers_.clear();
  Sockets::remove(event_);
  if (worker_ != nullptr) api_.worker_destroy(worker_);
  if (context_ != nullptr) api_.cleanup(context_);
}

void UcxWorker::stop(bool cuts) {
  if (fork_guard_.forked()) return;
  std::vector<std::shared_ptr<void>> kept;  // destroyed without the lock, which channels take
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<void*> requests;
    for (const auto& [key, peer] : peers_) requests.push_back(peer->flush());
    finish(requests);
    stops_ = true;
    if (cuts) {
      for (const auto& [key, peer] : peers_) peer->close(true);
      is_cut_ = true;
      kept.swap(kept_);
    }
    wanted_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void UcxWorker::check(ucx::Status status, const char* action) const {
  if (status == ucx::ok) return;
  throw CommunicatorError(ErrorKind::transport,
                          std::string("UCX cannot ") + action + ": " + api_.status_string(status));
}

std::unique_lock<std::mutex> UcxWorker::entered() {
  if (fork_guard_.forked())
    throw CommunicatorError(ErrorKind::usage, "this process was forked from a rank, whose connections are not its own",
                            "use the communicator in the parent only");
  return std::unique_lock<std::mutex>(mutex_);
}

void UcxWorker::progress() {
  has_ended_ = false;
  // Not on and on while bytes come: the next chunk arrives while this one is reduced.
  while (!has_ended_ && api_.worker_progress(worker_) != 0) {
  }
  // It may be what another thread waits for, and the bytes that would have woken it are gone.
  if (has_ended_ && resting_ != 0) api_.worker_signal(worker_);
}

void UcxWorker::finish(const std::vector<void*>& requests) {
  const std::int64_t end = now_ns() + static_cast<std::int64_t>(flush_seconds * 1e9);
  for (void* const request : requests) {
    if (!ucx::is_request(request)) continue;
    while (api_.request_check(request) == ucx::in_progress && now_ns() < end) progress();
    api_.request_free(request);
  }
}

void UcxWorker::begin_to_move() {
  ++n_under_way_;
  moved_ns_ = now_ns();
  if (sleeps_) wanted_.notify_all();
}

double UcxWorker::longest_round_trip() {
  const auto lock = entered();
  std::uint32_t longest_us = 0;
  for_each_watched(event_, [&longest_us](int socket) {
    tcp_info info{};
    socklen_t bytes = sizeof info;
    const bool is_known = ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 && info.tcpi_min_rtt != ~0U;
    if (is_known) longest_us = std::max(longest_us, info.tcpi_min_rtt);
  });
  return longest_us * 1e-6;
}

void UcxWorker::rest(double seconds) {
  auto lock = entered();
  if (api_.worker_arm(worker_) != ucx::ok) return;  // there is something to do
  ++resting_;
  lock.unlock();
  pollfd waited{event_, POLLIN, 0};
  const auto ns = static_cast<std::int64_t>(seconds * 1e9);
  const timespec longest{ns / 1'000'000'000, ns % 1'000'000'000};
  ::ppoll(&waited, 1, &longest, nullptr);
  lock.lock();
  --resting_;
  attended_ns_.store(now_ns(), std::memory_order_relaxed);
}

void UcxWorker::move_unattended() {
  is_helper = true;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stops_) {
    const bool is_idle = n_under_way_ == 0 && now_ns() - moved_ns_ > idle_ns;
    if (is_idle || now_ns() - marked_ns_ > mark_ns) {
      marked_ns_ = now_ns();
      for_each_watched(event_, [](int socket) { ::fcntl(socket, F_SETFD, FD_CLOEXEC); });
    }
    if (is_idle) {
      sleeps_ = true;
      wanted_.wait(lock, [this] { return stops_ || n_under_way_ != 0; });
      sleeps_ = false;
      continue;
    }
    if (resting_ == 0 && now_ns() - attended_ns_.load(std::memory_order_relaxed) > unattended_ns) {
      progress();
      lock.unlock();
      tick();  // the communicators send and reduce what may follow
      lock.lock();
      if (api_.worker_arm(worker_) == ucx::ok) {
        lock.unlock();
        pollfd waited{event_, POLLIN, 0};
        ::poll(&waited, 1, longest_poll_ms);
        lock.lock();
        continue;
      }
    }
    wanted_.wait_for(lock, std::chrono::nanoseconds(unattended_ns));
  }
}

std::shared_ptr<UcxPeer> UcxWorker::reach(const std::string& address, int stream) {
  std::vector<std::shared_ptr<UcxPeer>> failed;  // destroyed without the lock, which the destructor takes
  const auto lock = entered();
  progress();  // notices processes that have ended
  for (auto one = peers_.begin(); one != peers_.end();) {
    if (one->second->failure() == ucx::ok) {
      ++one;
      continue;
    }
    failed.push_back(std::move(one->second));
    one = peers_.erase(one);
  }
  const std::pair key{address, stream};
  std::shared_ptr<UcxPeer>& peer = peers_[key];
  if (!peer) {
    try {
      peer = std::make_shared<UcxPeer>(*this, address);
    } catch (...) {
      peers_.erase(key);
      throw;
    }
  }
  return peer;
}

std::unique_ptr<Transport> UcxWorker::open(std::uint64_t number, int rank, const std::vector<std::string>& addresses,
                                           int streams) {
  return std::make_unique<UcxTransport>(shared_from_this(), number, rank, addresses, streams);
}

}  // namespace distopt::net

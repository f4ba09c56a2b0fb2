// The part of UCX that is used: own declarations. libucp is loaded at run time, so that building needs no UCX. They
// hold from 1.12 on; tests/unit/test_native_abi.py compares them with ucp.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace distopt::net::ucx {

// All opaque.
struct Config;
struct Context;
struct Worker;
struct Endpoint;
struct Address;
struct Message;

using Status = int;
constexpr Status ok = 0, in_progress = 1, unreachable = -6, canceled = -16, not_connected = -24, connection_reset = -25,
                 first_link_failure = -40, last_endpoint_failure = -89, last_error = -100;

// An endpoint that fails refuses sends as canceled until its error handler has run.
inline bool is_connection_failure(Status status) {
  return status == unreachable || status == canceled || status == not_connected || status == connection_reset ||
         (status <= first_link_failure && status >= last_endpoint_failure);
}

// A pointer that is a request, or a status.
inline bool is_request(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) - 1 < static_cast<std::uintptr_t>(last_error) - 1;
}
inline Status status_of(const void* pointer) { return static_cast<Status>(reinterpret_cast<std::intptr_t>(pointer)); }

// Every structure says which of its fields are set; later versions append fields.
struct ContextParams {
  std::uint64_t fields = 1 << 0 | 1 << 5;
  std::uint64_t features = 1 << 0 | 1 << 4;  // messages with tags, and wake-ups
  std::size_t request_bytes = 0;
  void (*request_init)(void*) = nullptr;
  void (*request_cleanup)(void*) = nullptr;
  std::uint64_t tag_sender_mask = 0;
  int workers_are_shared = 0;
};

struct WorkerParams {
  std::uint64_t fields = 1 << 0;
  int thread_mode = 1;  // serialized: several threads, one at a time
  alignas(8) char unused[256] = {};
};

struct EndpointParams {
  std::uint64_t fields = 1 << 0 | 1 << 1 | 1 << 2;
  const Address* address = nullptr;
  int error_mode = 1;  // of the peer are reported
  void (*on_error)(void* argument, Endpoint*, Status) = nullptr;
  void* argument = nullptr;
  alignas(8) char unused[256] = {};
};

struct TagInfo {
  std::uint64_t tag;
  std::size_t bytes;
};

struct RequestParams {
  static constexpr std::uint32_t with_callback = 1 << 1, with_argument = 1 << 2, with_flags = 1 << 4;

  std::uint32_t fields = 0;
  std::uint32_t flags = 0;
  void* request = nullptr;
  union {
    void (*sent)(void* request, Status, void* argument);
    void (*received)(void* request, Status, const TagInfo*, void* argument);
  };
  std::uint64_t datatype = 0;
  void* argument = nullptr;
  alignas(8) char unused[128] = {};

  RequestParams() : sent(nullptr) {}
};

constexpr std::uint32_t close_by_force = 1 << 0;

// X(field, symbol, result, parameters)
#define DISTOPT_UCX(X)                                                                                             \
  X(get_version, ucp_get_version, void, (unsigned*, unsigned*, unsigned*))                                         \
  X(config_read, ucp_config_read, Status, (const char*, const char*, Config**))                                    \
  X(config_modify, ucp_config_modify, Status, (Config*, const char*, const char*))                                 \
  X(config_release, ucp_config_release, void, (Config*))                                                           \
  X(init, ucp_init_version, Status, (unsigned, unsigned, const ContextParams*, const Config*, Context**))          \
  X(cleanup, ucp_cleanup, void, (Context*))                                                                        \
  X(worker_create, ucp_worker_create, Status, (Context*, const WorkerParams*, Worker**))                           \
  X(worker_destroy, ucp_worker_destroy, void, (Worker*))                                                           \
  X(worker_get_address, ucp_worker_get_address, Status, (Worker*, Address**, std::size_t*))                        \
  X(worker_release_address, ucp_worker_release_address, void, (Worker*, Address*))                                 \
  X(worker_progress, ucp_worker_progress, unsigned, (Worker*))                                                     \
  X(worker_get_efd, ucp_worker_get_efd, Status, (Worker*, int*))                                                   \
  X(worker_arm, ucp_worker_arm, Status, (Worker*))                                                                 \
  X(worker_signal, ucp_worker_signal, Status, (Worker*))                                                           \
  X(ep_create, ucp_ep_create, Status, (Worker*, const EndpointParams*, Endpoint**))                                \
  X(ep_close, ucp_ep_close_nbx, void*, (Endpoint*, const RequestParams*))                                          \
  X(ep_flush, ucp_ep_flush_nbx, void*, (Endpoint*, const RequestParams*))                                          \
  X(tag_send, ucp_tag_send_nbx, void*, (Endpoint*, const void*, std::size_t, std::uint64_t, const RequestParams*)) \
  X(tag_receive, ucp_tag_recv_nbx, void*,                                                                          \
    (Worker*, void*, std::size_t, std::uint64_t, std::uint64_t, const RequestParams*))                             \
  X(tag_probe, ucp_tag_probe_nb, Message*, (Worker*, std::uint64_t, std::uint64_t, int, TagInfo*))                 \
  X(request_check, ucp_request_check_status, Status, (void*))                                                      \
  X(request_cancel, ucp_request_cancel, void, (Worker*, void*))                                                    \
  X(request_free, ucp_request_free, void, (void*))                                                                 \
  X(status_string, ucs_status_string, const char*, (Status))

struct Api {
#define DISTOPT_UCX_FIELD(field, symbol, result, parameters) result(*field) parameters = nullptr;
  DISTOPT_UCX(DISTOPT_UCX_FIELD)
#undef DISTOPT_UCX_FIELD
  std::string version;
};

// Loads libucp at an absolute path; it is never unloaded. Throws CommunicatorError with the reason.
const Api& load(const std::string& path);

}  // namespace distopt::net::ucx

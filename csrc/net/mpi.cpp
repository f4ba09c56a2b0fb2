#include "net/mpi.h"

#include <dlfcn.h>

#include <climits>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/errors.h"

namespace distopt::net {
namespace {

[[noreturn]] void fail(const std::string& text) { throw CommunicatorError(ErrorKind::other, text); }

template <typename Handle>
class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(const MpiLibrary& library)
      : status_bytes_(library.status_bytes), source_offset_(library.source_offset), any_source_(library.any_source) {
    std::memcpy(&communicator_, library.communicator, sizeof(Handle));
    std::memcpy(&byte_, library.byte, sizeof(Handle));
    // The module is loaded already. Names are looked up in it and its libraries: there may be a second MPI library in
    // the process.
    void* module = ::dlopen(library.module.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (module == nullptr) fail(library.module + " is not loaded");
    find(module, "MPI_Isend", isend_);
    find(module, "MPI_Irecv", irecv_);
    find(module, "MPI_Iprobe", iprobe_);
    find(module, "MPI_Testsome", testsome_);
    find(module, "MPI_Error_string", error_string_);
  }

  void send(const char* data, std::size_t bytes, int to, Tag tag, bool& done) override {
    Handle request;
    check(isend_(data, count_of(bytes), byte_, to, tag.number, communicator_, &request));
    keep(request, done);
  }

  void receive(char* data, std::size_t bytes, int from, Tag tag, bool& done) override {
    Handle request;
    check(irecv_(data, count_of(bytes), byte_, from, tag.number, communicator_, &request));
    keep(request, done);
  }

  int probe(int tag) override {
    int has_arrived = 0;
    std::vector<char> status(status_bytes_);
    check(iprobe_(any_source_, tag, communicator_, &has_arrived, status.data()));
    if (has_arrived == 0) return -1;
    int source = 0;
    std::memcpy(&source, status.data() + source_offset_, sizeof source);
    return source;
  }

  bool poll() override {
    if (requests_.empty()) return false;
    int ended = 0;
    ended_.resize(requests_.size());
    statuses_.resize(requests_.size() * status_bytes_);
    check(testsome_(static_cast<int>(requests_.size()), requests_.data(), &ended, ended_.data(), statuses_.data()));
    if (ended <= 0) return false;
    for (int i = 0; i < ended; ++i) {
      bool*& done = done_[static_cast<std::size_t>(ended_[i])];
      *done = true;
      done = nullptr;
    }
    std::size_t left = 0;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (done_[i] == nullptr) continue;
      requests_[left] = requests_[i];
      done_[left++] = done_[i];
    }
    requests_.resize(left);
    done_.resize(left);
    return true;
  }

 private:
  template <typename Function>
  static void find(void* module, const char* symbol, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(module, symbol));
    if (function == nullptr) fail(std::string("the MPI library of mpi4py has no ") + symbol);
  }

  static int count_of(std::size_t bytes) {
    if (bytes > INT_MAX) fail("a message of " + std::to_string(bytes) + " bytes is too long for MPI");
    return static_cast<int>(bytes);
  }

  void keep(Handle request, bool& done) {
    done = false;
    requests_.push_back(request);
    done_.push_back(&done);
  }

  void check(int code) const {
    if (code == 0) return;  // MPI_SUCCESS of every library
    char text[4096] = "";   // more than any library's MPI_MAX_ERROR_STRING
    int length = 0;
    error_string_(code, text, &length);
    throw CommunicatorError(ErrorKind::transport, std::string("MPI failed: ") + text);
  }

  int (*isend_)(const void*, int, Handle, int, int, Handle, Handle*) = nullptr;
  int (*irecv_)(void*, int, Handle, int, int, Handle, Handle*) = nullptr;
  int (*iprobe_)(int, int, Handle, int*, void*) = nullptr;
  int (*testsome_)(int, Handle*, int*, int*, void*) = nullptr;
  int (*error_string_)(int, char*, int*) = nullptr;
  Handle communicator_, byte_;
  std::size_t status_bytes_, source_offset_;
  int any_source_;
  std::vector<Handle> requests_;
  std::vector<bool*> done_;  // of each request
  std::vector<int> ended_;
  std::vector<char> statuses_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const MpiLibrary& library) {
  if (library.handle_bytes == sizeof(int)) return std::make_unique<MpiTransport<int>>(library);
  if (library.handle_bytes == sizeof(void*)) return std::make_unique<MpiTransport<void*>>(library);
  fail("handles of " + std::to_string(library.handle_bytes) + " bytes belong to no MPI library that is known");
}

}  // namespace distopt::net

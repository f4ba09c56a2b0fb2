// Messages between ranks, through the MPI library that mpi4py has loaded. Building needs no MPI.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace distopt::mpi {

// The MPI library, as mpi4py describes it. Handles differ between libraries: MPICH's are ints, Open MPI's are pointers.
struct Library {
  std::string module;                  // path of the extension module mpi4py.MPI, which is linked with the library
  const void* communicator = nullptr;  // address of the handle of a communicator that carries nothing else
  const void* byte = nullptr;          // address of the handle of MPI_BYTE
  std::size_t handle_bytes = 0;
  std::size_t status_bytes = 0;  // of an MPI_Status
};

// Tags that every MPI library has: 0 ... tag_count - 1.
constexpr int tag_count = 1 << 15;

class Transport {
 public:
  virtual ~Transport() = default;

  // Both only start; `done` becomes true in a later poll. Data and `done` must stay where they are until then. Between
  // two ranks, messages of one tag arrive in the order of sending. Throws CommunicatorError.
  virtual void send(const char* data, std::size_t bytes, int to, int tag, bool& done) = 0;
  // `bytes` is the size of the buffer.
  virtual void receive(char* data, std::size_t bytes, int from, int tag, bool& done) = 0;
  // Lets MPI move bytes, as nothing else does; returns whether anything has ended.
  virtual bool poll() = 0;
};

// Throws CommunicatorError if the library cannot be used.
std::unique_ptr<Transport> make_transport(const Library& library);

}  // namespace distopt::mpi

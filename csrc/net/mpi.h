// Messages through the MPI library that mpi4py has loaded. Building needs no MPI.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "net/transport.h"

namespace distopt::net {

// The MPI library, as mpi4py describes it. Handles differ between libraries: MPICH's are ints, Open MPI's are pointers.
struct MpiLibrary {
  std::string module;                  // path of the extension module mpi4py.MPI, which is linked with the library
  const void* communicator = nullptr;  // address of the handle of a communicator that carries nothing else
  const void* byte = nullptr;          // address of the handle of MPI_BYTE
  std::size_t handle_bytes = 0;
  std::size_t status_bytes = 0;   // of an MPI_Status
  std::size_t source_offset = 0;  // of MPI_SOURCE in it
  int any_source = 0;
};

// Throws CommunicatorError if the library cannot be used.
std::unique_ptr<Transport> make_mpi_transport(const MpiLibrary& library);

}  // namespace distopt::net

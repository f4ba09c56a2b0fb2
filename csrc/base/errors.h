// The errors of communicators, with the fields of those of distopt.errors.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"

namespace distopt {

// The kind of a failure of a communicator; the binding turns each into the class of distopt.errors of that name.
enum class ErrorKind : int { other, usage, launch, closed, peer_lost, stalled, mismatch, memory, transport };

// A rank, and where it runs.
struct Process {
  int rank;  // in the job
  std::string host;
  int pid;

  // How messages call it.
  std::string name() const {
    return "rank " + std::to_string(rank) + " (host " + host + ", pid " + std::to_string(pid) + ")";
  }
};

// The fields of distopt.errors.CommunicatorError.
struct ErrorFields {
  ErrorKind kind;
  std::string fact;
  std::string cure{};
  std::vector<Process> ranks{};  // at fault, or who disagree
  std::vector<Call> calls{};     // what those called, where they disagree

  std::string text() const { return cure.empty() ? fact : fact + "; " + cure; }
};

class CommunicatorError : public std::runtime_error {
 public:
  explicit CommunicatorError(ErrorFields failure) : runtime_error(failure.text()), failure_(std::move(failure)) {}
  CommunicatorError(ErrorKind kind, std::string fact, std::string cure = "")
      : CommunicatorError(ErrorFields{kind, std::move(fact), std::move(cure)}) {}

  ErrorKind kind() const { return failure_.kind; }
  const ErrorFields& failure() const { return failure_; }

 private:
  ErrorFields failure_;
};

}  // namespace distopt

#pragma once

#include <stdexcept>
#include <string>

namespace distopt {

// What went wrong in a communicator of ours; the binding turns each kind into the class of distopt.errors of that name.
enum class ErrorKind : int { other, usage, launch, closed, peer_lost, stalled, mismatch, memory, transport };

class CommunicatorError : public std::runtime_error {
 public:
  CommunicatorError(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace distopt

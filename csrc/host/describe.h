// What a rank says of an operation, compared and in words.
#pragma once

#include <string>

#include "host/peers.h"

namespace distopt {

// What a rank says of an operation: all but where its data lies.
void fill(Descriptor& descriptor, char (&label)[label_bytes], const Request& request);
// Whether two ranks take part in the same operation.
bool alike(const Descriptor& a, const Descriptor& b);
// "50,000 float32"
std::string amount(std::uint64_t count, DType dtype);
// That they do not; `does` and `mine` are descriptions.
std::string mismatch_between(const std::string& who, const std::string& does, const std::string& me,
                             const std::string& mine);
// "all_reduce #412 of 50,000 float32 (bucket 3)"
std::string describe(const Descriptor& descriptor, std::uint64_t sequence, const char* label);
std::string describe(const Request& request, std::uint64_t sequence);
// What that rank posted last.
std::string last_operation(const Peers& peers, int rank);

}  // namespace distopt

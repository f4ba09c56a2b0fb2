// Descriptions of collectives: compared between ranks, and as text.
#pragma once

#include <string>

#include "host/peers.h"

namespace distopt {

// A rank's description of a collective: everything except where its data lies.
void fill(Descriptor& descriptor, char (&label)[label_bytes], const Arguments& arguments);
// Whether two ranks take part in the same collective.
bool alike(const Descriptor& a, const Descriptor& b);
// The error that names both ranks and their calls.
CommunicatorError mismatch_between(const Process& other, const Call& theirs, const Process& me, const Call& mine);
Call call_of(int rank, const Descriptor& descriptor, std::uint64_t number, const char* label);

// Arguments of the collective of that name: codes of type and reduction, the root of a broadcast.
Arguments make_arguments(const char* kind, int dtype, const char* label, int op = 0, int root = 0);

const char* kind_name(OpKind kind);
const char* dtype_name(std::uint8_t dtype);
const char* op_name(std::uint8_t op);
// "50,000 float32"
std::string amount(std::uint64_t count, DType dtype);
// "all_reduce #412"
std::string named(OpKind kind, std::uint64_t number);
// "all_reduce #412 of 50,000 float32 (bucket 3)"
std::string describe(const Call& call);
std::string describe(const Arguments& arguments, std::uint64_t number);
// The last collective that the rank posted.
std::string last_collective(const Peers& peers, int rank);

}  // namespace distopt

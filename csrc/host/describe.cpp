#include "host/describe.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace distopt {
namespace {

std::string with_commas(std::uint64_t value) {
  std::string digits = std::to_string(value);
  for (std::size_t at = digits.size(); at > 3;) digits.insert(at -= 3, ",");
  return digits;
}

// FNV-1a, which every build computes identically.
std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

const char* const kind_names[] = {"barrier",           "all_reduce", "reduce_scatter", "all_gather",
                                  "all_gather_ragged", "broadcast",  "empty",          "all_to_all_ragged"};

}  // namespace

Arguments make_arguments(const char* kind, int dtype, const char* label, int op, int root) {
  Arguments arguments;
  const auto* const named = std::find_if(std::begin(kind_names), std::end(kind_names),
                                         [kind](const char* name) { return std::strcmp(name, kind) == 0; });
  arguments.kind = static_cast<OpKind>(named - kind_names);
  arguments.dtype = static_cast<DType>(dtype);
  arguments.op = static_cast<RedOp>(op);
  arguments.root = root;
  arguments.label = label;
  return arguments;
}

const char* kind_name(OpKind kind) {
  const auto code = static_cast<std::size_t>(kind);
  return code < std::size(kind_names) ? kind_names[code] : "an unknown operation";
}

const char* dtype_name(std::uint8_t dtype) {
  static const char* const names[] = {"float32", "float64", "float16", "bfloat16", "int32",
                                      "int64",   "int8",    "uint8",   "int16",    "bool"};
  return dtype < std::size(names) ? names[dtype] : "an unknown type";
}

const char* op_name(std::uint8_t op) {
  static const char* const names[] = {"sum", "max", "min", "mean", "product", "and", "or", "xor"};
  return op < std::size(names) ? names[op] : "an unknown reduction";
}

std::string amount(std::uint64_t count, DType dtype) {
  return with_commas(count) + " " + dtype_name(static_cast<std::uint8_t>(dtype));
}

void fill(Descriptor& descriptor, char (&label)[label_bytes], const Arguments& arguments) {
  descriptor.count = arguments.count;
  descriptor.location = 0;
  descriptor.label = hash_of(arguments.label);
  descriptor.root = arguments.root;
  descriptor.kind = arguments.kind;
  descriptor.dtype = static_cast<std::uint8_t>(arguments.dtype);
  descriptor.op = static_cast<std::uint8_t>(arguments.op);
  descriptor.looks = arguments.looks;
  const std::size_t length = std::min(arguments.label.size(), label_bytes - 1);
  std::memcpy(label, arguments.label.data(), length);
  label[length] = '\0';
}

bool alike(const Descriptor& a, const Descriptor& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.label == b.label &&
         a.looks == b.looks && (a.count == b.count || is_ragged(a.kind));
}

CommunicatorError mismatch_between(const Process& other, const Call& theirs, const Process& me, const Call& mine) {
  return CommunicatorError({ErrorKind::mismatch,
                            other.name() + " is in " + describe(theirs) + ", " + me.name() + " in " + describe(mine),
                            "all ranks must call the same collectives in the same order with equal types and counts",
                            {other, me},
                            {theirs, mine}});
}

Call call_of(int rank, const Descriptor& descriptor, std::uint64_t number, const char* label) {
  Call call{rank,          descriptor.kind,  descriptor.dtype,
            descriptor.op, descriptor.looks, descriptor.root,
            number,        descriptor.count, ""};
  std::memcpy(call.label, label, ::strnlen(label, label_bytes - 1));
  return call;
}

std::string named(OpKind kind, std::uint64_t number) {
  return std::string(kind_name(kind)) + " #" + with_commas(number);
}

std::string describe(const Call& call) {
  std::string text = named(call.kind, call.number);
  if (call.kind != OpKind::barrier) text += " of " + amount(call.count, static_cast<DType>(call.dtype));
  if (reduces(call.kind)) text += std::string(", ") + op_name(call.op);
  if (call.looks) text += ", looked at for NaN";
  if (call.kind == OpKind::broadcast) text += " from rank " + std::to_string(call.root);
  return call.label[0] == '\0' ? text : text + " (" + call.label + ")";
}

std::string describe(const Arguments& arguments, std::uint64_t number) {
  Descriptor descriptor{};
  char label[label_bytes];
  fill(descriptor, label, arguments);
  return describe(call_of(0, descriptor, number, label));
}

std::string last_collective(const Peers& peers, int rank) {
  std::uint64_t last = 0;
  for (std::uint64_t i = 0; i < ring_size; ++i) {
    const std::uint64_t sequence = peers.entry(rank, i).descriptor.sequence.load(std::memory_order_acquire);
    if (sequence > last) last = sequence;
  }
  if (last == 0) return "it has started no operation";
  const RingEntry& entry = peers.entry(rank, last);
  return "the last operation it started is " + describe(call_of(rank, entry.descriptor, last, entry.label));
}

}  // namespace distopt

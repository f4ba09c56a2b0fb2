#include "host/arguments.h"

#include <algorithm>

namespace distopt {

static bool overlap(const char* a, std::size_t a_bytes, const char* b, std::size_t b_bytes) {
  return a_bytes != 0 && b_bytes != 0 && a < b + b_bytes && b < a + a_bytes;
}

bool conflict(const Arguments& a, const Arguments& b, int world_size) {
  const auto writes = [&](const Arguments& writer, const Arguments& reader) {
    const std::size_t bytes = writer.output_bytes(world_size);
    return overlap(writer.output, bytes, reader.input, reader.input_bytes(world_size)) ||
           std::any_of(reader.parts.begin(), reader.parts.end(),
                       [&](const ByteSpan& part) { return overlap(writer.output, bytes, part.data, part.bytes); });
  };
  return writes(a, b) || writes(b, a) ||
         overlap(a.output, a.output_bytes(world_size), b.output, b.output_bytes(world_size));
}

}  // namespace distopt

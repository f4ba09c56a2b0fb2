// Sparse lists: ascending int32 indices into a dense array, each with a float32 value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/select.h"
#include "kernels/cuda/shared.h"

namespace distopt {

// See select.h.
inline std::int32_t key_of(float x) {
  std::int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & top_key;
}

struct Selection {
  std::size_t count;      // selected elements
  std::size_t nonfinite;  // infinities and NaN among them; if 0 and count is not, the whole source is finite
};

// Room that the lists of top_k need.
std::size_t top_k_capacity(std::size_t n, std::size_t k);

// Lists the k <= n elements of largest magnitude, among equals those with the lowest index; indices ascending. The
// lists have room for top_k_capacity(n, k).
//
// A sample of the source estimates a bound that somewhat more than k elements exceed; one pass collects those, and a
// radix select among them is exact. If the number of collected elements shows that the estimate was wrong, the
// radix select runs over the whole source instead: the result never depends on the sample.
Selection top_k(const Source& from, std::size_t n, std::size_t k, std::int32_t* indices, float* values,
                std::size_t capacity);

// Lists the elements with |x| >= bound, NaN included. Where Selection::count + gather_slack exceeds `capacity` the
// lists are incomplete: repeat with more room, without the accumulation.
Selection select_threshold(const Source& from, std::size_t n, float bound, std::int32_t* indices, float* values,
                           std::size_t capacity);

struct SparseList {
  const std::int32_t* indices;
  const float* values;
  std::size_t count;
};

// Whether the indices ascend strictly within 0 ... n - 1.
bool is_ascending(const std::int32_t* indices, std::size_t count, std::size_t n);

// dense[i] += value * scale for the entries with lo <= i < hi, list after list.
void scatter_add(float* dense, const SparseList* lists, std::size_t n_lists, std::int32_t lo, std::int32_t hi,
                 float scale);

}  // namespace distopt

// The estimate that top-K starts from, on CPU and GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/cuda/shared.h"

namespace distopt {

// A sample of the source, groups of neighbours at pseudo-random places in equal strata, estimates a bound that somewhat
// more than k elements exceed. One pass collects those; the selection never depends on the estimate.

// Where k is a good part of n, collecting the candidates costs as much as the radix select saves.
inline bool estimate_pays(std::size_t n, std::size_t k) { return n >= 4096 && k <= n / 2; }

inline std::size_t sample_strata(std::size_t n) { return std::min<std::size_t>(most_strata, n / 128); }

// Rank in the sample of the element whose key is the estimate.
inline std::size_t sample_rank(std::size_t n, std::size_t k) {
  const auto sampled = static_cast<double>(sample_strata(n) * sample_group);
  const double expected = sampled * static_cast<double>(k) / static_cast<double>(n);
  return static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 8);  // four deviations on top
}

// The number of candidates to have room for when the k largest of n elements are selected.
inline std::size_t candidate_capacity(std::size_t n, std::size_t k) {
  return k + (estimate_pays(n, k) ? std::min(3 * k, n / 16) + n / 256 : 0);
}

}  // namespace distopt

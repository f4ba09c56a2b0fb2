#include "cpu/sparse.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/select_rules.h"

namespace distopt {
namespace {

// The k largest keys are those above `floor` and the first `ties` of those equal to it.
struct Boundary {
  std::int32_t floor;
  std::size_t ties;
};

constexpr int tables = 4;  // neighbours often share a bin: separate tables keep their increments independent
constexpr int most_bins = 1 << 11;

// Counts in bins[i % tables] the digit key >> shift, below bit `known`, of the keys whose bits from `known` up are
// prefix.
template <int known, int shift>
void count_digits(const float* x, std::size_t n, std::int32_t prefix, std::uint32_t (*bins)[most_bins]) {
  constexpr std::int32_t digit = (1 << (known - shift)) - 1;
  const auto count = [=](float element, std::uint32_t* table) {
    const std::int32_t key = key_of(element);
    if (known == 31 || key >> (known % 31) == prefix) ++table[(key >> shift) & digit];
  };
  std::size_t i = 0;
  for (; i + tables <= n; i += tables)
    for (int t = 0; t < tables; ++t) count(x[i + static_cast<std::size_t>(t)], bins[t]);
  for (; i < n; ++i) count(x[i], bins[0]);
}

// Radix select of the k-th largest key of x, 1 <= k <= n.
Boundary find_boundary(const float* x, std::size_t n, std::size_t k) {
  std::int32_t prefix = 0;
  const auto digit = [&](auto count, int width) {
    std::uint32_t bins[tables][most_bins] = {};
    count(x, n, prefix, bins);
    int bin = 1 << width;
    for (std::size_t in_bin = 0;; k -= in_bin) {
      --bin;
      in_bin = 0;
      for (const auto& table : bins) in_bin += table[bin];
      if (in_bin >= k) break;
    }
    prefix = prefix << width | bin;
  };
  digit(&count_digits<31, 20>, 11);
  digit(&count_digits<20, 10>, 10);
  digit(&count_digits<10, 0>, 10);
  return {prefix, k};
}

float value_at(const Source& from, std::size_t i) {
  if (!from.residual) return from.grad[i];
  float x = from.scale * from.grad[i];
  if (from.momentum) x += from.decay * from.momentum[i];
  return from.residual[i] + x;
}

// A floor that probably lets somewhat more than k elements through. Where such an estimate does not pay: top_key, which
// lets none through.
std::int32_t estimate_floor(const Source& from, std::size_t n, std::size_t k) {
  constexpr std::size_t group = sample_group;
  if (!estimate_pays(n, k)) return top_key;
  const std::size_t strata = sample_strata(n);
  const std::size_t width = n / strata;
  std::array<float, most_strata * group> sample;
  std::uint32_t random = 1;
  for (std::size_t s = 0; s < strata; ++s) {
    random = random * 1664525u + 1013904223u;
    const std::size_t first = s * width + (std::uint64_t{random} * (width - group) >> 32);
    for (std::size_t j = 0; j < group; ++j) sample[s * group + j] = value_at(from, first + j);
  }
  // Gradients are often mostly zero: all zeros are one tie, which needs no candidates.
  return std::max(find_boundary(sample.data(), strata * group, sample_rank(n, k)).floor - 1, 0);
}

std::size_t count_nonfinite(const float* values, std::size_t n) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < n; ++i) total += key_of(values[i]) >= nonfinite_key;
  return total;
}

}  // namespace

std::size_t top_k_capacity(std::size_t n, std::size_t k) { return candidate_capacity(n, k) + 2 * gather_slack; }

Selection top_k(const Source& from, std::size_t n, std::size_t k, std::int32_t* indices, float* values,
                std::size_t capacity) {
  const SelectKernels& kernels = select_kernels();
  const float* x = from.residual ? from.new_residual : from.grad;
  const std::int32_t floor = k ? estimate_floor(from, n, k) : top_key;
  std::size_t collected = 0;
  if (floor != top_key || from.residual) collected = kernels.gather(from, n, floor, indices, values, capacity);
  if (k == 0) return {0, 0};
  if (collected >= k && collected + gather_slack <= capacity) {
    const Boundary edge = find_boundary(values, collected, k);
    kernels.keep(values, indices, collected, edge.floor, edge.ties, indices, values);
  } else if (collected < k && floor == 0) {
    kernels.keep(x, nullptr, n, 0, k - collected, indices, values);
  } else {
    const Boundary edge = find_boundary(x, n, k);
    kernels.keep(x, nullptr, n, edge.floor, edge.ties, indices, values);
  }
  return {k, count_nonfinite(values, k)};
}

Selection select_threshold(const Source& from, std::size_t n, float bound, std::int32_t* indices, float* values,
                           std::size_t capacity) {
  const std::size_t count = select_kernels().gather(from, n, key_of(bound) - 1, indices, values, capacity);
  const bool complete = count + gather_slack <= capacity;
  return {count, complete ? count_nonfinite(values, count) : 0};
}

bool is_ascending(const std::int32_t* indices, std::size_t count, std::size_t n) {
  if (count == 0) return true;
  bool falls = indices[0] < 0 || static_cast<std::size_t>(indices[count - 1]) >= n;
  for (std::size_t i = 1; i < count; ++i) falls |= indices[i] <= indices[i - 1];
  return !falls;
}

void scatter_add(float* dense, const SparseList* lists, std::size_t n_lists, std::int32_t lo, std::int32_t hi,
                 float scale) {
  for (const SparseList* list = lists; list != lists + n_lists; ++list) {
    const std::int32_t* end = list->indices + list->count;
    const auto first = static_cast<std::size_t>(std::lower_bound(list->indices, end, lo) - list->indices);
    const auto last = static_cast<std::size_t>(std::lower_bound(list->indices, end, hi) - list->indices);
    for (std::size_t j = first; j < last; ++j) dense[list->indices[j]] += list->values[j] * scale;
  }
}

}  // namespace distopt

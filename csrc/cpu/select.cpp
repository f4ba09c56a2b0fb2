#include "cpu/select.h"

#include "cpu/vectors.h"
#include "kernels/cuda/shared.h"

namespace distopt::DISTOPT_ISA {
namespace {

enum class Mode { plain, residual, momentum };

std::int32_t key_of(float x) { return load_as<std::int32_t>(&x) & top_key; }

// The accumulation of Source for elements i ... ; returns the values to select from. T is a register or one float.
template <Mode mode, class T>
inline T accumulate(const Source& from, std::size_t i) {
  T x = load_as<T>(from.grad + i);
  if (mode == Mode::plain) return x;
  x *= from.scale;
  if (mode == Mode::momentum) {
    x += load_as<T>(from.momentum + i) * from.decay;
    store(from.new_momentum + i, x);
  }
  x += load_as<T>(from.residual + i);
  store(from.new_residual + i, x);
  return x;
}

// Appends the lanes of `x` (in memory at `at`) whose mask bits are set to the lists at their positions `out`; the id of
// lane j is ids[j], or base + j. May store a whole register.
inline std::size_t append(unsigned mask, const float* at, const std::int32_t* ids, std::int32_t base, std::size_t out,
                          std::int32_t* indices, float* values) {
#if defined(__AVX512F__)
  const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i id = ids ? _mm512_loadu_si512(ids) : _mm512_add_epi32(steps, _mm512_set1_epi32(base));
  const __m512 value = _mm512_loadu_ps(at);
  // Compressing in a register and storing all of it: the compress-to-memory form is microcoded on Zen 4 and 5.
  _mm512_storeu_ps(values + out, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), value));
  _mm512_storeu_si512(indices + out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), id));
  return out + static_cast<std::size_t>(__builtin_popcount(mask));
#else
  for (; mask; mask &= mask - 1, ++out) {
    const int j = __builtin_ctz(mask);
    values[out] = at[j];
    indices[out] = ids ? ids[j] : base + j;
  }
  return out;
#endif
}

template <Mode mode, bool listing>
std::size_t gather_range(const Source& from, std::size_t begin, std::size_t end, std::int32_t floor, std::size_t out,
                         std::int32_t* indices, float* values) {
  const float* selected = mode == Mode::plain ? from.grad : from.new_residual;
  std::size_t i = begin;
  for (; i + kLanes<float> <= end; i += kLanes<float>) {
    const Floats x = accumulate<mode, Floats>(from, i);
    const unsigned mask = bits_of(((Ints)x & top_key) > floor);
    if (!listing)
      out += static_cast<std::size_t>(__builtin_popcount(mask));
    else if (mask)
      out = append(mask, selected + i, nullptr, static_cast<std::int32_t>(i), out, indices, values);
  }
  for (; i < end; ++i) {
    const float x = accumulate<mode, float>(from, i);
    if (key_of(x) <= floor) continue;
    if (listing) {
      values[out] = x;
      indices[out] = static_cast<std::int32_t>(i);
    }
    ++out;
  }
  return out;
}

template <Mode mode>
std::size_t gather_all(const Source& from, std::size_t n, std::int32_t floor, std::int32_t* indices, float* values,
                       std::size_t capacity) {
  std::size_t total = 0;
  for (std::size_t begin = 0; begin < n; begin += gather_chunk) {
    const std::size_t end = n - begin < gather_chunk ? n : begin + gather_chunk;
    total = total + gather_slack <= capacity
                ? gather_range<mode, true>(from, begin, end, floor, total, indices, values)
                : gather_range<mode, false>(from, begin, end, floor, total, indices, values);
  }
  return total;
}

std::size_t gather(const Source& from, std::size_t n, std::int32_t floor, std::int32_t* indices, float* values,
                   std::size_t capacity) {
  if (!from.residual) return gather_all<Mode::plain>(from, n, floor, indices, values, capacity);
  if (!from.momentum) return gather_all<Mode::residual>(from, n, floor, indices, values, capacity);
  return gather_all<Mode::momentum>(from, n, floor, indices, values, capacity);
}

// Clears all but the lowest `count` set bits.
unsigned lowest(unsigned mask, std::size_t count) {
  unsigned kept = 0;
  for (; count && mask; --count, mask &= mask - 1) kept |= mask & -mask;
  return kept;
}

std::size_t keep(const float* x, const std::int32_t* ids, std::size_t n, std::int32_t floor, std::size_t ties,
                 std::int32_t* indices, float* values) {
  std::size_t out = 0, i = 0;
  for (; i + kLanes<float> <= n; i += kLanes<float>) {
    const Ints key = (Ints)load_as<Floats>(x + i) & top_key;
    unsigned mask = bits_of(key > floor);
    if (ties) {
      const unsigned equal = lowest(bits_of(key == floor), ties);
      ties -= static_cast<std::size_t>(__builtin_popcount(equal));
      mask |= equal;
    }
    out = append(mask, x + i, ids ? ids + i : nullptr, static_cast<std::int32_t>(i), out, indices, values);
  }
  for (; i < n; ++i) {
    const std::int32_t key = key_of(x[i]);
    if (key < floor || (key == floor && !ties)) continue;
    if (key == floor) --ties;
    values[out] = x[i];
    indices[out++] = ids ? ids[i] : static_cast<std::int32_t>(i);
  }
  return out;
}

}  // namespace

const SelectKernels& select_kernels() {
  static constexpr SelectKernels table = {&gather, &keep};
  return table;
}

}  // namespace distopt::DISTOPT_ISA

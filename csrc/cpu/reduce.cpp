#include "cpu/reduce.h"

#include "cpu/half.h"

// Each step loads one vector of every input before it stores any output, so that an output may also be an input.
namespace distopt::DISTOPT_ISA {
namespace {

using std::size_t;

// -- formats: conversions between stored elements and those for computation --

template <typename T>
struct Plain {
  using Element = T;
  using Sum = T;
  using Stored = Vec<T>;
  using Wide = Stored;
  static Wide decode(Stored x) { return x; }
  static Stored encode(Wide x) { return x; }
};

template <typename Type>
struct Wider : Type {
  using Element = std::uint16_t;
  using Sum = float;
  using Stored = Shorts;
  using Wide = Floats;
};

// -- operations --

#define DISTOPT_OPERATION(Name, result)   \
  struct Name {                           \
    template <typename V>                 \
    static void apply(V& a, const V& b) { \
      a = result;                         \
    }                                     \
  };
DISTOPT_OPERATION(Add, (a + b))
DISTOPT_OPERATION(Multiply, (a * b))
DISTOPT_OPERATION(And, (a & b))
DISTOPT_OPERATION(Or, (a | b))
DISTOPT_OPERATION(Xor, (a ^ b))
// The first NaN wins. Of equal values (0 and -0) the first is taken.
DISTOPT_OPERATION(Max, (((a >= b) | (a != a)) ? a : b))
DISTOPT_OPERATION(Min, (((a <= b) | (a != a)) ? a : b))
#undef DISTOPT_OPERATION

// -- loops --

template <typename T>
bool finite(T value) {
  return value - value == 0;
}

// Whether any bit is set.
template <typename V>
bool any(const V& mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256(reinterpret_cast<__m256i>(mask), reinterpret_cast<__m256i>(mask));
#else
  const auto words = reinterpret_cast<Vec<std::uint64_t>>(mask);
  std::uint64_t bits = 0;
  for (Index i = 0; i < kLanes<std::uint64_t>; ++i) bits |= words[i];
  return bits != 0;
#endif
}

// Looks at elements `begin` to `end` one by one for the first sum that is not finite, which is rare.
template <typename T>
Nonfinite find_nonfinite(const void* const* ins, int n, size_t begin, size_t end) {
  const auto at = [&](int q, size_t i) {
    T value;
    __builtin_memcpy(&value, static_cast<const T*>(ins[q]) + i, sizeof(T));
    return value;
  };
  const auto magnitude = [&](int q, size_t i) { return at(q, i) < 0 ? -at(q, i) : at(q, i); };
  for (size_t i = begin; i < end; ++i) {
    T sum = at(0, i);
    for (int q = 1; q < n; ++q) sum += at(q, i);
    if (finite(sum)) continue;
    int rank = 0;
    for (int q = 1; q < n && finite(at(rank, i)); ++q)
      if (!finite(at(q, i)) || magnitude(q, i) > magnitude(rank, i)) rank = q;
    return {i, rank};
  }
  return {};
}

// `fixed` is the number of inputs if the compiler is to know it, else 0.
template <typename Format, typename Op, bool divide, bool look, int fixed>
Nonfinite reduce_all(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count) {
  using Element = typename Format::Element;
  using Wide = typename Format::Wide;
  constexpr size_t lanes = sizeof(typename Format::Stored) / sizeof(Element);
  const int n = fixed ? fixed : n_ins;
  Nonfinite found;
  const auto reduced = [&](Wide& sum, size_t at, size_t bytes) __attribute__((always_inline)) {
    const auto load = [&](Wide& to, int q) __attribute__((always_inline)) {
      typename Format::Stored stored = {};
      __builtin_memcpy(&stored, static_cast<const Element*>(ins[q]) + at, bytes);
      to = Format::decode(stored);
    };
    Wide next;
    load(sum, 0);
    for (int q = 1; q < n; ++q) {
      load(next, q);
      Op::apply(sum, next);
    }
    if (divide) sum = sum / static_cast<typename Format::Sum>(n);
  };
  const auto store = [&](const Wide& sum, size_t at, size_t bytes) __attribute__((always_inline)) {
    const typename Format::Stored result = Format::encode(sum);
    for (int q = 0; q < n_outs; ++q) __builtin_memcpy(static_cast<Element*>(outs[q]) + at, &result, bytes);
  };
  // Looks at several vectors at a time, at almost no cost, and before any result is stored, because the inputs tell
  // whose fault it is.
  const auto step = [&](auto vectors, size_t at, size_t bytes) __attribute__((always_inline)) {
    Wide sums[vectors];
    for (size_t k = 0; k < vectors; ++k) reduced(sums[k], at + k * lanes, bytes);
    if constexpr (look) {
      Wide spoiled = sums[0] - sums[0];
      for (size_t k = 1; k < vectors; ++k) spoiled += sums[k] - sums[k];
      if (__builtin_expect(any(spoiled != spoiled), false) && found.index == Nonfinite::nowhere)
        found = find_nonfinite<Element>(ins, n, at, at + (vectors - 1) * lanes + bytes / sizeof(Element));
    }
    for (size_t k = 0; k < vectors; ++k) store(sums[k], at + k * lanes, bytes);
  };
  constexpr std::integral_constant<size_t, 1> one;
  constexpr std::integral_constant<size_t, look ? 4 : 1> several;
  size_t at = 0;
  for (; at + several * lanes <= count; at += several * lanes) step(several, at, sizeof(typename Format::Stored));
  for (; at + lanes <= count; at += lanes) step(one, at, sizeof(typename Format::Stored));
  if (at < count) step(one, at, (count - at) * sizeof(Element));
  return found;
}

template <typename Format, typename Op, bool divide = false, bool look = false>
Nonfinite reduce_as(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count) {
  switch (n_ins) {
    case 2:
      return reduce_all<Format, Op, divide, look, 2>(outs, n_outs, ins, n_ins, count);
    case 3:
      return reduce_all<Format, Op, divide, look, 3>(outs, n_outs, ins, n_ins, count);
    case 4:
      return reduce_all<Format, Op, divide, look, 4>(outs, n_outs, ins, n_ins, count);
    default:
      return reduce_all<Format, Op, divide, look, 0>(outs, n_outs, ins, n_ins, count);
  }
}

// Reductions that no training waits for are compiled once, for any number of inputs.
template <typename Format, typename Op>
Nonfinite reduce_seldom(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count) {
  return reduce_all<Format, Op, false, false, 0>(outs, n_outs, ins, n_ins, count);
}

// -- tables: by type, then by operation; null where can_reduce says no --

using Reduce = Nonfinite (*)(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count);

template <typename Format>
constexpr Reduce floats[] = {
    &reduce_as<Format, Add>,       &reduce_seldom<Format, Max>,      &reduce_seldom<Format, Min>,
    &reduce_as<Format, Add, true>, &reduce_seldom<Format, Multiply>,
};

template <typename T, typename Wrapping = Plain<std::make_unsigned_t<T>>>  // signed overflow is undefined
constexpr Reduce integers[] = {
    &reduce_seldom<Wrapping, Add>,      &reduce_seldom<Plain<T>, Max>,
    &reduce_seldom<Plain<T>, Min>,      nullptr,
    &reduce_seldom<Wrapping, Multiply>, &reduce_seldom<Wrapping, And>,
    &reduce_seldom<Wrapping, Or>,       &reduce_seldom<Wrapping, Xor>,
};

// Reductions of booleans, whose bytes are 0 or 1.
constexpr Reduce either = &reduce_seldom<Plain<std::uint8_t>, Or>, both = &reduce_seldom<Plain<std::uint8_t>, And>;
constexpr Reduce booleans[] = {either, either, both, nullptr, both, both, either, integers<std::uint8_t>[7]};

constexpr const Reduce* table_of_types[] = {
    floats<Plain<float>>,   floats<Plain<double>>,
    floats<Wider<Half>>,    floats<Wider<BFloat16>>,
    integers<std::int32_t>, integers<std::int64_t>,
    integers<std::int8_t>,  integers<std::uint8_t>,
    integers<std::int16_t>, booleans,
};

template <typename T>
Nonfinite reduce_and_look(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count, RedOp op) {
  return op == RedOp::mean ? reduce_as<Plain<T>, Add, true, true>(outs, n_outs, ins, n_ins, count)
                           : reduce_as<Plain<T>, Add, false, true>(outs, n_outs, ins, n_ins, count);
}

Nonfinite reduce(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count, DType dtype, RedOp op,
                 bool look) {
  if (look && dtype == DType::float64) return reduce_and_look<double>(outs, n_outs, ins, n_ins, count, op);
  if (look) return reduce_and_look<float>(outs, n_outs, ins, n_ins, count, op);
  return table_of_types[static_cast<int>(dtype)][static_cast<int>(op)](outs, n_outs, ins, n_ins, count);
}

void copy(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<char*>(to);
  auto* source = static_cast<const char*>(from);
  // Four at a time: a loop over single vectors would be recognized as a memcpy.
  for (; bytes >= 4 * kVectorBytes; bytes -= 4 * kVectorBytes) {
    Ints a, b, c, d;
    __builtin_memcpy(&a, source, kVectorBytes);
    __builtin_memcpy(&b, source + kVectorBytes, kVectorBytes);
    __builtin_memcpy(&c, source + 2 * kVectorBytes, kVectorBytes);
    __builtin_memcpy(&d, source + 3 * kVectorBytes, kVectorBytes);
    __builtin_memcpy(target, &a, kVectorBytes);
    __builtin_memcpy(target + kVectorBytes, &b, kVectorBytes);
    __builtin_memcpy(target + 2 * kVectorBytes, &c, kVectorBytes);
    __builtin_memcpy(target + 3 * kVectorBytes, &d, kVectorBytes);
    target += 4 * kVectorBytes;
    source += 4 * kVectorBytes;
  }
  if (bytes != 0) __builtin_memcpy(target, source, bytes);
}

}  // namespace

const ReduceKernels& reduce_kernels() {
  static constexpr ReduceKernels table = {&reduce, &copy};
  return table;
}

}  // namespace distopt::DISTOPT_ISA

#include "shm/reduce.h"

#include <cstring>
#include <type_traits>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// Written with the vector extensions that GCC and Clang share: each step loads one vector of every input before it
// stores any output, so that outputs may be inputs, which a plain loop would have to check or fear.
namespace distopt::DISTOPT_ISA {
namespace {

using std::size_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;

#if defined(__AVX512F__)
constexpr size_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr size_t vector_bytes = 32;
#else
constexpr size_t vector_bytes = 16;
#endif

template <typename T, size_t bytes = vector_bytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(bytes)));
};
using Floats = VectorOf<float>::Type;
using Bits = VectorOf<u32>::Type;
using Halves = VectorOf<u16, vector_bytes / 2>::Type;

// -- formats: how stored elements become what is computed with, and back --

template <typename T>
struct Plain {
  using Element = T;
  using Sum = T;
  using Stored = typename VectorOf<T>::Type;
  using Wide = Stored;
  static void load(Wide& to, const Stored& from) { to = from; }
  static void store(Stored& to, const Wide& from) { to = from; }
};

struct BFloat16 {
  using Element = u16;
  using Sum = float;
  using Stored = Halves;
  using Wide = Floats;
  static void load(Wide& to, const Stored& from) {
    to = reinterpret_cast<Floats>(__builtin_convertvector(from, Bits) << 16);
  }
  static void store(Stored& to, const Wide& from) {
    const Bits bits = reinterpret_cast<Bits>(from);
    const Bits even = bits + 0x7fff + ((bits >> 16) & 1);
    const Bits quiet = bits | 0x400000;  // a NaN must not round to infinity
    to = __builtin_convertvector(((bits & 0x7fffffff) > 0x7f800000 ? quiet : even) >> 16, Halves);
  }
};

struct Float16 {
  using Element = u16;
  using Sum = float;
  using Stored = Halves;
  using Wide = Floats;
#if defined(__AVX512F__)
  // With a mask, because GCC 12 warns about its own unmasked intrinsics.
  static constexpr __mmask16 all_lanes = 0xffff;
  static void load(Wide& to, const Stored& from) {
    to = reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(all_lanes, reinterpret_cast<__m256i>(from)));
  }
  static void store(Stored& to, const Wide& from) {
    to = reinterpret_cast<Halves>(
        _mm512_maskz_cvtps_ph(all_lanes, reinterpret_cast<__m512>(from), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  static void load(Wide& to, const Stored& from) {
    to = reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(from)));
  }
  static void store(Stored& to, const Wide& from) {
    to = reinterpret_cast<Halves>(_mm256_cvtps_ph(reinterpret_cast<__m256>(from), _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static void load(Wide& to, const Stored& from) {
    const Bits bits = __builtin_convertvector(from, Bits);
    const Bits magnitude = (bits & 0x7fff) << 13;
    // The exponent bias differs by 112. Multiplying handles denormal numbers as well.
    const Bits finite = reinterpret_cast<Bits>(reinterpret_cast<Floats>(magnitude) * 0x1p112f);
    const Bits quiet = magnitude > 0x0f800000 ? magnitude | 0x7fc00000 : magnitude | 0x7f800000;
    to = reinterpret_cast<Floats>((magnitude >= 0x0f800000 ? quiet : finite) | (bits & 0x8000) << 16);
  }
  static void store(Stored& to, const Wide& from) {
    const Bits bits = reinterpret_cast<Bits>(from);
    const Bits magnitude = bits & 0x7fffffff;
    const Bits even = magnitude + 0xfff + ((magnitude >> 13) & 1);
    const Bits infinity = (magnitude & 0) | 0x7c00;
    const Bits normal = even >= 0x47800000 ? infinity : (even - 0x38000000) >> 13;
    // Below 2^-14 the last place is 2^-24, which is that of floats in [0.5, 1): the addition rounds.
    const Bits denormal = reinterpret_cast<Bits>(reinterpret_cast<Floats>(magnitude) + 0.5f) - 0x3f000000;
    const Bits nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    const Bits number = magnitude < 0x38800000 ? denormal : normal;
    to = __builtin_convertvector((magnitude > 0x7f800000 ? nan : number) | (bits >> 16 & 0x8000), Halves);
  }
#endif
};

// -- operations --

struct Add {
  template <typename V>
  static void apply(V& a, const V& b) {
    a = a + b;
  }
};

struct Multiply {
  template <typename V>
  static void apply(V& a, const V& b) {
    a = a * b;
  }
};

struct And {
  template <typename V>
  static void apply(V& a, const V& b) {
    a = a & b;
  }
};

struct Or {
  template <typename V>
  static void apply(V& a, const V& b) {
    a = a | b;
  }
};

struct Xor {
  template <typename V>
  static void apply(V& a, const V& b) {
    a = a ^ b;
  }
};

// The first NaN wins. Of equal values (0 and -0) the first is taken.
struct Max {
  template <typename V>
  static void apply(V& a, const V& b) {
    a = (a >= b) | (a != a) ? a : b;
  }
};

struct Min {
  template <typename V>
  static void apply(V& a, const V& b) {
    a = (a <= b) | (a != a) ? a : b;
  }
};

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
  const auto words = reinterpret_cast<VectorOf<std::uint64_t>::Type>(mask);
  return (words[0] | words[1]) != 0;
#endif
}

// Looks for it in elements `begin` to `end`, one by one: this happens once.
template <typename T>
Nonfinite find_nonfinite(const void* const* ins, int n, size_t begin, size_t end) {
  const auto at = [&](int q, size_t i) {
    T value;
    std::memcpy(&value, static_cast<const T*>(ins[q]) + i, sizeof(T));
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

// `fixed` is the number of inputs where the compiler shall know it, else 0.
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
      Format::load(to, stored);
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
    typename Format::Stored result;
    Format::store(result, sum);
    for (int q = 0; q < n_outs; ++q) __builtin_memcpy(static_cast<Element*>(outs[q]) + at, &result, bytes);
  };
  // Of several vectors at a time, so that the look costs next to nothing; before any is stored, as the inputs tell
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
void reduce_seldom(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count) {
  reduce_all<Format, Op, false, false, 0>(outs, n_outs, ins, n_ins, count);
}

template <typename Format>
void reduce_floats(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count, RedOp op) {
  switch (op) {
    case RedOp::sum:
      reduce_as<Format, Add>(outs, n_outs, ins, n_ins, count);
      return;
    case RedOp::max:
      reduce_seldom<Format, Max>(outs, n_outs, ins, n_ins, count);
      return;
    case RedOp::min:
      reduce_seldom<Format, Min>(outs, n_outs, ins, n_ins, count);
      return;
    case RedOp::mean:
      reduce_as<Format, Add, true>(outs, n_outs, ins, n_ins, count);
      return;
    case RedOp::product:
      reduce_seldom<Format, Multiply>(outs, n_outs, ins, n_ins, count);
      return;
    default:
      return;
  }
}

template <typename T>
void reduce_integers(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count, RedOp op) {
  using Wrapping = Plain<std::make_unsigned_t<T>>;  // signed overflow is undefined
  switch (op) {
    case RedOp::sum:
      return reduce_seldom<Wrapping, Add>(outs, n_outs, ins, n_ins, count);
    case RedOp::max:
      return reduce_seldom<Plain<T>, Max>(outs, n_outs, ins, n_ins, count);
    case RedOp::min:
      return reduce_seldom<Plain<T>, Min>(outs, n_outs, ins, n_ins, count);
    case RedOp::product:
      return reduce_seldom<Wrapping, Multiply>(outs, n_outs, ins, n_ins, count);
    case RedOp::bit_and:
      return reduce_seldom<Wrapping, And>(outs, n_outs, ins, n_ins, count);
    case RedOp::bit_or:
      return reduce_seldom<Wrapping, Or>(outs, n_outs, ins, n_ins, count);
    case RedOp::bit_xor:
      return reduce_seldom<Wrapping, Xor>(outs, n_outs, ins, n_ins, count);
    default:
      return;
  }
}

// What an operation does to booleans, as one on the bits of their bytes, which are 0 and 1.
RedOp on_booleans(RedOp op) {
  if (op == RedOp::sum || op == RedOp::max) return RedOp::bit_or;
  if (op == RedOp::product || op == RedOp::min) return RedOp::bit_and;
  return op;
}

void reduce(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count, DType dtype, RedOp op) {
  switch (dtype) {
    case DType::float32:
      return reduce_floats<Plain<float>>(outs, n_outs, ins, n_ins, count, op);
    case DType::float64:
      return reduce_floats<Plain<double>>(outs, n_outs, ins, n_ins, count, op);
    case DType::float16:
      return reduce_floats<Float16>(outs, n_outs, ins, n_ins, count, op);
    case DType::bfloat16:
      return reduce_floats<BFloat16>(outs, n_outs, ins, n_ins, count, op);
    case DType::int32:
      return reduce_integers<std::int32_t>(outs, n_outs, ins, n_ins, count, op);
    case DType::int64:
      return reduce_integers<std::int64_t>(outs, n_outs, ins, n_ins, count, op);
    case DType::int8:
      return reduce_integers<std::int8_t>(outs, n_outs, ins, n_ins, count, op);
    case DType::uint8:
      return reduce_integers<std::uint8_t>(outs, n_outs, ins, n_ins, count, op);
    case DType::int16:
      return reduce_integers<std::int16_t>(outs, n_outs, ins, n_ins, count, op);
    case DType::boolean:
      return reduce_integers<std::uint8_t>(outs, n_outs, ins, n_ins, count, on_booleans(op));
  }
}

template <typename T>
Nonfinite look_as(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count, RedOp op) {
  return op == RedOp::mean ? reduce_as<Plain<T>, Add, true, true>(outs, n_outs, ins, n_ins, count)
                           : reduce_as<Plain<T>, Add, false, true>(outs, n_outs, ins, n_ins, count);
}

Nonfinite reduce_and_look(void* const* outs, int n_outs, const void* const* ins, int n_ins, size_t count, DType dtype,
                          RedOp op) {
  return dtype == DType::float64 ? look_as<double>(outs, n_outs, ins, n_ins, count, op)
                                 : look_as<float>(outs, n_outs, ins, n_ins, count, op);
}

void copy(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<char*>(to);
  auto* source = static_cast<const char*>(from);
  // Four at a time: a loop over single vectors would be recognized as a memcpy.
  for (; bytes >= 4 * vector_bytes; bytes -= 4 * vector_bytes) {
    Bits a, b, c, d;
    __builtin_memcpy(&a, source, vector_bytes);
    __builtin_memcpy(&b, source + vector_bytes, vector_bytes);
    __builtin_memcpy(&c, source + 2 * vector_bytes, vector_bytes);
    __builtin_memcpy(&d, source + 3 * vector_bytes, vector_bytes);
    __builtin_memcpy(target, &a, vector_bytes);
    __builtin_memcpy(target + vector_bytes, &b, vector_bytes);
    __builtin_memcpy(target + 2 * vector_bytes, &c, vector_bytes);
    __builtin_memcpy(target + 3 * vector_bytes, &d, vector_bytes);
    target += 4 * vector_bytes;
    source += 4 * vector_bytes;
  }
  if (bytes != 0) std::memcpy(target, source, bytes);
}

const ReduceKernels table = {&reduce, &reduce_and_look, &copy};

}  // namespace

const ReduceKernels& reduce_kernels() { return table; }

}  // namespace distopt::DISTOPT_ISA

#include "cpu/codec.h"

#include "cpu/half.h"

namespace distopt::DISTOPT_ISA {
namespace {

constexpr int lanes = kLanes<float>;
typedef float HalfFloats __attribute__((vector_size(2 * lanes)));
using Doubles = Vec<double>;

struct LaneCounts {
  Ints overflowed{}, underflowed{}, nan{};
};

template <class Type, bool with_residual>
inline void encode_lanes(const float* in, const float* residual, float* new_residual, std::uint16_t* out, float scale,
                         float limit, LaneCounts& counts) {
  Floats x = load_as<Floats>(in);
  if (with_residual) x += load_as<Floats>(residual);
  const Floats scaled = x * scale;
  const Ints bits = (Ints)scaled;
  const Ints magnitude = bits & top_key;
  const Floats limits = Floats{} + limit;
  const Ints over = (Floats)magnitude > limits;
  const Floats clamped = (Floats)((over ? (Ints)limits : magnitude) | (bits & ~top_key));
  const Shorts encoded = Type::encode(clamped);
  store(out, encoded);
  // Masks are 0 or -1.
  counts.overflowed -= over;
  counts.nan -= x != x;
  counts.underflowed -= (magnitude <= Type::becomes_zero) & (x != 0.0f);
  if (with_residual) store(new_residual, x - Type::decode(encoded) * (1.0f / scale));
}

std::size_t sum(Ints v) {
  std::size_t total = 0;
  for (int j = 0; j < lanes; ++j) total += static_cast<std::size_t>(v[j]);
  return total;
}

template <class Type, bool with_residual>
CastCounts encode(const float* in, const float* residual, float* new_residual, std::uint16_t* out, std::size_t n,
                  float scale, float limit) {
  LaneCounts counts;
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    __builtin_prefetch(in + i + 1024);  // the hardware's own prefetch leaves a tenth of the bandwidth unused
    encode_lanes<Type, with_residual>(in + i, with_residual ? residual + i : nullptr,
                                      with_residual ? new_residual + i : nullptr, out + i, scale, limit, counts);
  }
  if (const std::size_t rest = n - i) {
    float in_rest[lanes] = {}, residual_rest[lanes] = {};
    std::uint16_t out_rest[lanes];
    __builtin_memcpy(in_rest, in + i, rest * sizeof *in);
    if (with_residual) __builtin_memcpy(residual_rest, residual + i, rest * sizeof *in);
    encode_lanes<Type, with_residual>(in_rest, residual_rest, residual_rest, out_rest, scale, limit, counts);
    __builtin_memcpy(out + i, out_rest, rest * sizeof *out);
    if (with_residual) __builtin_memcpy(new_residual + i, residual_rest, rest * sizeof *in);
  }
  return {sum(counts.overflowed), sum(counts.underflowed), sum(counts.nan)};
}

CastCounts encode16(const float* in, const float* residual, float* new_residual, std::uint16_t* out, std::size_t n,
                    float scale, float limit, DType type) {
  if (type == DType::float16)
    return residual ? encode<Half, true>(in, residual, new_residual, out, n, scale, limit)
                    : encode<Half, false>(in, residual, new_residual, out, n, scale, limit);
  return residual ? encode<BFloat16, true>(in, residual, new_residual, out, n, scale, limit)
                  : encode<BFloat16, false>(in, residual, new_residual, out, n, scale, limit);
}

template <class Type>
void decode(const std::uint16_t* in, float* out, std::size_t n, float scale) {
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) store(out + i, Type::decode(load_as<Shorts>(in + i)) * scale);
  if (const std::size_t rest = n - i) {
    std::uint16_t in_rest[lanes] = {};
    float out_rest[lanes];
    __builtin_memcpy(in_rest, in + i, rest * sizeof *in);
    store(out_rest, Type::decode(load_as<Shorts>(in_rest)) * scale);
    __builtin_memcpy(out + i, out_rest, rest * sizeof *out);
  }
}

void decode16(const std::uint16_t* in, float* out, std::size_t n, float scale, DType type) {
  if (type == DType::float16)
    decode<Half>(in, out, n, scale);
  else
    decode<BFloat16>(in, out, n, scale);
}

double squared_norm(const float* x, std::size_t n) {
  constexpr int half = lanes / 2, chains = 4;
  Doubles sums[chains] = {};
  std::size_t i = 0;
  for (; i + chains * half <= n; i += chains * half)
    for (int c = 0; c < chains; ++c) {
      const Doubles v = __builtin_convertvector(load_as<HalfFloats>(x + i + c * half), Doubles);
      sums[c] += v * v;
    }
  double total = 0;
  for (const Doubles& chain : sums)
    for (int j = 0; j < half; ++j) total += chain[j];
  for (; i < n; ++i) total += static_cast<double>(x[i]) * x[i];
  return total;
}

inline float magnitude(float value) { return __builtin_fabsf(value); }
inline double magnitude(double value) { return __builtin_fabs(value); }

template <class Real>
std::size_t first_beyond(const Real* x, std::size_t n, Real limit) {
  const auto beyond = [limit](Real value) { return !(magnitude(value) <= limit); };  // NaN, too
  // In several places by turns: the processor foresees each of them, and twice as much arrives from the third cache.
  constexpr std::size_t places = 8, turn = 64;
  const std::size_t apart = n / places / turn * turn;
  int wrong = 0;
  for (std::size_t i = 0; i < apart; i += turn)
    for (std::size_t place = 0; place < places; ++place)
      for (std::size_t k = 0; k < turn; ++k) wrong |= beyond(x[place * apart + i + k]);
  for (std::size_t i = places * apart; i < n; ++i) wrong |= beyond(x[i]);
  if (!wrong) return n;
  std::size_t first = 0;
  while (!beyond(x[first])) ++first;
  return first;
}

const CodecKernels table = {&encode16, &decode16, &squared_norm, &first_beyond<float>, &first_beyond<double>};

}  // namespace

const CodecKernels& codec_kernels() { return table; }

}  // namespace distopt::DISTOPT_ISA

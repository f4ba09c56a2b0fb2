#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>

#include "base/select_rules.h"
#include "bind/arrays.h"
#include "bind/gil.h"
#include "bind/rooms.h"
#include "cpu/blocks.h"
#include "cpu/chunks.h"
#include "cpu/codec.h"
#include "cpu/sparse.h"

namespace distopt {
namespace {

using namespace nb::literals;

template <class T>
using Flat = Array<T, 1>;
using Counts = std::tuple<std::size_t, std::size_t, std::size_t>;

void require(bool holds, const char* fact) {
  if (!holds) throw std::invalid_argument(fact);
}

DType type_16(const std::string& name) {
  if (name == "float16") return DType::float16;
  require(name == "bfloat16", "the 16-bit type is neither float16 nor bfloat16");
  return DType::bfloat16;
}

// The largest value of the type that `ranks` ranks can add up without leaving it.
float cast_limit(const std::string& type, int ranks) {
  require(ranks >= 1, "the number of ranks is not positive");
  const bool half = type_16(type) == DType::float16;
  const float bound = (half ? 65504.0f : 0x1.fep127f) / static_cast<float>(ranks);
  const float digits = half ? 0x1p11f : 0x1p8f;
  int exponent;
  const float fraction = std::frexp(bound, &exponent);
  return std::ldexp(std::floor(fraction * digits) / digits, exponent);
}

using Residual = std::optional<Flat<float>>;

void require_residuals(const Flat<const float>& x, const Residual& residual, const Residual& new_residual) {
  const auto fits = [&](const Residual& array) { return !array || array->size() == x.size(); };
  require(fits(residual) && fits(new_residual), "residuals and array differ in length");
}

Counts encode16(Flat<const float> in, Flat<std::uint16_t> out, const std::string& type, float scale, float limit,
                std::optional<Flat<float>> residual, std::optional<Flat<float>> new_residual) {
  require(out.size() == in.size(), "the arrays differ in length");
  require_residuals(in, residual, new_residual);
  const DType dtype = type_16(type);
  const WithoutGil unlocked;
  const CastCounts counts =
      codec_kernels().encode16(in.data(), data_of(residual), data_of(new_residual ? new_residual : residual),
                               out.data(), in.size(), scale, limit, dtype);
  return {counts.overflowed, counts.underflowed, counts.nan};
}

void decode16(Flat<const std::uint16_t> in, Flat<float> out, const std::string& type, float scale) {
  require(out.size() == in.size(), "the arrays differ in length");
  const DType dtype = type_16(type);
  const WithoutGil unlocked;
  codec_kernels().decode16(in.data(), out.data(), in.size(), scale, dtype);
}

double squared_norm(Flat<const float> x) {
  const WithoutGil unlocked;
  return codec_kernels().squared_norm(x.data(), x.size());
}

template <class Real>
std::optional<std::size_t> first_beyond(Flat<const Real> x, double limit) {
  const WithoutGil unlocked;
  std::size_t found;
  if constexpr (sizeof(Real) == sizeof(float))
    found = codec_kernels().first_beyond_32(x.data(), x.size(), static_cast<float>(limit));
  else
    found = codec_kernels().first_beyond_64(x.data(), x.size(), limit);
  return found == x.size() ? std::nullopt : std::optional(found);
}

Source source(const Flat<const float>& grad, const std::optional<Flat<float>>& residual,
              const std::optional<Flat<float>>& momentum, float scale, float decay,
              const std::optional<Flat<float>>& new_residual, const std::optional<Flat<float>>& new_momentum) {
  require(grad.size() <= std::numeric_limits<std::int32_t>::max(), "int32 indices reach 2^31 - 1 elements");
  require(!residual || residual->size() == grad.size(), "residual and gradient differ in length");
  require(!momentum || (residual && momentum->size() == grad.size()), "momentum needs a residual, of equal length");
  require(!new_residual || (residual && new_residual->size() == grad.size()), "a new residual needs an old one");
  require(!new_momentum || (momentum && new_momentum->size() == grad.size()), "a new momentum needs an old one");
  return {grad.data(),
          data_of(residual),
          data_of(momentum),
          scale,
          decay,
          data_of(new_residual ? new_residual : residual),
          data_of(new_momentum ? new_momentum : momentum)};
}

std::pair<std::size_t, std::size_t> bind_top_k(Flat<const float> grad, std::size_t k, Flat<std::int32_t> indices,
                                               Flat<float> values, std::optional<Flat<float>> residual,
                                               std::optional<Flat<float>> momentum, float scale, float decay,
                                               std::optional<Flat<float>> new_residual,
                                               std::optional<Flat<float>> new_momentum) {
  const Source from = source(grad, residual, momentum, scale, decay, new_residual, new_momentum);
  require(k <= grad.size(), "k is larger than the array");
  require(indices.size() == values.size() && values.size() >= top_k_capacity(grad.size(), k),
          "the lists are shorter than top_k_capacity");
  const WithoutGil unlocked;
  const Selection found = top_k(from, grad.size(), k, indices.data(), values.data(), values.size());
  return {found.count, found.nonfinite};
}

std::pair<std::size_t, std::size_t> bind_threshold(Flat<const float> grad, float bound, Flat<std::int32_t> indices,
                                                   Flat<float> values, std::optional<Flat<float>> residual,
                                                   std::optional<Flat<float>> momentum, float scale, float decay,
                                                   std::optional<Flat<float>> new_residual,
                                                   std::optional<Flat<float>> new_momentum) {
  const Source from = source(grad, residual, momentum, scale, decay, new_residual, new_momentum);
  require(bound >= 0, "the threshold is negative or NaN");
  require(indices.size() == values.size(), "the lists differ in length");
  const WithoutGil unlocked;
  const Selection found = select_threshold(from, grad.size(), bound, indices.data(), values.data(), values.size());
  return {found.count, found.nonfinite};
}

void require_list(const Flat<const std::int32_t>& indices, std::size_t n) {
  require(is_ascending(indices.data(), indices.size(), n), "indices do not ascend strictly inside the dense array");
}

void clear_at(Flat<float> dense, Flat<const std::int32_t> indices) {
  const WithoutGil unlocked;
  require_list(indices, dense.size());
  for (std::size_t j = 0; j < indices.size(); ++j) dense.data()[indices.data()[j]] = 0;
}

void bind_scatter_add(Flat<float> dense, const std::vector<Flat<const std::int32_t>>& indices,
                      const std::vector<Flat<const float>>& values, std::int64_t lo, std::int64_t hi, float scale) {
  require(indices.size() == values.size(), "there are not as many lists of values as of indices");
  require(dense.size() <= std::numeric_limits<std::int32_t>::max(), "int32 indices reach 2^31 - 1 elements");
  require(0 <= lo && lo <= hi && hi <= static_cast<std::int64_t>(dense.size()), "the range leaves the dense array");
  std::vector<SparseList> lists;
  for (std::size_t r = 0; r < indices.size(); ++r) {
    require(indices[r].size() == values[r].size(), "a list has not as many values as indices");
    lists.push_back({indices[r].data(), values[r].data(), values[r].size()});
  }
  const WithoutGil unlocked;
  for (const auto& list : indices) require_list(list, dense.size());
  scatter_add(dense.data(), lists.data(), lists.size(), static_cast<std::int32_t>(lo), static_cast<std::int32_t>(hi),
              scale);
}

using Bytes = Flat<std::uint8_t>;

void require_block_bits(int bits) { require(bits == 8 || bits == 4 || bits == 2, "bits are not 8, 4 or 2"); }

void require_chunks(std::size_t k, int bits) {
  require(1 <= k && k <= top_chunk, "k is not in 1 ... 4096");
  require(bits == 2 || bits == 4 || bits == 8 || bits == 16, "bits are not 2, 4, 8 or 16");
}

std::size_t bind_blocks_bytes(std::size_t n, int bits) {
  require_block_bits(bits);
  return blocks_bytes(n, bits);
}

std::size_t bind_chunks_bytes(std::size_t n, std::size_t k, int bits) {
  require_chunks(k, bits);
  return chunks_bytes(n, k, bits);
}

std::size_t encode_blocks(Flat<const float> x, Bytes out, int bits, Residual residual, Residual new_residual,
                          std::optional<std::uint32_t> seed) {
  require_residuals(x, residual, new_residual);
  require(out.size() == bind_blocks_bytes(x.size(), bits), "the output has not blocks_bytes bytes");
  const WithoutGil unlocked;
  return block_kernels().encode(x.data(), data_of(residual), data_of(new_residual ? new_residual : residual),
                                out.data(), x.size(), bits, {seed.has_value(), seed.value_or(0)});
}

void decode_blocks(Flat<const std::uint8_t> in, Flat<float> x, int bits, float factor, bool adds) {
  require(in.size() == bind_blocks_bytes(x.size(), bits), "the input has not blocks_bytes bytes");
  const WithoutGil unlocked;
  block_kernels().decode(in.data(), x.data(), x.size(), bits, factor, adds);
}

std::size_t bind_encode_chunks(Flat<const float> x, Bytes out, std::size_t k, int bits, Residual residual,
                               Residual new_residual) {
  require_residuals(x, residual, new_residual);
  require(out.size() == bind_chunks_bytes(x.size(), k, bits), "the output has not chunks_bytes bytes");
  const WithoutGil unlocked;
  return encode_chunks(x.data(), data_of(residual), data_of(new_residual ? new_residual : residual), out.data(),
                       x.size(), k, bits);
}

void bind_decode_chunks(Array<const std::uint8_t, 2> in, Flat<float> x, std::size_t k, int bits, float factor) {
  require(in.shape(1) == bind_chunks_bytes(x.size(), k, bits), "the input has not chunks_bytes bytes in each row");
  const WithoutGil unlocked;
  decode_chunks(in.data(), in.shape(0), in.shape(1), x.data(), x.size(), k, bits, factor);
}

Counts selection_estimate(std::size_t n, std::size_t k) {
  const bool pays = estimate_pays(n, k);
  return {pays ? sample_strata(n) : 0, pays ? sample_rank(n, k) : 0, candidate_capacity(n, k)};
}

}  // namespace

void bind_cpu_codec(nb::module_& m) {
  m.def("cast_limit", &cast_limit, "dtype"_a, "ranks"_a,
        "The largest value of `dtype` that `ranks` ranks can add up without leaving it.");
  m.def("encode16", &encode16, "x"_a.noconvert(), "out"_a.noconvert(), "dtype"_a, "scale"_a, "limit"_a,
        "residual"_a.noconvert() = nb::none(), "new_residual"_a.noconvert() = nb::none(),
        "Cast x * scale to 16 bits (in a uint16 array), clamped to +-limit. With a residual, residual + x is cast and\n"
        "what the cast lost of it goes to new_residual, or where that is None to residual. Returns the counts\n"
        "(overflowed, underflowed, nan).");
  m.def("decode16", &decode16, "x"_a.noconvert(), "out"_a.noconvert(), "dtype"_a, "scale"_a,
        "Cast 16-bit floats (in a uint16 array) to float32 and multiply them by scale.");
  m.def("squared_norm", &squared_norm, "x"_a.noconvert(), "Sum of squares, accumulated in float64.");
  m.def("first_beyond", &first_beyond<float>, "x"_a.noconvert(), "limit"_a,
        "Index of the first element that is NaN or beyond +-limit, or None.");
  m.def("first_beyond", &first_beyond<double>, "x"_a.noconvert(), "limit"_a);
  m.def("top_k_capacity", &top_k_capacity, "n"_a, "k"_a, "Length that the lists given to top_k need.");
  m.def("selection_estimate", &selection_estimate, "n"_a, "k"_a,
        "How top_k estimates its bound: the strata of the sample (0: it makes no estimate), the rank in the sample of\n"
        "the element that is the bound, and room for the candidates.");
  m.attr("list_slack") = gather_slack;
  m.def(
      "top_k", &bind_top_k, "x"_a.noconvert(), "k"_a, "indices"_a.noconvert(), "values"_a.noconvert(),
      "residual"_a.noconvert() = nb::none(), "momentum"_a.noconvert() = nb::none(), "scale"_a = 1.0f, "decay"_a = 0.0f,
      "new_residual"_a.noconvert() = nb::none(), "new_momentum"_a.noconvert() = nb::none(),
      "List the k elements of largest magnitude, indices ascending, ties by lowest index, in the first k places of\n"
      "indices and values. With a residual, new_residual = residual + scale * x first, and the selection is from it;\n"
      "with momentum too, new_momentum = decay * momentum + scale * x and new_residual = residual + new_momentum.\n"
      "Where a new one is None, the old one is overwritten. Returns (count, how many of these are not finite).");
  m.def(
      "threshold", &bind_threshold, "x"_a.noconvert(), "bound"_a, "indices"_a.noconvert(), "values"_a.noconvert(),
      "residual"_a.noconvert() = nb::none(), "momentum"_a.noconvert() = nb::none(), "scale"_a = 1.0f, "decay"_a = 0.0f,
      "new_residual"_a.noconvert() = nb::none(), "new_momentum"_a.noconvert() = nb::none(),
      "List the elements with |x| >= bound, and NaN; accumulation as in top_k. Returns (count, how many of these are\n"
      "not finite); where count + list_slack exceeds the room, the lists are incomplete.");
  m.attr("quantized_block") = quantized_block;
  m.attr("top_chunk") = top_chunk;
  m.def("blocks_bytes", &bind_blocks_bytes, "n"_a, "bits"_a, "Bytes of n elements in blocks of integers.");
  m.def("chunks_bytes", &bind_chunks_bytes, "n"_a, "k"_a, "bits"_a, "Bytes of the k largest elements of each chunk.");
  m.def("encode_blocks", &encode_blocks, "x"_a.noconvert(), "out"_a.noconvert(), "bits"_a,
        "residual"_a.noconvert() = nb::none(), "new_residual"_a.noconvert() = nb::none(), "seed"_a = nb::none(),
        "Encode x, or residual + x, in blocks of integers; new_residual gets what that loses. Rounds to nearest even, "
        "or\n"
        "with a seed stochastically. Returns the index of the first element that is not finite, or the length.");
  m.def("decode_blocks", &decode_blocks, "data"_a.noconvert(), "x"_a.noconvert(), "bits"_a, "factor"_a = 1.0f,
        "adds"_a = false, "Set x to the elements times factor, or add them to it.");
  m.def("encode_chunks", &bind_encode_chunks, "x"_a.noconvert(), "out"_a.noconvert(), "k"_a, "bits"_a,
        "residual"_a.noconvert() = nb::none(), "new_residual"_a.noconvert() = nb::none(),
        "Encode the k largest elements of each chunk of x, or of residual + x; new_residual gets what is not sent.\n"
        "Returns the index of the first element that is not finite, or the length.");
  m.def("decode_chunks", &bind_decode_chunks, "data"_a.noconvert(), "x"_a.noconvert(), "k"_a, "bits"_a,
        "factor"_a = 1.0f, "Set x to the sum of the encoded arrays, a row each, times factor.");
  m.def("clear_at", &clear_at, "dense"_a.noconvert(), "indices"_a.noconvert(), "dense[indices] = 0");
  m.def("scatter_add", &bind_scatter_add, "dense"_a.noconvert(), "indices"_a.noconvert(), "values"_a.noconvert(),
        "lo"_a, "hi"_a, "scale"_a = 1.0f,
        "dense[indices[r]] += values[r] * scale for each list r in turn, restricted to indices in [lo, hi).");
}

}  // namespace distopt

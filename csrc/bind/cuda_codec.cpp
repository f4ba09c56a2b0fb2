// The codec and selection kernels of the GPU. Arrays are addresses in device memory, 0 for none; the stream is the
// handle as an integer; findings are four int64 in device memory, see cuda/codec.h.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/select_rules.h"
#include "bind/cuda.h"
#include "cuda/codec.h"
#include "cuda/select.h"
#include "cuda/sparse.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace distopt {
namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

void require_int32(std::size_t n) {
  require(n <= std::numeric_limits<std::int32_t>::max(), "int32 indices reach 2^31 - 1 elements");
}

DType half_type(const std::string& name) {
  if (name == "float16") return DType::float16;
  require(name == "bfloat16", "the 16-bit types are float16 and bfloat16");
  return DType::bfloat16;
}

cuda::Source source(Address x, Address residual, Address momentum, float scale, Address device_scale, float decay) {
  require(!momentum || residual, "momentum needs a residual");
  return {at<const float>(x), at<float>(residual), at<float>(momentum), scale, at<const float>(device_scale), decay};
}

void encode16(Address x, Address residual, Address out, std::size_t n, const std::string& dtype, float scale,
              float limit, Address findings, Address stream) {
  cuda::encode16(at<const float>(x), at<float>(residual), at<std::uint16_t>(out), n, scale, limit, half_type(dtype),
                 at<cuda::Findings>(findings), stream_of(stream));
}

void decode16(Address x, Address out, std::size_t n, const std::string& dtype, float scale, Address stream) {
  cuda::decode16(at<const std::uint16_t>(x), at<float>(out), n, scale, half_type(dtype), stream_of(stream));
}

void squared_norm(Address x, std::size_t n, Address workspace, Address norm, Address scale, double limit,
                  Address stream) {
  cuda::squared_norm(at<const float>(x), n, at<double>(workspace), at<double>(norm), at<float>(scale), limit,
                     stream_of(stream));
}

void find_nonfinite(Address x, std::size_t n, int item_bytes, Address from_bad, Address stream) {
  auto* const out = at<unsigned long long>(from_bad);
  if (item_bytes == 8)
    cuda::find_nonfinite(at<const double>(x), n, out, stream_of(stream));
  else
    cuda::find_nonfinite(at<const float>(x), n, out, stream_of(stream));
}

void mark_beyond(Address x, std::size_t n, int item_bytes, double limit, Address from_bad, Address stream) {
  auto* const out = at<unsigned long long>(from_bad);
  if (item_bytes == 8)
    cuda::mark_beyond(at<double>(x), n, limit, out, stream_of(stream));
  else
    cuda::mark_beyond(at<float>(x), n, limit, out, stream_of(stream));
}

void accumulate(Address x, std::size_t n, Address residual, Address momentum, float scale, Address device_scale,
                float decay, Address findings, Address stream) {
  require(residual, "there is nothing to accumulate in without a residual");
  cuda::accumulate(source(x, residual, momentum, scale, device_scale, decay), n, at<cuda::Findings>(findings),
                   stream_of(stream));
}

void top_k(Address x, std::size_t n, std::size_t k, Address indices, Address values, Address workspace,
           Address residual, Address momentum, float scale, Address device_scale, float decay, Address findings,
           Address stream) {
  require_int32(n);
  require(1 <= k && k <= n, "k is outside of 1 ... n");
  cuda::top_k(source(x, residual, momentum, scale, device_scale, decay), n, k, at<std::int32_t>(indices),
              at<float>(values), at<void>(workspace), at<cuda::Findings>(findings), stream_of(stream));
}

void threshold(Address x, std::size_t n, float bound, Address indices, Address values, std::size_t capacity,
               Address workspace, Address residual, Address momentum, float scale, Address device_scale, float decay,
               Address findings, Address stream) {
  require_int32(n);
  require(bound >= 0, "the bound is not a number from 0 up");
  cuda::threshold(source(x, residual, momentum, scale, device_scale, decay), n, bound, at<std::int32_t>(indices),
                  at<float>(values), std::min(capacity, n), at<void>(workspace), at<cuda::Findings>(findings),
                  stream_of(stream));
}

void clear_at(Address dense, Address indices, std::size_t count, Address stream) {
  cuda::clear_at(at<float>(dense), at<const std::int32_t>(indices), count, stream_of(stream));
}

void scatter_sum(Address dense, std::size_t n, const std::vector<Address>& indices, const std::vector<Address>& values,
                 const std::vector<std::size_t>& counts, std::size_t lo, std::size_t hi, float scale, Address stream) {
  require_int32(n);
  require(indices.size() == values.size() && indices.size() == counts.size(), "the lists are not of one number");
  require(lo <= hi && hi <= n, "the range leaves the dense array");
  std::size_t r = 0;
  do {  // once without lists too: the sum of nothing is zero
    cuda::SparseLists lists;
    const bool add = r > 0;
    for (; r < indices.size() && lists.size < cuda::SparseLists::most; ++r, ++lists.size) {
      require_int32(counts[r]);
      lists.indices[lists.size] = at<const std::int32_t>(indices[r]);
      lists.values[lists.size] = at<const float>(values[r]);
      lists.counts[lists.size] = static_cast<unsigned>(counts[r]);
    }
    cuda::scatter_sum(at<float>(dense), lists, lo, hi, scale, add, stream_of(stream));
  } while (r < indices.size());
}

}  // namespace

void bind_cuda_codec(nb::module_& m) {
  m.def("encode16", &encode16, "x"_a, "residual"_a, "out"_a, "n"_a, "dtype"_a, "scale"_a, "limit"_a, "findings"_a,
        "stream"_a, "As in _core; the counts go to findings[1:].");
  m.def("decode16", &decode16, "x"_a, "out"_a, "n"_a, "dtype"_a, "scale"_a, "stream"_a, "As in _core.");
  m.attr("squared_norm_parts") = cuda::squared_norm_parts;
  m.def("squared_norm", &squared_norm, "x"_a, "n"_a, "workspace"_a, "norm"_a, "scale"_a, "limit"_a, "stream"_a,
        "norm[0] = sum of squares; scale[0] = limit / sqrt(norm) where that is less than 1, else 1. The workspace\n"
        "holds squared_norm_parts float64.");
  m.def("find_nonfinite", &find_nonfinite, "x"_a, "n"_a, "item_bytes"_a, "from_bad"_a, "stream"_a,
        "from_bad[0] = elements from the first NaN or infinity to the end, or 0. Items are float32 or float64.");
  m.def("mark_beyond", &mark_beyond, "x"_a, "n"_a, "item_bytes"_a, "limit"_a, "from_bad"_a, "stream"_a,
        "As find_nonfinite, with what is NaN or beyond +-limit; where there is such an element, x[0] becomes NaN.");
  m.def("accumulate", &accumulate, "x"_a, "n"_a, "residual"_a, "momentum"_a, "scale"_a, "device_scale"_a, "decay"_a,
        "findings"_a, "stream"_a, "The accumulation of top_k without a selection.");
  m.def("candidate_capacity", &candidate_capacity, "n"_a, "k"_a, "Room that top_k needs for its candidates.");
  m.def("select_workspace", &cuda::select_workspace, "n"_a, "capacity"_a,
        "Bytes of workspace of a selection from n elements with room for `capacity` candidates.");
  m.def(
      "top_k", &top_k, "x"_a, "n"_a, "k"_a, "indices"_a, "values"_a, "workspace"_a, "residual"_a, "momentum"_a,
      "scale"_a, "device_scale"_a, "decay"_a, "findings"_a, "stream"_a,
      "As in _core, for 1 <= k <= n; the lists have room for k. Elements that are not finite are listed, reported in\n"
      "findings[2] and become 0 in residual and momentum.");
  m.def("threshold", &threshold, "x"_a, "n"_a, "bound"_a, "indices"_a, "values"_a, "capacity"_a, "workspace"_a,
        "residual"_a, "momentum"_a, "scale"_a, "device_scale"_a, "decay"_a, "findings"_a, "stream"_a,
        "As in _core; the count goes to findings[0]. Where it exceeds the capacity the lists are not written.");
  m.def("clear_at", &clear_at, "dense"_a, "indices"_a, "count"_a, "stream"_a, "dense[indices] = 0");
  m.def("scatter_sum", &scatter_sum, "dense"_a, "n"_a, "indices"_a, "values"_a, "counts"_a, "lo"_a, "hi"_a, "scale"_a,
        "stream"_a, "dense[lo:hi] = sum of values[r] * scale at indices[r], list after list.");
}

}  // namespace distopt

// The codec and selection kernels of the GPU. Arrays are addresses in device memory, 0 for none; the stream is the
// handle as an integer; findings are four int64 in device memory, see cuda/codec.h.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "base/select_rules.h"
#include "bind/cuda.h"
#include "cuda/check.h"
#include "cuda/codec.h"
#include "cuda/select.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace distopt {
namespace {

void scatter_sum(Address dense, std::size_t n, const std::vector<Address>& indices, const std::vector<Address>& values,
                 const std::vector<std::size_t>& counts, std::size_t lo, std::size_t hi, float scale, Address stream) {
  cuda::require_int32(n);
  require(indices.size() == values.size() && indices.size() == counts.size(), "the lists are not of one number");
  require(lo <= hi && hi <= n, "the range leaves the dense array");
  std::size_t r = 0;
  do {  // once without lists too: the sum of nothing is zero
    cuda::SparseLists lists;
    const bool add = r > 0;
    for (; r < indices.size() && lists.size < cuda::SparseLists::most; ++r, ++lists.size) {
      cuda::require_int32(counts[r]);
      lists.indices[lists.size] = at<const std::int32_t>(indices[r]);
      lists.values[lists.size] = at<const float>(values[r]);
      lists.counts[lists.size] = static_cast<unsigned>(counts[r]);
    }
    cuda::scatter_sum(at<float>(dense), lists, lo, hi, scale, add, stream_of(stream));
  } while (r < indices.size());
}

}  // namespace

template <>
struct Passed<DType> {
  using Type = std::string;
  static DType take(const Type& name) {
    if (name == "float16") return DType::float16;
    require(name == "bfloat16", "the 16-bit types are float16 and bfloat16");
    return DType::bfloat16;
  }
};

// x, residual, momentum, scale, device_scale, decay, new_residual, new_momentum
template <>
struct Passed<cuda::Source> {
  using Type = std::tuple<Address, Address, Address, float, Address, float, Address, Address>;
  static cuda::Source take(const Type& given) {
    const auto [x, residual, momentum, scale, device_scale, decay, new_residual, new_momentum] = given;
    require(!momentum || residual, "momentum needs a residual");
    return {at<const float>(x),
            at<const float>(residual),
            at<const float>(momentum),
            scale,
            at<const float>(device_scale),
            decay,
            at<float>(new_residual),
            at<float>(new_momentum)};
  }
};

void bind_cuda_codec(nb::module_& m) {
  define(m, "encode16", &cuda::encode16, "As in _core; the counts go to findings[1:].");
  define(m, "decode16", &cuda::decode16, "As in _core.");
  m.attr("squared_norm_parts") = cuda::squared_norm_parts;
  define(m, "squared_norm", &cuda::squared_norm,
         "norm[0] = sum of squares; scale[0] = limit / sqrt(norm) where that is less than 1, else 1. The workspace\n"
         "holds squared_norm_parts float64.");
  define_typed(m, "find_nonfinite", &cuda::find_nonfinite<float>, &cuda::find_nonfinite<double>,
               "from_bad[0] = elements from the first NaN or infinity to the end, or 0.");
  define_typed(
      m, "mark_beyond", &cuda::mark_beyond<float>, &cuda::mark_beyond<double>,
      "As find_nonfinite, with what is NaN or beyond +-limit; where there is such an element, x[0] becomes NaN.");
  define(m, "accumulate", &cuda::accumulate, "The accumulation of top_k without a selection.");
  m.def("candidate_capacity", &candidate_capacity, "n"_a, "k"_a, "Room that top_k needs for its candidates.");
  m.def("select_workspace", &cuda::select_workspace, "n"_a, "capacity"_a,
        "Bytes of workspace of a selection from n elements with room for `capacity` candidates.");
  define(m, "top_k", &cuda::top_k,
         "As in _core, for 1 <= k <= n; the lists have room for k. Elements that are not finite are listed, and\n"
         "reported in findings[2].");
  define(m, "threshold", &cuda::threshold,
         "As in _core; the count goes to findings[0]. Where it exceeds the capacity the lists are not written.");
  define(m, "clear_at", &cuda::clear_at, "dense[indices] = 0");
  m.def("scatter_sum", &scatter_sum, "dense"_a, "n"_a, "indices"_a, "values"_a, "counts"_a, "lo"_a, "hi"_a, "scale"_a,
        "stream"_a, "dense[lo:hi] = sum of values[r] * scale at indices[r], list after list.");
}

}  // namespace distopt

// Products by cuBLAS, and pieces of a step as CUDA graphs, for Python: addresses and streams are integers.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <map>
#include <stdexcept>

#include "base/types.h"
#include "bind/cuda.h"
#include "cuda/check.h"
#include "cuda/cublas_api.h"
#include "cuda/step_graph.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace distopt {
namespace {

// The products of the current device.
cublas::Products& products_of(const std::string& library, bool tf32) {
  static std::map<int, cublas::Products> by_device;
  int device = 0;
  DISTOPT_CUDA_CHECK(cudaGetDevice(&device));
  const auto found = by_device.find(device);
  if (found != by_device.end()) return found->second;
  return by_device.try_emplace(device, cublas::load(library), tf32).first->second;
}

void bind_products(nb::module_& m) {
  nb::class_<cublas::Products>(m, "Products", "Matrix products on one device, by cuBLAS.")
      .def(
          "multiply",
          [](cublas::Products& self, int dtype, int rows, int columns, int inner, bool a_transposed, bool b_transposed,
             bool accumulate, Address a, Address b, Address c, Address workspace, std::size_t workspace_bytes,
             Address stream) {
            const auto with = [&](auto zero) {
              using T = decltype(zero);
              const cublas::Product<T> product{rows,       columns,  inner,    a_transposed, b_transposed,
                                               accumulate, at<T>(a), at<T>(b), at<T>(c)};
              self.multiply(product, {at<void>(workspace), workspace_bytes}, stream_of(stream));
            };
            if (dtype == static_cast<int>(DType::float32)) return with(0.0f);
            if (dtype == static_cast<int>(DType::float64)) return with(0.0);
            throw std::invalid_argument("products are computed in float32 and float64, not in type " +
                                        std::to_string(dtype));
          },
          "dtype"_a, "rows"_a, "columns"_a, "inner"_a, "a_transposed"_a, "b_transposed"_a, "accumulate"_a, "a"_a, "b"_a,
          "c"_a, "workspace"_a, "workspace_bytes"_a, "stream"_a);
  m.def("products", &products_of, "library"_a, "tf32"_a, nb::rv_policy::reference,
        "Products on the current device; `library` and `tf32` count at the first call for it.");
}

}  // namespace

void bind_cuda_step(nb::module_& m) {
  bind_products(m);
  nb::class_<GraphPiece>(m, "GraphPiece", "Work that was recorded on a stream.")
      .def(
          "launch", [](const GraphPiece& self, Address stream) { self.launch(stream_of(stream)); }, "stream"_a,
          nb::call_guard<nb::gil_scoped_release>(), "Enqueue it; waits where the stream is full.")
      .def_prop_ro("nodes", &GraphPiece::nodes);
  m.def("begin_capture", [](Address stream) { begin_capture(stream_of(stream)); }, "stream"_a);
  m.def("end_capture", [](Address stream) { return end_capture(stream_of(stream)); }, "stream"_a);
  m.def("abort_capture", [](Address stream) { abort_capture(stream_of(stream)); }, "stream"_a);
  m.def(
      "allow_in_capture",
      [](const nb::callable& call) {
        const Relaxed relaxed;
        return call();
      },
      "call"_a, "The result of `call`, whose calls of CUDA this thread's recordings do not forbid.");
}

}  // namespace distopt

// Convolutions and pooling on the GPU for Python, as in cuda_elementwise.cpp.
#include "bind/cuda.h"
#include "cuda/images.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace distopt {
namespace {

// As Python passes it: h, w, kh, kw, sh, sw, ph, pw, oh, ow.
using Sizes = nb::tuple;

cuda::Window window_of(const Sizes& s) {
  const auto i = [&](int k) { return nb::cast<int>(s[static_cast<std::size_t>(k)]); };
  return {i(0), i(1), i(2), i(3), i(4), i(5), i(6), i(7), i(8), i(9)};
}

// Planes in the layout N, C, H, W, or in the rows of a product [channels, images * pixels].
template <class T>
cuda::Planes<T> planes_of(T* data, int images, int channels, std::size_t pixels, bool rows) {
  if (rows) return {data, pixels, std::size_t(images) * pixels};
  return {data, std::size_t(channels) * pixels, pixels};
}

void bind_convolution(nb::module_& m) {
  define_typed(
      m, "lower",
      [](auto zero, int images, int channels, Sizes window, Address x, Address columns, Address stream) {
        using T = decltype(zero);
        cuda::lower<T>({images, channels}, window_of(window), at<T>(x), at<T>(columns), stream_of(stream));
      },
      "images"_a, "channels"_a, "window"_a, "x"_a, "columns"_a, "stream"_a);
  define_typed(
      m, "gather_columns",
      [](auto zero, int images, int channels, Sizes window, Address columns, Address dx, Address stream) {
        using T = decltype(zero);
        cuda::gather_columns<T>({images, channels}, window_of(window), at<T>(columns), at<T>(dx), stream_of(stream));
      },
      "images"_a, "channels"_a, "window"_a, "columns"_a, "dx"_a, "stream"_a);
  define_typed(
      m, "spread",
      [](auto zero, int images, int channels, int pixels, Address x, bool rows, Address bias, bool relu, Address y,
         Address stream) {
        using T = decltype(zero);
        const auto planes = planes_of<const T>(at<T>(x), images, channels, std::size_t(pixels), rows);
        cuda::spread<T>({images, channels}, pixels, planes, at<T>(bias), relu, at<T>(y), stream_of(stream));
      },
      "images"_a, "channels"_a, "pixels"_a, "x"_a, "rows"_a, "bias"_a, "relu"_a, "y"_a, "stream"_a);
  define_typed(
      m, "collect",
      [](auto zero, int images, int channels, int pixels, Address dy, Address y, Address dx, bool rows,
         Address stream) {
        using T = decltype(zero);
        const auto planes = planes_of<T>(at<T>(dx), images, channels, std::size_t(pixels), rows);
        cuda::collect<T>({images, channels}, pixels, at<T>(dy), at<T>(y), planes, stream_of(stream));
      },
      "images"_a, "channels"_a, "pixels"_a, "dy"_a, "y"_a, "dx"_a, "rows"_a, "stream"_a);
  define_typed(
      m, "channel_sums",
      [](auto zero, int images, int channels, int pixels, Address x, bool rows, bool add, Address out, Address stream) {
        using T = decltype(zero);
        const auto planes = planes_of<const T>(at<T>(x), images, channels, std::size_t(pixels), rows);
        cuda::channel_sums<T>({images, channels}, pixels, planes, add, at<T>(out), stream_of(stream));
      },
      "images"_a, "channels"_a, "pixels"_a, "x"_a, "rows"_a, "add"_a, "out"_a, "stream"_a);
}

void bind_pooling(nb::module_& m) {
  define_typed(
      m, "max_pool",
      [](auto zero, int images, int channels, Sizes window, Address x, bool rows, Address bias, bool relu, Address y,
         Address taken, Address stream) {
        using T = decltype(zero);
        const cuda::Window s = window_of(window);
        const auto planes = planes_of<const T>(at<T>(x), images, channels, std::size_t(s.h) * s.w, rows);
        cuda::max_pool<T>({images, channels}, s, planes, at<T>(bias), relu, at<T>(y), at<std::uint8_t>(taken),
                          stream_of(stream));
      },
      "images"_a, "channels"_a, "window"_a, "x"_a, "rows"_a, "bias"_a, "relu"_a, "y"_a, "taken"_a, "stream"_a);
  define_typed(
      m, "max_pool_backward",
      [](auto zero, int images, int channels, Sizes window, Address dy, Address y, Address taken, Address dx, bool rows,
         Address stream) {
        using T = decltype(zero);
        const cuda::Window s = window_of(window);
        const auto planes = planes_of<T>(at<T>(dx), images, channels, std::size_t(s.h) * s.w, rows);
        cuda::max_pool_backward<T>({images, channels}, s, at<T>(dy), at<T>(y), at<std::uint8_t>(taken), planes,
                                   stream_of(stream));
      },
      "images"_a, "channels"_a, "window"_a, "dy"_a, "y"_a, "taken"_a, "dx"_a, "rows"_a, "stream"_a);
  define_typed(
      m, "avg_pool",
      [](auto zero, int images, int channels, Sizes window, Address x, Address y, Address stream) {
        using T = decltype(zero);
        cuda::avg_pool<T>({images, channels}, window_of(window), at<T>(x), at<T>(y), stream_of(stream));
      },
      "images"_a, "channels"_a, "window"_a, "x"_a, "y"_a, "stream"_a);
  define_typed(
      m, "avg_pool_backward",
      [](auto zero, int images, int channels, Sizes window, Address dy, Address dx, Address stream) {
        using T = decltype(zero);
        cuda::avg_pool_backward<T>({images, channels}, window_of(window), at<T>(dy), at<T>(dx), stream_of(stream));
      },
      "images"_a, "channels"_a, "window"_a, "dy"_a, "dx"_a, "stream"_a);
}

}  // namespace

void bind_cuda_images(nb::module_& m) {
  bind_convolution(m);
  bind_pooling(m);
}

}  // namespace distopt

// The numerics on the GPU for Python: device addresses, counts and a stream, all as integers. `distopt/ops/gpu.py`
// checks shapes and types before it calls.
#include <cmath>
#include <stdexcept>
#include <string>

#include "base/types.h"
#include "bind/cuda.h"
#include "cuda/compute.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace distopt {
namespace {

// Calls f with a zero of the element type.
template <class F>
void with_type(int dtype, F f) {
  if (dtype == static_cast<int>(DType::float32)) return f(0.0f);
  if (dtype == static_cast<int>(DType::float64)) return f(0.0);
  throw std::invalid_argument("kernels compute in float32 and float64, not in type " + std::to_string(dtype));
}

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
  m.def(
      "lower",
      [](int dtype, int images, int channels, Sizes window, Address x, Address columns, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::lower<T>({images, channels}, window_of(window), at<T>(x), at<T>(columns), stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "window"_a, "x"_a, "columns"_a, "stream"_a);
  m.def(
      "gather_columns",
      [](int dtype, int images, int channels, Sizes window, Address columns, Address dx, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::gather_columns<T>({images, channels}, window_of(window), at<T>(columns), at<T>(dx), stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "window"_a, "columns"_a, "dx"_a, "stream"_a);
  m.def(
      "spread",
      [](int dtype, int images, int channels, int pixels, Address x, bool rows, Address bias, bool relu, Address y,
         Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          const auto planes = planes_of<const T>(at<T>(x), images, channels, std::size_t(pixels), rows);
          cuda::spread<T>({images, channels}, pixels, planes, at<T>(bias), relu, at<T>(y), stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "pixels"_a, "x"_a, "rows"_a, "bias"_a, "relu"_a, "y"_a, "stream"_a);
  m.def(
      "collect",
      [](int dtype, int images, int channels, int pixels, Address dy, Address y, Address dx, bool rows,
         Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          const auto planes = planes_of<T>(at<T>(dx), images, channels, std::size_t(pixels), rows);
          cuda::collect<T>({images, channels}, pixels, at<T>(dy), at<T>(y), planes, stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "pixels"_a, "dy"_a, "y"_a, "dx"_a, "rows"_a, "stream"_a);
  m.def(
      "channel_sums",
      [](int dtype, int images, int channels, int pixels, Address x, bool rows, bool add, Address out, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          const auto planes = planes_of<const T>(at<T>(x), images, channels, std::size_t(pixels), rows);
          cuda::channel_sums<T>({images, channels}, pixels, planes, add, at<T>(out), stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "pixels"_a, "x"_a, "rows"_a, "add"_a, "out"_a, "stream"_a);
}

void bind_pooling(nb::module_& m) {
  m.def(
      "max_pool",
      [](int dtype, int images, int channels, Sizes window, Address x, bool rows, Address bias, bool relu, Address y,
         Address taken, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          const cuda::Window s = window_of(window);
          const auto planes = planes_of<const T>(at<T>(x), images, channels, std::size_t(s.h) * s.w, rows);
          cuda::max_pool<T>({images, channels}, s, planes, at<T>(bias), relu, at<T>(y), at<std::uint8_t>(taken),
                            stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "window"_a, "x"_a, "rows"_a, "bias"_a, "relu"_a, "y"_a, "taken"_a,
      "stream"_a);
  m.def(
      "max_pool_backward",
      [](int dtype, int images, int channels, Sizes window, Address dy, Address y, Address taken, Address dx, bool rows,
         Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          const cuda::Window s = window_of(window);
          const auto planes = planes_of<T>(at<T>(dx), images, channels, std::size_t(s.h) * s.w, rows);
          cuda::max_pool_backward<T>({images, channels}, s, at<T>(dy), at<T>(y), at<std::uint8_t>(taken), planes,
                                     stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "window"_a, "dy"_a, "y"_a, "taken"_a, "dx"_a, "rows"_a, "stream"_a);
  m.def(
      "avg_pool",
      [](int dtype, int images, int channels, Sizes window, Address x, Address y, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::avg_pool<T>({images, channels}, window_of(window), at<T>(x), at<T>(y), stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "window"_a, "x"_a, "y"_a, "stream"_a);
  m.def(
      "avg_pool_backward",
      [](int dtype, int images, int channels, Sizes window, Address dy, Address dx, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::avg_pool_backward<T>({images, channels}, window_of(window), at<T>(dy), at<T>(dx), stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "window"_a, "dy"_a, "dx"_a, "stream"_a);
}

template <class Function>
void def_map(nb::module_& m, const char* name, Function function) {
  m.def(
      name,
      [function](int dtype, Address x, Address y, std::size_t count, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          function(static_cast<const T*>(at<T>(x)), at<T>(y), count, stream_of(stream));
        });
      },
      "dtype"_a, "x"_a, "y"_a, "count"_a, "stream"_a);
}

template <class Function>
void def_map_backward(nb::module_& m, const char* name, Function function) {
  m.def(
      name,
      [function](int dtype, Address dy, Address y, Address dx, std::size_t count, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          function(static_cast<const T*>(at<T>(dy)), static_cast<const T*>(at<T>(y)), at<T>(dx), count,
                   stream_of(stream));
        });
      },
      "dtype"_a, "dy"_a, "y"_a, "dx"_a, "count"_a, "stream"_a);
}

void bind_rows(nb::module_& m) {
  def_map(m, "relu", [](auto... arguments) { cuda::relu(arguments...); });
  def_map(m, "sigmoid", [](auto... arguments) { cuda::sigmoid(arguments...); });
  def_map_backward(m, "relu_backward", [](auto... arguments) { cuda::relu_backward(arguments...); });
  def_map_backward(m, "sigmoid_backward", [](auto... arguments) { cuda::sigmoid_backward(arguments...); });
  m.def(
      "add_bias",
      [](int dtype, Address y, Address bias, std::size_t rows, int columns, bool relu, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::add_bias<T>(at<T>(y), at<T>(bias), rows, columns, relu, stream_of(stream));
        });
      },
      "dtype"_a, "y"_a, "bias"_a, "rows"_a, "columns"_a, "relu"_a, "stream"_a);
  m.def(
      "column_sums",
      [](int dtype, Address matrix, std::size_t rows, int columns, Address out, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::column_sums<T>(at<T>(matrix), rows, columns, at<T>(out), stream_of(stream));
        });
      },
      "dtype"_a, "matrix"_a, "rows"_a, "columns"_a, "out"_a, "stream"_a);
  m.def(
      "softmax",
      [](int dtype, Address x, Address y, std::size_t rows, int columns, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::softmax<T>(at<T>(x), at<T>(y), rows, columns, stream_of(stream));
        });
      },
      "dtype"_a, "x"_a, "y"_a, "rows"_a, "columns"_a, "stream"_a);
  m.def(
      "cross_entropy",
      [](int dtype, Address logits, Address labels, Address target, std::size_t rows, int columns, Address probability,
         Address row_loss, Address loss, Address error, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::cross_entropy<T>(at<T>(logits), at<std::int64_t>(labels), at<T>(target), rows, columns,
                                 at<T>(probability), at<double>(row_loss), at<T>(loss), at<std::int64_t>(error),
                                 stream_of(stream));
        });
      },
      "dtype"_a, "logits"_a, "labels"_a, "target"_a, "rows"_a, "columns"_a, "probability"_a, "row_loss"_a, "loss"_a,
      "error"_a, "stream"_a);
  m.def(
      "cross_entropy_backward",
      [](int dtype, Address probability, Address labels, Address target, Address scale, double factor, std::size_t rows,
         int columns, Address dlogits, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::cross_entropy_backward<T>(at<T>(probability), at<std::int64_t>(labels), at<T>(target), at<T>(scale),
                                          factor, rows, columns, at<T>(dlogits), stream_of(stream));
        });
      },
      "dtype"_a, "probability"_a, "labels"_a, "target"_a, "scale"_a, "factor"_a, "rows"_a, "columns"_a, "dlogits"_a,
      "stream"_a);
}

void bind_batch_norm(nb::module_& m) {
  m.def(
      "channel_moments",
      [](int dtype, int images, int channels, int pixels, Address x, Address mean, Address inverse_deviation,
         Address running_mean, Address running_var, double momentum, double eps, bool training, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::channel_moments<T>({images, channels}, pixels, at<T>(x),
                                   {at<T>(mean), at<T>(inverse_deviation), at<T>(running_mean), at<T>(running_var)},
                                   momentum, eps, training, stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "pixels"_a, "x"_a, "mean"_a, "inverse_deviation"_a, "running_mean"_a,
      "running_var"_a, "momentum"_a, "eps"_a, "training"_a, "stream"_a);
  m.def(
      "normalize",
      [](int dtype, int images, int channels, int pixels, Address x, Address mean, Address inverse_deviation,
         Address gamma, Address beta, Address y, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::normalize<T>({images, channels}, pixels, at<T>(x), {at<T>(mean), at<T>(inverse_deviation)},
                             at<T>(gamma), at<T>(beta), at<T>(y), stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "pixels"_a, "x"_a, "mean"_a, "inverse_deviation"_a, "gamma"_a, "beta"_a,
      "y"_a, "stream"_a);
  m.def(
      "normalize_backward",
      [](int dtype, int images, int channels, int pixels, Address dy, Address x, Address mean,
         Address inverse_deviation, Address gamma, bool training, Address dgamma, Address dbeta, Address dx,
         Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::normalize_backward<T>({images, channels}, pixels, at<T>(dy), at<T>(x),
                                      {at<T>(mean), at<T>(inverse_deviation)}, at<T>(gamma), training, at<T>(dgamma),
                                      at<T>(dbeta), at<T>(dx), stream_of(stream));
        });
      },
      "dtype"_a, "images"_a, "channels"_a, "pixels"_a, "dy"_a, "x"_a, "mean"_a, "inverse_deviation"_a, "gamma"_a,
      "training"_a, "dgamma"_a, "dbeta"_a, "dx"_a, "stream"_a);
}

void bind_updates(nb::module_& m) {
  m.def(
      "sgd",
      [](int dtype, Address param, Address grad, Address buffer, std::size_t count, double lr, double momentum,
         double dampening, double weight_decay, bool nesterov, bool first, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          const cuda::SgdRule rule{lr, momentum, 1 - dampening, weight_decay, nesterov, first};
          cuda::sgd<T>(at<T>(param), at<T>(grad), at<T>(buffer), count, rule, stream_of(stream));
        });
      },
      "dtype"_a, "param"_a, "grad"_a, "momentum_buffer"_a, "count"_a, "lr"_a, "momentum"_a, "dampening"_a,
      "weight_decay"_a, "nesterov"_a, "first"_a, "stream"_a);
  m.def(
      "adam",
      [](int dtype, Address param, Address grad, Address first, Address second, std::size_t count, int step, double lr,
         double beta1, double beta2, double eps, double weight_decay, Address stream) {
        if (step < 1) throw std::invalid_argument("Adam counts steps from 1; got step " + std::to_string(step));
        const double correction1 = 1 - std::pow(beta1, double(step)), correction2 = 1 - std::pow(beta2, double(step));
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          const cuda::AdamRule rule{lr / correction1, beta1, beta2, eps, weight_decay, std::sqrt(correction2)};
          cuda::adam<T>(at<T>(param), at<T>(grad), at<T>(first), at<T>(second), count, rule, stream_of(stream));
        });
      },
      "dtype"_a, "param"_a, "grad"_a, "m"_a, "v"_a, "count"_a, "step"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a,
      "weight_decay"_a, "stream"_a);
  m.def(
      "rmsprop",
      [](int dtype, Address param, Address grad, Address running, std::size_t count, double lr, double rho, double eps,
         double weight_decay, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::rmsprop<T>(at<T>(param), at<T>(grad), at<T>(running), count, lr, rho, eps, weight_decay,
                           stream_of(stream));
        });
      },
      "dtype"_a, "param"_a, "grad"_a, "running"_a, "count"_a, "lr"_a, "rho"_a, "eps"_a, "weight_decay"_a, "stream"_a);
  m.def(
      "adagrad",
      [](int dtype, Address param, Address grad, Address history, std::size_t count, double lr, double eps,
         double weight_decay, Address stream) {
        with_type(dtype, [&](auto zero) {
          using T = decltype(zero);
          cuda::adagrad<T>(at<T>(param), at<T>(grad), at<T>(history), count, lr, eps, weight_decay, stream_of(stream));
        });
      },
      "dtype"_a, "param"_a, "grad"_a, "history"_a, "count"_a, "lr"_a, "eps"_a, "weight_decay"_a, "stream"_a);
}

}  // namespace

void bind_cuda_compute(nb::module_& m) {
  bind_convolution(m);
  bind_pooling(m);
  bind_rows(m);
  bind_batch_norm(m);
  bind_updates(m);
}

}  // namespace distopt

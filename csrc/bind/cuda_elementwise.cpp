// Layers, losses and updates on the GPU for Python: device addresses, counts and a stream, all as integers.
// distopt/nn/kernels checks shapes and types before it calls.
#include <cmath>

#include "bind/cuda.h"
#include "cuda/elementwise.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace distopt {
namespace {

template <class Function>
void def_map(nb::module_& m, const char* name, Function function) {
  define_typed(
      m, name,
      [function](auto zero, Address x, Address y, std::size_t count, Address stream) {
        using T = decltype(zero);
        function(static_cast<const T*>(at<T>(x)), at<T>(y), count, stream_of(stream));
      },
      "x"_a, "y"_a, "count"_a, "stream"_a);
}

template <class Function>
void def_map_backward(nb::module_& m, const char* name, Function function) {
  define_typed(
      m, name,
      [function](auto zero, Address dy, Address y, Address dx, std::size_t count, Address stream) {
        using T = decltype(zero);
        function(static_cast<const T*>(at<T>(dy)), static_cast<const T*>(at<T>(y)), at<T>(dx), count,
                 stream_of(stream));
      },
      "dy"_a, "y"_a, "dx"_a, "count"_a, "stream"_a);
}

void bind_rows(nb::module_& m) {
  def_map(m, "relu", [](auto... arguments) { cuda::relu(arguments...); });
  def_map(m, "sigmoid", [](auto... arguments) { cuda::sigmoid(arguments...); });
  def_map_backward(m, "relu_backward", [](auto... arguments) { cuda::relu_backward(arguments...); });
  def_map_backward(m, "sigmoid_backward", [](auto... arguments) { cuda::sigmoid_backward(arguments...); });
  define_typed(
      m, "add_bias",
      [](auto zero, Address y, Address bias, std::size_t rows, int columns, bool relu, Address stream) {
        using T = decltype(zero);
        cuda::add_bias<T>(at<T>(y), at<T>(bias), rows, columns, relu, stream_of(stream));
      },
      "y"_a, "bias"_a, "rows"_a, "columns"_a, "relu"_a, "stream"_a);
  define_typed(
      m, "column_sums",
      [](auto zero, Address matrix, std::size_t rows, int columns, Address out, Address stream) {
        using T = decltype(zero);
        cuda::column_sums<T>(at<T>(matrix), rows, columns, at<T>(out), stream_of(stream));
      },
      "matrix"_a, "rows"_a, "columns"_a, "out"_a, "stream"_a);
  define_typed(
      m, "softmax",
      [](auto zero, Address x, Address y, std::size_t rows, int columns, Address stream) {
        using T = decltype(zero);
        cuda::softmax<T>(at<T>(x), at<T>(y), rows, columns, stream_of(stream));
      },
      "x"_a, "y"_a, "rows"_a, "columns"_a, "stream"_a);
  define_typed(
      m, "cross_entropy",
      [](auto zero, Address logits, Address labels, Address target, std::size_t rows, int columns, Address probability,
         Address row_loss, Address loss, Address error, Address stream) {
        using T = decltype(zero);
        cuda::cross_entropy<T>(at<T>(logits), at<std::int64_t>(labels), at<T>(target), rows, columns,
                               at<T>(probability), at<double>(row_loss), at<T>(loss), at<std::int64_t>(error),
                               stream_of(stream));
      },
      "logits"_a, "labels"_a, "target"_a, "rows"_a, "columns"_a, "probability"_a, "row_loss"_a, "loss"_a, "error"_a,
      "stream"_a);
  define_typed(
      m, "cross_entropy_backward",
      [](auto zero, Address probability, Address labels, Address target, Address scale, double factor, std::size_t rows,
         int columns, Address dlogits, Address stream) {
        using T = decltype(zero);
        cuda::cross_entropy_backward<T>(at<T>(probability), at<std::int64_t>(labels), at<T>(target), at<T>(scale),
                                        factor, rows, columns, at<T>(dlogits), stream_of(stream));
      },
      "probability"_a, "labels"_a, "target"_a, "scale"_a, "factor"_a, "rows"_a, "columns"_a, "dlogits"_a, "stream"_a);
}

void bind_batch_norm(nb::module_& m) {
  define_typed(
      m, "channel_moments",
      [](auto zero, int images, int channels, int pixels, Address x, Address mean, Address inverse_deviation,
         Address running_mean, Address running_var, double momentum, double eps, bool training, Address stream) {
        using T = decltype(zero);
        cuda::channel_moments<T>({images, channels}, pixels, at<T>(x),
                                 {at<T>(mean), at<T>(inverse_deviation), at<T>(running_mean), at<T>(running_var)},
                                 momentum, eps, training, stream_of(stream));
      },
      "images"_a, "channels"_a, "pixels"_a, "x"_a, "mean"_a, "inverse_deviation"_a, "running_mean"_a, "running_var"_a,
      "momentum"_a, "eps"_a, "training"_a, "stream"_a);
  define_typed(
      m, "normalize",
      [](auto zero, int images, int channels, int pixels, Address x, Address mean, Address inverse_deviation,
         Address gamma, Address beta, Address y, Address stream) {
        using T = decltype(zero);
        cuda::normalize<T>({images, channels}, pixels, at<T>(x), {at<T>(mean), at<T>(inverse_deviation)}, at<T>(gamma),
                           at<T>(beta), at<T>(y), stream_of(stream));
      },
      "images"_a, "channels"_a, "pixels"_a, "x"_a, "mean"_a, "inverse_deviation"_a, "gamma"_a, "beta"_a, "y"_a,
      "stream"_a);
  define_typed(
      m, "normalize_backward",
      [](auto zero, int images, int channels, int pixels, Address dy, Address x, Address mean,
         Address inverse_deviation, Address gamma, bool training, Address dgamma, Address dbeta, Address dx,
         Address stream) {
        using T = decltype(zero);
        cuda::normalize_backward<T>({images, channels}, pixels, at<T>(dy), at<T>(x),
                                    {at<T>(mean), at<T>(inverse_deviation)}, at<T>(gamma), training, at<T>(dgamma),
                                    at<T>(dbeta), at<T>(dx), stream_of(stream));
      },
      "images"_a, "channels"_a, "pixels"_a, "dy"_a, "x"_a, "mean"_a, "inverse_deviation"_a, "gamma"_a, "training"_a,
      "dgamma"_a, "dbeta"_a, "dx"_a, "stream"_a);
}

void bind_updates(nb::module_& m) {
  define_typed(
      m, "sgd",
      [](auto zero, Address param, Address grad, Address buffer, std::size_t count, double lr, double momentum,
         double dampening, double weight_decay, bool nesterov, Address stream) {
        using T = decltype(zero);
        const cuda::SgdRule rule{lr, momentum, 1 - dampening, weight_decay, nesterov};
        cuda::sgd<T>(at<T>(param), at<T>(grad), at<T>(buffer), count, rule, stream_of(stream));
      },
      "param"_a, "grad"_a, "momentum_buffer"_a, "count"_a, "lr"_a, "momentum"_a, "dampening"_a, "weight_decay"_a,
      "nesterov"_a, "stream"_a);
  define_typed(
      m, "adam",
      [](auto zero, Address param, Address grad, Address first, Address second, std::size_t count, int step, double lr,
         double beta1, double beta2, double eps, double weight_decay, Address stream) {
        using T = decltype(zero);
        if (step < 1) throw std::invalid_argument("Adam counts steps from 1; got step " + std::to_string(step));
        const double correction1 = 1 - std::pow(beta1, double(step)), correction2 = 1 - std::pow(beta2, double(step));
        const cuda::AdamRule rule{lr / correction1, beta1, beta2, eps, weight_decay, std::sqrt(correction2)};
        cuda::adam<T>(at<T>(param), at<T>(grad), at<T>(first), at<T>(second), count, rule, stream_of(stream));
      },
      "param"_a, "grad"_a, "m"_a, "v"_a, "count"_a, "step"_a, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a,
      "stream"_a);
  define_typed(
      m, "rmsprop",
      [](auto zero, Address param, Address grad, Address running, std::size_t count, double lr, double rho, double eps,
         double weight_decay, Address stream) {
        using T = decltype(zero);
        cuda::rmsprop<T>(at<T>(param), at<T>(grad), at<T>(running), count, lr, rho, eps, weight_decay,
                         stream_of(stream));
      },
      "param"_a, "grad"_a, "running"_a, "count"_a, "lr"_a, "rho"_a, "eps"_a, "weight_decay"_a, "stream"_a);
  define_typed(
      m, "adagrad",
      [](auto zero, Address param, Address grad, Address history, std::size_t count, double lr, double eps,
         double weight_decay, Address stream) {
        using T = decltype(zero);
        cuda::adagrad<T>(at<T>(param), at<T>(grad), at<T>(history), count, lr, eps, weight_decay, stream_of(stream));
      },
      "param"_a, "grad"_a, "history"_a, "count"_a, "lr"_a, "eps"_a, "weight_decay"_a, "stream"_a);
}

}  // namespace

void bind_cuda_elementwise(nb::module_& m) {
  bind_rows(m);
  bind_batch_norm(m);
  bind_updates(m);
}

}  // namespace distopt

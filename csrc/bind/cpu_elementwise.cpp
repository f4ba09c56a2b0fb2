#include <cmath>

#include "bind/arrays.h"
#include "bind/gil.h"
#include "bind/rooms.h"
#include "cpu/elementwise.h"
#include "cpu/linear.h"

namespace distopt {
namespace {

template <class T>
const auto& elementwise() {
  return table_of<T>(elementwise_kernels());
}

template <class T>
LinearShape linear_shape(const Array<const T, 2>& x, const Array<const T, 2>& w) {
  const LinearShape s{Index(x.shape(0)), Index(x.shape(1)), Index(w.shape(1))};
  need(w, "w", {s.in, s.out});
  if (s.in < 1) throw std::invalid_argument("a linear layer needs at least one input");
  return s;
}

template <class T>
void linear(Array<const T, 2> x, Array<const T, 2> w, std::optional<Array<const T, 1>> b, Array<T, 2> y, bool relu) {
  const LinearShape s = linear_shape<T>(x, w);
  need(b, "b", {s.out});
  need(y, "y", {s.n, s.out});
  const WithoutGil unlocked;
  const auto& table = table_of<T>(linear_kernels());
  table.forward(s, x.data(), w.data(), data_of(b), y.data(), relu, scratch<T>(table.work_size(s)));
}

template <class T>
void linear_backward(Array<const T, 2> dy, std::optional<Array<const T, 2>> y, Array<const T, 2> x, Array<const T, 2> w,
                     std::optional<Array<T, 2>> dw, std::optional<Array<T, 1>> db, std::optional<Array<T, 2>> dx) {
  const LinearShape s = linear_shape<T>(x, w);
  need(dy, "dy", {s.n, s.out});
  need(y, "y", {s.n, s.out});
  need(dw, "dw", {s.in, s.out});
  need(db, "db", {s.out});
  need(dx, "dx", {s.n, s.in});
  const WithoutGil unlocked;
  const auto& table = table_of<T>(linear_kernels());
  table.backward(s, dy.data(), data_of(y), x.data(), w.data(), data_of(dw), data_of(db), data_of(dx),
                 scratch<T>(table.work_size(s)));
}

template <class T, auto Function>
void map(Dense<const T> x, Dense<T> y) {
  need_same_size(y, "y", x);
  const WithoutGil unlocked;
  (elementwise<T>().*Function)(x.data(), y.data(), Index(x.size()));
}

template <class T, auto Function>
void map_backward(Dense<const T> dy, Dense<const T> y, Dense<T> dx) {
  need_same_size(y, "y", dy);
  need_same_size(dx, "dx", dy);
  const WithoutGil unlocked;
  (elementwise<T>().*Function)(dy.data(), y.data(), dx.data(), Index(dy.size()));
}

template <class T>
void channel_moments(Array<const T, 3> x, Array<T, 1> mean, Array<T, 1> variance) {
  const Index n = x.shape(0), c = x.shape(1), pixels = x.shape(2);
  need(mean, "mean", {c});
  need(variance, "variance", {c});
  const WithoutGil unlocked;
  elementwise<T>().channel_moments(x.data(), n, c, pixels, mean.data(), variance.data());
}

template <class T>
void normalize(Array<const T, 3> x, Array<const T, 1> mean, Array<const T, 1> inverse_deviation,
               Array<const T, 1> gamma, Array<const T, 1> beta, Array<T, 3> y) {
  const Index n = x.shape(0), c = x.shape(1), pixels = x.shape(2);
  need(mean, "mean", {c});
  need(inverse_deviation, "inverse_deviation", {c});
  need(gamma, "gamma", {c});
  need(beta, "beta", {c});
  need(y, "y", {n, c, pixels});
  const WithoutGil unlocked;
  elementwise<T>().normalize(x.data(), n, c, pixels, mean.data(), inverse_deviation.data(), gamma.data(), beta.data(),
                             y.data());
}

template <class T>
void normalize_backward(Array<const T, 3> dy, Array<const T, 3> x, Array<const T, 1> mean,
                        Array<const T, 1> inverse_deviation, Array<const T, 1> gamma, bool training, Array<T, 1> dgamma,
                        Array<T, 1> dbeta, Array<T, 3> dx) {
  const Index n = x.shape(0), c = x.shape(1), pixels = x.shape(2);
  need(dy, "dy", {n, c, pixels});
  need(mean, "mean", {c});
  need(inverse_deviation, "inverse_deviation", {c});
  need(gamma, "gamma", {c});
  need(dgamma, "dgamma", {c});
  need(dbeta, "dbeta", {c});
  need(dx, "dx", {n, c, pixels});
  const WithoutGil unlocked;
  elementwise<T>().normalize_backward(dy.data(), x.data(), n, c, pixels, mean.data(), inverse_deviation.data(),
                                      gamma.data(), training, dgamma.data(), dbeta.data(), dx.data());
}

void need_columns(Index columns) {
  if (columns < 1) throw std::invalid_argument("softmax needs at least one class");
}

template <class T>
void softmax(Array<const T, 2> x, Array<T, 2> y) {
  const Index rows = x.shape(0), columns = x.shape(1);
  need_columns(columns);
  need(y, "y", {rows, columns});
  const WithoutGil unlocked;
  elementwise<T>().softmax(x.data(), y.data(), rows, columns);
}

// Labels are either class indices or one distribution per row.
template <class T>
struct Labels {
  const std::int64_t* index;
  const T* target;

  Labels(const std::optional<Array<const std::int64_t, 1>>& index, const std::optional<Array<const T, 2>>& target,
         Index rows, Index columns)
      : index(data_of(index)), target(data_of(target)) {
    if (index.has_value() == target.has_value()) throw std::invalid_argument("give either labels or target");
    need(index, "labels", {rows});
    need(target, "target", {rows, columns});
  }
};

template <class T>
Index cross_entropy(Array<const T, 2> logits, std::optional<Array<const std::int64_t, 1>> labels,
                    std::optional<Array<const T, 2>> target, Array<T, 2> probability, Array<T, 0> loss) {
  const Index rows = logits.shape(0), columns = logits.shape(1);
  need_columns(columns);
  const Labels<T> wanted(labels, target, rows, columns);
  need(probability, "probability", {rows, columns});
  const WithoutGil unlocked;
  return elementwise<T>().cross_entropy(logits.data(), wanted.index, wanted.target, rows, columns, probability.data(),
                                        loss.data());
}

template <class T>
Index cross_entropy_backward(Array<const T, 2> probability, std::optional<Array<const std::int64_t, 1>> labels,
                             std::optional<Array<const T, 2>> target, double scale, Array<T, 2> dlogits) {
  const Index rows = probability.shape(0), columns = probability.shape(1);
  const Labels<T> wanted(labels, target, rows, columns);
  need(dlogits, "dlogits", {rows, columns});
  const WithoutGil unlocked;
  return elementwise<T>().cross_entropy_backward(probability.data(), wanted.index, wanted.target, T(scale), rows,
                                                 columns, dlogits.data());
}

template <class T>
RunningMean<T> mean_of(double decay) {
  return {T(decay), T(1 - decay)};
}

template <class T>
void sgd(Dense<T> param, Dense<const T> grad, std::optional<Dense<T>> buffer, double lr, double momentum,
         double dampening, double weight_decay, bool nesterov) {
  need_same_size(grad, "grad", param);
  if (buffer) need_same_size(*buffer, "momentum_buffer", param);
  const WithoutGil unlocked;
  elementwise<T>().sgd(param.data(), grad.data(), data_of(buffer), Index(param.size()), {T(lr), T(weight_decay)},
                       T(momentum), T(1 - dampening), nesterov);
}

template <class T>
void adam(Dense<T> param, Dense<const T> grad, Dense<T> m, Dense<T> v, Index step, double lr, double beta1,
          double beta2, double eps, double weight_decay) {
  need_same_size(grad, "grad", param);
  need_same_size(m, "m", param);
  need_same_size(v, "v", param);
  if (step < 1) throw std::invalid_argument("Adam counts steps from 1; got step " + std::to_string(step));
  const double correction1 = 1 - std::pow(beta1, double(step)), correction2 = 1 - std::pow(beta2, double(step));
  const WithoutGil unlocked;
  elementwise<T>().adam(param.data(), grad.data(), m.data(), v.data(), Index(param.size()),
                        {T(lr / correction1), T(weight_decay)}, mean_of<T>(beta1), mean_of<T>(beta2), T(eps),
                        T(std::sqrt(correction2)));
}

template <class T>
void rmsprop(Dense<T> param, Dense<const T> grad, Dense<T> running, double lr, double rho, double eps,
             double weight_decay) {
  need_same_size(grad, "grad", param);
  need_same_size(running, "running", param);
  const WithoutGil unlocked;
  elementwise<T>().rmsprop(param.data(), grad.data(), running.data(), Index(param.size()), {T(lr), T(weight_decay)},
                           mean_of<T>(rho), T(eps));
}

template <class T>
void adagrad(Dense<T> param, Dense<const T> grad, Dense<T> history, double lr, double eps, double weight_decay) {
  need_same_size(grad, "grad", param);
  need_same_size(history, "history", param);
  const WithoutGil unlocked;
  elementwise<T>().adagrad(param.data(), grad.data(), history.data(), Index(param.size()), {T(lr), T(weight_decay)},
                           T(eps));
}

template <class T>
void bind_elementwise(nb::module_& m) {
  using K = ElementwiseTable<T>;
  define(m, "linear", &linear<T>, {"x", "w", "b", "y", "relu"});
  define(m, "linear_backward", &linear_backward<T>, {"dy", "y", "x", "w", "dw", "db", "dx"});
  define(m, "relu", &map<T, &K::relu>, {"x", "y"});
  define(m, "relu_backward", &map_backward<T, &K::relu_backward>, {"dy", "y", "dx"});
  define(m, "sigmoid", &map<T, &K::sigmoid>, {"x", "y"});
  define(m, "sigmoid_backward", &map_backward<T, &K::sigmoid_backward>, {"dy", "y", "dx"});
  define(m, "channel_moments", &channel_moments<T>, {"x", "mean", "variance"});
  define(m, "normalize", &normalize<T>, {"x", "mean", "inverse_deviation", "gamma", "beta", "y"});
  define(m, "normalize_backward", &normalize_backward<T>,
         {"dy", "x", "mean", "inverse_deviation", "gamma", "training", "dgamma", "dbeta", "dx"});
  define(m, "softmax", &softmax<T>, {"x", "y"});
  define(m, "cross_entropy", &cross_entropy<T>, {"logits", "labels", "target", "probability", "loss"});
  define(m, "cross_entropy_backward", &cross_entropy_backward<T>,
         {"probability", "labels", "target", "scale", "dlogits"});
  define(m, "sgd", &sgd<T>,
         {"param", "grad", "momentum_buffer", "lr", "momentum", "dampening", "weight_decay", "nesterov"});
  define(m, "adam", &adam<T>, {"param", "grad", "m", "v", "step", "lr", "beta1", "beta2", "eps", "weight_decay"});
  define(m, "rmsprop", &rmsprop<T>, {"param", "grad", "running", "lr", "rho", "eps", "weight_decay"});
  define(m, "adagrad", &adagrad<T>, {"param", "grad", "history", "lr", "eps", "weight_decay"});
}

}  // namespace

void bind_cpu_elementwise(nb::module_& m) {
  bind_elementwise<float>(m);
  bind_elementwise<double>(m);
}

}  // namespace distopt

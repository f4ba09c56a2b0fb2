#include "cpu/elementwise.h"

namespace distopt::DISTOPT_ISA {
namespace {

using Index = std::ptrdiff_t;

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }
inline float exponential(float x) { return __builtin_expf(x); }
inline double exponential(double x) { return __builtin_exp(x); }
inline float logarithm(float x) { return __builtin_logf(x); }
inline double logarithm(double x) { return __builtin_log(x); }

// A NaN passes through: hiding one here would hide a diverged run.
template <class T>
inline T rectify(T x) {
  return x < 0 ? 0 : x;
}

template <class T>
inline T rectify_gradient(T dy, T y) {
  return y <= 0 ? 0 : dy;
}

template <class T>
void relu(const T* __restrict__ x, T* __restrict__ y, Index count) {
  for (Index i = 0; i < count; ++i) y[i] = rectify(x[i]);
}

template <class T>
void relu_backward(const T* __restrict__ dy, const T* __restrict__ y, T* __restrict__ dx, Index count) {
  for (Index i = 0; i < count; ++i) dx[i] = rectify_gradient(dy[i], y[i]);
}

template <class T>
void sigmoid(const T* __restrict__ x, T* __restrict__ y, Index count) {
  for (Index i = 0; i < count; ++i) y[i] = 1 / (1 + exponential(-x[i]));
}

template <class T>
void sigmoid_backward(const T* __restrict__ dy, const T* __restrict__ y, T* __restrict__ dx, Index count) {
  for (Index i = 0; i < count; ++i) dx[i] = dy[i] * y[i] * (1 - y[i]);
}

// Sums of f(i) and g(i): sixteen partial sums let the compiler use vectors, and a wide accumulator for each plane's
// total keeps the error of a large batch small.
template <class T, class F>
inline double plane_sum(Index pixels, F f) {
  T part[16] = {};
  Index i = 0;
  for (; i + 16 <= pixels; i += 16)
    for (Index j = 0; j < 16; ++j) part[j] += f(i + j);
  for (; i < pixels; ++i) part[i % 16] += f(i);
  double sum = 0;
  for (Index j = 0; j < 16; ++j) sum += double(part[j]);
  return sum;
}

template <class T>
void channel_moments(const T* x, Index n, Index c, Index pixels, T* mean, T* variance) {
  const double count = double(n * pixels);
  for (Index k = 0; k < c; ++k) {
    double sum = 0, squares = 0;
    for (Index i = 0; i < n; ++i) {
      const T* row = x + (i * c + k) * pixels;
      sum += plane_sum<T>(pixels, [=](Index j) { return row[j]; });
    }
    const T center = mean[k] = T(sum / count);
    for (Index i = 0; i < n; ++i) {
      const T* row = x + (i * c + k) * pixels;
      squares += plane_sum<T>(pixels, [=](Index j) { return (row[j] - center) * (row[j] - center); });
    }
    variance[k] = T(squares / count);
  }
}

template <class T>
void normalize(const T* __restrict__ x, Index n, Index c, Index pixels, const T* mean, const T* inverse_deviation,
               const T* gamma, const T* beta, T* __restrict__ y) {
  for (Index i = 0; i < n * c; ++i, x += pixels, y += pixels) {
    const Index k = i % c;
    const T center = mean[k], scale = inverse_deviation[k] * gamma[k], shift = beta[k];
    for (Index j = 0; j < pixels; ++j) y[j] = (x[j] - center) * scale + shift;
  }
}

template <class T>
void normalize_backward(const T* dy, const T* x, Index n, Index c, Index pixels, const T* mean,
                        const T* inverse_deviation, const T* gamma, bool training, T* dgamma, T* dbeta, T* dx) {
  const double count = double(n * pixels);
  for (Index k = 0; k < c; ++k) {
    const T center = mean[k], inverse = inverse_deviation[k];
    double sum = 0, projection = 0;
    for (Index i = 0; i < n; ++i) {
      const T *rows = x + (i * c + k) * pixels, *slopes = dy + (i * c + k) * pixels;
      sum += plane_sum<T>(pixels, [=](Index j) { return slopes[j]; });
      projection += plane_sum<T>(pixels, [=](Index j) { return slopes[j] * ((rows[j] - center) * inverse); });
    }
    dbeta[k] = T(sum);
    dgamma[k] = T(projection);
    const T scale = gamma[k] * inverse;
    const T offset = training && count > 0 ? T(sum / count) : T(0);
    const T slope = training && count > 0 ? T(projection / count) : T(0);
    for (Index i = 0; i < n; ++i) {
      const Index at = (i * c + k) * pixels;
      const T* __restrict__ rows = x + at, * __restrict__ slopes = dy + at;
      T* __restrict__ to = dx + at;
      for (Index j = 0; j < pixels; ++j) to[j] = (slopes[j] - offset - (rows[j] - center) * inverse * slope) * scale;
    }
  }
}

// y = exp(x - maximum) and returns its sum.
template <class T>
inline T shifted_exponentials(const T* x, Index columns, T* y, T& maximum) {
  maximum = x[0];
  for (Index c = 1; c < columns; ++c) maximum = x[c] > maximum ? x[c] : maximum;
  T sum = 0;
  for (Index c = 0; c < columns; ++c) sum += y[c] = exponential(x[c] - maximum);
  return sum;
}

template <class T>
void softmax(const T* x, T* y, Index rows, Index columns) {
  for (Index r = 0; r < rows; ++r, x += columns, y += columns) {
    T maximum;
    const T sum = shifted_exponentials(x, columns, y, maximum);
    for (Index c = 0; c < columns; ++c) y[c] /= sum;
  }
}

template <class T>
Index cross_entropy(const T* logits, const std::int64_t* labels, const T* target, Index rows, Index columns,
                    T* probability, T* loss) {
  double total = 0;
  for (Index r = 0; r < rows; ++r, logits += columns, probability += columns) {
    if (!target && (labels[r] < 0 || labels[r] >= columns)) return r;
    T maximum;
    const T sum = shifted_exponentials(logits, columns, probability, maximum);
    const T log_sum = maximum + logarithm(sum);
    for (Index c = 0; c < columns; ++c) probability[c] /= sum;
    if (!target) {
      total += double(log_sum - logits[labels[r]]);
      continue;
    }
    for (Index c = 0; c < columns; ++c) total += double(target[r * columns + c] * (log_sum - logits[c]));
  }
  *loss = rows ? T(total / double(rows)) : T(0);
  return -1;
}

template <class T>
Index cross_entropy_backward(const T* probability, const std::int64_t* labels, const T* target, T scale, Index rows,
                             Index columns, T* dlogits) {
  for (Index r = 0; r < rows; ++r, probability += columns, dlogits += columns) {
    if (!target) {
      if (labels[r] < 0 || labels[r] >= columns) return r;
      for (Index c = 0; c < columns; ++c) dlogits[c] = probability[c] * scale;
      dlogits[labels[r]] -= scale;
      continue;
    }
    const T* share = target + r * columns;
    T sum = 0;
    for (Index c = 0; c < columns; ++c) sum += share[c];
    for (Index c = 0; c < columns; ++c) dlogits[c] = (probability[c] * sum - share[c]) * scale;
  }
  return -1;
}

template <class T, bool kMomentum, bool kNesterov>
void sgd_of(T* __restrict__ param, const T* __restrict__ grad, T* __restrict__ buffer, Index count, StepSize<T> step,
            T momentum, T kept) {
  for (Index i = 0; i < count; ++i) {
    T g = grad[i] + step.weight_decay * param[i];
    if constexpr (kMomentum) {
      const T v = momentum * buffer[i] + kept * g;
      buffer[i] = v;
      g = kNesterov ? g + momentum * v : v;
    }
    param[i] -= step.lr * g;
  }
}

template <class T>
void sgd(T* param, const T* grad, T* buffer, Index count, StepSize<T> step, T momentum, T kept, bool nesterov) {
  auto* update = &sgd_of<T, false, false>;
  if (buffer) update = nesterov ? &sgd_of<T, true, true> : &sgd_of<T, true, false>;
  update(param, grad, buffer, count, step, momentum, kept);
}

template <class T>
void adam(T* __restrict__ param, const T* __restrict__ grad, T* __restrict__ m, T* __restrict__ v, Index count,
          StepSize<T> step, RunningMean<T> first, RunningMean<T> second, T eps, T root_correction) {
  for (Index i = 0; i < count; ++i) {
    const T g = grad[i] + step.weight_decay * param[i];
    m[i] = first.decay * m[i] + first.share * g;
    v[i] = second.decay * v[i] + second.share * g * g;
    param[i] -= step.lr * (m[i] / (root(v[i]) / root_correction + eps));
  }
}

template <class T>
void rmsprop(T* __restrict__ param, const T* __restrict__ grad, T* __restrict__ running, Index count, StepSize<T> step,
             RunningMean<T> mean, T eps) {
  for (Index i = 0; i < count; ++i) {
    const T g = grad[i] + step.weight_decay * param[i];
    running[i] = mean.decay * running[i] + mean.share * g * g;
    param[i] -= step.lr * (g / root(running[i] + eps));
  }
}

template <class T>
void adagrad(T* __restrict__ param, const T* __restrict__ grad, T* __restrict__ history, Index count, StepSize<T> step,
             T eps) {
  for (Index i = 0; i < count; ++i) {
    const T g = grad[i] + step.weight_decay * param[i];
    history[i] += g * g;
    param[i] -= step.lr * (g / root(history[i] + eps));
  }
}

template <class T>
constexpr ElementwiseTable<T> elementwise_table = {
    &relu<T>,
    &relu_backward<T>,
    &sigmoid<T>,
    &sigmoid_backward<T>,
    &channel_moments<T>,
    &normalize<T>,
    &normalize_backward<T>,
    &softmax<T>,
    &cross_entropy<T>,
    &cross_entropy_backward<T>,
    &sgd<T>,
    &adam<T>,
    &rmsprop<T>,
    &adagrad<T>,
};

}  // namespace

const ElementwiseKernels& elementwise_kernels() {
  static constexpr ElementwiseKernels table = {elementwise_table<float>, elementwise_table<double>};
  return table;
}

}  // namespace distopt::DISTOPT_ISA

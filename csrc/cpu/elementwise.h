// Element-wise layers, normalization, loss and optimizer updates. Arrays are dense, N, C, H, W; sizes are in
// elements; pointers may be null only where the comment allows it.
#pragma once

#include "base/isa.h"
#include "base/types.h"

namespace distopt {

// The common part of the four updates. Weight decay is L2: it is added to the gradient.
template <class T>
struct StepSize {
  T lr, weight_decay;
};

// A running mean, old * decay + new * share, where share = 1 - decay was taken in double precision.
template <class T>
struct RunningMean {
  T decay, share;
};

template <class T>
struct ElementwiseTable {
  void (*relu)(const T* x, T* y, std::ptrdiff_t count);
  void (*relu_backward)(const T* dy, const T* y, T* dx, std::ptrdiff_t count);
  void (*sigmoid)(const T* x, T* y, std::ptrdiff_t count);
  void (*sigmoid_backward)(const T* dy, const T* y, T* dx, std::ptrdiff_t count);

  // Mean and biased variance of x[n, c, pixels] for each c.
  void (*channel_moments)(const T* x, std::ptrdiff_t n, std::ptrdiff_t c, std::ptrdiff_t pixels, T* mean, T* variance);
  // y = (x - mean) * inverse_deviation * gamma + beta.
  void (*normalize)(const T* x, std::ptrdiff_t n, std::ptrdiff_t c, std::ptrdiff_t pixels, const T* mean,
                    const T* inverse_deviation, const T* gamma, const T* beta, T* y);
  // Overwrites dgamma, dbeta and dx. `training`: mean and deviation were those of x itself.
  void (*normalize_backward)(const T* dy, const T* x, std::ptrdiff_t n, std::ptrdiff_t c, std::ptrdiff_t pixels,
                             const T* mean, const T* inverse_deviation, const T* gamma, bool training, T* dgamma,
                             T* dbeta, T* dx);

  void (*softmax)(const T* x, T* y, std::ptrdiff_t rows, std::ptrdiff_t columns);
  // probability = softmax(logits) and the mean loss; `target` holds one distribution per row. Without it `labels`
  // holds one index per row. Returns the first row whose label is outside [0, columns), or -1.
  std::ptrdiff_t (*cross_entropy)(const T* logits, const std::int64_t* labels, const T* target, std::ptrdiff_t rows,
                                  std::ptrdiff_t columns, T* probability, T* loss);
  // dlogits = (probability - target) * scale. Returns as above.
  std::ptrdiff_t (*cross_entropy_backward)(const T* probability, const std::int64_t* labels, const T* target, T scale,
                                           std::ptrdiff_t rows, std::ptrdiff_t columns, T* dlogits);

  // `buffer` may be null (no momentum); kept = 1 - dampening.
  void (*sgd)(T* param, const T* grad, T* buffer, std::ptrdiff_t count, StepSize<T> step, T momentum, T kept,
              bool nesterov);
  // Kingma and Ba, arXiv 1412.6980, algorithm 1; step.lr holds lr / (1 - beta1^t),
  // root_correction = sqrt(1 - beta2^t).
  void (*adam)(T* param, const T* grad, T* m, T* v, std::ptrdiff_t count, StepSize<T> step, RunningMean<T> first,
               RunningMean<T> second, T eps, T root_correction);
  // rmsprop and adagrad divide by sqrt(mean or sum of squares + eps).
  void (*rmsprop)(T* param, const T* grad, T* running, std::ptrdiff_t count, StepSize<T> step, RunningMean<T> mean,
                  T eps);
  void (*adagrad)(T* param, const T* grad, T* history, std::ptrdiff_t count, StepSize<T> step, T eps);
};

using ElementwiseKernels = Both<ElementwiseTable>;

DISTOPT_DECLARE_KERNELS(ElementwiseKernels, elementwise_kernels)

}  // namespace distopt

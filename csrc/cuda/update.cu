// Optimizer updates, one pass each.
#include <cmath>
#include <stdexcept>
#include <string>

#include "cuda/device.h"
#include "cuda/layers.h"

namespace distopt::cuda {
namespace {

template <class T>
struct Rule {
  T lr, weight_decay;
};

template <class T, bool kMomentum, bool kNesterov>
__global__ void sgd_kernel(T* param, const T* grad, T* buffer, std::size_t count, Rule<T> rule, T momentum, T kept) {
  for (std::size_t i = thread_index(); i < count; i += thread_stride()) {
    T g = grad[i] + rule.weight_decay * param[i];
    if constexpr (kMomentum) {
      const T v = momentum * buffer[i] + kept * g;
      buffer[i] = v;
      g = kNesterov ? g + momentum * v : v;
    }
    param[i] -= rule.lr * g;
  }
}

template <class T>
struct Decay {
  T kept, share;
};

template <class T>
__global__ void adam_kernel(T* param, const T* grad, T* m, T* v, std::size_t count, Rule<T> rule, Decay<T> first,
                            Decay<T> second, T eps, T root_correction) {
  for (std::size_t i = thread_index(); i < count; i += thread_stride()) {
    const T g = grad[i] + rule.weight_decay * param[i];
    m[i] = first.kept * m[i] + first.share * g;
    v[i] = second.kept * v[i] + second.share * g * g;
    param[i] -= rule.lr * (m[i] / (sqrt(v[i]) / root_correction + eps));
  }
}

template <class T>
__global__ void rmsprop_kernel(T* param, const T* grad, T* running, std::size_t count, Rule<T> rule, Decay<T> mean,
                               T eps) {
  for (std::size_t i = thread_index(); i < count; i += thread_stride()) {
    const T g = grad[i] + rule.weight_decay * param[i];
    running[i] = mean.kept * running[i] + mean.share * g * g;
    param[i] -= rule.lr * (g / sqrt(running[i] + eps));
  }
}

template <class T>
__global__ void adagrad_kernel(T* param, const T* grad, T* history, std::size_t count, Rule<T> rule, T eps) {
  for (std::size_t i = thread_index(); i < count; i += thread_stride()) {
    const T g = grad[i] + rule.weight_decay * param[i];
    history[i] += g * g;
    param[i] -= rule.lr * (g / sqrt(history[i] + eps));
  }
}

template <class T>
Decay<T> decay_of(double kept) {
  return {T(kept), T(1 - kept)};
}

}  // namespace

template <class T>
void sgd(T* param, const T* grad, T* buffer, std::size_t count, double lr, double momentum, double dampening,
         double weight_decay, bool nesterov, cudaStream_t stream) {
  auto* update = &sgd_kernel<T, false, false>;
  if (buffer) update = nesterov ? &sgd_kernel<T, true, true> : &sgd_kernel<T, true, false>;
  launch_each(update, count, stream, param, grad, buffer, count, Rule<T>{T(lr), T(weight_decay)}, T(momentum),
              T(1 - dampening));
}

template <class T>
void adam(T* param, const T* grad, T* m, T* v, std::size_t count, int step, double lr, double beta1, double beta2,
          double eps, double weight_decay, cudaStream_t stream) {
  if (step < 1) throw std::invalid_argument("Adam counts steps from 1; got step " + std::to_string(step));
  const double correction1 = 1 - std::pow(beta1, double(step)), correction2 = 1 - std::pow(beta2, double(step));
  launch_each(adam_kernel<T>, count, stream, param, grad, m, v, count, Rule<T>{T(lr / correction1), T(weight_decay)},
              decay_of<T>(beta1), decay_of<T>(beta2), T(eps), T(std::sqrt(correction2)));
}

template <class T>
void rmsprop(T* param, const T* grad, T* running, std::size_t count, double lr, double rho, double eps,
             double weight_decay, cudaStream_t stream) {
  launch_each(rmsprop_kernel<T>, count, stream, param, grad, running, count, Rule<T>{T(lr), T(weight_decay)},
              decay_of<T>(rho), T(eps));
}

template <class T>
void adagrad(T* param, const T* grad, T* history, std::size_t count, double lr, double eps, double weight_decay,
             cudaStream_t stream) {
  launch_each(adagrad_kernel<T>, count, stream, param, grad, history, count, Rule<T>{T(lr), T(weight_decay)}, T(eps));
}

DISTOPT_UPDATE_KERNELS(DISTOPT_INSTANTIATE)

}  // namespace distopt::cuda

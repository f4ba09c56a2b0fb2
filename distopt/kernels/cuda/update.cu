// Optimizer updates, one pass each.
#include <cmath>
#include <stdexcept>
#include <string>

#include "cuda/device.h"
#include "cuda/layers.h"

namespace distopt::cuda {

template <class T>
void sgd(T* param, const T* grad, T* buffer, std::size_t count, double lr, double momentum, double dampening,
         double weight_decay, bool nesterov, cudaStream_t stream) {
  const T rate = T(lr), decay = T(weight_decay), old = T(momentum), kept = T(1 - dampening);
  launch_each(count, stream, [=] __device__(std::size_t i) {
    T g = grad[i] + decay * param[i];
    if (buffer) {
      const T v = old * buffer[i] + kept * g;
      buffer[i] = v;
      g = nesterov ? g + old * v : v;
    }
    param[i] -= rate * g;
  });
}

template <class T>
void adam(T* param, const T* grad, T* m, T* v, std::size_t count, int step, double lr, double beta1, double beta2,
          double eps, double weight_decay, cudaStream_t stream) {
  if (step < 1) throw std::invalid_argument("Adam counts steps from 1; got step " + std::to_string(step));
  const T rate = T(lr / (1 - std::pow(beta1, double(step)))), decay = T(weight_decay), epsilon = T(eps);
  const T kept1 = T(beta1), share1 = T(1 - beta1), kept2 = T(beta2), share2 = T(1 - beta2);
  const T root_correction = T(std::sqrt(1 - std::pow(beta2, double(step))));
  launch_each(count, stream, [=] __device__(std::size_t i) {
    const T g = grad[i] + decay * param[i];
    m[i] = kept1 * m[i] + share1 * g;
    v[i] = kept2 * v[i] + share2 * g * g;
    param[i] -= rate * (m[i] / (sqrt(v[i]) / root_correction + epsilon));
  });
}

template <class T>
void rmsprop(T* param, const T* grad, T* running, std::size_t count, double lr, double rho, double eps,
             double weight_decay, cudaStream_t stream) {
  const T rate = T(lr), decay = T(weight_decay), kept = T(rho), share = T(1 - rho), epsilon = T(eps);
  launch_each(count, stream, [=] __device__(std::size_t i) {
    const T g = grad[i] + decay * param[i];
    running[i] = kept * running[i] + share * g * g;
    param[i] -= rate * (g / sqrt(running[i] + epsilon));
  });
}

template <class T>
void adagrad(T* param, const T* grad, T* history, std::size_t count, double lr, double eps, double weight_decay,
             cudaStream_t stream) {
  const T rate = T(lr), decay = T(weight_decay), epsilon = T(eps);
  launch_each(count, stream, [=] __device__(std::size_t i) {
    const T g = grad[i] + decay * param[i];
    history[i] += g * g;
    param[i] -= rate * (g / sqrt(history[i] + epsilon));
  });
}

DISTOPT_UPDATE_KERNELS(DISTOPT_INSTANTIATE)

}  // namespace distopt::cuda

// Optimizer updates, one pass each, with the arithmetic of csrc/cpu/elementwise.cpp. Coefficients come rounded to T.
#include "device.cuh"

// `gate` and `buffer` may be null. Nothing changes if the gate is set.
template <class T>
__global__ void sgd(const bool* gate, T* param, const T* grad, T* buffer, size_t count, T rate, T momentum, T share,
                    T decay, bool nesterov) {
  if (gate && *gate) return;
  for_each(count, [&](size_t i) {
    T g = grad[i] + decay * param[i];
    if (buffer) {
      const T v = momentum * buffer[i] + share * g;
      buffer[i] = v;
      g = nesterov ? g + momentum * v : v;
    }
    param[i] -= rate * g;
  });
}

// `root_correction` is the square root of the bias correction of v; the rate is corrected for m.
template <class T>
__global__ void adam(const bool* gate, T* param, const T* grad, T* m, T* v, size_t count, T rate, T root_correction,
                     T kept1, T share1, T kept2, T share2, T epsilon, T decay) {
  if (gate && *gate) return;
  for_each(count, [&](size_t i) {
    const T g = grad[i] + decay * param[i];
    m[i] = kept1 * m[i] + share1 * g;
    v[i] = kept2 * v[i] + share2 * g * g;
    param[i] -= rate * (m[i] / (sqrt(v[i]) / root_correction + epsilon));
  });
}

template <class T>
__global__ void rmsprop(const bool* gate, T* param, const T* grad, T* running, size_t count, T rate, T kept, T share,
                        T epsilon, T decay) {
  if (gate && *gate) return;
  for_each(count, [&](size_t i) {
    const T g = grad[i] + decay * param[i];
    running[i] = kept * running[i] + share * g * g;
    param[i] -= rate * (g / sqrt(running[i] + epsilon));
  });
}

template <class T>
__global__ void adagrad(const bool* gate, T* param, const T* grad, T* history, size_t count, T rate, T epsilon,
                        T decay) {
  if (gate && *gate) return;
  for_each(count, [&](size_t i) {
    const T g = grad[i] + decay * param[i];
    history[i] += g * g;
    param[i] -= rate * (g / sqrt(history[i] + epsilon));
  });
}

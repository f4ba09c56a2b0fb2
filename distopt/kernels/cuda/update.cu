// Optimizer updates, one pass each, with the arithmetic of csrc/cpu/elementwise.cpp. Coefficients come rounded to
// float.
#include "device.cuh"

// `gate` and `buffer` may be null. Nothing changes if the gate is set.
__global__ void sgd(const bool* gate, float* param, const float* grad, float* buffer, size_t count, float rate,
                    float momentum, float share, float decay, bool nesterov) {
  if (gate && *gate) return;
  for_each(count, [&](size_t i) {
    float g = grad[i] + decay * param[i];
    if (buffer) {
      const float v = momentum * buffer[i] + share * g;
      buffer[i] = v;
      g = nesterov ? g + momentum * v : v;
    }
    param[i] -= rate * g;
  });
}

// `root_correction` is the square root of the bias correction of v; the rate is corrected for m.
__global__ void adam(const bool* gate, float* param, const float* grad, float* m, float* v, size_t count, float rate,
                     float root_correction, float kept1, float share1, float kept2, float share2, float epsilon,
                     float decay) {
  if (gate && *gate) return;
  for_each(count, [&](size_t i) {
    const float g = grad[i] + decay * param[i];
    m[i] = kept1 * m[i] + share1 * g;
    v[i] = kept2 * v[i] + share2 * g * g;
    param[i] -= rate * (m[i] / (sqrt(v[i]) / root_correction + epsilon));
  });
}

// AdaGrad, too: both shares are 1 then, which changes no bit.
__global__ void rmsprop(const bool* gate, float* param, const float* grad, float* running, size_t count, float rate,
                        float kept, float share, float epsilon, float decay) {
  if (gate && *gate) return;
  for_each(count, [&](size_t i) {
    const float g = grad[i] + decay * param[i];
    running[i] = kept * running[i] + share * g * g;
    param[i] -= rate * (g / sqrt(running[i] + epsilon));
  });
}

// Optimizer updates, one pass each, with the arithmetic of csrc/cpu/elementwise.cpp. Coefficients come rounded to
// float. A row of the grid updates one of several parameters.
#include "device.cuh"

// Parameters with their gradients, slots if the rule has them, else null, and numbers of elements.
struct Updates {
  float* param[96];
  const float* grad[96];
  float *first[96], *second[96];
  size_t count[96];
};

// Calls f(parameter, gradient, i) for each element i of this row's parameter, unless the gate is set; it may be null.
template <class F>
__device__ void for_elements(const bool* gate, const Updates& all, F f) {
  if (gate && *gate) return;
  float* param = all.param[blockIdx.y];
  const float* grad = all.grad[blockIdx.y];
  for_each(all.count[blockIdx.y], [&](size_t i) { f(param[i], grad[i], i); });
}

__global__ void sgd(const bool* gate, Updates all, float rate, float momentum, float share, float decay,
                    bool nesterov) {
  float* buffer = all.first[blockIdx.y];
  for_elements(gate, all, [&](float& param, float grad, size_t i) {
    float g = grad + decay * param;
    if (buffer) {
      const float v = momentum * buffer[i] + share * g;
      buffer[i] = v;
      g = nesterov ? g + momentum * v : v;
    }
    param -= rate * g;
  });
}

// `root_correction` is the square root of the bias correction of v; the rate is corrected for m.
__global__ void adam(const bool* gate, Updates all, float rate, float root_correction, float kept1, float share1,
                     float kept2, float share2, float epsilon, float decay) {
  float *m = all.first[blockIdx.y], *v = all.second[blockIdx.y];
  for_elements(gate, all, [&](float& param, float grad, size_t i) {
    const float g = grad + decay * param;
    m[i] = kept1 * m[i] + share1 * g;
    v[i] = kept2 * v[i] + share2 * g * g;
    param -= rate * (m[i] / (sqrt(v[i]) / root_correction + epsilon));
  });
}

// AdaGrad, too: both shares are 1 then, which changes no bit.
__global__ void rmsprop(const bool* gate, Updates all, float rate, float kept, float share, float epsilon,
                        float decay) {
  float* running = all.first[blockIdx.y];
  for_elements(gate, all, [&](float& param, float grad, size_t i) {
    const float g = grad + decay * param;
    running[i] = kept * running[i] + share * g * g;
    param -= rate * (g / sqrt(running[i] + epsilon));
  });
}

// Batch normalization and cross entropy. Sums run in an order that shapes alone determine; element by element the
// arithmetic is that of csrc/cpu/elementwise.cpp.
#include "device.cuh"

// -- batch normalization ----------------------------------------------------------------------------------------------
// A block for each plane: its sums of a and of a * b, where b is normalized if a mean is given. A float's square is
// exact in float64, so that the variance is the mean square less the square of the mean, and one pass reads the array.
__global__ void plane_sums(int channels, int pixels, const float* a, const float* b, const float* mean,
                           const float* inverse_deviation, double* sums, double* products) {
  const unsigned channel = blockIdx.x % unsigned(channels);
  const float center = mean ? mean[channel] : 0.0f, inverse = mean ? inverse_deviation[channel] : 1.0f;
  const size_t first = size_t(blockIdx.x) * pixels;
  double sum = 0, product = 0;
  for (int i = int(threadIdx.x); i < pixels; i += block_threads) {
    sum += double(a[first + i]);
    product += double(a[first + i]) * double((b[first + i] - center) * inverse);
  }
  sum = block_sum<block_threads>(sum);
  product = block_sum<block_threads>(product);
  if (threadIdx.x != 0) return;
  sums[blockIdx.x] = sum;
  products[blockIdx.x] = product;
}

// Mean and inverse deviation of every channel; the running statistics are updated. `count` is that of its values.
__global__ void channel_moments(int channels, double count, const double* sums, const double* squares, float* mean,
                                float* inverse_deviation, float* running_mean, float* running_var, float momentum,
                                float epsilon) {
  for_each(size_t(channels), [&](size_t channel) {
    const double average = sums[channel] / count, square = squares[channel] / count;
    const float center = float(average),
                variance = float(rectify(square - average * average));  // rounding may leave less than 0
    mean[channel] = center;
    inverse_deviation[channel] = 1.0f / sqrt(variance + epsilon);
    running_mean[channel] += momentum * (center - running_mean[channel]);
    running_var[channel] += momentum * (variance * float(count / (count - 1)) - running_var[channel]);
  });
}

__global__ void normalize(Batch batch, int pixels, const float* x, const float* mean, const float* inverse_deviation,
                          const float* gamma, const float* beta, float* y) {
  for_planes(planes_of(batch), [&](unsigned plane) {
    const int channel = int(plane) % batch.channels;
    const float center = mean[channel], shift = beta[channel], scale = inverse_deviation[channel] * gamma[channel];
    for_each(size_t(pixels), [&](size_t i) {
      const size_t at = size_t(plane) * pixels + i;
      y[at] = (x[at] - center) * scale + shift;
    });
  });
}

__global__ void normalize_backward(Batch batch, int pixels, const float* dy, const float* x, const float* mean,
                                   const float* inverse_deviation, const float* gamma, bool training,
                                   const float* dgamma, const float* dbeta, float* dx) {
  const float count = float(double(batch.images) * pixels);
  for_planes(planes_of(batch), [&](unsigned plane) {
    const int channel = int(plane) % batch.channels;
    const float center = mean[channel], inverse = inverse_deviation[channel], scale = gamma[channel] * inverse;
    const float offset = training ? dbeta[channel] / count : 0.0f, slope = training ? dgamma[channel] / count : 0.0f;
    for_each(size_t(pixels), [&](size_t i) {
      const size_t at = size_t(plane) * pixels + i;
      dx[at] = (dy[at] - offset - (x[at] - center) * inverse * slope) * scale;
    });
  });
}

// -- indices ----------------------------------------------------------------------------------------------------------
// In memory of the host, what is out of range: {1, kind, its position, the value, the length of its range}, if found[0]
// was 0; of several values, one is reported. The kind is 0 for a label, or 1 + the axis of an index.
__device__ inline void report(unsigned long long* found, int kind, size_t position, long long value, size_t length) {
  if (atomicExch(found, 1ULL) != 0) return;
  found[1] = static_cast<unsigned long long>(kind);
  found[2] = position;
  found[3] = static_cast<unsigned long long>(value);
  found[4] = length;
}

// outside[i]: whether index[i] is not in [-length, length).
__global__ void check_index(const long long* index, size_t count, size_t length, int axis, bool* outside,
                            unsigned long long* found) {
  const auto end = static_cast<long long>(length);
  for_each(count, [&](size_t i) {
    outside[i] = index[i] < -end || index[i] >= end;
    if (outside[i]) report(found, 1 + axis, i, index[i], length);
  });
}

// -- cross entropy ----------------------------------------------------------------------------------------------------
// A thread for each row, as on the CPU: its share of the loss, and the gradient of the logits. Labels are class
// indices, or `target`, one distribution per row; the other is null. A label out of range makes its row NaN, so that
// nothing is learnt from it.
__global__ void cross_entropy(const float* logits, const long long* labels, const float* target, size_t rows,
                              int columns, float* gradient, double* losses, unsigned long long* found) {
  const float factor = float(1 / double(rows));
  for_each(rows, [&](size_t r) {
    const float* row = logits + r * columns;
    float* slope = gradient + r * columns;
    float maximum = row[0], sum = 0.0f, share = 1.0f;
    for (int c = 1; c < columns; ++c) maximum = row[c] > maximum ? row[c] : maximum;
    for (int c = 0; c < columns; ++c) sum += slope[c] = exp(row[c] - maximum);
    const float log_sum = maximum + log(sum);
    double loss = 0;
    if (target) {
      share = 0.0f;
      for (int c = 0; c < columns; ++c) {
        share += target[r * columns + c];
        loss += double(target[r * columns + c] * (log_sum - row[c]));
      }
    } else if (labels[r] >= 0 && labels[r] < columns) {
      loss = double(log_sum - row[labels[r]]);
    } else {
      loss = not_a_number();
      share = float(loss);
      report(found, 0, r, labels[r], columns);
    }
    for (int c = 0; c < columns; ++c) {
      const float wanted = target ? target[r * columns + c] : float(labels[r] == c);
      slope[c] = (slope[c] / sum * share - wanted) * factor;
    }
    losses[r] = loss / double(rows);
  });
}

// Batch normalization and cross entropy. Sums run in an order that shapes alone determine; element by element the
// arithmetic is that of csrc/cpu/elementwise.cpp.
#include "device.cuh"

// -- batch normalization ----------------------------------------------------------------------------------------------
// The normalization of a channel's values.
struct Affine {
  float center, scale, shift;
  __device__ float operator()(float x) const { return (x - center) * scale + shift; }
};

// The sums of each plane, of a and of a * b, where b is normalized if a mean is given; a counts as 0 where ReLU has cut
// off the normalized b, if a beta is given. A float's square is exact in float64, so that the variance is the mean
// square less the square of the mean, and one pass reads the array.
__global__ void plane_sums(size_t planes, int channels, int pixels, const float* a, const float* b, const float* mean,
                           const float* inverse_deviation, const float* gamma, const float* beta, double* sums,
                           double* products, unsigned lanes) {
  const size_t plane = row_of(lanes), first = plane * pixels;
  const auto channel = static_cast<unsigned>(plane % channels);
  const float center = mean ? mean[channel] : 0.0f, inverse = mean ? inverse_deviation[channel] : 1.0f;
  const Affine normal{center, beta ? inverse * gamma[channel] : 1.0f, beta ? beta[channel] : 0.0f};
  double sum = 0, product = 0;
  if (plane < planes)
    for (unsigned i = own_lane(lanes); i < unsigned(pixels); i += lanes) {
      const float x = b[first + i], value = beta && normal(x) <= 0 ? 0.0f : a[first + i];
      sum += double(value);
      product += double(value) * double((x - center) * inverse);
    }
  sum = sum_lanes(sum, lanes);
  product = sum_lanes(product, lanes);
  if (plane >= planes || own_lane(lanes) != 0) return;
  sums[plane] = sum;
  products[plane] = product;
}

// A channel's sum over the images.
__device__ inline double channel_sum(Batch batch, const double* of_planes, size_t channel) {
  double sum = 0;
  for (int image = 0; image < batch.images; ++image) sum += of_planes[size_t(image) * batch.channels + channel];
  return sum;
}

__global__ void channel_sums(Batch batch, const double* sums, const double* products, float* sum, float* product) {
  for_each(size_t(batch.channels), [&](size_t channel) {
    sum[channel] = float(channel_sum(batch, sums, channel));
    product[channel] = float(channel_sum(batch, products, channel));
  });
}

// Mean and inverse deviation of every channel; the running statistics are updated. `count` is that of its values.
__global__ void channel_moments(Batch batch, double count, const double* sums, const double* squares, float* mean,
                                float* inverse_deviation, float* running_mean, float* running_var, float momentum,
                                float epsilon) {
  for_each(size_t(batch.channels), [&](size_t channel) {
    const double average = channel_sum(batch, sums, channel) / count,
                 square = channel_sum(batch, squares, channel) / count;
    const float center = float(average),
                variance = float(rectify(square - average * average));  // rounding may leave less than 0
    mean[channel] = center;
    inverse_deviation[channel] = 1.0f / sqrt(variance + epsilon);
    running_mean[channel] += momentum * (center - running_mean[channel]);
    running_var[channel] += momentum * (variance * float(count / (count - 1)) - running_var[channel]);
  });
}

// Plus another array, if there is one, and ReLU.
__global__ void normalize(Batch batch, int pixels, const float* x, const float* mean, const float* inverse_deviation,
                          const float* gamma, const float* beta, const float* plus, bool relu, float* y) {
  for_planes(planes_of(batch), [&](unsigned plane) {
    const int channel = int(plane) % batch.channels;
    const Affine normal{mean[channel], inverse_deviation[channel] * gamma[channel], beta[channel]};
    for_each(size_t(pixels), [&](size_t i) {
      const size_t at = size_t(plane) * pixels + i;
      const float value = plus ? normal(x[at]) + plus[at] : normal(x[at]);
      y[at] = relu ? rectify(value) : value;
    });
  });
}

// With a beta, behind ReLU.
__global__ void normalize_backward(Batch batch, int pixels, const float* dy, const float* x, const float* mean,
                                   const float* inverse_deviation, const float* gamma, const float* beta, bool training,
                                   const float* dgamma, const float* dbeta, float* dx) {
  const float count = float(double(batch.images) * pixels);
  for_planes(planes_of(batch), [&](unsigned plane) {
    const int channel = int(plane) % batch.channels;
    const float center = mean[channel], inverse = inverse_deviation[channel], scale = gamma[channel] * inverse;
    const float offset = training ? dbeta[channel] / count : 0.0f, slope = training ? dgamma[channel] / count : 0.0f;
    const Affine normal{center, scale, beta ? beta[channel] : 0.0f};
    for_each(size_t(pixels), [&](size_t i) {
      const size_t at = size_t(plane) * pixels + i;
      const float value = beta && normal(x[at]) <= 0 ? 0.0f : dy[at];
      dx[at] = (value - offset - (x[at] - center) * inverse * slope) * scale;
    });
  });
}

// -- bias and ReLU ----------------------------------------------------------------------------------------------------
// y [.., channels, width], in place: plus the bias of each channel if there is one, and ReLU.
__global__ void finish(size_t count, size_t width, int channels, const float* bias, bool relu, float* y) {
  for_each(count, [&](size_t i) {
    const float value = bias ? y[i] + bias[i / width % channels] : y[i];
    y[i] = relu ? rectify(value) : value;
  });
}

// dx = dy where y, the result of ReLU, is above 0, or NaN.
__global__ void relu_backward(size_t count, const float* dy, const float* y, float* dx) {
  for_each(count, [&](size_t i) { dx[i] = y[i] <= 0 ? 0.0f : dy[i]; });
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
// Of each row its share of the loss, and the gradient of the logits; a thread alone adds as the CPU does. Labels are
// class indices, or `target`, one distribution per row; the other is null. A label out of range makes its row NaN, so
// that nothing is learnt from it.
__global__ void cross_entropy(const float* logits, const long long* labels, const float* target, size_t rows,
                              int columns, float* gradient, double* losses, unsigned long long* found, unsigned lanes) {
  const float factor = float(1 / double(rows));
  const size_t r = row_of(lanes), begin = r * columns;
  const int first = int(own_lane(lanes)), end = r < rows ? columns : 0, step = int(lanes);
  const float* row = logits + begin;
  float* slope = gradient + begin;
  float maximum = end ? row[0] : 0.0f, sum = 0.0f, share = 0.0f;
  for (int c = first; c < end; c += step) maximum = row[c] > maximum ? row[c] : maximum;
  maximum = from_first(maximum_of_lanes(maximum, lanes), lanes);
  for (int c = first; c < end; c += step) sum += slope[c] = exp(row[c] - maximum);
  sum = from_first(sum_lanes(sum, lanes), lanes);
  const float log_sum = maximum + log(sum);
  double loss = 0;
  if (target) {
    for (int c = first; c < end; c += step) {
      share += target[begin + c];
      loss += double(target[begin + c] * (log_sum - row[c]));
    }
    share = from_first(sum_lanes(share, lanes), lanes);
    loss = sum_lanes(loss, lanes);
  } else if (end) {
    const long long label = labels[r];
    const bool is_valid = label >= 0 && label < columns;
    loss = is_valid ? double(log_sum - row[label]) : not_a_number();
    share = is_valid ? 1.0f : float(loss);
    if (!is_valid && first == 0) report(found, 0, r, label, columns);
  }
  for (int c = first; c < end; c += step) {
    const float wanted = target ? target[begin + c] : float(labels[r] == c);
    slope[c] = (slope[c] / sum * share - wanted) * factor;
  }
  if (end && first == 0) losses[r] = loss / double(rows);
}

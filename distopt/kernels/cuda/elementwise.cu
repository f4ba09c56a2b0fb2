// Kernels on whole arrays, rows and channels: activations, sums, batch normalization, losses. Sums run in an order
// that shapes alone determine, without atomics; element by element the arithmetic is that of csrc/cpu/elementwise.cpp.
#include "device.cuh"

// -- elements ---------------------------------------------------------------------------------------------------------
__global__ void relu_backward(const float* dy, const float* y, float* dx, size_t count, bool aligned) {
  for_units(count, aligned, [&](auto width, size_t first) {
    Unit<float, width> values = unit_at<width>(dy + first);
    const Unit<float, width> results = unit_at<width>(y + first);
    for (int i = 0; i < width; ++i) values.e[i] = rectify_gradient(values.e[i], results.e[i]);
    unit_at<width>(dx + first) = values;
  });
}

// y = x [count / columns, columns] + bias [columns] (or null), with ReLU if asked; perhaps in place. A unit lies within
// a row.
__global__ void add_bias(const float* x, const float* bias, float* y, size_t count, int columns, bool relu,
                         bool aligned) {
  for_units(count, aligned, [&](auto width, size_t first) {
    Unit<float, width> values = unit_at<width>(x + first);
    const size_t column = bias ? first % size_t(columns) : 0;
    for (int i = 0; i < width; ++i) {
      const float value = bias ? values.e[i] + bias[column + i] : values.e[i];
      values.e[i] = relu ? rectify(value) : value;
    }
    unit_at<width>(y + first) = values;
  });
}

// -- sums -------------------------------------------------------------------------------------------------------------
// Calls f(row) in the 32 threads of a warp for each row.
template <class F>
__device__ void for_rows(size_t rows, F f) {
  for (size_t row = size_t(blockIdx.x) * warp_count + threadIdx.y; row < rows; row += size_t(gridDim.x) * warp_count)
    f(row);
}

// Where the elements of a channel lie: `pixels` side by side for each image.
struct Channels {
  size_t count;  // elements of a channel
  unsigned pixels;
  size_t per_image, per_channel;  // from one to the next
};

__device__ inline Channels channels_of(Batch batch, int pixels) {
  const size_t plane = size_t(pixels), count = batch.images * plane;
  return {count, unsigned(pixels), batch.channels * plane, plane};
}

// Calls f(offset) for the elements of the channel blockIdx.x in its part blockIdx.y.
template <class F>
__device__ void for_part(const Channels& c, F f) {
  const size_t length = (c.count + gridDim.y - 1) / gridDim.y;
  const size_t end = min((blockIdx.y + 1) * length, c.count);
  size_t i = blockIdx.y * length + threadIdx.x;
  if (i >= end) return;
  unsigned pixel = unsigned(i % c.pixels);
  size_t at = blockIdx.x * c.per_channel + i / c.pixels * c.per_image + pixel;
  // Steps, since a division for every element would take longer than reading it.
  const unsigned step = block_threads % c.pixels;
  const size_t distance = block_threads / c.pixels * c.per_image + step, carry = c.per_image - c.pixels;
  const auto take = [&] {
    f(at);
    pixel += step;
    const bool next = pixel >= c.pixels;
    pixel -= next ? c.pixels : 0;
    at += distance + (next ? carry : 0);
  };
  // Without a condition in between, the elements of a group are read at the same time.
  constexpr unsigned group = 4;
  for (; i + (group - 1) * block_threads < end; i += group * block_threads)
#pragma unroll
    for (unsigned j = 0; j < group; ++j) take();
  for (; i < end; i += block_threads) take();
}

// Stores the sum over the block as its part of `sums` [channels, parts]: a channel is summed up by gridDim.y blocks,
// since a block per channel would leave most of the device idle. The kernel that uses a sum adds its parts up, so that
// no block waits for another.
__device__ inline void store_part(double* sums, double value) {
  const double sum = block_sum<block_threads>(value);
  if (threadIdx.x == 0) sums[blockIdx.x * gridDim.y + blockIdx.y] = sum;
}

// The sum over a warp, in all lanes, always in the same order. All lanes must call it.
template <class T>
__device__ T warp_sum(T value) {
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
  return value;
}

// The sum over a channel, as `warp_sum`.
__device__ inline double whole_sum(const double* sums, unsigned parts, size_t channel) {
  double sum = 0;
  for (unsigned i = threadIdx.x % 32; i < parts; i += 32) sum += sums[channel * parts + i];
  return warp_sum(sum);
}

// out[channel] = the sum of its planes over all images, added to the existing values if asked.
__global__ void channel_sums(Batch batch, const double* sums, unsigned parts, bool add, float* out) {
  for_rows(size_t(batch.channels), [&](size_t channel) {
    const float sum = float(whole_sum(sums, parts, channel));
    if (threadIdx.x == 0) out[channel] = add ? out[channel] + sum : sum;
  });
}

// -- batch normalization ----------------------------------------------------------------------------------------------
// Sums over a channel of a and, unless null, of its products with b, normalized where a mean is given. A float's square
// is exact in float64, so that the variance is the mean square less the square of the mean, and one pass reads the
// array.
__global__ void product_parts(Batch batch, int pixels, const float* a, const float* b, const float* mean,
                              const float* inverse_deviation, double* sums, double* products) {
  const float center = mean ? mean[blockIdx.x] : 0.0f, inverse = mean ? inverse_deviation[blockIdx.x] : 1.0f;
  double sum = 0, product = 0;
  for_part(channels_of(batch, pixels), [&](size_t at) {
    sum += double(a[at]);
    if (b) product += double(a[at]) * double((b[at] - center) * inverse);
  });
  store_part(sums, sum);
  if (b) store_part(products, product);
}

// Mean and inverse deviation of every channel; the running statistics are updated.
__global__ void channel_moments(Batch batch, int pixels, const double* sums, const double* squares, unsigned parts,
                                float* mean, float* inverse_deviation, float* running_mean, float* running_var,
                                float momentum, float epsilon) {
  const double count = double(channels_of(batch, pixels).count);
  for_rows(size_t(batch.channels), [&](size_t channel) {
    const double average = whole_sum(sums, parts, channel) / count, square = whole_sum(squares, parts, channel) / count;
    if (threadIdx.x != 0) return;
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

// -- cross entropy, one warp per row ----------------------------------------------------------------------------------
__device__ inline bool is_class(long long label, int columns) { return label >= 0 && label < columns; }

// Labels are class indices, or `target`, one distribution per row; the other is null.
__global__ void cross_entropy(const float* logits, const long long* labels, const float* target, size_t rows,
                              int columns, float* probability, double* row_loss) {
  for_rows(rows, [&](size_t r) {
    const float* row = logits + r * columns;
    float maximum = float(-infinity()), sum = 0.0f;
    for (int c = int(threadIdx.x); c < columns; c += 32) maximum = row[c] > maximum ? row[c] : maximum;
    for (int offset = 16; offset; offset /= 2) {
      const float other = __shfl_xor_sync(all_lanes, maximum, offset);
      maximum = other > maximum ? other : maximum;
    }
    for (int c = int(threadIdx.x); c < columns; c += 32) sum += exp(row[c] - maximum);
    sum = warp_sum(sum);
    const float log_sum = maximum + log(sum);
    double loss = 0;
    for (int c = int(threadIdx.x); c < columns; c += 32) {
      probability[r * columns + c] = exp(row[c] - maximum) / sum;
      if (target) loss += double(target[r * columns + c] * (log_sum - row[c]));
    }
    loss = warp_sum(loss);
    if (!target) loss = is_class(labels[r], columns) ? double(log_sum - row[labels[r]]) : not_a_number();
    if (threadIdx.x == 0) row_loss[r] = loss;
  });
}

// One block. An invalid label makes the loss NaN, and error = {1, row, label, columns} (host memory that the device
// reaches) if error[0] was 0.
__global__ void mean_loss(const double* row_loss, const long long* labels, size_t rows, int columns, float* loss,
                          long long* error) {
  double sum = 0;
  for (size_t r = threadIdx.x; r < rows; r += blockDim.x) sum += row_loss[r];
  sum = block_sum<block_threads>(sum);
  if (threadIdx.x != 0) return;
  *loss = rows ? float(sum / double(rows)) : 0.0f;
  if (!labels || sum == sum || error[0]) return;
  for (size_t r = 0; r < rows; ++r) {
    if (is_class(labels[r], columns)) continue;
    error[1] = static_cast<long long>(r);
    error[2] = labels[r];
    error[3] = columns;
    __threadfence_system();
    error[0] = 1;
    return;
  }
}

// dlogits = the gradient times `factor` and, unless null, times *scale.
__global__ void cross_entropy_backward(const float* probability, const long long* labels, const float* target,
                                       const float* scale, float factor, size_t rows, int columns, float* dlogits) {
  for_rows(rows, [&](size_t r) {
    const float slope = scale ? factor * *scale : factor;
    float share = 1.0f;
    if (target) {
      share = 0.0f;
      for (int c = int(threadIdx.x); c < columns; c += 32) share += target[r * columns + c];
      share = warp_sum(share);
    } else if (!is_class(labels[r], columns)) {
      share = float(not_a_number());  // nothing may be learnt from it
    }
    for (int c = int(threadIdx.x); c < columns; c += 32) {
      const size_t at = r * columns + c;
      const float wanted = target ? target[at] : float(labels[r] == c);
      dlogits[at] = (probability[at] * share - wanted) * slope;
    }
  });
}

// Kernels on whole arrays, rows and channels: activations, sums, batch normalization, softmax.
#include "cuda/device.h"
#include "cuda/layers.h"

namespace distopt::cuda {
namespace {

// -- sums ------------------------------------------------------------------------------------------------------------
constexpr int tile = 32;  // columns of a block; warp_count rows are read at a time

template <class T>
__global__ void column_sums_kernel(const T* matrix, std::size_t rows, int columns, T* out) {
  __shared__ double parts[warp_count][tile];
  const int column = int(blockIdx.x) * tile + int(threadIdx.x);
  double sum = 0;
  if (column < columns)
    for (std::size_t row = threadIdx.y; row < rows; row += warp_count) sum += double(matrix[row * columns + column]);
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int i = 1; i < warp_count; ++i) sum += parts[i][threadIdx.x];
  out[column] = T(sum);
}

// Where the elements of a channel lie: `pixels` side by side for each image.
struct Channels {
  std::size_t count;  // elements of a channel
  unsigned pixels;
  std::size_t per_image, per_channel;  // from one to the next
};

Channels channels_of(Batch batch, int pixels, bool rows = false) {
  const std::size_t plane = std::size_t(pixels), count = batch.images * plane;
  if (rows) return {count, unsigned(pixels), plane, count};
  return {count, unsigned(pixels), batch.channels * plane, plane};
}

// A channel is summed up in parts, by one block each: a block per channel would leave most of the device idle. The
// kernel that uses a sum adds its parts up, so no block waits for another. Their number depends on the shape alone.
unsigned parts_of(Batch batch, int pixels) {
  constexpr unsigned least = 8 * block_threads;
  const unsigned wanted = blocks_of(std::size_t(batch.images) * pixels, least);
  const unsigned most = channel_blocks / unsigned(batch.channels);
  return wanted < 1 || most < 1 ? 1 : wanted < most ? wanted : most;
}

// The parts of a sum, [channels, parts].
struct Parts {
  double* sums;
  unsigned count;
};

// Calls f(offset) for the elements of the channel blockIdx.x in its part blockIdx.y.
template <class F>
__device__ void for_part(const Channels& c, F f) {
  const std::size_t length = (c.count + gridDim.y - 1) / gridDim.y;
  const std::size_t end = min((blockIdx.y + 1) * length, c.count);
  std::size_t i = blockIdx.y * length + threadIdx.x;
  if (i >= end) return;
  unsigned pixel = unsigned(i % c.pixels);
  std::size_t at = blockIdx.x * c.per_channel + i / c.pixels * c.per_image + pixel;
  // Steps, since a division for every element would take longer than reading it.
  const unsigned step = block_threads % c.pixels;
  const std::size_t distance = block_threads / c.pixels * c.per_image + step, carry = c.per_image - c.pixels;
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

// Stores the sum over the block as its part.
__device__ void store_part(Parts parts, double value) {
  const double sum = block_sum<block_threads>(value);
  if (threadIdx.x == 0) parts.sums[blockIdx.x * parts.count + blockIdx.y] = sum;
}

template <class T, class Combine>
__device__ T over_warp(T value, Combine combine) {
  for (int offset = 16; offset; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

struct Plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// The sum over a channel, in all lanes of a warp, always in the same order. All of them must call it.
__device__ double whole_sum(Parts parts, std::size_t channel) {
  double sum = 0;
  for (unsigned i = threadIdx.x % 32; i < parts.count; i += 32) sum += parts.sums[channel * parts.count + i];
  return over_warp(sum, Plus());
}

template <class T>
__global__ void sums_kernel(Channels channels, const T* x, Parts sums) {
  double sum = 0;
  for_part(channels, [&](std::size_t at) { sum += double(x[at]); });
  store_part(sums, sum);
}

// Of squared distances from the mean.
template <class T>
__global__ void squares_kernel(Channels channels, const T* x, Parts sums, Parts squares) {
  const T mean = T(whole_sum(sums, blockIdx.x) / double(channels.count));
  double sum = 0;
  for_part(channels, [&](std::size_t at) { sum += double((x[at] - mean) * (x[at] - mean)); });
  store_part(squares, sum);
}

template <class T>
__global__ void normalize_sums_kernel(Channels channels, const T* dy, const T* x, const T* mean,
                                      const T* inverse_deviation, Parts sums, Parts projections) {
  const T center = mean[blockIdx.x], inverse = inverse_deviation[blockIdx.x];
  double sum = 0, projection = 0;
  for_part(channels, [&](std::size_t at) {
    sum += double(dy[at]);
    projection += double(dy[at] * ((x[at] - center) * inverse));
  });
  store_part(sums, sum);
  store_part(projections, projection);
}

// -- softmax, one warp per row ---------------------------------------------------------------------------------------
template <class T>
struct RowScale {
  T maximum, sum;  // of a row, and of exp(row - maximum)
};

template <class T>
__device__ RowScale<T> row_scale(const T* row, int columns) {
  T maximum = T(-infinity), sum = T(0);
  for (int c = int(threadIdx.x); c < columns; c += 32) maximum = row[c] > maximum ? row[c] : maximum;
  maximum = over_warp(maximum, [](T a, T b) { return a > b ? a : b; });
  for (int c = int(threadIdx.x); c < columns; c += 32) sum += exp(row[c] - maximum);
  return {maximum, over_warp(sum, Plus())};
}

__device__ inline bool is_class(std::int64_t label, int columns) { return label >= 0 && label < columns; }

template <class T>
__global__ void mean_loss_kernel(const double* row_loss, const std::int64_t* labels, std::size_t rows, int columns,
                                 T* loss, std::int64_t* error) {
  double sum = 0;
  for (std::size_t r = threadIdx.x; r < rows; r += blockDim.x) sum += row_loss[r];
  sum = block_sum<block_threads>(sum);
  if (threadIdx.x != 0) return;
  *loss = rows ? T(sum / double(rows)) : T(0);
  if (!labels || sum == sum || error[0]) return;
  for (std::size_t r = 0; r < rows; ++r) {
    if (is_class(labels[r], columns)) continue;
    error[1] = std::int64_t(r);
    error[2] = labels[r];
    error[3] = columns;
    __threadfence_system();
    error[0] = 1;
    return;
  }
}

template <class F>
__global__ void rows_kernel(F f, std::size_t rows) {
  for (std::size_t row = std::size_t(blockIdx.x) * warp_count + threadIdx.y; row < rows;
       row += std::size_t(gridDim.x) * warp_count)
    f(row);
}

// Calls f(row) on the device in the 32 threads of a warp for each row.
template <class F>
void launch_rows(std::size_t rows, cudaStream_t stream, F f) {
  const std::size_t blocks = (rows + warp_count - 1) / warp_count;
  if (rows)
    launch(&rows_kernel<F>, unsigned(blocks < grid_limit ? blocks : grid_limit), dim3(32, warp_count), stream, f, rows);
}

}  // namespace

template <class T>
void relu(const T* x, T* y, std::size_t count, cudaStream_t stream) {
  const bool aligned = is_aligned(x, 16) && is_aligned(y, 16);
  launch_units<16 / sizeof(T)>(count, aligned, stream, [=] __device__(auto width, std::size_t first) {
    Unit<T, width> values = unit_at<width>(x + first);
    for (T& value : values.e) value = rectify(value);
    unit_at<width>(y + first) = values;
  });
}

template <class T>
void relu_backward(const T* dy, const T* y, T* dx, std::size_t count, cudaStream_t stream) {
  const bool aligned = is_aligned(dy, 16) && is_aligned(y, 16) && is_aligned(dx, 16);
  launch_units<16 / sizeof(T)>(count, aligned, stream, [=] __device__(auto width, std::size_t first) {
    Unit<T, width> values = unit_at<width>(dy + first);
    const Unit<T, width> results = unit_at<width>(y + first);
    for (int i = 0; i < width; ++i) values.e[i] = rectify_gradient(values.e[i], results.e[i]);
    unit_at<width>(dx + first) = values;
  });
}

template <class T>
void sigmoid(const T* x, T* y, std::size_t count, cudaStream_t stream) {
  launch_each(count, stream, [=] __device__(std::size_t i) { y[i] = T(1) / (T(1) + exp(-x[i])); });
}

template <class T>
void sigmoid_backward(const T* dy, const T* y, T* dx, std::size_t count, cudaStream_t stream) {
  launch_each(count, stream, [=] __device__(std::size_t i) { dx[i] = dy[i] * y[i] * (T(1) - y[i]); });
}

template <class T>
void add_bias(T* y, const T* bias, std::size_t rows, int columns, bool relu, cudaStream_t stream) {
  constexpr int unit = 16 / sizeof(T);
  const bool aligned = is_aligned(y, 16) && columns % unit == 0;  // so that a unit lies within a row
  launch_units<unit>(rows * columns, aligned, stream, [=] __device__(auto width, std::size_t first) {
    Unit<T, width> values = unit_at<width>(y + first);
    const std::size_t column = first % std::size_t(columns);
    for (int i = 0; i < width; ++i) {
      const T value = bias ? values.e[i] + bias[column + i] : values.e[i];
      values.e[i] = relu ? rectify(value) : value;
    }
    unit_at<width>(y + first) = values;
  });
}

template <class T>
void column_sums(const T* matrix, std::size_t rows, int columns, T* out, cudaStream_t stream) {
  const unsigned blocks = unsigned(columns + tile - 1) / tile;
  if (blocks) launch(column_sums_kernel<T>, dim3(blocks), dim3(tile, warp_count), stream, matrix, rows, columns, out);
}

template <class T>
void channel_sums(Batch batch, int pixels, const T* x, bool rows, bool add, double* workspace, T* out,
                  cudaStream_t stream) {
  if (!batch.channels) return;
  const Parts sums = {workspace, parts_of(batch, pixels)};
  launch(sums_kernel<T>, dim3(unsigned(batch.channels), sums.count), block_threads, stream,
         channels_of(batch, pixels, rows), x, sums);
  launch_rows(std::size_t(batch.channels), stream, [=] __device__(std::size_t channel) {
    const T sum = T(whole_sum(sums, channel));
    if (threadIdx.x == 0) out[channel] = add ? out[channel] + sum : sum;
  });
}

template <class T>
void channel_moments(Batch batch, int pixels, const T* x, double* workspace, T* mean, T* inverse_deviation,
                     T* running_mean, T* running_var, double momentum, double eps, bool training, cudaStream_t stream) {
  if (!batch.channels) return;
  const Channels channels = channels_of(batch, pixels);
  const double count = double(channels.count);
  const T share = T(momentum), epsilon = T(eps);
  if (!training || !channels.count) {
    launch_each(std::size_t(batch.channels), stream, [=] __device__(std::size_t channel) {
      mean[channel] = running_mean[channel];
      inverse_deviation[channel] = T(1) / sqrt(running_var[channel] + epsilon);
    });
    return;
  }
  const unsigned parts = parts_of(batch, pixels);
  const Parts sums = {workspace, parts}, squares = {workspace + std::size_t(batch.channels) * parts, parts};
  const dim3 grid(unsigned(batch.channels), parts);
  launch(sums_kernel<T>, grid, block_threads, stream, channels, x, sums);
  launch(squares_kernel<T>, grid, block_threads, stream, channels, x, sums, squares);
  launch_rows(std::size_t(batch.channels), stream, [=] __device__(std::size_t channel) {
    const T center = T(whole_sum(sums, channel) / count), variance = T(whole_sum(squares, channel) / count);
    if (threadIdx.x != 0) return;
    mean[channel] = center;
    inverse_deviation[channel] = T(1) / sqrt(variance + epsilon);
    running_mean[channel] += share * (center - running_mean[channel]);
    running_var[channel] += share * (variance * T(count / (count - 1)) - running_var[channel]);
  });
}

template <class T>
void normalize(Batch batch, int pixels, const T* x, const T* mean, const T* inverse_deviation, const T* gamma,
               const T* beta, T* y, cudaStream_t stream) {
  launch_planes(planes_of(batch), std::size_t(pixels), stream, [=] __device__(unsigned plane) {
    const int channel = int(plane) % batch.channels;
    const T center = mean[channel], shift = beta[channel], scale = inverse_deviation[channel] * gamma[channel];
    for (std::size_t i = thread_index(); i < std::size_t(pixels); i += thread_stride()) {
      const std::size_t at = std::size_t(plane) * pixels + i;
      y[at] = (x[at] - center) * scale + shift;
    }
  });
}

template <class T>
void normalize_backward(Batch batch, int pixels, const T* dy, const T* x, const T* mean, const T* inverse_deviation,
                        const T* gamma, bool training, double* workspace, T* dgamma, T* dbeta, T* dx,
                        cudaStream_t stream) {
  if (!batch.channels) return;
  const unsigned parts = parts_of(batch, pixels);
  const Parts sums = {workspace, parts}, projections = {workspace + std::size_t(batch.channels) * parts, parts};
  launch(normalize_sums_kernel<T>, dim3(unsigned(batch.channels), parts), block_threads, stream,
         channels_of(batch, pixels), dy, x, mean, inverse_deviation, sums, projections);
  launch_rows(std::size_t(batch.channels), stream, [=] __device__(std::size_t channel) {
    const T sum = T(whole_sum(sums, channel)), projection = T(whole_sum(projections, channel));
    if (threadIdx.x != 0) return;
    dbeta[channel] = sum;
    dgamma[channel] = projection;
  });
  const T count = T(double(batch.images) * pixels);
  launch_planes(planes_of(batch), std::size_t(pixels), stream, [=] __device__(unsigned plane) {
    const int channel = int(plane) % batch.channels;
    const T center = mean[channel], inverse = inverse_deviation[channel], scale = gamma[channel] * inverse;
    const T offset = training ? dbeta[channel] / count : T(0), slope = training ? dgamma[channel] / count : T(0);
    for (std::size_t i = thread_index(); i < std::size_t(pixels); i += thread_stride()) {
      const std::size_t at = std::size_t(plane) * pixels + i;
      dx[at] = (dy[at] - offset - (x[at] - center) * inverse * slope) * scale;
    }
  });
}

template <class T>
void softmax(const T* x, T* y, std::size_t rows, int columns, cudaStream_t stream) {
  launch_rows(rows, stream, [=] __device__(std::size_t r) {
    const RowScale<T> scale = row_scale(x + r * columns, columns);
    for (int c = int(threadIdx.x); c < columns; c += 32)
      y[r * columns + c] = exp(x[r * columns + c] - scale.maximum) / scale.sum;
  });
}

template <class T>
void cross_entropy(const T* logits, const std::int64_t* labels, const T* target, std::size_t rows, int columns,
                   T* probability, double* row_loss, T* loss, std::int64_t* error, cudaStream_t stream) {
  launch_rows(rows, stream, [=] __device__(std::size_t r) {
    const T* row = logits + r * columns;
    const RowScale<T> scale = row_scale(row, columns);
    const T log_sum = scale.maximum + log(scale.sum);
    double loss = 0;
    for (int c = int(threadIdx.x); c < columns; c += 32) {
      probability[r * columns + c] = exp(row[c] - scale.maximum) / scale.sum;
      if (target) loss += double(target[r * columns + c] * (log_sum - row[c]));
    }
    loss = over_warp(loss, Plus());
    if (!target) loss = is_class(labels[r], columns) ? double(log_sum - row[labels[r]]) : not_a_number;
    if (threadIdx.x == 0) row_loss[r] = loss;
  });
  launch(mean_loss_kernel<T>, dim3(1), dim3(block_threads), stream, row_loss, labels, rows, columns, loss, error);
}

template <class T>
void cross_entropy_backward(const T* probability, const std::int64_t* labels, const T* target, const T* scale,
                            double factor, std::size_t rows, int columns, T* dlogits, cudaStream_t stream) {
  launch_rows(rows, stream, [=] __device__(std::size_t r) {
    const T slope = scale ? T(factor) * *scale : T(factor);
    T share = T(1);
    if (target) {
      share = T(0);
      for (int c = int(threadIdx.x); c < columns; c += 32) share += target[r * columns + c];
      share = over_warp(share, Plus());
    } else if (!is_class(labels[r], columns)) {
      share = T(not_a_number);  // nothing may be learnt from it
    }
    for (int c = int(threadIdx.x); c < columns; c += 32) {
      const std::size_t at = r * columns + c;
      const T wanted = target ? target[at] : T(labels[r] == c);
      dlogits[at] = (probability[at] * share - wanted) * slope;
    }
  });
}

DISTOPT_ARRAY_KERNELS(DISTOPT_INSTANTIATE)

}  // namespace distopt::cuda

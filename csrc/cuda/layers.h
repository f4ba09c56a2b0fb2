// Layers, losses and optimizer updates on the GPU: kernels for T = float and double. For convolutions,
// they move windows over images; cuBLAS computes the products.
//
// All work is enqueued on `stream` and nothing waits. Pointers are device memory, arrays are dense in the layout
// N, C, H, W; if `rows` is set, the array that it belongs to is a product [channels, images * pixels]. Sums run in an
// order that depends on shapes alone, without atomics: equal inputs give equal bits on every run. Element by element
// the arithmetic is that of csrc/cpu/elementwise.cpp.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace distopt::cuda {

// -- images ----------------------------------------------------------------------------------------------------------
// A window that slides over images of h x w with a border of zeros, and stops at oh x ow places.
struct Window {
  int h, w, kh, kw, sh, sw, ph, pw, oh, ow;
};

struct Batch {
  int images, channels;
};
inline std::size_t planes_of(Batch batch) { return std::size_t(batch.images) * batch.channels; }

// columns [channels * kh * kw, images * oh * ow] = the pixel under each tap of each channel at each place.
template <class T>
void lower(Batch batch, Window window, const T* x, T* columns, cudaStream_t stream);
// The reverse: dx = for each pixel the sum of its entries in the columns.
template <class T>
void gather_columns(Batch batch, Window window, const T* columns, T* dx, cudaStream_t stream);
// to = from + bias[channel] (or null), with ReLU if asked; planes of `pixels`. `to` may be where `from` is.
template <class T>
void spread(Batch batch, int pixels, const T* from, bool rows, const T* bias, bool relu, T* to, cudaStream_t stream);
// to = dy, 0 where y (or null) is not positive.
template <class T>
void collect(Batch batch, int pixels, const T* dy, const T* y, T* to, bool rows, cudaStream_t stream);
// As `spread`, then the maximum of each window; `taken` is the tap that it came from. A NaN always wins.
template <class T>
void max_pool(Batch batch, Window window, const T* x, bool rows, const T* bias, bool relu, T* y, std::uint8_t* taken,
              cudaStream_t stream);
// dx = for each pixel the sum of dy over the windows that took it, 0 where y (or null) is not positive.
template <class T>
void max_pool_backward(Batch batch, Window window, const T* dy, const T* y, const std::uint8_t* taken, T* dx, bool rows,
                       cudaStream_t stream);
template <class T>
void avg_pool(Batch batch, Window window, const T* x, T* y, cudaStream_t stream);
template <class T>
void avg_pool_backward(Batch batch, Window window, const T* dy, T* dx, cudaStream_t stream);

// -- arrays, rows and channels ---------------------------------------------------------------------------------------
template <class T>
void relu(const T* x, T* y, std::size_t count, cudaStream_t stream);
template <class T>
void relu_backward(const T* dy, const T* y, T* dx, std::size_t count, cudaStream_t stream);
template <class T>
void sigmoid(const T* x, T* y, std::size_t count, cudaStream_t stream);
template <class T>
void sigmoid_backward(const T* dy, const T* y, T* dx, std::size_t count, cudaStream_t stream);
// y [rows, columns] += bias [columns] (or null), with ReLU if asked, in place.
template <class T>
void add_bias(T* y, const T* bias, std::size_t rows, int columns, bool relu, cudaStream_t stream);
// out[column] = the sum of a column of a matrix [rows, columns].
template <class T>
void column_sums(const T* matrix, std::size_t rows, int columns, T* out, cudaStream_t stream);

// `workspace` has room for 2 * max(channels, channel_blocks) float64 in the sums over channels below.
constexpr unsigned channel_blocks = 1024;  // about as many as an H100 holds
// out[channel] = the sum of its planes over all images, added to the existing values if asked.
template <class T>
void channel_sums(Batch batch, int pixels, const T* x, bool rows, bool add, double* workspace, T* out,
                  cudaStream_t stream);
// Mean and inverse deviation of every channel of x [images, channels, pixels]; the running statistics are updated.
// Without `training`, the outputs are made from the running statistics.
template <class T>
void channel_moments(Batch batch, int pixels, const T* x, double* workspace, T* mean, T* inverse_deviation,
                     T* running_mean, T* running_var, double momentum, double eps, bool training, cudaStream_t stream);
template <class T>
void normalize(Batch batch, int pixels, const T* x, const T* mean, const T* inverse_deviation, const T* gamma,
               const T* beta, T* y, cudaStream_t stream);
template <class T>
void normalize_backward(Batch batch, int pixels, const T* dy, const T* x, const T* mean, const T* inverse_deviation,
                        const T* gamma, bool training, double* workspace, T* dgamma, T* dbeta, T* dx,
                        cudaStream_t stream);

template <class T>
void softmax(const T* x, T* y, std::size_t rows, int columns, cudaStream_t stream);
// Labels are class indices, or `target`, one distribution per row; the other is null. An invalid label makes
// the loss NaN, and error = {1, row, label, columns} (host memory that the device reaches) if error[0] was 0.
template <class T>
void cross_entropy(const T* logits, const std::int64_t* labels, const T* target, std::size_t rows, int columns,
                   T* probability, double* row_loss, T* loss, std::int64_t* error, cudaStream_t stream);
// dlogits = the gradient times `factor` and, unless null, times *scale.
template <class T>
void cross_entropy_backward(const T* probability, const std::int64_t* labels, const T* target, const T* scale,
                            double factor, std::size_t rows, int columns, T* dlogits, cudaStream_t stream);

// `buffer` may be null.
template <class T>
void sgd(T* param, const T* grad, T* buffer, std::size_t count, double lr, double momentum, double dampening,
         double weight_decay, bool nesterov, cudaStream_t stream);
// Steps count from 1.
template <class T>
void adam(T* param, const T* grad, T* m, T* v, std::size_t count, int step, double lr, double beta1, double beta2,
          double eps, double weight_decay, cudaStream_t stream);
template <class T>
void rmsprop(T* param, const T* grad, T* running, std::size_t count, double lr, double rho, double eps,
             double weight_decay, cudaStream_t stream);
template <class T>
void adagrad(T* param, const T* grad, T* history, std::size_t count, double lr, double eps, double weight_decay,
             cudaStream_t stream);

// The names of all of them, as X(name), and a macro that makes one of them for both types.
// clang-format off
#define DISTOPT_IMAGE_KERNELS(X) \
  X(lower) X(gather_columns) X(spread) X(collect) \
  X(max_pool) X(max_pool_backward) X(avg_pool) X(avg_pool_backward)
#define DISTOPT_ARRAY_KERNELS(X) \
  X(relu) X(relu_backward) X(sigmoid) X(sigmoid_backward) X(add_bias) X(column_sums) \
  X(channel_sums) X(channel_moments) X(normalize) X(normalize_backward) \
  X(softmax) X(cross_entropy) X(cross_entropy_backward)
#define DISTOPT_UPDATE_KERNELS(X) X(sgd) X(adam) X(rmsprop) X(adagrad)
// clang-format on
#define DISTOPT_INSTANTIATE(name)             \
  template decltype(name<float>) name<float>; \
  template decltype(name<double>) name<double>;

}  // namespace distopt::cuda

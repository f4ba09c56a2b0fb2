// Convolutions and pooling on the GPU, as far as they move windows over images; otherwise as in elementwise.h.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace distopt::cuda {

// A window that slides over images of h x w with a border of zeros, and stops at oh x ow places.
struct Window {
  int h, w, kh, kw, sh, sw, ph, pw, oh, ow;
};

struct Batch {
  int images, channels;
};
inline std::size_t planes_of(Batch batch) { return std::size_t(batch.images) * batch.channels; }

// Images lie in the layout N, C, H, W; those with `rows` lie, if it is set, in the rows of a product [channels, images
// * pixels].

// columns [channels * kh * kw, images * oh * ow] = what each tap of each channel meets at each place.
template <class T>
void lower(Batch batch, Window window, const T* x, T* columns, cudaStream_t stream);
// The reverse: dx = for each pixel the sum of what stands in the columns for it.
template <class T>
void gather_columns(Batch batch, Window window, const T* columns, T* dx, cudaStream_t stream);
// to = from + bias[channel] (or null), with ReLU if asked; planes of `pixels`. `to` may be where `from` is.
template <class T>
void spread(Batch batch, int pixels, const T* from, bool rows, const T* bias, bool relu, T* to, cudaStream_t stream);
// to = dy, 0 where y (or null) is not positive.
template <class T>
void collect(Batch batch, int pixels, const T* dy, const T* y, T* to, bool rows, cudaStream_t stream);
// out[channel] = the sum of its planes over all images, added to what is there if asked.
template <class T>
void channel_sums(Batch batch, int pixels, const T* x, bool rows, bool add, T* out, cudaStream_t stream);
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

}  // namespace distopt::cuda

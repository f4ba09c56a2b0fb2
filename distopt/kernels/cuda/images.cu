// Kernels that move windows over images: lowering of convolutions, and pooling.
//
// The second dimension of the grid is a plane or a row of columns, so that threads divide by widths alone.
#include "cuda/device.h"
#include "cuda/layers.h"

namespace distopt::cuda {
namespace {

// Images in memory: plane (image, channel) begins at `data` + image * per_image + channel * per_channel and is dense.
template <class T>
struct Planes {
  T* data;
  std::size_t per_image, per_channel;

  __device__ T* at(int image, int channel) const { return data + image * per_image + channel * per_channel; }
  __device__ T* at(unsigned plane, int channels) const { return at(int(plane) / channels, int(plane) % channels); }
};

template <class T>
Planes<T> planes_at(T* data, Batch batch, std::size_t pixels, bool rows) {
  if (rows) return {data, pixels, batch.images * pixels};
  return {data, batch.channels * pixels, pixels};
}

// Calls f(place, tap) for the windows that cover a pixel, in ascending order of their rows and then of their taps: the
// order in which the CPU adds.
template <class F>
__device__ inline void for_windows(const Window& s, int pixel, F f) {
  const int iy = pixel / s.w + s.ph, ix = pixel % s.w + s.pw;
  const int first = iy < s.kh ? 0 : (iy - s.kh) / s.sh + 1;
  for (int oy = first; oy < s.oh && oy * s.sh <= iy; ++oy)
    for (int kx = ix % s.sw; kx < s.kw && kx <= ix; kx += s.sw) {
      const int ox = (ix - kx) / s.sw;
      if (ox < s.ow) f(std::size_t(oy) * s.ow + ox, (iy - oy * s.sh) * s.kw + kx);
    }
}

std::size_t pixels_of(const Window& s) { return std::size_t(s.h) * s.w; }
std::size_t places_of(const Window& s) { return std::size_t(s.oh) * s.ow; }

}  // namespace

template <class T>
void lower(Batch batch, Window s, const T* x, T* columns, cudaStream_t stream) {
  const int taps = s.kh * s.kw, places = s.oh * s.ow;
  const std::size_t width = std::size_t(batch.images) * places, rows = std::size_t(batch.channels) * taps;
  launch_planes(rows, width, stream, [=] __device__(unsigned row) {
    const int channel = int(row) / taps, tap = int(row) % taps;
    const int dy = tap / s.kw - s.ph, dx = tap % s.kw - s.pw;
    for (std::size_t at = thread_index(); at < width; at += thread_stride()) {
      const unsigned image = unsigned(at) / unsigned(places), place = unsigned(at) % unsigned(places);
      const int iy = int(place) / s.ow * s.sh + dy, ix = int(place) % s.ow * s.sw + dx;
      const bool inside = iy >= 0 && iy < s.h && ix >= 0 && ix < s.w;
      const std::size_t plane = std::size_t(image) * batch.channels + channel;
      columns[row * width + at] = inside ? x[plane * s.h * s.w + std::size_t(iy) * s.w + ix] : T(0);
    }
  });
}

template <class T>
void gather_columns(Batch batch, Window s, const T* columns, T* dx, cudaStream_t stream) {
  const std::size_t places = places_of(s), width = batch.images * places, pixels = pixels_of(s);
  launch_planes(planes_of(batch), pixels, stream, [=] __device__(unsigned plane) {
    const int image = int(plane) / batch.channels, channel = int(plane) % batch.channels;
    for (std::size_t pixel = thread_index(); pixel < pixels; pixel += thread_stride()) {
      const int iy = int(pixel) / s.w + s.ph, ix = int(pixel) % s.w + s.pw;
      T sum = T(0);
      for (int ky = iy % s.sh; ky < s.kh && ky <= iy; ky += s.sh) {
        const int oy = (iy - ky) / s.sh;
        if (oy >= s.oh) continue;
        for (int kx = ix % s.sw; kx < s.kw && kx <= ix; kx += s.sw) {
          const int ox = (ix - kx) / s.sw;
          if (ox >= s.ow) continue;
          const std::size_t row = (std::size_t(channel) * s.kh + ky) * s.kw + kx;
          sum += columns[row * width + image * places + std::size_t(oy) * s.ow + ox];
        }
      }
      dx[plane * pixels + pixel] = sum;
    }
  });
}

template <class T>
void spread(Batch batch, int pixels, const T* data, bool rows, const T* bias, bool relu, T* to, cudaStream_t stream) {
  const auto from = planes_at(data, batch, std::size_t(pixels), rows);
  launch_planes(planes_of(batch), std::size_t(pixels), stream, [=] __device__(unsigned plane) {
    const T* source = from.at(plane, batch.channels);
    const T shift = bias ? bias[int(plane) % batch.channels] : T(0);
    for (std::size_t i = thread_index(); i < std::size_t(pixels); i += thread_stride()) {
      const T value = bias ? source[i] + shift : source[i];
      to[std::size_t(plane) * pixels + i] = relu ? rectify(value) : value;
    }
  });
}

template <class T>
void collect(Batch batch, int pixels, const T* dy, const T* y, T* data, bool rows, cudaStream_t stream) {
  const auto to = planes_at(data, batch, std::size_t(pixels), rows);
  launch_planes(planes_of(batch), std::size_t(pixels), stream, [=] __device__(unsigned plane) {
    T* target = to.at(plane, batch.channels);
    for (std::size_t i = thread_index(); i < std::size_t(pixels); i += thread_stride()) {
      const std::size_t at = std::size_t(plane) * pixels + i;
      target[i] = y ? rectify_gradient(dy[at], y[at]) : dy[at];
    }
  });
}

template <class T>
void max_pool(Batch batch, Window s, const T* data, bool rows, const T* bias, bool relu, T* y, std::uint8_t* taken,
              cudaStream_t stream) {
  const auto x = planes_at(data, batch, pixels_of(s), rows);
  const std::size_t places = places_of(s);
  launch_planes(planes_of(batch), places, stream, [=] __device__(unsigned plane) {
    const T* source = x.at(plane, batch.channels);
    const T shift = bias ? bias[int(plane) % batch.channels] : T(0);
    for (std::size_t place = thread_index(); place < places; place += thread_stride()) {
      const int top = int(place) / s.ow * s.sh - s.ph, left = int(place) % s.ow * s.sw - s.pw;
      T best = T(-infinity);
      int tap = (top < 0 ? -top : 0) * s.kw + (left < 0 ? -left : 0);  // the first that is inside
      for (int ky = 0; ky < s.kh; ++ky) {
        for (int kx = 0; kx < s.kw; ++kx) {
          const int iy = top + ky, ix = left + kx;
          if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
          T value = source[std::size_t(iy) * s.w + ix];
          if (bias) value += shift;
          if (relu) value = rectify(value);
          if (value > best || value != value) {
            best = value;
            tap = ky * s.kw + kx;
          }
        }
      }
      y[plane * places + place] = best;
      taken[plane * places + place] = std::uint8_t(tap);
    }
  });
}

template <class T>
void max_pool_backward(Batch batch, Window s, const T* dy, const T* y, const std::uint8_t* taken, T* data, bool rows,
                       cudaStream_t stream) {
  const auto dx = planes_at(data, batch, pixels_of(s), rows);
  const std::size_t places = places_of(s), pixels = pixels_of(s);
  launch_planes(planes_of(batch), pixels, stream, [=] __device__(unsigned plane) {
    T* target = dx.at(plane, batch.channels);
    const std::size_t base = plane * places;
    for (std::size_t pixel = thread_index(); pixel < pixels; pixel += thread_stride()) {
      T sum = T(0);
      for_windows(s, int(pixel), [&](std::size_t place, int tap) {
        if (taken[base + place] != tap) return;
        sum += y ? rectify_gradient(dy[base + place], y[base + place]) : dy[base + place];
      });
      target[pixel] = sum;
    }
  });
}

template <class T>
void avg_pool(Batch batch, Window s, const T* x, T* y, cudaStream_t stream) {
  const std::size_t places = places_of(s), pixels = pixels_of(s);
  const T share = T(1) / T(s.kh * s.kw);
  launch_planes(planes_of(batch), places, stream, [=] __device__(unsigned plane) {
    for (std::size_t place = thread_index(); place < places; place += thread_stride()) {
      const int top = int(place) / s.ow * s.sh - s.ph, left = int(place) % s.ow * s.sw - s.pw;
      T sum = T(0);
      for (int iy = max(top, 0); iy < min(top + s.kh, s.h); ++iy)
        for (int ix = max(left, 0); ix < min(left + s.kw, s.w); ++ix)
          sum += x[plane * pixels + std::size_t(iy) * s.w + ix] * share;
      y[plane * places + place] = sum;
    }
  });
}

template <class T>
void avg_pool_backward(Batch batch, Window s, const T* dy, T* dx, cudaStream_t stream) {
  const std::size_t places = places_of(s), pixels = pixels_of(s);
  const T share = T(1) / T(s.kh * s.kw);
  launch_planes(planes_of(batch), pixels, stream, [=] __device__(unsigned plane) {
    for (std::size_t pixel = thread_index(); pixel < pixels; pixel += thread_stride()) {
      T sum = T(0);
      for_windows(s, int(pixel), [&](std::size_t place, int) { sum += dy[plane * places + place] * share; });
      dx[plane * pixels + pixel] = sum;
    }
  });
}

DISTOPT_IMAGE_KERNELS(DISTOPT_INSTANTIATE)

}  // namespace distopt::cuda

// Kernels that move windows over images: lowering of convolutions, and pooling. cuBLAS computes the products.
//
// Arrays are dense images; `rows` is a product [channels, images * pixels]. Sums run in an order that shapes alone
// determine, without atomics.
#include "device.cuh"

// A window that slides over images of h x w with a border of zeros, and stops at oh x ow places.
struct Window {
  int h, w, kh, kw, sh, sw, ph, pw, oh, ow;
};

// Where a plane (image, channel) of `pixels` begins in a product.
__device__ inline size_t row_of(Batch batch, unsigned plane, size_t pixels) {
  return (size_t(plane) % batch.channels * batch.images + plane / batch.channels) * pixels;
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
      if (ox < s.ow) f(size_t(oy) * s.ow + ox, (iy - oy * s.sh) * s.kw + kx);
    }
}

__device__ inline size_t pixels_of(const Window& s) { return size_t(s.h) * s.w; }
__device__ inline size_t places_of(const Window& s) { return size_t(s.oh) * s.ow; }

// columns [channels * kh * kw, images * oh * ow] = the pixel under each tap of each channel at each place.
__global__ void lower(Batch batch, Window s, const float* x, float* columns) {
  const int taps = s.kh * s.kw, places = s.oh * s.ow;
  const size_t width = size_t(batch.images) * places;
  for_planes(size_t(batch.channels) * taps, [&](unsigned row) {
    const int channel = int(row) / taps, tap = int(row) % taps;
    const int dy = tap / s.kw - s.ph, dx = tap % s.kw - s.pw;
    for_each(width, [&](size_t at) {
      const unsigned image = unsigned(at) / unsigned(places), place = unsigned(at) % unsigned(places);
      const int iy = int(place) / s.ow * s.sh + dy, ix = int(place) % s.ow * s.sw + dx;
      const bool inside = iy >= 0 && iy < s.h && ix >= 0 && ix < s.w;
      const size_t plane = size_t(image) * batch.channels + channel;
      columns[row * width + at] = inside ? x[plane * s.h * s.w + size_t(iy) * s.w + ix] : 0.0f;
    });
  });
}

// The reverse: dx = for each pixel the sum of its entries in the columns.
__global__ void gather_columns(Batch batch, Window s, const float* columns, float* dx) {
  const size_t width = batch.images * places_of(s), pixels = pixels_of(s);
  for_planes(planes_of(batch), [&](unsigned plane) {
    const int image = int(plane) / batch.channels, channel = int(plane) % batch.channels;
    const float* from = columns + channel * s.kh * s.kw * width + image * places_of(s);
    for_each(pixels, [&](size_t pixel) {
      float sum = 0.0f;
      for_windows(s, int(pixel), [&](size_t place, int tap) { sum += from[tap * width + place]; });
      dx[plane * pixels + pixel] = sum;
    });
  });
}

// to = rows + bias[channel] (or null), with ReLU if asked; planes of `pixels`.
__global__ void spread(Batch batch, int pixels, const float* rows, const float* bias, bool relu, float* to) {
  for_planes(planes_of(batch), [&](unsigned plane) {
    const float* source = rows + row_of(batch, plane, size_t(pixels));
    const float shift = bias ? bias[int(plane) % batch.channels] : 0.0f;
    for_each(size_t(pixels), [&](size_t i) {
      const float value = bias ? source[i] + shift : source[i];
      to[size_t(plane) * pixels + i] = relu ? rectify(value) : value;
    });
  });
}

// rows = dy, 0 where y (or null) is not positive.
__global__ void collect(Batch batch, int pixels, const float* dy, const float* y, float* rows) {
  for_planes(planes_of(batch), [&](unsigned plane) {
    float* target = rows + row_of(batch, plane, size_t(pixels));
    for_each(size_t(pixels), [&](size_t i) {
      const size_t at = size_t(plane) * pixels + i;
      target[i] = y ? rectify_gradient(dy[at], y[at]) : dy[at];
    });
  });
}

// The maximum of each window; `taken` is the tap that it came from. A NaN always wins.
__global__ void max_pool(Batch batch, Window s, const float* x, float* y, unsigned char* taken) {
  const size_t places = places_of(s);
  for_planes(planes_of(batch), [&](unsigned plane) {
    const float* source = x + plane * pixels_of(s);
    for_each(places, [&](size_t place) {
      const int top = int(place) / s.ow * s.sh - s.ph, left = int(place) % s.ow * s.sw - s.pw;
      float best = float(-infinity());
      int tap = (top < 0 ? -top : 0) * s.kw + (left < 0 ? -left : 0);  // the first that is inside
      for (int ky = 0; ky < s.kh; ++ky) {
        for (int kx = 0; kx < s.kw; ++kx) {
          const int iy = top + ky, ix = left + kx;
          if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
          const float value = source[size_t(iy) * s.w + ix];
          if (value > best || value != value) {
            best = value;
            tap = ky * s.kw + kx;
          }
        }
      }
      y[plane * places + place] = best;
      taken[plane * places + place] = static_cast<unsigned char>(tap);
    });
  });
}

// dx = for each pixel the sum of dy over the windows that took it.
__global__ void max_pool_backward(Batch batch, Window s, const float* dy, const unsigned char* taken, float* dx) {
  const size_t places = places_of(s), pixels = pixels_of(s);
  for_planes(planes_of(batch), [&](unsigned plane) {
    const size_t base = plane * places;
    for_each(pixels, [&](size_t pixel) {
      float sum = 0.0f;
      for_windows(s, int(pixel), [&](size_t place, int tap) {
        if (taken[base + place] == tap) sum += dy[base + place];
      });
      dx[plane * pixels + pixel] = sum;
    });
  });
}

// Kernels that move windows over dense images: lowering of convolutions, and pooling. cuBLAS computes the products.
// Sums run in an order that shapes alone determine, without atomics.
#include "device.cuh"

// A window that slides over images of h x w with a border of zeros, and stops at oh x ow places.
struct Window {
  int h, w, kh, kw, sh, sw, ph, pw, oh, ow;
};

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
  const int taps = s.kh * s.kw;
  const size_t width = batch.images * places_of(s);
  for_planes(size_t(batch.channels) * taps, [&](unsigned row) {
    const int channel = int(row) / taps, tap = int(row) % taps;
    for_each(width, [&](size_t at) {
      const unsigned image = unsigned(at) / unsigned(places_of(s)), place = unsigned(at) % unsigned(places_of(s));
      const int iy = int(place) / s.ow * s.sh + tap / s.kw - s.ph, ix = int(place) % s.ow * s.sw + tap % s.kw - s.pw;
      const bool inside = iy >= 0 && iy < s.h && ix >= 0 && ix < s.w;
      const size_t plane = size_t(image) * batch.channels + channel;
      columns[row * width + at] = inside ? x[plane * pixels_of(s) + size_t(iy) * s.w + ix] : 0.0f;
    });
  });
}

// y [images, channels, places] = the product with lowered images, rows [channels, images * places], plus the bias of
// each channel if there is one, and ReLU.
__global__ void from_rows(Batch batch, int places, const float* rows, const float* bias, bool relu, float* y) {
  for_planes(planes_of(batch), [&](unsigned plane) {
    const unsigned image = plane / unsigned(batch.channels), channel = plane % unsigned(batch.channels);
    const float* row = rows + (size_t(channel) * batch.images + image) * places;
    const float shift = bias ? bias[channel] : 0.0f;
    for_each(size_t(places), [&](size_t place) {
      const float value = row[place] + shift;
      y[size_t(plane) * places + place] = relu ? rectify(value) : value;
    });
  });
}

// The reverse of `lower`: dx = for each pixel the sum of its entries in the columns.
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

// The maximum of each window; `taken` is the tap that it came from. A NaN always wins.
__global__ void max_pool(Batch batch, Window s, const float* x, float* y, unsigned char* taken) {
  const size_t places = places_of(s);
  for_planes(planes_of(batch), [&](unsigned plane) {
    const float* source = x + plane * pixels_of(s);
    for_each(places, [&](size_t place) {
      const int top = int(place) / s.ow * s.sh - s.ph, left = int(place) % s.ow * s.sw - s.pw;
      float best = 0.0f;
      int at = -1;
      for (int tap = 0; tap < s.kh * s.kw; ++tap) {
        const int iy = top + tap / s.kw, ix = left + tap % s.kw;
        if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
        const float value = source[size_t(iy) * s.w + ix];
        if (at < 0 || value > best || value != value) {
          best = value;
          at = tap;
        }
      }
      y[plane * places + place] = best;
      taken[plane * places + place] = static_cast<unsigned char>(at);
    });
  });
}

// dx = for each pixel the sum of dy over the windows that took it; 0 where x is given, the result of ReLU, and not
// above 0, nor NaN.
__global__ void max_pool_backward(Batch batch, Window s, const float* dy, const unsigned char* taken, const float* x,
                                  float* dx) {
  const size_t places = places_of(s), pixels = pixels_of(s);
  for_planes(planes_of(batch), [&](unsigned plane) {
    const size_t base = plane * places;
    for_each(pixels, [&](size_t pixel) {
      float sum = 0.0f;
      for_windows(s, int(pixel), [&](size_t place, int tap) {
        if (taken[base + place] == tap) sum += dy[base + place];
      });
      dx[plane * pixels + pixel] = x && x[plane * pixels + pixel] <= 0 ? 0.0f : sum;
    });
  });
}

#include "cpu/gemm.h"

namespace distopt::DISTOPT_ISA {
namespace {

// Of all registers, those that hold C.
#if defined(__AVX512F__)
constexpr Index kTileRegisters = 24;  // of 32
#else
constexpr Index kTileRegisters = 12;  // of 16
#endif

// Rows of a tile that is V vectors wide. Each number of rows is a function of its own, hence the limit.
template <Index V>
constexpr Index kTileRows = kTileRegisters / V < 8 ? kTileRegisters / V : 8;

// Elements of a row of A from which on it is worth while to ask for it.
constexpr Index kPrefetched = 64;

// Keeps a value in a register at this point: without it GCC 12 reloads B for every row of A and spills the block of C
// in every iteration, which halves the speed.
template <class V>
inline void keep_in_register(V& value) {
#if defined(__x86_64__)
  __asm__("" : "+v"(value));
#else
  (void)value;
#endif
}

// Not inlined: where GCC 12 knows a stride, it allocates registers worse, and spills C.
template <class T, Index R, Index V, class B>
[[gnu::noinline]] void tile(Index inner, Left<T> left, B right_side, T* c, Index c_row, Index columns,
                            const Finish<T>& finish) {
  constexpr Index lanes = kLanes<T>;
  Vec<T> sum[R][V] = {};
#pragma GCC unroll 8
  for (Index i = 0; i < R; ++i) {
    __builtin_prefetch(c + i * c_row, 1);
    __builtin_prefetch(c + i * c_row + V * lanes - 1, 1);
  }
  const T* a = left.a;
  for (Index k = 0; k < inner; ++k, a += left.inner) {
    const T* const b = right_side.at(k);
    Vec<T> right[V];
#pragma GCC unroll 8
    for (Index j = 0; j < V; ++j) {
      right[j] = load(b + j * lanes);
      keep_in_register(right[j]);
    }
#pragma GCC unroll 8
    for (Index i = 0; i < R; ++i) {
#pragma GCC unroll 8
      for (Index j = 0; j < V; ++j) {
        sum[i][j] = multiply_add(a[i * left.row], right[j], sum[i][j]);
        keep_in_register(sum[i][j]);
      }
    }
  }
  // Only the last vector of a row may be a part of one. Each question is asked once, not for each vector.
  constexpr Index last = V - 1;
  const Index rest = columns - last * lanes;
  const bool whole = rest >= lanes;
  T* const end = c + last * lanes;
  if (finish.accumulate) {
#pragma GCC unroll 8
    for (Index i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (Index j = 0; j < last; ++j) sum[i][j] += load(c + i * c_row + j * lanes);
    if (whole)
#pragma GCC unroll 8
      for (Index i = 0; i < R; ++i) sum[i][last] += load(end + i * c_row);
    else
#pragma GCC unroll 8
      for (Index i = 0; i < R; ++i) sum[i][last] += load_some(end + i * c_row, rest);
  }
  if (finish.bias)
#pragma GCC unroll 8
    for (Index i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (Index j = 0; j < V; ++j) sum[i][j] += finish.bias[i];
  if (finish.relu)
#pragma GCC unroll 8
    for (Index i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (Index j = 0; j < V; ++j) sum[i][j] = sum[i][j] < 0 ? Vec<T>{} : sum[i][j];  // a NaN stays
#pragma GCC unroll 8
  for (Index i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (Index j = 0; j < last; ++j) store(c + i * c_row + j * lanes, sum[i][j]);
  if (whole)
#pragma GCC unroll 8
    for (Index i = 0; i < R; ++i) store(end + i * c_row, sum[i][last]);
  else
#pragma GCC unroll 8
    for (Index i = 0; i < R; ++i) store_some(end + i * c_row, sum[i][last], rest);
}

// Asks for the rows of A that the next tile will read: each is too short for the processor to foresee. Shorter ones
// come from matrices that the first cache holds.
template <class T>
inline void prefetch_rows(Left<T> left, Index rows, Index inner) {
  constexpr Index line = 64 / sizeof(T);
  for (Index i = 0; i < rows; ++i)
    for (Index k = 0; k < inner; k += line) __builtin_prefetch(left.a + i * left.row + k);
}

// The same with a number of rows that is not known before, but is R at most.
template <class T, Index R, Index V, class B>
inline void tile_of(Index rows, Index inner, Left<T> left, B b, T* c, Index c_row, Index columns,
                    const Finish<T>& finish) {
  if (rows == R) return tile<T, R, V>(inner, left, b, c, c_row, columns, finish);
  if constexpr (R > 1) tile_of<T, R - 1, V>(rows, inner, left, b, c, c_row, columns, finish);
}

// The rows are dealt out evenly: a narrow last tile would wait for loads.
template <class T, Index V, class B>
void strip_of(Index rows, Index inner, Left<T> left, B b, T* c, Index c_row, Index columns, Finish<T> finish) {
  for (Index tiles = (rows + kTileRows<V> - 1) / kTileRows<V>; tiles > 0; --tiles) {
    const Index some = (rows + tiles - 1) / tiles;
    if (left.inner == 1 && inner >= kPrefetched)
      prefetch_rows<T>({left.a + some * left.row, left.row, 1}, smaller(some, rows - some), inner);
    tile_of<T, kTileRows<V>, V>(some, inner, left, b, c, c_row, columns, finish);
    rows -= some;
    c += some * c_row;
    left.a += some * left.row;
    if (finish.bias) finish.bias += some;
  }
}

// The same with a number of vectors that is not known before, but is V at most.
template <class T, Index V, class B>
void strip(Index vectors, Index rows, Index inner, Left<T> left, B b, T* c, Index c_row, Index columns,
           const Finish<T>& finish) {
  if (vectors == V) return strip_of<T, V>(rows, inner, left, b, c, c_row, columns, finish);
  if constexpr (V > 1) strip<T, V - 1>(vectors, rows, inner, left, b, c, c_row, columns, finish);
}

}  // namespace

template <class T>
void multiply_panel(Index rows, Index inner, Left<T> left, Right<T> b, T* c, Index c_row, Index columns,
                    Finish<T> finish) {
  constexpr Index lanes = kLanes<T>;
  for (Index j = 0; j < columns; j += kStrip<T>, b.b += b.strip, c += kStrip<T>) {
    const Index some = smaller(columns - j, kStrip<T>);
    strip<T, kTileVectors>((some + lanes - 1) / lanes, rows, inner, left, b, c, c_row, some, finish);
  }
}

template <class T>
void multiply_rows(Index rows, Index inner, Left<T> left, const T* b, Index b_row, T* c, Index c_row, Index vectors,
                   bool accumulate) {
  constexpr Index lanes = kLanes<T>;
  for (Index strips = (vectors + kWidestTile - 1) / kWidestTile; strips > 0; --strips) {
    const Index some = (vectors + strips - 1) / strips;
    strip<T, kWidestTile>(some, rows, inner, left, Right<T>{b, b_row, 0}, c, c_row, some * lanes,
                          {accumulate, nullptr, false});
    vectors -= some;
    b += some * lanes;
    c += some * lanes;
  }
}

template <class T>
void multiply_scattered(Index rows, Index inner, Left<T> left, Scattered<T> b, T* c, Index c_row, Index vectors,
                        const Finish<T>& finish) {
  strip<T, kWidestTile>(vectors, rows, inner, left, b, c, c_row, vectors * kLanes<T>, finish);
}

template void multiply_panel(Index, Index, Left<float>, Right<float>, float*, Index, Index, Finish<float>);
template void multiply_panel(Index, Index, Left<double>, Right<double>, double*, Index, Index, Finish<double>);
template void multiply_rows(Index, Index, Left<float>, const float*, Index, float*, Index, Index, bool);
template void multiply_scattered(Index, Index, Left<float>, Scattered<float>, float*, Index, Index,
                                 const Finish<float>&);
template void multiply_scattered(Index, Index, Left<double>, Scattered<double>, double*, Index, Index,
                                 const Finish<double>&);

}  // namespace distopt::DISTOPT_ISA

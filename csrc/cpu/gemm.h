// The innermost product of convolutions and linear layers, compiled once per set: a block of C stays in registers
// while one row of packed B and one column of A pass (Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication", ACM TOMS 34(3), 2008, section 6). Lowering writes B straight into the packed form, which a BLAS
// would make from a lowered matrix once more.
#pragma once

#include "cpu/vectors.h"

namespace distopt::DISTOPT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr Index kTileRegisters = 24, kTileVectors = 4;  // registers, of 32, that hold C; vectors of its rows
#else
constexpr Index kTileRegisters = 12, kTileVectors = 2;  // of 16 registers
#endif

// Rows of a tile that is V vectors wide. The limit is for the size of the code: each number of rows has its own
// function.
template <Index V>
constexpr Index kTileRows = kTileRegisters / V < 8 ? kTileRegisters / V : 8;

// Vectors of the widest tile where a row need not be one of a packed panel.
constexpr Index kWidestTile = kTileVectors < 3 ? 3 : 4;

// Columns of a panel of B, and the most rows of a packed one: 32 KiB, which stay in the L1 cache while every row of A
// passes over them.
template <class T>
constexpr Index kPanel = 256 / sizeof(T);
constexpr Index kPanelRows = 128;
// The least number of elements of rows of A that are prefetched.
constexpr Index kPrefetched = 64;

// A packed panel lies strip after strip, each as wide as a tile and kPanelRows long: one long stride for all rows would
// make them compete for a few sets of the cache.
template <class T>
constexpr Index kStrip = kTileVectors * kLanes<T>;

// Where column j of the first row of a packed panel is.
template <class T>
constexpr Index packed_column(Index j) {
  return j / kStrip<T> * (kPanelRows * kStrip<T>)+j % kStrip<T>;
}

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

// A[i, k] = a[i * row + k * inner].
template <class T>
struct Left {
  const T* a;
  Index row, inner;
};

// A panel: its rows are `row` elements apart, its strips `strip`.
template <class T>
struct Right {
  const T* b;
  Index row, strip;

  const T* at(Index k) const { return b + k * row; }
};

// Rows that lie anywhere, at `offset[k]`.
template <class T>
struct Scattered {
  const T* b;
  const Index* offset;

  const T* at(Index k) const { return b + offset[k]; }
};

template <class T>
constexpr Right<T> packed(const T* b) {
  return {b, kStrip<T>, kPanelRows * kStrip<T>};
}

template <class T>
constexpr Right<T> in_rows(const T* b) {
  return {b, kPanel<T>, kStrip<T>};
}

// The operations on a block of C as it is stored.
template <class T>
struct Finish {
  bool accumulate;  // add to C instead of overwriting it
  const T* bias;    // one per row of C, added after the product; or null
  bool relu;
};

// Calls f(i, j) for each vector of a tile. Unrolled, so that the vectors stay in registers.
template <Index R, Index V, class F>
[[gnu::always_inline]] inline void for_vectors(F f) {
#pragma GCC unroll 8
  for (Index i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (Index j = 0; j < V; ++j) f(i, j);
  }
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
  // Each condition is tested once, not for each vector.
  const bool whole = columns >= V * lanes;
  const auto at = [&](Index i, Index j) { return c + i * c_row + j * lanes; };
  const auto some = [&](Index j) { return smaller(columns - j * lanes, lanes); };
  if (finish.accumulate && whole)
    for_vectors<R, V>([&](Index i, Index j) { sum[i][j] += load(at(i, j)); });
  else if (finish.accumulate)
    for_vectors<R, V>([&](Index i, Index j) { sum[i][j] += load_some(at(i, j), some(j)); });
  if (finish.bias) for_vectors<R, V>([&](Index i, Index j) { sum[i][j] += finish.bias[i]; });
  if (finish.relu)  // a NaN stays
    for_vectors<R, V>([&](Index i, Index j) { sum[i][j] = sum[i][j] < 0 ? Vec<T>{} : sum[i][j]; });
  if (whole)
    for_vectors<R, V>([&](Index i, Index j) { store(at(i, j), sum[i][j]); });
  else
    for_vectors<R, V>([&](Index i, Index j) { store_some(at(i, j), sum[i][j], some(j)); });
}

// Prefetches the rows of A that the next tile will read: each is too short for the processor to do so. Shorter rows
// come from matrices in the L1 cache.
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

// Calls f(vectors), where the compiler knows the number of vectors. It is V at most.
template <Index V, class F>
inline void with_width(Index vectors, F f) {
  if (vectors == V) return f(std::integral_constant<Index, V>{});
  if constexpr (V > 1) with_width<V - 1>(vectors, f);
}

// C[rows, columns] = A[rows, inner] B[inner, columns]; B is one panel; its first `columns` count.
template <class T>
void multiply_panel(Index rows, Index inner, Left<T> left, Right<T> b, T* c, Index c_row, Index columns,
                    Finish<T> finish) {
  constexpr Index lanes = kLanes<T>, strip = kStrip<T>;
  for (Index j = 0; j < columns; j += strip, b.b += b.strip, c += strip) {
    const Index some = smaller(columns - j, strip);
    with_width<kTileVectors>((some + lanes - 1) / lanes,
                             [&](auto vectors) { strip_of<T, vectors>(rows, inner, left, b, c, c_row, some, finish); });
  }
}

// The same product with B in rows of whole vectors, `b_row` elements apart. Strips are equally wide, too.
template <class T>
void multiply_rows(Index rows, Index inner, Left<T> left, const T* b, Index b_row, T* c, Index c_row, Index vectors,
                   bool accumulate) {
  constexpr Index lanes = kLanes<T>;
  const Finish<T> finish = {accumulate, nullptr, false};
  for (Index strips = (vectors + kWidestTile - 1) / kWidestTile; strips > 0; --strips) {
    const Index some = (vectors + strips - 1) / strips;
    const Right<T> right = {b, b_row, 0};
    with_width<kWidestTile>(
        some, [&](auto width) { strip_of<T, width>(rows, inner, left, right, c, c_row, width * lanes, finish); });
    vectors -= some;
    b += some * lanes;
    c += some * lanes;
  }
}

}  // namespace
}  // namespace distopt::DISTOPT_ISA

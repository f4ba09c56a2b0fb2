// The steps of a selection: one pass collects candidates, tile by tile in any order of the tiles, into a list; a
// radix select finds the boundary among the candidates; those above it are counted per tile, and a scan over the tiles
// gives the place of each tile's share. The list of candidates is short, so this is one read of the array. CUB's select
// would read it twice, once to count and once to write, and could neither accumulate nor break ties on the way. Blocks
// never wait for each other, and every sum is one of integers: the result has the same bits on every run.
#include "device.cuh"

// The values to select from, as in csrc/cpu/select.h; the selection computes them in the same pass.
struct Source {
  const float* grad;
  const float* residual;  // or null; momentum needs it
  const float* momentum;  // or null
  float scale;
  const float* device_scale;  // if given, a factor in device memory, in place of `scale`
  float decay;
  float* new_residual;
  float* new_momentum;
};

// Makes of a gradient the sums that are selected from, in the CPU's order of operations, and the new momentum.
template <unsigned count>
__device__ void accumulate(const Source& from, size_t at, unsigned available, bool aligned, Unit<float, count>& x,
                           Unit<float, count>& momentum) {
  if (!from.residual) return;
  const Unit<float, count> left = load<count>(from.residual + at, available, aligned);
  if (from.momentum) momentum = load<count>(from.momentum + at, available, aligned);
#pragma unroll
  for (unsigned c = 0; c < count; ++c) {
    x.e[c] = __fmul_rn(x.e[c], from.scale);
    if (from.momentum) x.e[c] = momentum.e[c] = __fadd_rn(x.e[c], __fmul_rn(momentum.e[c], from.decay));
    x.e[c] = __fadd_rn(x.e[c], left.e[c]);
  }
}

constexpr unsigned rows = 4, row = 32 * 4;          // a warp collects from rows of one Four per lane, side by side
constexpr unsigned tile = warp_count * rows * row;  // elements that a block collects from, see gpu.py
constexpr unsigned bins = 1 << 11;
constexpr unsigned most_threads = 1024;  // of kernels of one block

// In device memory.
struct SelectState {
  int floor;              // keys above it are candidates
  unsigned candidates;    // how many there are, also of those that found no room
  int prefix;             // leading bits of the k-th largest key; all of them after the last pass: the boundary
  unsigned remaining;     // its rank among the keys that begin so; in the end, how many keys equal to it are kept
  unsigned finished;      // blocks that have finished a pass
  unsigned counts[bins];  // keys by the digit that is looked for
};
static_assert(sizeof(SelectState) <= 16384, "distopt/kernels/gpu.py has less room");

struct Share {
  unsigned first, count;
};

// The candidates of a tile lie side by side at tiles[t], in ascending order.
struct Workspace {
  SelectState* state;
  Share* tiles;
  // Per tile: keys above the boundary, << 32, and equal to it; after the scan: the same of all tiles before.
  unsigned long long* kept;
  int* indices;
  float* values;
  unsigned capacity;
};

// -- the boundary -----------------------------------------------------------------------------------------------------
// Finds the digit of the k-th largest key in the counts of a block or grid, 1 <= k <= their sum; k becomes the rank
// among the keys with that digit. The counts become 0. All threads of the block must call it.
template <unsigned threads>
__device__ void find_digit(unsigned* counts, int width, int& prefix, unsigned& k) {
  constexpr unsigned per_thread = bins / threads;
  unsigned own[per_thread], sum = 0;
  for (unsigned j = 0; j < per_thread; ++j) {  // from the top bin down
    // Other blocks have added to them: atomics see that, a load could find an old line in the cache.
    own[j] = atomicExch(&counts[bins - 1 - threadIdx.x * per_thread - j], 0u);
    sum += own[j];
  }
  unsigned total;
  unsigned before = block_scan<threads>(sum, total);
  const unsigned rank = k;
  const int known = prefix;
  __syncthreads();  // all have read them
  for (unsigned j = 0; j < per_thread; ++j) {
    if (before < rank && rank <= before + own[j]) {
      prefix = known << width | static_cast<int>(bins - 1 - threadIdx.x * per_thread - j);
      k = rank - before;
    }
    before += own[j];
  }
  __syncthreads();
}

// One block: prepares the workspace and estimates the floor from a sample. No strata: the floor that is given. A k of 0
// selects all keys above it, so that the floor is the boundary.
__global__ void __launch_bounds__(most_threads)
    prepare(Source from, size_t n, unsigned k, unsigned strata, unsigned rank, int floor, SelectState* state,
            Findings* findings) {
  constexpr unsigned most_groups = most_strata / most_threads;
  __shared__ unsigned counts[bins];
  __shared__ int prefix;
  __shared__ unsigned remaining;
  for (unsigned i = threadIdx.x; i < bins; i += most_threads) counts[i] = state->counts[i] = 0;
  if (threadIdx.x == 0) {
    prefix = 0;
    remaining = rank;
    *findings = {};
    state->candidates = state->finished = 0;
    state->prefix = k ? 0 : floor;
    state->remaining = k;
  }
  __syncthreads();
  if (!strata) {
    if (threadIdx.x == 0) state->floor = floor;
    return;
  }
  int keys[most_groups * sample_group];
  if (from.device_scale) from.scale = *from.device_scale;
  const size_t width = n / strata;
#pragma unroll
  for (unsigned g = 0; g < most_groups; ++g) {
    const unsigned s = g * most_threads + threadIdx.x;
    const unsigned random = (s + 1) * 2654435761u;  // Knuth's multiplicative hash
    const size_t first = s * width + ((width - sample_group) * static_cast<unsigned long long>(random) >> 32);
    const unsigned available = s < strata ? sample_group : 0;
    Unit<float, sample_group> x = load<sample_group>(from.grad + first, available, false), momentum;
    accumulate(from, first, available, false, x, momentum);
#pragma unroll
    for (unsigned j = 0; j < sample_group; ++j) keys[g * sample_group + j] = available ? key_of(x.e[j]) : -1;
  }
#pragma unroll
  for (const int key : keys)
    if (key >= 0) atomicAdd(&counts[key >> 20], 1u);
  __syncthreads();
  find_digit<most_threads>(counts, 11, prefix, remaining);
#pragma unroll
  for (const int key : keys)
    if (key >= 0 && key >> 20 == prefix) atomicAdd(&counts[key >> 9 & (bins - 1)], 1u);
  __syncthreads();
  find_digit<most_threads>(counts, 11, prefix, remaining);
  // The last nine bits make no difference. All zeros are one tie, which needs no candidates.
  if (threadIdx.x == 0) state->floor = max((prefix << 9) - 1, 0);
}

// The elements to search for the boundary: the candidates, or all of x if they are too few or had no room.
struct View {
  const float* x;
  const int* indices;  // null: 0, 1, 2 ...
  unsigned count;
};

__device__ View view_of(const Workspace& w, const float* x, unsigned n, unsigned k) {
  const unsigned candidates = w.state->candidates;
  if (k <= candidates && candidates <= w.capacity) return {w.values, w.indices, candidates};
  return {x, nullptr, n};
}

// One digit of the boundary: counts the digit of the keys that begin with the prefix. Of 31 bits those below bit
// `known` are not known yet; the digit begins at bit `shift`.
__global__ void __launch_bounds__(block_threads)
    digit(Workspace w, const float* x, unsigned n, unsigned k, int known, int shift) {
  __shared__ unsigned counts[bins];
  __shared__ bool last;
  const View view = view_of(w, x, n, k);
  const int prefix = w.state->prefix;
  for (unsigned i = threadIdx.x; i < bins; i += block_threads) counts[i] = 0;
  __syncthreads();
  const int mask = (1 << (known - shift)) - 1;
#pragma unroll 4
  for (size_t i = thread_index(); i < view.count; i += thread_stride()) {
    const int key = key_of(view.x[i]);
    if (key >> known == prefix) atomicAdd(&counts[key >> shift & mask], 1u);
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < bins; i += block_threads)
    if (counts[i]) atomicAdd(&w.state->counts[i], counts[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&w.state->finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) w.state->finished = 0;
  find_digit<block_threads>(w.state->counts, known - shift, w.state->prefix, w.state->remaining);
}

// -- collecting -------------------------------------------------------------------------------------------------------
// Blocks of a multiprocessor that bound the registers of `collect_candidates`; with five, it spills on sm_120.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr unsigned tile_blocks = 4;
#else
constexpr unsigned tile_blocks = 5;
#endif

// One block per tile: accumulates it, appends its candidates to the list, and notes elements that are not finite. All
// loads of a thread's gradients are on their way before it looks at one; a store or an atomic in between would end
// that.
__global__ void __launch_bounds__(block_threads, tile_blocks)
    collect_candidates(Source from, unsigned n, Workspace w, Findings* findings) {
  __shared__ unsigned of_warp[warp_count], list_begin;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned begin = blockIdx.x * tile + warp * (rows * row) + lane * 4;
  if (from.device_scale) from.scale = *from.device_scale;
  const bool aligned = are_aligned(from.grad, from.residual, from.momentum, from.new_residual, from.new_momentum);
  const int floor = w.state->floor;
  Four x[rows];
  unsigned wanted = 0;  // bit 4 * r + component
  const auto available_at = [n](unsigned at) { return at < n ? min(n - at, 4u) : 0; };
#pragma unroll
  for (unsigned r = 0; r < rows; ++r)
    x[r] = load<4>(from.grad + begin + r * row, available_at(begin + r * row), aligned);
#pragma unroll
  for (unsigned r = 0; r < rows; ++r) {
    const unsigned at = begin + r * row, available = available_at(at);
    Four momentum;
    accumulate(from, at, available, aligned, x[r], momentum);
    if (from.residual) store(from.new_residual + at, x[r], available, aligned);
    if (from.momentum) store(from.new_momentum + at, momentum, available, aligned);
    unsigned bits = 0;
#pragma unroll
    for (unsigned c = 0; c < 4; ++c) {
      const int key = key_of(x[r].e[c]);
      bits |= unsigned(c < available && key > floor) << c;
      // Also where the list has no room: the findings are complete in any case.
      if (key >= nonfinite_key) atomicMax(&findings->from_bad, size_t{n} - at - c);
    }
    wanted |= bits << 4 * r;
  }
  unsigned counts = 0;  // per row, 8 bits each: a row has at most 128
#pragma unroll
  for (unsigned r = 0; r < rows; ++r) counts |= __popc(wanted >> 4 * r & 0xf) << 8 * r;
  const unsigned up_to = warp_scan(counts), before = up_to - counts, of_rows = __shfl_sync(all_lanes, up_to, 31);
  const unsigned own = __reduce_add_sync(all_lanes, static_cast<unsigned>(__popc(wanted)));
  if (lane == 0) of_warp[warp] = own;
  __syncthreads();
  unsigned out = 0, total = 0;
#pragma unroll
  for (unsigned i = 0; i < warp_count; ++i) {
    if (i == warp) out = total;
    total += of_warp[i];
  }
  if (threadIdx.x == 0) {
    list_begin = total ? atomicAdd(&w.state->candidates, total) : 0;
    w.tiles[blockIdx.x] = {list_begin, total};
    w.kept[blockIdx.x] = static_cast<unsigned long long>(total) << 32;  // right for a bound: all are kept
  }
  __syncthreads();
  // Candidates that find no room are counted: the count then shows that the list is incomplete.
  if (!total || list_begin > w.capacity || total > w.capacity - list_begin) return;
  out += list_begin;
#pragma unroll
  for (unsigned r = 0; r < rows; ++r) {
    unsigned place = out + (before >> 8 * r & 0xff);
#pragma unroll
    for (unsigned c = 0; c < 4; ++c) {
      if (!(wanted >> (4 * r + c) & 1)) continue;
      w.indices[place] = static_cast<int>(begin + r * row + c);
      w.values[place++] = x[r].e[c];
    }
    out += of_rows >> 8 * r & 0xff;
  }
}

// -- listing ----------------------------------------------------------------------------------------------------------
__device__ Share share_of(const Workspace& w, const View& view, unsigned t) {
  if (view.indices) return w.tiles[t];
  return {t * tile, min(tile, view.count - t * tile)};
}

// One warp per tile: how many of its keys are above the boundary, and how many equal to it.
__global__ void __launch_bounds__(block_threads)
    count_kept(Workspace w, const float* x, unsigned n, unsigned k, unsigned tiles) {
  const unsigned t = blockIdx.x * warp_count + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (t >= tiles) return;
  const View view = view_of(w, x, n, k);
  const Share share = share_of(w, view, t);
  const int boundary = w.state->prefix;
  unsigned above = 0, equal = 0;
#pragma unroll 4
  for (unsigned i = lane; i < share.count; i += 32) {
    const int key = key_of(view.x[share.first + i]);
    above += key > boundary;
    equal += key == boundary;
  }
  above = __reduce_add_sync(all_lanes, above);
  equal = __reduce_add_sync(all_lanes, equal);
  if (lane == 0) w.kept[t] = static_cast<unsigned long long>(above) << 32 | equal;
}

// One block: sums over the tiles before each tile; the number of selected elements.
__global__ void __launch_bounds__(most_threads) scan(Workspace w, unsigned tiles, Findings* findings) {
  const bool aligned = are_aligned(w.kept);
  unsigned long long before = 0, total;
  for (unsigned first = 0; first < tiles; first += most_threads * 4, before += total) {
    const unsigned begin = first + threadIdx.x * 4, available = begin < tiles ? min(tiles - begin, 4u) : 0;
    auto sums = load<4>(w.kept + begin, available, aligned);
    unsigned long long sum = before + block_scan<most_threads>(sums.e[0] + sums.e[1] + sums.e[2] + sums.e[3], total);
#pragma unroll
    for (auto& each : sums.e) {
      const auto own = each;
      each = sum;
      sum += own;
    }
    store(w.kept + begin, sums, available, aligned);
  }
  if (threadIdx.x == 0) findings->selected = (before >> 32) + w.state->remaining;
}

// One warp per tile: writes its share of the lists; nothing where they have no room for all of a selection by a bound.
__global__ void __launch_bounds__(block_threads)
    write_kept(Workspace w, const float* x, unsigned n, unsigned k, unsigned tiles, int* indices, float* values) {
  const unsigned t = blockIdx.x * warp_count + threadIdx.x / 32;
  if (t >= tiles || (!k && w.state->candidates > w.capacity)) return;
  const View view = view_of(w, x, n, k);
  const Share share = share_of(w, view, t);
  const auto above_before = static_cast<unsigned>(w.kept[t] >> 32), equal_before = static_cast<unsigned>(w.kept[t]);
  const int boundary = w.state->prefix;
  const unsigned ties_before = min(equal_before, w.state->remaining);
  unsigned out = above_before + ties_before, ties = w.state->remaining - ties_before;
  const unsigned lane = threadIdx.x % 32, lower = (1u << lane) - 1;
  for (unsigned base = 0; base < share.count; base += 32) {
    const bool present = base + lane < share.count;
    const unsigned at = share.first + base + lane;
    const float value = present ? view.x[at] : 0;
    const int key = present ? key_of(value) : -1;
    const unsigned equal = __ballot_sync(all_lanes, present && key == boundary);
    const bool tie = (equal >> lane & 1) && static_cast<unsigned>(__popc(equal & lower)) < ties;
    ties -= min(ties, static_cast<unsigned>(__popc(equal)));
    const unsigned chosen = __ballot_sync(all_lanes, (present && key > boundary) || tie);
    if (chosen >> lane & 1) {
      indices[out + __popc(chosen & lower)] = view.indices ? view.indices[at] : static_cast<int>(at);
      values[out + __popc(chosen & lower)] = value;
    }
    out += __popc(chosen);
  }
}

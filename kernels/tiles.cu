// Products in single precision, for passes of many tokens: 128 x 128 sums a block, 8 x 8 a thread, operands 16 deep in shared
// memory. Multiplied as f32 on f32 units, so that what they feed agrees with the processor to rounding.
//
// An operand is either `rows`, contiguous along the summed dimension, or `cols`, contiguous along the other.

#include "common/matrix.cuh"
#include "common/reduce.cuh"

constexpr int TILE = 128, DEPTH = 16, THREADS = 256;
#if __CUDA_ARCH__ >= 1200
constexpr int BLOCKS = 1;  // two would spill
#else
constexpr int BLOCKS = 2;
#endif

// Sixteen slices of 128 elements. The upper eight slices have their halves of 32 swapped by 16, so that the transposing stores
// of a warp meet every bank once.
typedef float Slab[DEPTH * TILE];

DEV int swapped(int k) { return k & 8 ? 16 : 0; }

// What thread t of a block brings of a `rows` operand: eight elements of row t / 2.
DEV int own_row() { return threadIdx.x >> 1; }
DEV int own_k() { return 8 * (threadIdx.x & 1); }
DEV void store_rows(float* slab_sh, const float* v) {
  int k = own_k(), column = own_row() ^ swapped(k);
#pragma unroll
  for (int j = 0; j < 8; j++) slab_sh[(k + j) * TILE + column] = v[j];
}
// And of a `cols` operand: eight columns of slice t / 16.
DEV int own_slice() { return threadIdx.x >> 4; }
DEV int own_col() { return 8 * (threadIdx.x & 15); }
DEV void store_cols(float* slab_sh, const float* v) {
  float4* to = (float4*)(slab_sh + own_slice() * TILE + (own_col() ^ swapped(own_slice())));
  to[0] = make_float4(v[0], v[1], v[2], v[3]);
  to[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// Elements at .. at + 8 of a run of `n`; zero past its end. `wide`: the run begins at 16 bytes.
DEV void run8(float* v, const float* run, int at, int n, bool wide) {
  if (wide && at + 8 <= n) {
    float4 a = *(const float4*)(run + at), b = *(const float4*)(run + at + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = at + j < n ? run[at + j] : 0.0f;
  }
}
DEV bool is_wide(const void* p) { return ((size_t)p & 15) == 0; }
DEV void zero8(float* v) {
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = 0;
}

// Rows of floats; null for a row past the last.
struct FloatRows {
  const float* next;
  int left;
  DEV FloatRows(const float* row, int depth) : next(row + own_k()), left(row ? depth - own_k() : 0) {}
  DEV void load(float* v, int) {
    if (left >= 8 && is_wide(next)) {
      float4 a = *(const float4*)next, b = *(const float4*)(next + 4);
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = j < left ? next[j] : 0.0f;
    }
    next += DEPTH, left -= DEPTH;
  }
  DEV void store(float* slab_sh, const float* v) const { store_rows(slab_sh, v); }
};
// Rows of a weight.
struct WeightRows {
  const Matrix& w;
  int row;
  DEV void load(float* v, int k) const {
    if (row < w.rows && k + own_k() < w.cols) elements8(v, w, row, k + own_k());
    else zero8(v);
  }
  DEV void store(float* slab_sh, const float* v) const { store_rows(slab_sh, v); }
};
// Columns of floats, `stride` from slice to slice; all three are multiples of four.
struct FloatCols {
  const float* next;
  int stride, slices, left;
  DEV FloatCols(const float* first, int stride, int depth, int col, int num_cols)
      : next(first + (size_t)own_slice() * stride + col + own_col()), stride(stride), slices(depth - own_slice()), left(num_cols - col - own_col()) {}
  DEV void load(float* v, int) {
    zero8(v);
    if (slices > 0 && left > 0) {
      float4 a = *(const float4*)next;
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    }
    if (slices > 0 && left > 4) {
      float4 b = *(const float4*)(next + 4);
      v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    next += (size_t)DEPTH * stride, slices -= DEPTH;
  }
  DEV void store(float* slab_sh, const float* v) const { store_cols(slab_sh, v); }
};
// Rows of some pairs, each times its gate: the row of a pair is pair / divide. Without gates: times 1.
struct Side {
  const float* src;
  const float* gates;
  int stride, divide, cols, pad;
};
// Columns of the listed ones; no list: of the first `depth`.
struct ListedCols {
  const Side& side;
  const int* list;
  int depth, col;
  DEV void load(float* v, int k) const {
    int slice = k + own_slice();
    if (slice >= depth) return zero8(v);
    int pair = list ? list[slice] : slice;
    const float* row = side.src + (size_t)(pair / side.divide) * side.stride;
    run8(v, row, col + own_col(), side.cols, is_wide(row));
    if (side.gates) {
      float gate = side.gates[pair];
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] *= gate;
    }
  }
  DEV void store(float* slab_sh, const float* v) const { store_cols(slab_sh, v); }
};

// Rows and columns of the sums that a thread owns: two runs of four each way.
DEV int sum_row(int i) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  return 4 * (4 * (warp >> 1) + (lane >> 3)) + (i & 3) + 64 * (i >> 2);
}
DEV int sum_col(int j) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  return 4 * (8 * (warp & 1) + (lane & 7)) + (j & 3) + 64 * (j >> 2);
}

// sums[i][j] = sum over k < depth of a[row i, k] b[col j, k]; one barrier a slab, the next one travels meanwhile.
template <class A, class B>
DEV void multiply(float (&sums)[8][8], A a, B b, int depth) {
  __shared__ __align__(16) Slab a_sh[2], b_sh[2];
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) sums[i][j] = 0;
  float va[8], vb[8];
  a.load(va, 0), b.load(vb, 0);
  a.store(a_sh[0], va), b.store(b_sh[0], vb);
  __syncthreads();
  int stage = 0, row = sum_row(0), col = sum_col(0);
  for (int k = 0; k < depth; k += DEPTH) {
    bool more = k + DEPTH < depth;
    if (more) a.load(va, k + DEPTH), b.load(vb, k + DEPTH);
#pragma unroll
    for (int s = 0; s < DEPTH; s++) {
      const float *x_sh = a_sh[stage] + s * TILE, *y_sh = b_sh[stage] + s * TILE;
      float4 x0 = *(const float4*)(x_sh + (row ^ swapped(s))), x1 = *(const float4*)(x_sh + ((row + 64) ^ swapped(s)));
      float4 y0 = *(const float4*)(y_sh + (col ^ swapped(s))), y1 = *(const float4*)(y_sh + ((col + 64) ^ swapped(s)));
      float x[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w}, y[8] = {y0.x, y0.y, y0.z, y0.w, y1.x, y1.y, y1.z, y1.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sums[i][j] += x[i] * y[j];
    }
    if (more) {
      stage ^= 1;
      a.store(a_sh[stage], va), b.store(b_sh[stage], vb);
      __syncthreads();
    }
  }
}

#define EACH_SUM(i, j)         \
  _Pragma("unroll") for (int i = 0; i < 8; i++) \
  _Pragma("unroll") for (int j = 0; j < 8; j++)
// Keeps the compiler from reading all that is added to before anything is written.
DEV void in_turn() { asm volatile("" ::: "memory"); }

// dst[t, r] = (w[r] . src[pick(t)] + bias[r]) * scale. Grid (rows / 128, T / 128). `pick` null: identity.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_linear(float* dst, int dst_stride, const float* src, int src_stride, const int* pick, Matrix w, Matrix bias, float scale, int num_tok) {
  int first_row = blockIdx.x * TILE, first_tok = blockIdx.y * TILE, t = first_tok + own_row();
  const float* row = t < num_tok ? src + (size_t)(pick ? pick[t] : t) * src_stride : 0;
  float sums[8][8];
  multiply(sums, FloatRows(row, w.cols), WeightRows{w, first_row + own_row()}, w.cols);
  EACH_SUM(i, j) {
    int tok = first_tok + sum_row(i), r = first_row + sum_col(j);
    if (tok < num_tok && r < w.rows) dst[(size_t)tok * dst_stride + r] = (sums[i][j] + (bias.data ? load_float(bias.data, r, bias.kind) : 0.0f)) * scale;
  }
}

// Pairs of token and rank that chose each expert, in order: lists[e, 0 .. counts[e]), and counts added to totals, which may be null.
// Grid (E), block 256.
extern "C" __global__ __launch_bounds__(THREADS) void tiles_lists(int* lists, int* counts, int* totals, const int* experts, int num_pairs, int cap) {
  __shared__ int found_sh[THREADS / 32];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, count = 0;
  int* list = lists + (size_t)blockIdx.x * cap;
  for (int first = 0; first < num_pairs; first += THREADS) {
    int pair = first + threadIdx.x;
    bool own = pair < num_pairs && experts[pair] == blockIdx.x;
    u32 votes = __ballot_sync(~0u, own);
    if (lane == 0) found_sh[warp] = __popc(votes);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < THREADS / 32; w++) {
      before += w < warp ? found_sh[w] : 0;
      all += found_sh[w];
    }
    if (own) list[count + before + __popc(votes & ((1u << lane) - 1))] = pair;
    count += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    counts[blockIdx.x] = count;
    if (totals) totals[blockIdx.x] += count;
  }
}

// dst[pair] = W_e src[pair / divide] for the pairs of each expert; W is matrix `which` of its three. Grid (rows / 128, cap / 128, E).
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_experts(float* dst, int dst_stride, const float* src, int src_stride, int divide, const Matrix* table, int which, const int* lists, const int* counts, int cap) {
  int first_row = blockIdx.x * TILE, first = blockIdx.y * TILE, count = counts[blockIdx.z];
  if (first >= count) return;
  const int* list = lists + (size_t)blockIdx.z * cap;
  const Matrix& w = table[3 * blockIdx.z + which];
  int at = first + own_row();
  const float* row = at < count ? src + (size_t)(list[at] / divide) * src_stride : 0;
  float sums[8][8];
  multiply(sums, FloatRows(row, w.cols), WeightRows{w, first_row + own_row()}, w.cols);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int from = first + sum_row(i);
    if (from >= count) continue;
    float* to = dst + (size_t)list[from] * dst_stride + first_row;
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (first_row + sum_col(j) < w.rows) to[sum_col(j)] = sums[i][j];
  }
}

// dst[t] = sum over ranks of gate * outputs[t, rank], in order of rank. Grid (T), block 256.
extern "C" __global__ void tiles_combine(float* dst, const float* outputs, const float* gates, int top_k, int width) {
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    float sum = 0;
    for (int k = 0; k < top_k; k++) sum += gates[(size_t)blockIdx.x * top_k + k] * outputs[((size_t)blockIdx.x * top_k + k) * width + i];
    dst[(size_t)blockIdx.x * width + i] = sum;
  }
}

// Adds to the lower triangle of second moments, sums[s][i, j] += sum over the pairs of expert `experts[s]` of x_i x_j. Without lists: over
// `cap` pairs. Grid (tiles of the triangle, 1, sums).
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_moments(const u64* sums, Side x, const int* lists, const int* counts, int cap, const int* experts) {
  int expert = experts ? experts[blockIdx.z] : 0, count = lists ? counts[expert] : cap;
  if (count == 0) return;
  int across = blockIdx.x, down = 0;
  while (across > down) across -= ++down;
  const int* list = lists ? lists + (size_t)expert * cap : 0;
  float found[8][8];
  multiply(found, ListedCols{x, list, count, down * TILE}, ListedCols{x, list, count, across * TILE}, count);
  float* dst = (float*)sums[blockIdx.z];
  EACH_SUM(i, j) {
    int row = down * TILE + sum_row(i), col = across * TILE + sum_col(j);
    if (row < x.cols && col <= row) dst[(size_t)row * x.cols + col] += found[i][j];
  }
}

// The diagonal alone. Grid (cols / 256, 1, sums), block 256.
extern "C" __global__ void tiles_energies(const u64* sums, Side x, const int* lists, const int* counts, int cap, const int* experts) {
  int expert = experts ? experts[blockIdx.z] : 0, count = lists ? counts[expert] : cap, col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= x.cols || count == 0) return;
  float sum = 0;
  for (int r = 0; r < count; r++) {
    int pair = lists ? lists[(size_t)expert * cap + r] : r;
    float v = x.src[(size_t)(pair / x.divide) * x.stride + col] * (x.gates ? x.gates[pair] : 1.0f);
    sum += v * v;
  }
  ((float*)sums[blockIdx.z])[col] += sum;
}

// Adds products of two sides, sums[s][i, j] += sum over the same pairs of left_i right_j. Grid (right / 128, left / 128, sums).
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_products(const u64* sums, Side left, Side right, const int* lists, const int* counts, int cap, const int* experts) {
  int expert = experts ? experts[blockIdx.z] : 0, count = lists ? counts[expert] : cap;
  if (count == 0) return;
  const int* list = lists ? lists + (size_t)expert * cap : 0;
  float found[8][8];
  multiply(found, ListedCols{left, list, count, (int)blockIdx.y * TILE}, ListedCols{right, list, count, (int)blockIdx.x * TILE}, count);
  float* dst = (float*)sums[blockIdx.z];
  EACH_SUM(i, j) {
    int row = blockIdx.y * TILE + sum_row(i), col = blockIdx.x * TILE + sum_col(j);
    if (row < left.cols && col < right.cols) dst[(size_t)row * right.cols + col] += found[i][j];
  }
}

// dst = (a - b) * factor. Grid any, block any.
extern "C" __global__ void tiles_less(float* dst, const float* a, const float* b, float factor, u64 n) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) dst[i] = (a[i] - b[i]) * factor;
}

// shares[t, rank] = gate / sum of the token's gates. Grid any, block any.
extern "C" __global__ void tiles_shares(float* shares, const float* gates, int top_k, u64 n) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    const float* own = gates + i / top_k * top_k;
    float all = 0;
    for (int k = 0; k < top_k; k++) all += own[k];
    shares[i] = gates[i] / fmaxf(all, 1.17549435e-38f);
  }
}

// Scores of one run of tokens, scores[h, t, s] = scale * q[t, h] . k[s, h / group] for s <= t. Grid (n / 128, n / 128, H).
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_scores(float* scores, const float* q, int q_stride, const float* k, int k_stride, int num_tok, int dim, int group, float scale) {
  int first_key = blockIdx.x * TILE, first_tok = blockIdx.y * TILE;
  if (first_key > first_tok) return;
  int tok = first_tok + own_row(), key = first_key + own_row();
  const float* query = tok < num_tok ? q + (size_t)tok * q_stride + blockIdx.z * dim : 0;
  const float* keys = key < num_tok ? k + (size_t)key * k_stride + blockIdx.z / group * dim : 0;
  float sums[8][8];
  multiply(sums, FloatRows(query, dim), FloatRows(keys, dim), dim);
  float* to = scores + (size_t)blockIdx.z * num_tok * num_tok;
  EACH_SUM(i, j) {
    int t = first_tok + sum_row(i), s = first_key + sum_col(j);
    if (t < num_tok && s <= t) to[(size_t)t * num_tok + s] = sums[i][j] * scale;
  }
}

// Softmax of a row of scores over the keys it may see; the others become zero up to the end of its tile. Grid (n, H), block 128.
extern "C" __global__ void tiles_softmax(float* scores, int num_tok, int window) {
  __shared__ float part_sh[4];
  int t = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int first = window ? max_int(0, t + 1 - window) : 0, end = min_int(num_tok, (t / TILE + 1) * TILE);
  float *row = scores + ((size_t)blockIdx.y * num_tok + t) * num_tok, top = -INFINITY_F, sum = 0;
  for (int s = first + threadIdx.x; s <= t; s += blockDim.x) top = fmaxf(top, row[s]);
  top = warp_max(top);
  if (lane == 0) part_sh[warp] = top;
  __syncthreads();
  top = fmaxf(fmaxf(part_sh[0], part_sh[1]), fmaxf(part_sh[2], part_sh[3]));
  __syncthreads();
  for (int s = first + threadIdx.x; s <= t; s += blockDim.x) sum += row[s] = expf(row[s] - top);
  sum = warp_sum(sum);
  if (lane == 0) part_sh[warp] = sum;
  __syncthreads();
  sum = part_sh[0] + part_sh[1] + part_sh[2] + part_sh[3];
  for (int s = threadIdx.x; s < end; s += blockDim.x) row[s] = s < first || s > t ? 0.0f : row[s] / sum;
}

// dst[t, h] = sum over s of scores[h, t, s] v[s, h / group]; dim and stride are multiples of four. Grid (dim / 128, n / 128, H).
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_mix(float* dst, int dst_stride, const float* scores, const float* v, int v_stride, int num_tok, int dim, int group) {
  int first_col = blockIdx.x * TILE, first_tok = blockIdx.y * TILE, tok = first_tok + own_row();
  int depth = min_int(num_tok, first_tok + TILE);
  const float* row = tok < num_tok ? scores + ((size_t)blockIdx.z * num_tok + tok) * num_tok : 0;
  FloatCols values(v + blockIdx.z / group * dim, v_stride, depth, first_col, dim);
  float sums[8][8];
  multiply(sums, FloatRows(row, depth), values, depth);
  EACH_SUM(i, j) {
    int t = first_tok + sum_row(i), c = first_col + sum_col(j);
    if (t < num_tok && c < dim) dst[(size_t)t * dst_stride + blockIdx.z * dim + c] = sums[i][j];
  }
}

// Rows of one matrix with the second moments they share.
struct Tile {
  int first, rows, moments, pad;
};

// dst[r, n] = sum over i < depth of a[r, a_from + i] b[b_from + i, n], for n_from <= n < cols; `subtract`: dst - that instead. b is
// [cols, cols], one for each set of moments. Grid (columns / 128, tiles).
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_rows(float* dst, const float* a, int a_stride, int a_from, const u64* b, int b_from, const Tile* tiles, int cols, int depth, int n_from, int subtract) {
  Tile tile = tiles[blockIdx.y];
  int first_col = n_from + blockIdx.x * TILE;
  const float* row = own_row() < tile.rows ? a + (size_t)(tile.first + own_row()) * a_stride + a_from : 0;
  FloatCols factors((const float*)b[tile.moments] + (size_t)b_from * cols, cols, depth, first_col, cols);
  float sums[8][8];
  multiply(sums, FloatRows(row, depth), factors, depth);
  EACH_SUM(i, j) {
    int r = sum_row(i), c = first_col + sum_col(j);
    if (r < tile.rows && c < cols) {
      float* to = dst + (size_t)(tile.first + r) * cols + c;
      *to = subtract ? *to - sums[i][j] : sums[i][j];
      if (j == 7) in_turn();
    }
  }
}

// With the factor of an inverse, H^-1 = U' U, U = diag(weight)^-1/2 (1 + upper), rows g go to g H^-1 in two steps, columns in the order of
// visits: dst = (g + g upper') / weight, and then g + g upper. `upper` is zero up to its diagonal. Grid (columns / 128, tiles).
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_back(float* dst, const float* g, const u64* upper, const u64* weight, const Tile* tiles, int cols) {
  Tile tile = tiles[blockIdx.y];
  int first_col = blockIdx.x * TILE, own = first_col + own_row(), depth = cols - first_col;
  const float* row = own_row() < tile.rows ? g + (size_t)(tile.first + own_row()) * cols + first_col : 0;
  const float* factors = own < cols ? (const float*)upper[tile.moments] + (size_t)own * cols + first_col : 0;
  float sums[8][8];
  multiply(sums, FloatRows(row, depth), FloatRows(factors, depth), depth);
  EACH_SUM(i, j) {
    int r = sum_row(i), c = first_col + sum_col(j);
    if (r < tile.rows && c < cols) {
      size_t at = (size_t)(tile.first + r) * cols + c;
      dst[at] = (g[at] + sums[i][j]) / ((const float*)weight[tile.moments])[c];
    }
  }
}
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void tiles_forth(float* dst, const float* g, const u64* upper, const Tile* tiles, int cols) {
  Tile tile = tiles[blockIdx.y];
  int first_col = blockIdx.x * TILE, depth = min_int(cols, first_col + TILE);
  const float* row = own_row() < tile.rows ? g + (size_t)(tile.first + own_row()) * cols : 0;
  FloatCols factors((const float*)upper[tile.moments], cols, depth, first_col, cols);
  float sums[8][8];
  multiply(sums, FloatRows(row, depth), factors, depth);
  EACH_SUM(i, j) {
    int r = sum_row(i), c = first_col + sum_col(j);
    if (r < tile.rows && c < cols) {
      size_t at = (size_t)(tile.first + r) * cols + c;
      dst[at] = g[at] + sums[i][j];
    }
  }
}

// dst[r, c] = w[r, c]. Grid any, block any.
extern "C" __global__ void tiles_decode(float* dst, Matrix w) {
  u64 n = (u64)w.rows * w.cols;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) dst[i] = element(w, i / w.cols, (int)(i % w.cols));
}

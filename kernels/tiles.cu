// Products for passes of many tokens: 128 x 128 sums a block, 64 x 32 a warp, operands 16 deep in shared memory.
//
// Tensor cores multiply bf16, so that an operand lies there as one to three planes whose sum it is: one for codes and bf16 weights, two,
// to 2^-17, for second moments, three, to 2^-25, where a difference of two results has to mean something. The products of all planes but
// those past the third order, 2^-24, are added. Tensor cores cut sums off instead of rounding, so that each 16 of them are added in f32, times
// the scale of their group.
//
// An operand is either `rows`, contiguous along the summed dimension, or `cols`, contiguous along the other.

#include "common/matrix.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"

constexpr int TILE = 128, DEPTH = 16, THREADS = 256, BLOCKS = 2;

// One plane of an operand. Two stages of six planes, or of less and the scales of the right one's rows, fit into 48 KB.
constexpr int PLANE = TILE * DEPTH, MOST_PLANES = 6;
DEV bf16* slabs() {
  __shared__ __align__(16) bf16 slabs_sh[2 * MOST_PLANES * PLANE];
  return slabs_sh;
}
// Splits eight floats over planes from `to` on.
template <int PLANES>
DEV void put8(bf16* to_sh, const float* v) {
  float rest[8];
#pragma unroll
  for (int j = 0; j < 8; j++) rest[j] = v[j];
#pragma unroll
  for (int p = 0; p < PLANES; p++) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      pairs[j] = bf16_pair(rest[2 * j], rest[2 * j + 1]);
      rest[2 * j] -= bf16_lo(pairs[j]), rest[2 * j + 1] -= bf16_hi(pairs[j]);
    }
    *(uint4*)(to_sh + p * PLANE) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// Eight elements of a plane are one store and a row of eight of them one load; where they lie makes both meet every bank once.
//
// A thread brings eight elements of row t / 2 of a `rows` operand. `read` has 16 rows from `first` on as operands of `mma`: rows and halves of
// the depth in the order (0, 0), (8, 0), (0, 8), (8, 8) for the left one, (0, 0), (0, 8), (8, 0), (8, 8) for the right one.
enum Operand { LEFT, RIGHT };
DEV int own_row() { return threadIdx.x >> 1; }
DEV int own_k() { return 8 * (threadIdx.x & 1); }
DEV int lane_bit(int bit) { return threadIdx.x >> bit & 1; }
struct Rows {
  DEV static int at(int row, int eight) { return DEPTH * row + 8 * (eight ^ (row >> 2 & 1)); }
  DEV static int own() { return at(own_row(), threadIdx.x & 1); }
  template <Operand SIDE>
  DEV static void read(u32* r, const bf16* plane_sh, int first) {
    ldmatrix_x4(r, plane_sh + at(first + (threadIdx.x & 7) + 8 * lane_bit(SIDE == LEFT ? 3 : 4), lane_bit(SIDE == LEFT ? 4 : 3)));
  }
};
// And eight columns of slice t / 16 of a `cols` operand.
DEV int own_slice() { return threadIdx.x >> 4; }
DEV int own_col() { return 8 * (threadIdx.x & 15); }
struct Cols {
  DEV static int at(int slice, int eight) { return TILE * slice + 8 * (eight ^ (slice & 7)); }
  DEV static int own() { return at(own_slice(), threadIdx.x & 15); }
  template <Operand SIDE>
  DEV static void read(u32* r, const bf16* plane_sh, int first) {
    ldmatrix_x4_trans(r, plane_sh + at((threadIdx.x & 7) + 8 * lane_bit(SIDE == LEFT ? 4 : 3), first / 8 + lane_bit(SIDE == LEFT ? 3 : 4)));
  }
};

DEV bool is_wide(const void* p) { return ((size_t)p & 15) == 0; }

// Rows of floats; null for a row past the last.
struct FloatRows : Rows {
  static constexpr int PLANES = 3;
  const float* row;
  int depth;
  u32 words[8];
  DEV FloatRows(const float* row, int depth) : row(row), depth(row ? depth : 0) {}
  DEV void load(int k) { fetch8(words, row, k + own_k(), F32, depth - k - own_k(), is_wide(row)); }
  DEV void store(bf16* slab_sh) const { put8<PLANES>(slab_sh + own(), (const float*)words); }
};
// Rows of a weight, walked along: what belongs to a group is read once a group. Any finite numbers may lie past the last column, where
// what they are multiplied with is zero. With one plane, of bf16 weights or codes, and the scales of the rows behind it.
template <int PLANES_OF>
struct WeightRows : Rows {
  static constexpr int PLANES = PLANES_OF;
  const Matrix& w;
  size_t row;
  int cols, kind, left, zero;
  float scale;
  u32 words[8];
  DEV WeightRows(const Matrix& w, int row) : w(w), row(row), cols(row < w.rows ? w.cols : 0), kind(w.kind), left(0), zero(0), scale(1), words{} {}
  DEV void load(int k) {
    int col = k + own_k();
    if (col >= cols) return;
    if (PLANES == 1 && left <= 0 && kind != BF16) {
      int group = col / w.group;
      scale = load_float(w.scales, row * (cols / w.group) + group, w.scale_kind);
      zero = zero_code(w, row, group, kind == INT4 ? 4 : 8);
      left = (group + 1) * w.group - col;
    }
    left -= DEPTH;
    fetch8(words, w.data, row * cols + col, kind, cols - col, (cols & 7) == 0);
  }
  DEV void store(bf16* slab_sh) const {
    if (PLANES == 1 && kind == BF16) {
      *(uint4*)(slab_sh + own()) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      float v[8];
      decode8(v, words, kind, zero, 1);
      put8<PLANES>(slab_sh + own(), v);
    }
    if (PLANES == 1 && own_k() == 0) scales(slab_sh)[own_row()] = scale;
  }
  DEV static float* scales(const bf16* slab_sh) { return (float*)(slab_sh + PLANES * PLANE); }
};
// Columns of floats from the first of a tile, `stride` from slice to slice; all three are multiples of four.
struct FloatCols : Cols {
  static constexpr int PLANES = 3;
  const float* first;
  int stride, depth, cols;
  u32 words[8];
  DEV FloatCols(const float* first, int stride, int depth, int cols) : first(first), stride(stride), depth(depth), cols(cols) {}
  DEV void load(int k) {
    int slice = k + own_slice();
    fetch8(words, first, (size_t)slice * stride + own_col(), F32, slice < depth ? cols - own_col() : 0, is_wide(first));
  }
  DEV void store(bf16* slab_sh) const { put8<PLANES>(slab_sh + own(), (const float*)words); }
};
// Rows of some pairs, each times its gate: the row of a pair is pair / divide. Without gates: times 1.
struct Side {
  const float* src;
  const float* gates;
  int stride, divide, cols, pad;
};
// Columns of the listed ones; no list: of the first `depth`. Which ones they are is known a slab ahead of their loads.
struct ListedCols : Cols {
  static constexpr int PLANES = 2;
  const Side& side;
  const int* list;
  int depth, col, pair;
  u32 part;  // of 2^32, rounded up: pairs x divide < 2^32
  float gate;
  u32 words[8];
  DEV ListedCols(const Side& side, const int* list, int depth, int first_col)
      : side(side), list(list), depth(depth), col(first_col + own_col()), pair(at_slice(own_slice())), part(0xffffffffu / side.divide + 1) {}
  DEV int at_slice(int slice) const { return list && slice < depth ? list[slice] : slice; }
  DEV void load(int k) {
    size_t row = side.divide == 1 ? pair : __umulhi(pair, part);
    bool within = k + own_slice() < depth;
    fetch8(words, side.src, row * side.stride + col, F32, within ? side.cols - col : 0, is_wide(side.src) && !(side.stride & 3));
    gate = side.gates && within ? side.gates[pair] : 1;
    pair = at_slice(k + DEPTH + own_slice());
  }
  DEV void store(bf16* slab_sh) const {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __uint_as_float(words[j]) * gate;
    put8<PLANES>(slab_sh + own(), v);
  }
};

// Rows and columns of the sums that a thread owns: sums[2 m + h][2 n + c] is element 2 h + c of tile (m, n) of its warp.
DEV int sum_row(int i) { return 64 * (threadIdx.x >> 7) + 8 * i + ((threadIdx.x & 31) >> 2); }
DEV int sum_col(int j) { return 32 * (threadIdx.x >> 5 & 3) + 8 * (j >> 1) + 2 * (threadIdx.x & 3) + (j & 1); }

// Adds a slab's products of the rows of two of a warp's four tiles.
template <class A, class B>
DEV void add_products(float (*sums)[8], const bf16* a_sh, int first, const u32 (*y)[2][4], const bf16* b_sh) {
#pragma unroll
  for (int m = 0; m < 2; m++) {
    u32 x[A::PLANES][4];
#pragma unroll
    for (int p = 0; p < A::PLANES; p++) A::template read<LEFT>(x[p], a_sh + p * PLANE, first + 16 * m);
    float found[4][4] = {};
#pragma unroll
    for (int order = 2; order >= 0; order--)
#pragma unroll
      for (int p = 0; p < A::PLANES; p++)
        if (order - p >= 0 && order - p < B::PLANES)
#pragma unroll
          for (int n = 0; n < 4; n++) {
            const u32* own = y[order - p][n >> 1] + 2 * (n & 1);
            mma_bf16(found[n], x[p], own[0], own[1]);
          }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      float2 scale = make_float2(1, 1);
      if constexpr (B::PLANES == 1) scale = *(const float2*)(B::scales(b_sh) + sum_col(2 * n));
#pragma unroll
      for (int e = 0; e < 4; e++) sums[2 * m + (e >> 1)][2 * n + (e & 1)] += found[n][e] * (e & 1 ? scale.y : scale.x);
    }
  }
}

// sums[i][j] = sum over k < depth of a[row i, k] b[col j, k]; one barrier a slab. The next one travels meanwhile, an operand in each half
// of the work, which leaves registers for the sums.
template <class A, class B>
DEV void multiply(float (&sums)[8][8], A a, B b, int depth) {
  constexpr int STAGE = MOST_PLANES * PLANE;
  bf16 *a_sh = slabs(), *b_sh = a_sh + A::PLANES * PLANE;
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) sums[i][j] = 0;
  a.load(0), a.store(a_sh);
  b.load(0), b.store(b_sh);
  __syncthreads();
  int now = 0, first_row = 64 * (threadIdx.x >> 7), first_col = 32 * (threadIdx.x >> 5 & 3);
  for (int k = 0; k < depth; k += DEPTH) {
    bool more = k + DEPTH < depth;
    if (more) a.load(k + DEPTH);
    u32 y[B::PLANES][2][4];
#pragma unroll
    for (int p = 0; p < B::PLANES; p++)
#pragma unroll
      for (int n = 0; n < 2; n++) B::template read<RIGHT>(y[p][n], b_sh + now + p * PLANE, first_col + 16 * n);
    add_products<A, B>(sums, a_sh + now, first_row, y, b_sh + now);
    if (more) a.store(a_sh + (STAGE - now)), b.load(k + DEPTH);
    add_products<A, B>(sums + 4, a_sh + now, first_row + 32, y, b_sh + now);
    if (more) b.store(b_sh + (STAGE - now));
    now = STAGE - now;
    __syncthreads();
  }
}
// Rows of floats times those of a weight of any kind.
DEV void multiply_weight(float (&sums)[8][8], const float* row, const Matrix& w, int weight_row) {
  if (w.kind == F32 || w.kind == F16) multiply(sums, FloatRows(row, w.cols), WeightRows<3>(w, weight_row), w.cols);
  else multiply(sums, FloatRows(row, w.cols), WeightRows<1>(w, weight_row), w.cols);
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
  multiply_weight(sums, row, w, first_row + own_row());
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
  multiply_weight(sums, row, w, first_row + own_row());
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
  multiply(found, ListedCols(x, list, count, down * TILE), ListedCols(x, list, count, across * TILE), count);
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
  multiply(found, ListedCols(left, list, count, (int)blockIdx.y * TILE), ListedCols(right, list, count, (int)blockIdx.x * TILE), count);
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

// Roots of what each token counts for sets of rows of a head: roots[s, t] = sqrt(sum over rows r of set s of p_r (1 - p_r)), p = softmax of
// logits[t]. Sixteen sets at most. Grid (n), block 256.
constexpr int MOST_SETS = 16;
extern "C" __global__ void tiles_weigh(float* roots, int roots_stride, const float* logits, const unsigned char* of, int num_rows, int num_sets) {
  __shared__ float part_sh[8], sums_sh[MOST_SETS][256];
  const float* row = logits + (size_t)blockIdx.x * num_rows;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float top = -INFINITY_F, all = 0;
  for (int s = 0; s < MOST_SETS; s++) sums_sh[s][threadIdx.x] = 0;
  for (int r = threadIdx.x; r < num_rows; r += 256) top = fmaxf(top, row[r]);
  top = warp_max(top);
  if (lane == 0) part_sh[warp] = top;
  __syncthreads();
  for (int w = 0; w < 8; w++) top = fmaxf(top, part_sh[w]);
  __syncthreads();
  for (int r = threadIdx.x; r < num_rows; r += 256) all += expf(row[r] - top);
  all = warp_sum(all);
  if (lane == 0) part_sh[warp] = all;
  __syncthreads();
  all = 0;
  for (int w = 0; w < 8; w++) all += part_sh[w];
  for (int r = threadIdx.x; r < num_rows; r += 256) {
    float p = expf(row[r] - top) / all;
    sums_sh[of[r]][threadIdx.x] += p * (1 - p);
  }
  __syncthreads();
  for (int s = warp; s < num_sets; s += 8) {
    float sum = 0;
    for (int i = lane; i < 256; i += 32) sum += sums_sh[s][i];
    sum = warp_sum(sum);
    if (lane == 0) roots[(size_t)s * roots_stride + blockIdx.x] = sqrtf(sum);
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
  FloatCols values(v + blockIdx.z / group * dim + first_col, v_stride, depth, dim - first_col);
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
  FloatCols factors((const float*)b[tile.moments] + (size_t)b_from * cols + first_col, cols, depth, cols - first_col);
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
  FloatCols factors((const float*)upper[tile.moments] + first_col, cols, depth, cols - first_col);
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

// dst[i] = src[rows[i]], [n, cols]. Grid any, block any.
extern "C" __global__ void tiles_pick(float* dst, const float* src, const int* rows, int cols, u64 n) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n * cols; i += (u64)gridDim.x * blockDim.x) dst[i] = src[(u64)rows[i / cols] * cols + i % cols];
}

// dst[r, c] = w[r, c]. Grid any, block any.
extern "C" __global__ void tiles_decode(float* dst, Matrix w) {
  u64 n = (u64)w.rows * w.cols;
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) dst[i] = element(w, i / w.cols, (int)(i % w.cols));
}

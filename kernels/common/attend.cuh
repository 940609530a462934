// Attention of one new token over pages: what the kernel for many sequences and the one for whole layers have in common.
#pragma once
#include "mma.cuh"
#include "pages.cuh"
#include "reduce.cuh"
#include "stream.cuh"

static const int WARPS = 8;  // that take pages in turn
static const int LAST_SPLITS = 8;  // that one block merges as soon as several would

// What a layer has of its own.
struct AttentionLayer {
  const float* q_gain;
  const float* k_gain;
  bf16* k_pages;
  bf16* v_pages;
};
struct AttentionArgs {
  float* out;
  const float* q;
  const float* k;
  const float* v;
  AttentionLayer layer;
  const int* page_table;
  const int* positions;
  float* partial;
  int* counters;
  const float* cosines;
  const float* sines;
  int q_stride, k_stride, v_stride, out_stride;  // elements
  int H, Hk;
  int max_pages, max_splits;
  int norm;
  float eps;
  float clip;        // infinity for none
  int rope_dim;
  int interleaved;
  int window;        // 0: none
  float scale;
  int together;      // all blocks of the grid are resident at a time
};

// The run of pages of one of `splits` blocks.
struct PageRun {
  int position, begin, last_page, page_begin, page_end;
  const int* table;
};
// The E elements of a row that a lane has, which follow each other.
template <int E>
DEV void load_own(float* f, const float* row) {
  const float* at = row + (threadIdx.x & 31) * E;
  if constexpr (E % 4 == 0) {
#pragma unroll
    for (int i = 0; i < E; i += 4) *(float4*)(f + i) = *(const float4*)(at + i);
  } else if constexpr (E == 2) {
    *(float2*)f = *(const float2*)at;
  } else {
#pragma unroll
    for (int i = 0; i < E; i++) f[i] = at[i];
  }
}

// What differs between the two: how threads wait, for the projections and for each other, and how they read what these left.
struct Alone {
  // norms of whole rows may be asked for; angles are not there yet; who attends copies pages
  static const bool WHOLE_NORM = true, ANGLES = true, STREAMED = false;
  float* scratch_sh;
  DEV void wait() const {
    dependency_wait();
    dependents_launch();
  }
  DEV void sync() const { __syncthreads(); }
  template <int N, int E>
  DEV void load(float (*f)[E], const float* const* row, const bool* want) const {
#pragma unroll
    for (int j = 0; j < N; j++)
      if (want[j]) load_own<E>(f[j], row[j]);
  }
};

// Shared memory of a unit: pages [8][2][16][DH + 8] bf16, or as they are in the cache, and in their place sums [8][HEADS][DH + 4] f32; queries, the new key and value
// [18][DH + 8] bf16; a row of each warp [8][DH] f32.
template <int DH, bool WIDE>
struct AttendShared {
  static const int HEADS = WIDE ? 16 : 8, ROW = DH + 8;
  static const int V_BYTES = WARPS * 2 * 16 * ROW * 2, MERGE_BYTES = WARPS * HEADS * (DH + 4) * 4;
  static const int Q_AT = V_BYTES > MERGE_BYTES ? V_BYTES : MERGE_BYTES, ROWS_AT = Q_AT + 18 * ROW * 2, BYTES = ROWS_AT + WARPS * DH * 4;
};

// The keys or values of a page and head, [16][DH], asked for by a warp: pieces in their order, rows DH + 8 apart.
template <int DH>
DEV void ask_rows(bf16* to_sh, const bf16* from) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < DH * PAGE / 8 / 32; i++) {
    const int c = lane + 32 * i, r = c / (DH / 8), col = c % (DH / 8);
    copy_async_16(to_sh + r * (DH + 8) + col * 8, from + r * DH + piece_at<DH>(r, col) * 8);
  }
}

// cosines, then sines, of a row of their tables
template <class Args>
DEV void load_angles(float* angle_sh, const Args& a, int row, int thread, int threads) {
  const int half = a.rope_dim / 2;
  for (int i = thread; i < a.rope_dim; i += threads)
    angle_sh[i] = i < half ? a.cosines[(size_t)row * half + i] : a.sines[(size_t)row * half + i - half];
}
DEV void rotate(float& x, float& y, float c, float s) {
  const float was = x;
  x = fmaf(was, c, -__fmul_rn(y, s)), y = fmaf(y, c, __fmul_rn(was, s));
}
// norm, clip, rotation of one head, of which each lane has elements that follow each other, by one warp; angle_sh: cosines, then sines; row_sh: [DH]
template <int DH, class Args>
DEV void prepare_row(float* f, const float* gain, float inv, const Args& a, const float* angle_sh, bool is_value, float* row_sh) {
  const int E = DH / 32, lane = threadIdx.x & 31, half = a.rope_dim / 2;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < E; i++) sum = fmaf(f[i], f[i], sum);
  if (a.norm == 1) inv = rsqrtf(fmaf(warp_sum(sum), 1.f / DH, a.eps));
#pragma unroll
  for (int i = 0; i < E; i++) {
    if (a.norm && !is_value) f[i] *= inv * gain[i];
    f[i] = fminf(fmaxf(f[i], -a.clip), a.clip);
  }
  if (is_value) return;
  if (a.rope_dim == DH && !a.interleaved) {
    // the other half is sixteen lanes away
    const float *cosine = angle_sh + (lane & 15) * E, *sine = cosine + half, sign = lane < 16 ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < E; i++) {
      const float other = __shfl_xor_sync(0xffffffffu, f[i], 16);
      f[i] = fmaf(f[i], cosine[i], __fmul_rn(other, sign * sine[i]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < E; i++) row_sh[lane * E + i] = f[i];
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < half; i += 32) {
    const int p = a.interleaved ? 2 * i : i, q = a.interleaved ? 2 * i + 1 : i + half;
    float x = row_sh[p], y = row_sh[q];
    rotate(x, y, angle_sh[i], angle_sh[half + i]);
    row_sh[p] = x, row_sh[q] = y;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < E; i++) f[i] = row_sh[lane * E + i];
  __syncwarp();
}
// A lane's elements of a row as bf16, from `at` on.
template <int E>
DEV void store_own(bf16* at, const float* f) {
  if constexpr (E == 4) {
    *(uint2*)at = make_uint2(bf16_pair(f[0], f[1]), bf16_pair(f[2], f[3]));
  } else if constexpr (E == 2) {
    *(u32*)at = bf16_pair(f[0], f[1]);
  } else {
#pragma unroll
    for (int i = 0; i < E; i++) at[i] = to_bf16(f[i]);
  }
}
template <int E>
DEV void store_own(float* at, const float* f) {
  if constexpr (E == 4) {
    *(float4*)at = *(const float4*)f;
  } else if constexpr (E == 2) {
    *(float2*)at = *(const float2*)f;
  } else {
#pragma unroll
    for (int i = 0; i < E; i++) at[i] = f[i];
  }
}
// 1 / rms of a whole row, by a block
DEV float whole_inverse(const float* row, int n, float eps, float* scratch_sh) {
  float sum = 0.f;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(row[i], row[i], sum);
  return rsqrtf(block_sum(sum, scratch_sh) / n + eps);
}

// Of the pages of a sequence those of block `split`; runs are as many as give each of a block's pages in turn one, at most max_splits. False
// where there is none for it.
DEV bool find_run(PageRun& run, int window, int split, int max_splits, int& splits) {
  run.begin = window ? max_int(run.position + 1 - window, 0) : 0, run.last_page = run.position / PAGE;
  const int first_page = run.begin / PAGE, num_pages = run.last_page + 1 - first_page;
  splits = min_int(max_splits, (num_pages + WARPS - 1) / WARPS);
  if (split >= splits) return false;
  run.page_begin = first_page + num_pages * split / splits, run.page_end = first_page + num_pages * (split + 1) / splits;
  return true;
}
// Four elements of an output, from their weighted sum.
DEV float4 merged(const float4& v, float total) {
  const float f = 1.f / total;
  return make_float4(without_tag(v.x * f), without_tag(v.y * f), without_tag(v.z * f), without_tag(v.w * f));
}
// Partial results of four elements, a lane a split: their weighted sum in v, and the sum of weights, in lane 0. m of lanes from `lanes`, a power
// of two, on is -infinity.
DEV float merge_lanes(float* v, float m, float l, int lanes) {
  const float f = exp2_fast(m - warp_max(m)), total = warp_sum(__fmul_rn(f, l));
#pragma unroll
  for (int j = 0; j < 4; j++) v[j] = __fmul_rn(f, v[j]);
#pragma unroll 1
  for (int by = lanes / 2; by; by >>= 1)
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] += __shfl_xor_sync(0xffffffffu, v[j], by);
  return total;
}

// One key head of one sequence over a run of pages, by eight warps, a page each at a time.
// store(h, d, v, top, sum): four elements of a head, their weights' maximum and sum.
template <int DH, bool WIDE, class Side, class Store>
DEV void attend_run(const AttentionArgs& a, const AttentionLayer& y, char* unit_sh, float* angle_sh, const Side& side, int seq, const int& kv, const PageRun& run, bool newest, const Store& store) {
  typedef AttendShared<DH, WIDE> Sh;
  const int ROW = Sh::ROW, Q_ROW = DH % 64 ? ROW : DH, BLOCKS = DH / 32, TILES = DH / 8, HEADS = Sh::HEADS, SUMS = WIDE ? 2 : 1, THREADS = 32 * WARPS, E = DH / 32;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3, group = a.H / a.Hk;
  bf16* v_sh = (bf16*)unit_sh + warp * 2 * 16 * ROW;  // [2][16][ROW] a warp
  float* merge_sh = (float*)unit_sh;                    // [WARPS][HEADS][DH + 4], after the pages
  bf16* q_sh = (bf16*)(unit_sh + Sh::Q_AT);             // [16][Q_ROW], then the new key and value, pieces as in pages
  float* row_sh = (float*)(unit_sh + Sh::ROWS_AT) + warp * DH;
  const int position = run.position, last_page = run.last_page;
  // A lane's pieces of keys and queries, whose rows are g and g + 8: of each 64 elements two.
  const int own_piece[2] = {piece_at<DH>(g, t) * 8, piece_at<DH>(g, 4 + t) * 8};
  auto fragment = [&](int b) { return own_piece[b & 1] + b / 2 * 64; };
  uint4 key[2][BLOCKS];
  int page = run.page_begin + warp, buffer = 0;
  // asks for a page by its entry in the table: values into shared memory, keys into registers
  auto request = [&](int entry, int to) {
    const size_t at = page_at(DH, a.Hk, entry, kv);
    ask_rows<DH>(v_sh + to * 16 * ROW, y.v_pages + at);
    copy_async_commit();
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) key[i][b] = load_v4(y.k_pages + at + (g + 8 * i) * DH + fragment(b));
  };
  if (!Side::STREAMED && page < run.page_end) request(run.table[page], 0);

  // everything about q: a warp has a head or two, the first two also the new key and value
  if (Side::ANGLES) load_angles(angle_sh, a, position, thread, THREADS);
  float q_gain[E], k_gain[E];
  if (a.norm == 1) load_own<E>(q_gain, y.q_gain), load_own<E>(k_gain, y.k_gain);
  side.wait();
  const float *q_row = a.q + (size_t)seq * a.q_stride, *k_row = a.k + (size_t)seq * a.k_stride;
  float q_inv = 1.f, k_inv = 1.f;
  if constexpr (Side::WHOLE_NORM)
    if (a.norm == 2) {
      q_inv = whole_inverse(q_row, a.H * DH, a.eps, side.scratch_sh);
      k_inv = whole_inverse(k_row, a.Hk * DH, a.eps, side.scratch_sh);
    }
  if (Side::ANGLES) side.sync();
  const int ROWS = WIDE ? 3 : 2;
  const bool adds = newest && warp < 2;
  float f[ROWS][E];
  {
    const float* from[ROWS];
    bool want[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS - 1; i++) from[i] = q_row + (kv * group + warp + WARPS * i) * DH, want[i] = warp + WARPS * i < group;
    from[ROWS - 1] = (warp == 0 ? k_row : a.v + (size_t)seq * a.v_stride) + kv * DH, want[ROWS - 1] = adds;
    side.template load<ROWS, E>(f, from, want);
  }
#pragma unroll 1
  for (int i = 0; i < ROWS - !adds; i++) {
    const bool is_q = i < ROWS - 1, used = !is_q || warp + WARPS * i < group;
    const int h = is_q ? warp + WARPS * i : 16 + warp;
    float gain[E];
#pragma unroll
    for (int j = 0; j < E; j++) gain[j] = is_q ? q_gain[j] : k_gain[j];
    if (Side::WHOLE_NORM && a.norm == 2 && used && h != 17) load_own<E>(gain, is_q ? y.q_gain + (kv * group + h) * DH : y.k_gain + kv * DH);
    if (used) prepare_row<DH>(f[0], gain, is_q ? q_inv : k_inv, a, angle_sh, h == 17, row_sh);
#pragma unroll
    for (int j = 0; j < E; j++)
      if (!used) f[0][j] = 0.f;
    store_own<E>(q_sh + h * Q_ROW + element_at<DH>(h, lane * E), f[0]);
    if (!WIDE && is_q) {
#pragma unroll
      for (int j = 0; j < E; j++) f[0][j] -= to_f32(to_bf16(f[0][j]));
      store_own<E>(q_sh + (h + 8) * Q_ROW + element_at<DH>(h, lane * E), f[0]);
    }
#pragma unroll
    for (int r = 1; r < ROWS; r++)
#pragma unroll
      for (int j = 0; j < E; j++) f[r - 1][j] = f[r][j];
  }
  side.sync();

  float o[TILES][4], top[SUMS], sum[SUMS];
#pragma unroll
  for (int r = 0; r < SUMS; r++) top[r] = -INFINITY_F, sum[r] = 0.f;
#pragma unroll
  for (int n = 0; n < TILES; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
  const float to_exp2 = a.scale * 1.4426950408889634f;
  // A lane's queries, with what bf16 leaves of them, as products take them: in registers where there is room.
  auto query = [&](int b, u32 (*q)[4]) {
    const bf16* row = q_sh + g * Q_ROW + fragment(b);
    const uint4 hi = *(const uint4*)row, rest = *(const uint4*)(row + 8 * Q_ROW);
    q[0][0] = hi.x, q[0][1] = rest.x, q[0][2] = hi.y, q[0][3] = rest.y;
    q[1][0] = hi.z, q[1][1] = rest.z, q[1][2] = hi.w, q[1][3] = rest.w;
  };
  u32 own_q[Side::STREAMED ? BLOCKS : 1][2][4];
  if constexpr (Side::STREAMED)
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) query(b, own_q[b]);
  // Of streamed pages a lane's pieces of values: the first eight of a row are in its first line, as far from each other as the others.
  int value_at[4];
  if constexpr (Side::STREAMED) {
    static_assert(DH % 64 == 0, "whole lines");
#pragma unroll
    for (int i = 0; i < 4; i++) value_at[i] = (lane & 15) * DH + piece_at<DH>(lane & 15, 2 * i + (lane >> 4)) * 8;
  }
  // A page whose keys are in `key`: scores, request for page `next`, then softmax and values.
  auto absorb = [&](int page, bf16* values_sh, int next) {
    const bool more = !Side::STREAMED && next < run.page_end;
    float s[2][4], s_more[2][4];
    if (page == last_page) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (g + 8 * i == position % PAGE)
#pragma unroll
          for (int b = 0; b < BLOCKS; b++) key[i][b] = *(const uint4*)(q_sh + 16 * Q_ROW + piece_at<DH>(16, b * 4 + t) * 8);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) s[i][j] = s_more[i][j] = 0.f;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      u32 read_q[2][4];
      if (!Side::STREAMED) query(b, read_q);
      const u32(*q)[4] = Side::STREAMED ? own_q[Side::STREAMED ? b : 0] : read_q;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        mma_bf16(s[i], q[0], key[i][b].x, key[i][b].y);
        mma_bf16(s_more[i], q[1], key[i][b].z, key[i][b].w);
      }
    }
    if (more) request(run.table[next], buffer ^ 1);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 2 * SUMS; j++) {
        const int token = page * PAGE + i * 8 + 2 * t + (j & 1);
        const float x = WIDE ? s[i][j] + s_more[i][j] : (s[i][j] + s_more[i][j]) + (s[i][j + 2] + s_more[i][j + 2]);
        s[i][j] = token <= position && token >= run.begin ? x * to_exp2 : -INFINITY_F;
      }
    u32 p[4];
#pragma unroll
    for (int r = 0; r < SUMS; r++) {
      float m = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      const float now = fmaxf(top[r], m), base = now == -INFINITY_F ? 0.f : now, keep = exp2_fast(top[r] - base);
      top[r] = now;
      const float e0 = exp2_fast(s[0][2 * r] - base), e1 = exp2_fast(s[0][2 * r + 1] - base), e2 = exp2_fast(s[1][2 * r] - base), e3 = exp2_fast(s[1][2 * r + 1] - base);
      sum[r] = fmaf(sum[r], keep, e0) + e1 + e2 + e3;
      p[r] = bf16_pair(e0, e1), p[2 + r] = bf16_pair(e2, e3);
      if (!WIDE) p[1] = bf16_rest(e0, e1, p[0]), p[3] = bf16_rest(e2, e3, p[2]);
      if (__any_sync(0xffffffffu, keep != 1.f))
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          o[n][2 * r] *= keep, o[n][2 * r + 1] *= keep;
          if (!WIDE) o[n][2] *= keep, o[n][3] *= keep;
        }
    }
    if (more)
      copy_async_wait<1>();
    else if (!Side::STREAMED)
      copy_async_wait<0>();
    if (!Side::STREAMED) __syncwarp();
    if (page == last_page) {
      // what a page holds past its end may be anything, and 0 * NaN is NaN
#pragma unroll 1
      for (int r = position % PAGE; r < PAGE; r++)
#pragma unroll
        for (int i = lane; i < DH; i += 32) values_sh[Side::STREAMED ? r * DH + element_at<DH>(r, i) : r * ROW + i] = r == position % PAGE ? q_sh[17 * Q_ROW + element_at<DH>(17, i)] : (bf16)0;
      if (Side::STREAMED) stream_fence_shared();
      __syncwarp();
    }
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
      u32 b[4];
      ldmatrix_x4_trans(b, values_sh + (Side::STREAMED ? value_at[n / 2 & 3] + n / 8 * 64 : (lane & 15) * ROW + (n + (lane >> 4)) * 8));
      mma_bf16(o[n], p, b[0], b[1]);
      mma_bf16(o[n + 1], p, b[2], b[3]);
    }
    __syncwarp();
  };
  if constexpr (Side::STREAMED) {
    side.pages(run, [&](int page, bf16* keys_sh) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) key[i][b] = *(const uint4*)(keys_sh + (g + 8 * i) * DH + fragment(b));
      absorb(page, keys_sh + PAGE * DH, 0);
    });
  } else {
#pragma unroll 1
    while (page < run.page_end) {
      absorb(page, v_sh + buffer * 16 * ROW, page + WARPS);
      page += WARPS, buffer ^= 1;
    }
  }
#pragma unroll
  for (int r = 0; r < SUMS; r++) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
  }
  side.sync();
  const int stride = DH + 4;
  float* mine = merge_sh + warp * HEADS * stride;
#pragma unroll
  for (int r = 0; r < SUMS; r++) {
    float* row = mine + (g + 8 * r) * stride;
#pragma unroll
    for (int n = 0; n < TILES; n++) *(float2*)(row + n * 8 + 2 * t) = WIDE ? make_float2(o[n][2 * r], o[n][2 * r + 1]) : make_float2(o[n][0] + o[n][2], o[n][1] + o[n][3]);
    if (t == 0) row[DH] = top[r], row[DH + 1] = sum[r];
  }
  side.sync();
#pragma unroll 1
  for (int i = thread; i < group * (DH / 4); i += THREADS) {
    const int h = i / (DH / 4), d = i % (DH / 4) * 4;
    const float* row = merge_sh + h * stride;
    float m[WARPS], best = -INFINITY_F, total = 0.f;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) m[w] = row[w * HEADS * stride + DH], best = fmaxf(best, m[w]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float f = exp2_fast(m[w] - best);
      const float4 x = *(const float4*)(row + w * HEADS * stride + d);
      total = fmaf(f, row[w * HEADS * stride + DH + 1], total);
      v.x = fmaf(f, x.x, v.x), v.y = fmaf(f, x.y, v.y), v.z = fmaf(f, x.z, v.z), v.w = fmaf(f, x.w, v.w);
    }
    store(h, d, v, best, total);
  }
  if (newest && warp < 2) {
    bf16* to = (warp == 0 ? y.k_pages : y.v_pages) + (((size_t)run.table[last_page] * a.Hk + kv) * PAGE + position % PAGE) * DH;
    for (int i = lane; i < DH; i += 32) to[element_at<DH>(position % PAGE, i)] = q_sh[(16 + warp) * Q_ROW + element_at<DH>(16 + warp, i)];
  }
}

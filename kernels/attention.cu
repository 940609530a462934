// One new token a sequence: normalise and rotate q and k, append k and v to the cache, attend over the pages.
//
//   o[h] = sum_s softmax_s(scale * q[h] . K[s, h / (H / Hk)]) V[s, h / (H / Hk)],   s in (position - window, position]
//
// q [T, H Dh], k, v [T, Hk Dh] f32 as the projections left them; o [T, H Dh] f32
// cache  k_pages, v_pages [page][Hk][16][Dh] bf16, pieces of a row where piece_at says; page_table [T, max_pages] s32; positions [T] s32, of the new token
// norm   0 none, 1 each head alone (gain [Dh]), 2 the whole row (gain [H Dh], [Hk Dh]); clip after it; cosines, sines
//        [positions, rope_dim / 2] f32, pairs (i, i + rope_dim / 2) or (2 i, 2 i + 1) of the first rope_dim elements
// needs  Dh in {32, 64, 96, 128}, H / Hk <= 16, rope_dim even; partial [T Hk max_splits][16][Dh + 4] f32; counters [T Hk] ints at zero
//
// Launch attention_decode_d{Dh} where H / Hk <= 8, attention_decode_wide_d{Dh} else: grid (max_splits, Hk, T), 256 threads, shared
//   max(8 * 2 * 16 * (Dh + 8) * 2, 8 * R * (Dh + 4) * 4) + 18 * (Dh + 8) * 2 + 8 * Dh * 4, R = 8, wide 16.
// A block takes a run of pages, its eight warps every eighth page; runs are as many as give each warp a page, at most
// max_splits, so the grid is fixed and short contexts leave blocks idle. Heads of a group are the 16 rows of the products; where they are at
// most eight, the other rows carry what bf16 leaves of queries and probabilities, so that only keys and values are rounded.
// The last block of a (sequence, kv head) merges; from sm_90, where splits are many and `together`, all wait for each other and each merges a share.
// Floors: bytes 2 S Hk Dh 2; operations 4 S H Dh on tensor cores at half use for groups of 8. Source: FlashAttention-2
// (arXiv 2307.08691), flash-decoding; src/engine/cpu/attend.rs.
#include "common/attend.cuh"

// The weighted mean of the partial results [splits][16][DH + 4], a thread four elements of a head, AT_ONCE loads ahead of their use.
template <int DH, int AT_ONCE, class Store>
DEV void merge_parts(const float* part, int splits, int items, const Store& store) {
  const int stride = DH + 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < items; i += blockDim.x) {
    const int h = i / (DH / 4), d = i % (DH / 4) * 4;
    float best = -INFINITY_F, total = 0.f;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int s0 = 0; s0 < splits; s0 += AT_ONCE) {
      float x[AT_ONCE][4], m[AT_ONCE], l[AT_ONCE];
#pragma unroll
      for (int s = 0; s < AT_ONCE; s++) {
        const float* row = part + (min_int(s0 + s, splits - 1) * 16 + h) * stride;
        *(uint4*)x[s] = load_v4_l2(row + d), m[s] = load_f32_l2(row + DH), l[s] = load_f32_l2(row + DH + 1);
      }
      float now = best;
#pragma unroll
      for (int s = 0; s < AT_ONCE; s++) now = fmaxf(now, m[s]);
      const float keep = exp2_fast(best - now);
      best = now, total *= keep, v.x *= keep, v.y *= keep, v.z *= keep, v.w *= keep;
#pragma unroll
      for (int s = 0; s < AT_ONCE; s++) {
        const float f = s0 + s < splits ? exp2_fast(m[s] - best) : 0.f;
        l[s] = __fmul_rn(f, l[s]);
#pragma unroll
        for (int j = 0; j < 4; j++) x[s][j] = __fmul_rn(f, x[s][j]);
      }
      // halves onto each other, as lanes would
#pragma unroll
      for (int level = 1; level < AT_ONCE; level *= 2)
#pragma unroll
        for (int s = 0, by = AT_ONCE / 2 / level; s < by; s++) {
          l[s] += l[s + by];
#pragma unroll
          for (int j = 0; j < 4; j++) x[s][j] += x[s + by][j];
        }
      total += l[0], v.x += x[0][0], v.y += x[0][1], v.z += x[0][2], v.w += x[0][3];
    }
    store(h, d, v, total);
  }
}

// A share of the same by each of the blocks, a warp an element of four and a lane a split.
template <int DH, class Store>
DEV void merge_share(const float* part, int split, int splits, int items, const Store& store) {
  const int stride = DH + 4, thread = thread_anew(), warp = thread >> 5, lane = thread & 31;
#pragma unroll 1
  for (int i = items * split / splits + warp; i < items * (split + 1) / splits; i += WARPS) {
    const int h = i / (DH / 4), d = i % (DH / 4) * 4;
    const float* row = part + (min_int(lane, splits - 1) * 16 + h) * stride;
    const uint4 x = load_v4_l2(row + d);
    const float own = load_f32_l2(row + DH), l = load_f32_l2(row + DH + 1), m = lane < splits ? own : -INFINITY_F;
    float v[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
    const float total = merge_lanes(v, m, l, 32);
    if (lane == 0) store(h, d, make_float4(v[0], v[1], v[2], v[3]), total);
  }
}

template <int DH, bool WIDE>
DEV void attention_decode(const AttentionArgs& a) {
  extern __shared__ uint4 attention_sh[];
  __shared__ float scratch_sh[32], angle_sh[DH];
  __shared__ int last_sh;
  const int seq = blockIdx.z, kv = blockIdx.y, split = blockIdx.x, group = a.H / a.Hk, stride = DH + 4, heads = group * (DH / 4);
  // Positions, page table and all keys but the newest were there before this step.
  PageRun run;
  int splits;
  run.position = a.positions[seq], run.table = a.page_table + (size_t)seq * a.max_pages;
  if (!find_run(run, a.window, split, a.max_splits, splits)) {
    dependency_wait();
    dependents_launch();
    return;
  }
  float* out = a.out + (size_t)seq * a.out_stride + (size_t)kv * group * DH;
  float* part = a.partial + ((size_t)seq * a.Hk + kv) * a.max_splits * 16 * stride;
  auto store_merged = [&](int h, int d, const float4& v, float total) { *(float4*)(out + h * DH + d) = merged(v, total); };
  attend_run<DH, WIDE>(a, a.layer, (char*)attention_sh, angle_sh, Alone{scratch_sh}, seq, kv, run, split == splits - 1, [&](int h, int d, const float4& v, float best, float total) {
    if (splits == 1) {
      store_merged(h, d, v, total);
    } else {
      float* to = part + (split * 16 + h) * stride;
      *(float4*)(to + d) = v;
      if (d == 0) *(float2*)(to + DH) = make_float2(best, total);
    }
  });
  int* counter = a.counters + seq * a.Hk + kv;
#if __CUDA_ARCH__ >= 900
  if (a.together && splits > LAST_SPLITS) {
    meet(counter, splits);
    merge_share<DH>(part, split, splits, heads, store_merged);
    return;
  }
#endif
  if (splits == 1 || !arrives_last(counter, splits, &last_sh)) return;
  if (splits <= LAST_SPLITS)
    merge_parts<DH, LAST_SPLITS>(part, splits, heads, store_merged);
  else
    merge_parts<DH, 16>(part, splits, heads, store_merged);
}

#define ATTENTION(DH) \
  extern "C" __global__ void __launch_bounds__(384, 1) attention_decode_d##DH(const __grid_constant__ AttentionArgs a) { attention_decode<DH, false>(a); } \
  extern "C" __global__ void __launch_bounds__(256, 1) attention_decode_wide_d##DH(const __grid_constant__ AttentionArgs a) { attention_decode<DH, true>(a); }
ATTENTION(32)
ATTENTION(64)
ATTENTION(96)
ATTENTION(128)

// ------------------------------------------------------------------------------------------------------------------- prompts
// append_d{Dh}: norm, clip and rotation of q (in place) and k, k and v into the pages, for any number of new tokens
// attention_prefill_d{Dh}: the same attention for runs of new tokens whose keys are in the pages; token t belongs to the sequence of row
//   rows[t] of the page table, tokens of a sequence follow each other; cosines, sines [T, rope_dim / 2] by token
// Launch append: grid T, 256 threads. attention: grid (H, ceil(T / 64)), 128 threads, shared 6 * 64 * (Dh + 8) * 2; a block takes 64 tokens
// of one head, the last first, which have the most to attend to, a warp 16 of them; keys and values of 64 positions arrive while those before are
// used, by pages looked up two rounds ahead. What bf16 leaves of q and p is multiplied apart: only keys and values are rounded.
// Floors: operations 2 T^2 H Dh a sequence on tensor cores, half of them masked away. Source: FlashAttention-2 (arXiv 2307.08691).
struct AppendArgs {
  float* q;
  const float* k;
  const float* v;
  bf16* k_pages;
  bf16* v_pages;
  const int* page_table;
  const int* positions;
  const int* rows;
  const float* q_gain;
  const float* k_gain;
  const float* cosines;
  const float* sines;
  int q_stride, k_stride, v_stride;  // elements
  int H, Hk;
  int max_pages;
  int norm;
  float eps;
  float clip;
  int rope_dim;
  int interleaved;
};
struct PrefillArgs {
  float* out;
  const float* q;
  const bf16* k_pages;
  const bf16* v_pages;
  const int* page_table;
  const int* positions;
  const int* rows;
  int q_stride, out_stride;  // elements
  int T, H, Hk;
  int max_pages;
  int window;  // 0: none
  float scale;
};

template <int DH>
DEV void append_rows(const AppendArgs& a) {
  __shared__ float scratch_sh[32], angle_sh[DH], row_sh[8][DH];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const size_t token = blockIdx.x;
  dependency_wait();
  dependents_launch();
  const int position = a.positions[token];
  float *q_row = a.q + token * a.q_stride, q_inv = 1.f, k_inv = 1.f;
  const float* k_row = a.k + token * a.k_stride;
  load_angles(angle_sh, a, blockIdx.x, threadIdx.x, blockDim.x);
  if (a.norm == 2) {
    q_inv = whole_inverse(q_row, a.H * DH, a.eps, scratch_sh);
    k_inv = whole_inverse(k_row, a.Hk * DH, a.eps, scratch_sh);
  }
  __syncthreads();
  const size_t page = (size_t)a.page_table[(size_t)a.rows[token] * a.max_pages + position / PAGE] * a.Hk;
  const int E = DH / 32, heads = a.H + 2 * a.Hk;
  // a head's elements and gains are asked for while the one before is made ready
  float f_next[E], gain_next[E];
  auto ask = [&](int h) {
    const bool is_q = h < a.H, is_v = h >= a.H + a.Hk;
    const int kv = is_v ? h - a.H - a.Hk : h - a.H;
    if (h >= heads) return;
    load_own<E>(f_next, is_q ? q_row + h * DH : is_v ? a.v + token * a.v_stride + kv * DH : k_row + kv * DH);
    if (a.norm && !is_v) load_own<E>(gain_next, (is_q ? a.q_gain : a.k_gain) + (a.norm == 2 ? (is_q ? h : kv) * DH : 0));
  };
  ask(warp);
#pragma unroll 1
  for (int h = warp; h < heads; h += 8) {
    const bool is_q = h < a.H, is_v = h >= a.H + a.Hk;
    const int kv = is_v ? h - a.H - a.Hk : h - a.H;
    float gain[E], f[E];
#pragma unroll
    for (int i = 0; i < E; i++) f[i] = f_next[i], gain[i] = gain_next[i];
    ask(h + 8);
    prepare_row<DH>(f, gain, is_q ? q_inv : k_inv, a, angle_sh, is_v, row_sh[warp]);
    if (is_q) {
      store_own<E>(q_row + h * DH + lane * E, f);
    } else {
      store_own<E>((is_v ? a.v_pages : a.k_pages) + ((page + kv) * PAGE + position % PAGE) * DH + element_at<DH>(position % PAGE, lane * E), f);
    }
  }
}

template <int DH>
DEV void attention_prefill(const PrefillArgs& a) {
  extern __shared__ uint4 attention_sh[];
  const int ROW = DH + 8, TILES = DH / 8, RUN = 64, RUN_PAGES = RUN / PAGE, TOGETHER = TILES % 8 ? 4 : 8;  // tiles of values
  __shared__ int row_sh[RUN], position_sh[RUN], page_sh[2][RUN_PAGES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int t0 = (gridDim.y - 1 - blockIdx.y) * RUN, h = blockIdx.x, kv = h / (a.H / a.Hk), used = min_int(RUN, a.T - t0);
  bf16* q_sh = (bf16*)attention_sh;      // [q, what is left of it][64][ROW]
  bf16* kv_sh = q_sh + 2 * RUN * ROW;    // [2][keys, values][64][ROW]
  dependency_wait();
  dependents_launch();
  for (int i = threadIdx.x; i < RUN * (DH / 4); i += 128) {
    const int r = i / (DH / 4), d = i % (DH / 4) * 4;
    const float4 v = r < used ? *(const float4*)(a.q + (size_t)(t0 + r) * a.q_stride + h * DH + d) : make_float4(0.f, 0.f, 0.f, 0.f);
    const uint2 hi = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
    *(uint2*)(q_sh + r * ROW + d) = hi;
    *(uint2*)(q_sh + (RUN + r) * ROW + d) = make_uint2(bf16_rest(v.x, v.y, hi.x), bf16_rest(v.z, v.w, hi.y));
  }
  if (threadIdx.x < RUN) row_sh[threadIdx.x] = threadIdx.x < used ? a.rows[t0 + threadIdx.x] : -1, position_sh[threadIdx.x] = threadIdx.x < used ? a.positions[t0 + threadIdx.x] : 0;
  __syncthreads();

  const int mine[2] = {warp * 16 + g, warp * 16 + g + 8};
  const float to_exp2 = a.scale * 1.44269504f;
  float o[TILES][4], top[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < TILES; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
#pragma unroll 1
  for (int from = 0; from < used;) {  // tokens of one sequence
    int to = from + 1;
    while (to < used && row_sh[to] == row_sh[from]) to++;
    const int last = position_sh[to - 1], begin = a.window ? max_int(position_sh[from] + 1 - a.window, 0) / RUN * RUN : 0;
    const int* table = a.page_table + (size_t)row_sh[from] * a.max_pages;
    auto fetch = [&](int key0, int buffer) {
      bf16* k_to = kv_sh + buffer * 2 * RUN * ROW;
#pragma unroll 4
      for (int i = threadIdx.x; i < RUN * (DH / 8); i += 128) {
        const int r = i / (DH / 8), d = i % (DH / 8) * 8, key = min_int(key0 + r, last);
        const size_t at = (((size_t)page_sh[buffer][(key - key0) / PAGE] * a.Hk + kv) * PAGE + key % PAGE) * DH + element_at<DH>(key % PAGE, d);
        copy_async_16(k_to + r * ROW + d, a.k_pages + at);
        copy_async_16(k_to + (RUN + r) * ROW + d, a.v_pages + at);
      }
    };
    auto page_of = [&](int key0) { return threadIdx.x < RUN_PAGES ? table[min_int(key0 / PAGE + threadIdx.x, last / PAGE)] : 0; };
    if (threadIdx.x < RUN_PAGES) page_sh[0][threadIdx.x] = page_of(begin), page_sh[1][threadIdx.x] = page_of(begin + RUN);
    int next_page = page_of(begin + 2 * RUN);
    __syncthreads();
    fetch(begin, 0);
    copy_async_commit();
    int buffer = 0;
    const int lo = max_int(from, warp * 16), hi = min_int(to, warp * 16 + 16);  // of this warp
    const int deepest = hi > lo ? position_sh[hi - 1] : -1;
#pragma unroll 1
    for (int key0 = begin; key0 <= last; key0 += RUN, buffer ^= 1) {
      if (key0 + RUN <= last) fetch(key0 + RUN, buffer ^ 1);
      copy_async_commit();
      copy_async_wait<1>();
      __syncthreads();
      if (threadIdx.x < RUN_PAGES) page_sh[buffer][threadIdx.x] = next_page, next_page = page_of(key0 + 3 * RUN);
      if (key0 <= deepest) {
        const bf16 *k_sh = kv_sh + buffer * 2 * RUN * ROW, *v_sh = k_sh + RUN * ROW;
        float s[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
        for (int d = 0; d < DH; d += 16) {
          u32 q[4], q_rest[4];
          ldmatrix_x4(q, q_sh + (warp * 16 + (lane & 15)) * ROW + d + (lane >> 4) * 8);
          ldmatrix_x4(q_rest, q_sh + (RUN + warp * 16 + (lane & 15)) * ROW + d + (lane >> 4) * 8);
          u32 b[4][4];
#pragma unroll
          for (int n = 0; n < 4; n++) ldmatrix_x4(b[n], k_sh + (n * 16 + (lane >> 4) * 8 + (lane & 7)) * ROW + d + (lane >> 3 & 1) * 8);
#pragma unroll
          for (int n = 0; n < 8; n++) mma_bf16(s[n], q, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
          for (int n = 0; n < 8; n++) mma_bf16(s[n], q_rest, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
        const bool whole = lo == warp * 16 && hi == lo + 16 && key0 + RUN - 1 <= position_sh[lo] && (!a.window || key0 > deepest - a.window);
        u32 p[4][4], p_rest[4][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const bool inside = mine[r] >= from && mine[r] < to;
          const int position = position_sh[mine[r]], first = a.window ? position + 1 - a.window : 0;
          if (!whole)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
              for (int j = 0; j < 2; j++) {
                const int key = key0 + n * 8 + 2 * t + j;
                if (!inside || key > position || key < first) s[n][2 * r + j] = -INFINITY_F;
              }
          float m = -INFINITY_F;
#pragma unroll
          for (int n = 0; n < 8; n++) m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
          const float now = fmaxf(top[r], m), base = now == -INFINITY_F ? 0.f : now * to_exp2, keep = exp2_fast(fmaf(top[r], to_exp2, -base));
          top[r] = now, sum[r] *= keep;
#pragma unroll
          for (int n = 0; n < 8; n++) {
            const float e0 = exp2_fast(fmaf(s[n][2 * r], to_exp2, -base)), e1 = exp2_fast(fmaf(s[n][2 * r + 1], to_exp2, -base));
            sum[r] += e0 + e1;
            const u32 both = bf16_pair(e0, e1);
            p[n / 2][r + n % 2 * 2] = both, p_rest[n / 2][r + n % 2 * 2] = bf16_rest(e0, e1, both);
          }
          if (__any_sync(0xffffffffu, keep != 1.f))
#pragma unroll
            for (int n = 0; n < TILES; n++) o[n][2 * r] *= keep, o[n][2 * r + 1] *= keep;
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
          for (int base = 0; base < TILES; base += TOGETHER) {
            u32 b[TOGETHER / 2][4];
#pragma unroll
            for (int n = 0; n < TOGETHER / 2; n++) ldmatrix_x4_trans(b[n], v_sh + (k * 16 + (lane & 15)) * ROW + (base + 2 * n) * 8 + (lane >> 4) * 8);
#pragma unroll
            for (int n = 0; n < TOGETHER; n++) mma_bf16(o[base + n], p[k], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < TOGETHER; n++) mma_bf16(o[base + n], p_rest[k], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
          }
      }
      __syncthreads();
    }
    from = to;
  }
  copy_async_wait<0>();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    if (mine[r] >= used) continue;
    float* out = a.out + (size_t)(t0 + mine[r]) * a.out_stride + h * DH + 2 * t;
    const float f = 1.f / sum[r];
#pragma unroll
    for (int n = 0; n < TILES; n++) *(float2*)(out + n * 8) = make_float2(o[n][2 * r] * f, o[n][2 * r + 1] * f);
  }
}

#define PROMPT(DH)                                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256) append_d##DH(const __grid_constant__ AppendArgs a) { append_rows<DH>(a); }                      \
  extern "C" __global__ void __launch_bounds__(128, 2) attention_prefill_d##DH(const __grid_constant__ PrefillArgs a) { attention_prefill<DH>(a); }
PROMPT(32)
PROMPT(64)
PROMPT(96)
PROMPT(128)

// One new token a sequence with latent attention (DeepSeek-V2, arXiv 2405.04434): all heads share one row c of the cache, keys are
// the row and values its first Rkv elements, so that a page is read once.
//
//   q'[h] = (q_nope[h] U_k[h], rope(q_rope[h])),  o'[h] = sum_s softmax_s(scale * q'[h] . c[s]) c[s, ..Rkv],  o[h, i] = U_v[h, i] . o'[h]
//
// latent_query_r{Rkv}: grid (Rkv / 64, H, ceil(T / 8)), 256 threads: q' in bf16 and what that leaves of it; also norm and rotation of the new row, and its append
// latent_attention_r{Rkv}: grid (max_splits, ceil(H / 16), T), 256 threads, shared latent_shared(Rkv + Dr): o', not yet divided, of each
//   split with its peak and mass
// latent_value_r{Rkv}: grid (ceil(Dv / rows), H, ceil(T / 4)), 256 threads: merges the splits of its head and multiplies with U_v
//
// q [T, H (Dn + Dr)], latent [T, Rkv + Dr] f32 as the projections left them; out [T, H Dv] f32; up [H (Dn + Dv), Rkv] in any format
// cache  pages [page][16][Rkv + Dr] bf16; page_table [T, max_pages] s32; positions [T] s32, of the new token; cosines, sines [positions, Dr / 2]
// needs  Dn <= 128, Dr = 64, Dv even, max_splits <= 64; partial [T][H][max_splits][Rkv + 4] f32
//
// Heads are the 16 rows of the products. A block of attention takes a run of tiles of 32 positions; its eight warps are 2 halves of a tile
// by 4 quarters of the inner dimension for scores, 2 heads each for the softmax, and 64 value columns each. Splits are merged by whoever
// multiplies with U_v, since one block for all heads would read 2 KB for every head and split alone.
// Floors, 16 heads, Rkv 512: query and value read H Dn Rkv elements of U each (2 MB in bf16: 0.5 us); attention 1152 bytes a position
// (1.2 MB at 1k: 0.3 us), 4 H 544 operations a byte pair, far from the tensor cores' rate. Reference: src/engine/cpu/attend.rs.
#include "common/mma.cuh"
#include "common/pages.cuh"
#include "common/reduce.cuh"

static const int TILE = 32, QUERY_TOK = 8, VALUE_TOK = 4, MOST_NOPE = 128, MOST_SPLITS = 64;

enum Kind { F32 = 0, BF16 = 1, F16 = 2, INT4 = 3, INT8 = 4 };
// A weight as it lies on disk: plain floats row-major, or packed codes with a scale every `group` columns of a row and no zero points.
struct LatentMatrix {
  const void* data;
  const void* scales;
  int rows, cols, group, kind, scale_kind, zeros;
};

struct LatentQueryArgs {
  bf16* query;        // [q', what is left of it][T, H, Rkv + Dr]
  const float* q;
  const float* latent;
  bf16* pages;
  const int* page_table;
  const int* positions;
  const float* gain;  // [Rkv]
  const float* cosines;
  const float* sines;
  LatentMatrix up;
  int q_stride, latent_stride;  // elements
  int T, H;
  int nope, rope, v;
  int max_pages;
  int interleaved;
  float eps;
};
struct LatentAttentionArgs {
  float* partial;
  const bf16* query;
  const bf16* pages;
  const int* page_table;
  const int* positions;
  int H;
  int max_pages, max_splits;
  float scale;
};
struct LatentValueArgs {
  float* out;
  const float* partial;
  const int* positions;
  LatentMatrix up;
  int out_stride;  // elements
  int T, H;
  int nope, v;
  int max_splits;
  int rows;        // of U_v a block, a multiple of 16
};

DEV float f16_to_f32(u32 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)x));
  return r;
}
// eight consecutive elements of a row; columns and groups are multiples of eight
DEV void load_eight(float* f, const LatentMatrix& m, size_t row, int col) {
  const size_t at = row * m.cols + col;
  if (m.kind == BF16 || m.kind == F16) {
    const uint4 v = load_streaming((const bf16*)m.data + at);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 w = word_at(v, i);
      f[2 * i] = m.kind == BF16 ? bf16_lo(w) : f16_to_f32(w & 0xffffu), f[2 * i + 1] = m.kind == BF16 ? bf16_hi(w) : f16_to_f32(w >> 16);
    }
  } else if (m.kind == F32) {
    *(float4*)f = *(const float4*)((const float*)m.data + at), *(float4*)(f + 4) = *(const float4*)((const float*)m.data + at + 4);
  } else {
    const size_t s = row * (m.cols / m.group) + col / m.group;
    const float scale = m.scale_kind == F32 ? ((const float*)m.scales)[s] : m.scale_kind == BF16 ? to_f32(((const bf16*)m.scales)[s]) : f16_to_f32(((const bf16*)m.scales)[s]);
    if (m.kind == INT4) {
      const u32 w = ((const u32*)m.data)[at / 8];
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] = scale * (float)((int)(w >> 4 * i & 15) - 8);
    } else {
      const uint2 w = *(const uint2*)((const char*)m.data + at);
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] = scale * (float)((int)((i < 4 ? w.x : w.y) >> 8 * (i & 3) & 255) - 128);
    }
  }
}

// the pair (p, q) of rotary elements i, rotated
DEV float2 rotated(const float* row, int i, int half, int interleaved, const float* cosines, const float* sines, size_t position, int* p, int* q) {
  *p = interleaved ? 2 * i : i, *q = interleaved ? 2 * i + 1 : i + half;
  const float c = cosines[position * half + i], s = sines[position * half + i], x = row[*p], y = row[*q];
  return make_float2(x * c - y * s, y * c + x * s);
}

// the new row of one token: norm of the latent, rotation of the rest, rounding, append
template <int RANK>
DEV void append_latent(const LatentQueryArgs& a, int token, float* scratch_sh) {
  const float* row = a.latent + (size_t)token * a.latent_stride;
  const int position = a.positions[token];
  bf16* to = a.pages + ((size_t)a.page_table[(size_t)token * a.max_pages + position / PAGE] * PAGE + position % PAGE) * (RANK + a.rope);
  float sum = 0.f;
  for (int i = threadIdx.x; i < RANK; i += blockDim.x) sum += row[i] * row[i];
  const float inv = rsqrtf(block_sum(sum, scratch_sh) / RANK + a.eps);
  for (int i = threadIdx.x; i < RANK; i += blockDim.x) to[i] = to_bf16(row[i] * inv * a.gain[i]);
  for (int i = threadIdx.x; i < a.rope / 2; i += blockDim.x) {
    int p, q;
    const float2 r = rotated(row + RANK, i, a.rope / 2, a.interleaved, a.cosines, a.sines, position, &p, &q);
    to[RANK + p] = to_bf16(r.x), to[RANK + q] = to_bf16(r.y);
  }
}

template <int RANK>
DEV void latent_query(const LatentQueryArgs& a) {
  __shared__ float scratch_sh[32], x_sh[QUERY_TOK][MOST_NOPE], sums_sh[8][QUERY_TOK][64];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.y, t0 = blockIdx.z * QUERY_TOK, num = min_int(QUERY_TOK, a.T - t0);
  const int col = blockIdx.x * 64 + (lane & 7) * 8, first = warp * 4 + (lane >> 3), width = RANK + a.rope;
  float w[MOST_NOPE / 32][8];
#pragma unroll
  for (int j = 0; j < MOST_NOPE / 32; j++) {
    const int n = first + 32 * j;
    if (n < a.nope) load_eight(w[j], a.up, (size_t)h * (a.nope + a.v) + n, col);
  }
  dependency_wait();
  dependents_launch();
  for (int i = threadIdx.x; i < num * MOST_NOPE; i += blockDim.x) {
    const int t = i / MOST_NOPE, n = i % MOST_NOPE;
    x_sh[t][n] = n < a.nope ? a.q[(size_t)(t0 + t) * a.q_stride + h * (a.nope + a.rope) + n] : 0.f;
  }
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  if (block < num) append_latent<RANK>(a, t0 + block, scratch_sh);
  if (blockIdx.x == gridDim.x - 1)
    for (int i = threadIdx.x; i < num * (a.rope / 2); i += blockDim.x) {
      const int t = i / (a.rope / 2), e = i % (a.rope / 2);
      int p, q;
      const float* row = a.q + (size_t)(t0 + t) * a.q_stride + h * (a.nope + a.rope) + a.nope;
      const float2 r = rotated(row, e, a.rope / 2, a.interleaved, a.cosines, a.sines, a.positions[t0 + t], &p, &q);
      bf16 *to = a.query + ((size_t)(t0 + t) * a.H + h) * width + RANK, *rest = to + (size_t)a.T * a.H * width;
      const u32 pair = bf16_pair(r.x, r.y), left = bf16_rest(r.x, r.y, pair);
      to[p] = (bf16)pair, to[q] = (bf16)(pair >> 16), rest[p] = (bf16)left, rest[q] = (bf16)(left >> 16);
    }
  __syncthreads();
#pragma unroll 1
  for (int t = 0; t < num; t++) {
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < MOST_NOPE / 32; j++)
      if (first + 32 * j < a.nope) {
        const float x = x_sh[t][first + 32 * j];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += x * w[j][i];
      }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 8);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
    }
    if (lane < 8) {
      float* to = sums_sh[warp][t] + lane * 8;
      *(float4*)to = make_float4(sum[0], sum[1], sum[2], sum[3]), *(float4*)(to + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num * 32; i += blockDim.x) {
    const int t = i / 32, c = i % 32 * 2;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int s = 0; s < 8; s++) sum.x += sums_sh[s][t][c], sum.y += sums_sh[s][t][c + 1];
    bf16* to = a.query + ((size_t)(t0 + t) * a.H + h) * width + blockIdx.x * 64 + c;
    const u32 pair = bf16_pair(sum.x, sum.y);
    *(u32*)to = pair, *(u32*)(to + (size_t)a.T * a.H * width) = bf16_rest(sum.x, sum.y, pair);
  }
}

DEV int latent_splits(int position, int max_splits) { return min_int(max_splits, position / TILE + 1); }

// Where a multiprocessor has less than 105 KB for a block, what bf16 leaves of the queries is kept in registers.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define REST_IN_REGISTERS true
#else
#define REST_IN_REGISTERS false
#endif
template <int RANK, int ROPE>
DEV void latent_attention(const LatentAttentionArgs& a) {
  extern __shared__ uint4 latent_sh[];
  __shared__ float keep_sh[16];
  const int WIDTH = RANK + ROPE, ROW = WIDTH + 8, CHUNKS = WIDTH / 8, STEPS = WIDTH / 64, TILES = RANK / 64, S_ROW = TILE + 4, P_ROW = TILE + 8;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int seq = blockIdx.z, h0 = blockIdx.y * 16, split = blockIdx.x, half = warp & 1, quarter = warp >> 1;
  bf16* tile_sh = (bf16*)latent_sh;                  // [2][TILE][ROW]; the queries first take the second
  float* s_sh = (float*)(tile_sh + 2 * TILE * ROW);  // [4][16][S_ROW], scores of each quarter
  bf16* p_sh = (bf16*)(s_sh + 4 * 16 * S_ROW);       // [p, what is left of it][16][P_ROW]
  bf16* rest_sh = p_sh + 2 * 16 * P_ROW;             // [16][ROW], what is left of the queries, if there

  const int position = a.positions[seq], tiles = position / TILE + 1, splits = latent_splits(position, a.max_splits);
  if (split >= splits) {
    dependency_wait();
    dependents_launch();
    return;
  }
  const int begin = tiles * split / splits, end = tiles * (split + 1) / splits;
  const int* table = a.page_table + (size_t)seq * a.max_pages;
  // Past the newest row there may be anything, and 0 * NaN is NaN: those rows repeat it.
  auto load = [&](int tile, int buffer, bool old, bool newest) {
#pragma unroll 3
    for (int i = 0; i < TILE * CHUNKS / 256; i++) {
      const int c = threadIdx.x + 256 * i, r = c / CHUNKS, col = c % CHUNKS * 8, token = min_int(tile * TILE + r, position);
      if (token < position ? old : newest)
        copy_async_16(tile_sh + (buffer * TILE + r) * ROW + col, a.pages + ((size_t)table[token / PAGE] * PAGE + token % PAGE) * WIDTH + col);
    }
  };
  load(begin, 0, true, false);
  dependency_wait();
  dependents_launch();
  load(begin, 0, false, true);
  copy_async_commit();
  u32 q[STEPS][4], q_rest[STEPS][4];
  bf16* q_sh = tile_sh + TILE * ROW;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    bf16* to = part && !REST_IN_REGISTERS ? rest_sh : q_sh;
    for (int i = threadIdx.x; i < 16 * CHUNKS; i += 256) {
      const int r = i / CHUNKS, col = i % CHUNKS * 8;
      const bf16* from = a.query + (((size_t)part * gridDim.z + seq) * a.H + h0 + r) * WIDTH + col;
      *(uint4*)(to + r * ROW + col) = h0 + r < a.H ? load_v4(from) : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    if (part && !REST_IN_REGISTERS) break;
#pragma unroll
    for (int j = 0; j < STEPS; j++) ldmatrix_x4(part ? q_rest[j] : q[j], q_sh + (lane & 15) * ROW + (quarter * STEPS + j) * 16 + (lane >> 4) * 8);
    if (REST_IN_REGISTERS) __syncthreads();
  }
  float o[TILES][4], top[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < TILES; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
  const float to_exp2 = a.scale * 1.4426950408889634f;
#pragma unroll 1
  for (int tile = begin; tile < end; tile++) {
    const bf16* rows = tile_sh + ((tile - begin) & 1) * TILE * ROW;
    copy_async_wait<0>();
    __syncthreads();
    if (tile + 1 < end) load(tile + 1, (tile + 1 - begin) & 1, true, true);
    copy_async_commit();
    float s[2][4] = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      u32 b[4];
      if (!REST_IN_REGISTERS) ldmatrix_x4(q_rest[j], rest_sh + (lane & 15) * ROW + (quarter * STEPS + j) * 16 + (lane >> 4) * 8);
      ldmatrix_x4(b, rows + (half * 16 + (lane & 7) + (lane >> 4) * 8) * ROW + (quarter * STEPS + j) * 16 + (lane >> 3 & 1) * 8);
      mma_bf16(s[0], q[j], b[0], b[1]), mma_bf16(s[1], q[j], b[2], b[3]);
      mma_bf16(s[0], q_rest[j], b[0], b[1]), mma_bf16(s[1], q_rest[j], b[2], b[3]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < 2; n++)
        *(float2*)(s_sh + (quarter * 16 + g + 8 * r) * S_ROW + half * 16 + n * 8 + 2 * t) = make_float2(s[n][2 * r], s[n][2 * r + 1]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int h = 2 * warp + i;
      float x = 0.f;
#pragma unroll
      for (int k = 0; k < 4; k++) x += s_sh[(k * 16 + h) * S_ROW + lane];
      x = tile * TILE + lane <= position ? x * to_exp2 : -INFINITY_F;
      const float now = fmaxf(top[i], warp_max(x)), keep = exp2_fast(top[i] - now), e = exp2_fast(x - now);
      top[i] = now, sum[i] = sum[i] * keep + e;
      const bf16 p = to_bf16(e);
      p_sh[h * P_ROW + lane] = p, p_sh[(16 + h) * P_ROW + lane] = to_bf16(e - to_f32(p));
      if (lane == 0) keep_sh[h] = keep;
    }
    __syncthreads();
    const float keep_lo = keep_sh[g], keep_hi = keep_sh[g + 8];
#pragma unroll
    for (int n = 0; n < TILES; n++) o[n][0] *= keep_lo, o[n][1] *= keep_lo, o[n][2] *= keep_hi, o[n][3] *= keep_hi;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
      u32 p[4], rest[4];
      ldmatrix_x4(p, p_sh + (lane & 15) * P_ROW + k * 16 + (lane >> 4) * 8);
      ldmatrix_x4(rest, p_sh + (16 + (lane & 15)) * P_ROW + k * 16 + (lane >> 4) * 8);
#pragma unroll
      for (int n = 0; n < TILES; n += 2) {
        u32 b[4];
        ldmatrix_x4_trans(b, rows + (k * 16 + (lane & 15)) * ROW + warp * (RANK / 8) + n * 8 + (lane >> 4) * 8);
        mma_bf16(o[n], p, b[0], b[1]), mma_bf16(o[n + 1], p, b[2], b[3]);
        mma_bf16(o[n], rest, b[0], b[1]), mma_bf16(o[n + 1], rest, b[2], b[3]);
      }
    }
  }
  const int stride = RANK + 4;
  float* part = a.partial + (((size_t)seq * a.H + h0) * a.max_splits + split) * stride;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int h = g + 8 * r;
    if (h0 + h < a.H)
#pragma unroll
      for (int n = 0; n < TILES; n++)
        *(float2*)(part + (size_t)h * a.max_splits * stride + warp * (RANK / 8) + n * 8 + 2 * t) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int h = 2 * warp + i;
    const float total = warp_sum(sum[i]);
    if (lane == 0 && h0 + h < a.H) *(float2*)(part + (size_t)h * a.max_splits * stride + RANK) = make_float2(top[i], total);
  }
}

template <int RANK>
DEV void latent_value(const LatentValueArgs& a) {
  __shared__ float mixed_sh[VALUE_TOK][RANK], share_sh[VALUE_TOK][MOST_SPLITS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.y, t0 = blockIdx.z * VALUE_TOK, num = min_int(VALUE_TOK, a.T - t0);
  const int i0 = blockIdx.x * a.rows, stride = RANK + 4;
  float w[2][RANK / 32];
  auto weights = [&](int i) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int j = 0; j < RANK / 256; j++) load_eight(w[r] + 8 * j, a.up, (size_t)h * (a.nope + a.v) + a.nope + min_int(i + r, a.v - 1), lane * 8 + 256 * j);
  };
  weights(i0 + 2 * warp);
  dependency_wait();
  dependents_launch();
  const float* part = a.partial + ((size_t)t0 * a.H + h) * a.max_splits * stride;
  const size_t token = (size_t)a.H * a.max_splits * stride;
  if (warp < num) {
    const int splits = latent_splits(a.positions[t0 + warp], a.max_splits);
    float top[2], mass[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* row = part + warp * token + min_int(lane + 32 * i, splits - 1) * stride + RANK;
      top[i] = row[0], mass[i] = lane + 32 * i < splits ? row[1] : 0.f;
    }
    const float best = warp_max(fmaxf(top[0], top[1])), lo = exp2_fast(top[0] - best), hi = exp2_fast(top[1] - best);
    const float inv = 1.f / warp_sum(lo * mass[0] + hi * mass[1]);
    share_sh[warp][lane] = lo * inv, share_sh[warp][lane + 32] = hi * inv;
  }
  __syncthreads();
  // A single token's splits go to two rows, even and odd, whose products are added.
  const int lanes = RANK / 4, ways = num == 1 ? 2 : 1, slots = num == 1 ? 2 : num;
  for (int slot = threadIdx.x / lanes; slot < slots; slot += blockDim.x / lanes) {
    const int tok = num == 1 ? 0 : slot, d = threadIdx.x % lanes * 4, splits = latent_splits(a.positions[t0 + tok], a.max_splits);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int s = num == 1 ? slot : 0; s < splits; s += ways) {
      const float4 x = *(const float4*)(part + tok * token + s * stride + d);
      const float f = share_sh[tok][s];
      v.x += f * x.x, v.y += f * x.y, v.z += f * x.z, v.w += f * x.w;
    }
    *(float4*)(mixed_sh[slot] + d) = v;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = i0 + 2 * warp; i < min_int(i0 + a.rows, a.v); i += 16) {
    if (i != i0 + 2 * warp) weights(i);
    float out[2][VALUE_TOK];
#pragma unroll
    for (int t = 0; t < VALUE_TOK; t++) {
      out[0][t] = out[1][t] = 0.f;
      if (t < slots)
#pragma unroll
        for (int j = 0; j < RANK / 256; j++)
#pragma unroll
          for (int k = 0; k < 8; k++) {
            const float x = mixed_sh[t][lane * 8 + 256 * j + k];
            out[0][t] += w[0][8 * j + k] * x, out[1][t] += w[1][8 * j + k] * x;
          }
    }
    if (num == 1) out[0][0] += out[0][1], out[1][0] += out[1][1];
#pragma unroll
    for (int t = 0; t < VALUE_TOK; t++)
      if (t < num) {
        const float lo = warp_sum(out[0][t]), hi = warp_sum(out[1][t]);
        if (lane == 0) *(float2*)(a.out + (size_t)(t0 + t) * a.out_stride + h * a.v + i) = make_float2(lo, hi);
      }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) latent_query_r512(const __grid_constant__ LatentQueryArgs a) { latent_query<512>(a); }
extern "C" __global__ void __launch_bounds__(256, REST_IN_REGISTERS ? 1 : 2) latent_attention_r512(const __grid_constant__ LatentAttentionArgs a) { latent_attention<512, 64>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) latent_value_r512(const __grid_constant__ LatentValueArgs a) { latent_value<512>(a); }

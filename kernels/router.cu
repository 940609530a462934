// logits = n(x) W', n = RMSNorm or LayerNorm or nothing; experts and gates as in the router's rule; the list of experts in use
//
// Rules: scores = softmax of all logits, or softmax of the chosen ones; the K highest, or the K highest inside the `keep` groups
//   whose best expert is highest (the others count as zero), or two rounds of SparseMixer; renorm divides by the chosen sum;
//   scale last. Equal scores go to the lower index.
// x      [T, D] f32; gain, shift [D] f32; W [E, D] bf16 or f32, 16-byte aligned rows; table [E][6] pointers: gate, up, down,
//        each packed then scale
// out    logits [T, E] f32, ids [T, K] s32, gates [T, K] f32, slots [min(T K, E)], num_slots, pairs [T K] s32 by slot, ascending;
//        planes of n(x) (common/planes.cuh) in the order of the experts' codes
// needs  D % 8 == 0, E <= 512, K <= min(E, 32), num_groups <= 32, T K <= 65535; counters: 1 + ceil(T / tokens) ints, zero before
//        the first launch
//
// Instances router_rows for many tokens, from logits; router_topk; router_topk_t4 for E <= 128 and the plain K highest; router_topk_t1, the same with tokens = 1.
// Launch: grid (8, ceil(T / tokens)), 256 threads,
// shared 4 * (max(tokens * D, ceil(T K / 32) * E) + tokens * E + max(tokens * E, T K) + 64).
// Eight blocks share the experts of a run of tokens (one cluster from sm_90, else the last to arrive goes on); the first of
// them chooses, and the last run to finish writes the list.
// Floors: bytes E D * 2 (0.5 MB for E 128, D 2048); latency decides: one read of x, one barrier, K rounds of a warp maximum.
// Source: src/engine/cpu/route.rs.
#include "common/planes.cuh"
#include "common/reduce.cuh"
#include "common/routing.cuh"

struct RouterArgs {
  float* logits;
  int* ids;
  float* gates;
  ExpertSlot* slots;
  int* num_slots;
  int* pairs;
  char* x_q;           // planes of n(x) for the experts
  float* x_scale;
  const float* x;
  const float* gain;
  const float* shift;
  const void* w;
  const u64* table;
  int* counters;
  int T, D, E, K;
  int tokens;          // a block, 1..4
  int w_is_f32;
  int norm;            // 0 none, 1 RMS, 2 Layer
  float eps;
  int bits;            // of the experts' codes: 4, 8 or 16
  int select;          // 0 Top, 1 GroupLimited, 2 SparseMixer
  int softmax_of_chosen;
  int renorm;
  int num_groups, keep_groups;
  float jitter;
  float scale;
};

static const int RUN_BLOCKS = 8;   // blocks that share a run of tokens
static const int ROW_CHUNKS = 8;   // 16-byte chunks of a router row that a lane loads ahead
static const int ROWS_AHEAD = 2;

DEV void dot8(float& sum, const float* w, const float* x_sh) {
  const float4 a = *(const float4*)x_sh, b = *(const float4*)(x_sh + 4);
  sum += w[0] * a.x + w[1] * a.y + w[2] * a.z + w[3] * a.w + w[4] * b.x + w[5] * b.y + w[6] * b.z + w[7] * b.w;
}
DEV void unpack8(float* f, const uint4& v) {
#pragma unroll
  for (int i = 0; i < 4; i++) f[2 * i] = bf16_lo(word_at(v, i)), f[2 * i + 1] = bf16_hi(word_at(v, i));
}
DEV float key_value(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Lowest index of the largest key over a warp, index lane + 32 i; the key is taken out.
template <int N>
DEV void take_first_max(u32* key, int& at, float& value) {
  const int lane = threadIdx.x & 31;
  u32 mine = key[0];
#pragma unroll
  for (int i = 1; i < N; i++) mine = max(mine, key[i]);
  const u32 best = warp_max_u32(mine);
  u32 where = 0xffffffffu;
#pragma unroll
  for (int i = N - 1; i >= 0; i--)
    if (key[i] == best) where = lane + 32 * i;
  at = (int)warp_min_u32(where);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (lane + 32 * i == at) key[i] = 0;
  value = key_value(best);
}

// one token, one warp; logits_sh [E] in, scratch_sh [E] free; id and gate of rank `lane` out
template <int N, bool ANY>
DEV void choose(int& id, float& gate, const RouterArgs& a, const float* logits_sh, float* scratch_sh) {
  const int lane = threadIdx.x & 31;
  float v[N];
  u32 key[N];
  id = 0, gate = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = lane + 32 * i < a.E ? logits_sh[lane + 32 * i] : -INFINITY_F;

  if (ANY && a.select == 2) {
#pragma unroll
    for (int i = 0; i < N; i++) key[i] = lane + 32 * i < a.E ? order_key(v[i]) : 0;
  #pragma unroll 1
  for (int k = 0; k < a.K; k++) {
      u32 open[N];
      float best, sum = 0.f;
      int pick;
#pragma unroll
      for (int i = 0; i < N; i++) open[i] = key[i];
      take_first_max<N>(key, pick, best);
#pragma unroll
      for (int i = 0; i < N; i++)
        if (open[i] && (best - v[i]) / fmaxf(fabsf(v[i]), best) <= 2.f * a.jitter) sum += __expf(v[i] - best);
      sum = warp_sum(sum);
      if (lane == k) id = pick, gate = a.scale / sum;
    }
    return;
  }

  if (!a.softmax_of_chosen) {
    float top = v[0], sum = 0.f;
#pragma unroll
    for (int i = 1; i < N; i++) top = fmaxf(top, v[i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = __expf(v[i] - top), sum += v[i];
    sum = 1.f / warp_sum(sum);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] *= sum;
  }
  if (ANY && a.select == 1) {
    const int size = a.E / a.num_groups;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (lane + 32 * i < a.E) scratch_sh[lane + 32 * i] = v[i];
    __syncwarp();
    float best = -INFINITY_F;
#pragma unroll 1
    for (int i = 0; lane < a.num_groups && i < size; i++) best = fmaxf(best, scratch_sh[lane * size + i]);
    u32 group[1] = {lane < a.num_groups ? order_key(best) : 0}, kept = 0;
#pragma unroll 1
    for (int k = 0; k < a.keep_groups; k++) {
      int g;
      take_first_max<1>(group, g, best);
      kept |= 1u << g;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
      if (lane + 32 * i < a.E && !(kept >> ((lane + 32 * i) / size) & 1)) v[i] = 0.f;
  }
#pragma unroll
  for (int i = 0; i < N; i++) key[i] = lane + 32 * i < a.E ? order_key(v[i]) : 0;
#pragma unroll 1
  for (int k = 0; k < a.K; k++) {
    float best;
    int pick;
    take_first_max<N>(key, pick, best);
    if (lane == k) gate = best, id = pick;
  }
  if (a.softmax_of_chosen) {
    const float top = __shfl_sync(0xffffffffu, gate, 0);
    gate = lane < a.K ? __expf(gate - top) : 0.f;
    gate /= warp_sum(gate);
  }
  if (a.renorm) gate /= warp_sum(lane < a.K ? gate : 0.f);
  gate *= a.scale;
}

// one block: experts in ascending order, the pairs of each in ascending order; id_sh [T K]; mask_sh [ceil(T K / 32)][E] free; row:
// this thread's table entry
DEV void list_experts(const RouterArgs& a, const int* id_sh, u32* mask_sh, const u64* row, int* total_sh) {
  const int num_pairs = a.T * a.K, words = div_up(num_pairs, 32), warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
#pragma unroll 1
  for (int i = threadIdx.x; i < words * a.E; i += blockDim.x) mask_sh[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int p = threadIdx.x; p < num_pairs; p += blockDim.x) atomicOr(mask_sh + (p >> 5) * a.E + id_sh[p], 1u << (p & 31));
  __syncthreads();
  int first_base = 0, slot_base = 0;
#pragma unroll 1
  for (int base = 0; base < a.E; base += blockDim.x) {
    const int e = base + threadIdx.x;
    int count = 0;
    if (e < a.E)
#pragma unroll 4
      for (int w = 0; w < words; w++) count += __popc(mask_sh[w * a.E + e]);
    int sum = count;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const int other = __shfl_up_sync(0xffffffffu, sum, i);
      if (lane >= i) sum += other;
    }
    const u32 active = __ballot_sync(0xffffffffu, count > 0);
    __syncthreads();
    if (lane == 31) total_sh[warp] = sum, total_sh[32 + warp] = __popc(active);
    __syncthreads();
    int first = first_base + sum - count, slot = slot_base + __popc(active & ((1u << lane) - 1));
#pragma unroll 1
    for (int w = 0; w < warps; w++) {
      if (w < warp) first += total_sh[w], slot += total_sh[32 + w];
      first_base += total_sh[w], slot_base += total_sh[32 + w];
    }
    if (count == 0) continue;
    ExpertSlot* out = a.slots + slot;
    u64* pointers = (u64*)out;
#pragma unroll
    for (int i = 0; i < 6; i++) pointers[i] = base == 0 ? row[i] : a.table[(size_t)e * 6 + i];
    out->expert = e, out->first = first, out->count = count, out->reserved = 0;
    int n = 0;
#pragma unroll 1
    for (int w = 0; n < count; w++)
      for (u32 mask = mask_sh[w * a.E + e]; mask; mask &= mask - 1, n++) {
        const int p = w * 32 + __ffs(mask) - 1;
        a.pairs[first + n] = p;
        if (n < 8) out->pair[n] = (u16)p, out->token[n] = (u16)((u32)p / (u32)a.K);
      }
  }
  if (threadIdx.x == 0) *a.num_slots = slot_base;
}

#if __CUDA_ARCH__ >= 900
#define RUN_CLUSTER __cluster_dims__(RUN_BLOCKS, 1, 1)
#else
#define RUN_CLUSTER
#endif
template <int RUN_TOKENS, int N, bool ANY>
DEV void route_run(const RouterArgs& a) {
  extern __shared__ float router_sh[];
  __shared__ float sum_sh[8 * RUN_TOKENS];
  __shared__ int total_sh[64], last_sh;
  const int warp = threadIdx.x >> 5, warps = 8, lane = threadIdx.x & 31;
  const int t0 = blockIdx.y * a.tokens, num_tok = min_int(a.tokens, a.T - t0), chunks = a.D / 8, rows = blockIdx.x * warps + warp, row_step = RUN_BLOCKS * warps;
  const int masks = div_up(a.T * a.K, 32) * a.E;
  float* logits_sh = router_sh + max_int(a.tokens * a.D, masks);  // [tokens][E]; before it x of the run, later the masks of experts
  float* free_sh = logits_sh + a.tokens * a.E;            // [tokens][E], or ids [T K]
#if HAS_CLUSTERS
  cluster_arrive();
#endif

  uint4 w[ROWS_AHEAD][ROW_CHUNKS];
  if (!a.w_is_f32) {
#pragma unroll
    for (int r = 0; r < ROWS_AHEAD; r++)
#pragma unroll
      for (int i = 0; i < ROW_CHUNKS; i++) {
        const int e = rows + r * row_step, c = lane + 32 * i;
        w[r][i] = e < a.E && c < chunks ? load_streaming((const char*)a.w + ((size_t)e * chunks + c) * 16) : make_uint4(0, 0, 0, 0);
      }
  }
  u64 table_row[6] = {0, 0, 0, 0, 0, 0};
  if ((!HAS_CLUSTERS || blockIdx.x == 0) && (int)threadIdx.x < a.E)
#pragma unroll
    for (int i = 0; i < 6; i++) table_row[i] = a.table[(size_t)threadIdx.x * 6 + i];
  if (a.norm)
    for (int k = threadIdx.x * 32; k < a.D; k += blockDim.x * 32) prefetch_l2(a.gain + k);
  dependency_wait();
  dependents_launch();

  float sum[RUN_TOKENS], mean[RUN_TOKENS], inv[RUN_TOKENS];
#pragma unroll
  for (int n = 0; n < RUN_TOKENS; n++) sum[n] = mean[n] = 0.f;
  auto sum_all = [&]() {  // over the block, of each token
#pragma unroll
    for (int n = 0; n < RUN_TOKENS; n++) {
      const float s = n < num_tok ? warp_sum(sum[n]) : 0.f;
      if (lane == 0) sum_sh[warp * RUN_TOKENS + n] = s;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < RUN_TOKENS; n++) {
      sum[n] = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) sum[n] += sum_sh[i * RUN_TOKENS + n];
    }
  };
#pragma unroll 2
  for (int k = threadIdx.x * 4; k < a.D; k += 1024) {
#pragma unroll
    for (int n = 0; n < RUN_TOKENS; n++) {
      if (n >= num_tok) break;
      const float4 v = *(const float4*)(a.x + (size_t)(t0 + n) * a.D + k);
      *(float4*)(router_sh + (size_t)n * a.D + k) = v;
      sum[n] += a.norm == 2 ? v.x + v.y + v.z + v.w : v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  }
  sum_all();
  if (a.norm == 2) {
#pragma unroll
    for (int n = 0; n < RUN_TOKENS; n++) mean[n] = sum[n] / a.D, sum[n] = 0.f;
  #pragma unroll 1
  for (int k = threadIdx.x * 4; k < a.D; k += 1024)
#pragma unroll
      for (int n = 0; n < RUN_TOKENS; n++) {
        if (n >= num_tok) break;
        for (int i = 0; i < 4; i++) {
          const float d = router_sh[(size_t)n * a.D + k + i] - mean[n];
          sum[n] += d * d;
        }
      }
    __syncthreads();
    sum_all();
  }
#pragma unroll
  for (int n = 0; n < RUN_TOKENS; n++) inv[n] = a.norm ? rsqrtf(sum[n] / a.D + a.eps) : 1.f;
  if (a.norm)
  #pragma unroll 1
  for (int k = threadIdx.x * 4; k < a.D; k += 1024) {
      const float4 gain = *(const float4*)(a.gain + k);
      const float4 shift = a.norm == 2 ? *(const float4*)(a.shift + k) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int n = 0; n < RUN_TOKENS; n++) {
        if (n >= num_tok) break;
        float4* p = (float4*)(router_sh + (size_t)n * a.D + k);
        float4 v = *p;
        v.x = (v.x - mean[n]) * inv[n] * gain.x + shift.x, v.y = (v.y - mean[n]) * inv[n] * gain.y + shift.y;
        v.z = (v.z - mean[n]) * inv[n] * gain.z + shift.z, v.w = (v.w - mean[n]) * inv[n] * gain.w + shift.w;
        *p = v;
      }
    }
  __syncthreads();
  const int groups = groups_of(a.D), per = div_up(groups, (int)gridDim.x), begin = blockIdx.x * per * 16, end = min_int((blockIdx.x + 1) * per, groups) * 16;
#pragma unroll 1
  for (int n = 0; n < num_tok; n++)
#pragma unroll 1
    for (int base = begin; base < end; base += blockDim.x) {
      const int c = base + threadIdx.x;
      float f[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
      if (c < end && c * 8 < a.D) {
        const float* from = router_sh + (size_t)n * a.D + c * 8;
        *(float4*)f = *(const float4*)from, *(float4*)(f + 4) = *(const float4*)(from + 4);
      }
      const size_t group = (size_t)(t0 + n) * groups + (c >> 4);
      float* scale = a.x_scale + (size_t)(t0 + n) * scale_row(groups) + (c >> 4);
      if (a.bits == 4) make_block<4>(a.x_q + group * Block<4>::BYTES, scale, c, f, c < end);
      if (a.bits == 8) make_block<8>(a.x_q + group * Block<8>::BYTES, scale, c, f, c < end);
      if (a.bits == 16) make_block<16>(a.x_q + group * Block<16>::BYTES, scale, c, f, c < end);
    }
#if HAS_CLUSTERS
  cluster_wait();
#endif
  auto emit = [&](int e, float* sum) {
#pragma unroll
    for (int n = 0; n < RUN_TOKENS; n++) {
      if (n >= num_tok) break;
      const float s = warp_sum(sum[n]);
      if (lane != 0) continue;
      a.logits[(size_t)(t0 + n) * a.E + e] = s;
#if HAS_CLUSTERS
      cluster_store_f32(logits_sh + n * a.E + e, 0, s);
#endif
    }
  };
#pragma unroll
  for (int r = 0; r < ROWS_AHEAD; r++) {
    const int e = rows + r * row_step;
    if (e >= a.E || a.w_is_f32 || chunks > 32 * ROW_CHUNKS) break;
    float sum[RUN_TOKENS] = {};
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; i++) {
      const int c = lane + 32 * i;
      float f[8];
      unpack8(f, w[r][i]);
      if (c < chunks)
#pragma unroll
        for (int n = 0; n < RUN_TOKENS; n++)
          if (n < num_tok) dot8(sum[n], f, router_sh + (size_t)n * a.D + c * 8);
    }
    emit(e, sum);
  }
#pragma unroll 1
  for (int e = a.w_is_f32 || chunks > 32 * ROW_CHUNKS ? rows : rows + ROWS_AHEAD * row_step; e < a.E; e += row_step) {
    float sum[RUN_TOKENS] = {};
#pragma unroll 1
    for (int c = lane; c < chunks; c += 32) {
      float f[8];
      if (a.w_is_f32) {
        const float* src = (const float*)a.w + ((size_t)e * chunks + c) * 8;
        *(float4*)f = *(const float4*)src, *(float4*)(f + 4) = *(const float4*)(src + 4);
      } else {
        unpack8(f, load_streaming((const char*)a.w + ((size_t)e * chunks + c) * 16));
      }
#pragma unroll
      for (int n = 0; n < RUN_TOKENS; n++)
        if (n < num_tok) dot8(sum[n], f, router_sh + (size_t)n * a.D + c * 8);
    }
    emit(e, sum);
  }
#if HAS_CLUSTERS
  cluster_arrive();
  if (blockIdx.x != 0) return;
  cluster_wait();
#else
  if (!arrives_last(a.counters + 1 + blockIdx.y, gridDim.x, &last_sh)) return;
  for (int i = threadIdx.x; i < num_tok * a.E; i += blockDim.x) logits_sh[i] = load_f32_l2(a.logits + (size_t)t0 * a.E + i);
  __syncthreads();
#endif
  int id = 0;
  float gate = 0.f;
  if (warp < num_tok) {
    choose<N, ANY>(id, gate, a, logits_sh + warp * a.E, free_sh + warp * a.E);
    if (lane < a.K) a.ids[(t0 + warp) * a.K + lane] = id, a.gates[(t0 + warp) * a.K + lane] = gate;
  }
  int* id_sh = (int*)free_sh;
  __syncthreads();
  if (gridDim.y > 1) {
    if (!arrives_last(a.counters, gridDim.y, &last_sh)) return;
    for (int p = threadIdx.x; p < a.T * a.K; p += blockDim.x) id_sh[p] = load_s32_l2(a.ids + p);
  } else if (warp < num_tok && lane < a.K) {
    id_sh[warp * a.K + lane] = id;
  }
  __syncthreads();
  list_experts(a, id_sh, (u32*)router_sh, table_row, total_sh);
}

// Many tokens: the logits are there (linear_w16_n64 of planes of n(x)); a warp a token chooses, the last block lists.
// grid ceil(T / 8), 256 threads, shared 4 * (max(8 E, ceil(T K / 32) E) + max(8 E, T K))
template <int N, bool ANY>
DEV void route_rows(const RouterArgs& a) {
  extern __shared__ float router_sh[];
  __shared__ int total_sh[64], last_sh;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = blockIdx.x * 8 + warp;
  float* free_sh = router_sh + max_int(8, div_up(a.T * a.K, 32)) * a.E;
  u64 table_row[6] = {0, 0, 0, 0, 0, 0};
  if ((int)threadIdx.x < a.E)
#pragma unroll
    for (int i = 0; i < 6; i++) table_row[i] = a.table[(size_t)threadIdx.x * 6 + i];
  dependency_wait();
  dependents_launch();
  if (t < a.T) {
    for (int e = lane; e < a.E; e += 32) router_sh[warp * a.E + e] = a.logits[(size_t)t * a.E + e];
    __syncwarp();
    int id;
    float gate;
    choose<N, ANY>(id, gate, a, router_sh + warp * a.E, free_sh + warp * a.E);
    if (lane < a.K) a.ids[t * a.K + lane] = id, a.gates[t * a.K + lane] = gate;
  }
  if (!arrives_last(a.counters, gridDim.x, &last_sh)) return;
  int* id_sh = (int*)free_sh;
  for (int p = threadIdx.x; p < a.T * a.K; p += blockDim.x) id_sh[p] = load_s32_l2(a.ids + p);
  __syncthreads();
  list_experts(a, id_sh, (u32*)router_sh, table_row, total_sh);
}
extern "C" __global__ void __launch_bounds__(256, 1) router_rows(const __grid_constant__ RouterArgs a) { route_rows<16, true>(a); }

#define ROUTER(NAME, TOKENS, N, ANY) \
  extern "C" __global__ void RUN_CLUSTER __launch_bounds__(256, 1) NAME(const __grid_constant__ RouterArgs a) { route_run<TOKENS, N, ANY>(a); }
ROUTER(router_topk, 4, 16, true)        // anything
ROUTER(router_topk_t4, 4, 4, false)     // E <= 128, select = Top
ROUTER(router_topk_t1, 1, 4, false)     // the same, tokens = 1

// logits = n(x) W', n = RMSNorm or LayerNorm or nothing; experts and gates as in the router's rule; the list of experts in use
//
// Rules: scores = softmax of all logits, or softmax of the chosen ones; the K highest, or the K highest inside the `keep` groups
//   whose best expert is highest (the others count as zero), or two rounds of SparseMixer; renorm divides by the chosen sum;
//   scale last. Equal scores go to the lower index.
// x      [T, D] f32; gain, shift [D] f32; W [E, D] bf16 or f32, 16-byte aligned rows; table [E][6] pointers: gate, up, down,
//        each packed then scale
// out    logits [T, E] f32, ids [T, K] s32, gates [T, K] f32, slots [min(T K, E)], num_slots, pairs [T K] s32 by slot, ascending;
//        normed [T, D] bf16 (natural, or nibble order), or null
// needs  D % 8 == 0, E <= 512, K <= min(E, 32), num_groups <= 32, T K <= 65535; counters: 1 + ceil(T / tokens) ints, zero before the first launch
//
// Launch: grid (ceil(E / 8), ceil(T / tokens)), 256 threads, tokens = 1..4 a block, shared 4 * max(tokens * max(D, E), T K + 3 E).
// The last block of a run of tokens chooses their experts; the last of all writes the list.
// Floors: bytes E D * 2 (0.5 MB for E 128, D 2048); latency decides: one read of x, one arrival, K rounds of a warp maximum.
// Source: src/engine/cpu/route.rs.
#include "common/reduce.cuh"
#include "common/routing.cuh"

struct RouterArgs {
  float* logits;
  int* ids;
  float* gates;
  ExpertSlot* slots;
  int* num_slots;
  int* pairs;
  bf16* normed;
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
  int nibble_order;    // of normed
  int select;          // 0 Top, 1 GroupLimited, 2 SparseMixer
  int softmax_of_chosen;
  int renorm;
  int num_groups, keep_groups;
  float jitter;
  float scale;
  const void* warm;    // bytes to pull into L2 meanwhile, or null
  u64 warm_bytes;
};

static const int EXPERTS_A_LANE = 16;
static const int ROW_CHUNKS = 8;  // 16-byte chunks of a router row that a lane loads ahead

DEV void dot8(float& sum, const float* w, const float* x_sh) {
  const float4 a = *(const float4*)x_sh, b = *(const float4*)(x_sh + 4);
  sum += w[0] * a.x + w[1] * a.y + w[2] * a.z + w[3] * a.w + w[4] * b.x + w[5] * b.y + w[6] * b.z + w[7] * b.w;
}
DEV void unpack8(float* f, const uint4& v) {
#pragma unroll
  for (int i = 0; i < 4; i++) f[2 * i] = bf16_lo(word_at(v, i)), f[2 * i + 1] = bf16_hi(word_at(v, i));
}

DEV void warp_first_max(const float* v, int n_lane, int E, int lane, float& best, int& at) {
  float mine = -INFINITY_F;
#pragma unroll
  for (int i = 0; i < EXPERTS_A_LANE; i++)
    if (i < n_lane) mine = fmaxf(mine, v[i]);
  const u32 key = warp_max_u32(order_key(mine));
  u32 where = 0xffffffffu;
#pragma unroll
  for (int i = EXPERTS_A_LANE - 1; i >= 0; i--)
    if (i < n_lane && lane + 32 * i < E && order_key(v[i]) == key) where = lane + 32 * i;
  at = warp_min_u32(where);
  best = __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// one token, one warp
DEV void choose(const RouterArgs& a, int token, float* group_sh) {
  const int lane = threadIdx.x & 31, n_lane = div_up(a.E, 32);
  float v[EXPERTS_A_LANE], scores[EXPERTS_A_LANE];
#pragma unroll
  for (int i = 0; i < EXPERTS_A_LANE; i++) v[i] = i < n_lane && lane + 32 * i < a.E ? load_f32_l2(a.logits + (size_t)token * a.E + lane + 32 * i) : -INFINITY_F;
  int* ids = a.ids + (size_t)token * a.K;
  float* gates = a.gates + (size_t)token * a.K;

  if (a.select == 2) {
    float open[EXPERTS_A_LANE];
#pragma unroll
    for (int i = 0; i < EXPERTS_A_LANE; i++) open[i] = v[i];
    for (int k = 0; k < a.K; k++) {
      float best;
      int pick;
      warp_first_max(open, n_lane, a.E, lane, best, pick);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < EXPERTS_A_LANE; i++) {
        if (i >= n_lane) continue;
        if ((best - v[i]) / fmaxf(fabsf(v[i]), best) <= 2.f * a.jitter && open[i] > -INFINITY_F) sum += __expf(open[i] - best);
        if (lane + 32 * i == pick) open[i] = -INFINITY_F;
      }
      sum = warp_sum(sum);
      if (lane == 0) ids[k] = pick, gates[k] = a.scale / sum;
    }
    return;
  }

#pragma unroll
  for (int i = 0; i < EXPERTS_A_LANE; i++) scores[i] = v[i];
  if (!a.softmax_of_chosen) {
    float top = -INFINITY_F, sum = 0.f;
#pragma unroll
    for (int i = 0; i < EXPERTS_A_LANE; i++) top = fmaxf(top, v[i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < EXPERTS_A_LANE; i++) {
      if (i >= n_lane) continue;
      scores[i] = lane + 32 * i < a.E ? expf(v[i] - top) : 0.f;
      sum += scores[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < EXPERTS_A_LANE; i++) scores[i] = i < n_lane && lane + 32 * i < a.E ? scores[i] / sum : -INFINITY_F;
  }
  if (a.select == 1) {
    const int size = a.E / a.num_groups;
#pragma unroll
    for (int i = 0; i < EXPERTS_A_LANE; i++)
      if (i < n_lane && lane + 32 * i < a.E) group_sh[lane + 32 * i] = scores[i];
    __syncwarp();
    float best[1] = {-INFINITY_F};
    for (int i = 0; lane < a.num_groups && i < size; i++) best[0] = fmaxf(best[0], group_sh[lane * size + i]);
    u32 kept = 0;
    for (int k = 0; k < a.keep_groups; k++) {
      const u32 key = warp_max_u32(order_key(best[0]));
      const u32 g = warp_min_u32(lane < a.num_groups && order_key(best[0]) == key ? lane : 0xffffffffu);
      kept |= 1u << g;
      if (lane == (int)g) best[0] = -INFINITY_F;
    }
#pragma unroll
    for (int i = 0; i < EXPERTS_A_LANE; i++)
      if (i < n_lane && lane + 32 * i < a.E && !(kept >> ((lane + 32 * i) / size) & 1)) scores[i] = 0.f;
    __syncwarp();
  }
  float gate = 0.f;  // of rank `lane`; K <= 32
  int id = 0;
  for (int k = 0; k < a.K; k++) {
    float best;
    int pick;
    warp_first_max(scores, n_lane, a.E, lane, best, pick);
#pragma unroll
    for (int i = 0; i < EXPERTS_A_LANE; i++)
      if (lane + 32 * i == pick) scores[i] = -INFINITY_F;
    if (lane == k) gate = best, id = pick;
  }
  if (a.softmax_of_chosen) {
    const float top = __shfl_sync(0xffffffffu, gate, 0);
    gate = lane < a.K ? expf(gate - top) : 0.f;
    gate /= warp_sum(gate);
  }
  if (a.renorm) gate /= warp_sum(lane < a.K ? gate : 0.f);
  if (lane < a.K) ids[lane] = id, gates[lane] = gate * a.scale;
}

// one block: experts in ascending order, the pairs of each in ascending order
DEV void list_experts(const RouterArgs& a, int* list_sh) {
  const int num_pairs = a.T * a.K;
  int *id_sh = list_sh, *count_sh = id_sh + num_pairs, *first_sh = count_sh + a.E, *slot_sh = first_sh + a.E;
  for (int p = threadIdx.x; p < num_pairs; p += blockDim.x) id_sh[p] = load_s32_l2(a.ids + p);
  __syncthreads();
  for (int e = threadIdx.x; e < a.E; e += blockDim.x) {
    int count = 0;
    for (int p = 0; p < num_pairs; p++) count += id_sh[p] == e;
    count_sh[e] = count;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    int first = 0, slot = 0;
    for (int base = 0; base < a.E; base += 32) {
      const int e = base + threadIdx.x, count = e < a.E ? count_sh[e] : 0;
      int sum = count;
#pragma unroll
      for (int i = 1; i < 32; i <<= 1) {
        const int other = __shfl_up_sync(0xffffffffu, sum, i);
        if ((int)threadIdx.x >= i) sum += other;
      }
      const u32 active = __ballot_sync(0xffffffffu, count > 0);
      if (e < a.E) first_sh[e] = first + sum - count, slot_sh[e] = slot + __popc(active & ((1u << threadIdx.x) - 1));
      first += __shfl_sync(0xffffffffu, sum, 31);
      slot += __popc(active);
    }
    if (threadIdx.x == 0) *a.num_slots = slot;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.E; e += blockDim.x) {
    if (count_sh[e] == 0) continue;
    ExpertSlot s;
    const u64* row = a.table + (size_t)e * 6;
    s.gate_packed = (const u32*)row[0], s.gate_scale = (const bf16*)row[1];
    s.up_packed = (const u32*)row[2], s.up_scale = (const bf16*)row[3];
    s.down_packed = (const u32*)row[4], s.down_scale = (const bf16*)row[5];
    s.expert = e, s.first = first_sh[e], s.count = count_sh[e], s.reserved = 0;
    ExpertSlot* out = a.slots + slot_sh[e];
    int n = 0;
    for (int p = 0; p < num_pairs && n < s.count; p++) {
      if (id_sh[p] != e) continue;
      a.pairs[s.first + n] = p;
      if (n < 8) out->pair[n] = (u16)p;
      n++;
    }
    out->gate_packed = s.gate_packed, out->gate_scale = s.gate_scale, out->up_packed = s.up_packed, out->up_scale = s.up_scale;
    out->down_packed = s.down_packed, out->down_scale = s.down_scale;
    out->expert = s.expert, out->first = s.first, out->count = s.count, out->reserved = 0;
  }
}

extern "C" __global__ void __launch_bounds__(256) router_topk(const __grid_constant__ RouterArgs a) {
  extern __shared__ float router_sh[];
  __shared__ float scratch_sh[32];
  __shared__ int last_sh;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, lane = threadIdx.x & 31;
  const int e = blockIdx.x * warps + warp, t0 = blockIdx.y * a.tokens, num_tok = min_int(a.tokens, a.T - t0), chunks = a.D / 8;
  const char* w_row = (const char*)a.w + (size_t)min_int(e, a.E - 1) * a.D * (a.w_is_f32 ? 4 : 2);
  uint4 w[ROW_CHUNKS];
  if (!a.w_is_f32) {
#pragma unroll
    for (int i = 0; i < ROW_CHUNKS; i++) w[i] = lane + 32 * i < chunks ? load_streaming(w_row + (size_t)(lane + 32 * i) * 16) : make_uint4(0, 0, 0, 0);
  }
  if (a.warm) {
    const u64 at = ((u64)(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x) * 128, all = (u64)gridDim.x * gridDim.y * blockDim.x * 128;
    for (u64 i = at; i < a.warm_bytes; i += all) prefetch_l2((const char*)a.warm + i);
  }
  dependency_wait();
  dependents_launch();

  for (int n = 0; n < num_tok; n++) {
    const float* x = a.x + (size_t)(t0 + n) * a.D;
    float* x_sh = router_sh + (size_t)n * a.D;
    float mean = 0.f, inv = 1.f, sum = 0.f;
    for (int k = threadIdx.x * 4; k < a.D; k += blockDim.x * 4) {
      const float4 v = *(const float4*)(x + k);
      *(float4*)(x_sh + k) = v;
      sum += a.norm == 2 ? v.x + v.y + v.z + v.w : v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    if (a.norm == 1) inv = rsqrtf(block_sum(sum, scratch_sh) / a.D + a.eps);
    if (a.norm == 2) {
      mean = block_sum(sum, scratch_sh) / a.D;
      float var = 0.f;
      for (int k = threadIdx.x * 4; k < a.D; k += blockDim.x * 4)
        for (int i = 0; i < 4; i++) var += (x_sh[k + i] - mean) * (x_sh[k + i] - mean);
      inv = rsqrtf(block_sum(var, scratch_sh) / a.D + a.eps);
    }
    if (a.norm)
      for (int k = threadIdx.x * 4; k < a.D; k += blockDim.x * 4)
#pragma unroll
        for (int i = 0; i < 4; i++) x_sh[k + i] = (x_sh[k + i] - mean) * inv * a.gain[k + i] + (a.norm == 2 ? a.shift[k + i] : 0.f);
  }
  __syncthreads();
  if (a.normed) {
    const int per = div_up(chunks, (int)gridDim.x), end = min_int((blockIdx.x + 1) * per, chunks);
    for (int n = 0; n < num_tok; n++)
      for (int c = blockIdx.x * per + threadIdx.x; c < end; c += blockDim.x) {
        const float* f = router_sh + (size_t)n * a.D + c * 8;
        uint4 v = make_uint4(bf16_pair(f[0], f[1]), bf16_pair(f[2], f[3]), bf16_pair(f[4], f[5]), bf16_pair(f[6], f[7]));
        if (a.nibble_order) v = nibble_chunk(v);
        *(uint4*)(a.normed + (size_t)(t0 + n) * a.D + c * 8) = v;
      }
  }
  if (e < a.E) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    if (a.w_is_f32) {
      for (int c = lane; c < chunks; c += 32) {
        float f[8];
        *(float4*)f = *(const float4*)(w_row + (size_t)c * 32), *(float4*)(f + 4) = *(const float4*)(w_row + (size_t)c * 32 + 16);
#pragma unroll
        for (int n = 0; n < 4; n++)
          if (n < num_tok) dot8(sum[n], f, router_sh + (size_t)n * a.D + c * 8);
      }
    } else {
#pragma unroll
      for (int i = 0; i < ROW_CHUNKS; i++) {
        const int c = lane + 32 * i;
        if (c >= chunks) break;
        float f[8];
        unpack8(f, w[i]);
#pragma unroll
        for (int n = 0; n < 4; n++)
          if (n < num_tok) dot8(sum[n], f, router_sh + (size_t)n * a.D + c * 8);
      }
      for (int c = lane + 32 * ROW_CHUNKS; c < chunks; c += 32) {
        float f[8];
        unpack8(f, load_streaming(w_row + (size_t)c * 16));
#pragma unroll
        for (int n = 0; n < 4; n++)
          if (n < num_tok) dot8(sum[n], f, router_sh + (size_t)n * a.D + c * 8);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float s = warp_sum(sum[n]);
      if (lane == 0 && n < num_tok) a.logits[(size_t)(t0 + n) * a.E + e] = s;
    }
  }
  if (!arrives_last(a.counters + 1 + blockIdx.y, gridDim.x, &last_sh)) return;
  float* group_sh = router_sh;  // [tokens][E]
  if (warp < num_tok) choose(a, t0 + warp, group_sh + warp * a.E);
  if (gridDim.y > 1) {
    if (!arrives_last(a.counters, gridDim.y, &last_sh)) return;
  } else {
    __threadfence_block();
    __syncthreads();
  }
  list_experts(a, (int*)router_sh);
}

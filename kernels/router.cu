// logits = n(x) W', n = RMSNorm or LayerNorm or nothing; experts and gates as in the router's rule (common/routing.cuh); the list of
// experts in use
//
// x      [T, D] f32; gain, shift [D] f32; W [E, D] bf16 or f32, 16-byte aligned rows; table [E][6] pointers: gate, up, down,
//        each packed then scale
// out    router_logits: logits [T, E] f32; planes of n(x) (common/planes.cuh) in the order of the experts' codes
//        router_rows: ids [T, K] s32, its own or those of a script, gates [T, K] f32; where it is one block, or else router_list: slots
//        [min(T K, E)], num_slots, pairs [T K] s32 by slot, ascending
// needs  D % 8 == 0, D <= 8192, E <= 512, K <= min(E, 32), num_groups <= 32, T K <= 65535
//
// Instances router_logits_t1 and router_logits: a warp an expert, one token or four a block. Launch: grid (ceil(E / 8) or more, ceil(T / tokens)),
//   256 threads, shared 4 * tokens * D + (ahead ? 16 D : 0). Nothing but the block's own sums is waited for: weights arrive before x does.
// router_rows for everything, router_rows_t4 for E <= 128 and the plain K highest: a warp a token chooses. Launch: grid ceil(T / tokens), up to
//   W = 16, t4 32 warps, shared 4 * (ceil4(T K) + E) if that is one block, of a thread an expert at least, and 4 W E more for the first.
// router_list: launch grid E, 256 threads. An expert a block; it counts what experts before it have, so that blocks need not wait for each other.
// Up to four tokens of the plain K highest nothing but router_logits runs: the experts' kernels choose for themselves (DirectRoute).
// Floors: bytes E D * 2 (0.5 MB for E 128, D 2048); latency decides. Source: src/engine/cpu/route.rs.
#include "common/planes.cuh"
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
  const int* script;   // [steps][rows][K] choices made beforehand, for measuring shapes whose weights are random; or null
  int* step;           // launches with it so far
  int steps, rows;
  int T, D;
  int tokens;          // a block
  int w_is_f32;
  int ahead;           // bf16 rows of W wait in shared memory
  int norm;            // 0 none, 1 RMS, 2 Layer
  float eps;
  int bits;            // of the experts' codes: 4, 8 or 16
  int pending;         // the list is not yet what the products take: its length is left below zero
  RouteRule rule;
};

static const int MOST_GROUPS = 64;  // of a row

DEV void dot8(float& sum, const float* w, const float4& a, const float4& b) {
  sum += w[0] * a.x + w[1] * a.y + w[2] * a.z + w[3] * a.w + w[4] * b.x + w[5] * b.y + w[6] * b.z + w[7] * b.w;
}
DEV void unpack8(float* f, const uint4& v) {
#pragma unroll
  for (int i = 0; i < 4; i++) f[2 * i] = bf16_lo(word_at(v, i)), f[2 * i + 1] = bf16_hi(word_at(v, i));
}
// one block, a thread an expert: experts in ascending order, the pairs of each in ascending order; id_sh [T K], below zero up to a multiple of four;
// place_sh [E] free; row: this thread's table entry
DEV void list_experts(const RouterArgs& a, const int* id_sh, u32* place_sh, const u64* row) {
  __shared__ u32 used_sh[32];
  const uint4* ids = (const uint4*)id_sh;
  const int num_pairs = a.T * a.rule.K, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 e = threadIdx.x;
  int first = 0, count = 0;
  if (warp * 32 < a.rule.E)
#pragma unroll 4
    for (int i = 0; i < div_up(num_pairs, 4); i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 id = word_at(ids[i], j);
        first += id < e, count += id == e;
      }
  const u32 used = __ballot_sync(0xffffffffu, count > 0);
  if (lane == 0) used_sh[warp] = used;
  __syncthreads();
  int slot = __popc(used & ((1u << lane) - 1)), total = 0;
#pragma unroll 1
  for (int w = 0; w * 32 < a.rule.E; w++) {
    const int other = __popc(used_sh[w]);
    slot += w < warp ? other : 0, total += other;
  }
  if (threadIdx.x == 0) *a.num_slots = a.pending ? -total : total;
  if (count > 0) {
    ExpertSlot* out = a.slots + slot;
#pragma unroll
    for (int i = 0; i < 6; i += 2) ((ulonglong2*)out)[i / 2] = make_ulonglong2(row[i], row[i + 1]);
    ((int4*)out)[3] = make_int4((int)e, first, count, 0);
    place_sh[e] = (u32)first | (u32)slot << 16;
  }
  __syncthreads();
#pragma unroll 1
  for (int p = threadIdx.x; p < num_pairs; p += blockDim.x) {
    const u32 id = (u32)id_sh[p], place = place_sh[id];
    int n = 0;
#pragma unroll 4
    for (int i = 0; i < p >> 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) n += word_at(ids[i], j) == id;
    for (int i = p & ~3; i < p; i++) n += (u32)id_sh[i] == id;
    a.pairs[(place & 0xffffu) + n] = p;
    ExpertSlot* out = a.slots + (place >> 16);
    if (n < 8) out->pair[n] = (u16)p, out->token[n] = (u16)((u32)p / (u32)a.rule.K);
  }
}

// The norm's factor joins the sums, so that the products need not wait for it; with LayerNorm the mean comes first.
template <int TOKENS>
DEV void logits_run(const RouterArgs& a) {
  extern __shared__ float router_sh[];  // [TOKENS][two halves of each eight][D / 8] float4
  __shared__ float scratch_sh[32], square_sh[TOKENS * MOST_GROUPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t0 = blockIdx.y * TOKENS, num_tok = min_int(TOKENS, a.T - t0), chunks = a.D / 8, e = blockIdx.x * 8 + warp;
  const char* row = (const char*)a.w + (size_t)min_int(e, a.rule.E - 1) * a.D * (a.w_is_f32 ? 4 : 2);
  char* row_sh = (char*)(router_sh + TOKENS * a.D) + (size_t)warp * a.D * 2;  // where `ahead`
  if (a.ahead) {
#pragma unroll 1
    for (int c = lane; c < chunks; c += 32) copy_async_16(row_sh + c * 16, row + c * 16);
    copy_async_commit();
  }
  if (a.norm)
    for (int k = threadIdx.x * 32; k < a.D; k += blockDim.x * 32) prefetch_l2(a.gain + k);
  dependency_wait();
  dependents_launch();

  const int groups = groups_of(a.D);
  float mean[TOKENS];
#pragma unroll
  for (int n = 0; n < TOKENS; n++) mean[n] = 0.f;
  if (a.norm == 2)
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
      if (n >= num_tok) break;
      float sum = 0.f;
      for (int k = threadIdx.x; k < a.D; k += blockDim.x) sum += a.x[(size_t)(t0 + n) * a.D + k];
      mean[n] = block_sum(sum, scratch_sh) / a.D;
    }
#pragma unroll 1
  for (int base = 0; base < groups * 16; base += blockDim.x) {
    const int c = base + threadIdx.x;
    float f[TOKENS][8], gain[8];
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
      const float* x = a.x + (size_t)(t0 + min_int(n, num_tok - 1)) * a.D + c * 8;
#pragma unroll
      for (int i = 0; i < 8; i++) f[n][i] = mean[n];
      if (c < chunks) *(float4*)f[n] = *(const float4*)x, *(float4*)(f[n] + 4) = *(const float4*)(x + 4);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) gain[i] = 1.f;
    if (a.norm && c < chunks) *(float4*)gain = *(const float4*)(a.gain + c * 8), *(float4*)(gain + 4) = *(const float4*)(a.gain + c * 8 + 4);
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
#pragma unroll
      for (int i = 0; i < 8; i++) f[n][i] -= mean[n];
      const float square = group_square(f[n]);
      if ((c & 15) == 0 && (c >> 4) < groups) square_sh[n * MOST_GROUPS + (c >> 4)] = square;
      if (c >= chunks) continue;
#pragma unroll
      for (int i = 0; i < 8; i++) f[n][i] *= gain[i];
      float4* to = (float4*)router_sh + n * 2 * chunks + c;
      to[0] = *(float4*)f[n], to[chunks] = *(float4*)(f[n] + 4);
    }
  }
  __syncthreads();
  float inv[TOKENS];
#pragma unroll
  for (int n = 0; n < TOKENS; n++) inv[n] = a.norm ? inverse_rms(square_sh + n * MOST_GROUPS, groups, a.D, a.eps) : 1.f;
  float sum[TOKENS], bias = 0.f;
#pragma unroll
  for (int n = 0; n < TOKENS; n++) sum[n] = 0.f;
  copy_async_wait<0>();
  __syncwarp();
#pragma unroll (TOKENS == 1 ? 4 : 1)
  for (int c = lane; c - lane < chunks; c += 32) {
    float f[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (c < chunks && a.w_is_f32)
      *(float4*)f = *(const float4*)(row + c * 32), *(float4*)(f + 4) = *(const float4*)(row + c * 32 + 16);
    else if (c < chunks)
      unpack8(f, a.ahead ? *(const uint4*)(row_sh + c * 16) : load_streaming(row + c * 16));
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
      const float4* x = (const float4*)router_sh + n * 2 * chunks + min_int(c, chunks - 1);
      if (TOKENS == 1) {
        const float one = group_dot(f, x[0], x[chunks]);
        sum[n] += __shfl_sync(0xffffffffu, one, 0);
        sum[n] += __shfl_sync(0xffffffffu, one, 16);
      } else {
        dot8(sum[n], f, x[0], x[chunks]);
      }
    }
    if (a.norm == 2 && c < chunks) dot8(bias, f, *(const float4*)(a.shift + c * 8), *(const float4*)(a.shift + c * 8 + 4));
  }
  if (a.norm == 2) bias = warp_sum(bias);
#pragma unroll
  for (int n = 0; n < TOKENS; n++) {
    const float all = TOKENS == 1 ? sum[n] : warp_sum(sum[n]);
    const float s = a.norm == 2 ? fmaf(all, inv[n], bias) : __fmul_rn(all, inv[n]);
    if (lane == 0 && n < num_tok && e < a.rule.E) a.logits[(size_t)(t0 + n) * a.rule.E + e] = without_tag(s);
  }
  // planes: a share of the groups a block, two of them a warp
  auto inv_of = [&](int n) { return n == 0 ? inv[0] : n == 1 ? inv[1 % TOKENS] : n == 2 ? inv[2 % TOKENS] : inv[3 % TOKENS]; };
  const int per = div_up(groups, (int)gridDim.x), begin = blockIdx.x * per, end = min_int(begin + per, groups), pairs = div_up(max_int(end - begin, 0), 2);
#pragma unroll 1
  for (int i = warp; i < num_tok * pairs; i += 8) {
    const int n = i / pairs, c = (begin + 2 * (i - n * pairs)) * 16 + lane;
    float f[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (c < end * 16 && c < chunks) {
      const float4* x = (const float4*)router_sh + n * 2 * chunks + c;
      *(float4*)f = x[0], *(float4*)(f + 4) = x[chunks];
      if (a.norm == 2 || a.bits == 16)
#pragma unroll
        for (int j = 0; j < 8; j++) f[j] = f[j] * inv_of(n) + (a.norm == 2 ? a.shift[c * 8 + j] : 0.f);
    }
    const size_t group = (size_t)(t0 + n) * groups + (c >> 4);
    float* scale = a.x_scale + (size_t)(t0 + n) * scale_row(groups) + (c >> 4);
    if (a.bits == 4) make_block<4>(a.x_q + group * Block<4>::BYTES, scale, c, f, c < end * 16);
    if (a.bits == 8) make_block<8>(a.x_q + group * Block<8>::BYTES, scale, c, f, c < end * 16);
    if (a.bits == 16) make_block<16>(a.x_q + group * Block<16>::BYTES, scale, c, f, c < end * 16);
    if (a.norm == 1 && (a.bits == 4 || a.bits == 8) && c < end * 16 && (c & 15) == 0) *scale *= inv_of(n);
  }
}
extern "C" __global__ void __launch_bounds__(256, 2) router_logits_t1(const __grid_constant__ RouterArgs a) { logits_run<1>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) router_logits(const __grid_constant__ RouterArgs a) { logits_run<4>(a); }

template <int WARPS, int N, bool ANY>
DEV void route_rows(const RouterArgs& a) {
  extern __shared__ float router_sh[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, E = a.rule.E, K = a.rule.K;
  const bool lists = gridDim.x == 1;
  const int padded = div_up(a.T * K, 4) * 4;
  int* id_sh = (int*)router_sh;                              // [padded], and
  u32* place_sh = (u32*)id_sh + padded;                      // [E], where it lists
  float* free_sh = router_sh + (lists ? padded + E : 0);     // [warps][E] where ANY
  u64 table_row[6] = {0, 0, 0, 0, 0, 0};
  if (lists && (int)threadIdx.x < E)
#pragma unroll
    for (int i = 0; i < 6; i++) table_row[i] = a.table[(size_t)threadIdx.x * 6 + i];
  if (lists && (int)threadIdx.x < padded - a.T * K) id_sh[a.T * K + threadIdx.x] = -1;
  const int end = min_int(a.T, (blockIdx.x + 1) * a.tokens), step = a.script ? *a.step : 0;  // as the step before left it
  dependency_wait();
  dependents_launch();
#pragma unroll 1
  for (int t = blockIdx.x * a.tokens + warp; t < end; t += WARPS) {
    float v[N], gate;
    int id;
    const int told = a.script && lane < K ? a.script[((size_t)(step % a.steps) * a.rows + t) * K + lane] : 0;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = lane + 32 * i < E ? a.logits[(size_t)t * E + lane + 32 * i] : -INFINITY_F;
    choose<N, ANY>(id, gate, a.rule, v, free_sh + warp * E);
    if (a.script) id = told;
    if (lane < K) a.ids[t * K + lane] = id, a.gates[t * K + lane] = gate;
    if (lane < K && lists) id_sh[t * K + lane] = id;
    __syncwarp();
  }
  if (!lists) return;
  __syncthreads();
  if (a.script && threadIdx.x == 0) *a.step = step + 1;
  list_experts(a, id_sh, place_sh, table_row);
}
extern "C" __global__ void __launch_bounds__(512, 1) router_rows(const __grid_constant__ RouterArgs a) { route_rows<16, 16, true>(a); }
extern "C" __global__ void __launch_bounds__(1024, 1) router_rows_t4(const __grid_constant__ RouterArgs a) { route_rows<32, 4, false>(a); }

// A warp takes a run of pairs, a lane one of 32, sixteen times as many on their way; below zero behind the end.
template <class Each>
DEV void each_id(const RouterArgs& a, int begin, int end, const Each& each) {
  const int ROWS = 16, lane = threadIdx.x & 31;
#pragma unroll 1
  for (; begin < end; begin += ROWS * 32) {
    int id[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) id[i] = begin + i * 32 + lane < end ? a.ids[begin + i * 32 + lane] : -1;
#pragma unroll
    for (int i = 0; i < ROWS; i++) each(begin + i * 32 + lane, id[i]);
  }
}
extern "C" __global__ void __launch_bounds__(256) router_list(const __grid_constant__ RouterArgs a) {
  const int WARPS = 8, MOST_EXPERTS = 512;
  __shared__ int used_sh[MOST_EXPERTS], before_sh[WARPS], own_sh[WARPS], lower_sh[WARPS], all_sh[WARPS];
  const int e = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u64 pointer = threadIdx.x < 6 ? a.table[(size_t)e * 6 + threadIdx.x] : 0;
  for (int i = threadIdx.x; i < a.rule.E; i += blockDim.x) used_sh[i] = 0;
  dependency_wait();
  dependents_launch();
  __syncthreads();
  const int num_pairs = a.T * a.rule.K, run = div_up(num_pairs, WARPS), begin = warp * run, end = min_int(begin + run, num_pairs);
  int before = 0, own = 0;
  each_id(a, begin, end, [&](int, int id) {
    before += (u32)id < (u32)e, own += id == e;
    if (id >= 0) used_sh[id] = 1;
  });
  __syncthreads();
  int lower = 0, all = 0;
  for (int i = threadIdx.x; i < a.rule.E; i += blockDim.x) all += used_sh[i], lower += i < e ? used_sh[i] : 0;
  before = (int)warp_sum_u32(before), own = (int)warp_sum_u32(own), lower = (int)warp_sum_u32(lower), all = (int)warp_sum_u32(all);
  if (lane == 0) before_sh[warp] = before, own_sh[warp] = own, lower_sh[warp] = lower, all_sh[warp] = all;
  __syncthreads();
  int first = 0, count = 0, slot = 0, total = 0, at = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) first += before_sh[w], count += own_sh[w], slot += lower_sh[w], total += all_sh[w], at += w < warp ? own_sh[w] : 0;
  if (e == 0 && threadIdx.x == 0) {
    *a.num_slots = a.pending ? -total : total;
    if (a.script) *a.step += 1;
  }
  if (count == 0) return;
  ExpertSlot* out = a.slots + slot;
  if (threadIdx.x < 6) ((u64*)out)[threadIdx.x] = pointer;
  if (threadIdx.x == 0) out->expert = e, out->first = first, out->count = count, out->arrival = 0;
  each_id(a, begin, end, [&](int p, int id) {
    const u32 mask = __ballot_sync(0xffffffffu, id == e);
    const int n = at + __popc(mask & ((1u << lane) - 1));
    if (id == e) {
      a.pairs[first + n] = p;
      if (n < 8) out->pair[n] = (u16)p, out->token[n] = (u16)((u32)p / (u32)a.rule.K);
    }
    at += __popc(mask);
  });
}

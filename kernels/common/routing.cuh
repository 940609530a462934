// The choice of experts: the rule for one token, and who runs for which tokens, as a list in memory or found by a block itself.
#pragma once
#include "reduce.cuh"

// Scores = softmax of all logits, or of the chosen ones; the K highest, or the K highest inside the `keep_groups` groups whose best
// expert is highest (the others count as zero), or two rounds of SparseMixer; renorm divides by the chosen sum; scale last. Equal
// scores go to the lower index.
struct RouteRule {
  int E, K;
  int select;  // 0 Top, 1 GroupLimited, 2 SparseMixer
  int softmax_of_chosen;
  int renorm;
  int num_groups, keep_groups;
  float jitter;
  float scale;
};

// One expert that at least one token chose. 96 bytes, aligned to 16.
struct ExpertSlot {
  const u32* gate_packed;  // [F, D / 8]
  const bf16* gate_scale;  // [F, D / G]
  const u32* up_packed;
  const bf16* up_scale;
  const u32* down_packed;  // [D, F / 8]
  const bf16* down_scale;  // [D, F / G]
  int expert;
  int first;     // of its pairs in the list
  int count;     // pairs
  int arrival;   // 0: it is there; else it is on its way, and 1 + its place in Arrivals.pieces
  u16 pair[8];   // the first eight of them: token * K + rank
  u16 token[8];  // and their tokens
};
// pair n of an expert
DEV int slot_pair(const ExpertSlot& slot, const int* pairs, int n) { return n < 8 ? slot.pair[n] : pairs[slot.first + n]; }

// Experts that arrive while the products run (tiers.cu). A list is there once its length is above zero; an expert on its way is there
// once all its pieces are. Launches take turns with two sets of counts, and with two more of what they bring for the layer behind.
static const int MOST_MOVES = 1024;
// Beside the length of a list: the kernel that brings experts has yet to write what later kernels read before they wait. The first half
// of the experts does not end while it is set.
static const int UNSETTLED = 1 << 20;
struct Arrivals {
  const int* pieces;  // [4 sets][2 halves][MOST_MOVES] that are there, from the half on that is read; or null: every list and expert is
                      // there when the kernel before is done
  int* waited;        // [2], from the half on: longest wait of a block in which it had nothing else to do, nanoseconds
  int* through;       // blocks of the first half that have written h; or null: the second reads what a kernel between them makes of it
  int needed;         // pieces of an expert
  int blocks;         // of the first half
};

// The same without a list: every block chooses from the logits. T <= 4, T K <= 32, E <= 128, the plain K highest.
struct DirectRoute {
  const float* logits;  // [T, E], or null: there is a list
  const u64* table;     // [E][6] pointers: gate, up, down, each packed then scale
  int* ids;             // [T, K] and
  float* gates;         // [T, K], written by the first block of moe_gate_up
  RouteRule rule;
  int pad;
};

// Either half of the experts: h[p, f] = silu(W_gate[e] x[t])_f (W_up[e] x[t])_f for every pair p = t K + rank, e the expert of p; or
// out[p, :] = W_down[e] h[p].
struct ExpertsArgs {
  float* out;            // [T K, rows]
  const char* x_q;       // planes of the tokens [T], or of h [T K]
  const float* x_scale;
  const ExpertSlot* slots;
  const int* num_slots;
  const int* pairs;      // [T K], by slot
  DirectRoute direct;    // streaming kernels only
  Arrivals arrivals;     // likewise; with a list only
  int T, K;              // K: experts a token
  int inner, rows;       // of a matrix
  int columns;           // tokens of an expert at a time
  int stages, teams;     // tiles in shared memory, and who takes them; streaming kernels only
};

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

struct NotTold {
  DEV void operator()(int, int) const {}
};
// The same K times over, from the first rank on: id and value of rank `lane`. tell(rank, id) by all lanes as soon as one is known.
template <int N, class Tell>
DEV void take_highest(u32* key, int K, int& id, float& value, const Tell& tell) {
  const int lane = threadIdx.x & 31;
  int at[N];
#pragma unroll
  for (int i = 0; i < N; i++) at[i] = lane + 32 * i;
  // each lane's own in order, the first of equals first
#pragma unroll
  for (int end = N - 1; end > 0; end--)
#pragma unroll
    for (int i = 0; i < end; i++)
      if (key[i] < key[i + 1]) {
        const u32 k = key[i];
        const int a = at[i];
        key[i] = key[i + 1], at[i] = at[i + 1], key[i + 1] = k, at[i + 1] = a;
      }
#pragma unroll 1
  for (int k = 0; k < K; k++) {
    const u32 best = warp_max_u32(key[0]), who = __ballot_sync(0xffffffffu, key[0] == best);
    int pick = __shfl_sync(0xffffffffu, at[0], __ffs(who) - 1);
    if (who & (who - 1)) pick = (int)warp_min_u32(key[0] == best ? at[0] : 0xffffffffu);
    if (lane == k) id = pick, value = key_value(best);
    if (at[0] == pick) {
#pragma unroll
      for (int i = 0; i < N - 1; i++) key[i] = key[i + 1], at[i] = at[i + 1];
      key[N - 1] = 0, at[N - 1] = -1;
    }
    tell(k, pick);
  }
}

// one token, one warp; v: logits of experts lane + 32 i, minus infinity past the last; scratch_sh [E] free, for ANY only; id and gate of
// rank `lane` out; tell as in take_highest, not for ANY
template <int N, bool ANY, class Tell = NotTold>
DEV void choose(int& id, float& gate, const RouteRule& a, float* v, float* scratch_sh, const Tell& tell = Tell()) {
  const int lane = threadIdx.x & 31;
  u32 key[N];
  id = 0, gate = 0.f;
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

  // divided by the chosen sum, a softmax of all is one of the chosen
  const bool of_chosen = a.softmax_of_chosen || (a.renorm && !(ANY && a.select == 1));
  if (!of_chosen) {
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
  if (ANY) {
#pragma unroll 1
    for (int k = 0; k < a.K; k++) {
      float best;
      int pick;
      take_first_max<N>(key, pick, best);
      if (lane == k) gate = best, id = pick;
    }
  } else {
    take_highest<N>(key, a.K, id, gate, tell);
  }
  if (of_chosen) {
    const float top = __shfl_sync(0xffffffffu, gate, 0);
    gate = lane < a.K ? __expf(gate - top) : 0.f;
    gate /= warp_sum(gate);
  }
  if (a.renorm && !of_chosen) gate /= warp_sum(lane < a.K ? gate : 0.f);
  gate *= a.scale;
}

// What a block that chooses for itself keeps of it.
struct DirectShared {
  int id[32];
  float gate[32];
};
// The experts in use as every warp holds them: lane p has the pairs that chose the same expert as pair p; the first of them stands for
// the expert.
struct DirectList {
  int id;
  u32 same, leaders;
  DEV int count() const { return __popc(leaders); }
  // expert and pairs of a slot
  DEV void slot(int n, int& expert, u32& pairs) const {
    u32 rest = leaders;
    for (int i = 0; i < n; i++) rest &= rest - 1;
    const int leader = __ffs(rest) - 1;
    expert = __shfl_sync(0xffffffffu, id, leader), pairs = __shfl_sync(0xffffffffu, same, leader);
  }
};
DEV int nth_bit(u32 mask, int n) {
  for (int i = 0; i < n; i++) mask &= mask - 1;
  return __ffs(mask) - 1;
}
// warps 0 .. T - 1, then a block barrier
DEV void choose_direct(const DirectRoute& a, int T, DirectShared& sh) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (warp >= T) return;
  float v[4], gate;
  int id;
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = lane + 32 * i < a.rule.E ? load_f32_l2(a.logits + warp * a.rule.E + lane + 32 * i) : -INFINITY_F;
  choose<4, false>(id, gate, a.rule, v, 0);
  if (lane < a.rule.K) sh.id[warp * a.rule.K + lane] = id, sh.gate[warp * a.rule.K + lane] = gate;
}
DEV DirectList list_direct(const DirectRoute& a, int T, const DirectShared& sh) {
  const int lane = threadIdx.x & 31, pairs = T * a.rule.K;
  DirectList list;
  list.id = lane < pairs ? sh.id[lane] : -1 - lane;
  list.same = __match_any_sync(0xffffffffu, list.id);
  list.leaders = __ballot_sync(0xffffffffu, lane < pairs && __ffs(list.same) - 1 == lane);
  return list;
}

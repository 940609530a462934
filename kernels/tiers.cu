// Experts that are not all in device memory: which of them take a slot, and their bytes over the link.
//
// A layer's experts are runs of `run_bytes` in page-locked host memory, mapped; S of them are also in slots on the device. The worth
// of an expert is its score, then the step of its last visit, then its index (lower is worth more). In a step with the set R of
// chosen experts, scores decay by s - ceil(s / 2^shift), those of R rise and R is visited; then the missing experts, in order of
// index, take the slots of the least worthy residents outside R that are not permanent, in order of worth. What finds no slot is read
// over the link by the products themselves. An expert without a copy in host memory has an address there at which nothing lies.
//
// table [E][6] and matrices [E][3] hold addresses of either place and follow every move. `ready` is the router's list in another order:
// experts that are there, those that are read over the link, those that move. It is there once *num_slots, which the router left below
// zero, is above; an expert on its way is there once its pieces are counted (Arrivals in common/routing.cuh), first those that the
// first half of the experts reads, of all experts, then the others. So the products may run beside this kernel, and without bytes on
// their way wait for its end.
//
// needs  E <= 1024, 1 <= S <= E, run_bytes, late and late_end % 16 == 0; counter, turn, arrived, waited zero before the first launch
//
// Every block decides for itself from the same state. The first writes list and state, the others copy. The state is read before the
// wait: it is of the last step, many launches ago. The first block counts as one more piece of each expert on its way, so that whoever
// has seen one arrive comes after all that is written here. Launch: one block and as many as fill the link, all resident, 256 threads, shared 8 E + 16 S + 8 ceil(E / 32).
// Floor: missing bytes at the link's rate. Source: src/tiers/policy.rs, src/engine/cuda/slots.rs.
#include "common/routing.cuh"

struct FetchArgs {
  const int* ids;          // [num_pairs] chosen experts, in any order and number
  const ExpertSlot* list;  // or null
  ExpertSlot* ready;
  int* num_slots;          // of both
  int* owner;              // [S] expert of each slot
  int* score;              // [E]
  int* visited;            // [E] step of the last visit, 0: none
  int* now;                // steps so far
  const u64* host;         // [E] addresses of the runs
  u64* table;              // [E][6]
  u64* matrices;           // [E][3] of five words, of which two are addresses
  int* counter;            // blocks that have read the state
  int* turn;               // which half of the next two; the other is cleared for the next launch
  int* arrived;            // [2][2][MOST]: pieces of experts on their way, for the first and the second half
  int* waited;             // [2][2]: longest waits of the products, nanoseconds; null: they do not run beside this kernel
  u64* stats;              // [7]
  u64 slots;               // address of the first slot
  int num_pairs, E, S;
  int permanent;        // slots whose experts never leave, the first
  int run_bytes;
  int late, late_end;      // bytes of a run that only the second half reads
  int shift;               // 0: no decay
  int rise;
  float ns_per_byte;       // of a slower link that is imitated; 0: none
};

static const int MOST = MOST_MOVES, WORDS = MOST / 32;
static const int THREADS = 256, LINE = THREADS * 16, AHEAD = 8;  // 16-byte loads in flight a thread
static const int PIECE = LINE * AHEAD;
enum Stat { CHOSEN, FETCHED, DIRECT, BYTES, BUSY_NS, STALL_NS, LAUNCHES };

DEV void wait_until(u64 time) {
  while (global_time() < time) {
  }
}
DEV void store_v4(void* p, const uint4& v) { asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
DEV bool has(const u32* bits, int i) { return bits[i >> 5] >> (i & 31) & 1; }
DEV int count_of(const u32* bits, int words) {
  int n = 0;
#pragma unroll 1
  for (int w = 0; w < words; w++) n += __popc(bits[w]);
  return n;
}
// bits set before bit i
DEV int rank_of(const u32* bits, int i) { return count_of(bits, i >> 5) + __popc(bits[i >> 5] & ((1u << (i & 31)) - 1)); }
DEV void move_address(u64* address, u64 from, u64 to) {
  if (*address) *address += to - from;
}
// all addresses of expert e
DEV void move_expert(const FetchArgs& a, int e, u64 from, u64 to) {
#pragma unroll 1
  for (int i = 0; i < 6; i++) {
    move_address(a.table + (size_t)e * 6 + i, from, to);
    move_address(a.matrices + ((size_t)e * 3 + i / 2) * 5 + i % 2, from, to);
  }
}

// Bytes are sent in this order: of every move the part that the first half reads, then of every move the other.
DEV int part_bytes(const FetchArgs& a, int part) { return part ? a.late_end - a.late : a.run_bytes - (a.late_end - a.late); }
DEV int part_pieces(const FetchArgs& a, int part) { return div_up(part_bytes(a, part), PIECE); }

extern "C" __global__ void __launch_bounds__(THREADS, 2) tiers_fetch(const __grid_constant__ FetchArgs a) {
  extern __shared__ u64 fetch_sh[];
  const int words = div_up(a.E, 32), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u64 *worth_sh = fetch_sh, *slot_worth_sh = worth_sh + a.E;         // of experts, of the residents of slots: score, then last visit
  u32 *chosen_sh = (u32*)(slot_worth_sh + a.S), *missing_sh = chosen_sh + words;
  u16 *owner_sh = (u16*)(missing_sh + words), *order_sh = owner_sh + a.S;  // slots, least worthy first
  u16 *expert_sh = order_sh + a.S, *slot_sh = expert_sh + a.S;        // of each move
  __shared__ int idle_sh;  // permanent slots whose experts are not chosen
  const u32 now = *a.now + 1;
  const int turn = *a.turn & 1;
#pragma unroll 1
  for (int e = threadIdx.x; e < a.E; e += THREADS) {
    const u32 score = (u32)a.score[e];
    worth_sh[e] = (u64)(score - (a.shift ? (score + (1u << a.shift) - 1) >> a.shift : 0)) << 32 | (u32)a.visited[e];
  }
#pragma unroll 1
  for (int s = threadIdx.x; s < a.S; s += THREADS) owner_sh[s] = (u16)a.owner[s];
#pragma unroll 1
  for (int w = threadIdx.x; w < words; w += THREADS) chosen_sh[w] = 0, missing_sh[w] = 0xffffffffu;
  if (threadIdx.x == 0) idle_sh = 0;
  __syncthreads();
  if (blockIdx.x != 0 && threadIdx.x == 0) add_release(a.counter, 1);
#pragma unroll 1
  for (int s = threadIdx.x; s < a.S; s += THREADS) {
    const int e = owner_sh[s];
    slot_worth_sh[s] = worth_sh[e];
    atomicAnd(missing_sh + (e >> 5), ~(1u << (e & 31)));
  }
  __syncthreads();
#pragma unroll 1
  for (int s = threadIdx.x; s < a.S; s += THREADS) {
    const u64 worth = slot_worth_sh[s];
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < a.S; i++) rank += slot_worth_sh[i] < worth || (slot_worth_sh[i] == worth && owner_sh[i] > owner_sh[s]);
    order_sh[rank] = (u16)s;
  }
  dependency_wait();
  dependents_launch();

  const u64 start = global_time();
#pragma unroll 1
  for (int p = threadIdx.x; p < a.num_pairs; p += THREADS) {
    const int e = a.ids[p];
    atomicOr(chosen_sh + (e >> 5), 1u << (e & 31));
  }
  __syncthreads();
#pragma unroll 1
  for (int w = threadIdx.x; w < words; w += THREADS) missing_sh[w] &= chosen_sh[w];
  __syncthreads();
#pragma unroll 1
  for (int s = threadIdx.x; s < a.permanent; s += THREADS)
    if (!has(chosen_sh, owner_sh[s])) atomicAdd(&idle_sh, 1);
  __syncthreads();
  const int chosen = count_of(chosen_sh, words), missing = count_of(missing_sh, words), there = chosen - missing, moves = min_int(missing, a.S - there - idle_sh);
  if (moves > 0) {
#pragma unroll 1
    for (int e = threadIdx.x; e < a.E; e += THREADS) {
      if (!has(missing_sh, e)) continue;
      const int rank = rank_of(missing_sh, e);
      if (rank < moves) expert_sh[rank] = (u16)e;
    }
    if (warp == 0)
#pragma unroll 1
      for (int base = 0, found = 0; found < moves; base += 32) {
        const int s = base + lane < a.S ? order_sh[base + lane] : 0;
        const u32 free = __ballot_sync(0xffffffffu, base + lane < a.S && s >= a.permanent && !has(chosen_sh, owner_sh[s]));
        const int rank = found + __popc(free & ((1u << lane) - 1));
        if ((free >> lane & 1) && rank < moves) slot_sh[rank] = (u16)s;
        found += __popc(free);
      }
  }
  __syncthreads();

  int* arrived = a.arrived + turn * 2 * MOST;
  const u64 direct_bytes = (u64)(missing - moves) * a.run_bytes;
  if (blockIdx.x != 0) {
#pragma unroll 1
    for (int item = blockIdx.x - 1; item < moves * (part_pieces(a, 0) + part_pieces(a, 1)); item += gridDim.x - 1) {
      const int part = item >= moves * part_pieces(a, 0), index = item - part * moves * part_pieces(a, 0), each = part_pieces(a, part);
      const int m = index / each, first = (index - m * each) * PIECE, bytes = part_bytes(a, part);
      const char* from = (const char*)a.host[expert_sh[m]];
      char* to = (char*)a.slots + (u64)slot_sh[m] * a.run_bytes;
      // where in the run byte b of the part is
      const int mine = first + (int)threadIdx.x * 16, skip_from = part ? 0 : a.late, skip = part ? a.late : part_bytes(a, 1);
      const auto place = [&](int b) { return b < skip_from ? b : b + skip; };
      uint4 v[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (mine + i * LINE < bytes) v[i] = load_streaming(from + place(mine + i * LINE));
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (mine + i * LINE < bytes) store_v4(to + place(mine + i * LINE), v[i]);
      if (a.ns_per_byte > 0.f) {
        const u64 before = part ? (u64)moves * part_bytes(a, 0) : 0;
        wait_until(start + (u64)((double)(direct_bytes + before + (u64)m * bytes + min_int(first + PIECE, bytes)) * a.ns_per_byte));
      }
      __syncthreads();
      if (threadIdx.x == 0) add_release(arrived + part * MOST + m, 1);
    }
    return;
  }

  if (a.ns_per_byte > 0.f) wait_until(start + (u64)((double)direct_bytes * a.ns_per_byte));  // the products read as fast as the link is
  if (a.list) {
#pragma unroll 1
    for (int e = threadIdx.x; e < a.E; e += THREADS) {
      if (!has(chosen_sh, e)) continue;
      const bool lacks = has(missing_sh, e);
      const int rank = rank_of(missing_sh, e), from = rank_of(chosen_sh, e);
      const bool moves_in = lacks && rank < moves;
      const int to = !lacks ? from - rank : moves_in ? there + missing - moves + rank : there + rank - moves;
      const u64 by = moves_in ? a.slots + (u64)slot_sh[rank] * a.run_bytes - a.host[e] : 0;
      const uint4 *source = (const uint4*)(a.list + from);
      uint4* target = (uint4*)(a.ready + to);
#pragma unroll
      for (int i = 0; i < 3; i++) {
        const ulonglong2 two = ((const ulonglong2*)source)[i];
        ((ulonglong2*)target)[i] = make_ulonglong2(two.x ? two.x + by : 0, two.y ? two.y + by : 0);
      }
#pragma unroll
      for (int i = 3; i < 6; i++) target[i] = source[i];
      a.ready[to].arrival = moves_in ? 1 + turn * 2 * MOST + rank : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) store_release(a.num_slots, chosen);
  }

  if (threadIdx.x == 0) {
    while (load_acquire(a.counter) != (int)gridDim.x - 1) {
    }
    *a.counter = 0, *a.turn = turn ^ 1, *a.now = (int)now;
  }
  __syncthreads();
#pragma unroll 1
  for (int m = threadIdx.x; m < moves; m += THREADS) {
    const int e = expert_sh[m], s = slot_sh[m], before = owner_sh[s];
    const u64 slot = a.slots + (u64)s * a.run_bytes;
    a.owner[s] = e;
    move_expert(a, before, slot, a.host[before]);
    move_expert(a, e, a.host[e], slot);
  }
#pragma unroll 1
  for (int e = threadIdx.x; e < a.E; e += THREADS) {
    const bool used = has(chosen_sh, e);
    a.score[e] = (int)(worth_sh[e] >> 32) + (used ? a.rise : 0), a.visited[e] = used ? (int)now : (int)worth_sh[e];
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * MOST; i += THREADS) a.arrived[(turn ^ 1) * 2 * MOST + i] = 0;
  u64 stall = 0;
  if (threadIdx.x == 0 && a.waited) {
    int* before = a.waited + (turn ^ 1) * 2;
    stall = before[0] + before[1], before[0] = before[1] = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * moves; i += THREADS) add_release(arrived + (i < moves ? i : MOST + i - moves), 1);
  if (threadIdx.x != 0) return;
#pragma unroll 1
  for (int i = 0; i < 2 * moves; i++)
    while (load_acquire(arrived + (i < moves ? i : MOST + i - moves)) != 1 + part_pieces(a, i >= moves)) {
    }
  const u64 busy = global_time() - start;
  a.stats[CHOSEN] += chosen, a.stats[FETCHED] += moves, a.stats[DIRECT] += missing - moves, a.stats[BYTES] += (u64)missing * a.run_bytes;
  a.stats[BUSY_NS] += busy, a.stats[STALL_NS] += a.waited ? stall : busy, a.stats[LAUNCHES] += 1;
}

// The host gave some experts a copy in its memory, or took it: their addresses follow, and those of the list. Once an expert a launch.
// One block, 256 threads.
struct PlaceArgs {
  const u64* moves;  // [num_moves][3]: expert, address of its copy from now on, whether it is in a slot
  u64* host;         // [E]
  u64* table;        // [E][6]
  u64* matrices;     // [E][3] of five words
  ExpertSlot* list;  // or null
  const int* num_slots;
  int num_moves;
};
extern "C" __global__ void __launch_bounds__(256) tiers_place(const __grid_constant__ PlaceArgs a) {
  dependency_wait();
  dependents_launch();
  for (int m = threadIdx.x; m < a.num_moves; m += blockDim.x) {
    const u64 e = a.moves[m * 3], from = a.host[e], to = a.moves[m * 3 + 1];
    a.host[e] = to;
    if (a.moves[m * 3 + 2]) continue;
    for (int i = 0; i < 6; i++) {
      move_address(a.table + e * 6 + i, from, to);
      move_address(a.matrices + (e * 3 + i / 2) * 5 + i % 2, from, to);
    }
  }
  __syncthreads();
  const int num = a.list ? abs(*a.num_slots) : 0;  // below zero: `tiers_fetch` follows
  for (int i = threadIdx.x; i < num * 6; i += blockDim.x) {
    const int slot = i / 6, p = i % 6;
    ((u64*)(a.list + slot))[p] = a.table[(size_t)a.list[slot].expert * 6 + p];
  }
}

// Choices that were made beforehand take the place of the router's, for measuring shapes whose weights are random: ids of the step
// and the list of experts in use. Gates stay. One block, 256 threads, T K <= 2048.
struct ReplayArgs {
  const int* script;  // [steps][rows][K]
  int* step;          // launches so far
  int* ids;           // [T, K]
  ExpertSlot* list;
  int* num_slots;
  int* pairs;
  const u64* table;   // [E][6]
  int T, E, K;
  int steps, rows;
  int pending;        // as for the router
};
extern "C" __global__ void __launch_bounds__(256) tiers_replay(const __grid_constant__ ReplayArgs a) {
  __shared__ u16 id_sh[2 * MOST];
  __shared__ u32 chosen_sh[WORDS];
  const int num_pairs = a.T * a.K, words = div_up(a.E, 32);
  dependency_wait();
  dependents_launch();
  const int step = *a.step;
  for (int w = threadIdx.x; w < words; w += blockDim.x) chosen_sh[w] = 0;
  __syncthreads();
  for (int p = threadIdx.x; p < num_pairs; p += blockDim.x) {
    const int e = a.script[(size_t)(step % a.steps) * a.rows * a.K + p];
    id_sh[p] = (u16)e, a.ids[p] = e;
    atomicOr(chosen_sh + (e >> 5), 1u << (e & 31));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.E; e += blockDim.x) {
    if (!has(chosen_sh, e)) continue;
    ExpertSlot* out = a.list + rank_of(chosen_sh, e);
    int first = 0, n = 0;
#pragma unroll 4
    for (int p = 0; p < num_pairs; p++) first += id_sh[p] < e;
#pragma unroll 1
    for (int p = 0; p < num_pairs; p++) {
      if (id_sh[p] != e) continue;
      a.pairs[first + n] = p;
      if (n < 8) out->pair[n] = (u16)p, out->token[n] = (u16)(p / a.K);
      n++;
    }
    u64* pointers = (u64*)out;
#pragma unroll
    for (int i = 0; i < 6; i++) pointers[i] = a.table[(size_t)e * 6 + i];
    out->expert = e, out->first = first, out->count = n, out->arrival = 0;
  }
  if (threadIdx.x == 0) *a.num_slots = (a.pending ? -1 : 1) * count_of(chosen_sh, words), *a.step = step + 1;
}

// Prompts use nearly all experts: they pass through two halves of a ring, one being filled while the other is used. A wave is a
// range of experts: its part of the list, with what is missing where the host put it, rank by rank. One block, 256 threads.
struct WaveArgs {
  const ExpertSlot* list;
  const int* num_slots;
  ExpertSlot* wave;
  int* num_wave;
  const int* owner;  // [S]
  const u64* host;   // [E]
  u64 stage;         // address of the first missing expert of the wave
  int S, E;
  int first, end;
  int run_bytes;
};
extern "C" __global__ void __launch_bounds__(256) tiers_wave(const __grid_constant__ WaveArgs a) {
  __shared__ u32 missing_sh[WORDS];
  __shared__ int before_sh, inside_sh;
  const int words = div_up(a.E, 32);
  dependency_wait();
  dependents_launch();
  for (int w = threadIdx.x; w < words; w += blockDim.x) missing_sh[w] = 0xffffffffu;
  if (threadIdx.x == 0) before_sh = inside_sh = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < a.S; s += blockDim.x) atomicAnd(missing_sh + (a.owner[s] >> 5), ~(1u << (a.owner[s] & 31)));
  const int num = *a.num_slots;
  for (int i = threadIdx.x; i < num; i += blockDim.x) {
    const int e = a.list[i].expert;
    if (e < a.first) atomicAdd(&before_sh, 1);
    if (e >= a.first && e < a.end) atomicAdd(&inside_sh, 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < inside_sh; i += blockDim.x) {
    ExpertSlot slot = a.list[before_sh + i];
    if (has(missing_sh, slot.expert)) {
      const u64 by = a.stage + (u64)(rank_of(missing_sh, slot.expert) - rank_of(missing_sh, a.first)) * a.run_bytes - a.host[slot.expert];
      u64* pointers = (u64*)&slot;
#pragma unroll
      for (int p = 0; p < 6; p++)
        if (pointers[p]) pointers[p] += by;
    }
    a.wave[i] = slot;
  }
  if (threadIdx.x == 0) *a.num_wave = inside_sh;
}

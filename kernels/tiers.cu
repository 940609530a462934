// Experts that are not all in device memory: which of them take a slot, and their bytes over the link.
//
// A layer's experts are runs of `run_bytes` in page-locked host memory, mapped; S of them are also in slots on the device. The worth
// of an expert is its score, then the step of its last visit, then its index (lower is worth more). In a step with the set R of
// chosen experts, scores decay by s - ceil(s / 2^shift), those of R rise and R is visited; then the missing experts, in order of
// index, take the slots of the least worthy residents outside R that are not permanent, in order of worth. What finds no slot is read
// over the link by the products themselves. An expert without a copy in host memory has an address there at which nothing lies.
//
// table [E][6] and matrices [E][3] hold addresses of either place and follow every move; list is the router's (common/routing.cuh).
// needs  E <= 1024, 1 <= S <= E, run_bytes % 16 == 0; counter zero before the first launch
//
// Every block decides for itself from the same state and copies its share; the first writes the state once all have read it. The
// state is read before the wait: it is of the last step, many launches ago. Launch: any grid, 256 threads. Floor: missing bytes at the link's rate. Source: src/tiers/policy.rs, src/engine/cuda/slots.rs.
#include "common/routing.cuh"

struct FetchArgs {
  const int* ids;       // [num_pairs] chosen experts, in any order and number
  ExpertSlot* list;     // or null
  int* owner;           // [S] expert of each slot
  int* score;           // [E]
  int* visited;         // [E] step of the last visit, 0: none
  int* now;             // steps so far
  const u64* host;      // [E] addresses of the runs
  u64* table;           // [E][6]
  u64* matrices;        // [E][3] of five words, of which two are addresses
  int* counter;         // blocks that have read the state
  u64* stats;           // [6]
  u64 slots;            // address of the first slot
  int num_pairs, E, S;
  int permanent;        // slots whose experts never leave, the first
  int run_bytes;
  int shift;            // 0: no decay
  int rise;
  float ns_per_byte;    // of a slower link that is imitated; 0: none
};

static const int MOST = 1024, WORDS = MOST / 32;
static const u64 HELD = ~0ull;  // worth of a slot whose expert is chosen or permanent
static const int AHEAD = 8;     // 16-byte loads in flight a thread
enum Stat { CHOSEN, FETCHED, DIRECT, BYTES, BUSY_NS, LAUNCHES };

DEV u64 global_time() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
DEV void wait_until(u64 time) {
  while (global_time() < time) {
  }
}
DEV void arrive(int* counter) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }
DEV int load_acquire(const int* p) {
  int r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
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

extern "C" __global__ void __launch_bounds__(256, 2) tiers_fetch(const __grid_constant__ FetchArgs a) {
  __shared__ u32 chosen_sh[WORDS], missing_sh[WORDS];
  __shared__ u64 worth_sh[MOST], slot_worth_sh[MOST];     // of experts, of the residents of slots: score, then last visit
  __shared__ u16 owner_sh[MOST], expert_sh[MOST], slot_sh[MOST];
  __shared__ int free_sh;                                 // slots that may change hands
  const int words = div_up(a.E, 32);
  const u32 now = *a.now + 1;
#pragma unroll 1
  for (int e = threadIdx.x; e < a.E; e += blockDim.x) {
    const u32 score = (u32)a.score[e];
    worth_sh[e] = (u64)(score - (a.shift ? (score + (1u << a.shift) - 1) >> a.shift : 0)) << 32 | (u32)a.visited[e];
  }
#pragma unroll 1
  for (int s = threadIdx.x; s < a.S; s += blockDim.x) owner_sh[s] = (u16)a.owner[s];
#pragma unroll 1
  for (int w = threadIdx.x; w < words; w += blockDim.x) chosen_sh[w] = 0;
  if (threadIdx.x == 0) free_sh = 0;
  __syncthreads();
  if (blockIdx.x != 0 && threadIdx.x == 0) arrive(a.counter);
  dependency_wait();
  dependents_launch();
  const u64 start = global_time();
#pragma unroll 1
  for (int p = threadIdx.x; p < a.num_pairs; p += blockDim.x) {
    const int e = a.ids[p];
    atomicOr(chosen_sh + (e >> 5), 1u << (e & 31));
  }
  __syncthreads();
#pragma unroll 1
  for (int w = threadIdx.x; w < words; w += blockDim.x) missing_sh[w] = chosen_sh[w];
#pragma unroll 1
  for (int e = threadIdx.x; e < a.E; e += blockDim.x)
    if (has(chosen_sh, e)) worth_sh[e] = ((worth_sh[e] >> 32) + (u32)a.rise) << 32 | now;
  __syncthreads();
#pragma unroll 1
  for (int s = threadIdx.x; s < a.S; s += blockDim.x) {
    const int e = owner_sh[s];
    const bool held = has(chosen_sh, e);
    if (held) atomicAnd(missing_sh + (e >> 5), ~(1u << (e & 31)));
    const bool stays = held || s < a.permanent;
    slot_worth_sh[s] = stays ? HELD : worth_sh[e];
    if (!stays) atomicAdd(&free_sh, 1);
  }
  __syncthreads();
  const int chosen = count_of(chosen_sh, words), missing = count_of(missing_sh, words), moves = min_int(missing, free_sh);
  if (moves > 0) {
#pragma unroll 1
    for (int e = threadIdx.x; e < a.E; e += blockDim.x) {
      if (!has(missing_sh, e)) continue;
      const int rank = rank_of(missing_sh, e);
      if (rank < moves) expert_sh[rank] = (u16)e;
    }
#pragma unroll 1
    for (int s = threadIdx.x; s < a.S; s += blockDim.x) {
      const u64 worth = slot_worth_sh[s];
      if (worth == HELD) continue;
      int rank = 0;
#pragma unroll 4
      for (int i = 0; i < a.S; i++) rank += slot_worth_sh[i] < worth || (slot_worth_sh[i] == worth && owner_sh[i] > owner_sh[s]);
      if (rank < moves) slot_sh[rank] = (u16)s;
    }
  }
  __syncthreads();

  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int m = threadIdx.x; m < moves; m += blockDim.x) {
      const int e = expert_sh[m], s = slot_sh[m], before = owner_sh[s];
      const u64 slot = a.slots + (u64)s * a.run_bytes;
      move_expert(a, before, slot, a.host[before]);
      move_expert(a, e, a.host[e], slot);
      if (a.list) {
        u64* pointers = (u64*)(a.list + rank_of(chosen_sh, e));
#pragma unroll
        for (int i = 0; i < 6; i++) pointers[i] = a.table[(size_t)e * 6 + i];
      }
    }
  }

  const int line = blockDim.x * 16, piece = line * AHEAD, pieces = div_up(a.run_bytes, piece);
#pragma unroll 1
  for (int item = blockIdx.x; item < moves * pieces; item += gridDim.x) {
    const int m = item / pieces, first = (item - m * pieces) * piece + threadIdx.x * 16;
    const char* from = (const char*)a.host[expert_sh[m]] + first;
    char* to = (char*)a.slots + (u64)slot_sh[m] * a.run_bytes + first;
    if (a.ns_per_byte > 0.f) wait_until(start + (u64)((float)item * piece * a.ns_per_byte));
    uint4 v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (first + i * line < a.run_bytes) v[i] = load_streaming(from + i * line);
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (first + i * line < a.run_bytes) store_v4(to + i * line, v[i]);
  }

  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) {
    while (load_acquire(a.counter) != (int)gridDim.x - 1) {
    }
    *a.counter = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (int m = threadIdx.x; m < moves; m += blockDim.x) a.owner[slot_sh[m]] = expert_sh[m];
#pragma unroll 1
  for (int e = threadIdx.x; e < a.E; e += blockDim.x) a.score[e] = (int)(worth_sh[e] >> 32), a.visited[e] = (int)worth_sh[e];
  if (threadIdx.x == 0) {
    const u64 bytes = (u64)missing * a.run_bytes;
    if (a.ns_per_byte > 0.f) wait_until(start + (u64)((double)bytes * a.ns_per_byte));
    *a.now = (int)now;
    a.stats[CHOSEN] += chosen, a.stats[FETCHED] += moves, a.stats[DIRECT] += missing - moves;
    a.stats[BYTES] += bytes, a.stats[BUSY_NS] += global_time() - start, a.stats[LAUNCHES] += 1;
  }
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
  const int num = a.list ? *a.num_slots : 0;
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
    out->expert = e, out->first = first, out->count = n, out->reserved = 0;
  }
  if (threadIdx.x == 0) *a.num_slots = count_of(chosen_sh, words), *a.step = step + 1;
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

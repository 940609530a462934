// Experts that are not all in device memory: which of them take a slot, and their bytes over the link.
//
// A layer's experts are runs of `run_bytes` in page-locked host memory, mapped; S of them are also in slots on the device. The worth
// of an expert is its score, then the step of its last visit, then its index (lower is worth more). In a step with the set R of
// chosen experts, scores decay by s - ceil(s / 2^shift), those of R rise and R is visited; then the missing experts, in order of
// index, take the slots of the least worthy residents outside R that are not permanent, in order of worth. What finds no slot is read
// over the link by the products themselves. An expert without a copy in host memory has an address there at which nothing lies.
//
// table [E][6] and matrices [E][3] hold addresses of either place and follow every move. `ready` is the router's list in another order:
// experts that are there, those that are read over the link, those on their way from the layer before, those that move. It is there once
// *num_slots, which the router left below zero, is above; an expert on its way is there once its pieces are counted (Arrivals in
// common/routing.cuh), first those that the first half of the experts reads, of all experts, then the others. So the products may run beside
// this kernel. All that is written but bytes is there once *num_slots has lost UNSETTLED.
//
// Ahead: the layer behind is given what it will probably want, as far as its experts are missing there: the highest logits of its router on
// this layer's input, or choices made beforehand. They take slots as above, of the least worthy that nobody wants, at most `most_ahead` of
// them. tiers_ahead brings them, in a branch of its own, for kernels that wait for their dependency wait for all that began before it, so
// that nothing among them may last longer. It begins beside this kernel and asks for its first bytes once this one has asked for its last.
// Scores do not change. Until the layer's own launch has seen who is on the way, nobody else takes these slots.
//
// needs  E <= 1024, 1 <= S <= E, run_bytes, late and late_end % 16 == 0; counter, launches, arrived, waited, sets zero before the first
//        launch; T K <= 256 and most_ahead <= 32 for what comes ahead; sets taken in turn, by as many blocks with as many stages each time
//
// Every block decides for itself from the same state. The first writes list and state, the others copy. The state is read before the
// wait: it is of the launch for the layer before, which the products behind that have seen settled. Many blocks copy by registers; where others
// bring experts ahead, from sm_90, a few threads of a few blocks do, through shared memory. Those have multiprocessors of their own, of either kernel: a
// fence waits for all that the copies of its multiprocessor have in flight over the link, and nobody waits for room.
// tiers_ahead: from sm_90, as many blocks without the first, of 256 threads, shared all that a block may have, stages * 16384 at least.
// Launch: one block and as many as fill the link, all resident, 256 threads, shared stages * 16384 + 12 E + 16 S + 12 ceil(E / 32), of the
// larger of both layers, or all that a block may have where stages > 0; stages <= 8, 0: by registers.
// Floor: missing bytes at the link's rate. Source: src/tiers/policy.rs, src/engine/cuda/slots.rs.
#include "common/routing.cuh"
#include "common/stream.cuh"

// Slots of a layer.
struct TierSlots {
  int* owner;           // [S] expert of each
  int* score;           // [E]
  int* visited;         // [E] step of the last visit, 0: none
  const u64* host;      // [E] addresses of the runs
  u64* table;           // [E][6]
  u64* matrices;        // [E][3] of five words, of which two are addresses
  u64 slots;            // address of the first
  int E, S;
  int permanent;        // slots whose experts never leave, the first
  int run_bytes;
  int late, late_end;   // bytes of a run that only the second half reads
};
static const int MOST_AHEAD = 32, MOST_GUESSES = 256;
// Experts that are brought for the layer behind. Numbers of all launches so far, which may pass 2^32.
struct AheadSet {
  int count;
  int blocks;           // of tiers_ahead
  u32 named;            // launches that have filled it
  u32 asked;            // their threads that have asked for the last of what they themselves bring
  u32 started, done;    // blocks of tiers_ahead
  u32 finished;         // launches of it
  int pad;
  u64 link_from, link_free;  // when a link that is imitated begins with them, and when it has sent them
  int expert[MOST_AHEAD];
  u64 from[MOST_AHEAD], to[MOST_AHEAD];

  DEV static bool reaches(const u32* number, u32 goal) { return (int)((u32)load_acquire((const int*)number) - goal) >= 0; }
  DEV bool all_started() const { return reaches(&started, named * blocks); }
  DEV bool all_done() const { return reaches(&finished, named); }
};
struct FetchArgs {
  const int* ids;          // [num_pairs] chosen experts, in any order and number
  const ExpertSlot* list;  // or null
  ExpertSlot* ready;
  int* num_slots;          // of both
  int* now;                // steps of this layer so far
  int* counter;            // blocks that have read the state
  int* launches;           // so far; their parity says which of the next two is whose
  int* arrived;            // [2][2][MOST]: pieces of experts on their way, for the first and the second half; and as much of those ahead
  int* waited;             // [2]: longest waits of the products before, nanoseconds; null: they do not run beside this kernel
  int* through;            // as in Arrivals; or null
  AheadSet* sets;          // [2]
  u64* stats;              // [9]
  TierSlots here;
  TierSlots next;          // E = 0: nothing is brought ahead
  const float* logits;     // [T, E] of the layer behind; or null
  const int* script;       // [steps][rows][K]: then these are its choices
  const int* step;         // and its steps so far
  int T, K, steps, rows;
  int most_ahead;
  int set;                 // that is filled for the layer behind
  int before;              // what came for this layer is in the other one
  int ahead_blocks;        // that will bring it
  int num_pairs;
  int shift;               // 0: no decay
  int rise;
  int stages;              // of 16 KB in shared memory that bytes pass through
  float ns_per_byte;       // of a slower link that is imitated; 0: none
};

static const int MOST = MOST_MOVES, WORDS = MOST / 32;
static const int THREADS = 256, LINE = THREADS * 16, LINES = 4;  // 16-byte loads in flight a thread
static const int PIECE = LINE * LINES, MOST_STAGES = 8;
enum Stat { CHOSEN, FETCHED, DIRECT, BYTES, BUSY_NS, STALL_NS, LAUNCHES, AHEAD, USED };

DEV void wait_until(u64 time) {
  while (global_time() < time) {
  }
}
DEV void store_v4(void* p, const uint4& v) { asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
DEV bool has(const u32* bits, int i) { return bits[i >> 5] >> (i & 31) & 1; }
DEV void add_bit(u32* bits, int i) { atomicOr(bits + (i >> 5), 1u << (i & 31)); }
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
// Address i of 12 that a move changes: six of the expert that leaves the slot, six of the one that takes it.
DEV void move_addresses(const TierSlots& a, int i, int leaves, int comes, u64 slot) {
  const int e = i < 6 ? leaves : comes, p = i < 6 ? i : i - 6;
  const u64 host = a.host[e], from = i < 6 ? slot : host, to = i < 6 ? host : slot;
  move_address(a.table + (size_t)e * 6 + p, from, to);
  move_address(a.matrices + ((size_t)e * 3 + p / 2) * 5 + p % 2, from, to);
}

// Bytes are sent in this order: of every move the part that the first half reads, then of every move the other.
DEV int part_bytes(const TierSlots& a, int part) { return part ? a.late_end - a.late : a.run_bytes - (a.late_end - a.late); }
DEV int part_pieces(const TierSlots& a, int part) { return div_up(part_bytes(a, part), PIECE); }

// What a block knows of a layer, in shared memory.
struct Known {
  u64 *worth, *slot_worth;             // of experts, of the residents of slots: score, then last visit
  u32 *chosen, *missing, *flying;      // of experts: wanted, wanted and neither there nor on their way, on their way
  u16 *owner, *order, *expert, *slot;  // of slots; slots, least worthy first; of each move
  int words;

  DEV Known(void* at, const TierSlots& a) : words(div_up(a.E, 32)) {
    worth = (u64*)at, slot_worth = worth + a.E;
    chosen = (u32*)(slot_worth + a.S), missing = chosen + words, flying = missing + words;
    owner = (u16*)(flying + words), order = owner + a.S, expert = order + a.S, slot = expert + a.S;
  }
  // ends with a barrier
  DEV void read(const TierSlots& a, int shift) const {
#pragma unroll 1
    for (int e = threadIdx.x; e < a.E; e += THREADS) {
      const u32 score = (u32)load_s32_l2(a.score + e);
      worth[e] = (u64)(score - (shift ? (score + (1u << shift) - 1) >> shift : 0)) << 32 | (u32)load_s32_l2(a.visited + e);
    }
#pragma unroll 1
    for (int s = threadIdx.x; s < a.S; s += THREADS) owner[s] = (u16)load_s32_l2(a.owner + s);
#pragma unroll 1
    for (int w = threadIdx.x; w < words; w += THREADS) chosen[w] = flying[w] = 0, missing[w] = 0xffffffffu;
    __syncthreads();
#pragma unroll 1
    for (int s = threadIdx.x; s < a.S; s += THREADS) {
      const int e = owner[s];
      slot_worth[s] = worth[e];
      atomicAnd(missing + (e >> 5), ~(1u << (e & 31)));
    }
    __syncthreads();
#pragma unroll 1
    for (int s = threadIdx.x; s < a.S; s += THREADS) {
      const u64 mine = slot_worth[s];
      int rank = 0;
#pragma unroll 4
      for (int i = 0; i < a.S; i++) rank += slot_worth[i] < mine || (slot_worth[i] == mine && owner[i] > owner[s]);
      order[rank] = (u16)s;
    }
    __syncthreads();
  }
  // whether the expert of a slot may leave it
  DEV bool leaves(const TierSlots& a, int s) const { return s >= a.permanent && !has(chosen, owner[s]) && !has(flying, owner[s]); }
};

// Where in a run byte `b` of a part is, and how many bytes follow it up to `end` without a gap.
DEV int place_of(const TierSlots& a, int part, int b) { return part ? a.late + b : b < a.late ? b : b + a.late_end - a.late; }
DEV int unbroken(const TierSlots& a, int part, int b, int end) { return part || b >= a.late ? end - b : min_int(end, a.late) - b; }

// A piece that this block brings.
struct Piece {
  const char* from;
  char* to;
  int m, part;
  int first, end;  // bytes of the part
};
// Moves of experts, and this block's share of their pieces: every `step`-th from `mine` on. Nothing counts as arrived before an imitated
// link, free from `free` on, has sent it and what comes before.
struct Moves {
  const TierSlots& a;
  int moves, mine, step;
  const u64 *from_sh, *to_sh;
  int* arrived;
  u64 free;
  float ns_per_byte;

  DEV int items() const { return moves * (part_pieces(a, 0) + part_pieces(a, 1)); }
  DEV Piece piece(int item) const {
    Piece p;
    const int early = moves * part_pieces(a, 0);
    p.part = item >= early;
    const int index = item - p.part * early, each = part_pieces(a, p.part);
    p.m = index / each, p.first = (index - p.m * each) * PIECE, p.end = min_int(p.first + PIECE, part_bytes(a, p.part));
    p.from = (const char*)from_sh[p.m], p.to = (char*)to_sh[p.m];
    return p;
  }
  // by one thread that has seen the bytes written
  DEV void count(const Piece& p) const {
    if (ns_per_byte > 0.f) wait_until(free + (u64)((double)((p.part ? (u64)moves * part_bytes(a, 0) : 0) + (u64)p.m * part_bytes(a, p.part) + p.end) * ns_per_byte));
    add_release(arrived + p.part * MOST + p.m, 1);
  }
  // By registers.
  DEV void copy() const {
#pragma unroll 1
    for (int item = mine; item < items(); item += step) {
      const Piece p = piece(item);
      const int at = p.first + (int)threadIdx.x * 16;
      uint4 v[LINES];
#pragma unroll
      for (int i = 0; i < LINES; i++)
        if (at + i * LINE < p.end) v[i] = load_streaming(p.from + place_of(a, p.part, at + i * LINE));
#pragma unroll
      for (int i = 0; i < LINES; i++)
        if (at + i * LINE < p.end) store_v4(p.to + place_of(a, p.part, at + i * LINE), v[i]);
      __syncthreads();
      if (threadIdx.x == 0) count(p);
    }
  }
#if __CUDA_ARCH__ >= 900
  // Through `stages` of 16 KB at stage_sh; full_sh: as many barriers, not used yet. A thread of each of the first warps has a stage and a share
  // of the block's pieces: counting a piece takes as long as sending it. Each adds to `asked`, if there is one, once it has asked for its last.
  DEV void copy_through(char* stage_sh, u64* full_sh, int stages, u32* asked) const {
    const int warp = threadIdx.x >> 5;
    if (warp >= stages || (threadIdx.x & 31) != 0) return;
    const Moves own{a, moves, mine * stages + warp, step * stages, from_sh, to_sh, arrived, free, ns_per_byte};
    own.copy_alone(stage_sh + warp * PIECE, full_sh + warp, asked);
  }
  DEV void copy_alone(char* stage_sh, u64* full_sh, u32* asked) const {
    const int num = (max_int(items() - mine, 0) + step - 1) / step;
    const auto ask = [&](int n) {
      if (n < num) {
        const Piece p = piece(mine + n * step);
        stream_expect_one(full_sh, p.end - p.first);
#pragma unroll 1
        for (int b = p.first; b < p.end;) {
          const int bytes = unbroken(a, p.part, b, p.end);
          bulk_load(full_sh, stage_sh + (b - p.first), p.from + place_of(a, p.part, b), bytes);
          b += bytes;
        }
      }
      if (asked && n == max_int(num - 1, 0)) atomicAdd(asked, 1u);
    };
    ask(0);
#pragma unroll 1
    for (int n = 0; n < num; n++) {
      const Piece p = piece(mine + n * step);
      barrier_wait(full_sh, n & 1);
#pragma unroll 1
      for (int b = p.first; b < p.end;) {
        const int bytes = unbroken(a, p.part, b, p.end);
        bulk_store(p.to + place_of(a, p.part, b), stage_sh + (b - p.first), bytes);
        b += bytes;
      }
      bulk_commit();
      bulk_read_wait();  // the stage may be filled again
      if (n + 1 < num) ask(n + 1);
      if (n > 0) bulk_wait<1>(), count(piece(mine + (n - 1) * step));
    }
    bulk_wait<0>();
    if (num > 0) count(piece(mine + (num - 1) * step));
  }
#endif
};
// By the first block: who is brought for the layer behind, once an imitated link is free.
DEV void look_ahead(const FetchArgs& a, void* known_sh, u64 free) {
  const TierSlots& next = a.next;
  __shared__ u16 guess_sh[MOST_GUESSES];
  __shared__ int count_sh;
  AheadSet& set = a.sets[a.set];
  int* arrived = a.arrived + (2 + a.set) * 2 * MOST;
  const Known known(known_sh, next);
  float* logit_sh = (float*)((char*)known_sh + 8 * next.E + 16 * next.S + 12 * known.words);
  // whoever brought what was in it is done
  if (threadIdx.x == 0)
    while (!set.all_done()) {
    }
  known.read(next, a.shift);
  const int guesses = a.T * a.K;
  if (a.script) {
    const int* choices = a.script + (size_t)(load_s32_l2(a.step) % a.steps) * a.rows * a.K;
#pragma unroll 1
    for (int p = threadIdx.x; p < guesses; p += THREADS) guess_sh[p % a.K * a.T + p / a.K] = (u16)choices[p];
    __syncthreads();
  } else {
#pragma unroll 1
    for (int t = 0; t < a.T; t++) {
#pragma unroll 1
      for (int e = threadIdx.x; e < next.E; e += THREADS) logit_sh[e] = load_f32_l2(a.logits + (size_t)t * next.E + e);
      __syncthreads();
#pragma unroll 1
      for (int e = threadIdx.x; e < next.E; e += THREADS) {
        const float mine = logit_sh[e];
        int rank = 0;
#pragma unroll 8
        for (int i = 0; i < next.E; i++) rank += logit_sh[i] > mine || (logit_sh[i] == mine && i < e);
        if (rank < a.K) guess_sh[rank * a.T + t] = (u16)e;
      }
      __syncthreads();
    }
  }
#pragma unroll 1
  for (int p = threadIdx.x; p < guesses; p += THREADS) add_bit(known.chosen, guess_sh[p]);
  __syncthreads();
  if (threadIdx.x == 0) {
    int n = 0, place = 0;
#pragma unroll 1
    for (int p = 0; p < guesses && n < a.most_ahead; p++) {
      const int e = guess_sh[p];
      if (!has(known.missing, e)) continue;
      while (place < next.S && !known.leaves(next, known.order[place])) place++;
      if (place == next.S) break;
      known.missing[e >> 5] &= ~(1u << (e & 31));
      known.expert[n] = (u16)e, known.slot[n++] = known.order[place++];
    }
    count_sh = n, set.count = n, set.blocks = a.ahead_blocks;
    set.link_from = free, set.link_free = free + (u64)((double)((u64)n * next.run_bytes) * a.ns_per_byte);
  }
  __syncthreads();
  const int count = count_sh;
#pragma unroll 1
  for (int i = threadIdx.x; i < 12 * count; i += THREADS) move_addresses(next, i % 12, known.owner[known.slot[i / 12]], known.expert[i / 12], next.slots + (u64)known.slot[i / 12] * next.run_bytes);
#pragma unroll 1
  for (int m = threadIdx.x; m < count; m += THREADS) {
    const int e = known.expert[m], s = known.slot[m];
    next.owner[s] = e;
    set.expert[m] = e, set.from[m] = next.host[e], set.to[m] = next.slots + (u64)s * next.run_bytes;
    arrived[m] = arrived[MOST + m] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release((int*)&set.named, (int)(set.named + 1));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) tiers_fetch(const __grid_constant__ FetchArgs a) {
  extern __shared__ __align__(128) char fetch_sh[];
  __shared__ u64 full_sh[MOST_STAGES];
  __shared__ int idle_sh;  // slots that nobody may take whose experts are not chosen
  const TierSlots& here = a.here;
  void* known_sh = fetch_sh + a.stages * PIECE;
  const Known known(known_sh, here);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, words = known.words;
  const u32 now = load_s32_l2(a.now) + 1;
  const int launches = load_s32_l2(a.launches), turn = launches & 1;
  if (threadIdx.x == 0) idle_sh = 0;
  if ((int)threadIdx.x < a.stages) barrier_init(full_sh + threadIdx.x, 1);
  barrier_init_done();
  known.read(here, a.shift);
  if (blockIdx.x != 0 && threadIdx.x == 0) add_release(a.counter, 1);
  dependency_wait();
  const AheadSet& before = a.sets[a.set ^ 1];
  // The products wait for what they bring, and may take all room that is left. The first thread of a block that lets them start does so
  // for all of it, hence the barrier.
  if (a.before) {
    if (blockIdx.x == 0 && threadIdx.x == 0)
      while (!before.all_started()) {
      }
    __syncthreads();
  }
  dependents_launch();

  const int flying = a.before ? before.count : 0;
  int waits[2] = {0, 0};
  if (blockIdx.x == 0 && threadIdx.x == 0 && a.waited) waits[0] = load_s32_l2(a.waited), waits[1] = load_s32_l2(a.waited + 1), a.waited[0] = a.waited[1] = 0;
  u64 start = global_time();
  const u64 began = start;
  if (flying && a.ns_per_byte > 0.f && before.link_free > start) start = before.link_free;
#pragma unroll 1
  for (int p = threadIdx.x; p < a.num_pairs; p += THREADS) add_bit(known.chosen, a.ids[p]);
#pragma unroll 1
  for (int i = threadIdx.x; i < flying; i += THREADS) add_bit(known.flying, before.expert[i]);
  __syncthreads();
#pragma unroll 1
  for (int w = threadIdx.x; w < words; w += THREADS) known.missing[w] &= known.chosen[w];
#pragma unroll 1
  for (int s = threadIdx.x; s < here.S; s += THREADS)
    if (!has(known.chosen, known.owner[s]) && !known.leaves(here, s)) atomicAdd(&idle_sh, 1);
  __syncthreads();
  const int chosen = count_of(known.chosen, words), missing = count_of(known.missing, words), there = chosen - missing, moves = min_int(missing, here.S - there - idle_sh);
  if (moves > 0) {
#pragma unroll 1
    for (int e = threadIdx.x; e < here.E; e += THREADS) {
      if (!has(known.missing, e)) continue;
      const int rank = rank_of(known.missing, e);
      if (rank < moves) known.expert[rank] = (u16)e;
    }
    if (warp == 0)
#pragma unroll 1
      for (int base = 0, found = 0; found < moves; base += 32) {
        const int s = base + lane < here.S ? known.order[base + lane] : 0;
        const u32 free = __ballot_sync(0xffffffffu, base + lane < here.S && known.leaves(here, s));
        const int rank = found + __popc(free & ((1u << lane) - 1));
        if ((free >> lane & 1) && rank < moves) known.slot[rank] = (u16)s;
        found += __popc(free);
      }
  }
  __syncthreads();

  int* arrived = a.arrived + turn * 2 * MOST;
  const u64 direct_bytes = (u64)(missing - moves) * here.run_bytes, direct_sent = start + (u64)((double)direct_bytes * a.ns_per_byte);
  if (blockIdx.x != 0) {
    u64 *from_sh = known.worth, *to_sh = known.slot_worth;
#pragma unroll 1
    for (int m = threadIdx.x; m < moves; m += THREADS) from_sh[m] = here.host[known.expert[m]], to_sh[m] = here.slots + (u64)known.slot[m] * here.run_bytes;
    __syncthreads();
    const Moves own{here, moves, (int)blockIdx.x - 1, (int)gridDim.x - 1, from_sh, to_sh, arrived, direct_sent, a.ns_per_byte};
#if __CUDA_ARCH__ >= 900
    if (a.stages) return own.copy_through(fetch_sh, full_sh, a.stages, a.next.E ? &a.sets[a.set].asked : 0);
#endif
    return own.copy();
  }

  if (a.ns_per_byte > 0.f) wait_until(direct_sent);  // the products read as fast as the link is
  if (!a.waited && flying && threadIdx.x == 0)
    while (!before.all_done()) {  // who waits for this kernel does not wait for that one
    }
  int used = 0;
#pragma unroll 1
  for (int i = 0; i < flying; i++) used += has(known.chosen, before.expert[i]);
  if (a.list) {
    const int present = there - used, direct = missing - moves;
#pragma unroll 1
    for (int e = threadIdx.x; e < here.E; e += THREADS) {
      if (!has(known.chosen, e)) continue;
      const bool lacks = has(known.missing, e), flies = has(known.flying, e);
      const int rank = rank_of(known.missing, e), from = rank_of(known.chosen, e);
      int flown = 0, mine = 0;  // those of the chosen on their way that come before it; its place among all on their way
#pragma unroll 1
      for (int i = 0; i < flying; i++) {
        const int other = before.expert[i];
        flown += other < e && has(known.chosen, other);
        if (other == e) mine = i;
      }
      const bool moves_in = lacks && rank < moves;
      const int to = flies ? present + direct + flown : !lacks ? from - rank - flown : moves_in ? chosen - moves + rank : present + rank - moves;
      const u64 by = moves_in ? here.slots + (u64)known.slot[rank] * here.run_bytes - here.host[e] : 0;
      const uint4* source = (const uint4*)(a.list + from);
      uint4* target = (uint4*)(a.ready + to);
#pragma unroll
      for (int i = 0; i < 3; i++) {
        const ulonglong2 two = ((const ulonglong2*)source)[i];
        ((ulonglong2*)target)[i] = make_ulonglong2(two.x ? two.x + by : 0, two.y ? two.y + by : 0);
      }
#pragma unroll
      for (int i = 3; i < 6; i++) target[i] = source[i];
      a.ready[to].arrival = moves_in ? 1 + turn * 2 * MOST + rank : flies ? 1 + (2 + (a.set ^ 1)) * 2 * MOST + mine : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (a.through) *a.through = 0;
      store_release(a.num_slots, chosen | UNSETTLED);
    }
  }

  if (threadIdx.x == 0) {
    while (load_acquire(a.counter) != (int)gridDim.x - 1) {
    }
    *a.counter = 0, *a.launches = launches + 1, *a.now = (int)now;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < 12 * moves; i += THREADS) move_addresses(here, i % 12, known.owner[known.slot[i / 12]], known.expert[i / 12], here.slots + (u64)known.slot[i / 12] * here.run_bytes);
#pragma unroll 1
  for (int m = threadIdx.x; m < moves; m += THREADS) here.owner[known.slot[m]] = known.expert[m];
#pragma unroll 1
  for (int e = threadIdx.x; e < here.E; e += THREADS) {
    const bool wanted = has(known.chosen, e);
    here.score[e] = (int)(known.worth[e] >> 32) + (wanted ? a.rise : 0), here.visited[e] = wanted ? (int)now : (int)known.worth[e];
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < 2 * MOST; i += THREADS) a.arrived[(turn ^ 1) * 2 * MOST + i] = 0;
  __syncthreads();
  if (a.next.E) {
    look_ahead(a, known_sh, direct_sent + (u64)((double)((u64)moves * here.run_bytes) * a.ns_per_byte));
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (a.list) store_release(a.num_slots, chosen);
  const int ahead = a.next.E ? a.sets[a.set].count : 0;
  a.stats[CHOSEN] += chosen, a.stats[FETCHED] += moves, a.stats[DIRECT] += missing - moves;
  a.stats[BYTES] += (u64)missing * here.run_bytes + (u64)ahead * a.next.run_bytes;
  a.stats[LAUNCHES] += 1, a.stats[AHEAD] += ahead, a.stats[USED] += used;
#pragma unroll 1
  for (int i = 0; i < 2 * moves; i++)
    while (load_acquire(arrived + (i < moves ? i : MOST + i - moves)) != part_pieces(here, i >= moves)) {
    }
  const u64 busy = global_time() - began;
  a.stats[STALL_NS] += a.waited ? waits[0] + waits[1] : busy;
  atomicAdd(a.stats + BUSY_NS, busy);
}

struct BringArgs {
  TierSlots at;
  AheadSet* set;
  int* arrived;  // [2][MOST] of the set
  u64* stats;
  int stages;
  float ns_per_byte;
};
extern "C" __global__ void __launch_bounds__(THREADS) tiers_ahead(const __grid_constant__ BringArgs a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char fetch_sh[];
  __shared__ u64 full_sh[MOST_STAGES], from_sh[MOST_AHEAD], to_sh[MOST_AHEAD];
  AheadSet& set = *a.set;
  const int t = threadIdx.x, blocks = gridDim.x;
  u32 launch = 0;  // of the first thread
  if (t < a.stages) barrier_init(full_sh + t, 1);
  barrier_init_done();
  if (t == 0) {
    launch = (u32)load_acquire((const int*)&set.finished) + 1;
    atomicAdd(&set.started, 1u);
    while (!AheadSet::reaches(&set.named, launch) || !AheadSet::reaches(&set.asked, launch * blocks * a.stages)) {
    }
  }
  __syncthreads();
  const int count = set.count;
  const u64 began = global_time();
  if (t < count) from_sh[t] = set.from[t], to_sh[t] = set.to[t];
  __syncthreads();
  Moves{a.at, count, (int)blockIdx.x, blocks, from_sh, to_sh, a.arrived, set.link_from, a.ns_per_byte}.copy_through(fetch_sh, full_sh, a.stages, 0);
  __syncthreads();
  if (t != 0) return;
  __threadfence();
  if (atomicAdd(&set.done, 1u) + 1 != launch * blocks) return;
  if (count) atomicAdd(a.stats + BUSY_NS, global_time() - began);
  store_release((int*)&set.finished, (int)launch);
#endif
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

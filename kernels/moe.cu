// The experts of few tokens: their weights stream through shared memory, read once and as whole rows.
//
// moe_gate_up_F_s4, moe_down_pairs_F_s4: either half of the experts (common/routing.cuh), any T, four tokens an expert at a time
// moe_down_F: y[t, d] = add[t, d] + scale * sum_rank gate[p] * (W_down[e] h[p])_d,  p = t K + rank, e the expert of p
//
// W      w4: [R, K/8] u32, low nibble first, code + 8;  w8: [R, K/4] u32, code + 128; rows 16-byte aligned;  w16: [R, K] bf16
// scale  [R, K/G] bf16, G in {32, 64, 128} or K (w8 per channel); absent for w16; one pointer an expert
// h      [T K, F] f32; y, add [T, D] f32, y may be add
// needs  inner % 32 == 0; T K <= 65535; sums of a group exact, the rest f32
//
// One block a multiprocessor. Its last warp copies: for each tile of rows of an expert in use it finds the weights and the planes of the
// tokens, waits until the next stage of the ring is empty and has all of it copied there. The other warps form teams, each
// taking a whole tile in turn; the warps of a team split its rows or its k. moe_down turns h into planes first, sums all experts of a
// tile of 16 rows inside the block in order of rank, the same bits in any batch, and goes on to the next tile. No grid depends
// on the routing. With DirectRoute the experts are chosen here; weights of moe_down are then asked for before h is there.
//
// Instances, F as in linear.cu, by (rows of a tile, warps of a team, k_warps): gate_up 32 (16 of each matrix), 4, 4; down_pairs 64, 4, 1;
//   down 16, `warps`, `split`. stages is a multiple of the teams, so that a team meets its own stages again, and at most 8.
// Launch: threads 32 (teams * warps + 1), s4 at most 3 teams, down 8 / warps, or two of 7 or 8 warps where a stage is long; grid as many as are resident, at most the tiles; with
//   block = 256 (w16 512), groups = ceil(inner / 128), S = 2 * scales a row, | whole lines of 128 bytes:
//   s4: shared = stages * ||tile inner bits / 8| + tile S| + columns (groups block + 4 ceil4(groups))|
//     + 4 * 2 * teams * k_warps * 4 * (tile + 8) where k_warps > 1, + 48 E if direct
//   down: shared = stages * ||16 min(16 chunk bits, F bits / 8)| + 16 S| + T K groups (block + 4) + 2 * 64 T K ceil(groups / chunk) split,
//     + 48 E if direct
// Floors: bytes of the chosen experts at read bandwidth. Source: src/engine/cpu/experts.rs.
#include "common/planes.cuh"
#include "common/routing.cuh"
#include "common/stream.cuh"

struct DownArgs {
  float* y;
  const float* add;  // or null
  const float* h;
  const ExpertSlot* slots;
  const int* num_slots;
  const int* pairs;
  const float* gates;  // [T, K]
  DirectRoute direct;
  Arrivals arrivals;
  int T, D, F, K;
  int chunk;    // groups a stage
  int stages;
  int split;    // parts of a stage, of equal length
  int warps;    // that share it
  float scale;
};

static const int MOST_STAGES = 8;
static const int MOST_SLOTS = 32;  // of moe_down

// What a team must know of the tile in a stage; lanes that say the tile is full or copy some of it write it.
struct __align__(8) TileInfo {
  u16 pair[4];
  int row;       // first; below zero: there is nothing more
  int used;      // tokens
  int chunk;     // moe_down: of k
};
// What the copying warp must know of a tile to come, found by its lanes for 32 tiles at a time.
struct __align__(16) Tile {
  u64 code[2];   // first row, of both matrices in the first half of the experts
  u64 scale[2];
  u16 pair[8];
  int row, count, first;
  int arrival;  // as in the list
};

// Expert `slot`: its pairs, and where its matrices are. A lane a slot, by whole warps; `use` says which lanes ask.
template <int FROM, int TO>
DEV void find_expert(Tile& tile, u64* at, const ExpertSlot* slots, const DirectRoute& direct, const DirectList& list, const u64* table_sh, int slot, bool use) {
  if (direct.logits) {
    const int leader = use ? nth_bit(list.leaders, slot) : 0, expert = __shfl_sync(0xffffffffu, list.id, leader);
    u32 pairs = __shfl_sync(0xffffffffu, list.same, leader);
    if (!use) return;
    tile.count = __popc(pairs), tile.first = 0, tile.arrival = 0;
    for (int n = 0; pairs; pairs &= pairs - 1, n++) tile.pair[n] = (u16)(__ffs(pairs) - 1);
#pragma unroll
    for (int i = FROM; i < TO; i++) at[i - FROM] = table_sh[expert * 6 + i];
  } else if (use) {
    const ulonglong2* words = (const ulonglong2*)(slots + slot);
    const uint4 counts = ((const uint4*)words)[3];
    tile.first = counts.y, tile.count = counts.z, tile.arrival = counts.w;
    *(uint4*)tile.pair = ((const uint4*)words)[4];
#pragma unroll
    for (int i = FROM / 2; i < TO / 2; i++) {
      const ulonglong2 two = words[i];
      at[2 * i - FROM] = two.x, at[2 * i + 1 - FROM] = two.y;
    }
  }
}
DEV void load_table(u64* table_sh, const DirectRoute& direct) {
  if (direct.logits)
    for (int i = threadIdx.x; i < direct.rule.E * 6; i += blockDim.x) table_sh[i] = direct.table[i];
}

// Length of the list, once it is there.
DEV int list_length(const int* num_slots, const Arrivals& a) {
  if (!a.pieces) return *num_slots;
  int length;
  do length = load_acquire(num_slots);
  while (length < 0);
  return length & (UNSETTLED - 1);
}
// By a warp: waits for an expert on its way; `waited` sums nanoseconds.
DEV void await_expert(const Arrivals& a, int arrival, int& waited) {
  const int* pieces = a.pieces + arrival - 1;
  if (load_acquire(pieces) < a.needed) {
    const u64 since = global_time();
    while (load_acquire(pieces) < a.needed) {
    }
    waited += (int)(global_time() - since);
  }
  stream_fence();
  __syncwarp();
}
// Waits for h, in a kernel that reads it; `through` begins anew before the list is there.
DEV void await_first_half(const int* num_slots, const Arrivals& a) {
  if (!a.through) return dependency_wait();
  list_length(num_slots, a);
  while (load_acquire(a.through) != a.blocks) {
  }
}
DEV void note_wait(const Arrivals& a, int waited) {
  if ((threadIdx.x & 31) == 0 && waited > 0) atomicMax(a.waited, waited);
}

template <int BITS, int G, int MT, int WM, int WK, bool GATED>
DEV void stream_experts(const ExpertsArgs& a) {
  typedef Form<BITS, G> F;
  const int SUB = F::SUB, BLOCK = Block<BITS>::BYTES, ROWS = 16 * MT * WM, MATS = GATED ? 2 : 1, HALF = ROWS / MATS, TEAM = WM * WK, STRIDE = ROWS + 8;
  extern __shared__ __align__(COPY_LINE) uint4 moe_sh[];
  __shared__ u64 full_sh[MOST_STAGES];
  __shared__ TileInfo info_sh[MOST_STAGES];
  __shared__ Tile tile_sh[32];
  __shared__ DirectShared direct_sh;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int K = a.inner, groups = groups_of(K), row_bytes = K * BITS / 8, scales = BITS == 16 ? 0 : G == 0 ? 1 : K / (G ? G : 1), cols = a.columns, stages = a.stages, teams = a.teams;
  const int scale_bytes = HALF * scales * 2, sx_row = scale_row(groups), codes_stage = whole_lines(ROWS * row_bytes), x_at = whole_lines(codes_stage + MATS * scale_bytes), sx_at = x_at + cols * groups * BLOCK;
  const int stage_bytes = whole_lines(sx_at + cols * sx_row * 4), tiles = div_up(a.rows, HALF);
  float* red_sh = (float*)((char*)moe_sh + stages * stage_bytes);  // [teams][2][WK][4][STRIDE]
  u64* table_sh = (u64*)(red_sh + (WK > 1 ? teams * 2 * WK * 4 * STRIDE : 0));
  if ((int)threadIdx.x < stages) barrier_init(full_sh + threadIdx.x, STREAM_ARRIVALS);
  barrier_init_done();
  load_table(table_sh, a.direct);
  if (!GATED && a.direct.logits) choose_direct(a.direct, a.T, direct_sh);  // the logits are of three kernels ago
  // beside the kernel that brings experts, which is known to be at work, the first half goes by what has arrived
  if (!GATED || !a.arrivals.pieces) dependency_wait();
  dependents_launch();
  if (GATED && a.direct.logits) choose_direct(a.direct, a.T, direct_sh);
  __syncthreads();

  int stage = 0, parity = 0;
  const int SHARING = 32 * (TEAM + 1);  // a stage: a team and the warp that copies
  if (warp == TEAM * teams) {
    int filled = 0;
    DirectList list = {};
    if (a.direct.logits) {
      list = list_direct(a.direct, a.T, direct_sh);
      if (GATED && blockIdx.x == 0 && lane < a.T * a.K) a.direct.ids[lane] = direct_sh.id[lane], a.direct.gates[lane] = direct_sh.gate[lane];
    }
    const int num_slots = a.direct.logits ? list.count() : list_length(a.num_slots, a.arrivals), works = tiles * num_slots, x_bytes = groups * BLOCK, n = lane & 3;
    int there = 0, waited = 0;
    const float inv_k = 1.f / a.K;
    // codes by lanes 0.., their scales from 4, planes of the tokens from 8, theirs from 16
    const bool codes = lane < MATS, their = BITS != 16 && lane >= 4 && lane < 4 + MATS, x = lane >= 8 && lane < 12, sx = BITS != 16 && lane >= 16 && lane < 20;
    const int to = codes ? lane * HALF * row_bytes : their ? codes_stage + (lane - 4) * scale_bytes : x ? x_at + n * x_bytes : sx_at + n * sx_row * 4;
    const char* base = x ? a.x_q : (const char*)a.x_scale;
    const int each = x ? x_bytes : sx_row * 4;
#pragma unroll 1
    for (int from = blockIdx.x; from < works; from += 32 * gridDim.x) {
      const int work = from + lane * gridDim.x, slot = work / tiles, row = (work - slot * tiles) * HALF;
      u64 at[GATED ? 4 : 2];
      find_expert<GATED ? 0 : 4, GATED ? 4 : 6>(tile_sh[lane], at, a.slots, a.direct, list, table_sh, slot, work < works);
      if (work < works) {
        Tile& mine = tile_sh[lane];
        mine.row = row;
#pragma unroll
        for (int i = 0; i < MATS; i++) mine.code[i] = at[2 * i] + (u64)row * row_bytes, mine.scale[i] = at[2 * i + 1] + (u64)row * scales * 2;
      }
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < 32 && from + i * (int)gridDim.x < works; i++) {
        const Tile& tile = tile_sh[i];
        if (tile.arrival != there) {
          if (tile.arrival) await_expert(a.arrivals, tile.arrival, waited);
          there = tile.arrival;
        }
        const int count = tile.count, rows = min_int(HALF, a.rows - tile.row), code_bytes = rows * row_bytes, s_bytes = BITS == 16 ? 0 : (rows * scales * 2 + 15) & ~15;
#pragma unroll 1
        for (int n0 = 0; n0 < count; n0 += cols) {
          const int used = min_int(cols, count - n0), at = n0 + min_int(n, used - 1), pair = at < 8 ? tile.pair[at] : a.pairs[tile.first + at];
          const u64 row_of = GATED ? (int)((pair + 0.5f) * inv_k) : pair;
          const char* src = codes || their ? (const char*)(codes ? tile.code : tile.scale)[lane & 1] : base + row_of * each;
          const int bytes = codes ? code_bytes : their ? s_bytes : (x || sx) && n < used ? each : 0;
          if (filled++ >= stages) await_left(PLACES + stage, SHARING);
          TileInfo& info = info_sh[stage];
          if (x && n < used) info.pair[n] = (u16)pair;
          if (lane == 0) info.row = tile.row, info.used = used;
          stream_expect(full_sh + stage, MATS * (code_bytes + s_bytes) + used * (x_bytes + (BITS != 16 ? sx_row * 4 : 0)));
          __syncwarp();
          stream_copies(full_sh + stage, (char*)moe_sh + stage * stage_bytes + to, src, bytes);
          stream_done(full_sh + stage);
          if (++stage == stages) stage = 0;
        }
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int i = 0; i < teams; i++) {
      if (filled++ >= stages) await_left(PLACES + stage, SHARING);
      if (lane == 0) info_sh[stage].row = -1;
      stream_expect(full_sh + stage, 0);
      stream_done(full_sh + stage);
      if (++stage == stages) stage = 0;
    }
    await_all_left(filled, stages, SHARING);
    if (a.arrivals.pieces) {
      note_wait(a.arrivals, waited);
      if (GATED)
        while (load_acquire(a.num_slots) & UNSETTLED) {
        }
    }
    return;
  }

  const int team = warp / TEAM, wm = warp % TEAM % WM, kg = warp % TEAM / WM, tid = threadIdx.x - team * TEAM * 32;
  const int k_begin = groups * kg / WK, k_end = groups * (kg + 1) / WK;
  float* sums_sh = red_sh + team * 2 * WK * 4 * STRIDE;
  stage = team;
#pragma unroll 1
  for (int turn = 0;; turn ^= WK * 4 * STRIDE) {
    const char* codes_sh = (const char*)moe_sh + stage * stage_bytes;
    const bf16* scales_sh = (const bf16*)(codes_sh + codes_stage);
    const char* x_sh = codes_sh + x_at;
    const float* sx_sh = (const float*)(codes_sh + sx_at);
    barrier_wait(full_sh + stage, parity);
    const int row0 = info_sh[stage].row, used = info_sh[stage].used;
    if (row0 < 0) {
      leave(PLACES + stage, SHARING);
      break;
    }
    const int pair = info_sh[stage].pair[min_int(WK == 1 ? t : tid / HALF, used - 1)];
    float acc[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) acc[i][0] = acc[i][1] = 0.f;
    const char* x_from = x_sh + min_int(g >> 1, used - 1) * groups * BLOCK + (g & 1) * 64 + t * 16;
    const float* sx_from = sx_sh + min_int(t, used - 1) * sx_row;
#pragma unroll 1
    for (int k = k_begin; k < k_end; k++) {
      uint4 x[BLOCK / 128];
#pragma unroll
      for (int i = 0; i < BLOCK / 128; i++) x[i] = *(const uint4*)(x_from + k * BLOCK + i * 128);
      const float sx = BITS == 16 ? 1.f : sx_from[k];
#pragma unroll
      for (int i = 0; i < MT; i++) {
        const int r_lo = GATED ? (wm * MT + i) * 8 + g : (wm * MT + i) * 16 + g, r_hi = r_lo + (GATED ? HALF : 8);
        uint4 lo[F::PIECES], hi[F::PIECES];
#pragma unroll
        for (int p = 0; p < F::PIECES; p++) {
          const int at = k * F::ROW_BYTES + p * 64 + t * 16;
          const bool inside = BITS != 16 || at < row_bytes;  // past the end lie other bytes, harmless as integers times zero
          lo[p] = inside ? *(const uint4*)(codes_sh + r_lo * row_bytes + at) : make_uint4(0, 0, 0, 0), hi[p] = inside ? *(const uint4*)(codes_sh + r_hi * row_bytes + at) : make_uint4(0, 0, 0, 0);
        }
        u32 m[1][F::MMAS][4];
        unpack<BITS>(m[0], lo, hi);
        RowScales<SUB> s;
#pragma unroll
        for (int q = 0; q < SUB; q++) {
          const int at = G == 0 ? 0 : min_int(k * SUB + q, scales - 1);
          const float unit = BITS == 4 ? 0.0625f : 1.f;
          s.lo[q] = unit * to_f32(scales_sh[r_lo * scales + at]), s.hi[q] = unit * to_f32(scales_sh[r_hi * scales + at]);
        }
        float* sums = acc[i];
        group_products<BITS, SUB, 1, 1>(&sums, 0, m, &s, &x, &sx);
      }
    }
    leave(PLACES + stage, SHARING);
    auto put = [&](int r, float gate, float up) {
      r += row0;
      if (r < a.rows) a.out[(size_t)pair * a.rows + r] = GATED ? without_tag(silu(gate) * up) : gate;
    };
    if (WK == 1) {
      if (t < used)
#pragma unroll
        for (int i = 0; i < MT; i++) {
          if (GATED)
            put((wm * MT + i) * 8 + g, acc[i][0], acc[i][1]);
          else
            put((wm * MT + i) * 16 + g, acc[i][0], 0.f), put((wm * MT + i) * 16 + 8 + g, acc[i][1], 0.f);
        }
    } else {
      static_assert(WK == 1 || 4 * HALF <= 32 * TEAM, "an element a thread");
#pragma unroll
      for (int i = 0; i < MT; i++) {
        float* to = sums_sh + turn + (kg * 4 + t) * STRIDE + (wm * MT + i) * 16 + g;
        to[0] = acc[i][0], to[8] = acc[i][1];
      }
      team_barrier(1 + team, TEAM * 32);
      if (tid < HALF * used) {
        const int r = tid % HALF;
        const float* sums = sums_sh + turn + tid / HALF * STRIDE + (GATED ? r / 8 * 16 + r % 8 : r);
        float y = 0.f, up = 0.f;
#pragma unroll
        for (int w = 0; w < WK; w++) {
          y += sums[w * 4 * STRIDE];
          if (GATED) up += sums[w * 4 * STRIDE + 8];
        }
        put(r, y, up);
      }
    }
    stage += teams;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
  if (GATED && a.arrivals.through) {
    team_barrier(1 + teams, TEAM * teams * 32);
    if (threadIdx.x == 0) add_release(a.arrivals.through, 1);
  }
}

template <int BITS, int G>
DEV void down_rows(const DownArgs& a) {
  typedef Form<BITS, G> F;
  const int SUB = F::SUB, BLOCK = Block<BITS>::BYTES, WARPS = (int)blockDim.x / 32 - 1;
  extern __shared__ __align__(COPY_LINE) uint4 moe_sh[];
  __shared__ u64 full_sh[MOST_STAGES];
  __shared__ TileInfo info_sh[MOST_STAGES];
  __shared__ u64 listed_sh;
  __shared__ int num_slots_sh;
  __shared__ Tile tile_sh[MOST_SLOTS];
  __shared__ DirectShared direct_sh;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, num_pairs = a.T * a.K, stages = a.stages;
  const int groups = groups_of(a.F), chunks = div_up(groups, a.chunk), row_bytes = a.F * BITS / 8, slice = min_int(a.chunk * F::ROW_BYTES, row_bytes), scales = BITS == 16 ? 0 : G == 0 ? 1 : a.F / (G ? G : 1);
  const int scale_at = whole_lines(16 * slice), stage_bytes = whole_lines(scale_at + 16 * scales * 2), tiles = div_up(a.D, 16), parts = chunks * a.split;
  char* x_sh = (char*)moe_sh + stages * stage_bytes;                 // [T K][groups][block]
  float* sx_sh = (float*)(x_sh + num_pairs * groups * BLOCK);        // [T K][groups]
  float* part_sh = sx_sh + ((num_pairs * groups + 3) & ~3);          // [2][T K][chunks][split][16]
  u64* table_sh = (u64*)(part_sh + 2 * num_pairs * parts * 16);
  if ((int)threadIdx.x < stages) barrier_init(full_sh + threadIdx.x, STREAM_ARRIVALS);
  if (threadIdx.x == 0) barrier_init(&listed_sh, 32);
  barrier_init_done();
  load_table(table_sh, a.direct);
  if (a.direct.logits) choose_direct(a.direct, a.T, direct_sh);  // the logits are of two kernels ago, as is the list
  __syncthreads();
  const int SHARING = 32 * (a.warps + 1);  // a stage: a team and the warp that copies
  if (warp == WARPS) {
    DirectList list = {};
    if (a.direct.logits) list = list_direct(a.direct, a.T, direct_sh);
    const int num_slots = a.direct.logits ? list.count() : list_length(a.num_slots, a.arrivals);
    u32 awaited = 0;
    int waited = 0;
#pragma unroll 1
    for (int slot = lane; slot - lane < num_slots; slot += 32) {
      u64 at[2];
      find_expert<4, 6>(tile_sh[slot], at, a.slots, a.direct, list, table_sh, slot, slot < num_slots);
      if (slot < num_slots) tile_sh[slot].code[0] = at[0], tile_sh[slot].scale[0] = at[1];
    }
    if (lane == 0) num_slots_sh = num_slots;
    __syncwarp();
    __threadfence_block();
    barrier_arrive(&listed_sh);
    int stage = 0, filled = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const int rows = min_int(16, a.D - tile * 16), s_bytes = BITS == 16 ? 0 : (rows * scales * 2 + 15) & ~15;
      // whole rows lie in one run
      const bool theirs = BITS != 16 && lane == 16, mine = chunks == 1 ? lane == 0 : lane < rows;
      const u64 from = theirs ? (u64)tile * 16 * scales * 2 : ((u64)tile * 16 + lane) * row_bytes;
      const int to = theirs ? scale_at : lane * slice;
#pragma unroll 1
      for (int slot = 0; slot < num_slots; slot++) {
        const Tile& expert = tile_sh[slot];
        if (expert.arrival && !(awaited >> slot & 1)) {
          if (!awaited) await_first_half(a.num_slots, a.arrivals);  // what arrives later than h holds this kernel up
          await_expert(a.arrivals, expert.arrival, waited);
          awaited |= 1u << slot;
        }
        const char* src = (const char*)(theirs ? expert.scale : expert.code)[0] + from;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++) {
          const int bytes = min_int(slice, row_bytes - chunk * slice);
          if (filled++ >= stages) await_left(PLACES + stage, SHARING);
          TileInfo& info = info_sh[stage];
          if (lane == 0) *(u64*)info.pair = *(const u64*)expert.pair, info.used = expert.count, info.chunk = chunk;
          stream_expect(full_sh + stage, rows * bytes + s_bytes);
          __syncwarp();
          stream_copies(full_sh + stage, (char*)moe_sh + stage * stage_bytes + to, src + (theirs ? 0 : chunk * slice), theirs ? s_bytes : mine ? chunks == 1 ? rows * bytes : bytes : 0);
          stream_done(full_sh + stage);
          if (++stage == stages) stage = 0;
        }
      }
    }
    note_wait(a.arrivals, waited);
    dependency_wait();  // by one warp at least: who waits for this kernel waits for those before it
    dependents_launch();
    await_all_left(filled, stages, SHARING);
    return;
  }

  const int row_chunks = groups * 16, work = num_pairs * row_chunks, THREADS = 32 * WARPS, AHEAD = 3;
  if (threadIdx.x == 0 || !a.arrivals.through) await_first_half(a.num_slots, a.arrivals);
  if (a.arrivals.through) team_barrier(1, THREADS);
  dependents_launch();
#pragma unroll 1
  for (int base = 0; base < work; base += AHEAD * THREADS) {
    float f[AHEAD][8];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int c = base + j * THREADS + threadIdx.x, p = c / row_chunks, k = (c - p * row_chunks) * 8;
#pragma unroll
      for (int i = 0; i < 8; i++) f[j][i] = 0.f;
      if (c < work && k < a.F) {
        const float* h = a.h + (size_t)p * a.F + k;
        *(float4*)f[j] = *(const float4*)h, *(float4*)(f[j] + 4) = *(const float4*)(h + 4);
      }
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int c = base + j * THREADS + threadIdx.x;
      if (base + j * THREADS >= work) break;
      make_block<BITS>(x_sh + (c >> 4) * BLOCK, sx_sh + (c >> 4), c, f[j], c < work);
    }
  }
  team_barrier(1, THREADS);
  barrier_wait(&listed_sh, 0);
  const int num_slots = num_slots_sh, teams = WARPS / a.warps, team = warp / a.warps, member = warp - team * a.warps;
  int stage = team, parity = 0, turn = 0, index = 0;  // of the items of all tiles, taken by the teams in turn
  int mine = team;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float* sums_sh = part_sh + turn * num_pairs * parts * 16;
    turn ^= 1;
    const int end = index + num_slots * chunks;
#pragma unroll 1
    for (; mine < end; mine += teams) {
      barrier_wait(full_sh + stage, parity);
      const TileInfo& info = info_sh[stage];
      const char* codes_sh = (const char*)moe_sh + stage * stage_bytes;
      const bf16* scales_sh = (const bf16*)(codes_sh + scale_at);
      const int first = info.chunk * a.chunk, count = info.used, here = min_int(a.chunk, groups - first), each = div_up(a.chunk, a.split);
      const int token = info.pair[min_int(g >> 1, count - 1)], other = info.pair[min_int(t, count - 1)];
#pragma unroll 1
      for (int part = member; part < a.split; part += a.warps) {
        const int begin = min_int(here, each * part), last = min_int(here, each * (part + 1));
        float acc[2] = {0.f, 0.f};
#pragma unroll 1
        for (int c = begin; c < last; c++) {
          const int k = first + c;
          uint4 lo[F::PIECES], hi[F::PIECES], x[1][BLOCK / 128];
#pragma unroll
          for (int i = 0; i < F::PIECES; i++) {
            const int at = c * F::ROW_BYTES + i * 64 + t * 16;
            const bool inside = BITS != 16 || at < min_int(slice, row_bytes - first * F::ROW_BYTES);
            lo[i] = inside ? *(const uint4*)(codes_sh + g * slice + at) : make_uint4(0, 0, 0, 0), hi[i] = inside ? *(const uint4*)(codes_sh + (g + 8) * slice + at) : make_uint4(0, 0, 0, 0);
          }
          u32 m[1][F::MMAS][4];
          unpack<BITS>(m[0], lo, hi);
#pragma unroll
          for (int i = 0; i < BLOCK / 128; i++) x[0][i] = *(const uint4*)(x_sh + (token * groups + k) * BLOCK + (g & 1) * 64 + t * 16 + i * 128);
          const float sx = BITS == 16 ? 1.f : sx_sh[other * groups + k];
          RowScales<SUB> s;
#pragma unroll
          for (int q = 0; q < SUB; q++) {
            const int at = G == 0 ? 0 : min_int(k * SUB + q, scales - 1);
            const float unit = BITS == 4 ? 0.0625f : 1.f;
            s.lo[q] = unit * to_f32(scales_sh[g * scales + at]), s.hi[q] = unit * to_f32(scales_sh[(g + 8) * scales + at]);
          }
          float* sums = acc;
          group_products<BITS, SUB, 1, 1>(&sums, 0, m, &s, x, &sx);
        }
        if (t < count) {
          float* out = sums_sh + ((other * chunks + info.chunk) * a.split + part) * 16;
          out[g] = acc[0], out[g + 8] = acc[1];
        }
      }
      leave(PLACES + stage, SHARING);
      stage += teams;
      if (stage >= stages) stage -= stages, parity ^= 1;
    }
    index = end;
    team_barrier(1, THREADS);
#pragma unroll 1
    for (int i = threadIdx.x; i < 16 * a.T; i += THREADS) {
      const int r = i & 15, n = i >> 4, row = tile * 16 + r;
      if (row >= a.D) continue;
      const size_t at = (size_t)n * a.D + row;
      const float before = a.add ? a.add[at] : 0.f;
      float sum = 0.f;
#pragma unroll 4
      for (int p = n * a.K; p < (n + 1) * a.K; p++) {
        float one = 0.f;
#pragma unroll 8
        for (int c = 0; c < parts; c++) one += sums_sh[(p * parts + c) * 16 + r];
        sum = fmaf(a.direct.logits ? direct_sh.gate[p] : a.gates[p], one, sum);
      }
      a.y[at] = without_tag(fmaf(a.scale, sum, before));
    }
  }
}

// These bound the registers: with w4 both kernels of a step find room beside each other.
#define MOST_THREADS(BITS, G) (BITS == 4 && G == 128 ? 704 : 416)
#define DOWN_THREADS(BITS, G) (BITS == 4 && G == 128 ? 768 : 544)
#define FORM(NAME, BITS, G)                                                                                                                                                            \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS(BITS, G), 1) moe_gate_up_##NAME##_s4(const __grid_constant__ ExpertsArgs a) { stream_experts<BITS, G, 2, 1, 4, true>(a); }     \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS(BITS, G), 1) moe_down_pairs_##NAME##_s4(const __grid_constant__ ExpertsArgs a) { stream_experts<BITS, G, 1, 4, 1, false>(a); } \
  extern "C" __global__ void __launch_bounds__(DOWN_THREADS(BITS, G), 1) moe_down_##NAME(const __grid_constant__ DownArgs a) { down_rows<BITS, G>(a); }
#include "common/forms.cuh"

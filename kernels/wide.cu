// The products of linear.cu for many tokens on warpgroup tensor cores (sm_90a): dense, and either half of the experts
//
// A block takes 192 rows (gate and up rows by eights) and up to 128 tokens, of an expert 64: three warpgroups of 64 rows multiply, four warps copy groups of
// 128 k ahead into a ring. Codes become signed operands in registers; planes lie in shared memory in the order of k (`planes_k*`, rows.cu),
// from where the tensor cores read them: hi and lo of a token are two columns. Blocks walk (run of tokens, tile of rows) in turn, so that
// neighbours read the same planes, and experts with more tokens have more runs.
//
// linear_F_wg: up to three matrices of one input, as linear_F_n64. moe_gate_up_F_wg, moe_down_pairs_F_wg: as their _n64.
// Launch: 512 threads, blocks that walk; columns: tokens a run, a multiple of 16 up to 128, of an expert 64 (w16 32); with
//   block = 256 (w16 512), DA = 4 (w4), 3 (w8, w16), of an expert 6 (w4), 4 (w8), 3 (w16)
//   shared = 1024 + DA (columns block + 192 (16 BITS + 16) + 576, up to a multiple of 1024) + 4 slots (experts)
// needs K % 32 == 0; rows 16-byte aligned; T K <= 65535 for experts
// Floors: bytes as linear.cu, from L2 planes once a tile of rows and codes once a run of tokens (5.6 TB/s); operations 4 R K T on integer tensor
// cores (4096 a cycle).
// Source: src/engine/cpu/linear.rs, experts.rs.
#include "common/linear.cuh"
#include "common/planes.cuh"
#include "common/routing.cuh"
#include "common/stream.cuh"

static const int WIDE_ROWS = 192, WIDE_WARPS = 12, COPY_THREADS = 128;

// ---------------------------------------------------------------------------------------------------- products of a warpgroup
#define R8(P, a, i) P((a)[i]), P((a)[i + 1]), P((a)[i + 2]), P((a)[i + 3]), P((a)[i + 4]), P((a)[i + 5]), P((a)[i + 6]), P((a)[i + 7])
#define S32(x) "+r"(x)
#define F32(x) "+f"(x)
#define D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define D32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
// c[64 rows][2 tokens] (+)= a[64][32 bytes] b[2 tokens][32 bytes]; tokens = 16 or 32. b: shared address over 16 of rows of 128 bytes, eight
// of them 1024 bytes, whose 16-byte pieces are exchanged by the low bits of the row.
#define PRODUCT(SHAPE, SUMS, A, B, ADD, REST) \
  "{.reg .pred p; .reg .b64 d; mov.b64 d, {" B ", 0x40000040}; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned." SHAPE " " SUMS ", {" A "}, d, p" REST ";}"
template <int TOKENS>
DEV void group_mma(int* c, const u32* a, u32 b, int add) {
  if constexpr (TOKENS == 32)
    asm volatile(PRODUCT("m64n64k32.s32.s8.s8", D32, "%32,%33,%34,%35", "%36", "%37", "")
                 : R8(S32, c, 0), R8(S32, c, 8), R8(S32, c, 16), R8(S32, c, 24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));
  else
    asm volatile(PRODUCT("m64n32k32.s32.s8.s8", D16, "%16,%17,%18,%19", "%20", "%21", "")
                 : R8(S32, c, 0), R8(S32, c, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));
}
template <int TOKENS>
DEV void group_mma(float* c, const u32* a, u32 b, int add) {
  if constexpr (TOKENS == 32)
    asm volatile(PRODUCT("m64n64k16.f32.bf16.bf16", D32, "%32,%33,%34,%35", "%36", "%37", ", 1, 1, 0")
                 : R8(F32, c, 0), R8(F32, c, 8), R8(F32, c, 16), R8(F32, c, 24)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));
  else
    asm volatile(PRODUCT("m64n32k16.f32.bf16.bf16", D16, "%16,%17,%18,%19", "%20", "%21", ", 1, 1, 0")
                 : R8(F32, c, 0), R8(F32, c, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));
}
DEV void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// all but the last LEFT groups of products are done and these sums may be read
template <int LEFT, int COUNT>
DEV void group_wait(int* c) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(c[i])::"memory");
}
template <int LEFT, int COUNT>
DEV void group_wait(float* c) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(c[i])::"memory");
}

// ------------------------------------------------------------------------------------------------------------------- jobs
// What is where: a piece of work is a tile of rows and a run of tokens. `slot` only grows.
struct WideDense {
  static const bool GATED = false;
  static const int MOST_TOK = 128;
  const LinearArgs& a;
  int tiles0, tiles1, tiles;
  DEV WideDense(const LinearArgs& args, int*) : a(args) {
    tiles0 = div_up(a.m[0].rows, WIDE_ROWS), tiles1 = a.num_matrices > 1 ? div_up(a.m[1].rows, WIDE_ROWS) : 0;
    tiles = tiles0 + tiles1 + (a.num_matrices > 2 ? div_up(a.m[2].rows, WIDE_ROWS) : 0);
    __syncthreads();
  }
  DEV int works() const { return tiles * div_up(a.T, a.columns); }
  DEV int inner() const { return a.K; }
  DEV int place(int work, int& first) const {
    int tile = work % tiles, matrix = 0;
    if (tile >= tiles0) tile -= tiles0, matrix = 1;
    if (matrix == 1 && tile >= tiles1) tile -= tiles1, matrix = 2;
    first = tile * WIDE_ROWS;
    return matrix;
  }
  DEV void seek(int, int&) const {}
  DEV int used(int work, int, int& n0) const {
    n0 = work / tiles * a.columns;
    return min_int(a.columns, a.T - n0);
  }
  DEV int source(int, int n) const { return n; }
  DEV void rows(int work, int, bool, const char*& packed, const bf16*& scale, int& first, int& rows) const {
    const LinearMatrix& m = a.m[place(work, first)];
    packed = (const char*)m.packed, scale = m.scale, rows = m.rows;
  }
  // y of rows r, r + 8 and tokens n, n + 4 .. before the end
  DEV void put(int work, int, int r, int n, int end, const float (*y)[2]) const {
    int first;
    const LinearMatrix& m = a.m[place(work, first)];
    const int row = first + r;
    const bool is[2] = {row < m.rows, row + 8 < m.rows};
    float bias[2] = {0.f, 0.f}, add[8][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (m.bias && is[i]) bias[i] = m.bias[row + 8 * i];
    size_t at = (size_t)n * m.out_stride + row;
    const int step = 4 * m.out_stride;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) add[j][i] = m.add && is[i] && n + 4 * j < end ? m.add[at + j * step + 8 * i] : 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (is[i] && n + 4 * j < end) m.out[at + j * step + 8 * i] = add[j][i] + (y[j][i] + bias[i]) * m.out_scale;
  }
};
template <bool BOTH>
struct WideExperts {
  static const bool GATED = BOTH;
  static const int MOST_TOK = 64;  // the ring's places are better many than large: few experts have more
  const ExpertsArgs& a;
  const int* ends_sh;  // of the runs of each slot
  int tiles, slots;
  // runs of all slots, added up by the first warp
  DEV WideExperts(const ExpertsArgs& args, int* sh) : a(args), ends_sh(sh) {
    tiles = div_up(a.rows, BOTH ? WIDE_ROWS / 2 : WIDE_ROWS), slots = *a.num_slots;
    if (threadIdx.x < 32) {
      int before = 0;
#pragma unroll 1
      for (int s = threadIdx.x; s < (slots + 31) / 32 * 32; s += 32) {
        int n = s < slots ? div_up(a.slots[s].count, a.columns) : 0;
#pragma unroll
        for (int i = 1; i < 32; i <<= 1) {
          const int other = __shfl_up_sync(0xffffffffu, n, i);
          if ((int)threadIdx.x >= i) n += other;
        }
        if (s < slots) sh[s] = before + n;
        before += __shfl_sync(0xffffffffu, n, 31);
      }
    }
    __syncthreads();
  }
  DEV int works() const { return slots ? ends_sh[slots - 1] * tiles : 0; }
  DEV int inner() const { return a.inner; }
  DEV void seek(int work, int& slot) const {
    while (ends_sh[slot] <= work / tiles) slot++;
  }
  DEV int used(int work, int slot, int& n0) const {
    n0 = (work / tiles - (slot ? ends_sh[slot - 1] : 0)) * a.columns;
    return min_int(a.columns, a.slots[slot].count - n0);
  }
  DEV int source(int slot, int n) const {
    const int pair = slot_pair(a.slots[slot], a.pairs, n);
    return BOTH ? (u32)pair / (u32)a.K : pair;
  }
  DEV void rows(int work, int slot, bool second, const char*& packed, const bf16*& scale, int& first, int& rows) const {
    const ExpertSlot& s = a.slots[slot];
    packed = (const char*)(!BOTH ? s.down_packed : second ? s.up_packed : s.gate_packed);
    scale = !BOTH ? s.down_scale : second ? s.up_scale : s.gate_scale;
    first = work % tiles * (BOTH ? WIDE_ROWS / 2 : WIDE_ROWS), rows = a.rows;
  }
  DEV void put(int work, int slot, int r, int n, int end, const float (*y)[2]) const {
    const int row = work % tiles * (BOTH ? WIDE_ROWS / 2 : WIDE_ROWS) + (BOTH ? r / 16 * 8 + r % 8 : r);
    const ExpertSlot& s = a.slots[slot];
    int pair[8];
#pragma unroll
    for (int j = 0; j < 8; j++) pair[j] = slot_pair(s, a.pairs, min_int(n + 4 * j, end - 1));
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float* out = a.out + (size_t)pair[j] * a.rows + row;
      if (n + 4 * j >= end || row >= a.rows) continue;
      out[0] = BOTH ? silu(y[j][0]) * y[j][1] : y[j][0];
      if (!BOTH && row + 8 < a.rows) out[8] = y[j][1];
    }
  }
};

// ------------------------------------------------------------------------------------------------------------------- walk
DEV void load_shared_4(float* f, u32 at) { asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3]) : "r"(at) : "memory"); }
// acc[2 i], [2 i + 1]: sums of rows g, g + 8 and token 4 i + t; beside bf16 weights, of either plane: [4 i], [4 i + 1], of row g + 8 behind them.
// Tokens go in chunks; where registers allow, the next one's products run while one's are scaled and added.
template <int BITS, int SUB, int TOKENS, int MOST_TOK>
DEV void products(float* acc, const u32 (*a)[4], u32 planes, int panel, const float* lo, const float* hi, u32 sx_at) {
  if constexpr (BITS == 16) {
    group_begin();
#pragma unroll
    for (int j = 0; j < 8; j++) group_mma<TOKENS>(acc, a[j], planes + (j / 4) * panel + j % 4 * 2, 1);
    group_commit();
    group_wait<0, TOKENS>(acc);
  } else {
    const int CHUNK = TOKENS % 32 ? 16 : 32, N = TOKENS / CHUNK, CHUNKS_AHEAD = CHUNK == 32 && MOST_TOK > 64 ? 1 : 2;
#pragma unroll
    for (int q = 0; q < SUB; q++) {
      int c[CHUNKS_AHEAD][CHUNK];
#pragma unroll
      for (int next = 0; next < N + CHUNKS_AHEAD - 1; next++) {
        if (next < N) {
          group_begin();
#pragma unroll
          for (int j = 4 * q / SUB; j < 4 * (q + 1) / SUB; j++) group_mma<CHUNK>(c[next % CHUNKS_AHEAD], a[j], planes + next * (CHUNK * 16) + j * 2, j > 4 * q / SUB);
          group_commit();
        }
        const int i = next - (CHUNKS_AHEAD - 1);
        if (i < 0) continue;
        int* sums = c[i % CHUNKS_AHEAD];
        float sx[CHUNK / 4];
#pragma unroll
        for (int j = 0; j < CHUNK / 4; j += 4) load_shared_4(sx + j, sx_at + (i * (CHUNK / 4) + j) * 4);
        if (next < N)
          group_wait<CHUNKS_AHEAD - 1, CHUNK>(sums);
        else
          group_wait<0, CHUNK>(sums);
#pragma unroll
        for (int j = 0; j < CHUNK / 4; j++) {
          float* to = acc + i * (CHUNK / 2) + 2 * j;
          to[0] += lo[q] * (sx[j] * planes_sum(sums[4 * j], sums[4 * j + 1]));
          to[1] += hi[q] * (sx[j] * planes_sum(sums[4 * j + 2], sums[4 * j + 3]));
        }
      }
    }
  }
}
// from addresses that are kept instead of made anew
DEV u32 load_shared(u32 at) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
DEV u32 masked_flip(u32 x, u32 mask, u32 flip) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(x), "r"(mask), "r"(flip));
  return r;
}

template <int BITS, int G, class Job, class Args>
struct Wide {
  typedef Form<BITS, G> F;
  static const int SUB = F::SUB, CODES = F::ROW_BYTES, STRIDE = CODES + 16, BLOCK = Block<BITS>::BYTES, MOST_TOK = BITS == 16 ? 32 : Job::MOST_TOK;
  static const int DA = BITS == 16 ? 3 : MOST_TOK == 128 ? 5 - BITS / 4 : 8 - BITS / 2, LAG = DA - 2;
  static const int SCALES = 36, SCALES_BYTES = 4 * 4 * SCALES;  // of activations from one token of four to the next, in banks of their own
  const Args& args;
  const Job& job;
  char* ring_sh;
  u64 *full_sh, *empty_sh;
  int groups, row_bytes, scales, works, planes_bytes, stage_bytes;

  // by COPY_THREADS threads
  DEV void copy() const {
    // of codes: a thread copies one or two pieces of rows that are all of gate or all of up
    const int PIECES = CODES < 128 ? CODES / 16 : 8, PARTS = CODES / 16 / PIECES, COPIES = WIDE_ROWS * PIECES / COPY_THREADS, STEP = COPY_THREADS / PIECES;
    static_assert(STEP % 16 == 0, "gate and up alternate by eight rows");
    const int PER = BLOCK / 16, TOKENS = MOST_TOK * PER / COPY_THREADS, TOKEN_STEP = COPY_THREADS / PER;      // of planes
    const int tid = threadIdx.x - 32 * WIDE_WARPS, a_row = tid / PIECES, a_piece = tid % PIECES, b_token = tid / PER, b_piece = tid % PER;
    const int b_row = 2 * b_token + b_piece / (PER / 2);
    const u32 ring = shared_address(ring_sh);
    const u32 a_to = ring + planes_bytes + a_row * STRIDE + a_piece * 16;
    const u32 b_to = ring + (BITS == 16 ? b_piece / 8 % 2 * (args.columns * 256) : 0) + b_row * 128 + ((b_piece ^ b_row) & 7) * 16;
    const u32 s_to = ring + planes_bytes + WIDE_ROWS * STRIDE + ((tid & 3) * SCALES + tid / 4) * 4;
    int slot = 0, stage = 0, phase = 0, ahead = 0, announced = 0;
    auto announce = [&]() {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if ((tid & 31) == 0) barrier_arrive(full_sh + announced);
      if (++announced == DA) announced = 0;
    };
#pragma unroll 1
    for (int work = blockIdx.x; work < works; work += gridDim.x) {
      job.seek(work, slot);
      int n0, first, rows;
      const int used = job.used(work, slot, n0), cols = (used + 15) & ~15;
      const char* codes;
      const bf16* unused;
      job.rows(work, slot, a_row & 8, codes, unused, first, rows);
      const int row = first + (Job::GATED ? a_row / 16 * 8 + a_row % 8 : a_row), ROW_STEP = Job::GATED ? STEP / 2 : STEP;
      // copies of codes inside the matrix; what lies below it is not stored
      const int inside = min_int(COPIES, row < rows ? (rows - 1 - row) / ROW_STEP + 1 : 0);
      const u64 step = (u64)ROW_STEP * row_bytes;
      codes += (u64)row * row_bytes;
      u32 token[TOKENS];
#pragma unroll
      for (int j = 0; j < TOKENS; j++) token[j] = (u32)job.source(slot, n0 + min_int(b_token + j * TOKEN_STEP, used - 1)) * (groups * BLOCK) + b_piece * 16;
      const float* x_scale = args.x_scale + (u64)job.source(slot, n0 + min_int(tid, used - 1)) * scale_row(groups);
      const char* x_q = args.x_q;
#pragma unroll 1
      for (int k = 0; k < groups; k++) {
        barrier_wait(empty_sh + stage, phase ^ 1);
        const u32 at = stage * stage_bytes;
#pragma unroll
        for (int j = 0; j < TOKENS; j++)
          if (b_token + j * TOKEN_STEP < cols) copy_async_16(b_to + at + j * TOKEN_STEP * 256, x_q + token[j]);
#pragma unroll
        for (int h = 0; h < PARTS; h++) {
          const char* from = codes + min_int(k * CODES + a_piece * 16 + h * 128, row_bytes - 16);
          const u32 to = a_to + at + h * 128;
          if (inside == COPIES) {
#pragma unroll
            for (int i = 0; i < COPIES; i++) copy_async_16(to + i * STEP * STRIDE, from), from += step;
          } else {
#pragma unroll 1
            for (int i = 0; i < inside; i++) copy_async_16(to + i * STEP * STRIDE, from), from += step;
          }
        }
        if (BITS != 16 && tid < cols) copy_async_4(s_to + at, x_scale + k);
        copy_async_commit();
        x_q += BLOCK;
        if (++stage == DA) stage = 0, phase ^= 1;
        if (ahead < LAG)
          ahead++;
        else
          copy_async_wait<LAG>(), announce();
      }
    }
    copy_async_wait<0>();
    for (; ahead; ahead--) announce();
  }

  // by the other warps
  DEV void multiply() const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 flip = BITS == 16 ? 0u : 0x80808080u;
    u32 mask = 0xf0f0f0f0u;
    u32 codes_at = shared_address(ring_sh) + planes_bytes + (16 * warp + g) * STRIDE + t * 4, sx_from = shared_address(ring_sh) + planes_bytes + WIDE_ROWS * STRIDE + t * SCALES * 4;
    u32 full = shared_address(full_sh), empty = shared_address(empty_sh);
    asm volatile("" : "+r"(mask), "+r"(codes_at), "+r"(sx_from), "+r"(full), "+r"(empty));
    int stage = 0, phase = 0, slot = 0;
#pragma unroll 1
    for (int work = blockIdx.x; work < works; work += gridDim.x) {
      job.seek(work, slot);
      int n0, first, rows;
      const int used = job.used(work, slot, n0), r = 16 * warp + g;
      const char* unused;
      const bf16* s_from[2];
      u32 s_next[2][SUB ? SUB : 1];  // raw scales of the next group
#pragma unroll
      for (int i = 0; i < 2; i++) {
        job.rows(work, slot, i, unused, s_from[i], first, rows);
        s_from[i] += (u64)min_int(first + (Job::GATED ? r / 16 * 8 + r % 8 : r + 8 * i), rows - 1) * scales;
      }
      auto load_scales = [&](int k) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int q = 0; q < SUB; q++) {
            if (SUB > 1)
              s_next[i][q] = s_from[i][min_int(k * SUB + q, scales - 1)];
            else if (k < scales)
              s_next[i][q] = s_from[i][k];
          }
      };
      load_scales(0);
      float acc[BITS == 16 ? 32 : MOST_TOK / 2];
#pragma unroll
      for (int i = 0; i < (int)(sizeof(acc) / 4); i++) acc[i] = 0.f;
#pragma unroll 1
      for (int k = 0; k < groups; k++) {
        float lo[SUB ? SUB : 1], hi[SUB ? SUB : 1];
        const float unit = BITS == 4 ? 0.0625f : 1.f;
#pragma unroll
        for (int q = 0; q < SUB; q++) lo[q] = unit * to_f32(s_next[0][q]), hi[q] = unit * to_f32(s_next[1][q]);
        load_scales(k + 1);
        barrier_wait(full + stage * 8, phase);
        const u32 at = stage * stage_bytes, codes = codes_at + at;
        u32 a[F::MMAS][4];
#pragma unroll
        for (int j = 0; j < F::MMAS; j++) {
          if (BITS == 4) {
            const u32 l = load_shared(codes + 16 * j), h = load_shared(codes + 8 * STRIDE + 16 * j);
            a[j][0] = masked_flip(l << 4, mask, flip), a[j][1] = masked_flip(h << 4, mask, flip), a[j][2] = masked_flip(l, mask, flip), a[j][3] = masked_flip(h, mask, flip);
          } else {
#pragma unroll
            for (int i = 0; i < 4; i++) a[j][i] = load_shared(codes + (i & 1) * 8 * STRIDE + 32 * j + (i >> 1) * 16) ^ flip;
          }
        }
        // operands are in registers before the first product is named
#pragma unroll
        for (int j = 0; j < F::MMAS; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[j][i]));
        const u32 planes = (shared_address(ring_sh) + at) >> 4 | 1u << 16;
        const int panel = args.columns * 16;
#define RUN(TOKENS) products<BITS, SUB, (TOKENS < MOST_TOK ? TOKENS : MOST_TOK), MOST_TOK>(acc, a, planes, panel, lo, hi, sx_from + at)
        if (used <= 16)
          RUN(16);
        else if (used <= 32 || MOST_TOK == 32)
          RUN(32);
        else if (used <= 48)
          RUN(48);
        else if (used <= 64)
          RUN(64);
        else if (used <= 96)
          RUN(96);
        else
          RUN(128);
#undef RUN
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage * 8);
        if (++stage == DA) stage = 0, phase ^= 1;
      }
#pragma unroll
      for (int done = 0; done < MOST_TOK; done += 32) {
        if (done >= used) break;
        float y[8][2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const float* s = acc + (BITS == 16 ? 4 * i : done / 2 + 2 * i);
          y[i][0] = BITS == 16 ? s[0] + s[1] : s[0], y[i][1] = BITS == 16 ? s[2] + s[3] : s[1];
        }
        job.put(work, slot, r, n0 + done + t, n0 + used, y);
      }
    }
  }
};

template <int BITS, int G, class Job, class Args>
DEV void wide(const Args& args) {
  typedef Wide<BITS, G, Job, Args> W;
  const int DA = W::DA;
  extern __shared__ uint4 wide_sh[];
  __shared__ u64 full_sh[DA], empty_sh[DA];
  char* ring_sh = (char*)wide_sh + (1024 - (shared_address(wide_sh) & 1023)) % 1024;
  const int planes_bytes = args.columns * W::BLOCK, stage_bytes = (planes_bytes + WIDE_ROWS * W::STRIDE + W::SCALES_BYTES + 1023) / 1024 * 1024;
  if (threadIdx.x < DA) barrier_init(full_sh + threadIdx.x, COPY_THREADS / 32), barrier_init(empty_sh + threadIdx.x, WIDE_WARPS);
  dependency_wait();
  dependents_launch();
  const Job job(args, (int*)(ring_sh + DA * stage_bytes));
  const int K = job.inner();
  const W w = {args, job, ring_sh, full_sh, empty_sh, groups_of(K), K * BITS / 8, BITS == 16 ? 0 : G == 0 ? 1 : K / (G ? G : 1), job.works(), planes_bytes, stage_bytes};
  if (threadIdx.x >= 32 * WIDE_WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    w.copy();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    w.multiply();
  }
}
#define WIDE(KIND, NAME, BITS, G, JOB, ARGS) \
  extern "C" __global__ void __launch_bounds__(32 * WIDE_WARPS + COPY_THREADS, 1) KIND##_##NAME##_wg(const __grid_constant__ ARGS a) { wide<BITS, G, JOB>(a); }
#define FORM(NAME, BITS, G)                                            \
  WIDE(linear, NAME, BITS, G, WideDense, LinearArgs)                   \
  WIDE(moe_gate_up, NAME, BITS, G, WideExperts<true>, ExpertsArgs)     \
  WIDE(moe_down_pairs, NAME, BITS, G, WideExperts<false>, ExpertsArgs)
#include "common/forms.cuh"

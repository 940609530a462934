// All layers for one token in one launch: attention and experts of every layer, by blocks that stay.
//
//   x += s (W_o attend(W_q n(x), W_k n(x), W_v n(x)) + b);   x += s sum_rank gate W_down[e] (silu(W_gate[e] n(x)) W_up[e] n(x))
//
// The formulas, the order of all sums and so every bit are those of linear_*_s4, attention_decode_*, router_logits_t1, moe_gate_up_*_s4 and
// moe_down_*, which these blocks replace where all experts are on the device.
//
// x      [D] f32, its last bits zero, in and out; layers [num_layers] StepLayer; partial [Hk][max_splits][16][Dh + 2] words of 64 bits; uses [grid]
//        ints. Before the first launch x_box has a one as the last bit of every element, and all else that passes between blocks is zero
// needs  D, H Dh, F multiples of 128, D and H Dh <= 4096; groups of 128 fewer than 8 or a multiple of 8, of D not 5 to 7; E <= 128, K <= 32, the
//        plain highest; Dh in {64, 128}, H / Hk <= 8; int4 and int8 codes of 128 weights a scale; F <= 2048 and K split down_rows <= RED; or
//        long: F a multiple of 1024 to 16384, D <= 32 rows a block
//
// Nothing is launched between the parts of a layer, and no block waits for all others: every float that passes between blocks says by its last
// bit whether it is of this layer or of the one before (partial results by a number beside them), and who needs it reads until it is.
// A value may be overwritten a layer later, since what leads there needs what each of its readers has made of it.
// Eight warps compute; one copies what they multiply with, and keys and values, into a ring of tiles, as far ahead as there is room. It also
// chooses the experts, since it must know them first, and holds copies back while blocks wait for each other's results, which would queue behind them. Its three
// neighbours only give up registers with it.
//
// Instances step_{A}_{B}_d{Dh}, step_{A}_{B}_long_d{Dh}: A form of q, k, v, o, B of the experts. Launch: cooperative, grid at least Hk max_splits and
//   at most the multiprocessors, 384 threads, shared = AttendShared::BYTES to whole lines + 8 * 8 * 264 + 4 * 2 * RED + 48 * 128 + ring, where the ring
//   has room for any two tiles: 16 rows of A and 2 * 16 of B, or 8 and 2 * 8 of rows longer than SLICE groups, LONG_ROWS of long ones, or TILE_PAGES
//   pages of keys and values
// Floors: bytes of a layer's weights and keys at read bandwidth. Source: src/engine/cpu.
#include "common/attend.cuh"
#include "common/planes.cuh"
#include "common/routing.cuh"
#include "common/stream.cuh"

struct StepMatrix {
  const char* packed;
  const bf16* scale;
  const float* bias;  // or null
};
struct StepLayer {
  StepMatrix q;
  StepMatrix k;
  StepMatrix v;
  StepMatrix o;
  AttentionLayer cache;
  const float* gain;      // of the first norm, [D]
  const float* moe_gain;  // of the second
  const bf16* router;     // [E, D]
  const u64* table;       // [E][6] pointers: gate, up, down, each packed then scale
};
struct StepArgs {
  float* x;
  const StepLayer* layers;
  // what passes between blocks, beside q, k, v and out of attention
  float* x_box;          // [D]
  float* middle;         // [D], between attention and experts
  float* logits;         // [E, to a multiple of 4]
  float* h;              // [K F]
  u64* partial;
  int* uses;             // layers so far, of each block
  AttentionArgs attention;  // of one sequence; k and v behind q, layer and partial unused, norm 0 or 1
  int num_layers;
  int D, F;
  float eps, moe_eps;
  float scale, moe_scale;  // into the residual
  int split;             // of moe_down, whose rows are one chunk; at most 8; unused where rows are long
  int down_rows;         // of a tile: 16 or 32, LONG_ROWS where rows are long
  int ring;              // bytes
  RouteRule rule;
};

static const int COMPUTE = 8;         // warps
static const int TILES_AHEAD = 8;     // at most, a power of two, as many as there are names of places
static const int PLANE_GROUPS = 8;    // that a warp holds at a time
static const int LONG_ROWS = 4;       // of a tile where they are long
static const int LONG_ROUNDS = 2;     // pairs of groups of each quarter of one that a warp has at most
static const int LONG_PLANES = 8 * LONG_ROUNDS;
static const int RED = 2048;          // floats of partial sums
static const int SLICE = 16;          // groups of a row of which a warp has two; longer rows are two slices, whose products are one
static const int TILE_PAGES = 4;      // of a tile of keys and values, each of another warp
static const int PIECES = 8;          // copies of a tile of projections: as one it delays by 0.1 us what blocks wait for from each other

// A float with the last bit of this use.
DEV u32 tagged(float x, u32 tag) { return __float_as_uint(without_tag(x)) | tag; }
DEV void post(float* at, float x, u32 tag) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(tagged(x, tag)) : "memory"); }
DEV void post4(float* at, const float4& x, u32 tag) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(tagged(x.x, tag)), "r"(tagged(x.y, tag)), "r"(tagged(x.z, tag)), "r"(tagged(x.w, tag)) : "memory");
}
template <int E>
DEV void peek(u32* v, const float* at) {
  if constexpr (E == 4)
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(at) : "memory");
  else
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(at) : "memory");
}
// The last bit is set where one of them is not of this use.
DEV u32 wrong_tags(const uint4& v, u32 tag) { return (v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag); }
DEV float4 floats(const uint4& v) { return make_float4(__uint_as_float(v.x & ~1u), __uint_as_float(v.y & ~1u), __uint_as_float(v.z & ~1u), __uint_as_float(v.w & ~1u)); }
// What something came from that this block has taken.
DEV float known(const float* at) { return without_tag(load_f32_l2(at)); }
// Takers are whole warps, which read until all lanes that `want` have what they wait for: lanes that read by themselves would each ask apart.
// A lane's E elements of N rows
template <int N, int E>
DEV void take_rows(float (*f)[E], const float* const* row, u32 tag, const bool* want) {
  u32 v[N][E], wrong;
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int i = 0; i < E; i++) v[j][i] = tag;
  do {
    wrong = 0;
#pragma unroll
    for (int j = 0; j < N; j++)
      if (want[j]) peek<E>(v[j], row[j] + (threadIdx.x & 31) * E);
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int i = 0; i < E; i++) wrong |= v[j][i] ^ tag;
  } while (__any_sync(0xffffffffu, wrong & 1));
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int i = 0; i < E; i++) f[j][i] = __uint_as_float(v[j][i] & ~1u);
}
// N runs of eight floats, `step` apart, zeros where not wanted. Lanes that have what they want do not ask again: who waits takes from what others
// wait for. `ask` may come long before `take_asked`; `take` does both and reads in one place, which is worth 0.3 us a layer.
template <int N>
struct Runs8 {
  uint4 v[N][2];
  const float* at;
  int step;
  bool want[N];
  DEV void prepare(u32 tag) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      v[j][0] = v[j][1] = make_uint4(tag, tag, tag, tag);
      if (want[j]) v[j][0].x = tag ^ 1;
    }
  }
  DEV void peek_missing(u32 tag) {
#pragma unroll
    for (int j = 0; j < N; j++)
      if ((wrong_tags(v[j][0], tag) | wrong_tags(v[j][1], tag)) & 1) peek<4>(&v[j][0].x, at + j * step), peek<4>(&v[j][1].x, at + j * step + 4);
  }
  DEV bool there(u32 tag) const {
    u32 wrong = 0;
#pragma unroll
    for (int j = 0; j < N; j++) wrong |= wrong_tags(v[j][0], tag) | wrong_tags(v[j][1], tag);
    return !__any_sync(0xffffffffu, wrong & 1);
  }
  DEV void give(float (*f)[8]) const {
#pragma unroll
    for (int j = 0; j < N; j++) {
      *(float4*)f[j] = want[j] ? floats(v[j][0]) : make_float4(0.f, 0.f, 0.f, 0.f);
      *(float4*)(f[j] + 4) = want[j] ? floats(v[j][1]) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  DEV void ask(u32 tag) {
    prepare(tag);
    peek_missing(tag);
  }
  DEV void take_asked(float (*f)[8], u32 tag) {
    while (!there(tag)) peek_missing(tag);
    give(f);
  }
  DEV void take(float (*f)[8], u32 tag) {
    prepare(tag);
    do peek_missing(tag);
    while (!there(tag));
    give(f);
  }
};
DEV void take_logits(float* v, const float* at, int E, u32 tag) {
  const int lane = threadIdx.x & 31;
  u32 x[4], wrong;
  do {
    wrong = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = tag;
      if (lane + 32 * i < E) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x[i]) : "l"(at + lane + 32 * i) : "memory");
    }
#pragma unroll
    for (int i = 0; i < 4; i++) wrong |= x[i] ^ tag;
  } while (__any_sync(0xffffffffu, wrong & 1));
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = lane + 32 * i < E ? __uint_as_float(x[i] & ~1u) : -INFINITY_F;
}
// A float with the number of this use beside it.
DEV void post_pair(u64* at, float x, float y, u32 use) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1,%2};" ::"l"(at), "l"((u64)use << 32 | __float_as_uint(x)), "l"((u64)use << 32 | __float_as_uint(y)) : "memory");
}
// by a whole warp, until a lane's pair is of this use
DEV void await_pair(const u64* at, u32 use) {
  u64 v[2];
  do asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(at) : "memory");
  while (__any_sync(0xffffffffu, (u32)(v[0] >> 32) ^ use));
}
// three pairs of one row
DEV void take_pairs(float (*f)[2], const u64* const* at, u32 use) {
  u64 v[3][2];
  u32 wrong;
  do {
    wrong = 0;
#pragma unroll
    for (int j = 0; j < 3; j++) asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(v[j][0]), "=l"(v[j][1]) : "l"(at[j]) : "memory");
#pragma unroll
    for (int j = 0; j < 3; j++) wrong |= ((u32)(v[j][0] >> 32) ^ use) | ((u32)(v[j][1] >> 32) ^ use);
  } while (__any_sync(0xffffffffu, wrong));
#pragma unroll
  for (int j = 0; j < 3; j++) f[j][0] = __uint_as_float((u32)v[j][0]), f[j][1] = __uint_as_float((u32)v[j][1]);
}

DEV void compute_barrier() {
  __syncwarp();
  team_barrier(1, 32 * COMPUTE);
}
// Of the warps that compute, for the one that copies: what was read of the layer before is done; so is attention, whose place the experts' second
// half takes; so is that half.
enum { PROJECTED = 2, ATTENDED, DOWN_DONE };
static const int COPY_TEAM = 32 * (COMPUTE + 1);
static_assert(COMPUTE == WARPS, "all warps that compute attend");

struct __align__(16) StepShared {
  StepLayer layer[2];     // in turn
  u64 full[TILES_AHEAD];
  u64 down_full, table_full, layer_full;
  u64 first_page[COMPUTE];
  u64 halfway;            // copies, which would slow down what blocks wait for from each other, may go on: experts are half done
  int at[TILES_AHEAD];    // of a tile in the ring
  float square[2][32];    // of q, k, v's input, and of the router's
  float angle[128];
  float gate[32];
  int id[32];
  PageRun run;            // of this block's unit of attention
  int entry[COMPUTE];     // of the page table, of each warp's first page
  u32 first;              // use of the first layer
  int kv, split, splits;  // split below zero: it has none
};
static_assert(sizeof(StepShared) <= 2048, "what is kept from the ring for it");

// The ring's front, of the warp that copies; all lanes alike but for `taken`.
struct Front {
  StepShared& sh;
  char* ring_sh;
  int bytes, at, room, next, oldest;
  int taken;  // of the ring, by the tile whose barriers are those of this lane's number
  DEV Front(StepShared& shared, char* ring, int size) : sh(shared), ring_sh(ring), bytes(size), at(0), room(size), next(0), oldest(0), taken(0) {}
  // waits for room for a tile of so many bytes, and announces them
  DEV char* open(int arriving) {
    const int tile = whole_lines(arriving), waste = at + tile > bytes ? bytes - at : 0, need = tile + waste;
#pragma unroll 1
    while (room < need || next - oldest == TILES_AHEAD) {
      const int i = oldest & (TILES_AHEAD - 1);
      await_left(PLACES + i, COPY_TEAM);
      room += __shfl_sync(0xffffffffu, taken, i), oldest++;
    }
    if (waste) at = 0;
    const int i = next & (TILES_AHEAD - 1);
    if ((threadIdx.x & 31) == i) taken = need;
    if ((threadIdx.x & 31) == 0) sh.at[i] = at;
    char* to = ring_sh + at;
    at += tile, room -= need;
    stream_expect(sh.full + i, arriving);
    __syncwarp();
    return to;
  }
  DEV u64* newest() const { return sh.full + (next & (TILES_AHEAD - 1)); }
  // until the newest tile but one is there
  DEV void await_last() {
    const int tile = next - 2;
    if (tile >= 0) barrier_wait(sh.full + (tile & (TILES_AHEAD - 1)), tile / TILES_AHEAD & 1);
  }
  // until all tiles are left: no arrival outlives its block
  DEV void await_rest() {
#pragma unroll 1
    for (; oldest < next; oldest++) await_left(PLACES + (oldest & (TILES_AHEAD - 1)), COPY_TEAM);
  }
  // A tile of so many groups of one matrix or two, whole rows of each, then their scales likewise: codes of each in `pieces` copies, at most
  // eight. A copy of a few hundred bytes takes as long as one of kilobytes.
  DEV void tile(const char* packed, const bf16* scale, const char* packed2, const bf16* scale2, int matrices, int groups, int group_bytes, int pieces) {
    const int lane = threadIdx.x & 31, m = matrices == 2 ? lane & 1 : 0, piece = (lane & 15) >> (matrices - 1);
    const bool codes = lane < 16;
    const int run = groups * (codes ? group_bytes : 2), each = codes ? run / pieces : run;
    char* to = open(matrices * groups * (group_bytes + 2)) + (codes ? 0 : matrices * groups * group_bytes) + m * run + piece * each;
    stream_copies(newest(), to, (codes ? (m ? packed2 : packed) : (const char*)(m ? scale2 : scale)) + piece * each, piece < (codes ? pieces : 1) ? each : 0);
    next++;
  }
};

DEV void mma_u8_s8(int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Rows of a tile times two groups of each of WAYS slices, neighbours in the tile and in the planes; slices are `slice` groups apart in the
// tile, `planes` in the planes. Sixteen rows of a product are 16 / WAYS rows of the tile, each with all slices, and a slice has columns of
// its own. Sums of both groups, of [row] a lane as Rows says, which also says whether this lane has them.
//
// Four-bit codes are taken as they are, without sign, the upper ones times sixteen as all are in the sums, from which the total then goes.
// What neighbouring rows of a product load is a multiple of 128 bytes apart, unless it is rows with an odd number of four-bit groups. Every other
// one then begins with its second 64 bytes, so that eight rows take all banks, and so do the activations in its columns: those of its
// slice, or where there is one slice, two columns more.
template <int WAYS>
struct Rows {
  static const int SECOND = WAYS == 1 ? 8 : 4, SUMS = WAYS == 4 ? 1 : 2;  // how far the lane's second row is; sums it has of a group
  int row, way;
  bool mine;
  DEV Rows(bool crossed) {
    const int lane = thread_anew() & 31, g = lane >> 2, t = lane & 3;
    row = WAYS == 1 ? g : g >> 1, way = WAYS == 1 ? 0 : WAYS == 2 ? g & 1 : t, mine = WAYS == 4 ? !((g ^ t) & 1) : t == (g & crossed);
  }
};
template <int BITS, int WAYS>
DEV Rows<WAYS> multiply(float (*sums)[2], const char* codes_sh, const bf16* scales_sh, int groups, int at, int slice, const char* x_sh, const float* sx_sh, const int* total_sh, int planes) {
  typedef Form<BITS, 128> F;
  const int lane = thread_anew() & 31, g = lane >> 2, t = lane & 3, row_bytes = groups * F::ROW_BYTES;
  const int crossed = WAYS > 1 || row_bytes % 128 == 0, row = g & crossed, column = g >> 1 & crossed;
  const Rows<WAYS> has(crossed);
  const char *from = codes_sh + (WAYS == 1 ? g : g >> 1) * row_bytes + (at + (WAYS == 1 ? 0 : (g & 1) * slice)) * F::ROW_BYTES + t * 16;
  const char* x_from = x_sh + (WAYS == 1 ? 0 : (g >> 1 & (WAYS - 1)) * planes * 256) + (g & 1) * 64 + t * 16;
  const int run[2] = {row * 64, (row ^ 1) * 64}, second = WAYS == 4 ? 2 * slice * F::ROW_BYTES : Rows<WAYS>::SECOND * row_bytes;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int k = BITS == 4 ? n ^ row : n;
    int c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}, y[2];
    if (BITS == 4) {
      const uint4 lo = *(const uint4*)(from + run[n]), hi = *(const uint4*)(from + second + run[n]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint4 x = *(const uint4*)(x_from + (n ^ column) * 256 + i * 128);
        const u32 a[4] = {word_at(lo, 2 * i), word_at(hi, 2 * i), word_at(lo, 2 * i + 1), word_at(hi, 2 * i + 1)}, low = 0x0f0f0f0fu;
        mma_u8_s8(c[0], a[0] & low, a[1] & low, a[2] & low, a[3] & low, x.x, x.z);
        mma_u8_s8(c[1], a[0] & ~low, a[1] & ~low, a[2] & ~low, a[3] & ~low, x.y, x.w);
      }
      if (WAYS == 4)
#pragma unroll
        for (int i = 0; i < 4; i++) c[i >> 1][i & 1] = t < 2 ? c[i >> 1][i & 1] : c[i >> 1][2 + (i & 1)];
#pragma unroll
      for (int r = 0; r < Rows<WAYS>::SUMS; r++) y[r] = (c[0][2 * r] * 256 + c[0][2 * r + 1]) * 16 + c[1][2 * r] * 256 + (c[1][2 * r + 1] - total_sh[has.way * planes + k]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const char* p = from + n * 128 + run[i];
        const uint4 lo = *(const uint4*)p, hi = *(const uint4*)(p + second), x = *(const uint4*)(x_from + n * 256 + (i ^ column) * 128);
        const u32 sign = 0x80808080u, a[2][4] = {{lo.x ^ sign, hi.x ^ sign, lo.y ^ sign, hi.y ^ sign}, {lo.z ^ sign, hi.z ^ sign, lo.w ^ sign, hi.w ^ sign}};
        mma_s8(c[0], a[0], x.x, x.y);
        mma_s8(c[1], a[1], x.z, x.w);
      }
#pragma unroll
      for (int r = 0; r < 2; r++) y[r] = (c[0][2 * r] + c[1][2 * r]) * 256 + c[0][2 * r + 1] + c[1][2 * r + 1];
    }
    const float unit = BITS == 4 ? 0.0625f : 1.f;
#pragma unroll
    for (int r = 0; r < Rows<WAYS>::SUMS; r++)
      sums[n][r] = __fmul_rn(unit * to_f32(scales_sh[(has.row + Rows<WAYS>::SECOND * r) * groups + has.way * slice + at + k]) * sx_sh[has.way * planes + k], (float)y[r]);
  }
  if (BITS == 4 && row) {
#pragma unroll
    for (int r = 0; r < Rows<WAYS>::SUMS; r++) {
      const float first = sums[1][r];
      sums[1][r] = sums[0][r], sums[0][r] = first;
    }
  }
  return has;
}

// Sums of groups as SEGMENTS warps leave them that split k: each its own in order, then one after the other. Fewer groups than segments, or a
// multiple of them, at most 32.
template <int SEGMENTS>
DEV float fold(const float* part, int stride, int groups) {
  const int each = groups < SEGMENTS ? 1 : groups / SEGMENTS;
  float sums[SEGMENTS];
#pragma unroll
  for (int s = 0; s < SEGMENTS; s++) sums[s] = s < groups ? part[s * each * stride] : 0.f;
#pragma unroll 1
  for (int i = 1; i < each; i++)
#pragma unroll
    for (int s = 0; s < SEGMENTS; s++) sums[s] += part[(s * each + i) * stride];
  float y = 0.f;
#pragma unroll
  for (int s = 0; s < SEGMENTS; s++) y += sums[s];
  return y;
}

template <int A, int B, int DH, bool LONG>
struct Step {
  typedef AttendShared<DH, false> Unit;
  static const int UNIT_BYTES = whole_lines(Unit::BYTES);
  const StepArgs& a;
  StepShared& sh;
  const int warp, lane;
  int tile, turn, downs;  // how far this warp has come: tiles of the ring, halves of the sums, tiles of the experts' second half

  DEV Step(const StepArgs& args, StepShared& shared) : a(args), sh(shared), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), tile(0), turn(0), downs(0) {}

  // Shared memory: a unit of attention, planes of each warp, their scales and totals, sums, addresses of experts, the ring.
  DEV char* unit() const {
    extern __shared__ __align__(COPY_LINE) uint4 step_sh[];
    return (char*)step_sh;
  }
  DEV char* planes() const { return unit() + UNIT_BYTES + warp * PLANE_GROUPS * 256; }
  DEV float* plane_scales() const { return (float*)(unit() + UNIT_BYTES + COMPUTE * PLANE_GROUPS * 256) + warp * PLANE_GROUPS; }
  DEV int* plane_totals() const { return (int*)(unit() + UNIT_BYTES + COMPUTE * PLANE_GROUPS * 260) + warp * PLANE_GROUPS; }
  DEV float* sums() const { return (float*)(unit() + UNIT_BYTES + COMPUTE * PLANE_GROUPS * 264) + turn * RED; }
  DEV u64* table() const { return (u64*)(unit() + UNIT_BYTES + COMPUTE * PLANE_GROUPS * 264 + 8 * RED); }
  DEV char* ring() const { return (char*)(table() + 6 * 128); }

  // Slices of a row, and rows of a matrix in a tile.
  DEV static int slice_of(int groups) { return groups > SLICE ? groups / 2 : groups; }
  DEV static int rows_log(int groups) { return groups > SLICE ? 3 : 4; }
  DEV static int rows_of(int groups) { return 1 << rows_log(groups); }
  // A block reads what all others must wait with overwriting only where it has a share of what follows.
  DEV bool chooses() const { return (int)blockIdx.x < a.rule.K * (a.F >> rows_log(a.D / 128)) || (int)blockIdx.x * a.down_rows < a.D; }
  DEV bool routes() const { return (int)blockIdx.x < a.rule.E || chooses(); }

  // ------------------------------------------------------------------------------------------------------------- compute
  DEV char* wait_tile() {
    barrier_wait(sh.full + (tile & (TILES_AHEAD - 1)), tile / TILES_AHEAD & 1);
    return ring() + sh.at[tile & (TILES_AHEAD - 1)];
  }
  DEV void leave_tile() {
    leave(PLACES + (tile & (TILES_AHEAD - 1)), COPY_TEAM);
    tile++;
  }

  // Of both slices of a row, or the one, this warp has groups `2 warp` and `2 warp + 1`, a half of it one of them, a lane eight elements.
  DEV int group(int j, int groups) const { return j * slice_of(groups) + 2 * warp + (lane >> 4); }
  DEV int element(int j, int groups) const { return group(j, groups) * 128 + (lane & 15) * 8; }
  DEV bool has(int j, int groups) const { return (j == 0 || groups > SLICE) && 2 * warp + (lane >> 4) < slice_of(groups); }
  // They times a gain (or null), with squares of groups; planes follow.
  DEV void take_row(float (*f)[8], const float* from, const float* gain, float* square_sh, int groups, u32 tag) {
    float by[2][8];
    Runs8<2> row;
    row.at = from + element(0, groups), row.step = slice_of(groups) * 128;
#pragma unroll
    for (int j = 0; j < 2; j++) row.want[j] = has(j, groups);
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 8; i++) by[j][i] = 1.f;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (gain && has(j, groups)) *(float4*)by[j] = *(const float4*)(gain + element(j, groups)), *(float4*)(by[j] + 4) = *(const float4*)(gain + element(j, groups) + 4);
    row.take(f, tag);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (j == 1 && groups <= SLICE) break;
      if (gain) {
        const float square = group_square(f[j]);
        if (has(j, groups) && (lane & 15) == 0) square_sh[group(j, groups)] = square;
      }
#pragma unroll
      for (int i = 0; i < 8; i++) f[j][i] *= by[j][i];
    }
  }
  template <int BITS>
  DEV void stage(const float (*f)[8], int groups) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (j == 1 && groups <= SLICE) break;
      make_block<BITS>(planes() + (2 * j + (lane >> 4)) * 256, plane_scales() + 2 * j + (lane >> 4), lane & 15, f[j], has(j, groups), BITS == 4 ? plane_totals() + 2 * j + (lane >> 4) : 0);
    }
    __syncwarp();
  }

  // Sums of the groups that this warp has, of a matrix in a tile: part [groups][ROWS].
  template <int BITS, int WAYS>
  DEV void tile_sums(float* part, int ROWS, const char* codes_sh, const bf16* scales_sh, int groups) {
    const int slice = groups / WAYS;
    // where a slice has fewer groups than all warps take
    if (2 * warp >= slice) return;
    float sums[2][2];
    const Rows<WAYS> has = multiply<BITS, WAYS>(sums, codes_sh, scales_sh, groups, 2 * warp, slice, planes(), plane_scales(), plane_totals(), 2);
    float* to = part + (has.way * slice + 2 * warp) * ROWS + has.row;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (has.mine && 2 * warp + i < slice) to[i * ROWS] = sums[i][0], to[i * ROWS + Rows<WAYS>::SECOND] = sums[i][1];
  }
  // Products of the staged row with tiles of sixteen rows, or eight that are longer than a slice (GATED: of each of two matrices): put(tile, row,
  // sum, early(tile, row)) by some warp, where early is asked before sums are there.
  template <int BITS, bool GATED, class Early, class Put>
  DEV void products(int tiles, int groups, const Early& early, const Put& put) {
    const int each = rows_of(groups), ROWS = GATED ? 2 * each : each, most = min_int(COMPUTE, RED / (groups * ROWS));
#pragma unroll 1
    for (int next = blockIdx.x; next < tiles;) {
      const int first = next;
      float* part = sums();
      int n = 0;
#pragma unroll 1
      for (; n < most && next < tiles; n++, next += gridDim.x) {
        const char* codes_sh = wait_tile();
        const bf16* scales_sh = (const bf16*)(codes_sh + ROWS * groups * Form<BITS, 128>::ROW_BYTES);
#pragma unroll 1
        for (int row = 0; row < ROWS; row += each) {
          float* to = part + n * groups * ROWS + row;
          const char* codes = codes_sh + row * groups * Form<BITS, 128>::ROW_BYTES;
          if (groups > SLICE)
            tile_sums<BITS, 2>(to, ROWS, codes, scales_sh + row * groups, groups);
          else
            tile_sums<BITS, 1>(to, ROWS, codes, scales_sh + row * groups, groups);
        }
        leave_tile();
      }
      const int mine = first + warp * gridDim.x, row = lane & (ROWS - 1);
      const float more = warp < n ? early(mine, row) : 0.f;
      compute_barrier();
      if (warp < n) put(mine, row, fold<GATED ? 4 : 8>(part + warp * groups * ROWS + row, ROWS, groups), more);
      turn ^= 1;
    }
  }

  // Groups of the input and tiles of q, k, v, or of the output projection; the matrix of a tile, and the tile's first row in it.
  DEV int projected_groups(bool last) const { return (last ? a.attention.H * DH : a.D) / 128; }
  DEV int projected_tiles(bool last) const { return (last ? a.D : (a.attention.H + 2 * a.attention.Hk) * DH) >> rows_log(projected_groups(last)); }
  DEV const StepMatrix& place(const StepLayer& y, bool last, int t, int& row) const {
    const int q_rows = a.attention.H * DH, kv_rows = a.attention.Hk * DH;
    row = t << rows_log(projected_groups(last));
    const int matrix = last ? 3 : (row >= q_rows) + (row >= q_rows + kv_rows);
    row -= matrix == 1 ? q_rows : matrix == 2 ? q_rows + kv_rows : 0;
    return (&y.q)[matrix];
  }
  DEV bool projects(bool last) const { return (int)blockIdx.x < projected_tiles(last); }
  // q, k, v of x, or x and the output projection of attention.
  DEV void project(const StepLayer& y, bool last, u32 before, u32 tag) {
    const int groups = projected_groups(last), rows = rows_of(groups), tiles = projected_tiles(last);
    if (!projects(last)) return;
    float f[2][8];
    take_row(f, last ? a.attention.out : a.x_box, last ? 0 : y.gain, sh.square[0], groups, last ? tag : before);
    if (!last) ask_first_page(y.cache);
    stage<A>(f, groups);
    products<A, false>(tiles, groups, [&](int t, int r) { return last ? known(a.x_box + t * rows + r) : 0.f; }, [&](int t, int r, float sum, float x) {
      int row;
      const float* bias = place(y, last, t, row).bias;
      if (!last) sum *= inverse_rms(sh.square[0], groups, a.D, a.eps);
      if (bias) sum = __fadd_rn(sum, bias[row + r]);
      if (last) sum = __fadd_rn(__fmul_rn(sum, a.scale), x);
      if (lane < rows) post((last ? a.middle : (float*)a.attention.q) + t * rows + r, sum, tag);
    });
  }

  // A warp's first page has a place of its own and is asked for as soon as x is there, the others are in tiles of the ring.
  static const int PAGE_BYTES = 2 * PAGE * DH * 2;
  struct Together {
    static const bool WHOLE_NORM = false, ANGLES = false, STREAMED = true;
    Step& s;
    u32 use;
    DEV void wait() const {}
    DEV void sync() const { compute_barrier(); }
    template <int N, int E>
    DEV void load(float (*f)[E], const float* const* row, const bool* want) const {
      take_rows<N, E>(f, row, use & 1, want);
    }
    template <class Absorb>
    DEV void pages(const PageRun& run, const Absorb& absorb) const {
      const int begin = run.page_begin, end = run.page_end;
#pragma unroll 1
      for (int first = begin; first < end;) {
        const bool own = first == begin;
        const int place = own ? s.warp : (s.warp - (first - begin)) & (WARPS - 1);
        const bool mine = place < (own ? WARPS : TILE_PAGES) && first + place < end;
        char* from = s.unit();
        if (!own)
          from = s.wait_tile();
        else if (mine)
          barrier_wait(s.sh.first_page + s.warp, use - s.sh.first & 1);
        if (mine) absorb(first + place, (bf16*)(from + place * PAGE_BYTES));
        if (!own) s.leave_tile();
        first += own ? WARPS : TILE_PAGES;
      }
    }
  };
  DEV void ask_first_page(const AttentionLayer& y) {
    if (sh.split < 0 || sh.run.page_begin + warp >= sh.run.page_end || lane != 0) return;
    const size_t at = page_at(DH, a.attention.Hk, sh.entry[warp], sh.kv);
    char* to = unit() + warp * PAGE_BYTES;
    stream_fence_shared();
    stream_expect_one(sh.first_page + warp, PAGE_BYTES);
    bulk_load(sh.first_page + warp, to, y.k_pages + at, PAGE_BYTES / 2);
    bulk_load(sh.first_page + warp, to + PAGE_BYTES / 2, y.v_pages + at, PAGE_BYTES / 2);
  }
  DEV void attend(const StepLayer& y, u32 use) {
    const u32 tag = use & 1;
    const int group = a.attention.H / a.attention.Hk, stride = DH + 2, splits = sh.splits;
    if (sh.split >= 0) {
      const int split = sh.split;
      attend_run<DH, false>(a.attention, y.cache, unit(), sh.angle, Together{*this, use}, 0, sh.kv, sh.run, split == splits - 1, [&](int h, int d, const float4& v, float best, float total) {
        if (splits == 1) {
          post4(a.attention.out + (sh.kv * group + h) * DH + d, merged(v, total), tag);
        } else {
          u64* to = a.partial + (((u64)sh.kv * a.attention.max_splits + split) * 16 + h) * stride;
          post_pair(to + d, v.x, v.y, use), post_pair(to + d + 2, v.z, v.w, use);
          if (d == 0) post_pair(to + DH, best, total, use);
        }
      });
    }
    if (splits == 1) return;
    // four elements a warp
    const int items = a.attention.H * DH / 4, each = div_up(items, (int)gridDim.x), first = blockIdx.x * each;
    auto row_of = [&](int head) {
      const int kv = head / group;
      return a.partial + (((u64)kv * a.attention.max_splits + min_int(lane, splits - 1)) * 16 + head - kv * group) * stride;
    };
    if (first >= items) return;
    // One warp waits for the first item's, the others for it: all of them asking for all that they want would hold up what they wait for.
    if (warp == 0) await_pair(row_of(first / (DH / 4)) + DH, use);
    compute_barrier();
#pragma unroll 1
    for (int i = warp; i < each && first + i < items; i += COMPUTE) {
      const int head = (first + i) / (DH / 4), d = (first + i) % (DH / 4) * 4;
      const u64* row = row_of(head);
      float v[6];
      const u64* const at[3] = {row + d, row + d + 2, row + DH};
      take_pairs((float(*)[2])v, at, use);
      const float total = merge_lanes(v, lane < splits ? v[4] : -INFINITY_F, v[5], splits > LAST_SPLITS ? 32 : LAST_SPLITS);
      if (lane == 0) post4(a.attention.out + head * DH + d, merged(make_float4(v[0], v[1], v[2], v[3]), total), tag);
    }
  }

  DEV void route(const StepLayer& y, u32 tag) {
    const int groups = a.D / 128, E = a.rule.E;
    float f[2][8];
    uint4 w[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    auto load_router = [&](int e) {
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (has(j, groups) && e < E) w[j] = load_v4(y.router + (size_t)e * a.D + element(j, groups));
    };
    load_router(blockIdx.x);
    take_row(f, a.middle, y.moe_gain, sh.square[1], groups, tag);
    float* part = sums();
    int n = 0;
#pragma unroll 1
    for (int e = blockIdx.x; e < E; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        if (j == 1 && groups <= SLICE) break;
        float r[8];
#pragma unroll
        for (int i = 0; i < 4; i++) r[2 * i] = bf16_lo(word_at(w[j], i)), r[2 * i + 1] = bf16_hi(word_at(w[j], i));
        const float one = group_dot(r, *(float4*)f[j], *(float4*)(f[j] + 4));
        if (has(j, groups) && (lane & 15) == 0) part[n * groups + group(j, groups)] = one;
      }
      e += gridDim.x;
      load_router(e);
    }
    compute_barrier();
    const float inv = inverse_rms(sh.square[1], groups, a.D, a.moe_eps);
#pragma unroll 1
    for (int i = warp; i < n; i += COMPUTE) {
      const float sum = sum_groups(part + i * groups, groups);
      if (lane == 0) post(a.logits + blockIdx.x + i * gridDim.x, __fmul_rn(sum, inv), tag);
    }
    turn ^= 1;
    stage<B>(f, groups);
    if (lane < 4) plane_scales()[lane] *= inv;
    __syncwarp();
  }

  DEV void gate_up(u32 tag) {
    const int rows_bits = rows_log(a.D / 128), rows = 1 << rows_bits;
    products<B, true>(a.rule.K * (a.F >> rows_bits), a.D / 128, [](int, int) { return 0.f; }, [&](int t, int r, float sum, float) {
      const float up = __shfl_down_sync(0xffffffffu, sum, rows);
      if (lane < rows) post(a.h + t * rows + r, silu(sum) * up, tag);
    });
  }

  // Rows of a tile times all chosen experts; teams of `split` warps take an expert each.
  DEV void down(bool last, u32 tag) {
    const int groups = a.F / 128, K = a.rule.K, ROWS = a.down_rows, split = a.split, shift = __ffs(split) - 1, team = warp >> shift, part = warp - team * split, teams = COMPUTE >> shift;
    const int each = div_up(groups, split), begin = min_int(groups, each * part), end = min_int(groups, each * (part + 1)), code_bytes = 16 * groups * Form<B, 128>::ROW_BYTES;
    if (threadIdx.x == 0 && chooses() && (int)blockIdx.x * ROWS >= a.D) barrier_arrive(&sh.halfway);
#pragma unroll 1
    for (int next = blockIdx.x; next * ROWS < a.D; next += gridDim.x) {
      bool arrived = false;
      const float before = known(a.middle + next * ROWS + (lane & (ROWS - 1)));
#pragma unroll 1
      for (int rank = team; rank < K; rank += teams) {
        float all[2][2] = {{0.f, 0.f}, {0.f, 0.f}};  // [sixteen rows]
        bool mine = false;
        const char* codes_sh = unit() + rank * ROWS * groups * (Form<B, 128>::ROW_BYTES + 2);
        const bf16* scales_sh = (const bf16*)(codes_sh + ROWS / 16 * code_bytes);
#pragma unroll 1
        for (int first = begin; first < end; first += PLANE_GROUPS) {
          // up to eight groups of h, a half of the warp one at a time
          const int half = lane >> 4, passes = div_up(min_int(PLANE_GROUPS, end - first), 2);
          float f[4][8];
          Runs8<4> h;
          h.at = a.h + rank * a.F + (first + half) * 128 + (lane & 15) * 8, h.step = 256;
#pragma unroll
          for (int j = 0; j < 4; j++) h.want[j] = j < passes && first + 2 * j + half < end;
          h.take(f, tag);
          if (threadIdx.x == 0 && rank == 0 && first == begin && next == blockIdx.x) barrier_arrive(&sh.halfway);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            if (j >= passes) break;
            make_block<B>(planes() + (2 * j + half) * 256, plane_scales() + 2 * j + half, lane & 15, f[j], true, B == 4 ? plane_totals() + 2 * j + half : 0);
          }
          __syncwarp();
          if (!arrived) barrier_wait(&sh.down_full, downs & 1), arrived = true;
#pragma unroll
          for (int i = 0; i < 2; i++) {
            if (i * 16 >= ROWS) break;
#pragma unroll 1
            for (int j = 0; j < passes; j++) {
              float sums[2][2];
              const int k = first + 2 * j;
              // of the group behind an odd last one nothing is kept
              mine = multiply<B, 1>(sums, codes_sh + i * code_bytes, scales_sh + i * 16 * groups, groups, k, 0, planes() + 2 * j * 256, plane_scales() + 2 * j, plane_totals() + 2 * j, 0).mine;
#pragma unroll
              for (int r = 0; r < 2; r++) {
                all[i][r] += sums[0][r];
                if (k + 1 < end) all[i][r] += sums[1][r];
              }
            }
          }
          __syncwarp();
        }
        if (mine) {
          float* to = sums() + (rank * split + part) * ROWS + (lane >> 2);
          to[0] = all[0][0], to[8] = all[0][1];
          if (ROWS > 16) to[16] = all[1][0], to[24] = all[1][1];
        }
      }
      downs++;
      compute_barrier();
      leave(DOWN_DONE, COPY_TEAM);
      if (warp == 0) {
        const float* from = sums() + (lane & (ROWS - 1));
        float sum = 0.f;
#pragma unroll 1
        for (int p0 = 0; p0 < K; p0 += 8) {
          float one[8];
#pragma unroll
          for (int p = 0; p < 8; p++) one[p] = p0 + p < K ? from[(p0 + p) * split * ROWS] : 0.f;
#pragma unroll 1
          for (int i = 1; i < split; i++)
#pragma unroll
            for (int p = 0; p < 8; p++) one[p] += p0 + p < K ? from[((p0 + p) * split + i) * ROWS] : 0.f;
#pragma unroll
          for (int p = 0; p < 8; p++) sum = p0 + p < K ? fmaf(sh.gate[p0 + p], one[p], sum) : sum;
        }
        const float y = fmaf(a.moe_scale, sum, before);
        if (lane < ROWS && last) a.x[next * ROWS + lane] = without_tag(y);
        if (lane < ROWS && !last) post(a.x_box + next * ROWS + lane, y, tag);
      }
      turn ^= 1;
    }
  }

  // The same where rows are long: four rows a tile, from the ring, all of an expert's before those of the next. Of each quarter of h this warp has
  // every eighth pair of groups; their planes lie where attention was.
  DEV void down_long(bool last, u32 tag) {
    const int ROWS = LONG_ROWS, groups = a.F / 128, quarter = groups / 4, pairs = quarter / 2, parts = 4 * pairs;
    const int tiles = ((int)gridDim.x - 1 - (int)blockIdx.x + a.D / ROWS) / (int)gridDim.x;
    if (tiles == 0) {
      if (threadIdx.x == 0 && chooses()) barrier_arrive(&sh.halfway);
      return;
    }
    char* h_sh = unit() + warp * LONG_PLANES * 256;  // [round][quarter][two]
    float* h_scales = (float*)(unit() + COMPUTE * LONG_PLANES * 256) + warp * LONG_PLANES;
    int* h_totals = (int*)(unit() + COMPUTE * LONG_PLANES * 260) + warp * LONG_PLANES;
    // of a lane of the first warp
    const int out = (blockIdx.x + min_int(lane / ROWS, tiles - 1) * gridDim.x) * ROWS + lane % ROWS;
    const float before = warp == 0 ? known(a.middle + out) : 0.f;
    float sum = 0.f;
    Runs8<4> h[LONG_ROUNDS];
    auto ask = [&](int rank) {
#pragma unroll
      for (int round = 0; round < LONG_ROUNDS; round++) {
        const int pair = round * COMPUTE + warp;
        h[round].at = a.h + rank * a.F + (2 * pair + (lane >> 4)) * 128 + (lane & 15) * 8, h[round].step = quarter * 128;
#pragma unroll
        for (int j = 0; j < 4; j++) h[round].want[j] = pair < pairs;
        h[round].ask(tag);
      }
    };
    ask(0);
#pragma unroll 1
    for (int rank = 0; rank < a.rule.K; rank++) {
#pragma unroll
      for (int round = 0; round < LONG_ROUNDS; round++) {
        float f[4][8];
        h[round].take_asked(f, tag);
        if (threadIdx.x == 0 && rank == 0 && round == 0) barrier_arrive(&sh.halfway);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = round * 8 + 2 * j + (lane >> 4);
          make_block<B>(h_sh + i * 256, h_scales + i, lane & 15, f[j], h[round].want[j], B == 4 ? h_totals + i : 0);
        }
      }
      __syncwarp();
      if (rank + 1 < a.rule.K) ask(rank + 1);
      float* part = sums();
#pragma unroll 1
      for (int t = 0; t < tiles; t++) {
        const char* codes_sh = wait_tile();
        const bf16* scales_sh = (const bf16*)(codes_sh + ROWS * groups * Form<B, 128>::ROW_BYTES);
        auto product = [&](float (*two)[2], int round) { return multiply<B, 4>(two, codes_sh, scales_sh, groups, 2 * (round * COMPUTE + warp), quarter, h_sh + round * 8 * 256, h_scales + round * 8, h_totals + round * 8, 2); };
        auto keep = [&](const float (*two)[2], const Rows<4>& has, int round) {
          if (has.mine) part[(has.way * pairs + round * COMPUTE + warp) * 32 + t * ROWS + has.row] = two[0][0] + two[1][0];
        };
        if (warp + COMPUTE < pairs) {
          float first[2][2], second[2][2];
          const Rows<4> has = product(first, 0);
          product(second, 1);
          keep(first, has, 0), keep(second, has, 1);
        } else if (warp < pairs) {
          float first[2][2];
          const Rows<4> has = product(first, 0);
          keep(first, has, 0);
        }
        leave_tile();
      }
      compute_barrier();
      if (warp == 0) {
        float one = 0.f;
#pragma unroll 8
        for (int i = 0; i < parts; i++) one += part[i * 32 + lane];
        sum = fmaf(sh.gate[rank], one, sum);
      }
      turn ^= 1;
    }
    if (warp == 0 && lane < tiles * ROWS) {
      const float y = fmaf(a.moe_scale, sum, before);
      if (last)
        a.x[out] = without_tag(y);
      else
        post(a.x_box + out, y, tag);
    }
  }

  DEV void compute(u32 use) {
    for (int row = blockIdx.x * 32 * COMPUTE + threadIdx.x; row < a.D; row += gridDim.x * 32 * COMPUTE) post(a.x_box + row, a.x[row], use & 1 ^ 1);
    load_angles(sh.angle, a.attention, *a.attention.positions, threadIdx.x, 32 * COMPUTE);
    if (sh.split >= 0 && lane == 0 && sh.run.page_begin + warp < sh.run.page_end) sh.entry[warp] = sh.run.table[sh.run.page_begin + warp];
    compute_barrier();
#pragma unroll 1
    for (int part = 0; part < 2 * a.num_layers; part++) {
      const int layer = part >> 1;
      const bool last = part & 1;
      const StepLayer& y = sh.layer[layer & 1];
      if (!last) {
        barrier_wait(&sh.layer_full, layer & 1);
        // Blocks with a share of both projections meet there. Others do here: before what is asked for goes where a warp may still merge, and
        // before copies of a layer go on, whose number is told by its last bit.
        if (!projects(false) || !projects(true)) compute_barrier();
        if (!projects(false)) ask_first_page(y.cache);
      } else {
        leave(PROJECTED, COPY_TEAM);
        attend(y, sh.first + layer);
        if (!LONG && chooses()) leave(ATTENDED, COPY_TEAM);
      }
      const u32 tag = sh.first + layer & 1;
      project(y, last, tag ^ 1, tag);
      if (!last) continue;
      if (routes()) route(y, tag);
      gate_up(tag);
      if (LONG)
        down_long(layer == a.num_layers - 1, tag);
      else
        down(layer == a.num_layers - 1, tag);
    }
  }

  // By one thread, before all others start.
  DEV void begin(u32 use) {
    sh.first = use;
    sh.run.position = *a.attention.positions, sh.run.table = a.attention.page_table;
    const int split = blockIdx.x / a.attention.Hk;
    sh.kv = blockIdx.x - split * a.attention.Hk;
    sh.split = find_run(sh.run, a.attention.window, split, a.attention.max_splits, sh.splits) ? split : -1;
  }

  // ---------------------------------------------------------------------------------------------------------------- copy
  DEV void copy(u32 use) {
    Front front(sh, ring(), a.ring);
    const int GROUP = Form<A, 128>::ROW_BYTES;
#pragma unroll 1
    for (int layer = 0; layer < a.num_layers; layer++, use++) {
      const StepLayer& y = sh.layer[layer & 1];
      stream_expect(&sh.layer_full, sizeof(StepLayer));
      stream_copies(&sh.layer_full, (char*)&sh.layer[layer & 1], a.layers + layer, lane == 0 ? sizeof(StepLayer) : 0);
      barrier_wait(&sh.layer_full, layer & 1);
      // projections, the first half of the chosen experts, the second
      if (layer && chooses()) barrier_wait(&sh.halfway, layer & 1 ^ 1);
#pragma unroll 1
      for (int last = 0; last < 2; last++) {
        const int groups = projected_groups(last);
        if (last) await_left(PROJECTED, COPY_TEAM), page_tiles(front, y);
#pragma unroll 1
        for (int t = blockIdx.x; t < projected_tiles(last); t += gridDim.x) {
          int row;
          const StepMatrix& m = place(y, last, t, row);
          front.tile(m.packed + (u64)row * groups * GROUP, m.scale + (u64)row * groups, 0, 0, 1, rows_of(groups) * groups, GROUP, PIECES);
        }
      }
      if (!chooses()) continue;
      choose_experts(front, y, layer, use & 1);
      if (LONG) {
        long_tiles(front);
        continue;
      }
      front.await_last();
      await_left(ATTENDED, COPY_TEAM);
      down_tiles();
    }
    front.await_rest();
    if (downs) await_left(DOWN_DONE, COPY_TEAM);
  }
  // Keys and values of all pages of this block's unit but each warp's first.
  DEV void page_tiles(Front& front, const StepLayer& y) {
    const int begin = sh.run.page_begin + WARPS, end = sh.split < 0 ? begin : sh.run.page_end, place = lane >> 1;
    auto entry_of = [&](int first) { return place < TILE_PAGES && first + place < end ? sh.run.table[first + place] : -1; };
    int entry = entry_of(begin);
#pragma unroll 1
    for (int first = begin; first < end; first += TILE_PAGES) {
      const int next = entry_of(first + TILE_PAGES);
      char* to = front.open(min_int(TILE_PAGES, end - first) * PAGE_BYTES) + lane * (PAGE_BYTES / 2);
      stream_copies(front.newest(), to, (lane & 1 ? y.cache.v_pages : y.cache.k_pages) + page_at(DH, a.attention.Hk, entry, sh.kv), entry < 0 ? 0 : PAGE_BYTES / 2);
      front.next++;
      entry = next;
    }
  }
  // Asks for tiles of the first half as soon as their expert is known.
  DEV void choose_experts(Front& front, const StepLayer& y, int layer, u32 tag) {
    const int groups = a.D / 128, rows = rows_of(groups), tiles = a.F >> rows_log(groups), GROUP = Form<B, 128>::ROW_BYTES;
    stream_expect(&sh.table_full, 48 * a.rule.E);
    stream_copies(&sh.table_full, (char*)table(), y.table, lane == 0 ? 48 * a.rule.E : 0);
    barrier_wait(&sh.table_full, layer & 1);
    float v[4], gate;
    int id, next = blockIdx.x;
    take_logits(v, a.logits, a.rule.E, tag);
    choose<4, false>(id, gate, a.rule, v, 0, [&](int rank, int expert) {
#pragma unroll 1
      for (; next < (rank + 1) * tiles; next += gridDim.x) {
        const u64 *at = table() + expert * 6, row = (u64)(next - rank * tiles) * rows * groups;
        front.tile((const char*)at[0] + row * GROUP, (const bf16*)at[1] + row, (const char*)at[2] + row * GROUP, (const bf16*)at[3] + row, 2, rows * groups, GROUP, 1);
      }
    });
    if (lane < a.rule.K) sh.id[lane] = id, sh.gate[lane] = gate;
    __syncwarp();
  }
  DEV void long_tiles(Front& front) {
    const int groups = a.F / 128, GROUP = Form<B, 128>::ROW_BYTES;
#pragma unroll 1
    for (int p = 0; p < a.rule.K; p++)
#pragma unroll 1
      for (int t = blockIdx.x; t * LONG_ROWS < a.D; t += gridDim.x) {
        const u64 *at = table() + sh.id[p] * 6 + 4, row = (u64)t * LONG_ROWS * groups;
        front.tile((const char*)at[0] + row * GROUP, (const bf16*)at[1] + row, 0, 0, 1, LONG_ROWS * groups, GROUP, 1);
      }
  }
  // A tile of rows of all experts into the place of attention, which is done.
  DEV void down_tiles() {
    const int groups = a.F / 128, ROWS = a.down_rows, K = a.rule.K, code_bytes = ROWS * groups * Form<B, 128>::ROW_BYTES, bytes = code_bytes + ROWS * groups * 2;
    const bool codes = lane < 16;
    stream_fence_shared();
#pragma unroll 1
    for (int t = blockIdx.x; t * ROWS < a.D; t += gridDim.x) {
      if (downs++) await_left(DOWN_DONE, COPY_TEAM);
      stream_expect(&sh.down_full, K * bytes);
      __syncwarp();
#pragma unroll 1
      for (int p = lane & 15; p < K; p += 16) {
        const u64* at = table() + sh.id[p] * 6 + 4;
        stream_copies(&sh.down_full, unit() + p * bytes + (codes ? 0 : code_bytes), (const char*)at[codes ? 0 : 1] + (u64)t * (codes ? code_bytes : bytes - code_bytes), codes ? code_bytes : bytes - code_bytes);
      }
      __syncwarp();
    }
  }
};

template <int A, int B, int DH, bool LONG>
DEV void step(const StepArgs& a) {
  __shared__ StepShared sh;
  if (threadIdx.x == 0) {
    for (int i = 0; i < TILES_AHEAD; i++) barrier_init(sh.full + i, STREAM_ARRIVALS);
    barrier_init(&sh.down_full, STREAM_ARRIVALS), barrier_init(&sh.table_full, STREAM_ARRIVALS), barrier_init(&sh.layer_full, STREAM_ARRIVALS), barrier_init(&sh.halfway, 1);
    for (int i = 0; i < COMPUTE; i++) barrier_init(sh.first_page + i, 1);
  }
  barrier_init_done();
  const u32 use = a.uses[blockIdx.x] + 1;
  Step<A, B, DH, LONG> s(a, sh);
  if (threadIdx.x == 0) s.begin(use);
  __syncthreads();
  if (s.warp >= COMPUTE) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    if (s.warp == COMPUTE) s.copy(use);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    s.compute(use);
  }
  __syncthreads();
  if (thread_anew() == 0) a.uses[blockIdx.x] += a.num_layers;
}

#define STEP(NAME, A, B, DH, LONG) \
  extern "C" __global__ void __launch_bounds__(32 * (COMPUTE + 4), 1) step_##NAME##_d##DH(const __grid_constant__ StepArgs a) { step<A, B, DH, LONG>(a); }
#define STEPS(NAME, A, B, LONG) STEP(NAME, A, B, 64, LONG) STEP(NAME, A, B, 128, LONG)
#if !defined(ONE_FORM) || defined(FORM_w8_w4)
STEPS(w8_w4, 8, 4, false)
#endif
#if !defined(ONE_FORM) || defined(FORM_w4_w4)
STEPS(w4_w4, 4, 4, false)
#endif
#if !defined(ONE_FORM) || defined(FORM_w8_w4_long)
STEPS(w8_w4_long, 8, 4, true)
#endif
#if !defined(ONE_FORM) || defined(FORM_w4_w4_long)
STEPS(w4_w4_long, 4, 4, true)
#endif

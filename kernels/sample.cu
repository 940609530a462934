// Logits to a token on the device: repetition penalty, temperature, top-k, min-p, top-p, one draw. The rules, the order of the filters
// and every rounding are those of src/sample.rs, so that equal logits and seeds give equal tokens on both.
//
// A weight exp2((logit - best) scale), scale = log2(e) / temperature, is an integer in units of 2^-40 made of single-precision operations in
// a fixed order: sums are exact and know no order. Tokens rank by logit, then id: rank = (key(best) - key(logit)) << 32 | id. What a filter
// keeps is all ranks up to a cut, found from a histogram over the exponent, then exactly among the tokens of one of its bins.
//
// sample_best: grid (blocks, T), 256 threads: the best token of each row, and the first logit that is no number
// sample_bins: grid (32, T), 256 threads: a slice of a row into the histogram, and the mass of the slice
// sample_draw: grid T, 1024 threads: the cuts, the draw, the next state; leaves best, bad, counts and masses at zero
//
// Floors, V = 152k: the row is read twice (1.2 MB, 0.3 us at full speed), then once from L2 by one block for each cut and once for the draw
// among what is left (608 KB at 64 bytes a clock: 5 us). 25 operations a weight. Reference: src/sample.rs.
#include "common/reduce.cuh"

static const int BINS = 2048, SLICES = 32, LISTED = 1024;
static const int LEAST = 40;  // weights under 2^-40 are zero

// How one row is sampled. 40 bytes.
struct SampleRow {
  u64 state;      // of the generator
  u64 least;      // weight, for min-p
  float scale;    // log2(e) / temperature; 0: the best token
  float penalty;  // 1: none
  float top_p;    // 1: none
  int top_k;      // 0: none
  u64 reserved;
};
struct SampleArgs {
  int* tokens;
  int* faults;          // [T][2], 0, 1 + index of a logit that is no number, or -1 where none can be chosen; bits of that logit
  const float* logits;  // [T, V]
  SampleRow* rows;      // [T]
  u32* seen;            // [T][ceil(V / 32)], a bit a token
  u64* best;            // [T], zero before the first launch
  u32* bad;             // [T], zero before the first launch
  u32* counts;          // [T][BINS], zero before the first launch
  u64* masses;          // [T][BINS], zero before the first launch
  u64* slices;          // [T][SLICES]
  int* positions;       // [T], advanced by one
  Sent sent;            // tokens, from `sent_faults` on faults
  int sent_faults;
  int V;
};

struct Source {
  const float* logits;
  const u32* seen;
  float penalty;
};
DEV Source source_of(const SampleArgs& a, int row) { return {a.logits + (size_t)row * a.V, a.seen + (size_t)row * div_up(a.V, 32), a.rows[row].penalty}; }
// Adding zero leaves one zero of two.
DEV float logit_at(const Source& s, int v) {
  const float x = __fadd_rn(s.logits[v], 0.f);
  if (s.penalty == 1.f || !(s.seen[v >> 5] >> (v & 31) & 1) || (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u) return x;
  const float y = x > 0.f ? __fdiv_rn(x, s.penalty) : __fmul_rn(x, s.penalty), most = __uint_as_float(0x7f7fffffu);
  return __fadd_rn(fminf(fmaxf(y, -most), most), 0.f);
}
DEV float exponent(float logit, float best, float scale) { return __fmul_rn(__fadd_rn(logit, -best), scale); }
DEV u64 weight(float y) {
  if (!(y >= -(float)LEAST)) return 0;
  const float n = __fadd_rn(__fadd_rn(y, 12582912.f), -12582912.f), f = __fadd_rn(y, -n);
  float p = 0.00015403530f;
  const float c[6] = {0.0013333558f, 0.009618129f, 0.05550411f, 0.2402265f, 0.6931472f, 1.f};
#pragma unroll
  for (int i = 0; i < 6; i++) p = __fadd_rn(__fmul_rn(p, f), c[i]);
  const u64 m = (u64)(u32)(p * 16777216.f);
  const int shift = LEAST - 24 + (int)n;
  return shift >= 0 ? m << shift : m >> -shift;
}
DEV int bin_of(float y) { return min_int(BINS - 1, (int)(y * -((float)BINS / (LEAST + 1)))); }
DEV u64 rank_of(u32 best_key, float logit, int v) { return (u64)(best_key - order_key(logit)) << 32 | (u32)v; }
DEV float from_key(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

extern "C" __global__ void __launch_bounds__(256) sample_best(const __grid_constant__ SampleArgs a) {
  __shared__ u64 best_sh[8];
  dependency_wait();
  dependents_launch();
  const Source s = source_of(a, blockIdx.y);
  u64 best = 0;
  u32 bad = 0;
#pragma unroll 4
  for (int v = blockIdx.x * 256 + threadIdx.x; v < a.V; v += gridDim.x * 256) {
    const float x = logit_at(s, v);
    if (!(x < INFINITY_F)) bad = bad ? bad : 0xffffffffu - v;
    if (x > -INFINITY_F) best = max(best, (u64)order_key(x) << 32 | (0xffffffffu - v));
  }
#pragma unroll
  for (int i = 16; i; i >>= 1) best = max(best, __shfl_xor_sync(0xffffffffu, best, i));
  bad = warp_max_u32(bad);
  if ((threadIdx.x & 31) == 0) {
    best_sh[threadIdx.x >> 5] = best;
    if (bad) atomicMax(a.bad + blockIdx.y, bad);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; i++) best = max(best, best_sh[i]);
    atomicMax(a.best + blockIdx.y, best);
  }
}

DEV int slice_begin(int V, int i) { return min_int(V, div_up(V, SLICES) * i); }

extern "C" __global__ void __launch_bounds__(256) sample_bins(const __grid_constant__ SampleArgs a) {
  __shared__ u64 masses_sh[BINS], total_sh;
  __shared__ u32 counts_sh[BINS];
  for (int i = threadIdx.x; i < BINS; i += 256) masses_sh[i] = 0, counts_sh[i] = 0;
  if (threadIdx.x == 0) total_sh = 0;
  dependency_wait();
  dependents_launch();
  const int row = blockIdx.y;
  const SampleRow r = a.rows[row];
  if (r.scale == 0.f) return;
  const Source s = source_of(a, row);
  const float best = from_key((u32)(a.best[row] >> 32));
  __syncthreads();
  u64 total = 0;
#pragma unroll 4
  for (int v = slice_begin(a.V, blockIdx.x) + threadIdx.x; v < slice_begin(a.V, blockIdx.x + 1); v += 256) {
    const float y = exponent(logit_at(s, v), best, r.scale);
    const u64 w = weight(y);
    if (w == 0) continue;
    atomicAdd(counts_sh + bin_of(y), 1u);
    if (w >= r.least) atomicAdd(masses_sh + bin_of(y), w), total += w;
  }
#pragma unroll
  for (int i = 16; i; i >>= 1) total += __shfl_xor_sync(0xffffffffu, total, i);
  if ((threadIdx.x & 31) == 0) atomicAdd(&total_sh, total);
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += 256)
    if (counts_sh[i]) atomicAdd(a.counts + row * BINS + i, counts_sh[i]), atomicAdd(a.masses + row * BINS + i, masses_sh[i]);
  if (threadIdx.x == 0) a.slices[row * SLICES + blockIdx.x] = total_sh;
}

// Sum of x over the threads before this one, of 1024, and of all.
DEV u64 sum_before(u64 x, u64* sums_sh, u64* all) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u64 upto = x;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const u64 other = __shfl_up_sync(0xffffffffu, upto, i);
    if (lane >= i) upto += other;
  }
  __syncthreads();
  if (lane == 31) sums_sh[warp] = upto;
  __syncthreads();
  u64 before = 0, total = 0;
#pragma unroll 8
  for (int i = 0; i < 32; i++) before += i < warp ? sums_sh[i] : 0, total += sums_sh[i];
  *all = total;
  return before + upto - x;
}

struct DrawShared {
  u32 counts[BINS];
  u64 masses[BINS];
  u64 rank[LISTED], mass[LISTED];  // listed tokens, or the masses and counts of a finer histogram
  u64 sums[32], low, high;
  // The first place where a sum reaches its goal: what it is, and count and mass before it.
  u64 found, count_before, mass_before;
  int num;
};

// The place where the sum of counts or masses over `num` consecutive pairs, two of each thread, reaches the goal.
DEV void locate(DrawShared& m, const u32* counts, const u64* masses, int num, bool by_mass, u64 goal, u64 count_before, u64 mass_before) {
  const int i = 2 * threadIdx.x;
  const u64 c0 = i < num ? counts[i] : 0, c1 = i < num ? counts[i + 1] : 0, m0 = i < num ? masses[i] : 0, m1 = i < num ? masses[i + 1] : 0;
  u64 all;
  const u64 c = count_before + sum_before(c0 + c1, m.sums, &all), w = mass_before + sum_before(m0 + m1, m.sums, &all);
  const u64 x = by_mass ? w : c, x0 = by_mass ? m0 : c0, x1 = by_mass ? m1 : c1;
  if (x < goal && x + x0 >= goal) m.found = i, m.count_before = c, m.mass_before = w;
  if (x + x0 < goal && x + x0 + x1 >= goal) m.found = i + 1, m.count_before = c + c0, m.mass_before = w + m0;
  __syncthreads();
}

// The rank at which the sum of counts or masses in order of rank reaches `goal`, and the mass up to and with it.
DEV u64 cut_at(DrawShared& m, const Source& s, int V, float best, const SampleRow& r, bool by_mass, u64 goal, u64* mass) {
  const u32 best_key = order_key(best);
  locate(m, m.counts, m.masses, BINS, by_mass, goal, 0, 0);
  const int bin = (int)m.found;
  u64 count_before = m.count_before, mass_before = m.mass_before, low = 0, high = ~0ull;
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) m.num = 0, m.low = ~0ull, m.high = 0;
    __syncthreads();
    u64 least = ~0ull, most = 0;
#pragma unroll 4
    for (int v = threadIdx.x; v < V; v += 1024) {
      const float x = logit_at(s, v), y = exponent(x, best, r.scale);
      if (!(y >= -(float)LEAST) || bin_of(y) != bin) continue;
      const u64 rank = rank_of(best_key, x, v);
      if (rank < low || rank > high) continue;
      const int at = atomicAdd(&m.num, 1);
      const u64 w = weight(y);
      if (at < LISTED) m.rank[at] = rank, m.mass[at] = w >= r.least ? w : 0;
      least = min(least, rank), most = max(most, rank);
    }
    if (most) atomicMin(&m.low, least), atomicMax(&m.high, most);
    __syncthreads();
    const int num = m.num;
    if (num <= LISTED) {
      const int i = threadIdx.x;
      if (i < num) {
        u64 c = count_before, w = mass_before;
        for (int j = 0; j < num; j++)
          if (m.rank[j] < m.rank[i]) c++, w += m.mass[j];
        const u64 x = by_mass ? w : c, own = by_mass ? m.mass[i] : 1;
        if (x < goal && x + own >= goal) m.found = m.rank[i], m.mass_before = w + m.mass[i];
      }
      __syncthreads();
      *mass = m.mass_before;
      return m.found;
    }
    // Too many: a finer histogram between the first and the last of them.
    low = m.low, high = m.high;
    int shift = 0;
    while ((high - low) >> shift >= LISTED) shift++;
    u32* counts = (u32*)m.mass;
    __syncthreads();
    m.rank[threadIdx.x] = 0, counts[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 4
    for (int v = threadIdx.x; v < V; v += 1024) {
      const float x = logit_at(s, v), y = exponent(x, best, r.scale);
      if (!(y >= -(float)LEAST) || bin_of(y) != bin) continue;
      const u64 rank = rank_of(best_key, x, v), w = weight(y);
      if (rank < low || rank > high) continue;
      atomicAdd(counts + ((rank - low) >> shift), 1u);
      if (w >= r.least) atomicAdd(m.rank + ((rank - low) >> shift), w);
    }
    __syncthreads();
    locate(m, counts, m.rank, LISTED, by_mass, goal, count_before, mass_before);
    count_before = m.count_before, mass_before = m.mass_before;
    low += m.found << shift, high = min(high, low + ((1ull << shift) - 1));
  }
}

extern "C" __global__ void __launch_bounds__(1024) sample_draw(const __grid_constant__ SampleArgs a) {
  __shared__ DrawShared m;
  const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  dependency_wait();
  dependents_launch();
  const u64 best_rank = a.best[row];
  const u32 bad = a.bad[row];
  SampleRow r = a.rows[row];
  const bool draws = r.scale != 0.f;
  __syncthreads();
  auto finish = [&](int token, int fault) {
    const int position = a.positions[row]++, value = fault > 0 ? __float_as_int(a.logits[(size_t)row * a.V + fault - 1]) : 0;
    a.tokens[row] = token, a.faults[2 * row] = fault, a.faults[2 * row + 1] = value;
    send(a.sent, position, row, token), send(a.sent, position, a.sent_faults + 2 * row, fault), send(a.sent, position, a.sent_faults + 2 * row + 1, value);
    a.best[row] = 0, a.bad[row] = 0;
    if (r.penalty != 1.f) a.seen[(size_t)row * div_up(a.V, 32) + (token >> 5)] |= 1u << (token & 31);
  };
  for (int i = threadIdx.x; draws && i < BINS; i += 1024) {
    m.counts[i] = a.counts[row * BINS + i], m.masses[i] = a.masses[row * BINS + i];
    a.counts[row * BINS + i] = 0, a.masses[row * BINS + i] = 0;
  }
  const int best_id = (int)(0xffffffffu - (u32)best_rank);
  if (bad || best_rank == 0 || !draws) {
    if (threadIdx.x == 0) finish(best_rank ? best_id : 0, bad ? (int)(0xffffffffu - bad) + 1 : best_rank ? 0 : -1);
    return;
  }
  const Source s = source_of(a, row);
  const float best = from_key((u32)(best_rank >> 32));
  const u32 best_key = order_key(best);
  __syncthreads();
  u64 count, total, limit = ~0ull;
  sum_before((u64)m.counts[2 * threadIdx.x] + m.counts[2 * threadIdx.x + 1], m.sums, &count);
  sum_before(m.masses[2 * threadIdx.x] + m.masses[2 * threadIdx.x + 1], m.sums, &total);
  if (r.top_k && (u64)r.top_k < count) limit = cut_at(m, s, a.V, best, r, false, (u64)r.top_k, &total);
  if (r.top_p < 1.f) {
    const double goal = ceil(__dmul_rn((double)r.top_p, (double)total));
    limit = cut_at(m, s, a.V, best, r, true, max((u64)1, min(total, (u64)goal)), &total);
  }
  r.state += 0x9e3779b97f4a7c15ull;
  u64 z = r.state;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  const u64 point = min(total - 1, (u64)__dmul_rn((double)(z >> 11) * (1. / 9007199254740992.), (double)total));
  auto mass_of = [&](int v) -> u64 {
    const float x = logit_at(s, v);
    if (!(x > -INFINITY_F) || rank_of(best_key, x, v) > limit) return 0;
    const u64 w = weight(exponent(x, best, r.scale));
    return w >= r.least ? w : 0;
  };
  // The slice, then the run of one thread, then the token.
  u64 slice = 0;
  if (limit == ~0ull) {
    slice = lane == 0 ? a.slices[row * SLICES + warp] : 0;
  } else {
#pragma unroll 4
    for (int v = slice_begin(a.V, warp) + lane; v < slice_begin(a.V, warp + 1); v += 32) slice += mass_of(v);
#pragma unroll
    for (int i = 16; i; i >>= 1) slice += __shfl_xor_sync(0xffffffffu, slice, i);
  }
  u64 all, before = sum_before(lane == 0 ? slice : 0, m.sums, &all);
  if (lane == 0 && before <= point && point < before + slice) m.found = warp, m.mass_before = before;
  __syncthreads();
  const int begin = slice_begin(a.V, (int)m.found), end = slice_begin(a.V, (int)m.found + 1), run = div_up(end - begin, 1024);
  const int from = min_int(end, begin + (int)threadIdx.x * run), to = min_int(end, from + run);
  const u64 start = m.mass_before;
  u64 mine = 0;
  for (int v = from; v < to; v++) mine += mass_of(v);
  before = start + sum_before(mine, m.sums, &all);
  if (before <= point && point < before + mine) {
    int v = from;
    for (before += mass_of(v); before <= point; before += mass_of(v)) v++;
    finish(v, 0);
    a.rows[row].state = r.state;
  }
}

// Reductions over a warp and a block.
#pragma once
#include "base.cuh"

DEV float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}
DEV float warp_max(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}
DEV u32 warp_max_u32(u32 x) {
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x));
  return r;
}
DEV u32 warp_min_u32(u32 x) {
  u32 r;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x));
  return r;
}
DEV u32 warp_sum_u32(u32 x) {
  u32 r;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x));
  return r;
}
// scratch_sh: 32 floats; every thread gets the sum; at most 1024 threads
DEV float block_sum(float x, float* scratch_sh) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) scratch_sh[warp] = x;
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < warps; i++) sum += scratch_sh[i];
  return sum;
}
// floats to unsigned keys of the same order
DEV u32 order_key(float x) {
  const u32 b = __float_as_uint(x);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}
// True in every thread of the block that arrives last of `total`; the counter is left at zero. last_sh: one int.
DEV bool arrives_last(int* counter, int total, int* last_sh) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int before = atomicAdd(counter, 1);
    *last_sh = before == total - 1;
    if (before == total - 1) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return *last_sh != 0;
}
// The same number of blocks meet, all of which are resident: each returns once all have come. What they wrote before is seen after. The last to
// leave puts the counter back to zero; low half arrivals, high half departures.
DEV void meet(int* counter, int total) {
  __syncthreads();
  if (threadIdx.x == 0) {
    add_release(counter, 1);
    while ((load_acquire(counter) & 0xffff) != total) {
    }
    if (atomicAdd(counter, 1 << 16) >> 16 == total - 1) *counter = 0;
  }
  __syncthreads();
}

// Types, bf16 conversions by bits, memory operations, programmatic dependent launch. No CUDA header is needed.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 bf16;  // raw bits

#define DEV __device__ __forceinline__

DEV float bf16_lo(u32 pair) { return __uint_as_float(pair << 16); }
DEV float bf16_hi(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEV float to_f32(bf16 x) { return __uint_as_float((u32)x << 16); }

// two floats to a bf16 pair, round to nearest even
DEV u32 bf16_pair(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
// what a pair leaves of the floats it was made of, as a pair
DEV u32 bf16_rest(float lo, float hi, u32 pair) { return bf16_pair(lo - bf16_lo(pair), hi - bf16_hi(pair)); }
DEV bf16 to_bf16(float x) { return (bf16)bf16_pair(x, 0.f); }

// read once, keep out of L1
DEV uint4 load_streaming(const void* p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
DEV uint4 load_v4(const void* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
// past L1: what another block of this launch wrote
DEV float load_f32_l2(const float* p) {
  float r;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(p) : "memory");
  return r;
}
DEV uint4 load_v4_l2(const void* p) {
  uint4 r;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
DEV int load_s32_l2(const int* p) {
  int r;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
// Between blocks of kernels that run at the same time: what a thread (or its block, before a barrier) wrote ahead of a release is seen
// by who reads the released value.
DEV int load_acquire(const int* p) {
  int r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
DEV void store_release(int* p, int x) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
DEV void add_release(int* p, int x) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
// nanoseconds
DEV u64 global_time() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
// threadIdx.x, read again: what is made of it is not kept, or spilled, from an earlier use to this one
DEV int thread_anew() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}
DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void copy_async_16(u32 dst, const void* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
DEV void copy_async_16(void* dst_sh, const void* src) { copy_async_16(shared_address(dst_sh), src); }
DEV void copy_async_4(u32 dst, const void* src) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory"); }
DEV void copy_async_4(void* dst_sh, const void* src) { copy_async_4(shared_address(dst_sh), src); }
DEV void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEV void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Results of the previous kernel are visible after dependency_wait. A kernel calls dependents_launch after its own wait, so
// that whatever runs ahead in the next kernel may already read what the kernel before this one wrote.
DEV void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void dependents_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#define INFINITY_F __int_as_float(0x7f800000)

// Choices on their way to the host: [steps][each] in its page-locked memory, a step's by the position of each sequence; null for none.
struct Sent {
  int* words;
  int steps, each;
};
DEV void send(const Sent& to, int position, int at, int value) {
  if (to.words) to.words[position % to.steps * to.each + at] = value;
}

// Vectors that pass from one kernel of a decode step to the next have a last bit of zero, which step.cu uses to tell that they are there.
DEV float without_tag(float x) { return __uint_as_float(__float_as_uint(x) & ~1u); }
DEV u32 word_at(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEV int div_up(int a, int b) { return (a + b - 1) / b; }
DEV int min_int(int a, int b) { return a < b ? a : b; }
DEV int max_int(int a, int b) { return a > b ? a : b; }
DEV float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
DEV float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

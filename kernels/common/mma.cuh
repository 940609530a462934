// Tensor core products m16n8k16, bf16 x bf16 -> f32, and loads of their operands.
//
// Lane (g = lane / 4, t = lane % 4) owns rows g and g + 8 of A, column g of B, and columns 2 t, 2 t + 1 of the sums.
#pragma once
#include "base.cuh"

DEV void mma_bf16(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void ldmatrix_x4_trans(u32* r, const void* p_sh) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p_sh)));
}
DEV void ldmatrix_x4(u32* r, const void* p_sh) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p_sh)));
}

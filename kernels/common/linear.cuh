// What a product of rows with up to three matrices is told.
#pragma once
#include "base.cuh"

struct LinearMatrix {
  const void* packed;
  const bf16* scale;
  const float* bias;  // or null
  const float* add;   // or null
  float* out;
  int rows;
  int out_stride;     // elements
  float out_scale;
  int pad;
};
struct LinearArgs {
  const float* x;      // staged
  const float* up;     // staged: silu(x) * up, or null
  const float* gain;   // staged: [K]
  const char* x_q;     // [T][groups][block], else
  const float* x_scale;
  LinearMatrix m[3];
  int num_matrices;
  int T, K;
  int x_stride;        // elements
  int norm;            // staged: 0 none, 1 RMS
  float eps;
  int columns;         // tokens at a time: staged T, else a multiple of 4
};

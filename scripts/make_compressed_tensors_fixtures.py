#!/usr/bin/env python3
"""Makes tests/fixtures/compressed_tensors/*.safetensors: random matrices quantized by compressed-tensors itself.

usage: python3 scripts/make_compressed_tensors_fixtures.py [OUT_DIR]

Needs scripts/requirements-transformers.txt. Each file holds, for one source type, the matrix of every case and what the library's
own calculate_qparams and pack-quantized compressor make of it: `<case>.weight`, `.weight_packed`, `.weight_scale`, and of asymmetric
cases `.weight_zero_point`.
"""

import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

# Bits, group, whether symmetric.
CASES = {
    "int4_g128": (4, 128, True),
    "int4_g64": (4, 64, True),
    "int4_g32": (4, 32, True),
    "int8_g128": (8, 128, True),
    "int8_channel": (8, None, True),
    "int4_g128_asym": (4, 128, False),
    "int4_g32_asym": (4, 32, False),
    "int4_channel_asym": (4, None, False),
    "int8_g64_asym": (8, 64, False),
}


def matrix(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 256, generator=generator) * 0.05
    x[1] *= torch.logspace(-4, 3, 256)
    x[2, :128] = 0.0
    x[3] *= 1e-6
    x[4, 7] = 40.0
    x[5] = torch.arange(256) / 16 - 8
    return x.to(dtype)


def quantize(weight, bits, group, symmetric):
    args = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group" if group else "channel", group_size=group
    )
    groups = weight.reshape(weight.shape[0], -1, group or weight.shape[1])
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    return compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/fixtures/compressed_tensors")
    out.mkdir(parents=True, exist_ok=True)
    for name, dtype in [("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)]:
        tensors = {}
        for seed, (case, (bits, group, symmetric)) in enumerate(CASES.items()):
            weight = matrix(dtype, seed)
            made = quantize(weight, bits, group, symmetric)
            tensors[f"{case}.weight"] = weight
            for part in ("weight_packed", "weight_scale", "weight_zero_point"):
                if part in made:
                    tensors[f"{case}.{part}"] = made[part].contiguous()
        save_file(tensors, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()

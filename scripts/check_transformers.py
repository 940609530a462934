"""Loads artifacts of every family in transformers with compressed-tensors and compares logits with `moe logits`.

    pip install -r scripts/requirements-transformers.txt
    python scripts/check_transformers.py [--moe target/release/moe] [--profile mixed] [--positive-scales] [--set PATTERN=FORMAT]
                                        [FAMILY ...]

Without --moe, `cargo run --release` builds and runs it. Each fixture in tests/fixtures/reference is quantized into a
temporary folder, which both sides read unchanged on the CPU; transformers once with its defaults and once with
`dequantize=True`. One line a family; the exit code is 1 if a family does not load whole or differs by more than 1e-3 of the
norm of the logits.

transformers 5.24 multiplies codes and scales in the type of the scales, bf16 here, even with `dtype=float32`, which rounds
each weight to 8 bits. The comparison asks its quantizer for float32 scales (`get_new_dtype`); the difference without that is
shown in brackets.

transformers fuses the experts of a checkpoint by rules of its own, family by family, and has none for granitemoe. For that
family the rule is registered through transformers.conversion_mapping first, and its line says so.

Zero points: with --set 'layers.*.attn.*=int4:g32:asym' attention loads with `dequantize=True` and not by default; with
--set 'layers.*.experts.**=int4:asym' experts fail in either mode. `moe quantize` warns of both.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest.mock

os.environ.update(COMPRESSED_TENSORS_LOG_DISABLED="1", TQDM_DISABLE="1")

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests/fixtures/reference"
FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2", "granitemoe", "phimoe"]
TOLERANCE = 1e-3


def load(folder, **kwargs):
    """The model, or the reason why not all of it was read."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **kwargs,
    )
    problems = [f"{len(keys)} {kind.replace('_', ' ')}" for kind, keys in info.items() if keys]
    if problems:
        raise RuntimeError(", ".join(problems))
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model.eval()


def float32_scales():
    def dtype(_self, _converter, param, _dtype):
        return torch.float32 if param.get_dtype().startswith(("F", "BF")) else None

    return unittest.mock.patch.object(CompressedTensorsHfQuantizer, "get_new_dtype", dtype)


@torch.no_grad()
def difference(folder, ids, expected, **kwargs):
    logits = load(folder, **kwargs)(ids, use_cache=False).logits.float()
    return ((logits - expected).norm() / expected.norm()).item()


def modes():
    return {"default": {}, "dequantize": {"quantization_config": CompressedTensorsConfig(dequantize=True)}}


def attempt(folder, ids, expected):
    """What each mode gives: differences with float32 scales and as loaded, or the reason of its failure."""
    found = {}
    for mode, kwargs in modes().items():
        try:
            as_loaded = difference(folder, ids, expected, **kwargs)
            with float32_scales():
                found[mode] = difference(folder, ids, expected, **kwargs), as_loaded
        except Exception as e:
            found[mode] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:120]}"
    return found


def register_granitemoe():
    mapping = conversion_mapping.get_checkpoint_conversion_mapping("granitemoe")
    mapping += [
        WeightConverter(
            source_patterns=["block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"],
            target_patterns="block_sparse_moe.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="block_sparse_moe.experts.*.w2.weight",
            target_patterns="block_sparse_moe.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
    conversion_mapping.register_checkpoint_conversion_mapping("granitemoe", mapping, overwrite=True)


def good(found):
    return all(isinstance(e, tuple) and e[0] < TOLERANCE for e in found.values())


def shown(found):
    text = {mode: e if isinstance(e, str) else f"{e[0]:.1e} ({e[1]:.1e} as loaded)" for mode, e in found.items()}
    return "; ".join(f"{mode}: {e}" for mode, e in text.items())


def check(moe, family, options, work):
    source, artifact, output = FIXTURES / family, work / family, work / f"{family}.safetensors"

    def run(*args):
        subprocess.run([*moe, *map(str, args)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    run("quantize", source, "--output", artifact, *options)
    run("logits", artifact, "--ids", source / "reference.safetensors", "--output", output)
    ids, expected = load_file(source / "reference.safetensors")["input_ids"], load_file(output)["logits"]
    found, note = attempt(artifact, ids, expected), ""
    if family == "granitemoe" and not good(found):
        note = f"; with a conversion rule registered, without it {shown(found)}"
        register_granitemoe()
        found = attempt(artifact, ids, expected)
    print(f"{family}: {'ok' if good(found) else 'FAILED'}, {shown(found)}{note}", flush=True)
    return good(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--moe", type=pathlib.Path, help="binary to run instead of `cargo run --release`")
    parser.add_argument("--profile", default="mixed")
    parser.add_argument("--positive-scales", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="PATTERN=FORMAT", help="passed on to `moe quantize`")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    moe = [str(args.moe.resolve())] if args.moe else ["cargo", "run", "--quiet", "--release", "--"]
    options = ["--profile", args.profile] + ["--positive-scales"] * args.positive_scales
    options += [word for rule in args.set for word in ("--set", rule)]
    with tempfile.TemporaryDirectory() as work:
        results = [check(moe, family, options, pathlib.Path(work)) for family in args.families or FAMILIES]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

"""Reads files of `moe export --gguf` with the gguf package and compares every weight with the artifact's.

    pip install gguf numpy safetensors
    python scripts/check_gguf.py [--moe target/release/moe] [FAMILY ...]

Each fixture in tests/fixtures/reference, and the trained model in tests/fixtures/tiny, is quantized with groups of 32 and of 128, and
with zero points in groups of 32, and exported. The package's own table of names must give each of ours for the checkpoint's name, its own dequantizers must give the
artifact's values (decoded here from the packed words with numpy), and the keys that llama.cpp needs of every architecture must be
there. Scales outside half precision are rounded to it, hence the tolerance: eleven bits, or the smallest half times the largest code; values
of an offset and a code share what their sizes allow.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import gguf
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests/fixtures/reference"
ARCH = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
}
USUAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
KEYS = [
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
    "expert_count", "expert_used_count", "vocab_size",
]


def read_safetensors(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    data = raw[8 + size :]
    return {k: (v, data[slice(*v["data_offsets"])]) for k, v in header.items() if k != "__metadata__"}


def floats(entry, data):
    kind = entry["dtype"]
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32).reshape(entry["shape"])


def weights(folder):
    """Every weight of an artifact as float32, by its module's name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        tensors = read_safetensors(path)
        for name, (entry, data) in tensors.items():
            if name.endswith(".weight_packed"):
                module = name.removesuffix(".weight_packed")
                rows, cols = np.frombuffer(tensors[f"{module}.weight_shape"][1], "<i8")
                words = np.frombuffer(data, np.uint8).reshape(rows, -1)
                four = words.shape[1] * 2 == cols
                codes = np.stack([words & 15, words >> 4], -1).reshape(rows, cols) if four else words
                scale = floats(*tensors[f"{module}.weight_scale"])
                zero = np.full_like(scale, 8 if four else 128)
                if f"{module}.weight_zero_point" in tensors:
                    shape, packed = tensors[f"{module}.weight_zero_point"]
                    points = np.frombuffer(packed, "<u4").reshape(shape["shape"])
                    bits = np.arange(0, 32, 4 if four else 8)[None, :, None]
                    points = points[:, None, :] >> bits & (15 if four else 255)
                    zero = points.reshape(-1, scale.shape[1])[:rows].astype(np.float32)
                wide = lambda x: np.repeat(x, cols // scale.shape[1], 1)
                found[f"{module}.weight"] = (codes.astype(np.float32) - wide(zero)) * wide(scale)
            elif not name.endswith((".weight_scale", ".weight_shape", ".weight_zero_point")):
                found[name] = floats(entry, data)
    return found


def rotary(rows, heads):
    """Our rows in llama.cpp's order: neighbours were half a head apart."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def expected(config, arch, found):
    """Weights by llama.cpp's names, as the package's table gives them, experts stacked."""
    layers = config["num_hidden_layers"]
    table = gguf.get_tensor_name_map(arch, layers)
    experts, named = {}, {}
    for name, value in found.items():
        match = re.fullmatch(r"(.*\.)experts\.(\d+)\.(.*)\.weight", name)
        if match:
            experts.setdefault(f"{match[1]}experts.{match[3]}.weight", {})[int(match[2])] = value
            continue
        if arch in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE_MOE) and re.search(r"\.(q|k)_proj\.", name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            value = rotary(value, heads)
        named[table.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    for name, parts in experts.items():
        # The table knows stacked experts by the spelling of some families; where it lacks this one's, by that of another.
        spellings = [name, re.sub(r"block_sparse_moe", "mlp", re.sub(r"w[123](?=\.weight$)", lambda m: USUAL[m[0]], name))]
        got = next(filter(None, (table.get_name(s, try_suffixes=(".weight",)) for s in spellings)), name)
        named[got] = np.stack([parts[e] for e in range(len(parts))])
    return named


def check(moe, name, source, options, work):
    label = "-".join(options).replace("--", "")
    artifact, output = work / f"{name}-{label}", work / f"{name}-{label}.gguf"

    def run(*args):
        return subprocess.run([*moe, *map(str, args)], check=True, cwd=ROOT, capture_output=True, text=True).stdout

    run("quantize", source, "--output", artifact, *options, "-q")
    report = json.loads(run("export", artifact, "--gguf", output, "--json"))
    config = json.loads((artifact / "config.json").read_text())
    arch = ARCH[config["model_type"]]
    reader = gguf.GGUFReader(output)
    have = {t.name: t for t in reader.tensors}
    want = expected(config, arch, weights(artifact))
    problems = []
    if config.get("tie_word_embeddings"):
        want.pop("output.weight", None)
    if missing := sorted(map(str, set(want) - set(have))):
        problems.append(f"missing {missing[:3]}")
    if extra := sorted(n for n in set(have) - set(want) if not n.startswith("rope_factors")):
        problems.append(f"unexpected {extra[:3]}")
    allowed = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[arch]}
    for tensor in have:
        if re.sub(r"blk\.\d+", "blk.{bid}", tensor).rsplit(".", 1)[0] not in allowed and not tensor.startswith("rope_"):
            problems.append(f"`{tensor}` is no tensor of this architecture")
    worst, exact = 0.0, 0
    for tensor, value in want.items():
        if tensor not in have:
            continue
        got = gguf.dequantize(have[tensor].data, have[tensor].tensor_type).reshape(value.shape)
        offset = have[tensor].tensor_type == gguf.GGMLQuantizationType.Q4_1
        size = 2 * np.abs(value).max() if offset else np.abs(value)
        bound = size * 2.0**-11 + 128 * 2.0**-25
        exact += bool(np.array_equal(got, value))
        worst = max(worst, float((np.abs(got - value) / bound).max()))
    if worst > 1:
        problems.append(f"values differ by {worst:.2f} of the bound")
    prefix = gguf.MODEL_ARCH_NAMES[arch]
    problems += [f"no key {prefix}.{k}" for k in KEYS if f"{prefix}.{k}" not in reader.fields]
    vocabulary = "tokenizer.ggml.tokens" in reader.fields
    types = ", ".join(f"{n} {k}" for k, n in report["types"].items())
    state = "ok" if not problems else "FAILED: " + "; ".join(problems)
    print(f"{name} {label}: {state}; {len(have)} tensors ({types}), {exact} of {len(want)} equal to the bit,"
          f" {report['rounded_scales']} of {report['scales']} scales rounded{', vocabulary' if vocabulary else ''}", flush=True)
    return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--moe", type=pathlib.Path, help="binary to run instead of `cargo run --release`")
    args = parser.parse_args()
    moe = [str(args.moe.resolve())] if args.moe else ["cargo", "run", "--quiet", "--release", "--"]
    models = {f: FIXTURES / f for f in args.families or ARCH}
    if not args.families:
        models["tiny"] = ROOT / "tests/fixtures/tiny"
    with tempfile.TemporaryDirectory() as work:
        recipes = [("--group-size", "32"), ("--group-size", "128"), ("--group-size", "32", "--asym")]
        results = [check(moe, n, p, r, pathlib.Path(work)) for n, p in models.items() for r in recipes]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

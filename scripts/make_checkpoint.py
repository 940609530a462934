"""Writes a checkpoint of random normal bfloat16 weights in the shape of a qwen3_moe model, for measuring speed and memory.

    python scripts/make_checkpoint.py OUT --gb 6 --experts 64 --shard-gb 2

The number of layers follows from the size. Needs numpy alone; the same arguments give the same bytes.
"""

import argparse
import json
import pathlib

import numpy


def config(layers, experts, hidden, expert_width, vocab):
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "moe_intermediate_size": expert_width, "num_hidden_layers": layers, "num_experts": experts,
        "num_experts_per_tok": min(8, experts), "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "hidden_act": "silu",
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    }


def layer_tensors(layer, c):
    hidden, head, width = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes = {
        "input_layernorm": [hidden], "post_attention_layernorm": [hidden], "self_attn.q_norm": [head], "self_attn.k_norm": [head],
        "self_attn.q_proj": [queries, hidden], "self_attn.k_proj": [keys, hidden], "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries], "mlp.gate": [c["num_experts"], hidden],
    }
    for expert in range(c["num_experts"]):
        for name, shape in (("gate_proj", [width, hidden]), ("up_proj", [width, hidden]), ("down_proj", [hidden, width])):
            shapes[f"mlp.experts.{expert}.{name}"] = shape
    return [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in shapes.items()]


def size(tensors):
    return sum(2 * int(numpy.prod(shape)) for _, shape in tensors)


def write(path, tensors, rng):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        end = offset + size([(name, shape)])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in tensors:
            values = rng.standard_normal(int(numpy.prod(shape)), dtype=numpy.float32) * numpy.float32(0.02)
            file.write((values.view(numpy.uint32) >> 16).astype("<u2").tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--gb", type=float, default=6, help="size of all weights, 10^9 bytes")
    parser.add_argument("--shard-gb", type=float, default=2, help="largest weight file, 10^9 bytes")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--expert-width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    shape = (args.experts, args.hidden, args.expert_width, args.vocab)
    globals_ = [
        ("model.embed_tokens.weight", [args.vocab, args.hidden]), ("model.norm.weight", [args.hidden]),
        ("lm_head.weight", [args.vocab, args.hidden]),
    ]
    of_layer = size(layer_tensors(0, config(1, *shape)))
    layers = max(1, round((args.gb * 1e9 - size(globals_)) / of_layer))
    c = config(layers, *shape)
    tensors = globals_ + [t for layer in range(layers) for t in layer_tensors(layer, c)]

    shards, filled = [[]], 0
    for tensor in tensors:
        if shards[-1] and filled + size([tensor]) > args.shard_gb * 1e9:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size([tensor])
    args.output.mkdir(parents=True)
    rng = numpy.random.default_rng(args.seed)
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        write(args.output / name, shard, rng)
        weight_map |= {tensor: name for tensor, _ in shard}
    index = {"metadata": {"total_size": size(tensors)}, "weight_map": weight_map}
    (args.output / "model.safetensors.index.json").write_text(json.dumps(index))
    (args.output / "config.json").write_text(json.dumps(c, indent=2) + "\n")
    print(f"{args.output}: {size(tensors) / 1e9:.2f} GB in {len(shards)} files, {layers} layers")


if __name__ == "__main__":
    main()

"""Makes small random checkpoints with the outputs that transformers computes on them.

    pip install -r scripts/requirements-transformers.txt
    python scripts/make_reference_models.py OUT [NAME ...]     # OUT/NAME/ for each name, or for all of them
    python scripts/make_reference_models.py --list             # names, and which mechanisms each of them has

Weights are bf16, drawn from a generator seeded with the name. Each folder is read back by transformers in float32 with
eager attention, so that the files themselves, config.json included, are what `reference.safetensors` belongs to:

    input_ids                [2, 40] i64
    logits                   [2, 40, V] f32
    hidden.<i>               [2, 40, D] f32, input of layer i; the last one is the output of the final norm
    router_output.<layer>    [80, E] f32, before any softmax, bias or grouping; layers with a router only
"""

import argparse
import json
import pathlib
import zlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

NUM_SEQ, NUM_TOK = 2, 40

# `v4`: config.json is written exactly as below, in the spelling of transformers 4; `v5`: as transformers 5 saves it.
COMMON = dict(
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=64,
    initializer_range=0.02,
    max_position_embeddings=128,
    num_attention_heads=4,
    num_hidden_layers=2,
    pad_token_id=0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    use_cache=True,
    vocab_size=96,
)
FAMILIES = dict(
    deepseek_v2=dict(
        architectures=["DeepseekV2ForCausalLM"],
        attention_bias=False,
        aux_loss_alpha=0.001,
        ep_size=1,
        first_k_dense_replace=1,
        intermediate_size=32,
        kv_lora_rank=32,
        moe_intermediate_size=8,
        moe_layer_freq=1,
        n_group=1,
        n_routed_experts=8,
        n_shared_experts=2,
        norm_topk_prob=False,
        num_experts_per_tok=3,
        num_key_value_heads=4,
        pretraining_tp=1,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        rope_theta=10000,
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        seq_aux=True,
        topk_group=1,
        topk_method="greedy",
        v_head_dim=8,
    ),
    granitemoe=dict(
        architectures=["GraniteMoeForCausalLM"],
        attention_bias=False,
        attention_multiplier=0.2,
        embedding_multiplier=6.0,
        intermediate_size=16,
        logits_scaling=4.0,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        num_local_experts=5,
        output_router_logits=False,
        residual_multiplier=0.3,
        rope_scaling=None,
        rope_theta=10000.0,
        router_aux_loss_coef=0.001,
    ),
    mixtral=dict(
        architectures=["MixtralForCausalLM"],
        intermediate_size=24,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=False,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.02,
        sliding_window=None,
    ),
    olmoe=dict(
        architectures=["OlmoeForCausalLM"],
        attention_bias=False,
        clip_qkv=None,
        intermediate_size=16,
        norm_topk_prob=False,
        num_experts=5,
        num_experts_per_tok=3,
        num_key_value_heads=4,
        output_router_logits=False,
        rope_scaling=None,
        rope_theta=10000.0,
        router_aux_loss_coef=0.01,
    ),
    phimoe=dict(
        architectures=["PhiMoEForCausalLM"],
        attention_bias=True,
        hidden_dropout=0.0,
        input_jitter_noise=0.01,
        intermediate_size=16,
        lm_head_bias=True,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=False,
        rope_scaling=None,
        rope_theta=10000.0,
        router_aux_loss_coef=0.0,
        router_jitter_noise=0.01,
        sliding_window=None,
    ),
    qwen2_moe=dict(
        architectures=["Qwen2MoeForCausalLM"],
        decoder_sparse_step=1,
        intermediate_size=48,
        max_window_layers=28,
        moe_intermediate_size=16,
        norm_topk_prob=False,
        num_experts=5,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        output_router_logits=False,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=24,
        sliding_window=32768,
        use_sliding_window=False,
    ),
    qwen3_moe=dict(
        architectures=["Qwen3MoeForCausalLM"],
        attention_bias=False,
        decoder_sparse_step=1,
        head_dim=16,
        intermediate_size=48,
        max_window_layers=48,
        mlp_only_layers=[],
        moe_intermediate_size=16,
        norm_topk_prob=True,
        num_experts=4,
        num_experts_per_tok=3,
        num_key_value_heads=2,
        output_router_logits=False,
        rope_scaling=None,
        rope_theta=1000000.0,
        router_aux_loss_coef=0.001,
        sliding_window=None,
        use_sliding_window=False,
    ),
)


def longrope(original):
    return dict(
        type="longrope",
        short_factor=[1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0],
        long_factor=[1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 7.5, 9.0],
        short_mscale=1.1,
        long_mscale=1.25,
        original_max_position_embeddings=original,
    )


ODD = dict(
    hidden_size=96,
    num_attention_heads=3,
    num_experts_per_tok=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
    vocab_size=90,
)

# Name -> family, spelling, changes to the family's config, mechanisms.
VARIANTS = {
    "deepseek_v2_groups": (
        "deepseek_v2",
        "v4",
        dict(
            attention_bias=True,
            first_k_dense_replace=2,
            n_group=4,
            num_hidden_layers=3,
            q_lora_rank=24,
            rope_scaling=dict(
                beta_fast=4,
                beta_slow=0.25,
                factor=8,
                mscale=0.707,
                mscale_all_dim=1.0,
                original_max_position_embeddings=16,
                type="yarn",
            ),
            routed_scaling_factor=16.0,
            topk_group=2,
            topk_method="group_limited_greedy",
            v_head_dim=12,
        ),
        "query rank, group-limited routing, scaled gates, YaRN with two different mscales, biases, two dense layers",
    ),
    "deepseek_v2_direct": (
        "deepseek_v2",
        "v4",
        dict(
            first_k_dense_replace=0,
            kv_lora_rank=40,
            n_shared_experts=1,
            rope_scaling=dict(
                beta_fast=32,
                beta_slow=1,
                factor=4,
                mscale=0.707,
                mscale_all_dim=0.707,
                original_max_position_embeddings=32,
                type="yarn",
            ),
            v_head_dim=12,
        ),
        "no query rank, experts from the first layer on, YaRN with equal mscales",
    ),
    "deepseek_v2_all": (
        "deepseek_v2",
        "v5",
        dict(n_routed_experts=4, num_experts_per_tok=4),
        "every expert chosen",
    ),
    "qwen2_moe_windows": (
        "qwen2_moe",
        "v4",
        dict(
            hidden_size=32,
            max_window_layers=3,
            mlp_only_layers=[1],
            num_hidden_layers=4,
            num_key_value_heads=2,
            sliding_window=8,
            use_sliding_window=True,
        ),
        "windows below max_window_layers, one dense layer, grouped queries",
    ),
    "qwen2_moe_layer_types": (
        "qwen2_moe",
        "v5",
        dict(
            decoder_sparse_step=2,
            hidden_size=32,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            norm_topk_prob=True,
            num_hidden_layers=4,
            qkv_bias=False,
            sliding_window=8,
            use_sliding_window=True,
        ),
        "windows by layer_types, every second layer sparse, gates that sum to one, no biases",
    ),
    "qwen2_moe_single": (
        "qwen2_moe",
        "v5",
        dict(num_experts=1, num_experts_per_tok=1),
        "a single expert",
    ),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        "v5",
        dict(
            attention_bias=True,
            decoder_sparse_step=2,
            head_dim=24,
            hidden_size=32,
            intermediate_size=32,
            mlp_only_layers=[0, 1],
            norm_topk_prob=False,
            num_experts_per_tok=2,
            num_hidden_layers=4,
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
            rope_theta=500000.0,
            sliding_window=10,
            tie_word_embeddings=True,
            use_sliding_window=True,
        ),
        "dense layers by both rules, biases, window, tied head, heads wider than the model, Llama 3 frequencies",
    ),
    "qwen3_moe_yarn": (
        "qwen3_moe",
        "v4",
        dict(
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
            rope_theta=1000.0,
        ),
        "YaRN without mscale",
    ),
    "qwen3_moe_odd": (
        "qwen3_moe",
        "v5",
        dict(ODD, head_dim=32, moe_intermediate_size=40, num_experts=3),
        "sizes that are no power of two",
    ),
    "qwen3_moe_single": (
        "qwen3_moe",
        "v5",
        dict(num_experts=1, num_experts_per_tok=1),
        "a single expert",
    ),
    "mixtral_window": (
        "mixtral",
        "v4",
        dict(
            num_experts_per_tok=1,
            num_key_value_heads=1,
            num_local_experts=3,
            rope_scaling=dict(type="linear", factor=2.5),
            rope_theta=10000.0,
            sliding_window=6,
            tie_word_embeddings=True,
        ),
        "window, interpolated positions, one expert a token of three, one key head, tied head",
    ),
    "mixtral_all": (
        "mixtral",
        "v5",
        dict(num_experts_per_tok=4),
        "every expert chosen",
    ),
    "mixtral_single": (
        "mixtral",
        "v4",
        dict(num_experts_per_tok=1, num_local_experts=1),
        "a single expert",
    ),
    "olmoe_clip": (
        "olmoe",
        "v4",
        dict(attention_bias=True, clip_qkv=0.5, norm_topk_prob=True, num_key_value_heads=2),
        "clipped queries, keys and values, grouped queries, gates that sum to one, biases",
    ),
    "olmoe_all": (
        "olmoe",
        "v5",
        dict(num_experts=4, num_experts_per_tok=4),
        "every expert chosen",
    ),
    "phimoe_short": (
        "phimoe",
        "v4",
        dict(
            attention_bias=False,
            lm_head_bias=False,
            rope_scaling=longrope(64),
            sliding_window=12,
        ),
        "LongRoPE inside the original context, window, grouped queries, no biases",
    ),
    "phimoe_long": (
        "phimoe",
        "v4",
        dict(
            attention_bias=False,
            lm_head_bias=False,
            rope_scaling=longrope(16),
            sliding_window=12,
        ),
        "LongRoPE beyond the original context, computed with the long table",
    ),
    "granitemoe_one": (
        "granitemoe",
        "v4",
        dict(attention_bias=True, num_experts_per_tok=1, num_key_value_heads=1),
        "one expert a token, one key head, biases, untied head",
    ),
    "granitemoe_odd": (
        "granitemoe",
        "v5",
        dict(ODD, intermediate_size=40, num_local_experts=3),
        "sizes that are no power of two",
    ),
    "granitemoe_all": (
        "granitemoe",
        "v5",
        dict(num_experts_per_tok=4, num_local_experts=4, tie_word_embeddings=True),
        "every expert chosen",
    ),
    "granitemoe_single": (
        "granitemoe",
        "v5",
        dict(num_experts_per_tok=1, num_local_experts=1),
        "a single expert",
    ),
}


def config_of(name):
    family, spelling, changes, _ = VARIANTS[name]
    config = dict(COMMON, model_type=family, torch_dtype="bfloat16", **FAMILIES[family])
    config.update(changes)
    if spelling == "v4":
        config["transformers_version"] = "4.57.0"
    return dict(sorted(config.items())), spelling


def is_router(name):
    return name.endswith((".gate", ".router"))


def draw(name, parameter, generator):
    """Unit outputs for unit inputs; routers sharper; norms and biases far from one and zero."""
    def normal(std):
        return torch.randn(parameter.shape, generator=generator) * std

    if name.endswith("bias"):
        return normal(0.3)
    if "norm" in name:
        return 1 + normal(0.2)
    if "embed_tokens" in name:
        return normal(1.0)
    return normal((1.5 if is_router(name.removesuffix(".weight")) else 1.0) / parameter.shape[-1] ** 0.5)


@torch.no_grad()
def write_checkpoint(folder, name):
    config, spelling = config_of(name)
    loaded = AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = AutoModelForCausalLM.from_config(loaded, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    for key, parameter in model.named_parameters():
        parameter.copy_(draw(key, parameter, generator))
    model.save_pretrained(folder)
    if spelling == "v4":
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def reference_config(folder, as_is):
    """The config to compute with. transformers 5.24 never passes a length to phimoe's frequencies, so it takes the short
    table with the long factor on cosines and sines beyond the original context; the model's own code takes the long table,
    which reaches transformers only in the place of the short one."""
    config = AutoConfig.from_pretrained(folder)
    rope = config.rope_parameters
    if not as_is and config.model_type == "phimoe" and rope.get("original_max_position_embeddings", NUM_TOK) < NUM_TOK:
        rope["short_factor"] = rope["long_factor"]
    return config


@torch.no_grad()
def outputs(folder, ids, as_is):
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=reference_config(folder, as_is),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    found = {}
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: found.update({f"hidden.{i}": (args[0] if args else kwargs["hidden_states"]).clone()}),
            with_kwargs=True,
        )
        for name, module in layer.named_modules():
            if is_router(f".{name}"):
                module.register_forward_pre_hook(
                    lambda module, args, i=i: found.update(
                        {f"router_output.{i}": F.linear(args[0].reshape(-1, args[0].shape[-1]), module.weight)}
                    )
                )
    last = len(model.model.layers)
    model.model.norm.register_forward_hook(lambda _, args, out: found.update({f"hidden.{last}": out.clone()}))
    found["logits"] = model(ids, use_cache=False).logits
    return {key: value.float().contiguous() for key, value in found.items()}


def make(out, name, as_is):
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, name)
    vocab = config_of(name)[0]["vocab_size"]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} ids".encode()))
    ids = torch.randint(3, vocab, (NUM_SEQ, NUM_TOK), generator=generator)
    found = outputs(folder, ids, as_is)
    save_file({"input_ids": ids, **found}, folder / "reference.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    routers = sum(key.startswith("router") for key in found)
    print(f"{name}: {size / 1000:.0f} kB, {routers} routers, logits of deviation {found['logits'].std():.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--as-is", action="store_true", help="compute phimoe_long as transformers does, short table included")
    args = parser.parse_args()
    if args.list:
        for name, (family, spelling, _, mechanisms) in VARIANTS.items():
            print(f"{name} ({family}, {spelling}): {mechanisms}")
        return
    if args.out is None:
        parser.error("OUT is missing")
    for name in args.names or VARIANTS:
        if name not in VARIANTS:
            parser.error(f"no variant `{name}`; see --list")
        make(args.out, name, args.as_is)


if __name__ == "__main__":
    main()

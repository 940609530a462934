#!/usr/bin/env bash
# memcheck and racecheck of decoding: small models with random weights through the kernels of one token and of several, with experts outside
# of the GPU's memory, latents, long rows, more tiles than there are places, and more pages than a block has warps. Needs a GPU and CUDA's
# compute-sanitizer. racecheck leaves out products of more than 32 tokens, which only prompts have: it does not follow their copies
# (benches/NOTES.md).
#
# usage: scripts/check_races.sh [moe] [compute-sanitizer]
set -euo pipefail
moe=${1:-moe} sanitizer=${2:-compute-sanitizer}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

every='"hidden_act":"silu","max_position_embeddings":1024,"vocab_size":512,"rope_theta":10000.0,"tie_word_embeddings":false'
qwen="\"model_type\":\"qwen3_moe\",\"rms_norm_eps\":1e-6,\"norm_topk_prob\":true,\"intermediate_size\":256,\"head_dim\":64,$every"
mixtral="\"model_type\":\"mixtral\",\"rms_norm_eps\":1e-5,\"num_attention_heads\":8,\"num_key_value_heads\":2,$every"
echo "{$qwen,\"hidden_size\":512,\"moe_intermediate_size\":256,\"num_hidden_layers\":2,\"num_attention_heads\":8,
  \"num_key_value_heads\":2,\"num_experts\":16,\"num_experts_per_tok\":4}" > "$work/small.json"
echo "{$qwen,\"hidden_size\":1024,\"moe_intermediate_size\":4096,\"num_hidden_layers\":1,\"num_attention_heads\":16,
  \"num_key_value_heads\":4,\"num_experts\":4,\"num_experts_per_tok\":2}" > "$work/long.json"
echo "{$mixtral,\"hidden_size\":512,\"intermediate_size\":2048,\"num_hidden_layers\":1,\"num_local_experts\":16,
  \"num_experts_per_tok\":4}" > "$work/tiles.json"
echo "{$mixtral,\"hidden_size\":1024,\"intermediate_size\":2048,\"num_hidden_layers\":2,\"num_local_experts\":8,
  \"num_experts_per_tok\":2}" > "$work/wide.json"
echo '{"model_type":"deepseek_v2","rms_norm_eps":1e-6,"hidden_size":512,"intermediate_size":512,"moe_intermediate_size":256,
  "num_hidden_layers":2,"num_attention_heads":8,"num_key_value_heads":8,"first_k_dense_replace":1,"kv_lora_rank":512,"q_lora_rank":null,
  "qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,"n_group":1,"topk_group":1,"topk_method":"greedy","n_routed_experts":8,
  "n_shared_experts":1,"num_experts_per_tok":2,"norm_topk_prob":false,"routed_scaling_factor":1.0,"moe_layer_freq":1,
  "attention_bias":false,"mlp_bias":false,'"$every}" > "$work/latent.json"
echo "{$qwen,\"hidden_size\":512,\"moe_intermediate_size\":256,\"num_hidden_layers\":2,\"num_attention_heads\":64,
  \"num_key_value_heads\":32,\"num_experts\":16,\"num_experts_per_tok\":4}" > "$work/pages.json"

failed=0
check() { # model, prompt, batches, more options
  local tool leave_out
  for tool in memcheck racecheck; do
    if [ $tool = racecheck ]; then leave_out="--kernel-name-exclude kns=_wg"; else leave_out=""; fi
    if "$sanitizer" --tool $tool $leave_out --error-exitcode 9 \
      "$moe" bench --shape "$work/$1.json" --prompt "$2" --batch "$3" "${@:4}" --generate 3 --repeats 1 > "$work/log" 2>&1; then
      echo "$tool $*: clean"
    else
      echo "$tool $*: FAILED"
      grep -E "SUMMARY|reported|Invalid|^moe:" "$work/log" | sort | uniq -c | sort -rn | head -20 || true
      failed=1
    fi
  done
}
check small 4 1,2,4
check small 4 1,4 --expert-slots 8
check long 4 1
check tiles 4 1,2,8
check wide 4 1,32
check latent 4 1,4
check pages 800 1,2
exit $failed

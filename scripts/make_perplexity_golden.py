#!/usr/bin/env python3
"""Perplexity of a checkpoint on a text by transformers in float32, as `moe perplexity` defines it.

usage: python3 scripts/make_perplexity_golden.py MODEL TEXT [WINDOW]

Needs scripts/requirements-transformers.txt. Windows of WINDOW (512) tokens from the start, tail dropped, second half scored, no BOS.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    model_dir, text_file, window = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 512
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    ids = tokenizer(open(text_file, encoding="utf-8").read(), add_special_tokens=False)["input_ids"]
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - window + 1, window):
            row = torch.tensor([ids[start : start + window]])
            logp = torch.log_softmax(model(row).logits[0].double(), -1)
            at = torch.arange(window // 2, window)
            total -= logp[at - 1, row[0, at]].sum().item()
            count += len(at)
    print(json.dumps({"perplexity": float(torch.tensor(total / count).double().exp()), "tokens": count, "text_tokens": len(ids)}))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Makes a deeper checkpoint of a small one by repeating its layers, for measuring speed and memory.

usage: python3 scripts/repeat_layers.py MODEL OUT TIMES

Layer l of the result is layer l mod L of MODEL; one shard a repetition, with an index. Standard library only.
"""

import json
import shutil
import struct
import sys
from pathlib import Path


def tensors(model):
    """Name, dtype, shape and bytes of every tensor, read when asked for."""
    for path in sorted(model.glob("model*.safetensors")):
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                yield name, entry["dtype"], entry["shape"], (path, 8 + size + begin, end - begin)


def write(path, rows):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, (_, _, size) in rows:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, _, (source, at, size) in rows:
            with open(source, "rb") as file:
                file.seek(at)
                out.write(file.read(size))


def main():
    model, out, times = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    out.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, out)
    config["num_hidden_layers"] = layers * times
    (out / "config.json").write_text(json.dumps(config, indent=1))
    rows = list(tensors(model))
    index = {}
    for i in range(times):
        shard = f"model-{i + 1:05}-of-{times:05}.safetensors"
        part = []
        for name, dtype, shape, place in rows:
            parts = name.split(".")
            if parts[:2] == ["model", "layers"]:
                parts[2] = str(int(parts[2]) + i * layers)
                part.append((".".join(parts), dtype, shape, place))
            elif i == 0:
                part.append((name, dtype, shape, place))
        write(out / shard, part)
        index.update({name: shard for name, *_ in part})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


if __name__ == "__main__":
    main()

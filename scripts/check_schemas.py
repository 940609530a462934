"""Validates the `quantization_config` of artifacts against several releases of compressed-tensors.

    python scripts/check_schemas.py [--moe target/release/moe] [--versions 0.15.0 0.16.0 ...] [--work FOLDER]

Every fixture in tests/fixtures/reference is quantized under every built-in profile, two of them also with zero points. Each release is installed with pip into a virtual
environment of its own (without torch: a folder that holds torch may be given with --site), and its `QuantizationConfig` reads every
config: unknown keys inside a scheme are errors there, and each group's scheme must come back as it was written. One line a release.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests/fixtures/reference"
FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2", "granitemoe", "phimoe"]
PROFILES = ["mixed", "compact", "speq", "fast", "int8", "compact --asym", "fast --asym"]
VERSIONS = ["0.15.0", "0.16.0", "0.17.0", "0.18.0", "0.19.0", "0.20.1"]

# Runs inside each environment: configs on standard input, one line of result.
READ = """
import json, sys
import compressed_tensors
from compressed_tensors.quantization import QuantizationConfig
configs = json.load(sys.stdin)
for name, config in configs.items():
    read = QuantizationConfig.model_validate(config)
    assert read.format == "pack-quantized" and read.quantization_status == "compressed", name
    for group, scheme in config["config_groups"].items():
        back = read.config_groups[group]
        assert back.targets == scheme["targets"], name
        for key, wanted in scheme["weights"].items():
            found = getattr(back.weights, key)
            assert getattr(found, "value", found) == wanted, (name, group, key, found, wanted)
    assert read.ignore == config["ignore"], name
print(len(configs), "configs read by", getattr(compressed_tensors, "__version__", "?"))
"""


def configs(moe, work):
    found = {}
    for family in FAMILIES:
        for profile in PROFILES:
            artifact = work / f"{family}-{profile}"
            command = [*moe, "quantize", FIXTURES / family, "--output", artifact, "--profile", *profile.split(), "--quiet"]
            subprocess.run(list(map(str, command)), check=True, cwd=ROOT, capture_output=True)
            found[f"{family} {profile}"] = json.loads((artifact / "config.json").read_text())["quantization_config"]
    return found


def check(version, configs, work, site):
    folder = work / f"venv-{version}"
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    no_deps = ["--no-deps"] if site else []
    pip = [python, "-m", "pip", "install", "--quiet", *no_deps, f"compressed-tensors=={version}"]
    subprocess.run(list(map(str, pip)), check=True)
    if site:
        # Behind the environment's own packages, so that only what it lacks comes from there.
        packages = next((folder / "lib").glob("python*/site-packages"))
        (packages / "torch.pth").write_text(f"{site}\n")
    ran = subprocess.run([str(python), "-c", READ], input=json.dumps(configs), capture_output=True, text=True)
    shown = ran.stdout.strip() if ran.returncode == 0 else (ran.stderr.strip().splitlines() or ["?"])[-1]
    print(f"{version}: {'ok' if ran.returncode == 0 else 'FAILED'}, {shown}", flush=True)
    return ran.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moe", type=pathlib.Path, help="binary to run instead of `cargo run --release`")
    parser.add_argument("--versions", nargs="+", default=VERSIONS)
    parser.add_argument("--site", type=pathlib.Path, help="site-packages with torch and transformers, to install nothing but the release")
    parser.add_argument("--work", type=pathlib.Path)
    args = parser.parse_args()
    moe = [str(args.moe.resolve())] if args.moe else ["cargo", "run", "--quiet", "--release", "--"]
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        work = pathlib.Path(work)
        made = configs(moe, work)
        results = [check(version, made, work, args.site) for version in args.versions]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()

"""Turn the `model/` folder of a training run into the folder that the package ships, in fp16 safetensors.

    PYTHONPATH=. python examples/train_tiny/export.py runs/tiny/model bc_diffusers/embedded_model

The result is a `BlockCausalVideoPipeline` that knows how it rolls out; a README.md in the destination stays.
"""

import argparse
import json
from pathlib import Path

import torch
from shape_world import CHUNK, RES
from tiny_nets import SHIFT, SIGMAS, WINDOW


def export(source, destination):
    """Write the pipeline; returns the size of the folder in bytes."""
    from bc_diffusers import BlockCausalVideoPipeline

    rollout = {
        "preset": "embedded",
        "chunk_frames": CHUNK,
        "window_frames": WINDOW - CHUNK,
        "denoising_sigmas": list(SIGMAS),
        "shift": SHIFT,
        "default_height": RES,
        "default_width": RES,
    }
    pipe = BlockCausalVideoPipeline.from_pretrained(source, dtype=torch.float16, **rollout)
    for net in (pipe.transformer, pipe.text_encoder, pipe.vae):
        net.half()  # loading keeps some parts in fp32; the largest weight is about 3
    pipe.save_pretrained(destination, safe_serialization=True)
    for path in Path(destination).rglob("*.json"):
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None) is not None:  # where it lay on this machine
            path.write_text(json.dumps(config, indent=2) + "\n")
    for path in Path(destination).rglob("*.safetensors"):
        path.chmod(0o644)
    return sum(path.stat().st_size for path in Path(destination).rglob("*") if path.is_file())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    args = parser.parse_args(arguments)
    print(f"{args.destination}: {export(args.source, args.destination):,} bytes")


if __name__ == "__main__":
    main()

"""Makes oracle_a.npz: what the tests need of the PyTorch and DeepSpeed runs of one small decoder.

    python tests/data/make_oracle.py ORACLES_DIR

ORACLES_DIR holds `model_a/*.npz`: 20 AdamW steps of a 4-layer Llama-style decoder run by plain PyTorch (float64 and
float32), FSDP2, HSDP and DeepSpeed ZeRO 1 to 3 (torch 2.13.0, DeepSpeed 0.19.8, gloo on CPU), with and without masks.
Kept are the inputs, every run's losses and pre-clip gradient norms, the first logits, and the final float64 weights.
"""

import sys
from pathlib import Path

import numpy as np


def main() -> None:
    runs = Path(sys.argv[1]) / "model_a"
    inputs = np.load(runs / "inputs.npz")
    kept = {
        "tokens": inputs["tokens"].astype(np.uint8),
        "mask": inputs["mask"],
        **{key: inputs[key] for key in inputs.files if key.startswith("init/")},
    }
    for path in sorted(runs.glob("*.npz")):
        if path.stem == "inputs":
            continue
        run = np.load(path)
        kept[f"loss/{path.stem}"], kept[f"grad_norm/{path.stem}"] = run["loss"], run["grad_norm"]
        if path.stem == "reference_fp64":
            kept["logits0"] = run["logits0"]
            kept |= {key: run[key] for key in run.files if key.startswith("final/")}
    np.savez_compressed(Path(__file__).with_name("oracle_a.npz"), **kept)


if __name__ == "__main__":
    main()

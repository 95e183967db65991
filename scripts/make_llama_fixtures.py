"""Makes tests/data/llama_*: small random models as transformers saves them, with the logits it computes; or checks an export.

    pip install torch==2.13.0 transformers==5.24.0      # in an environment of its own, on the CPU
    python scripts/make_llama_fixtures.py tests/data
    python scripts/make_llama_fixtures.py --check EXPORTED tests/data/llama_gqa     # logits of an export, by transformers

The logits are float32, of float32 weights or of bfloat16 ones computed in float32.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 64}
MODELS = {
    "llama_gqa": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
    },
    "llama_tied": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
    },
}
DTYPES = {"llama_gqa": torch.float32, "llama_tied": torch.bfloat16}


def logits_of(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """float32 [B, T, V]."""
    with torch.no_grad():
        return model.float().eval()(torch.from_numpy(tokens)).logits.numpy()


def make(folder: Path, name: str) -> None:
    torch.manual_seed(len(name))
    values = dict(MODELS[name])
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **values, rope_parameters=rope, initializer_range=0.3, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)  # all norms are 1 at first, and could be mistaken for one another
    model = model.to(DTYPES[name])
    model.save_pretrained(folder / name, max_shard_size="48KB")
    (folder / name / "generation_config.json").unlink(missing_ok=True)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 24))
    # Loaded anew: a cast of the model has rounded its rotary frequencies too.
    model = LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32, attn_implementation="eager")
    np.savez(folder / name / "logits.npz", tokens=tokens, logits=logits_of(model, tokens))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.check:
        with np.load(arguments.folder / "logits.npz") as expected:
            model = LlamaForCausalLM.from_pretrained(arguments.check, dtype=torch.float32, attn_implementation="eager")
            print("largest difference of logits:", np.abs(logits_of(model, expected["tokens"]) - expected["logits"]).max())
    else:
        for each in MODELS:
            make(arguments.folder, each)

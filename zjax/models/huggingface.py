"""A Llama's names, layout and config.json in Hugging Face's transformers (LlamaForCausalLM).

Their linear layers are [out, in], ours [in, out]; each of their tensors is one layer, ours stack all. Both rotate halves of a
head (not neighbours, as Meta's own files do), so that no head is permuted.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zjax.checkpoint import CheckpointError
from zjax.checkpoint.weights import Entry
from zjax.models.llama import LlamaConfig

CONFIG = "config.json"
_LAYER = {
    "attn_norm": ("input_layernorm", False),
    "wq": ("self_attn.q_proj", True),
    "wk": ("self_attn.k_proj", True),
    "wv": ("self_attn.v_proj", True),
    "wo": ("self_attn.o_proj", True),
    "mlp_norm": ("post_attention_layernorm", False),
    "w_gate": ("mlp.gate_proj", True),
    "w_up": ("mlp.up_proj", True),
    "w_down": ("mlp.down_proj", True),
}
"""Ours -> theirs, and whether it is transposed."""


def layout(config: LlamaConfig) -> dict[str, Entry]:
    """What each parameter of a Llama is called in transformers."""
    layers = {
        f"layers/{ours}": Entry(tuple(f"model.layers.{i}.{theirs}.weight" for i in range(config.n_layers)), True, transposed)
        for ours, (theirs, transposed) in _LAYER.items()
    }
    head = {} if config.tied else {"head/kernel": Entry(("lm_head.weight",), transposed=True)}
    return {"embed/table": Entry(("model.embed_tokens.weight",)), **layers, "head/norm": Entry(("model.norm.weight",)), **head}


def ignored(config: LlamaConfig, names: Any) -> list[str]:
    """Tensors that transformers does not read either: the tables of old files, and the head of a tied model."""
    return [name for name in names if name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")]


def to_json(config: LlamaConfig, dtype: str) -> str:
    """The text of config.json, for versions 4 and 5 of transformers."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_sequence,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    return json.dumps(values, indent=2)


def from_json(text: str, where: str) -> LlamaConfig:
    """The sizes that a config.json tells.

    Raises:
      CheckpointError: a model that is no Llama, or has what ours has not: biases, scaled rotary frequencies, another
        activation, heads of a width of their own. The message names the key and its value.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: no JSON ({error})") from error
    rope = values.get("rope_parameters") or {"rope_type": "default", "rope_theta": values.get("rope_theta", 10_000.0)}
    scaling = values.get("rope_scaling") or {}
    try:
        width = values["hidden_size"] // values["num_attention_heads"]
        only = {
            "model_type": (values.get("model_type"), "llama"),
            "hidden_act": (values.get("hidden_act", "silu"), "silu"),
            "attention_bias": (values.get("attention_bias", False), False),
            "mlp_bias": (values.get("mlp_bias", False), False),
            "head_dim": (values.get("head_dim") or width, width),
            "rope_parameters.rope_type": (rope.get("rope_type", "default"), "default"),
            "rope_scaling": (scaling.get("rope_type", scaling.get("type", "default")), "default"),
        }
        for key, (value, needed) in only.items():
            if value != needed:
                raise CheckpointError(f"{where}: {key}={value!r}, zjax's Llama has {needed!r}")
        return LlamaConfig(
            vocab_size=values["vocab_size"],
            d_model=values["hidden_size"],
            n_layers=values["num_hidden_layers"],
            n_heads=values["num_attention_heads"],
            n_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
            d_ff=values["intermediate_size"],
            max_sequence=values.get("max_position_embeddings", 2048),
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 10_000.0))),
            norm_eps=values.get("rms_norm_eps", 1e-6),
            tied=values.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise CheckpointError(f"{where}: {error} is missing") from error


def config_of(folder: Path) -> LlamaConfig:
    """The sizes of the model in a folder; CheckpointError as `from_json`, and for a folder without config.json."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}")
    return from_json((folder / CONFIG).read_text(), str(folder / CONFIG))


def is_huggingface(names: Any) -> bool:
    """Whether tensors of these names are in Hugging Face's layout."""
    return any(re.match(r"model\.layers\.\d+\.", name) for name in names)

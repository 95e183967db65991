"""Every knob of a run, as frozen dataclasses; this file imports neither jax nor ml_collections.

A config is checked where it is made: wrong types, unknown keys and impossible combinations raise `ConfigError`, with
the dotted name of the knob, the value it had, the rule it broke and, for an unknown key, the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

T = typing.TypeVar("T")


class ConfigError(ValueError):
    """A config that cannot be honoured. The message names the knob, its value and what to do."""


def _require(condition: bool, name: str, value: Any, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r}: {rule}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model. Fields left at None take the preset's value (`zjax/models/llama.py`)."""

    preset: str = "tiny"
    """`tiny`, `llama2_7b`, `llama3_8b`, `llama3_70b`, or `abstract` (one leaf of `parameters` elements, for planning only)."""
    parameters: int | None = None
    """Number of parameters of the `abstract` preset; None for every other preset."""
    vocab_size: int | None = None
    """Tokens in the vocabulary."""
    d_model: int | None = None
    """Width of the residual stream."""
    n_layers: int | None = None
    """Transformer blocks."""
    n_heads: int | None = None
    """Query heads; must divide `d_model` and be a multiple of `n_kv_heads`."""
    n_kv_heads: int | None = None
    """Key/value heads (grouped-query attention)."""
    d_ff: int | None = None
    """Hidden width of the SwiGLU MLP."""
    max_sequence: int | None = None
    """Positions in the rotary table; `data.sequence_length` may not exceed it."""
    tied: bool | None = None
    """Whether the head shares the embedding's weights."""
    attention: str | None = None
    """How attention is computed: `auto` (the default: the TPU's or GPU's library kernel where it can, else `chunked`), `plain`
    (T x T scores at once), `chunked` (a block of queries at a time), `splash` (TPU), `cudnn` (GPU). The same function in all."""

    def __post_init__(self) -> None:
        _check_types(self, "model.")
        if self.preset == "abstract":
            _require(
                self.parameters is not None and self.parameters > 0,
                "model.parameters",
                self.parameters,
                "the abstract preset needs a positive number of parameters",
            )
        else:
            _require(
                self.parameters is None, "model.parameters", self.parameters, "only model.preset='abstract' takes a number of parameters"
            )
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_sequence"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"model.{name}", value, "must be positive")
        _require(
            self.attention in (None, "auto", "plain", "chunked", "splash", "cudnn"),
            "model.attention",
            self.attention,
            "must be 'auto', 'plain', 'chunked', 'splash' or 'cudnn'",
        )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Degrees of the mesh axes, outermost first. One may be -1: it takes the devices the others leave.

    `replica` lies on the slow network (between hosts or slices) and `fsdp` on the fast one: (replica, fsdp) with both
    above 1 is FSDP's HYBRID_SHARD and DeepSpeed's MiCS.
    """

    pipeline: int = 1
    """Pipeline stages. Only 1 so far."""
    replica: int = 1
    """Copies of the sharded state; carries the batch."""
    fsdp: int = -1
    """Shards of the state; carries the batch."""
    expert: int = 1
    """Expert-parallel degree; for dense leaves it carries the batch and shards state like `fsdp`."""
    sequence: int = 1
    """Sequence-parallel (Ulysses) degree. Only 1 so far."""
    tensor: int = 1
    """Tensor-parallel degree: shards the dims that rules name, never the batch."""

    def __post_init__(self) -> None:
        _check_types(self, "mesh.")
        degrees = dataclasses.asdict(self)
        for name, degree in degrees.items():
            _require(degree == -1 or degree > 0, f"mesh.{name}", degree, "must be positive, or -1 to take the devices that are left")
        inferred = [name for name, degree in degrees.items() if degree == -1]
        _require(len(inferred) <= 1, "mesh." + " and mesh.".join(inferred), -1, "only one axis can be -1")
        _require(self.pipeline == 1, "mesh.pipeline", self.pipeline, "pipeline parallelism is not available; use 1")
        _require(self.sequence == 1, "mesh.sequence", self.sequence, "sequence parallelism is not available; use 1")


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How the train state is sharded (DeepSpeed `zero_optimization`, FSDP2 `fully_shard`)."""

    stage: int = 3
    """0 nothing (DDP), 1 optimizer state, 2 and gradients, 3 and parameters (FULL_SHARD)."""
    reshard_after_forward: bool | int = True
    """Stage 3: True gathers a unit again for its backward; False keeps it gathered from its forward to its backward
    (FSDP2 False, SHARD_GRAD_OP). FSDP2's int (ZeRO++ hpZ) is not available."""
    reshard_after_backward: bool = True
    """Stage 3 with micro-batches: False gathers every parameter once a step and keeps it gathered over all of them (FSDP2
    set_reshard_after_backward(False)): the least traffic, at the memory of whole parameters."""
    persistence_threshold: int = 0
    """Stage 3: parameters with fewer elements (per layer of a stacked leaf) stay whole; their gradients and optimizer
    state are still sharded. 0 as in FSDP; DeepSpeed's stage3_param_persistence_threshold defaults to 100000."""
    ignored: tuple[str, ...] = ()
    """Patterns of parameters left replicated in every role. Their gradients are still reduced (unlike FSDP2)."""
    strict: bool = False
    """Raise where a leaf that should be sharded has no dim that divides, instead of keeping it whole with a reason."""
    engine: str = "auto"
    """How data is moved: `partitioner` (XLA's SPMD partitioner, by sharding constraints), `explicit` (collectives written
    out in `shard_map`), or `auto`, which picks one for the plan and says why."""
    prefetch: int = 1
    """Layers whose weights `scan_layers` gathers ahead: 0 or 1. Takes effect with `remat="full"` (FSDP forward_prefetch and
    BACKWARD_PRE, DeepSpeed stage3_prefetch_bucket_size)."""
    max_gathered_units: int | None = None
    """How many units that stand one after the other may be whole at once: gathered in the forward, or with gradients not
    yet scattered in the backward. The explicit engine (without a `tensor` axis) can bound it: None means 2 there, FSDP's
    limit_all_gathers (compare DeepSpeed stage3_max_live_parameters); 0 leaves it to XLA. `prefetch` needs prefetch + 1."""

    def __post_init__(self) -> None:
        _check_types(self, "zero.")
        _require(self.prefetch in (0, 1), "zero.prefetch", self.prefetch, "must be 0 or 1 layers")
        _require(self.stage in (0, 1, 2, 3), "zero.stage", self.stage, "must be 0, 1, 2 or 3")
        _require(
            isinstance(self.reshard_after_forward, bool),
            "zero.reshard_after_forward",
            self.reshard_after_forward,
            "a secondary shard group (ZeRO++ hpZ) is not available; use True or False",
        )
        _require(
            self.reshard_after_forward is True or self.stage == 3,
            "zero.reshard_after_forward",
            False,
            f"only stage 3 gathers parameters; with zero.stage={self.stage} leave it True",
        )
        _require(
            self.reshard_after_backward or self.stage == 3,
            "zero.reshard_after_backward",
            False,
            f"only stage 3 gathers parameters; with zero.stage={self.stage} leave it True",
        )
        _require(
            not self.max_gathered_units or self.max_gathered_units > self.prefetch,
            "zero.max_gathered_units",
            self.max_gathered_units,
            f"zero.prefetch={self.prefetch} has {self.prefetch + 1} units gathered at once; set zero.prefetch=0, or this to {self.prefetch + 1} or more",
        )
        _require(self.persistence_threshold >= 0, "zero.persistence_threshold", self.persistence_threshold, "must be 0 or more elements")
        _require(
            not self.persistence_threshold or self.stage == 3,
            "zero.persistence_threshold",
            self.persistence_threshold,
            f"only stage 3 shards parameters; with zero.stage={self.stage} leave it 0",
        )
        _require(
            self.engine in ("auto", "partitioner", "explicit"), "zero.engine", self.engine, "must be 'auto', 'partitioner' or 'explicit'"
        )


@dataclass(frozen=True)
class Unit:
    """What is gathered together, with what is particular to it (FSDP2: one `fully_shard` call and its arguments)."""

    path: str
    """Path of its parameters; with `[*]` at the end they are stacked, dim 0 counting layers, each a unit of its own."""
    reshard_after_forward: bool | None = None
    """Stage 3: as `ZeroConfig.reshard_after_forward`, for this unit; None takes that."""
    compute: str | None = None
    """`bfloat16` or `float32`: dtype of its parameters and, cast when it is called, of its input (MixedPrecisionPolicy
    param_dtype, cast_forward_inputs); None takes `PrecisionConfig.compute`."""
    reduce: str | None = None
    """`bfloat16` or `float32`: dtype in which its gradients travel (MixedPrecisionPolicy reduce_dtype); None takes
    `PrecisionConfig.reduce`."""

    def __post_init__(self) -> None:
        _check_types(self, f"Unit({self.path!r}).")
        for name in ("compute", "reduce"):
            value = getattr(self, name)
            _require(value in (None, *DTYPES), f"Unit({self.path!r}).{name}", value, f"must be one of {', '.join(DTYPES)}, or None")

    @property
    def prefix(self) -> str:
        """The path without the mark of stacked layers."""
        return self.path.removesuffix("[*]")

    @property
    def stacked(self) -> bool:
        """Whether dim 0 of its leaves counts layers."""
        return self.path.endswith("[*]")


DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of compute and of gradients that travel. Optimizer state, gradient norms and accumulators are float32."""

    compute: str = "bfloat16"
    """`bfloat16`: parameters and activations in bf16, fp32 master weights in the optimizer state; `float32`: no master."""

    reduce: str | None = None
    """`bfloat16` or `float32`: dtype in which gradients travel between devices (FSDP reduce_dtype, DeepSpeed
    communication_data_type); None means that of compute. Another than that of compute takes the explicit engine."""

    def __post_init__(self) -> None:
        _check_types(self, "precision.")
        _require(
            self.compute != "float16",
            "precision.compute",
            self.compute,
            "float16 needs loss scaling, which is not available; use 'bfloat16'",
        )
        _require(self.compute in DTYPES, "precision.compute", self.compute, "must be 'bfloat16' or 'float32'")
        _require(self.reduce in (None, *DTYPES), "precision.reduce", self.reduce, "must be 'bfloat16', 'float32' or None")


OPTIMIZER_KNOBS = {
    "adamw": ("b1", "b2", "eps", "weight_decay"),
    "adam": ("b1", "b2", "eps"),
    "lion": ("b1", "b2", "weight_decay"),
    "adafactor": ("weight_decay",),
    "sgd": ("momentum",),
}
"""The optimizers by name, and which of the optional knobs each takes."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optax optimizer and its schedule. Knobs left at None take optax's default; one the optimizer lacks raises."""

    name: str = "adamw"
    """One of `OPTIMIZER_KNOBS`."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine`, down to `min_ratio` of the peak at the run's last step."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    min_ratio: float = 0.0
    """Final learning rate as a share of the peak, for `linear` and `cosine`."""
    b1: float | None = None
    """Decay of the first moment."""
    b2: float | None = None
    """Decay of the second moment."""
    eps: float | None = None
    """Added to the root of the second moment."""
    weight_decay: float | None = None
    """Decoupled weight decay, on every parameter."""
    momentum: float | None = None
    """Momentum of sgd."""

    def __post_init__(self) -> None:
        _check_types(self, "optimizer.")
        _require(
            self.name in OPTIMIZER_KNOBS,
            "optimizer.name",
            self.name,
            f"{_nearest(self.name, OPTIMIZER_KNOBS)}known: {', '.join(OPTIMIZER_KNOBS)}",
        )
        _require(0 <= self.learning_rate < math.inf, "optimizer.learning_rate", self.learning_rate, "must be finite and not negative")
        _require(
            self.schedule in ("constant", "linear", "cosine"),
            "optimizer.schedule",
            self.schedule,
            "must be 'constant', 'linear' or 'cosine'",
        )
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must be 0 or more steps")
        _require(0 <= self.min_ratio <= 1, "optimizer.min_ratio", self.min_ratio, "must lie in [0, 1]")
        for knob in ("b1", "b2", "momentum"):
            value = getattr(self, knob)
            _require(value is None or 0 <= value < 1, f"optimizer.{knob}", value, "must lie in [0, 1)")
        for knob in ("b1", "b2", "eps", "weight_decay", "momentum"):
            _require(
                getattr(self, knob) is None or knob in OPTIMIZER_KNOBS[self.name],
                f"optimizer.{knob}",
                getattr(self, knob),
                f"{self.name} does not take it; it takes {', '.join(OPTIMIZER_KNOBS[self.name])}",
            )


@dataclass(frozen=True, kw_only=True)
class AccumulationConfig:
    """Gradient accumulation over micro-batches inside one optimizer step (DeepSpeed gradient_accumulation_steps)."""

    micro_batches: int = 1
    """Micro-batches a step. Above 1 the gradients are accumulated in float32."""
    mode: str = "sharded"
    """Stages 2 and 3: `sharded` scatters the gradients of each micro-batch into a sharded accumulator (the least memory);
    `local` (FSDP's no_sync) accumulates whole gradients and scatters once a step (the least traffic; explicit engine).
    Stages 0 and 1 hold whole gradients anyway: the explicit engine reduces them once, the partitioner each time."""

    def __post_init__(self) -> None:
        _check_types(self, "accumulation.")
        _require(self.micro_batches > 0, "accumulation.micro_batches", self.micro_batches, "must be positive")
        _require(self.mode in ("sharded", "local"), "accumulation.mode", self.mode, "must be 'sharded' or 'local'")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, tokens and the batch."""

    path: str | tuple[str, ...] = "stdlib"
    """`stdlib` (the Python standard library's own sources), or a file, a directory or a list of them: .txt, .jsonl, .bin (uint16 tokens)."""
    tokenizer: str | None = None
    """A `tokenizer.json` of the `tokenizers` package for .txt and .jsonl; None means bytes (256 tokens)."""
    text_field: str = "text"
    """The field of each .jsonl object that holds the text."""
    global_batch: int = 16
    """Sequences per optimizer step, over all devices and micro-batches."""
    sequence_length: int = 128
    """Tokens per sequence that are predicted."""

    def __post_init__(self) -> None:
        _check_types(self, "data.")
        _require(self.global_batch > 0, "data.global_batch", self.global_batch, "must be a positive number of sequences")
        _require(self.sequence_length > 0, "data.sequence_length", self.sequence_length, "must be a positive number of tokens")
        _require(bool(self.path), "data.path", self.path, "must name a file, a directory or 'stdlib'")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many to keep."""

    every: int = 0
    """Optimizer steps between saves; 0 saves at the end and on SIGTERM or Ctrl-C only."""
    keep: int = 2
    """The newest checkpoints that are kept."""

    def __post_init__(self) -> None:
        _check_types(self, "checkpoint.")
        _require(self.every >= 0, "checkpoint.every", self.every, "must be 0 or more steps")
        _require(self.keep > 0, "checkpoint.keep", self.keep, "must be positive")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run: what `configs/*.py` describe and `zjax train --config.a.b=V` overrides."""

    steps: int = 100
    """Optimizer steps of the run."""
    seed: int = 0
    """Seed of the initial weights, the data order and dropout."""
    clip: float | None = 1.0
    """Largest global gradient norm (DeepSpeed gradient_clipping); None does not clip."""
    remat: str = "none"
    """Per block: `none`, `full` (recompute all but the block's input), `dots` (keep matrix products without batch dims)."""
    sample_tokens: int = 200
    """Tokens of sampled text printed at the end; 0 for none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _check_types(self, "")
        _require(self.steps > 0, "steps", self.steps, "must be positive")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "must lie in [0, 2**32)")
        _require(self.clip is None or 0 < self.clip < math.inf, "clip", self.clip, "must be positive and finite, or None not to clip")
        _require(self.remat in ("none", "full", "dots"), "remat", self.remat, "must be 'none', 'full' or 'dots'")
        _require(self.sample_tokens >= 0, "sample_tokens", self.sample_tokens, "must be 0 or more")
        _require(
            self.optimizer.warmup_steps <= self.steps,
            "optimizer.warmup_steps",
            self.optimizer.warmup_steps,
            f"the run has only steps={self.steps}",
        )
        _require(
            self.data.global_batch % self.accumulation.micro_batches == 0,
            "data.global_batch", self.data.global_batch,
            f"must be a multiple of accumulation.micro_batches={self.accumulation.micro_batches} ({self.data.global_batch} % {self.accumulation.micro_batches} = {self.data.global_batch % self.accumulation.micro_batches})",
        )  # fmt: skip


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Builds the config dataclass `cls` from nested dictionaries; keys that are left out keep their default.

    Raises `ConfigError` on an unknown key (with the nearest known one), a value of the wrong type, or a broken rule.
    """
    hints = typing.get_type_hints(cls)
    built = {}
    for key, value in values.items():
        name = f"{path}{key}"
        if key not in hints:
            raise ConfigError(
                f"unknown config key {name!r}: {_nearest(key, hints, path)}known: {', '.join(path + known for known in hints)}"
            )
        is_section = dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping)
        built[key] = from_dict(hints[key], value, name + ".") if is_section else value
    return cls(**built)


def _check_types(config: Any, path: str) -> None:
    """Puts each field in the form its annotation names (an int for a float, a list for a tuple), or raises."""
    for name, hint in typing.get_type_hints(type(config)).items():
        object.__setattr__(config, name, _typed(hint, getattr(config, name), path + name))


def _typed(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, typing.cast(type, hint)):
            raise ConfigError(f"{name}={value!r}: must be a section with keys {', '.join(typing.get_type_hints(hint))}")
        return value
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option in (int, float, str, bool, types.NoneType) and type(value) is option:
            return value
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
            return tuple(value)
    if float in options and type(value) is int:
        return float(value)
    # A single pattern or path is a list of one; anything else, such as "2" for 2, is a mistake that is told.
    if isinstance(value, str) and str not in options and any(typing.get_origin(o) is tuple for o in options):
        return (value,)
    raise ConfigError(f"{name}={value!r}: must be {' or '.join(_type_name(o) for o in options)}, not {type(value).__name__}")


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return "a list of strings"
    return "None" if hint is types.NoneType else hint.__name__


def _nearest(key: str, known: typing.Iterable[str], path: str = "") -> str:
    close = difflib.get_close_matches(key.lower(), list(known), n=1, cutoff=0.5)
    return f"did you mean {path + close[0]!r}? " if close else ""

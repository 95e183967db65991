"""Every knob of a run, as frozen dataclasses; this file imports neither jax nor ml_collections.

A config is checked where it is made: wrong types, unknown keys and impossible combinations raise `ConfigError`, with
the dotted name of the knob, the value it had, the rule it broke and, for an unknown key, the nearest known one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from zjax import ds_config
from zjax.fields import ConfigError, check_types, from_dict, nearest, require
from zjax.optimizer_config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model. Fields left at None take the preset's value (`zjax/models/llama.py`)."""

    preset: str = "tiny"
    """`tiny`, `llama2_7b`, `llama3_8b`, `llama3_70b`, `llama3_405b`, or `abstract` (one leaf of `parameters` elements, for
    planning only)."""
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
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    norm_eps: float | None = None
    """What RMSNorm adds to the mean square."""
    attention: str | None = None
    """How attention is computed: `auto` (the default: the TPU's or GPU's library kernel where it can, else `chunked`), `plain`
    (T x T scores at once), `chunked` (a block of queries at a time), `splash` (TPU), `cudnn` (GPU). The same function in all."""

    def __post_init__(self) -> None:
        check_types(self, "model.")
        if self.preset == "abstract":
            require(
                self.parameters is not None and self.parameters > 0,
                "model.parameters",
                self.parameters,
                "the abstract preset needs a positive number of parameters",
            )
        else:
            require(
                self.parameters is None, "model.parameters", self.parameters, "only model.preset='abstract' takes a number of parameters"
            )
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "max_sequence", "rope_theta", "norm_eps"):
            value = getattr(self, name)
            require(value is None or value > 0, f"model.{name}", value, "must be positive")
        require(
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
        check_types(self, "mesh.")
        degrees = dataclasses.asdict(self)
        for name, degree in degrees.items():
            require(degree == -1 or degree > 0, f"mesh.{name}", degree, "must be positive, or -1 to take the devices that are left")
        inferred = [name for name, degree in degrees.items() if degree == -1]
        require(len(inferred) <= 1, "mesh." + " and mesh.".join(inferred), -1, "only one axis can be -1")
        require(self.pipeline == 1, "mesh.pipeline", self.pipeline, "pipeline parallelism is not available; use 1")
        require(self.sequence == 1, "mesh.sequence", self.sequence, "sequence parallelism is not available; use 1")


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
    """Layers whose weights `scan_layers` gathers ahead, forward and backward: 0 or 1 (FSDP forward_prefetch and BACKWARD_PRE,
    DeepSpeed stage3_prefetch_bucket_size)."""
    max_gathered_units: int | None = None
    """How many units that stand one after the other may be whole at once: gathered in the forward, or with gradients not
    yet scattered in the backward. The explicit engine (without a `tensor` axis) can bound it: None means prefetch + 1 there,
    FSDP's limit_all_gathers (compare DeepSpeed stage3_max_live_parameters); 0 leaves it to XLA. `prefetch` needs prefetch + 1."""

    def __post_init__(self) -> None:
        check_types(self, "zero.")
        require(self.prefetch in (0, 1), "zero.prefetch", self.prefetch, "must be 0 or 1 layers")
        require(self.stage in (0, 1, 2, 3), "zero.stage", self.stage, "must be 0, 1, 2 or 3")
        require(
            isinstance(self.reshard_after_forward, bool),
            "zero.reshard_after_forward",
            self.reshard_after_forward,
            "a secondary shard group (ZeRO++ hpZ) is not available; use True or False",
        )
        require(
            self.reshard_after_forward is True or self.stage == 3,
            "zero.reshard_after_forward",
            False,
            f"only stage 3 gathers parameters; with zero.stage={self.stage} leave it True",
        )
        require(
            self.reshard_after_backward or self.stage == 3,
            "zero.reshard_after_backward",
            False,
            f"only stage 3 gathers parameters; with zero.stage={self.stage} leave it True",
        )
        require(
            not self.max_gathered_units or self.max_gathered_units > self.prefetch,
            "zero.max_gathered_units",
            self.max_gathered_units,
            f"zero.prefetch={self.prefetch} has {self.prefetch + 1} units gathered at once; set zero.prefetch=0, or this to {self.prefetch + 1} or more",
        )
        require(self.persistence_threshold >= 0, "zero.persistence_threshold", self.persistence_threshold, "must be 0 or more elements")
        require(
            not self.persistence_threshold or self.stage == 3,
            "zero.persistence_threshold",
            self.persistence_threshold,
            f"only stage 3 shards parameters; with zero.stage={self.stage} leave it 0",
        )
        require(
            self.engine in ("auto", "partitioner", "explicit"), "zero.engine", self.engine, "must be 'auto', 'partitioner' or 'explicit'"
        )

    @classmethod
    def from_deepspeed(cls, source: ds_config.Source, *, hidden_size: int | None = None) -> ZeroConfig:
        """The `zero_optimization` section of a DeepSpeed config; `zjax.interop.from_deepspeed` makes a whole run of one.

        Warns of keys that are deprecated or change nothing.

        Args:
          source: path of a JSON file, or its dictionary, with all its sections.
          hidden_size: width of the model, for stage3_param_persistence_threshold="auto".

        Raises:
          ConfigError: a key of the section that cannot be honoured, or an unknown one anywhere.
          NotAvailableError: a key of a feature to come.
        """
        file = ds_config.read(source)
        file.refuse("zero_optimization")
        size = file.values.get("zero_optimization.mics_shard_size", -1)
        if size != -1:
            raise ConfigError(
                f"zero_optimization.mics_shard_size={size}: sets the mesh too; use MeshConfig(replica=-1, fsdp={size}) and leave it out"
            )
        config = from_dict(cls, ds_config.zero_knobs(file.values, hidden_size=hidden_size), "zero.")
        file.announce("zero_optimization")
        return config


@dataclass(frozen=True)
class Unit:
    """What is gathered together, with what is particular to it (FSDP2: one `fully_shard` call and its arguments)."""

    path: str
    """Path of its parameters; with `[*]` at the end they are stacked, dim 0 counting layers, each a unit of its own."""
    reshard_after_forward: bool | None = None
    """Stage 3: as `ZeroConfig.reshard_after_forward`, for this unit; None takes that."""
    compute: str | None = None
    """`bfloat16`, `float32` or `float16`: that of its parameters and, cast when it is called, of its input (MixedPrecisionPolicy
    param_dtype, cast_forward_inputs); None takes `PrecisionConfig.compute`."""
    reduce: str | None = None
    """`bfloat16`, `float32` or `float16`, in which its gradients travel (MixedPrecisionPolicy reduce_dtype); None takes
    `PrecisionConfig.reduce`."""
    output: str | None = None
    """`bfloat16`, `float32` or `float16`, to which its floating outputs are cast (MixedPrecisionPolicy output_dtype); None leaves them."""

    def __post_init__(self) -> None:
        check_types(self, f"Unit({self.path!r}).")
        for name in ("compute", "reduce", "output"):
            value = getattr(self, name)
            require(value in (None, *DTYPES), f"Unit({self.path!r}).{name}", value, f"must be one of {', '.join(DTYPES)}, or None")

    @property
    def prefix(self) -> str:
        """The path without the mark of stacked layers."""
        return self.path.removesuffix("[*]")

    @property
    def stacked(self) -> bool:
        """Whether dim 0 of its leaves counts layers."""
        return self.path.endswith("[*]")


DTYPES = ("bfloat16", "float32", "float16")


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling of float16 compute, as DeepSpeed's `fp16` section and its DynamicLossScaler have it."""

    static: float | None = None
    """A scale that never changes (`loss_scale`); None is dynamic scaling (`loss_scale` 0)."""
    initial_power: int = 16
    """The first scale is 2 to this (`initial_scale_power`)."""
    window: int = 1000
    """Steps without overflow until the scale doubles (`loss_scale_window`)."""
    hysteresis: int = 2
    """Overflows until the scale halves (`hysteresis`); refilled when the scale grows."""
    consecutive_hysteresis: bool = False
    """Whether each step without overflow refills the hysteresis (`consecutive_hysteresis`)."""
    minimum: float = 1.0
    """The scale never falls below this (`min_loss_scale`)."""
    raise_at_minimum: bool = True
    """Whether an overflow at the minimum ends the run (DeepSpeed raise_error_at_min_scale)."""

    def __post_init__(self) -> None:
        check_types(self, "precision.loss_scale.")
        name = "precision.loss_scale"
        require(
            self.static is None or 0 < self.static < math.inf,
            f"{name}.static",
            self.static,
            "must be positive and finite, or None to adapt it",
        )
        require(0 <= self.initial_power <= 127, f"{name}.initial_power", self.initial_power, "must lie in [0, 127]")
        require(self.window > 0, f"{name}.window", self.window, "must be a positive number of steps")
        require(self.hysteresis > 0, f"{name}.hysteresis", self.hysteresis, "must be a positive number of overflows")
        require(
            0 < self.minimum <= 2.0**self.initial_power or self.static is not None,
            f"{name}.minimum",
            self.minimum,
            f"must be positive and not above the first scale, 2**{self.initial_power}",
        )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes of compute, of gradients that travel and of those that are accumulated. Moments and norms are float32."""

    compute: str = "bfloat16"
    """`bfloat16` or `float16`: parameters and activations, with fp32 master weights in the optimizer state, and for
    `float16` loss scaling; `float32`: no master."""
    reduce: str | None = None
    """`bfloat16`, `float32` or `float16`, in which gradients travel between devices (FSDP reduce_dtype, DeepSpeed communication_data_type);
    None means that of compute. Another than that of compute takes the explicit engine."""
    accumulate: str = "float32"
    """`bfloat16`, `float32` or `float16`, in which micro-batches' gradients are summed (DeepSpeed data_types.grad_accum_dtype)."""
    keep_float32: tuple[str, ...] = ()
    """Patterns of parameters that stay float32 in compute (norm scales, a router), without a master of their own."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Of float16 compute."""

    def __post_init__(self) -> None:
        check_types(self, "precision.")
        require(self.compute in DTYPES, "precision.compute", self.compute, f"must be one of {', '.join(DTYPES)}")
        require(self.reduce in (None, *DTYPES), "precision.reduce", self.reduce, f"must be one of {', '.join(DTYPES)}, or None")
        require(self.accumulate in DTYPES, "precision.accumulate", self.accumulate, f"must be one of {', '.join(DTYPES)}")
        for knob in ("reduce", "accumulate"):
            require(
                getattr(self, knob) != "float16" or self.compute == "float16",
                f"precision.{knob}",
                "float16",
                f"gradients overflow there unless the loss is scaled, and precision.compute={self.compute!r}; use 'bfloat16' or 'float32'",
            )
        require(
            self.compute == "float16" or self.loss_scale == LossScaleConfig(),
            "precision.loss_scale",
            self.loss_scale,
            f"only float16 is scaled, and precision.compute={self.compute!r}",
        )


@dataclass(frozen=True, kw_only=True)
class AccumulationConfig:
    """Gradient accumulation over micro-batches inside one optimizer step (DeepSpeed gradient_accumulation_steps)."""

    micro_batches: int = 1
    """Micro-batches a step. Above 1 the gradients are accumulated in `precision.accumulate`."""
    mode: str = "sharded"
    """Stages 2 and 3: `sharded` scatters the gradients of each micro-batch into a sharded accumulator (the least memory);
    `local` (FSDP's no_sync) accumulates whole gradients and scatters once a step (the least traffic; explicit engine).
    Stages 0 and 1 hold whole gradients anyway: the explicit engine reduces them once, the partitioner each time."""

    def __post_init__(self) -> None:
        check_types(self, "accumulation.")
        require(self.micro_batches > 0, "accumulation.micro_batches", self.micro_batches, "must be positive")
        require(self.mode in ("sharded", "local"), "accumulation.mode", self.mode, "must be 'sharded' or 'local'")


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
        check_types(self, "data.")
        require(self.global_batch > 0, "data.global_batch", self.global_batch, "must be a positive number of sequences")
        require(self.sequence_length > 0, "data.sequence_length", self.sequence_length, "must be a positive number of tokens")
        require(bool(self.path), "data.path", self.path, "must name a file, a directory or 'stdlib'")


VERIFY = ("full", "sampled", "off")
"""How much of a checkpoint is compared with its checksums."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how many to keep."""

    every: int = 0
    """Optimizer steps between saves; 0 saves at the end and on SIGTERM or Ctrl-C only."""
    keep: int = 2
    """The newest checkpoints that are kept; with evaluation the best one beside them (`evaluation.keep_best`)."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept for good; 0 for none."""
    verify: str = "full"
    """What a resume checks against the checksums: `full`; `sampled`, one leaf in 8; `off`."""
    chunk_bytes: int = 64 * 2**20
    """The most bytes of an array stored as one piece, which is read as a whole."""
    concurrent_gb: int = 32
    """How much may be written or read at once, in GB of host memory."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint.")
        require(self.every >= 0, "checkpoint.every", self.every, "must be 0 or more steps")
        require(self.keep > 0, "checkpoint.keep", self.keep, "must be positive")
        require(self.keep_every >= 0, "checkpoint.keep_every", self.keep_every, "must be 0 or more steps")
        require(self.verify in VERIFY, "checkpoint.verify", self.verify, f"must be one of {', '.join(VERIFY)}")
        require(self.chunk_bytes > 0, "checkpoint.chunk_bytes", self.chunk_bytes, "must be positive")
        require(self.concurrent_gb > 0, "checkpoint.concurrent_gb", self.concurrent_gb, "must be positive")


REMATS = ("none", "full", "dots", "names", "offload")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The loss on text that is not trained on: when it is taken, and what follows from it."""

    every: int = 0
    """Optimizer steps between evaluations; 0 for none."""
    path: str | tuple[str, ...] | None = None
    """Held-out text, as `data.path` and tokenized like it."""
    fraction: float = 0.0
    """Share of the corpus, from its end, that is held out and never trained on, where there is no `path`."""
    patience: int = 0
    """Evaluations in a row without a new lowest loss after which the run ends; 0 never ends it."""
    keep_best: bool = True
    """Whether to save at each new lowest loss, and to keep the checkpoint of the lowest beside the newest `checkpoint.keep`."""

    def __post_init__(self) -> None:
        check_types(self, "evaluation.")
        require(self.every >= 0, "evaluation.every", self.every, "must be 0 or more steps")
        require(0 <= self.fraction < 1, "evaluation.fraction", self.fraction, "must lie in [0, 1)")
        require(self.patience >= 0, "evaluation.patience", self.patience, "must be 0 or more evaluations")
        require(
            self.path is None or not self.fraction,
            "evaluation.fraction",
            self.fraction,
            "evaluation.path names the held-out text; set one of them",
        )
        require(
            not self.every or bool(self.path) or self.fraction > 0,
            "evaluation.every",
            self.every,
            "nothing is held out; set evaluation.path or evaluation.fraction",
        )
        require(self.every > 0 or not self.path, "evaluation.path", self.path, "evaluation.every=0 never evaluates; set it")
        require(self.every > 0 or not self.patience, "evaluation.patience", self.patience, "evaluation.every=0 never evaluates; set it")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run: what `configs/*.py` describe and `zjax train --config.a.b=V` overrides."""

    steps: int = 100
    """Optimizer steps of the run."""
    seed: int = 0
    """Seed of the initial weights, the data order and dropout."""
    clip: float | None = 1.0
    """Largest global gradient norm (DeepSpeed gradient_clipping); None does not clip."""
    clip_value: float | None = None
    """Largest absolute value of an element of a gradient (torch clip_grad_value_), cut before the norm is; None does not."""
    norm_groups: tuple[str, ...] = ()
    """Patterns of parameters whose gradient norm is logged by itself, as `grad_norm/PATTERN`."""
    max_consecutive_skips: int = 20
    """Steps in a row that are skipped because loss or gradients are not finite, after which the run stops; 0 never stops it."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that are not trained: no gradient, moments or master (torch requires_grad=False)."""
    trainable: tuple[str, ...] = ()
    """Patterns of the only parameters that are trained (LoRA); empty for all. Those also named by `frozen` are not."""
    remat: str = "none"
    """What each block's backward recomputes: `none`; `full`, all but the block's input; `dots`, all but matrix products
    without batch dims; `names`, all but the values in `remat_names`; `offload`, the same, with those values in the host's
    memory (DeepSpeed cpu_checkpointing)."""
    remat_names: tuple[str, ...] = ()
    """Values that `names` and `offload` save: of a Llama `block_input`, `query`, `key`, `value`, `attention`, `attention_out`,
    `mlp_gate`, `mlp_up`. Empty is `attention` and `attention_out` for `names`, `block_input` for `offload`."""
    remat_every: int = 1
    """Only the input of every so many blocks is saved (Megatron recompute_num_layers); so many are computed again at once, and
    `remat` says what is held of each until its backward. One more forward and gathering; divides the number of blocks."""
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
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        if self.remat is None:  # as the command line reads `none`
            object.__setattr__(self, "remat", "none")
        check_types(self, "")
        require(self.steps > 0, "steps", self.steps, "must be positive")
        require(0 <= self.seed < 2**32, "seed", self.seed, "must lie in [0, 2**32)")
        require(self.clip is None or 0 < self.clip < math.inf, "clip", self.clip, "must be positive and finite, or None not to clip")
        require(
            self.clip_value is None or 0 < self.clip_value < math.inf,
            "clip_value",
            self.clip_value,
            "must be positive and finite, or None not to clip",
        )
        require(self.max_consecutive_skips >= 0, "max_consecutive_skips", self.max_consecutive_skips, "must be 0 or more steps")
        require(self.remat in REMATS, "remat", self.remat, f"{nearest(self.remat, REMATS)}must be one of {', '.join(REMATS)}")
        require(
            not self.remat_names or self.remat in ("names", "offload"),
            "remat_names",
            self.remat_names,
            f"only remat='names' and 'offload' save by name, and remat={self.remat!r}",
        )
        require(self.remat_every > 0, "remat_every", self.remat_every, "must be a positive number of blocks")
        require(self.sample_tokens >= 0, "sample_tokens", self.sample_tokens, "must be 0 or more")
        require(
            self.optimizer.warmup_steps <= self.steps,
            "optimizer.warmup_steps",
            self.optimizer.warmup_steps,
            f"the run has only steps={self.steps}",
        )
        require(
            self.data.global_batch % self.accumulation.micro_batches == 0,
            "data.global_batch", self.data.global_batch,
            f"must be a multiple of accumulation.micro_batches={self.accumulation.micro_batches} ({self.data.global_batch} % {self.accumulation.micro_batches} = {self.data.global_batch % self.accumulation.micro_batches})",
        )  # fmt: skip

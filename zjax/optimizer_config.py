"""The optimizer, its schedule and its parameter groups, as a run's config names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zjax.fields import Arguments, check_types, nearest, require

OPTIMIZER_KNOBS = {
    "adamw": ("b1", "b2", "eps", "weight_decay", "moment_dtype", "bias_correction"),
    "adam": ("b1", "b2", "eps", "weight_decay", "moment_dtype", "bias_correction"),
    "lion": ("b1", "b2", "weight_decay", "moment_dtype"),
    "adafactor": ("weight_decay",),
    "adagrad": ("eps", "weight_decay", "initial_accumulator_value"),
    "lamb": ("b1", "b2", "eps", "weight_decay", "bias_correction", "min_coeff", "max_coeff"),
    "sgd": ("momentum", "nesterov", "weight_decay", "moment_dtype"),
    "muon": ("momentum", "nesterov", "b1", "b2", "eps", "weight_decay", "adam_learning_rate", "moment_dtype"),
    "schedule_free_adamw": ("b1", "b2", "eps", "weight_decay"),
}
"""The optimizers by name, and which of the optional knobs each takes."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {},
    "cosine": {},
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "OneCycle": {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}
"""The schedules by name, and the arguments of DeepSpeed's with their defaults there."""


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Parameters that are updated with a learning rate or weight decay of their own (torch and DeepSpeed parameter groups)."""

    patterns: tuple[str, ...]
    """Patterns of parameter paths; the first group that names a parameter has it."""
    learning_rate_scale: float = 1.0
    """What the schedule's learning rate is multiplied with."""
    weight_decay: float | None = None
    """In place of `OptimizerConfig.weight_decay`, and applied as that is; None takes that."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.groups.")
        require(bool(self.patterns), "optimizer.groups.patterns", self.patterns, "must name parameters")
        require(
            0 <= self.learning_rate_scale < math.inf,
            "optimizer.groups.learning_rate_scale",
            self.learning_rate_scale,
            "must be finite and not negative",
        )
        require(
            self.weight_decay is None or 0 <= self.weight_decay < math.inf,
            "optimizer.groups.weight_decay",
            self.weight_decay,
            "must be finite and not negative",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optax optimizer and its schedule. Knobs left at None take optax's default; one the optimizer lacks raises."""

    name: str = "adamw"
    """`adamw`, `adam`, `lion`, `adafactor`, `adagrad`, `lamb`, `sgd`, `muon` or `schedule_free_adamw`."""
    learning_rate: float = 3e-4
    """Peak learning rate. WarmupDecayLR, OneCycle and LRRangeTest have theirs in `schedule_arguments`, as in DeepSpeed."""
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine`, down to `min_ratio` of the peak at the run's last step; or one of
    DeepSpeed's, `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle` or `LRRangeTest`, whose arguments are in `schedule_arguments`."""
    schedule_arguments: Mapping[str, Any] = field(default_factory=Arguments)
    """Arguments of a DeepSpeed schedule, by DeepSpeed's names."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    min_ratio: float = 0.0
    """Final learning rate as a share of the peak, for `linear` and `cosine`."""
    b1: float | None = None
    """Decay of the first moment."""
    b2: float | None = None
    """Decay of the second moment."""
    eps: float | None = None
    """Added to the root of the second moment; for `adagrad` to the sum under the root (torch's eps is the root of it)."""
    weight_decay: float | None = None
    """Weight decay, on every parameter; decoupled, but for `adam`, `adagrad` and `sgd`, where it is added to the gradient
    (torch). The learning rate scales it, but for `adafactor` (optax's weight_decay_rate)."""
    bias_correction: bool | None = None
    """Whether Adam's moments are divided by 1 - b^t; DeepSpeed can leave them as they are. None is True."""
    min_coeff: float | None = None
    """Least trust ratio of lamb (DeepSpeed min_coeff); None does not bound it."""
    max_coeff: float | None = None
    """Largest trust ratio of lamb (DeepSpeed max_coeff); None does not bound it."""
    initial_accumulator_value: float | None = None
    """Where adagrad's sum of squares starts: 0.1 in optax, 0 in torch."""
    momentum: float | None = None
    """Momentum of sgd and muon."""
    nesterov: bool | None = None
    """Nesterov momentum of sgd and muon."""
    adam_learning_rate: float | None = None
    """Peak learning rate of the parameters that muon leaves to adamw; None takes `learning_rate`."""
    moment_dtype: str | None = None
    """`bfloat16` or `float32`: dtype of the first moment; None is float32. The second moment is always float32."""
    groups: tuple[ParamGroup, ...] = ()
    """Parameters with a learning rate or weight decay of their own."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        require(
            self.name in OPTIMIZER_KNOBS,
            "optimizer.name",
            self.name,
            f"{nearest(self.name, OPTIMIZER_KNOBS)}known: {', '.join(OPTIMIZER_KNOBS)}",
        )
        for knob in ("learning_rate", "adam_learning_rate"):
            rate = getattr(self, knob)
            require(rate is None or 0 <= rate < math.inf, f"optimizer.{knob}", rate, "must be finite and not negative")
        require(
            self.schedule in SCHEDULES,
            "optimizer.schedule",
            self.schedule,
            f"{nearest(self.schedule, SCHEDULES)}known: {', '.join(SCHEDULES)}",
        )
        known = SCHEDULES[self.schedule]
        for name, value in self.schedule_arguments.items():
            require(
                name in known,
                f"optimizer.schedule_arguments.{name}",
                value,
                f"{nearest(name, known)}{self.schedule} takes {', '.join(known) or 'none'}",
            )
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must be 0 or more steps")
        require(
            not (known and self.warmup_steps),
            "optimizer.warmup_steps",
            self.warmup_steps,
            f"{self.schedule} has a warm-up of its own; set it in optimizer.schedule_arguments",
        )
        require(0 <= self.min_ratio <= 1, "optimizer.min_ratio", self.min_ratio, "must lie in [0, 1]")
        for knob in ("b1", "b2", "momentum"):
            value = getattr(self, knob)
            require(value is None or 0 <= value < 1, f"optimizer.{knob}", value, "must lie in [0, 1)")
        for knob in ("eps", "weight_decay", "min_coeff", "max_coeff", "initial_accumulator_value"):
            value = getattr(self, knob)
            require(value is None or 0 <= value < math.inf, f"optimizer.{knob}", value, "must be finite and not negative")
        require(
            (self.min_coeff or 0) <= (math.inf if self.max_coeff is None else self.max_coeff),
            "optimizer.min_coeff",
            self.min_coeff,
            f"must not be above optimizer.max_coeff={self.max_coeff}",
        )
        require(
            self.name != "sgd" or bool(self.momentum) or not self.nesterov,
            "optimizer.nesterov",
            self.nesterov,
            "needs optimizer.momentum above 0 (as torch.optim.SGD does)",
        )
        require(
            self.name != "schedule_free_adamw" or self.b1 != 0,
            "optimizer.b1",
            self.b1,
            "schedule_free_adamw divides by it; it must be above 0",
        )
        require(
            self.moment_dtype in (None, "bfloat16", "float32"),
            "optimizer.moment_dtype",
            self.moment_dtype,
            "must be 'bfloat16', 'float32' or None",
        )
        for knob in sorted({knob for knobs in OPTIMIZER_KNOBS.values() for knob in knobs}):
            require(
                getattr(self, knob) is None or knob in OPTIMIZER_KNOBS[self.name],
                f"optimizer.{knob}",
                getattr(self, knob),
                f"{self.name} does not take it; it takes {', '.join(OPTIMIZER_KNOBS[self.name])}",
            )

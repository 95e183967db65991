"""The `zero_optimization` section as knobs of `ZeroConfig`, without that class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zjax.ds_config.keys import AUTO
from zjax.fields import ConfigError

PERSISTENCE_THRESHOLD = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold, in elements."""


def zero_knobs(values: Mapping[str, Any], *, hidden_size: int | None = None, unit_elements: int | None = None) -> dict[str, Any]:
    """Fields of `ZeroConfig` by name.

    `stage3_max_live_parameters` is an upper bound: where two units of the model, what zjax has whole at once by default, lie
    above it, it has one and gathers none ahead; where they lie below it, or the model is not known, nothing changes.

    Args:
      values: of `DeepSpeedFile.values`.
      hidden_size: width of the model, for `auto`; Hugging Face's integration takes 10 times it as persistence threshold.
      unit_elements: elements of the model's largest unit.

    Raises:
      ConfigError: an `auto` that needs the hidden size, or a combination that DeepSpeed refuses.
    """
    section = {path.removeprefix("zero_optimization."): value for path, value in values.items() if path.startswith("zero_optimization.")}
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage={stage!r}: must be 0, 1, 2 or 3")
    if section.get("pipeline_loading_checkpoint") is True and stage != 3:
        raise ConfigError(f"zero_optimization.pipeline_loading_checkpoint=true: only stage 3 has it, and zero_optimization.stage={stage}")
    if stage < 3:
        return {"stage": stage}
    threshold = section.get("stage3_param_persistence_threshold", PERSISTENCE_THRESHOLD)
    if threshold == AUTO:
        if hidden_size is None:
            raise ConfigError(
                "zero_optimization.stage3_param_persistence_threshold='auto': is 10 times the model's hidden size, which is not known here; give a number"
            )
        threshold = 10 * hidden_size
    knobs = {"stage": stage, "persistence_threshold": threshold, "prefetch": int(section.get("stage3_prefetch_bucket_size") != 0)}
    live = section.get("stage3_max_live_parameters")
    two_units = 2 * unit_elements if unit_elements else 1  # of a model that is not known, only a bound of 0 is surely below
    if live is not None and live < two_units:
        knobs |= {"prefetch": 0, "max_gathered_units": 1}
    return knobs

"""What the host makes of steps whose loss or gradients were not finite: a message, and at last the end of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zjax.plan import Plan


class NonFiniteError(FloatingPointError):
    """A run that makes no progress any more. The message names the first gradient that is not finite, and NaN or Inf."""


class NonFiniteGuard:
    """Watches the metrics of a run's steps.

    The step itself skips what is not finite: parameters, optimizer state and schedule stay bit for bit as they were, and
    the next batch is taken. This tells when to stop: after `max_consecutive_skips` steps in a row, and with float16 at an
    overflow where the loss scale is at its minimum already (DeepSpeed raise_error_at_min_scale).
    """

    def __init__(self, plan: Plan, max_consecutive_skips: int = 20):
        """Args: the plan of the steps; how many skips in a row end the run, 0 for never."""
        self._names = [leaf.name for leaf in plan.trained]
        self._loss_scale = plan.precision.loss_scale
        self._limit = max_consecutive_skips
        self.consecutive = 0
        """Steps skipped since the last that was applied."""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Takes a step's metrics (host numbers or arrays); returns a message if the step was skipped, else None.

        Raises:
          NonFiniteError: the run makes no progress. The state the step returned is the last good one.
        """
        if float(metrics["step_applied"]):
            self.consecutive = 0
            return None
        self.consecutive += 1
        what = f"step {step}: {self._first(metrics)}; the step was skipped ({self.consecutive} in a row)"
        if "loss_scale" in metrics:
            what += f", loss scale {float(metrics['loss_scale']):g}"
        if float(metrics.get("loss_scale_stuck", 0)) and self._loss_scale.raise_at_minimum:
            raise NonFiniteError(
                f"{what}: the loss scale is at its minimum, {self._loss_scale.minimum:g}, and gradients still overflow. "
                "Lower the learning rate, use precision.compute='bfloat16', or set precision.loss_scale.raise_at_minimum=False"
            )
        if self._limit and self.consecutive >= self._limit:
            raise NonFiniteError(
                f"{what}: max_consecutive_skips={self._limit} is reached. The parameters are those of the last step that was applied. "
                "Lower the learning rate or look at the data; max_consecutive_skips=0 goes on for ever"
            )
        return what

    def _first(self, metrics: Mapping[str, Any]) -> str:
        place = int(metrics["nonfinite_leaf"])
        if place >= 0:
            return f"the gradient of {self._names[place]} has {'NaN' if float(metrics['nonfinite_is_nan']) else 'Inf'}"
        loss = float(metrics["loss"])
        if not math.isfinite(loss):
            return f"the loss is {loss}, though gradients are finite"
        return "the norm of the gradients or the batch's weight is not finite"

"""What the tests of audits share: small bf16 Llamas in every mode, and their audits, each made once."""

import functools

from small import REPO

from zjax.audit import Audit
from zjax.cli import audit_run, load_config

TINY = str(REPO / "configs" / "llama_tiny.py")

SIZES = {"tiny": {}, "smaller": {"n_layers": 2, "d_ff": 256, "n_kv_heads": 4}}
"""Llamas of 3.0M and 1.0M parameters, as changes to the tiny preset."""
TARGETS = ("cpu:8", "gpu:h100:1x8", "gpu:h100:2x8", "tpu:v5e:2x4")
SCALARS = 1024
"""Bytes that losses, weights and norms may add to what a device sends."""


def overrides(*, stage=3, keep=False, replica=1, size="smaller", engine="partitioner"):
    """A mode as options of the command line."""
    values = {f"model.{name}": value for name, value in SIZES[size].items()}
    values |= {
        "precision.compute": "bfloat16", "data.global_batch": 16, "data.sequence_length": 64,
        "zero.stage": stage, "zero.reshard_after_forward": not keep, "zero.engine": engine, "mesh.replica": replica,
        "zero.prefetch": 0,  # the loop that gathers ahead keeps its last layer: of two layers, a quarter less than planned
    }  # fmt: skip
    return [f"--config.{name}={value}" for name, value in values.items()]


def config(**mode):
    return load_config(TINY, overrides(**mode))


@functools.cache
def audited(target, **mode) -> Audit:
    return audit_run(config(**mode), target)


def kinds(audit: Audit) -> set[str]:
    return {finding.kind for finding in audit.findings}


def sent(audit: Audit) -> dict[str, int]:
    """Wire bytes a device by kind of collective, 0 for those it has none of."""
    made = {kind: figures["bytes"] for kind, figures in audit.to_json()["collectives"].items()}
    return {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0} | made

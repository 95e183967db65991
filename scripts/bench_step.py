"""Step time and memory of every stage and engine on the CPU, as ratios to a plain `jax.jit` step of the same model.

    python scripts/bench_step.py                             # 1 process x 8 simulated devices
    python scripts/bench_step.py --processes=2               # 2 processes x 1 device over gloo, and torch if there is one
    python scripts/bench_step.py --processes=2 --sizes=small --rounds=3 --variants='stage3*,torch-*' --no-remat --json

The model is a Llama of 34,087,424 parameters in float32 (`peers/common.py`): d_model 512, 8 layers, sequence 256, global
batch 8, AdamW, every block recomputed in the backward.

`plain` is the step as a competent JAX user writes it: parameters and AdamW state in stage 3's `NamedSharding`s, one
`jax.jit` with shardings and donation, a scan over layers under `jax.checkpoint`, and one sharding constraint on the
residual stream; no unit marks. `plain-again` is the same once more: how far its ratio is from 1 is the noise.
`plain-skip` leaves the state as it was where loss or gradients are not finite, as zjax's steps always do; `plain-stage0`
replicates the state. zjax's stages are `stageN-ENGINE`; in stage 3 `-prefetch0` gathers no layer ahead
(the default is one) and `-keep` is reshard_after_forward=False. torch's are in `peers/fsdp2.py`.

Every variant has processes of its own. They take turns: a round is one step of each, in rotating order, and every
step is compared with the plain step of its round, so that a change in the machine's speed hits both. Only a few
variants are alive at a time (`--together`), the plain one always. All start from the same weights, and a loss that
differs from the plain one at any step ends the run.

With 2 processes each computes in one thread: PJRT_NPROC=1 for jax (the XLA_FLAGS that once did this,
--xla_cpu_multi_thread_eigen=false, no longer do), OMP_NUM_THREADS=1 for torch. With one process the 8 devices share the
machine's cores. jax's steps also return the gradient norm; torch's do not compute it.
"""

import argparse
import contextlib
import fnmatch
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from peers.common import ADAMW, ONE_THREAD, SIZES, Group, free_port, serve, tokens_of
from rich import box
from rich.console import Console
from rich.table import Table

from zjax import MeshConfig, ZeroConfig, build_plan, init_state, make_mesh, make_train_step
from zjax.models import llama
from zjax.optim import global_norm
from zjax.state import state_shardings
from zjax.step import batch_sharding
from zjax.tree import named_leaves

PLAIN = {"plain": {"stage": 3}, "plain-again": {"stage": 3}, "plain-skip": {"stage": 3}, "plain-stage0": {"stage": 0}}
"""The stage whose shardings the state has."""
KNOBS = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage3-prefetch0": {"stage": 3, "prefetch": 0},
    "stage3-keep": {"stage": 3, "reshard_after_forward": False},
}
ZJAX = {f"{name}-{engine}": {**knobs, "engine": engine} for name, knobs in KNOBS.items() for engine in ("partitioner", "explicit")}
TORCH = {"torch-ddp": "ddp", "torch-fsdp2": "fsdp2", "torch-fsdp2-keep": "fsdp2-keep"}

SEED = 0
LOSS_RTOL = 1e-4
TORCH_PEER = Path(__file__).parent / "peers" / "fsdp2.py"


# One process of a variant.


def plain_loss(config, remat, params, batch, residual):
    """Mean cross-entropy of the plain step; `residual` pins the residual stream to the data axis."""
    tokens = batch["inputs"]
    rotary = llama.rotary_table(config, tokens.shape[1])
    embed, block, head = llama.LlamaFunctions(config).functions()

    def layer(x, weights):
        return residual(block(weights, x, rotary)), None

    x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, residual(embed(params["embed"], tokens)), params["layers"])
    # XLA's CPU runtime starts a collective that needs nothing of a loop before it while the loop's own still run, and gloo mixes
    # up the two; so the targets and their mask, which XLA gathers, wait for the loop.
    after = 0 * jax.lax.stop_gradient(x[..., 0])
    targets, mask = batch["targets"] + after.astype(jnp.int32), batch["mask"] + after
    logits = head(params["head"], x, None).astype(jnp.float32)
    picked = jnp.sum(jnp.where(targets[..., None] == jnp.arange(logits.shape[-1]), logits, 0), -1)  # as the model does
    nll = jax.nn.logsumexp(logits, -1) - picked
    return jnp.sum(nll * mask) / jnp.sum(mask)


def plain_step(config, remat, skip, tx, residual, state, batch):
    """One step on (params, optax state): the arithmetic of zjax's, without its constraints; `skip`: a step that is not finite."""
    params, inner = state
    loss, grads = jax.value_and_grad(lambda p: plain_loss(config, remat, p, batch, residual))(params)
    norm = global_norm(grads)
    updates, new_inner = tx.update(grads, inner, params)
    new = optax.apply_updates(params, updates), new_inner
    if skip:
        applied = jnp.isfinite(norm) & jnp.isfinite(loss)
        new = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, state)
    return new, {"loss": loss, "grad_norm": norm}


def jit_plain(plan, config, remat, skip):
    """The plain step with the plan's own state shardings, and how to take its state from zjax's."""
    parts = lambda s: (s.params, s.opt_state.inner)  # noqa: E731
    shardings, rows = parts(state_shardings(plan)), batch_sharding(plan)
    residual = lambda x: jax.lax.with_sharding_constraint(x, rows)  # noqa: E731
    step = jax.jit(
        functools.partial(plain_step, config, remat, skip, plan.recipe.tx, residual),
        in_shardings=(shardings, rows),
        out_shardings=(shardings, NamedSharding(plan.mesh, P())),
        donate_argnums=0,
    )
    return step, parts


def planned(spec: dict, devices=None):
    """The plan and the model of a variant."""
    sizes = {name: value for name, value in spec["sizes"].items() if name not in ("batch", "sequence")}
    config = llama.LlamaConfig(**sizes, max_sequence=spec["sizes"]["sequence"])
    model = llama.LlamaFunctions(config, remat="full" if spec["remat"] else "none")
    zero = ZeroConfig(**(PLAIN | ZJAX)[spec["variant"]])
    return build_plan(zero, model.init, optax.adamw(**ADAMW), make_mesh(MeshConfig(fsdp=-1), devices), units=llama.UNITS), model


def build(spec: dict):
    """One process of a variant: see `peers.common.serve`."""
    jax.config.update("jax_num_cpu_devices", spec["devices"])
    if spec["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{spec['port']}", spec["processes"], spec["rank"])
    plan, model = planned(spec)
    state = init_state(plan, jax.random.key(SEED))
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    if spec["variant"] in PLAIN:
        step, parts = jit_plain(plan, model.config, spec["remat"], skip=spec["variant"] == "plain-skip")
        state = parts(state)
        lower = functools.partial(step.lower, state)
    else:
        step = make_train_step(plan, model.loss)
        lower = step.lower

    def prepare(index):
        tokens, rows = tokens_of(spec["sizes"], index), batch_sharding(plan)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones_like(tokens[:, 1:], np.float32)}
        return {name: jax.make_array_from_callback(x.shape, rows, lambda part, x=x: x[part]) for name, x in batch.items()}

    def run(batch):
        nonlocal state
        state, metrics = jax.block_until_ready(step(state, batch))
        return float(metrics["loss"])

    compiled = lower(prepare(0)).compile()  # the steps below find it compiled
    return prepare, run, {"parameters": parameters, "version": f"jax {jax.__version__}", "compiled": held(compiled.memory_analysis())}


def held(analysis) -> dict[str, int]:
    """Bytes a device holds while the compiled program runs, and what they are."""
    parts = {part: getattr(analysis, f"{part}_size_in_bytes") for part in ("argument", "temp", "output", "alias")}
    return parts | {"peak": parts["argument"] + parts["temp"] + parts["output"] - parts["alias"]}


def write_weights(spec: dict) -> None:
    """The initial parameters of every variant as a .npz, for torch; their values do not depend on the mesh."""
    plan, _ = planned(spec, jax.devices()[:1])
    np.savez(spec["weights"], **{name: np.asarray(x) for name, x in named_leaves(init_state(plan, jax.random.key(SEED)).params)})


# The parent: who takes a step when.


def started(arguments, name: str, weights: str | None) -> Group:
    """The processes of a variant; they compile when the group is entered."""
    common = {"sizes": SIZES[arguments.sizes], "remat": arguments.remat, "processes": arguments.processes, "port": free_port()}
    if name in TORCH:
        command, common = [arguments.torch_python, str(TORCH_PEER)], {**common, "mode": TORCH[name], "weights": weights}
    else:
        command, common = [sys.executable, __file__], {**common, "variant": name, "devices": arguments.devices}
    environment = {"JAX_PLATFORMS": "cpu"} | (ONE_THREAD if arguments.processes > 1 else {})
    return Group(name, [*command, "--worker"], [{**common, "rank": rank} for rank in range(arguments.processes)], environment)


def take_turns(members: list[Group], rounds: int) -> None:
    for turn in range(rounds):
        first = turn % len(members)
        for member in members[first:] + members[:first]:
            member.step()


def measure(arguments, names: list[str], weights: str | None, say) -> list[dict]:
    """One row a variant, the plain one first; SystemExit where one of them does other work than the plain one."""
    rows = []
    with contextlib.ExitStack() as alive:
        say("plain: compiling")
        plain = alive.enter_context(started(arguments, "plain", weights))
        for begin in range(0, max(1, len(names)), arguments.together):
            with contextlib.ExitStack() as some:
                others = []
                for name in names[begin : begin + arguments.together]:
                    say(f"{name}: compiling")
                    others.append(some.enter_context(started(arguments, name, weights)))
                for member in [plain, *others]:
                    for _ in range(arguments.warmup):
                        member.step()
                    member.reset()
                say(f"{', '.join(member.name for member in [plain, *others])}: {arguments.rounds} rounds")
                take_turns([plain, *others], arguments.rounds)
                for other in others:
                    require_same_work(plain, other)
                new = [plain, *others] if begin == 0 else others
                rows += [row_of(arguments.rounds, plain, member) for member in new]
    return rows


def loss_deviations(plain: Group, other: Group) -> list[float]:
    """|loss - plain loss| / plain loss of every step from the first."""
    return [abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"]) for ours, theirs in zip(other.steps, plain.steps, strict=False)]


def require_same_work(plain: Group, other: Group) -> None:
    """SystemExit unless the parameter counts and the losses of every step from the first agree."""
    if other.about["parameters"] != plain.about["parameters"]:
        sys.exit(f"{other.name}: {other.about['parameters']:,} parameters, but plain has {plain.about['parameters']:,}")
    for index, deviation in enumerate(loss_deviations(plain, other)):
        if not deviation <= LOSS_RTOL:  # a NaN is not
            ours, theirs = other.steps[index]["loss"], plain.steps[index]["loss"]
            sys.exit(f"{other.name}: the loss of step {index + 1} is {ours:.7f}, but plain's is {theirs:.7f}")


def row_of(rounds: int, plain: Group, member: Group) -> dict:
    """What was measured of a variant in its last rounds, against the plain steps of the same rounds."""
    mine, base = member.steps[-rounds:], plain.steps[-rounds:]
    ratios = {key: [a[key] / b[key] for a, b in zip(mine, base, strict=True)] for key in ("seconds", "cpu_seconds")}
    compiled = member.about.get("compiled")
    return {
        "variant": member.name,
        "version": member.about["version"],
        "parameters": member.about["parameters"],
        "time_ratio": spread(ratios["seconds"]),
        "cpu_ratio": spread(ratios["cpu_seconds"]),
        "compiled_bytes": compiled,
        "compiled_ratio": compiled["peak"] / plain.about["compiled"]["peak"] if compiled else None,
        "steps_peak_rss": member.steps_peak_rss,
        "last_loss": mine[-1]["loss"],
        "largest_loss_deviation": max(loss_deviations(plain, member)),
        "this_machine": {
            "seconds": [step["seconds"] for step in mine],
            "plain_seconds": [step["seconds"] for step in base],
            "cpu_seconds": [step["cpu_seconds"] for step in mine],
        },
    }


def spread(values: list[float]) -> dict[str, float]:
    low, high = np.quantile(values, (0.1, 0.9)).tolist()
    return {"median": statistics.median(values), "p10": low, "p90": high}


# What is printed.


def table_of(rows: list[dict], setting: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=setting, title_justify="left", caption_justify="left", caption=CAPTION)
    for column in ("variant", "time / plain", "10 to 90 %", "CPU / plain", "device MiB", "/ plain", "peak RSS MiB", "(seconds here)"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    mib = lambda size: f"{size / 2**20:,.1f}" if size else ""  # noqa: E731
    for row in rows:
        time, compiled = row["time_ratio"], row["compiled_bytes"]
        table.add_row(
            row["variant"],
            f"{time['median']:.3f}",
            f"{time['p10']:.3f} to {time['p90']:.3f}",
            f"{row['cpu_ratio']['median']:.3f}",
            mib(compiled and compiled["peak"]),
            f"{row['compiled_ratio']:.3f}" if compiled else "",
            mib(row["steps_peak_rss"]),
            f"{statistics.median(row['this_machine']['seconds']):.3f}",
        )
    return table


CAPTION = (
    "Ratios are medians over rounds; the interval is from the 10th to the 90th percentile. CPU: user and system time of "
    "all processes. device MiB: arguments + temporaries + outputs - aliased, of the compiled program, a device. peak RSS: of "
    "the largest process during the measured steps, what was left over from compilation included. Seconds are this "
    "machine's and say nothing elsewhere."
)


def torch_version(python: str) -> str | None:
    probe = [python, "-c", "import torch; print(torch.__version__)"]
    try:
        found = subprocess.run(probe, capture_output=True, text=True, timeout=120)
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def chosen(parser, arguments) -> list[str]:
    """The variants that will run beside the plain one."""
    known = [*PLAIN, *ZJAX]
    if arguments.torch and arguments.processes == 1:
        parser.error("--torch: torch has no simulated devices; it needs --processes=2")
    if arguments.torch is not False and arguments.processes == 2:
        if torch_version(arguments.torch_python):
            known += TORCH
        elif arguments.torch:
            parser.error(f"--torch: {arguments.torch_python} has no torch: pip install torch==2.13.0")
        else:
            print("torch is not installed, so FSDP2 is left out: pip install torch==2.13.0", file=sys.stderr)
    patterns = arguments.variants.split(",")
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            parser.error(f"--variants: {pattern!r} matches none of {', '.join(known)}")
    return [name for name in known if name != "plain" and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def parsed(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--devices", type=int, help="devices a process; default 8 in one process, 1 in each of two")
    parser.add_argument("--sizes", choices=SIZES, default="peer")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of every variant")
    parser.add_argument("--warmup", type=int, default=3, help="steps of every variant before it is measured")
    parser.add_argument("--together", type=int, default=3, help="variants alive at a time, beside the plain one")
    parser.add_argument("--variants", default="*", help="shell patterns, comma-separated; default all")
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True, help="recompute each block in the backward")
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, help="default: with 2 processes, if it can be imported")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON", help="the interpreter that has torch; default this one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.devices = arguments.devices or (8 if arguments.processes == 1 else 1)
    for name in ("devices", "rounds", "warmup", "together"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: must be positive")
    total, batch = arguments.processes * arguments.devices, SIZES[arguments.sizes]["batch"]
    if batch % total:
        parser.error(f"--devices: the global batch of {batch} does not divide over {total} devices")
    return arguments, parser


def main() -> None:
    arguments, parser = parsed()
    if arguments.worker:
        spec = json.loads(arguments.worker)
        return write_weights(spec) if "weights" in spec else serve(lambda: build(spec))
    names = chosen(parser, arguments)
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        weights = f"{folder}/weights.npz" if any(name in TORCH for name in names) else None
        if weights:
            spec = {"variant": "plain-stage0", "sizes": SIZES[arguments.sizes], "remat": False, "weights": weights}
            subprocess.run(
                [sys.executable, __file__, "--worker", json.dumps(spec)],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                check=True,
                stderr=subprocess.PIPE,
            )
        rows = measure(arguments, names, weights, lambda text: print(text, file=sys.stderr))
    total = f"{arguments.processes} process{'es' if arguments.processes > 1 else ''} x {arguments.devices} device{'s' if arguments.devices > 1 else ''}"
    setting = f"{total}, {rows[0]['parameters']:,} parameters, {'remat' if arguments.remat else 'no remat'}, {arguments.rounds} rounds"
    if arguments.json:
        options = {name: getattr(arguments, name) for name in ("processes", "devices", "rounds", "warmup", "together", "remat")}
        here = {"cores": os.cpu_count(), "load_average_before": load, "load_average_after": os.getloadavg()}
        print(json.dumps({"setting": {**options, "sizes": SIZES[arguments.sizes], "adamw": ADAMW}, "this_machine": here, "rows": rows}))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table_of(rows, setting))


if __name__ == "__main__":
    main()

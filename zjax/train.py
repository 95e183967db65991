"""The training loop: from a `TrainConfig` to a trained state, with metrics, checkpoints and a clean stop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zjax import rules
from zjax.audit import audit_here
from zjax.checkpoint import Checkpointer, CheckpointError
from zjax.checkpoint.weights import import_params, open_weights, own_names
from zjax.config import TrainConfig
from zjax.console import output
from zjax.data import DTYPES, Batches, Corpus, EvalBatches, hold_out, load_corpus, prefetch
from zjax.describe import summary
from zjax.estimate.hardware import chip_of_kind
from zjax.evaluate import EvalStep, Watch, evaluate, make_eval_step
from zjax.fields import ConfigError
from zjax.flags import xla_flags
from zjax.guard import NonFiniteError, NonFiniteGuard
from zjax.memory_log import MemoryLog
from zjax.mesh import AnyMesh, make_mesh
from zjax.metrics import MetricsWriter, draw_loss_curve, model_flops
from zjax.models import huggingface, llama
from zjax.models.attention import attention
from zjax.models.sample import sample_tokens
from zjax.optim import make_optimizer
from zjax.plan import Plan, build_plan
from zjax.profile import Profile
from zjax.schedules import make_schedule
from zjax.state import TrainState, init_state
from zjax.step import TrainStep, batch_sharding, check_batch, make_train_step
from zjax.tree import PyTree

FINDINGS_TOLD = 5
"""Findings of the step's audit that a run prints; all are in its workdir."""
AGREE_EVERY = 10
"""Steps between the processes' agreements on whether one of them was told to stop."""


def plan_run(config: TrainConfig, mesh: AnyMesh) -> Plan:
    """The plan of a configured run; an abstract mesh is enough."""
    tx = make_optimizer(config.optimizer, config.steps, units=llama.UNITS, embeddings=llama.EMBEDDINGS)
    build = functools.partial(
        build_plan,
        config.zero,
        tx=tx,
        mesh=mesh,
        precision=config.precision,
        accumulation=config.accumulation,
        frozen=config.frozen,
        trainable=config.trainable,
    )
    if config.model.preset == "abstract":
        count = config.model.parameters
        return build(lambda key: {"parameters": jnp.zeros(count)})
    model = model_of(config)
    return build(model.init, units=llama.UNITS, rules=[rules.tensor_parallel(llama.tensor_dims(model.config))])


def step_knobs(config: TrainConfig) -> dict[str, Any]:
    """What a configured run's step is made with, beside its plan and loss."""
    return {"clip": config.clip, "clip_value": config.clip_value, "norm_groups": config.norm_groups}


def abstract_batch(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the global batch of a configured run."""
    shape = (config.data.global_batch, config.data.sequence_length)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in DTYPES.items()}


def model_of(config: TrainConfig) -> llama.LlamaFunctions:
    """The model a config names, as functions; ConfigError for one that cannot be trained as configured."""
    if config.model.preset == "abstract":
        raise ConfigError("model.preset='abstract': a parameter count can be planned, not trained; choose a Llama preset")
    model = llama.LlamaFunctions(llama.from_config(config.model), llama.remat_of(config.remat, config.remat_names), config.remat_every)
    if model.config.n_layers % config.remat_every:
        raise ConfigError(f"remat_every={config.remat_every}: must divide model.n_layers={model.config.n_layers}")
    length, longest = config.data.sequence_length, model.config.max_sequence
    if length > longest:
        raise ConfigError(f"data.sequence_length={length}: longer than the rotary table, model.max_sequence={longest}")
    return model


def _say(console: Console, text: str) -> None:
    """Prints a line as it is; what the terminal's encoding or a terminal itself cannot show is escaped."""
    shown = "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
    shown = shown.encode(console.encoding, errors="backslashreplace").decode(console.encoding)
    console.print(shown, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    state: TrainState
    losses: list[float]
    """Loss of every step since the start, resumed ones included."""
    stopped_by: int | None
    """The signal that ended it early, after a save; None if every step was done, or the evaluation ended it."""
    watch: Watch = Watch()  # noqa: RUF009  (frozen)
    """The lowest evaluation loss."""


def run(
    config: TrainConfig,
    workdir: str | Path,
    *,
    devices: list[jax.Device] | None = None,
    console: Console | None = None,
    profile: tuple[int, int] | None = None,
) -> Result:
    """Trains; resumes at the newest checkpoint below `workdir` if there is one.

    `profile` names the first and the last step that are traced into `workdir/profile`, in every process. The plan and the
    audit of the step's own program are written to `workdir/plan.txt`, `audit.txt` and `audit.json`, and what the audit
    finds is told before the first step; what each device holds is in `workdir/memory`.

    Everything that can be wrong with the config, the data, the workdir or the checkpoint raises before anything is
    written. In a run of several processes each calls this; only the first writes metrics and prints.

    Raises:
      ConfigError: a config, corpus or workdir that cannot be used.
      CheckpointError: a checkpoint of another model, corpus or data order.
      NonFiniteError: the run makes no progress any more; its last good state is saved.
    """
    first = jax.process_index() == 0
    console = (console or output(80)) if first else Console(quiet=True)
    model = model_of(config)
    plan = plan_run(config, make_mesh(config.mesh, devices))
    check_batch(plan, abstract_batch(config))
    _check_attention(config, model)
    corpus, held_out = hold_out(load_corpus(config.data), config.data, config.evaluation)
    vocab_size = max(corpus.vocab_size, held_out.vocab_size if held_out else 0)
    if vocab_size > model.config.vocab_size:
        raise ConfigError(f"model.vocab_size={model.config.vocab_size}: the corpus has {vocab_size} tokens; raise it to that")
    batches = Batches(corpus, config.data.global_batch, config.data.sequence_length, config.seed)
    workdir = _usable_workdir(Path(workdir))
    checkpointer = _checkpointer(config, workdir)
    meta = _meta(config, model, corpus)
    resumed_at = checkpointer.resumable_step()
    if resumed_at is not None:
        _require_same_run(checkpointer.meta(resumed_at), meta, checkpointer.directory / str(resumed_at))
        state = checkpointer.restore(plan)
        resumed_at = int(state.step)  # an earlier one where the newest is damaged
        meta["evaluation"] = checkpointer.meta(resumed_at).get("evaluation", meta["evaluation"])
    else:
        state = init_state(plan, jax.random.key(config.seed))

    entropy = corpus.unigram_entropy()
    _say(console, summary(plan))
    if flags := xla_flags(jax.default_backend(), plan):
        _say(console, "XLA options: " + ", ".join(f"{name}={value}" for name, value in flags.items()))
    _say(console, f"corpus: {len(corpus):,} tokens, unigram entropy {entropy:.3f} nats; writing to {workdir}")
    if resumed_at is not None and resumed_at >= config.steps:
        _say(
            console,
            f"nothing to train: the run is at step {resumed_at}"
            + (f" of {config.steps}; a larger --config.steps goes on" if resumed_at == config.steps else f", and steps={config.steps}"),
        )
    elif resumed_at is not None and 0 < config.evaluation.patience <= meta["evaluation"]["since"]:
        _say(console, f"nothing to train: the run ended early at step {resumed_at}, evaluation.patience={config.evaluation.patience}")
    elif resumed_at is not None:
        _say(console, f"resuming at step {resumed_at} of {config.steps}")

    checkpointer.claim()  # before another run's metrics are touched
    writer = MetricsWriter(workdir, resumed_at or 0) if first else None
    memory = MemoryLog(workdir / "memory", resumed_at or 0, plan.mesh.devices.ravel().tolist())
    if first:
        (workdir / "plan.txt").write_text(plan.table() + "\n")
    try:
        evaluation = (
            _Evaluation(config, plan, model, held_out, checkpointer, meta, console) if held_out and config.evaluation.every else None
        )
        with Profile(profile, workdir / "profile") as traced:
            state, stopped_by = _loop(config, plan, model, batches, state, checkpointer, meta, writer, console, evaluation, traced, memory)
        _save(checkpointer, state, meta)
        losses = writer.column("loss") if writer else []
    finally:
        checkpointer.close()
        memory.close()
        if writer:
            writer.close()
    if stopped_by is not None:
        _say(console, f"stopped by {signal.Signals(stopped_by).name}; saved at step {int(state.step)}; the same command goes on")
        return Result(state, losses, stopped_by, Watch(**meta["evaluation"]))
    _report(config, model, corpus, state, losses, entropy, workdir, console)
    return Result(state, losses, None, Watch(**meta["evaluation"]))


def import_weights(config: TrainConfig, source: Path, workdir: str | Path, *, devices: list[jax.Device] | None = None) -> None:
    """Saves step 0 of a run whose parameters are those of `source`: see `zjax import`. Each process reads its own slices.

    Raises:
      ConfigError: a config, corpus or workdir that cannot be used.
      CheckpointError: weights that are not those of the configured model; a workdir with checkpoints.
    """
    model, plan = model_of(config), plan_run(config, make_mesh(config.mesh, devices))
    corpus, _ = hold_out(load_corpus(config.data), config.data, config.evaluation)
    tensors = open_weights(source)
    if huggingface.is_huggingface(tensors):
        _require_same_model(huggingface.config_of(source), model.config, source)
        params = import_params(plan, tensors, huggingface.layout(model.config), str(source), huggingface.ignored(model.config, tensors))
    else:
        params = import_params(plan, tensors, own_names(plan.params), str(source))
    checkpointer = _checkpointer(config, _usable_workdir(Path(workdir)))
    if steps := list(checkpointer.steps()):
        raise CheckpointError(f"{checkpointer.directory} has step {steps[-1]}; import into another --workdir")
    checkpointer.save(init_state(plan, jax.random.key(config.seed), params), _meta(config, model, corpus))
    checkpointer.close()


def _require_same_model(theirs: llama.LlamaConfig, ours: llama.LlamaConfig, source: Path) -> None:
    """CheckpointError for sizes that differ, but for the longest sequence, which may be less than theirs."""
    for name, value in dataclasses.asdict(theirs).items():
        mine = getattr(ours, name)
        if name == "attention" or mine == value or (name == "max_sequence" and mine < value):
            continue
        raise CheckpointError(f"{source} has model.{name}={value!r}, the config {mine!r}: set --config.model.{name}={value}")


def _loop(
    config: TrainConfig,
    plan: Plan,
    model: llama.LlamaFunctions,
    batches: Batches,
    state: TrainState,
    checkpointer: Checkpointer,
    meta: dict[str, Any],
    writer: MetricsWriter | None,
    console: Console,
    evaluation: _Evaluation | None,
    traced: Profile,
    memory: MemoryLog,
) -> tuple[TrainState, int | None]:
    if int(state.step) >= config.steps or (evaluation and evaluation.patience_is_over()):
        return state, None
    step: TrainStep = make_train_step(plan, model.loss, **step_knobs(config))
    if jax.process_index() == 0:
        _audited(step, abstract_batch(config), checkpointer.directory.parent, console)
    schedule = make_schedule(config.optimizer, config.steps)
    start, skipped = int(state.step), int(state.skipped_steps)
    guard = NonFiniteGuard(plan, config.max_consecutive_skips)
    flops = functools.partial(_model_flops, plan, model.flops_per_token(config.data.sequence_length))
    clock, pending = time.perf_counter(), None

    def record(done: int, metrics: dict[str, jax.Array]) -> None:
        nonlocal clock, skipped
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}  # waits for the step
        seconds, clock = time.perf_counter() - clock, time.perf_counter()
        observed = dict(values)
        tokens, applied = values.pop("weight"), bool(values.pop("step_applied"))
        learning_rate = float(schedule(done - 1 - skipped))
        skipped += not applied
        loss_scale = values.pop("loss_scale", 1.0)  # what is not float16 is not scaled
        for name in ("nonfinite_leaf", "nonfinite_is_nan", "loss_scale_stuck"):
            values.pop(name, None)
        line = {"step": done, **values, "learning_rate": learning_rate, "tokens": round(tokens), "step_seconds": seconds}
        line |= {"tokens_per_second": tokens / seconds, "step_applied": applied, "loss_scale": loss_scale, "skipped_steps": skipped}
        line |= flops(tokens / seconds)
        if writer:
            writer.write(line)
        memory.write(done)
        if told := guard.observe(done, observed):
            _say(console, told)
        bar.update(task, completed=done, state=f"loss {values['loss']:.3f}  {tokens / seconds:,.0f} tokens/s")
        if not console.is_terminal and (done % every == 0 or done == config.steps):
            left = f", {_duration((config.steps - done) * seconds)} left" if done < config.steps else ""
            _say(console, f"step {done}/{config.steps} loss {values['loss']:.3f}, {tokens / seconds:,.0f} tokens/s{left}")

    every = max(1, config.steps // 20)  # lines of a log that is no terminal
    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn()
    with (
        _catch_signals() as caught,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        _saved_if_stuck(lambda: _save(checkpointer, state, meta)),
    ):
        task = bar.add_task("train", total=config.steps, completed=start, state="compiling")
        for index, batch in prefetch(batches, batch_sharding(plan), start, config.steps):
            traced.before(index + 1)
            state, metrics = step(state, batch)
            checkpointer.check()
            if traced.after(index + 1, metrics):
                _say(console, f"traced up to step {index + 1}: xprof or TensorBoard --logdir {checkpointer.directory.parent / 'profile'}")
            # One step behind, so that the host reads metrics while the devices work on the next step.
            if pending is not None:
                record(*pending)
            evaluated: dict[str, Any] = {}
            if evaluation and (index + 1) % config.evaluation.every == 0:
                jax.block_until_ready(metrics)
                started = time.perf_counter()
                evaluated = evaluation.of(state)
                clock += time.perf_counter() - started  # no part of the step's time
            pending = index + 1, metrics | evaluated
            if evaluation and evaluation.patience_is_over():
                break
            if _agreed(caught.number, index) is not None:
                break
            if config.checkpoint.every and (index + 1) % config.checkpoint.every == 0 and index + 1 < config.steps:
                _save(checkpointer, state, meta)
        if pending is not None:
            record(*pending)
    return state, _agreed(caught.number, 0) if int(state.step) < config.steps else None


def _duration(seconds: float) -> str:
    """About so long."""
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _audited(step: TrainStep, batch: PyTree, workdir: Path, console: Console) -> None:
    """Compiles the step, writes the audit of its program into the workdir, and tells what contradicts the plan."""
    _say(console, "compiling the step")
    try:
        audit = audit_here(step, batch)
    except Exception as error:  # a program that cannot be read can still be run
        return _say(console, f"the compiled step is not audited: {type(error).__name__}: {error}")
    (workdir / "audit.txt").write_text(f"{audit}\n")
    (workdir / "audit.json").write_text(json.dumps(audit.to_json()))
    count = len(audit.findings)
    what = f"{count} finding{'s' if count != 1 else ''}" if count else "no finding"
    _say(console, f"{'WARNING: ' if count else ''}audit of the compiled step: {what}, in {workdir / 'audit.txt'}")
    for finding in audit.findings[:FINDINGS_TOLD]:
        _say(console, f"  {finding}")
    if count > FINDINGS_TOLD:
        _say(console, f"  and {count - FINDINGS_TOLD} more")


class _Evaluation:
    """The evaluations of a run: what is known of them is in `meta["evaluation"]`, and so in every checkpoint."""

    def __init__(
        self, config: TrainConfig, plan: Plan, model: llama.LlamaFunctions, held_out: Corpus, checkpointer: Checkpointer, meta: dict[str, Any], console: Console
    ):  # fmt: skip
        self.config, self.checkpointer, self.meta, self.console = config.evaluation, checkpointer, meta, console
        # Rows of one micro-batch: a forward of more would hold more than a step does.
        self.batches = EvalBatches(held_out, config.data.global_batch // config.accumulation.micro_batches, config.data.sequence_length)
        self.step: EvalStep = make_eval_step(plan, model.loss)

    def of(self, state: TrainState) -> dict[str, float]:
        """`eval_loss`, the mean loss of the held-out text; a state with a new lowest one is saved."""
        batches = prefetch(self.batches, batch_sharding(self.step.plan), 0, len(self.batches))
        loss = _same_everywhere(evaluate(self.step, state, (batch for _, batch in batches))["loss"])
        before, step = Watch(**self.meta["evaluation"]), int(state.step)
        watch = before.seen(step, loss)
        self.meta["evaluation"] = dataclasses.asdict(watch)
        if self.config.keep_best and watch.best_step == step:
            _save(self.checkpointer, state, self.meta, loss)
        if not self.console.is_terminal or self.patience_is_over():
            _say(self.console, f"step {step}: eval loss {loss:.3f}, the lowest {_lowest(watch)}")
        return {"eval_loss": loss}

    def patience_is_over(self) -> bool:
        """Whether the run ends early; the same in all processes, and after a resume."""
        return 0 < self.config.patience <= self.meta["evaluation"]["since"]


def _lowest(watch: Watch) -> str:
    return f"{watch.best_loss:.3f} at step {watch.best_step}" if watch.best_step is not None else "not a number"


def _same_everywhere(value: float) -> float:
    """The first process's value in all of them: what they decide by it must be the same."""
    rounded = np.float32(value)
    return float(rounded if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(rounded))


def _model_flops(plan: Plan, flops_per_token: float, tokens_per_second: float) -> dict[str, float]:
    """`tflops_per_device` and, on a known chip, `mfu`."""
    return model_flops(tokens_per_second, flops_per_token, plan.mesh.size, chip_of_kind(jax.devices()[0].device_kind))


def _checkpointer(config: TrainConfig, workdir: Path) -> Checkpointer:
    knobs = {name: getattr(config.checkpoint, name) for name in ("keep", "keep_every", "verify", "chunk_bytes", "concurrent_gb")}
    keep_best = bool(config.evaluation.every) and config.evaluation.keep_best
    return Checkpointer(workdir / "checkpoints", keep_best=keep_best, **knobs)


def _save(checkpointer: Checkpointer, state: TrainState, meta: dict[str, Any], loss: float | None = None) -> None:
    if checkpointer.latest_step() != int(state.step):
        checkpointer.save(state, meta, loss=loss)


@contextlib.contextmanager
def _saved_if_stuck(save: Callable[[], None]) -> Iterator[None]:
    """A run that ends because nothing is finite any more leaves its last good state."""
    try:
        yield
    except NonFiniteError:
        save()
        raise


@dataclass
class _Caught:
    number: int | None = None


@contextlib.contextmanager
def _catch_signals() -> Iterator[_Caught]:
    """The first SIGTERM or Ctrl-C is noted, for the loop to stop at a step's end; the second acts as usual."""
    caught, numbers = _Caught(), (signal.SIGTERM, signal.SIGINT)
    try:
        before = {number: signal.getsignal(number) for number in numbers}

        def note(number: int, frame: FrameType | None) -> None:
            caught.number = number
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in numbers:
            signal.signal(number, note)
    except ValueError:  # not the main thread (a notebook's worker): signals are not ours to catch
        yield caught
        return
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _agreed(number: int | None, index: int) -> int | None:
    """The signal any process has caught; all processes get the same answer, since all must stop at the same step."""
    if jax.process_count() == 1:
        return number
    if index % AGREE_EVERY:
        return None
    return int(np.max(multihost_utils.process_allgather(np.int32(number or 0)))) or None


def _check_attention(config: TrainConfig, model: llama.LlamaFunctions) -> None:
    """ValueError where `model.attention` names a kernel that cannot compute this run's attention on these devices."""
    sizes, length = model.config, config.data.sequence_length
    q, kv = (jax.ShapeDtypeStruct((1, length, n, sizes.head_dim), config.precision.compute) for n in (sizes.n_heads, sizes.n_kv_heads))
    jax.eval_shape(functools.partial(attention, kernel=sizes.attention), q, kv, kv)


def _usable_workdir(workdir: Path) -> Path:
    """Makes the directory; ConfigError where it cannot be written."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for name, is_right in (("checkpoints", Path.is_dir), ("metrics.jsonl", Path.is_file)):
            if (workdir / name).exists() and not is_right(workdir / name):
                raise ConfigError(f"workdir {workdir}: {name} is not what a run writes there; choose another with --workdir, or remove it")
        probe = workdir / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"workdir {workdir} cannot be written: {error.strerror}; choose another with --workdir") from error
    return workdir.absolute()


def _meta(config: TrainConfig, model: llama.LlamaFunctions, corpus: Corpus) -> dict[str, Any]:
    """What a checkpoint says of its run; `model` and `data` must be the same on resume."""
    data = {
        "evaluation.fraction": config.evaluation.fraction,
        "corpus": corpus.fingerprint,
        "data.global_batch": config.data.global_batch,
        "data.sequence_length": config.data.sequence_length,
        "seed": config.seed,
    }
    sizes = {name: value for name, value in dataclasses.asdict(model.config).items() if name != "attention"}  # all kernels compute the same
    return {"model": sizes, "data": data, "config": dataclasses.asdict(config), "evaluation": dataclasses.asdict(Watch())}


def _require_same_run(saved: dict[str, Any], ours: dict[str, Any], where: Path) -> None:
    for section in ("model", "data"):
        for name, value in ours[section].items():
            if saved.get(section, {}).get(name) != value:
                label = f"model.{name}" if section == "model" else name
                raise CheckpointError(
                    f"{where} was saved with {label}={saved.get(section, {}).get(name)!r}, this run has {value!r}: "
                    "use the same, or another --workdir to start anew"
                )


def _report(
    config: TrainConfig, model: llama.LlamaFunctions, corpus: Corpus, state: TrainState, losses: list[float], entropy: float, workdir: Path, console: Console
) -> None:  # fmt: skip
    if int(state.skipped_steps):
        _say(console, f"skipped steps: {int(state.skipped_steps)} of {int(state.step)}, whose loss or gradients were not finite")
    if losses:
        last = losses[-10:]
        final = sum(last) / len(last)
        _say(
            console,
            f"final loss {final:.3f} nats (mean of the last {len(last)} steps), {abs(entropy - final):.3f} {'below' if final < entropy else 'above'} the unigram entropy {entropy:.3f}",
        )
        draw_loss_curve(losses, entropy, workdir / "loss.png")
        _say(console, f"loss curve: {workdir / 'loss.png'}; metrics: {workdir / 'metrics.jsonl'}")
    if config.sample_tokens:
        prompt = corpus.slice(0, min(32, len(corpus))).tolist()
        window = min(config.data.sequence_length, 128)
        # Outside a step XLA lays out the arrays, and it cannot partition a kernel that was chosen by hand.
        freely = dataclasses.replace(model, config=dataclasses.replace(model.config, attention="auto"))
        drawn = sample_tokens(freely.logits, state.params, prompt, config.sample_tokens, config.seed, window=window)
        _say(console, "sampled text:")
        _say(console, corpus.decode(prompt) + corpus.decode(drawn))

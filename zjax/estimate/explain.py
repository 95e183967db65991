"""Advice in sentences: why the first candidate wins, and what would change the answer. Every figure is worked out, none is a rule."""

from __future__ import annotations

import dataclasses
import math

from zjax.config import ZeroConfig
from zjax.describe import bytes_per_device
from zjax.estimate.advice import Advice, Candidate, Question, advise, asked, parameters_of
from zjax.estimate.cluster import Cluster
from zjax.estimate.memory import Memory
from zjax.estimate.timing import tokens_to_hide
from zjax.fields import ConfigError

GIB = 2**30
XLA_PLANS_FOR = 0.80 * 0.95
"""Share of a GPU's memory that XLA's compiler keeps a program within where it can, by computing values again: 80% of what the
device has, times the default of xla_gpu_memory_limit_slop_factor."""


def reasons(advice: Advice) -> list[str]:
    """The field's questions, answered for the first candidate: size, stage, offload, sequence, links, tokens."""
    first = advice.first
    told = [_whole_copy(advice), _stage(advice)]
    if first is None:
        return [*told, _offload(advice)]
    return [*told, "Offload: not needed.", _sequence(first), _links(advice, first), _tokens(first), _ranking(advice, first)]


def changes(advice: Advice) -> list[str]:
    """The same question asked with other links, devices, sequences and batches: a line for each, with what is first then."""
    question = advice.question
    return [f"{name}: {_told(advice, _advice_or_reason(varied))}" for name, varied in _variations(question)]


def _whole_copy(advice: Advice) -> str:
    chip, whole = advice.question.cluster.chip, _smallest(advice, stage=0)
    assert whole is not None
    held = bytes_per_device(whole.plan)["model_state"]
    fits = (
        "fits, with its activations"
        if _any_fits(advice, 0)
        else "does not fit with its activations"
        if held <= chip.memory
        else "does not fit"
    )
    return (
        f"Size: {parameters_of(whole.plan):,} parameters are {_gib(held)} of parameters, gradients, master and moments; "
        f"{_article(chip.name)} has {_gib(chip.memory)}. A whole copy on each device (stage 0, DDP) {fits}."
    )


def _stage(advice: Advice) -> str:
    parts, devices = [], advice.question.cluster.devices
    if devices == 1:
        return "Stage: on one device there is nothing to shard over."
    for stage in (1, 2, 3):
        smallest = _smallest(advice, stage=stage)
        if smallest is not None:
            verb = "fits" if _any_fits(advice, stage) else "does not fit"
            parts.append(f"stage {stage} {verb} (peak {_gib(smallest.memory.peak)} at least)")
    return f"Stage: over {devices} devices, " + ", ".join(parts) + "."


def _offload(advice: Advice) -> str:
    smallest = advice.too_large[0]
    memory, room = smallest.memory, advice.question.cluster.chip.memory - advice.question.cluster.chip.memory * advice.question.margin
    sharded = _sharded_bytes(advice.question, memory, smallest)
    fixed = memory.peak - sharded / advice.question.cluster.devices
    text = (
        f"Offload: nothing fits; the smallest is {smallest.mode} with a peak of {_gib(memory.peak)}, {_gib(memory.state)} of it state, "
        f"where {_gib(room)} can be used."
    )
    if fixed < room:
        devices = advice.question.cluster.devices
        # Doubled, as counts that divide the model's dims are: over 17 or 24 devices most leaves would stay whole.
        needed = devices * 2 ** math.ceil(math.log2(sharded / (room - fixed) / devices))
        return f"{text} {needed} devices would hold it with the same sequences a device, or the optimizer's state on the host ({_gib(memory.master + memory.optimizer)} a device)."
    return f"{text} More devices do not help: {_gib(fixed)} of it is a layer's weights and the activations of its sequences. Use shorter sequences, or fewer of them a device."


def _sharded_bytes(question: Question, memory: Memory, candidate: Candidate) -> float:
    """What all devices together hold of what more of them would share: the state of stage 3 and its gradients."""
    if candidate.config.zero.stage < 3:
        return 0.0
    return (memory.state + memory.gradients) * question.cluster.devices / candidate.config.mesh.replica


def _sequence(first: Candidate) -> str:
    memory, work = first.memory, first.work
    if work.decoder is None:
        return "Sequence: activations are not known, as the model is not of the decoder family."
    of_tokens = memory.activations + max(memory.working, memory.head)
    less = "more than" if of_tokens > memory.state + memory.gradients else "less than"
    return (
        f"Sequence: {work.rows} x {work.length} tokens a device and micro-batch take {_gib(of_tokens)} with remat {work.remat}, "
        f"{less} state and gradients ({_gib(memory.state + memory.gradients)})."
        + (" A sequence this long is what fills the memory." if less == "more than" and work.rows == 1 and work.remat == "full" else "")
    )


def _links(advice: Advice, first: Candidate) -> str:
    cluster = advice.question.cluster
    layer = next((unit for unit in first.time.units if unit.stacked), None)
    if layer is None or not (layer.gather or layer.gather_again or layer.reduce):
        exposed = f"{first.time.exposed_step * 1e3:.0f} ms once a step"
        return f"Links: nothing travels with the layers; {exposed} is sent when nothing is left to compute."
    links = layer.gather or layer.gather_again or layer.reduce
    slowest = max(links, key=lambda link: links[link])
    where = _link_name(cluster, slowest)
    forward = (
        f"gathering a layer takes {max(layer.gather.values()) * 1e3:.2f} ms {where} and computing one {layer.forward * 1e3:.2f} ms: "
        f"the forward {'hides' if layer.hides_forward else 'does not hide'} it"
        if layer.gather
        else "the forward gathers nothing"
    )
    backward = max(layer.sent_backward.values(), default=0.0)
    text = (
        f"Links: {forward}; the backward sends for {backward * 1e3:.2f} ms beside {layer.backward * 1e3:.2f} ms of work and "
        f"{'hides' if layer.hides_backward else 'does not hide'} it."
    )
    return text + _split(advice, first)


def _split(advice: Advice, first: Candidate) -> str:
    """Whether hybrid sharding is worth its memory, where there are several hosts or slices."""
    if advice.question.cluster.groups == 1:
        return ""
    hybrid = first.config.mesh.replica > 1
    other = next((each for each in advice.ranked if (each.config.mesh.replica > 1) != hybrid and each.config.zero.stage), None)
    if other is not None:
        slower = other.time.seconds / first.time.seconds - 1
        return f" {'One group' if hybrid else 'Hybrid sharding'} instead: {_slower(slower)}, at a peak of {_gib(other.memory.peak)}."
    smallest = next((each for each in advice.too_large if (each.config.mesh.replica > 1) != hybrid and each.config.zero.stage), None)
    return (
        ""
        if smallest is None
        else f" {'One group' if hybrid else 'Hybrid sharding'} does not fit (peak {_gib(smallest.memory.peak)} at least)."
    )


def _tokens(first: Candidate) -> str:
    needed = tokens_to_hide(first.plan, first.work, first.cluster)
    if not needed:
        return "Tokens: no communication waits for more tokens a device."
    return f"Tokens: communication hides from {math.ceil(needed):,} tokens a device and micro-batch; there are {first.work.tokens:,}."


def _ranking(advice: Advice, first: Candidate) -> str:
    mfu = advice.mfu(first)
    text = f"So: {first.mode} takes {first.time.seconds:.3g} s a step (MFU {mfu:.0%}), {_gib(first.memory.peak)} at its peak."
    chip = advice.question.cluster.chip
    if chip.platform == "gpu" and first.memory.peak > XLA_PLANS_FOR * chip.memory:
        text += (
            f" That is {first.memory.peak / chip.memory:.0%} of the memory: XLA computes values again to stay within {XLA_PLANS_FOR:.0%}, "
            "which this time does not count; --verify=1 has what it comes to."
        )
    for each in advice.families()[1:3]:
        if each in advice.ranked:
            text += f" {each.mode}: {_slower(each.time.seconds / first.time.seconds - 1)}, {_gib(each.memory.peak)}."
    return text


def _variations(question: Question) -> list[tuple[str, Question]]:
    cluster, data = question.cluster, question.config.data
    made: list[tuple[str, Question]] = []
    if cluster.groups > 1:
        for factor in (0.25, 4):
            speed = cluster.chip.link_between * factor
            chip = dataclasses.replace(cluster.chip, link_between=speed)
            made.append(
                (f"{speed / 1e9:g} GB/s a device between hosts or slices", asked(question, cluster=dataclasses.replace(cluster, chip=chip)))
            )
    for factor in (2, 0.5):
        other = _resized(cluster, factor)
        batch = round(data.global_batch * factor)
        if other is not None and batch:
            made.append((f"{other.devices} devices and {batch} sequences", asked(question, cluster=other, global_batch=batch)))
    made.append((f"sequences of {4 * data.sequence_length}", asked(question, sequence_length=4 * data.sequence_length)))
    made.append((f"{8 * data.global_batch} sequences a step", asked(question, global_batch=8 * data.global_batch)))
    return made


def _resized(cluster: Cluster, factor: float) -> Cluster | None:
    """More or fewer groups, or where there is one, a larger or smaller one; None where that is no whole number."""
    gpus = cluster.chip.platform == "gpu"
    if gpus and (factor > 1 or cluster.groups > 1):
        groups, inside = cluster.groups * factor, cluster.inside
    else:
        groups, inside = cluster.groups, round(cluster.inside * factor)
    return dataclasses.replace(cluster, groups=int(groups), inside=inside) if groups == int(groups) and inside else None


def _advice_or_reason(question: Question) -> Advice | str:
    try:
        return advise(question)
    except ConfigError as error:
        return str(error)


def _told(before: Advice, after: Advice | str) -> str:
    if isinstance(after, str):
        return after
    if after.first is None:
        return f"nothing fits (the smallest peak is {_gib(after.too_large[0].memory.peak)})"
    per_token = lambda advice, candidate: candidate.time.seconds / advice.question.tokens * advice.question.cluster.devices  # noqa: E731
    same = before.first is not None and after.first.mode == before.first.mode
    text = "the same" if same else after.first.mode
    if before.first is None:
        return f"{text} fits, {after.first.time.seconds:.3g} s a step"
    change = per_token(after, after.first) / per_token(before, before.first) - 1
    speed = "" if abs(change) < 0.02 else f" ({abs(change):.0%} {'more' if change > 0 else 'less'} time a token and device)"
    return f"{text}, {after.first.time.seconds:.3g} s a step{speed}"


def _smallest(advice: Advice, *, stage: int) -> Candidate | None:
    """The candidate of a stage, not split, with the smallest peak."""
    alike = [
        each for each in (*advice.ranked, *advice.too_large) if each.config.mesh.replica == 1 and each.config.zero.stage == stage and _plain(each.config.zero)
    ]  # fmt: skip
    return min(alike, key=lambda each: each.memory.peak, default=None)


def _plain(zero: ZeroConfig) -> bool:
    return zero.reshard_after_forward is True and zero.reshard_after_backward


def _any_fits(advice: Advice, stage: int) -> bool:
    return any(each.config.zero.stage == stage for each in advice.ranked)


def _link_name(cluster: Cluster, link: str) -> str:
    if link == "between":
        return f"between {'hosts' if cluster.chip.platform == 'gpu' else 'slices'} ({cluster.chip.link_between / 1e9:g} GB/s a device)"
    return f"inside a {'host' if cluster.chip.platform == 'gpu' else 'slice'}"


def _slower(share: float) -> str:
    if abs(share) < 0.005:
        return "as fast"
    return f"{abs(share):.1%} {'slower' if share > 0 else 'faster'}"


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeh" else f"a {name}"


def _gib(count: float) -> str:
    return "unbounded memory" if math.isinf(count) else f"{count / GIB:.1f} GiB"

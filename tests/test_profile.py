"""Traces of steps: written where asked, for the steps asked, and ended whatever happens."""

import gzip
import json

import pytest
from small import run_quietly, small_config, write_corpus

from zjax import profile
from zjax.fields import ConfigError
from zjax.profile import Profile, parse_steps


@pytest.fixture
def calls(monkeypatch):
    """What jax's profiler is told, instead of tracing."""
    told = []
    monkeypatch.setattr(profile.jax.profiler, "start_trace", lambda folder: told.append(f"start {folder}"))
    monkeypatch.setattr(profile.jax.profiler, "stop_trace", lambda: told.append("stop"))
    return told


def stepped(traced, steps):
    for step in steps:
        traced.before(step)
        traced.after(step, ())


def test_steps_are_written_as_one_or_as_first_and_last():
    assert parse_steps("5") == (5, 5) and parse_steps("10:12") == (10, 12)
    for text in ("0", "3:2", "a", "1:", "1:b", "-1"):
        with pytest.raises(ConfigError, match="--profile="):
            parse_steps(text)


@pytest.mark.parametrize(("steps", "done"), [((2, 3), range(1, 6)), ((1, 3), range(3, 6)), ((2, 9), range(1, 6))])
def test_a_trace_is_started_and_ended_once(calls, tmp_path, steps, done):
    """Also of a run that resumes within the steps, or ends within them."""
    with Profile(steps, tmp_path) as traced:
        stepped(traced, done)
    assert calls == [f"start {tmp_path}", "stop"]


def test_steps_that_are_over_and_none_are_not_traced(calls, tmp_path):
    for steps in (None, (1, 2)):
        with Profile(steps, tmp_path) as traced:
            stepped(traced, range(3, 6))
    assert calls == []


def test_an_error_ends_the_trace(calls, tmp_path):
    with pytest.raises(RuntimeError), Profile((1, 9), tmp_path) as traced:
        traced.before(1)
        raise RuntimeError
    assert calls[-1] == "stop"


def test_a_run_leaves_a_trace_that_perfetto_reads(tmp_path):
    config = small_config(write_corpus(tmp_path / "corpus.txt", 700), steps=3)
    run_quietly(config, tmp_path / "run", profile=(2, 2))
    (trace,) = (tmp_path / "run" / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any("_step" in str(event.get("name")) for event in events)

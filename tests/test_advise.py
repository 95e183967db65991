"""`zjax advise`: what it ranks first fits and is fastest, what would change the answer does, and mistakes are told."""

import dataclasses
import json
import resource
import time
import warnings
from itertools import pairwise

import jax
import jax.numpy as jnp
import optax
import pytest
from small import small_overrides, write_corpus, zjax

from zjax.advise import Verified, model_config, question_of, rank_agreement
from zjax.cli import load_config, main
from zjax.config import PrecisionConfig, TrainConfig, ZeroConfig
from zjax.estimate import Question, advise, cluster_of
from zjax.estimate.explain import changes, reasons
from zjax.mesh import abstract_mesh
from zjax.plan import build_plan


def question(model, hardware, devices, *, sequence=4096, batch=None, **cluster):
    config = model_config(model)
    data = dataclasses.replace(config.data, sequence_length=sequence, global_batch=batch or devices)
    return question_of(dataclasses.replace(config, data=data), cluster_of(hardware, devices, **{"efficiency": 0.5, **cluster}))


def run(capsys, *arguments):
    status = main(["advise", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_what_is_ranked_fits_and_is_in_order_of_time():
    advice = advise(question("llama2_7b", "h100", 8))
    memory = advice.question.cluster.chip.memory
    assert advice.ranked and advice.too_large
    assert all(each.memory.peak + each.memory.margin <= memory for each in advice.ranked)
    assert all(each.memory.peak + each.memory.margin > memory for each in advice.too_large)
    seconds = [each.time.seconds for each in advice.ranked]
    assert all(later >= 0.98 * earlier for earlier, later in pairwise(seconds))
    assert advice.first.config.zero.stage == 3  # hides its traffic at 4096 tokens a device, where stages 1 and 2 cannot


def test_a_model_that_fits_whole_on_a_chip_is_not_gathered_layer_by_layer():
    """1.1B parameters over an Ethernet: stage 3 sends half as much again, and nothing hides it."""
    first = advise(question("1.1B", "h100", 16, sequence=512, link_between=1e9)).first
    assert first.config.zero.stage < 3 or first.config.mesh.replica == 2


def test_slow_links_between_hosts_ask_for_hybrid_sharding():
    """13B on 2 hosts: with 100 Gb/s a device gathers stay inside a host; one group would wait for the network."""
    slow = advise(question("13B", "h100", 16, sequence=2048, link_between=12.5e9))
    assert (slow.first.config.mesh.replica, slow.first.config.mesh.fsdp) == (2, 8)
    one_group = next(each for each in slow.ranked if each.config.mesh.replica == 1)
    assert one_group.time.seconds > 1.2 * slow.first.time.seconds
    assert "Hybrid" in reasons(slow)[-2] or "One group instead:" in " ".join(reasons(slow))
    # As fast between hosts as inside, splitting is of no use and costs memory.
    assert advise(question("13B", "h100", 16, sequence=2048, link_between=450e9)).first.config.mesh.replica == 1


def test_long_sequences_ask_for_remat():
    short, long = (advise(question("6.7B", "h100", 8, sequence=length)).first for length in (1024, 32768))
    kept = [each.work.decoder.saved_bytes(each.config.remat, each.work.remat_names) for each in (short, long)]
    assert kept[0] > 3 * kept[1]  # matrix products at least against the values that have names
    assert short.config.remat in ("none", "dots") and long.config.remat in ("names", "full")


def test_nothing_fits_and_how_many_devices_would_is_said():
    advice = advise(question("llama3_70b", "h100", 8, sequence=2048))
    assert advice.first is None
    told = " ".join(reasons(advice))
    assert "Offload: nothing fits" in told
    needed = int(told.split(" devices would hold it")[0].split()[-1])
    # 16 bytes a parameter alone are 14 devices' memory; a layer's weights and activations beside them are too much for 16.
    assert needed == 32
    assert advise(question("llama3_70b", "h100", 16, sequence=2048)).first is None
    assert advise(question("llama3_70b", "h100", needed, sequence=2048)).first is not None
    assert advise(question("llama3_70b", "h100", needed // 8 * 8, sequence=2048)).first is None or needed % 8 == 0


def test_what_would_change_the_answer_does():
    asked = question("13B", "h100", 16, sequence=2048, link_between=50e9)
    lines = changes(advise(asked))
    slower = next(line for line in lines if line.startswith("12.5 GB/s"))
    first = advise(question("13B", "h100", 16, sequence=2048, link_between=12.5e9)).first
    assert (first.mode in slower) or ("the same" in slower and first.mode == advise(asked).first.mode)
    assert any("8192" in line for line in lines) and any("32 devices and 32 sequences" in line for line in lines)


def test_a_model_of_ones_own_is_advised_on_too_and_its_activations_are_said_to_be_unknown():
    init = lambda key: {"layers": {"w": jnp.zeros((4, 4096, 4096))}, "out": jnp.zeros((4096, 10))}  # noqa: E731
    config, cluster = TrainConfig(data=dataclasses.replace(TrainConfig().data, global_batch=8)), cluster_of("v5e", 8)
    plan = build_plan(
        ZeroConfig(), init, optax.lion(1e-4), abstract_mesh(config.mesh, 8), precision=PrecisionConfig(), units=("layers[*]",)
    )
    advice = advise(Question(config=config, recipe=plan.recipe, cluster=cluster))
    assert advice.first is not None
    assert any("activations" in text for text in advice.first.memory.not_covered)
    held = advice.families()[0].memory
    assert held.optimizer == pytest.approx(4 * (4 * 4096**2 + 40960) / (8 if advice.first.config.zero.stage else 1), rel=1e-3)


@pytest.mark.parametrize(("model", "count"), [("13B", 13e9), ("1.1e9", 1.1e9), ("70b", 70e9), ("125M", 125e6)])
def test_a_number_of_parameters_is_a_decoder_of_about_that_size(model, count):
    advice = advise(question(model, "h200", 64))
    parameters = sum(leaf.shape[0] * int(jnp.prod(jnp.array(leaf.shape[1:]))) for leaf in advice.families()[0].plan.part("params"))
    assert parameters == pytest.approx(count, rel=0.08)


# --- the command ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "hardware", "devices"), [("llama2_7b", "h100-80g", 8), ("llama3_405b", "h100", 512)])
def test_advising_takes_no_longer_than_importing(model, hardware, devices):
    """A ratio of processor times, since both are what the machine makes of them: 5 seconds in all on two cores of 2026."""

    def processor_time(*arguments):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = zjax(*arguments)
        assert done.returncode == 0, done.stderr
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, done

    importing, _ = processor_time("--version")
    all_of_it, done = processor_time("advise", f"--model={model}", f"--hardware={hardware}", f"--devices={devices}")
    assert all_of_it < 2 * importing
    for word in ("Size:", "Stage:", "Offload:", "Sequence:", "Links:", "Tokens:", "So:", "What would change the answer:"):
        assert word in done.stdout
    assert not done.stderr


def test_json_compares_chips_by_what_a_token_costs(capsys):
    status, told = run(capsys, "--model=llama2_7b", "--hardware=a100-80g,h100-80g", "--devices=8", "--price=1.5,3")
    assert status == 0
    assert told.keys() == {"hardware", "best", "verified", "rank_agreement"}
    costs = [chip["ranked"][0]["dollars_per_million_tokens"] for chip in told["hardware"]]
    assert [chip["hardware"] for chip in told["hardware"]] == ["a100", "h100"] and told["best"] == costs.index(min(costs))
    for chip, price in zip(told["hardware"], (1.5, 3), strict=True):
        first = chip["ranked"][0]
        seconds_a_million = first["seconds"] / chip["tokens_per_step"] * 1e6
        assert first["dollars_per_million_tokens"] == pytest.approx(price * 8 * seconds_a_million / 3600)
        assert first["memory"]["peak"] <= chip["memory"]


def test_the_config_it_writes_is_the_one_it_ranks_first(capsys, tmp_path):
    written = tmp_path / "configs" / "mine.py"
    status, told = run(
        capsys, "--model=13B", "--hardware=h100", "--devices=16", "--sequence=2048", "--global-batch=64", f"--write={written}"
    )
    assert status == 0
    config, first = load_config(str(written)), told["hardware"][0]["ranked"][0]
    assert dataclasses.asdict(config.zero).items() >= first["config"]["zero"].items()
    assert (config.mesh.replica, config.mesh.fsdp, config.remat) == (*first["config"]["mesh"].values(), first["config"]["remat"])
    assert (config.data.global_batch, config.data.sequence_length) == (64, 2048)
    assert main(["plan", f"--config={written}"]) == 0
    text = written.read_text()
    assert f"zjax audit --config={written} --target=gpu:h100:2x8" in text


def test_links_are_told_in_bits_or_bytes(capsys):
    seconds = {}
    for speed in ("200Gb", "25GB", "100Gb/s"):
        _, told = run(capsys, "--model=llama3_70b", "--hardware=h100", "--devices=64", f"--link-between={speed}", "--sequence=2048")
        seconds[speed] = told["hardware"][0]["ranked"][0]["seconds"]
    assert seconds["200Gb"] == seconds["25GB"] < seconds["100Gb/s"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model=llama3_80b"], "--model=llama3_80b: did you mean 'llama3_8b'?"),
        ([], "advise: name a model"),
        (["--model=llama2_7b", "--hardware=h200x"], "unknown chip 'h200x'"),
        (["--model=llama2_7b", "--link-between=25"], "--link-between=25: write it as 25GB or 200Gb"),
        (["--model=llama2_7b", "--price=cheap"], "--price=cheap: needs a positive number"),
        (["--model=llama2_7b", "--sequence=0"], "--sequence=0: must be positive"),
        (["--model=llama2_7b", "--global-batch=3"], "data.global_batch=3: does not divide over 8 devices"),
        (["--model=llama2_7b", "--efficiency=50"], "--efficiency=50.0: must lie in (0, 1]"),
        (["--model=llama2_7b", "--config.zero.stag=2"], "unknown config key 'zero.stag'"),
        (["--model=1B", "--hardware=v5p", "--hosts=2", "--verify=1"], "several slices of v5p are no audit target"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments, told, capsys):
    hardware = [] if any(text.startswith("--hardware") for text in arguments) else ["--hardware=h100"]
    assert main(["advise", "--devices=8", *hardware, *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_nothing_fits_is_status_1(capsys):
    status, told = run(capsys, "--model=llama3_70b", "--hardware=v5e", "--devices=8")
    assert status == 1 and told["best"] is None and told["hardware"][0]["ranked"] == []


@pytest.mark.slow
def test_verified_candidates_are_compiled(capsys, tmp_path):
    """On the CPU, for which there is a compiler everywhere: state to the byte, and a rank agreement over all pairs."""
    corpus = write_corpus(tmp_path / "corpus.txt", 600)
    overrides = small_overrides(corpus, data__global_batch=8)
    base = tmp_path / "base.py"
    base.write_text("from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({})\n")
    status, told = run(capsys, f"--config={base}", "--hardware=cpu", "--devices=8", "--verify=2", *overrides)
    assert status == 0 and len(told["verified"]) == 2
    for row in told["verified"]:
        assert row["state"]["predicted"] == pytest.approx(row["state"]["audited"], rel=0.01)
        assert row["fits"] and row["seconds"]["audited"] > 0
    assert told["rank_agreement"]["pairs"] == 1


def test_rank_agreement_counts_pairs():
    def row(predicted, audited):
        return Verified(mode="", state=(1, 1), peak=(1, 1), wire=(1, 1), seconds=(predicted, audited), fits=True, findings=0)

    assert rank_agreement([row(1, 10), row(2, 20), row(3, 30)]) == (3, 3)
    assert rank_agreement([row(1, 10), row(2, 30), row(3, 20)]) == (2, 3)
    assert rank_agreement([row(1, 10), row(1.001, 20)]) == (0, 1)


COMPILED = [("llama2_7b", "h100-80g", 8), ("llama3_70b", "h100-80g", 64), ("llama3_70b", "v5p", 64), ("llama3_405b", "h100-80g", 512)]


@pytest.mark.full
@pytest.mark.parametrize(("model", "hardware", "devices"), COMPILED)
def test_the_first_choice_compiles_and_fits(capsys, model, hardware, devices):
    started = time.monotonic()
    status, told = run(capsys, f"--model={model}", f"--hardware={hardware}", f"--devices={devices}", "--verify=1")
    (row,) = told["verified"]
    assert status == 0 and row["fits"], row
    assert row["state"]["predicted"] == pytest.approx(row["state"]["audited"], rel=0.01)
    assert row["wire"]["predicted"] == pytest.approx(row["wire"]["audited"], rel=0.03)
    assert row["peak"]["predicted"] == pytest.approx(row["peak"]["audited"], rel=0.10)
    assert time.monotonic() - started < 600 and jax.default_backend() == "cpu"


@pytest.mark.parametrize("hardware", ["h100", "v5p"])
def test_one_device_is_advised_to_shard_nothing_without_a_warning(hardware, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["advise", "--model=tiny", f"--hardware={hardware}", "--devices=1"]) == 0
    told = capsys.readouterr().out
    assert "nothing to shard over" in told and "stage 0" in told and "1 sequence of" in told
    assert "stage 1 (" not in told.split("What would change")[0]


@pytest.mark.parametrize(("model", "devices", "near"), [("llama3_405b", 512, True), ("llama2_7b", 64, False)])
def test_a_first_choice_near_what_xla_plans_for_is_told(model, devices, near):
    advice = advise(question(model, "h100", devices, sequence=8192 if near else 2048))
    share = advice.first.memory.peak / advice.question.cluster.chip.memory
    assert (share > 0.76) == near
    assert ("to stay within 76%" in reasons(advice)[-1]) == near

"""The audit: figures against the plan in every mode and on every backend, broken steps caught, errors that can be read."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import broken_steps as steps
import cloudpickle
import jax
import jax.numpy as jnp
import optax
import pytest
from audited import SCALARS, SIZES, TARGETS, TINY, audited, config, kinds, overrides, sent
from small import REPO

import zjax
from zjax.audit import AuditError, audit_program, audit_recipe, targets
from zjax.audit.child import Request
from zjax.audit.compile import compile_for_target
from zjax.audit.findings import Evidence, find
from zjax.audit.hlo import parse
from zjax.audit.schedule import Timeline
from zjax.audit.targets import child_environment, parse_target
from zjax.cli import audit_run, load_config, main
from zjax.config import MeshConfig
from zjax.estimate import traffic_by_link, traffic_per_step
from zjax.fields import ConfigError
from zjax.models import llama

pytestmark = pytest.mark.slow

MIB = 2**20
GPU = "gpu:h100:1x8"

# --- every mode on every backend ----------------------------------------------------------------------------------------

MODES = [
    *({"stage": stage, "keep": False, "replica": replica} for stage, replica in itertools.product(range(4), (1, 2))),
    *({"stage": 3, "keep": True, "replica": replica} for replica in (1, 2)),
]
FULL = [{"target": target, "size": size, **mode} for target in TARGETS for size in SIZES for mode in MODES]


def _covering():
    """A row for every platform in every stage and kept or not; GPU targets, sizes and replicas alternate, so that all pairs occur."""
    targets = {"cpu": ["cpu:8"], "gpu": [target for target in TARGETS if target.startswith("gpu")], "tpu": ["tpu:v5e:2x4"]}
    for place, platform in enumerate(targets):
        for row, (stage, keep) in enumerate([(0, False), (1, False), (2, False), (3, False), (3, True)]):
            target = targets[platform][row % len(targets[platform])]
            size = list(SIZES)[(place + row // 2) % 2]
            yield {"target": target, "size": size, "stage": stage, "keep": keep, "replica": 1 + (place + row + 1) % 2}


COVERING = list(_covering())


def named(case):
    return f"{case['target']}-{case['size']}-{case['stage']}{'-keep' * case['keep']}{'-hybrid' * (case['replica'] > 1)}"


def test_the_default_cases_cover_all_pairs():
    """Of platforms, and of all else; every target occurs."""

    def pairs(cases):
        by_platform = [case | {"target": case["target"].partition(":")[0]} for case in cases]
        return {pair for case in by_platform for pair in itertools.combinations(sorted(case.items()), 2)}

    assert pairs(FULL) == pairs(COVERING)
    assert {case["target"] for case in COVERING} == set(TARGETS)


@pytest.mark.parametrize("case", [pytest.param(case, id=named(case), marks=() if case in COVERING else pytest.mark.full) for case in FULL])
def test_holds_and_sends_what_the_plan_says(case):
    audit = audited(**case)
    plan, made, planned = audit.plan, sent(audit), traffic_per_step(audit.plan)
    gathered, scattered, reduced = (planned[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    # On TPU the norms, of a few hundred bytes a layer, are gathered and scattered by all-reduces.
    loose = SCALARS if audit.target.platform != "tpu" else SCALARS + 0.005 * planned["total"]
    near = functools.partial(pytest.approx, rel=0.05, abs=loose)

    assert audit.state_bytes == pytest.approx(sum(leaf.bytes_on(plan.mesh) for leaf in plan.leaves), rel=0.01)
    assert audit.state_bytes < audit.peak_bytes < 100 * MIB
    # The TPU compiler pads the 688 columns of a gradient to whole tiles a shard, and passes the edges on.
    halo = made.pop("collective-permute", 0)
    assert halo <= (0.02 * audit.wire_bytes if audit.target.platform == "tpu" else 0)
    assert made.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    if audit.target.platform == "cpu":
        # XLA:CPU moves float32 where bf16 was asked, and all-reduces, at twice the bytes, what should be scattered.
        gathered, scattered, reduced = 2 * gathered, 0, 2 * reduced + 4 * scattered
    assert made["all-gather"] == near(gathered)
    if audit.target.platform == "tpu" and case["replica"] > 1:
        # The embedding's gradient is all-reduced over everything before it is cut: a finding, and 2 to 3% more wire.
        assert made["reduce-scatter"] + made["all-reduce"] == pytest.approx(scattered + reduced, rel=0.08)
    elif case["stage"] == 1 and audit.target.platform != "cpu":
        # Gradients that only the optimizer's shard needs may be scattered; each of those is half an all-reduce.
        assert 2 * made["reduce-scatter"] + made["all-reduce"] == near(reduced)
    else:
        assert made["reduce-scatter"] == near(scattered)
        assert made["all-reduce"] == near(reduced)
    if case["stage"] == 0:
        assert made["all-gather"] == made["reduce-scatter"] == 0

    # Norms of 256 elements over 16 GPUs; on TPU, what XLA does to the embedding's gradient of a hybrid mode.
    known = {"unit-too-small"} if plan.mesh.shape["fsdp"] > 8 and case["stage"] == 3 else set()
    known |= {"emulated-collective"} if audit.target.platform == "tpu" and case["replica"] > 1 and case["stage"] > 1 else set()
    assert kinds(audit) <= known, str(audit)


@pytest.mark.parametrize(
    "case",
    [case for case in FULL if case["target"] == "gpu:h100:2x8" and case["replica"] == 2 and case["stage"] > 1 and case in COVERING],
    ids=named,
)
def test_hybrid_sends_only_the_all_reduce_of_scattered_gradients_between_hosts(case):
    audit = audited(**case)
    between = [run.collective for run in audit.timeline.runs if run.collective.between]
    assert between and {c.kind for c in between} == {"all-reduce"}
    links = audit.to_json()["wire_bytes_by_link"]
    assert links["between"] == pytest.approx(traffic_by_link(audit.plan)["between"], abs=SCALARS)
    assert links["between"] == pytest.approx(traffic_per_step(audit.plan)["all_reduce"], abs=SCALARS)


def test_on_cpu_an_all_reduce_stands_for_each_reduce_scatter():
    audit = audited("cpu:8", stage=3, keep=False, replica=1, size="smaller")
    large = [run.collective for run in audit.timeline.runs if run.collective.kind == "all-reduce" and run.wire_bytes > SCALARS]
    assert large and {c.emulates for c in large} == {"reduce-scatter"}


def test_the_published_keys():
    report = json.loads(json.dumps(audited(GPU, stage=3, keep=False, replica=1, size="smaller").to_json()))
    assert set(report) == {
        "target", "devices", "parameters", "engine", "state_bytes", "peak_bytes", "temp_bytes", "host_bytes", "collectives", "wire_bytes",
        "wire_bytes_by_link", "ideal_wire_bytes", "exposed_fraction", "exposed_seconds", "predicted_step_seconds", "kernels", "findings",
        "compile_seconds",
    }  # fmt: skip
    for figures in report["collectives"].values():
        assert set(figures) == {"count", "bytes", "exposed_bytes", "async_bytes", "by_axis"}
        assert sum(figures["by_axis"].values()) == figures["bytes"] >= max(figures["exposed_bytes"], figures["async_bytes"])
    assert sum(report["wire_bytes_by_link"].values()) == pytest.approx(report["wire_bytes"], abs=2)
    assert report["wire_bytes"] == pytest.approx(sum(each["bytes"] for each in report["collectives"].values()), abs=20)
    assert 0 <= report["exposed_fraction"] <= 1 and report["exposed_seconds"] <= report["predicted_step_seconds"]


def test_llama2_7b_in_the_partitioner_has_the_finding_that_xla_makes():
    """For the embedding's gradient XLA gathers activations, unasked."""
    seven = load_config(str(REPO / "configs" / "llama2_7b.py"), ["--config.data.global_batch=8", "--config.zero.engine=partitioner"])
    audit = audit_run(seven, GPU)
    assert sorted(finding.kind for finding in audit.findings) == ["activations-gathered"]
    assert all("scatter-add" in finding.op for finding in audit.findings)
    # 2 + 12 bytes a parameter over 8 devices; three passes of the parameters, but for the head, gathered once.
    assert audit.state_bytes == pytest.approx(14 / 8 * audit.parameters, rel=0.001)
    assert audit.wire_bytes == pytest.approx(3 * 7 / 8 * 2 * audit.parameters, rel=0.02)


# --- broken steps -------------------------------------------------------------------------------------------------------


@functools.cache
def audited_loss(loss, target=GPU, init=steps.init, rows=steps.ROWS, options=None, **knobs):
    """The audit of a train step of the small MLP; `options` are (name, value) pairs in place of `zjax.xla_flags`."""
    plan = steps.plan_for(parse_target(target).devices, init=init, **knobs)
    width = jax.tree.leaves(jax.eval_shape(init, None)["layers"])[0].shape[1]
    batch = {"x": jax.ShapeDtypeStruct((rows, steps.LENGTH, width), jnp.bfloat16)}
    options = None if options is None else dict(options)
    return audit_recipe(plan.recipe, loss, batch, target=target, mesh=knobs.get("mesh", MeshConfig()), compiler_options=options)


def audited_lower(lower, *arguments, mesh=MeshConfig(), batch=steps.BATCH, plan=None, **knobs):  # noqa: B008  (frozen)
    """The audit of a program lowered by hand."""
    plan = plan or steps.plan_for(8, mesh, **knobs)
    return audit_program(functools.partial(lower, plan.recipe, *arguments), plan, batch, target=GPU, mesh=mesh)


def found(audit, kind):
    """The findings of a kind, by the op or leaf they concern."""
    return {finding.op: finding for finding in audit.findings if finding.kind == kind}


def test_a_step_that_picks_its_kernel_by_the_backend_picks_the_targets():
    """The process that compiles runs on the CPU; what it compiles must be what would run."""
    assert not audited_loss(steps.for_gpu_only).findings
    with pytest.raises(AuditError, match="no kernel for cpu"):
        audited_loss(steps.for_gpu_only, "cpu:8")


@pytest.mark.parametrize(("asked", "found"), [("__cudnn$fmhaSoftmax", ["kernel-replaced"]), ("tpu_custom_call", [])])
def test_an_attention_kernel_other_than_the_one_asked_for_is_found(asked, found):
    module = parse(
        "HloModule m, is_scheduled=true\n\nENTRY %main (p: bf16[8]) -> bf16[8] {\n  %p = bf16[8]{0} parameter(0)\n"
        '  ROOT %k = bf16[8]{0} custom-call(%p), custom_call_target="tpu_custom_call"\n}\n'
    )
    plan = steps.plan_for(8)
    state = sum(leaf.bytes_on(plan.mesh) for leaf in plan.leaves)
    memory = {"argument": state, "host_argument": 0, "batch": 0, "alias": state, "peak": state, "temp": 0, "output": state}
    evidence = Evidence(plan, module, Timeline(), memory, parse_target(GPU), frozenset(plan.params), (asked,))
    assert [finding.kind for finding in find(evidence)] == found


def test_the_healthy_step_has_no_finding():
    audit = audited_loss(steps.healthy)
    assert not audit.findings, str(audit)
    assert audit.wire_bytes == pytest.approx(3 * 7 / 8 * 2 * audit.parameters, rel=0.001)


def test_a_mark_removed():
    audit = audited_loss(steps.unmarked)
    outside = found(audit, "outside-units")
    assert set(outside) == {"layers", "head"}
    assert outside["layers"].bytes == 2 * steps.LAYERS * steps.WIDTH * (2 * steps.HIDDEN + 1)
    assert all(f"params/layers/{name}" in outside["layers"].text for name in ("norm", "w1", "w2"))
    # What follows: XLA gathers the activations where they are smaller than the weights.
    assert found(audit, "activations-gathered") and not found(audited_loss(steps.healthy), "activations-gathered")


def test_a_mark_outside_the_layer_scan():
    audit = audited_loss(steps.marked_outside_the_scan)
    whole = found(audit, "unit-too-large")
    assert {"params/layers/norm"} < set(whole) <= {f"params/layers/{name}" for name in ("norm", "w1", "w2")}
    assert all("all 8 layers" in finding.text for finding in whole.values())
    assert whole["params/layers/norm"].bytes == 2 * steps.LAYERS * steps.WIDTH
    assert audit.peak_bytes > 1.5 * audited_loss(steps.healthy).peak_bytes


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_gradients(stage):
    audit = audited_lower(steps.lower_whole_gradients, steps.BATCH, stage=stage)
    held = found(audit, "full-gradient")
    assert {path: finding.bytes for path, finding in held.items()} == {
        "params/layers/norm": 2 * steps.LAYERS * steps.WIDTH,
        "params/layers/w1": 2 * steps.LAYERS * steps.WIDTH * steps.HIDDEN,
        "params/layers/w2": 2 * steps.LAYERS * steps.WIDTH * steps.HIDDEN,
    }
    (reduced,) = found(audit, "all-reduce-for-reduce-scatter").values()
    assert reduced.bytes == 2 * 7 / 8 * 2 * steps.LAYERS * steps.WIDTH * (2 * steps.HIDDEN + 1)


def test_the_residual_constraint_removed():
    size = dataclasses.replace(llama.PRESETS["tiny"], **SIZES["smaller"])
    batch = {name: jax.ShapeDtypeStruct((16, 64), jnp.int32) for name in ("inputs", "targets")}
    pinned, loose = (
        audited_lower(
            steps.lower_plain_llama, size, constrained, batch, batch=batch, init=llama.LlamaFunctions(size).init, units=llama.UNITS
        )
        for constrained in (True, False)
    )
    assert found(loose, "activations-gathered") and not found(pinned, "activations-gathered")
    assert loose.wire_bytes > 1.2 * pinned.wire_bytes


def test_gathered_in_float32():
    audit = audited_loss(steps.gathered_in_float32)
    wide = found(audit, "float32-on-the-wire")
    assert {"all-gather", "reduce-scatter"} == {finding.text.split()[1] for finding in wide.values()}
    assert audit.wire_bytes == pytest.approx(2 * audited_loss(steps.healthy).wire_bytes, rel=0.05)


def test_gathered_too_often():
    often = found(audited_loss(steps.gathered_four_times), "gathered-too-often")
    assert often["params/layers/w2"].text.startswith("shards [64, 256] are gathered 128 times a step, the plan says 32")


def test_the_whole_model_as_one_unit():
    (whole,) = audited_loss(steps.one_unit, units=()).findings
    assert (whole.kind, whole.op) == ("unit-too-large", "root unit")
    assert "100%" in whole.text


def test_a_norm_too_small_to_shard():
    """The 768 elements of a GPT-2 norm over 64 GPUs."""
    audit = audited_loss(steps.narrow, "gpu:h100:8x8", init=steps.narrow_init, rows=64)
    (small,) = audit.findings
    assert (small.kind, small.op) == ("unit-too-small", "params/layers/norm")
    assert "768 elements are split into shards of 12" in small.text


UPDATE = {"x": jax.ShapeDtypeStruct((8,), jnp.float32)}


@pytest.mark.parametrize(
    ("extra", "donated", "kind"),
    [(1, True, None), (1, False, "not-donated"), (MIB, True, "state-above-plan")],
    ids=["healthy", "not donated", "an array that is not in the plan"],
)
def test_state(extra, donated, kind):
    audit = audited_lower(steps.lower_update, extra, donated, batch=UPDATE)
    assert kinds(audit) == ({kind} if kind else set())
    if kind == "not-donated":
        assert audit.findings[0].bytes == audit.state_bytes
    if kind == "state-above-plan":
        assert audit.findings[0].bytes == pytest.approx(4 * MIB, abs=100)


def test_a_leaf_that_is_whole_without_a_reason():
    plan = steps.plan_for(8, ignored=("head/kernel",))
    audit = audited_lower(steps.lower_update, 1, True, batch=UPDATE, plan=plan)
    assert not audit.findings
    silent = tuple(dataclasses.replace(leaf, reason=None) for leaf in plan.leaves)
    audit = audited_lower(steps.lower_update, 1, True, batch=UPDATE, plan=dataclasses.replace(plan, leaves=silent))
    assert [(finding.kind, finding.op) for finding in audit.findings] == [("replicated-without-reason", "params/head/kernel")]


def test_a_program_too_large_for_a_gpu():
    audit = audited_loss(steps.huge, init=steps.huge_init, units=("layers[*]",), stage=0)
    (large,) = audit.findings
    assert large.kind == "does-not-fit"
    assert large.bytes == audit.peak_bytes - 84942979072
    assert "a device would hold 128" in large.text and "raise the stage" in large.text


def test_a_program_too_large_for_a_tpu():
    """The TPU compiler refuses it."""
    with pytest.raises(AuditError, match=r"tpu:v5e:2x4: the program does not fit the chip: it needs 1\d\d\.\d+G of 15.75G memory. Raise"):
        audited_loss(steps.huge, "tpu:v5e:2x4", init=steps.huge_init, units=("layers[*]",), stage=0)


def test_a_gather_over_replicas():
    audit = audited_lower(steps.lower_off_the_replicas, steps.BATCH, mesh=MeshConfig(replica=2))
    (wrong,) = found(audit, "wrong-axis").values()
    assert "replica, over which the plan shards nothing" in wrong.text
    assert wrong.bytes == 2 * steps.ROWS // 8 * steps.LENGTH * steps.WIDTH


def test_a_flat_scatter_on_a_torus():
    """Over three dims of a TPU torus XLA turns a reduce-scatter into an all-reduce and a slice; a SparseCore does not."""
    audit = audited_loss(steps.healthy, "tpu:v5p:2x2x2", options=())
    assert kinds(audit) == {"emulated-collective"}
    assert sum(finding.bytes for finding in audit.findings) == pytest.approx(2 * 7 / 8 * 2 * audit.parameters, rel=0.02)
    with_flags = audited_loss(steps.healthy, "tpu:v5p:2x2x2")
    assert not with_flags.findings and not with_flags.timeline.unknown_kernels
    assert sent(with_flags)["reduce-scatter"] == pytest.approx(7 / 8 * 2 * audit.parameters, rel=0.02)


# --- over the process boundary ------------------------------------------------------------------------------------------

SCRIPT = """
import json
import jax, jax.numpy as jnp, optax, zjax

def normed(x):
    return x / (1 + jnp.max(jnp.abs(x)))

def init(key):
    return {"layers": {"w": jnp.zeros((2, 64, 64))}}

def loss(params, batch, rng):
    layer = zjax.fully_shard(lambda p, x: normed(x @ p["w"]), at="layers")
    x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), batch["x"], params["layers"])
    return jnp.sum(x), jnp.float32(x.shape[0])

plan = zjax.build_plan(zjax.ZeroConfig(stage=3), init, optax.sgd(0.1), zjax.make_mesh(zjax.MeshConfig()), units=("layers[*]",))
step = zjax.make_train_step(plan, loss)
audit = zjax.audit(step, {"x": jax.ShapeDtypeStruct((8, 64), jnp.float32)}, target="cpu:4")
print(json.dumps([__name__, jax.device_count(), audit.to_json()]))
"""


def run_python(*arguments, cwd, stdin=None):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, *arguments], input=stdin, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", ["a script", "a script and its helper", "standard input", "-c"])
def test_a_step_defined_in_main(tmp_path, way):
    script, arguments, stdin = SCRIPT, ["script.py"], None
    if way == "a script and its helper":
        (tmp_path / "beside").mkdir()
        (tmp_path / "beside" / "helper.py").write_text("def normed(x):\n    return x / 2\n")
        script, arguments = (
            script.replace("def normed(x):\n    return x / (1 + jnp.max(jnp.abs(x)))", "from helper import normed"),
            ["beside/script.py"],
        )
    if way == "standard input":
        arguments, stdin = ["-"], script
    elif way == "-c":
        arguments = ["-c", script]
    else:
        (tmp_path / arguments[0]).write_text(script)
    name, here, report = run_python(*arguments, cwd=tmp_path, stdin=stdin)
    assert (name, here) == ("__main__", 1)
    assert (report["target"], report["devices"], report["parameters"]) == ("cpu:4", 4, 2 * 64 * 64)
    assert report["state_bytes"] == pytest.approx(4 * 2 * 64 * 64 / 4, abs=64)
    assert report["collectives"]["all-gather"]["bytes"] == pytest.approx(2 * 3 / 4 * 4 * 2 * 64 * 64, rel=0.01)


@pytest.mark.parametrize(
    ("what", "type_name"), [("lock", "_thread.lock"), ("file", "_io.TextIOWrapper"), ("generator", "builtins.generator")]
)
def test_what_cannot_be_pickled_is_named(tmp_path, what, type_name):
    with open(tmp_path / "log", "w") as file:
        held = {"lock": threading.Lock(), "file": file, "generator": (i for i in range(3))}[what]

        def scaled(x):
            return x if held else 2 * x

        def loss(params, batch, rng):
            return jnp.sum(scaled(batch["x"] @ params["layers"]["w1"][0])), jnp.float32(1)

        step = zjax.make_train_step(steps.plan_for(8, stage=0).recipe.build(zjax.make_mesh(MeshConfig())), loss)
        with pytest.raises(AuditError, match=f"loss uses 'scaled', which uses 'held', a {type_name}, which cannot be pickled"):
            zjax.audit(step, steps.BATCH, target="cpu:4")


class Model:
    def __init__(self, lock):
        self.lock = lock

    def init(self, key):
        return steps.init(key)

    def loss(self, params, batch, rng):
        return jnp.sum(params["head"]["kernel"]), jnp.float32(1)


def test_what_cannot_be_pickled_is_named_in_a_model_object():
    model = Model(threading.Lock())
    plan = steps.plan_for(8, init=model.init)
    with pytest.raises(AuditError, match=r"init_fn uses 'lock', a _thread\.lock"):
        audit_recipe(plan.recipe, steps.healthy, steps.BATCH, target=GPU, mesh=MeshConfig())
    with pytest.raises(AuditError, match=r"loss uses 'lock', a _thread\.lock"):
        audit_recipe(steps.plan_for(8).recipe, model.loss, steps.BATCH, target=GPU, mesh=MeshConfig())


def test_the_callers_jax_is_left_alone():
    seen = lambda: (jax.devices(), dict(jax.config.values), dict(os.environ))  # noqa: E731
    before = seen()
    plan = steps.plan_for(8).recipe.build(zjax.make_mesh(MeshConfig()))
    audit = zjax.audit(zjax.make_train_step(plan, steps.healthy), steps.BATCH, target=GPU)
    assert seen() == before
    assert audit.target.platform == "gpu" and jax.devices()[0].platform == "cpu"


def test_a_compilation_ends_with_the_process_that_waits_for_it(tmp_path):
    """Its stdin is that process's to close, and the system closes it when the process is killed."""

    def lower(mesh):
        (tmp_path / "begun").touch()
        time.sleep(600)

    request = Request(parse_target("cpu:1"), MeshConfig(), lower)
    (tmp_path / "request").write_bytes(cloudpickle.dumps(request))
    command = [sys.executable, "-c", "import sys; from zjax.audit.child import main; main(*sys.argv[1:])", tmp_path / "request", tmp_path]
    with subprocess.Popen(command, env=child_environment(request.target), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        for _ in range(600):
            if (tmp_path / "begun").exists():
                break
            time.sleep(0.1)
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(timeout=30) == 1


def test_an_audit_of_a_step_takes_its_mesh_along():
    """Degrees but for fsdp's are the step's own."""
    plan = steps.plan_for(8, MeshConfig(replica=2)).recipe.build(zjax.make_mesh(MeshConfig(replica=2)))
    audit = zjax.audit(zjax.make_train_step(plan, steps.healthy), steps.BATCH, target="gpu:h100:2x8")
    assert (audit.plan.mesh.shape["replica"], audit.plan.mesh.shape["fsdp"]) == (2, 8)


# --- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gpu:h1000:1x8", "unknown chip 'h1000': known: a100, h100"),
        ("gpu:v5p:2x2x2", "v5p is a tpu; known gpus: a100, h100"),
        ("tpu:h100:1x8", "h100 is a gpu; known tpus: v4, v5e, v5p, v6e"),
        ("rocm:mi300:1x8", "write it as cpu:8, gpu:h100:1x8"),
        ("", "write it as cpu:8"),
        ("gpu", "write it as cpu:8"),
        ("gpu:h100", "write it as cpu:8"),
        ("gpu:h100:8", "'8' must be 2 positive numbers joined by 'x'"),
        ("gpu:h100:1x8x1", "must be 2 positive numbers"),
        ("gpu:h100:0x8", "must be 2 positive numbers"),
        ("tpu:v5p:4x4", "must be 3 positive numbers"),
        ("tpu:v5e:2x2x2", "must be 2 positive numbers"),
        ("cpu:", "must be 1 positive number"),
        ("cpu:many", "must be 1 positive number"),
        ("cpu:-8", "must be 1 positive number"),
    ],
)
def test_a_target_that_is_none(target, message):
    with pytest.raises(ConfigError, match=message):
        audit_run(config(), target)


@pytest.mark.parametrize(
    ("target", "module", "command"),
    [
        ("tpu:v5e:2x4", "libtpu", "pip install 'jax[tpu]=={version}'"),
        (GPU, "jax_plugins.xla_cuda12", "pip install jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"),
    ],
)
@pytest.mark.parametrize("parent", [True, False], ids=["no module", "no package"])
def test_a_compiler_that_is_not_installed(monkeypatch, target, module, command, parent):
    real = targets.importlib.util.find_spec

    def find_spec(name, *rest):
        if name != module:
            return real(name, *rest)
        if parent:
            return None
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(targets.importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError) as error:
        audit_run(config(), target)
    assert str(error.value).endswith(f"its compiler is not installed; run: {command.format(version=jax.__version__)}")


def test_degrees_that_do_not_fit_the_target():
    with pytest.raises(ConfigError, match=r"replica 3 .*on 8 devices: 8 % 3 = 2, so -1 cannot be inferred"):
        audit_run(config(replica=3), GPU)
    with pytest.raises(ConfigError, match=r"fsdp 4 .*= 4, but there are 8 devices"):
        audit_recipe(steps.plan_for(8).recipe, steps.healthy, steps.BATCH, target=GPU, mesh=MeshConfig(fsdp=4))


def test_a_batch_that_does_not_divide_on_the_target():
    with pytest.raises(ValueError, match="batch: 16 rows do not divide over 64 data devices"):
        audit_recipe(steps.plan_for(8).recipe, steps.healthy, steps.BATCH, target="gpu:h100:8x8", mesh=MeshConfig())


def test_a_slice_that_is_not_made():
    """v5e slices are at most 16x16: the compiler's refusal comes through."""
    with pytest.raises(AuditError, match="tpu:v5e:3x5: "):
        audit_recipe(
            steps.plan_for(15).recipe, steps.healthy, {"x": jax.ShapeDtypeStruct((15, 8, steps.WIDTH), jnp.bfloat16)},
            target="tpu:v5e:3x5", mesh=MeshConfig(),
        )  # fmt: skip


def test_a_loss_that_fails_when_it_is_traced():
    with pytest.raises(AuditError, match=f"^{GPU}: KeyError: 'y'$"):
        audit_recipe(steps.plan_for(8).recipe, steps.wants_another_batch, steps.BATCH, target=GPU, mesh=MeshConfig())


def test_a_compiler_that_dies():
    with pytest.raises(AuditError, match=f"^{GPU}: the compiler's process was ended by SIGKILL"):
        audit_program(steps.killed, steps.plan_for(8), steps.BATCH, target=GPU, mesh=MeshConfig())


# --- the command --------------------------------------------------------------------------------------------------------


def command(capsys, *arguments):
    """Exit status, standard output, standard error."""
    status = main(["audit", f"--config={TINY}", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target=gpu:h1000:1x8"],
        ["--target=gpu:h100:8"],
        [f"--target={GPU}", "--config.mesh.replica=3"],
        [f"--target={GPU}", "--config.data.global_batch=12"],
        [f"--target={GPU}", "--config.zero.stag=3"],
    ],
)
def test_the_command_fails_in_one_line(capsys, arguments):
    status, out, err = command(capsys, *arguments)
    assert status == 2 and not out
    assert err.startswith("zjax audit: error: ") and err.count("\n") == 1


HEALTHY = {"size": "smaller", "stage": 2, "keep": False, "replica": 1}
SMALL_NORMS = {"size": "smaller", "stage": 3, "keep": True, "replica": 1}


def test_the_command_prints_what_the_library_finds(capsys):
    status, out, err = command(capsys, f"--target={GPU}", *overrides(**HEALTHY), "--strict", "--json")
    assert status == 0 and not err
    assert json.loads(out) == audited(GPU, **HEALTHY).to_json()
    status, out, _ = command(capsys, f"--target={GPU}", *overrides(**HEALTHY))
    assert status == 0
    assert "stage 2 (ZeRO-2) on gpu:h100:1x8 (fsdp 8)" in out and "findings: none" in out


def test_strict_fails_on_a_finding(capsys):
    status, out, _ = command(capsys, "--target=gpu:h100:2x8", *overrides(**SMALL_NORMS))
    assert status == 0 and "[unit-too-small]" in out
    strict, same, _ = command(capsys, "--target=gpu:h100:2x8", *overrides(**SMALL_NORMS), "--strict")
    assert strict == 1 and same == out


def test_keep_hlo(capsys, tmp_path):
    for _ in range(2):
        status, _, _ = command(capsys, f"--target={GPU}", *overrides(**HEALTHY), f"--keep-hlo={tmp_path / 'kept'}")
        assert status == 0
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.name.startswith("gpu-h100-1x8.") and kept.name.endswith(".hlo.txt")
    module = parse(kept.read_text())
    assert module.devices == 8
    assert any(x.opcode.startswith("reduce-scatter") for c in module.computations.values() for x in c.schedule)


# --- the cache ----------------------------------------------------------------------------------------------------------


def compiled(options=None):
    """A small program for 4 CPU devices; its compile_seconds tell whether it was compiled anew."""
    plan = steps.plan_for(4)
    lower = functools.partial(steps.lower_update, plan.recipe, 1, True)
    return compile_for_target(Request(parse_target("cpu:4"), MeshConfig(), lower, options or {}))


def entries(folder):
    return sorted(path for path in Path(folder).iterdir()) if Path(folder).exists() else []


def test_a_program_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("ZJAX_CACHE_DIR", str(tmp_path))
    first = compiled()
    (entry,) = entries(tmp_path)
    assert {path.name for path in entry.iterdir()} == {"hlo.txt", "compiled.json"}
    # What the cache says is taken for it, so nothing is compiled.
    figures = json.loads((entry / "compiled.json").read_text())
    (entry / "compiled.json").write_text(json.dumps(figures | {"compile_seconds": 12345.0}))
    again = compiled()
    assert again.compile_seconds == 12345.0
    assert dataclasses.replace(again, compile_seconds=first.compile_seconds) == first
    assert entries(tmp_path) == [entry]
    # Other options of the compiler make another program.
    compiled({"xla_backend_optimization_level": "1"})
    assert len(entries(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["no figures", "cut text", "cut figures"])
def test_a_damaged_entry_is_compiled_anew(monkeypatch, tmp_path, damage):
    monkeypatch.setenv("ZJAX_CACHE_DIR", str(tmp_path))
    first = compiled()
    (entry,) = entries(tmp_path)
    if damage == "no figures":
        (entry / "compiled.json").unlink()
    else:
        path = entry / {"cut text": "hlo.txt", "cut figures": "compiled.json"}[damage]
        path.write_text(path.read_text()[:100])
    again = compiled()
    assert again.compile_seconds != first.compile_seconds
    assert (again.hlo, again.memory) == (first.hlo, first.memory)
    assert compiled() == again and entries(tmp_path) == [entry]


def test_no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ZJAX_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled().compile_seconds != compiled().compile_seconds
    assert not entries(tmp_path)


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZJAX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert compiled().hlo


def test_the_default_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("ZJAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled()
    assert len(entries(tmp_path / "zjax" / "audit")) == 1


def test_optax_states_cross_too():
    """The optimizer is rebuilt in the child from the same transformation."""
    plan = zjax.build_plan(
        zjax.ZeroConfig(stage=3, engine="partitioner"), steps.init, optax.chain(optax.clip(1.0), optax.adafactor(1e-3)), zjax.abstract_mesh(MeshConfig(), 4), units=steps.UNITS
    )  # fmt: skip
    batch = {"x": jax.ShapeDtypeStruct((8, 8, steps.WIDTH), jnp.float32)}
    audit = audit_recipe(plan.recipe, steps.healthy, batch, target="cpu:4", mesh=MeshConfig())
    assert audit.state_bytes == pytest.approx(sum(leaf.bytes_on(plan.mesh) for leaf in plan.leaves), rel=0.01)

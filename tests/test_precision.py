"""float16 and its loss scale, frozen parameters, dtypes by pattern and by unit, and the guard: in both engines."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import assert_same_state, leaves

import zjax
from zjax.precision import init_loss_scale, update_loss_scale

ENGINES = ("partitioner", "explicit")
TRACES = json.loads((Path(__file__).parent / "data" / "loss_scale.json").read_text())["cases"]


@pytest.mark.parametrize("case", TRACES, ids=lambda case: case["name"])
def test_the_loss_scale_is_that_of_deepspeeds_class(case):
    config = zjax.LossScaleConfig(
        initial_power=case["initial_scale_power"],
        window=case["loss_scale_window"],
        hysteresis=case["hysteresis"],
        minimum=case["min_loss_scale"],
        consecutive_hysteresis=case["consecutive_hysteresis"],
    )

    def body(state, overflow):
        state, stuck = update_loss_scale(config, state, overflow)
        return state, (state.scale, state.hysteresis, stuck)

    overflows = jnp.array([each == "1" for each in case["overflow"]])
    scales, hysteresis, stuck = jax.device_get(jax.lax.scan(body, init_loss_scale(config), overflows)[1])
    until = len(case["scale_after"])  # where DeepSpeed raised the lists end
    assert scales[:until].tolist() == case["scale_after"] and hysteresis[:until].tolist() == case["hysteresis_after"]
    if case["raise_error_at_min_scale"]:
        assert (np.argmax(stuck) if stuck.any() else None) == case["raised_at"]


# --- a small model: an embedding, a loop over layers, a head ------------------------------------------------------------------

D, LAYERS, V = 16, 3, 32


def init(key):
    keys = iter(jax.random.split(key, 8))
    draw = lambda *shape: 0.3 * jax.random.normal(next(keys), shape)  # noqa: E731
    return {
        "embed": {"table": draw(V, D)},
        "layers": {"w": draw(LAYERS, D, D), "scale": jnp.ones((LAYERS, D)), "adapter": draw(LAYERS, D, D)},
        "head": {"kernel": draw(D, V)},
    }


def block(p, x):
    return (x + jnp.tanh((x @ p["w"]) * p["scale"] + x @ p["adapter"])).astype(x.dtype)


def loss(params, batch, rng, remat="full"):
    x = zjax.fully_shard(lambda p, t: p["table"][t], at="embed")(params["embed"], batch["tokens"])
    x = zjax.scan_layers(block, params["layers"], x, at="layers", remat=remat)
    logits = zjax.fully_shard(lambda p, x: x @ p["kernel"], at="head")(params["head"], x).astype(jnp.float32)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return jnp.sum(nll * batch["mask"]) * jnp.mean(batch["gain"]), jnp.sum(batch["mask"])


UNITS = ("embed", "layers[*]", "head")


def batch_of(step, rows=32, length=4, gain=1.0):
    drawn = np.random.default_rng(step)
    tokens = drawn.integers(0, V, (rows, length))
    mask = (drawn.random((rows, length)) < 0.7).astype(np.float32)
    return {"tokens": tokens, "targets": (tokens * 7 + 3) % V, "mask": mask, "gain": np.full((rows,), gain, np.float32)}


def plan_of(engine, *, mesh=(1, 8), tx=None, stage=3, k=1, compute="float32", units=UNITS, mode="sharded", **knobs):
    zero = {name: knobs.pop(name) for name in ("prefetch",) if name in knobs}
    precision = {name: knobs.pop(name) for name in ("reduce", "accumulate", "keep_float32", "loss_scale") if name in knobs}
    return zjax.build_plan(
        zjax.ZeroConfig(stage=stage, engine=engine, **zero),
        init,
        tx or optax.adamw(1e-2),
        zjax.make_mesh(zjax.MeshConfig(replica=mesh[0], fsdp=mesh[1]), jax.devices()[: mesh[0] * mesh[1]]),
        precision=zjax.PrecisionConfig(compute=compute, **precision),
        accumulation=zjax.AccumulationConfig(micro_batches=k, mode=mode),
        units=units,
        **knobs,
    )


def run(plan, steps=5, gains=None, loss_fn=loss, **batch):
    """States after each step (on the host) and metrics."""
    step, state = zjax.make_train_step(plan, loss_fn, clip=1.0), zjax.init_state(plan, jax.random.key(0))
    history = []
    for index in range(steps):
        state, metrics = step(state, batch_of(index, gain=1.0 if gains is None else gains[index], **batch))
        history.append((leaves(state), {name: float(value) for name, value in metrics.items()}))
    return state, history


# --- float16 ----------------------------------------------------------------------------------------------------------------


@functools.cache
def float32_run():
    return run(plan_of("partitioner"), rows=1024)[1]


@pytest.mark.parametrize(("engine", "stage", "k"), [("partitioner", 3, 1), ("explicit", 2, 4)])
def test_float16_follows_float32(engine, stage, k):
    """1024 rows: a sum of their gradients, scaled by 2**16, is far beyond float16's 65504; the scaled mean is not."""
    scaling = zjax.LossScaleConfig(initial_power=12)
    half = run(plan_of(engine, stage=stage, k=k, compute="float16", loss_scale=scaling), rows=1024)[1]
    full = float32_run()
    assert all(metrics["step_applied"] for _, metrics in half)
    for name, within in (("loss", 2e-3), ("grad_norm", 1e-2), ("weight", 0)):
        np.testing.assert_allclose([m[name] for _, m in half], [m[name] for _, m in full], rtol=within, err_msg=name)
    state = half[-1][0]
    assert {str(x.dtype) for path, x in state.items() if path.startswith("params/")} == {"float16"}
    assert {str(x.dtype) for path, x in state.items() if path.startswith("opt_state/master")} == {"float32"}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_overflow_changes_nothing_but_the_scale(engine):
    """DeepSpeed's engine: step and data go on, parameters, moments and the schedule's count stay bit for bit."""
    scaling = zjax.LossScaleConfig(initial_power=8, window=2, hysteresis=2)
    gains = [1, np.inf, 1, np.nan, np.inf, 1, 1, 1, 1]
    plan = plan_of(engine, compute="float16", loss_scale=scaling, tx=optax.adamw(optax.linear_schedule(1e-2, 0, 10)))
    _, history = run(plan, steps=len(gains), gains=gains)
    assert [m["step_applied"] for _, m in history] == [float(np.isfinite(gain)) for gain in gains]
    # Hysteresis takes the first overflow; then 256 halves with each. It grows 2 steps after the last one, every 2.
    assert [m["loss_scale"] for _, m in history] == [256, 256, 256, 256, 128, 64, 64, 64, 128]
    for before, after in ((0, 1), (2, 3), (3, 4)):
        a, b = history[before][0], history[after][0]
        same = {path for path in a if a[path].tobytes() == b[path].tobytes()}
        assert {path for path in a if path not in same} <= {"step", "skipped_steps", *(p for p in a if p.startswith("loss_scale/"))}
    assert int(history[-1][0]["skipped_steps"]) == 3 and int(history[-1][0]["step"]) == len(gains)
    counts = {path: int(x) for path, x in history[-1][0].items() if path.endswith("count")}
    assert set(counts.values()) == {6}


def test_a_weight_that_depends_on_parameters_cannot_be_scaled():
    def weighed(params, batch, rng):
        total, weight = loss(params, batch, rng)
        return total, weight + jnp.sum(params["head"]["kernel"])

    plan = plan_of("partitioner", compute="float16")
    with pytest.raises(TypeError, match="its weight depends on the parameters"):
        run(plan, steps=1, loss_fn=weighed)


def test_a_static_scale_stays():
    plan = plan_of("explicit", compute="float16", loss_scale=zjax.LossScaleConfig(static=128.0))
    _, history = run(plan, steps=3, gains=[1, np.inf, 1])
    assert [m["loss_scale"] for _, m in history] == [128] * 3
    assert [m["step_applied"] for _, m in history] == [1, 0, 1]


# --- the guard ----------------------------------------------------------------------------------------------------------------


def poisoned(name, value):
    """The loss with a gradient that is not finite in one parameter only."""

    @jax.custom_vjp
    def spoil(x, bad):
        return x

    spoil.defvjp(lambda x, bad: (x, bad), lambda bad, g: (jnp.where(bad, value, g).astype(g.dtype), None))

    def spoiled(params, batch, rng):
        def head(p, x):
            return x @ spoil(p["kernel"], jnp.any(batch["gain"] > 1))

        x = zjax.fully_shard(lambda p, t: p["table"][t], at="embed")(params["embed"], batch["tokens"])
        x = zjax.scan_layers(block, params["layers"], x, at="layers")
        x = zjax.fully_shard(head, at="head")(params["head"], x).astype(jnp.float32)
        return jnp.sum(jnp.square(x)), jnp.float32(len(x))

    return spoiled


@pytest.mark.parametrize(("engine", "compute", "value"), [("explicit", "bfloat16", np.nan), ("partitioner", "float32", np.inf)])
def test_the_guard_names_the_leaf_and_ends_the_run(engine, compute, value):
    plan = plan_of(engine, compute=compute)
    _, history = run(plan, steps=4, gains=[1, 2, 2, 2], loss_fn=poisoned("head/kernel", value))
    guard = zjax.NonFiniteGuard(plan, max_consecutive_skips=3)
    assert guard.observe(1, history[0][1]) is None
    told = guard.observe(2, history[1][1])
    assert f"the gradient of head/kernel has {'NaN' if np.isnan(value) else 'Inf'}" in told and "step 2" in told
    guard.observe(3, history[2][1])
    with pytest.raises(zjax.NonFiniteError, match=r"max_consecutive_skips=3 is reached.*max_consecutive_skips=0"):
        guard.observe(4, history[3][1])
    forever = zjax.NonFiniteGuard(plan, max_consecutive_skips=0)
    assert all(forever.observe(step, history[1][1]) for step in range(100))


def test_a_scale_stuck_at_its_minimum_raises_and_names_the_leaf():
    for stops in (True, False):
        scaling = zjax.LossScaleConfig(initial_power=1, hysteresis=1, raise_at_minimum=stops)
        plan = plan_of("explicit", compute="float16", loss_scale=scaling)
        _, history = run(plan, steps=3, gains=[2, 2, 2], loss_fn=poisoned("head/kernel", np.inf))
        guard = zjax.NonFiniteGuard(plan)
        assert "loss scale 2" in guard.observe(1, history[0][1])
        if stops:
            with pytest.raises(
                zjax.NonFiniteError, match=r"head/kernel has Inf.*the loss scale is at its minimum, 1, and gradients still overflow"
            ):
                guard.observe(2, history[1][1])
        else:
            assert guard.observe(2, history[1][1]) and guard.observe(3, history[2][1])


# --- frozen parameters ----------------------------------------------------------------------------------------------------------


def dense(steps, frozen, k=1, tx=None):
    """One device, no zjax: only the trained leaves are differentiated and updated."""
    tx = tx or optax.adamw(1e-2)
    params = init(jax.random.split(jax.random.key(0))[0])
    flat, treedef = jax.tree.flatten(params)
    names = list(leaves(params))
    live = [i for i, name in enumerate(names) if not frozen(name)]

    def mean(trained, batch):
        every = list(flat)
        for i, x in zip(live, trained, strict=True):
            every[i] = x
        total, weight = loss(jax.tree.unflatten(treedef, every), batch, None)
        return total / weight

    @jax.jit
    def step(trained, opt, batch):
        grads = jax.grad(mean)(trained, batch)
        norm = optax.tree.norm(grads)
        updates, opt = tx.update(jax.tree.map(lambda g: g / jnp.maximum(1, norm + 1e-6), grads), opt, trained)
        return optax.apply_updates(trained, updates), opt, norm

    trained, norms = [flat[i] for i in live], []
    opt = tx.init(trained)
    for index in range(steps):
        trained, opt, norm = step(trained, opt, batch_of(index))
        norms.append(float(norm))
    return {names[i]: np.asarray(x) for i, x in zip(live, trained, strict=True)}, norms


LORA = {"trainable": ("*adapter*",)}


@pytest.mark.parametrize(
    ("engine", "stage", "mesh", "k", "mode", "prefetch"),
    [
        ("partitioner", 3, (2, 4), 1, "sharded", 1),
        ("explicit", 3, (1, 8), 4, "sharded", 1),
        ("explicit", 2, (4, 2), 2, "local", 0),
        pytest.param("explicit", 3, (2, 4), 2, "local", 0, marks=pytest.mark.full),
        pytest.param("partitioner", 1, (1, 8), 4, "sharded", 0, marks=pytest.mark.full),
        pytest.param("explicit", 0, (1, 8), 1, "sharded", 0, marks=pytest.mark.full),
    ],
)
def test_frozen_parameters_stay_and_the_others_train_as_alone(engine, stage, mesh, k, mode, prefetch):
    plan = plan_of(engine, stage=stage, mesh=mesh, k=k, mode=mode, prefetch=prefetch, **LORA)
    first = leaves(zjax.init_state(plan, jax.random.key(0)))
    _, history = run(plan, steps=5)
    expected, norms = dense(5, lambda name: "adapter" not in name)
    final = history[-1][0]
    np.testing.assert_allclose([m["grad_norm"] for _, m in history], norms, rtol=1e-5)
    for name in plan.params:
        if name in expected:
            np.testing.assert_allclose(final[f"params/{name}"], expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert final[f"params/{name}"].tobytes() == first[f"params/{name}"].tobytes(), name


def test_frozen_parameters_have_no_gradient_moments_or_master_and_the_plan_shows_it():
    plan = plan_of("explicit", compute="bfloat16", **LORA)
    trained = {leaf.name for leaf in plan.trained}
    assert trained == {"layers/adapter"}
    for part in ("master", "optimizer"):
        assert {leaf.path.split("layers/")[-1] for leaf in plan.part(part) if leaf.shape} == {"adapter"}, part
    held = zjax.bytes_per_device(plan)
    adapter = LAYERS * D * D / 8
    assert (held["gradients"], held["master"], held["optimizer"]) == (2 * adapter, 4 * adapter, 8 * adapter + 4)
    frozen = plan.params["layers/w"]
    assert frozen.rest.spec == frozen.backward.spec != frozen.forward.spec  # at stage 3 still in shards
    whole = plan_of("explicit", stage=2, **LORA).params["layers/w"]
    assert whole.reason.startswith("frozen")


def test_frozen_parameters_move_no_gradients():
    """2 gathers of everything, a scatter of what is trained; read from the plan, and from the program compiled for a GPU."""
    from zjax.estimate import traffic_per_step

    plan = plan_of("explicit", compute="bfloat16", **LORA)
    size = lambda leaves: sum(np.prod(leaf.shape) for leaf in leaves)  # noqa: E731
    sent = traffic_per_step(plan)
    assert sent["all_gather"] == 2 * 7 / 8 * 2 * size(plan.part("params"))
    assert sent["reduce_scatter"] == 7 / 8 * 2 * size(plan.trained)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(0))
    audit = zjax.audit(zjax.make_train_step(plan, loss), batch, target="gpu:h100:1x8")
    made = {kind: figures["bytes"] for kind, figures in audit.to_json()["collectives"].items()}
    # The loop's last layer stays gathered for its backward.
    last = 7 / 8 * 2 * (2 * D * D + D)
    assert made["all-gather"] == pytest.approx(sent["all_gather"] - last, rel=0.02)
    assert made["reduce-scatter"] == pytest.approx(sent["reduce_scatter"], rel=0.02)


def test_frozen_parameters_come_back_from_a_checkpoint(tmp_path):
    """DeepSpeed #3090: frozen weights were missing, and random after a resume."""
    plan = plan_of("explicit", frozen=("embed", "layers/w", "head"))
    state, _ = run(plan, steps=2)
    checkpointer = zjax.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    other = plan_of("partitioner", mesh=(2, 4), stage=1, frozen=("embed", "layers/w", "head"))
    assert_same_state(zjax.Checkpointer(tmp_path).restore(other), state)


def test_patterns_that_leave_nothing_to_train_or_name_nothing_raise():
    with pytest.raises(ValueError, match="no parameter is left to train"):
        plan_of("explicit", frozen=("*",))
    with pytest.raises(ValueError, match="frozen: pattern 'embd' matches no leaf"):
        plan_of("explicit", frozen=("embd",))
    with pytest.raises(ValueError, match="trainable: pattern 'lora' matches no leaf"):
        plan_of("explicit", trainable=("lora",))


def test_frozen_wins_over_trainable():
    plan = plan_of("explicit", trainable=("layers",), frozen=("layers/scale",))
    assert {leaf.name for leaf in plan.trained} == {"layers/w", "layers/adapter"}


# --- dtypes -------------------------------------------------------------------------------------------------------------------


@functools.cache
def bf16_losses():
    return [m["loss"] for _, m in run(plan_of("partitioner", compute="bfloat16"))[1]]


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_kept_in_float32_have_no_master_and_train_alike(engine):
    plan = plan_of(engine, compute="bfloat16", keep_float32=("*scale",))
    _, history = run(plan)
    dtypes = {name: str(x.dtype) for name, x in history[-1][0].items() if name.startswith("params/")}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {"params/layers/scale"}
    assert "opt_state/master/layers/scale" not in history[-1][0] and "opt_state/master/layers/w" in history[-1][0]
    np.testing.assert_allclose([m["loss"] for _, m in history], bf16_losses(), rtol=5e-3)
    assert plan.params["layers/scale"].reduce == jnp.float32


def test_a_mistyped_pattern_of_float32_raises():
    with pytest.raises(ValueError, match=r"precision.keep_float32: pattern 'norms' matches no leaf"):
        plan_of("explicit", compute="bfloat16", keep_float32=("norms",))


@pytest.mark.parametrize(("engine", "prefetch"), [("partitioner", 0), ("explicit", 1), ("explicit", 0)])
def test_units_hand_on_what_their_output_dtype_says(engine, prefetch):
    """A float32 residual stream through bf16 layers (FSDP2 output_dtype), in the plain loop and with its own rule."""
    seen = []

    def noted(params, batch, rng):
        def head(p, x):
            seen.append(str(x.dtype))
            return x @ p["kernel"]

        def layer(p, x):
            seen.append(str(x.dtype))
            return block(p, x)

        x = zjax.fully_shard(lambda p, t: p["table"][t], at="embed")(params["embed"], batch["tokens"])
        x = zjax.scan_layers(layer, params["layers"], x, at="layers")
        seen.append(f"stream {x.dtype}")
        logits = zjax.fully_shard(head, at="head")(params["head"], x)
        seen.append(f"logits {logits.dtype}")
        return jnp.sum(jnp.square(logits.astype(jnp.float32))), jnp.float32(len(x))

    units = ("embed", zjax.Unit("layers[*]", output="float32"), zjax.Unit("head", output="float16"))
    plan = plan_of(engine, compute="bfloat16", units=units, prefetch=prefetch)
    _, history = run(plan, steps=2, loss_fn=noted)
    inside = [each for each in seen if each.startswith(("stream", "logits"))]
    assert {"stream float32", "logits float16"} <= set(inside) and "float16" not in seen
    assert "bfloat16" in seen and all(np.isfinite(m["loss"]) for _, m in history)


@pytest.mark.parametrize("engine", ENGINES)
def test_micro_batches_are_summed_in_the_dtype_asked_for(engine):
    plan = plan_of(engine, compute="bfloat16", k=4, accumulate="bfloat16")
    assert {str(leaf.accumulator.dtype) for leaf in plan.trained} == {"bfloat16"}
    wide = plan_of(engine, compute="bfloat16", k=4)
    narrow_held, wide_held = (zjax.bytes_per_device(each)["gradients"] for each in (plan, wide))
    assert 2 * narrow_held == wide_held
    history = run(plan)[1]
    np.testing.assert_allclose([m["loss"] for _, m in history], bf16_losses(), rtol=1e-2)
    # The schedule counts optimizer steps: 2 after 8 micro-steps.
    assert {int(x) for path, x in history[1][0].items() if path.endswith("count")} == {2}


# --- norms and clipping ---------------------------------------------------------------------------------------------------------


def test_the_steps_norm_of_float16_gradients_is_taken_in_float32():
    """300 over 1024 elements is 9600; 300 squared is beyond float16's 65504."""
    scaling = zjax.PrecisionConfig(compute="float16", loss_scale=zjax.LossScaleConfig(static=1.0))
    mesh = zjax.make_mesh(zjax.MeshConfig())
    plan = zjax.build_plan(zjax.ZeroConfig(), lambda key: {"w": jnp.zeros(1024)}, optax.sgd(0.0), mesh, precision=scaling)
    step = zjax.make_train_step(plan, lambda p, x, rng: (jnp.sum(x) * jnp.sum(p["w"].astype(jnp.float32) * 300), jnp.sum(x)))
    metrics = step(zjax.init_state(plan, jax.random.key(0)), jnp.ones(8))[1]
    assert float(metrics["grad_norm"]) == 9600 and metrics["step_applied"]


@pytest.mark.parametrize(("engine", "mesh"), [("partitioner", (2, 4)), ("explicit", (4, 2))])
def test_gradients_are_clipped_by_value_and_by_norm_and_norms_of_groups_are_logged(engine, mesh):
    """Against plain jax on one device; a step of SGD at rate 1 shows what the optimizer was given."""
    plan = plan_of(engine, mesh=mesh, tx=optax.sgd(1.0))
    start = jax.device_get(zjax.init_state(plan, jax.random.key(0)).params)
    step = zjax.make_train_step(plan, loss, clip=0.05, clip_value=0.01, norm_groups=("layers", "*kernel"))
    state, metrics = step(zjax.init_state(plan, jax.random.key(0)), batch_of(0))
    grads = jax.grad(lambda p: (lambda total, weight: total / weight)(*loss(p, batch_of(0), None)))(start)
    cut = jax.tree.map(lambda g: jnp.clip(g, -0.01, 0.01), grads)
    norm = optax.tree.norm(cut)
    expected = {
        "grad_norm": optax.tree.norm(grads),
        "grad_norm_clipped": jnp.minimum(norm, 0.05),
        "grad_norm/layers": optax.tree.norm(grads["layers"]),
        "grad_norm/*kernel": optax.tree.norm(grads["head"]),
    }
    assert norm > 0.05 and optax.tree.norm(grads) > norm  # both clips do something
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    moved = jax.tree.map(lambda a, b: a - b, start, jax.device_get(state.params))
    jax.tree.map(lambda m, g: np.testing.assert_allclose(m, g * 0.05 / norm, rtol=1e-3, atol=1e-6), moved, cut)
    with pytest.raises(ValueError, match="norm_groups: pattern 'heads' matches no leaf"):
        zjax.make_train_step(plan, loss, norm_groups=("heads",))


# --- starting from given weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_given_parameters_are_where_masters_and_moments_begin(compute):
    """DeepSpeed #2101: weights loaded without optimizer state left a stale fp32 master, and the first step undid the load."""
    plan = plan_of("explicit", compute=compute)
    given = jax.tree.map(lambda x: np.asarray(x) * 1.5, init(jax.random.key(9)))
    other = zjax.build_plan(
        plan.zero, lambda key: jax.tree.map(jnp.asarray, given), optax.adamw(1e-2), plan.mesh, precision=plan.precision, units=UNITS
    )
    step = zjax.make_train_step(plan, loss)
    loaded = step(zjax.init_state(plan, jax.random.key(0), given), batch_of(0))[0]
    fresh = step(zjax.init_state(other, jax.random.key(0)), batch_of(0))[0]
    assert_same_state(loaded, fresh)
    broken = {**given, "head": {"kernel": np.zeros((D, V + 1))}}
    with pytest.raises(ValueError, match=r"params/head/kernel: the plan has shape \(16, 32\), the parameters given have \(16, 33\)"):
        zjax.init_state(plan, jax.random.key(0), broken)
    with pytest.raises(ValueError, match=r"params/head/kernel.*given have none"):
        zjax.init_state(plan, jax.random.key(0), {**given, "head": {}})

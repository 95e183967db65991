"""Failures that users of such libraries reported; a test's name starts with the number of the case it keeps from coming back."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zjax
from zjax import rules
from zjax.describe import summary
from zjax.optim import global_norm
from zjax.state import lower_init, unplanned
from zjax.tree import named_leaves

STAGES = (0, 1, 2, 3)
ENGINES = ("partitioner", "explicit")


@functools.cache
def mesh(n=8, **degrees):
    return zjax.make_mesh(zjax.MeshConfig(**degrees), jax.devices()[:n])


def plan_of(init_fn, tx, *, stage=3, on=None, micro=1, mode="sharded", compute="float32", engine="auto", strict=False, **knobs):
    return zjax.build_plan(
        zjax.ZeroConfig(stage=stage, strict=strict, engine=engine),
        init_fn,
        tx,
        on or mesh(),
        precision=zjax.PrecisionConfig(compute=compute),
        accumulation=zjax.AccumulationConfig(micro_batches=micro, mode=mode),
        **knobs,
    )


def train(plan, loss_fn, batches, *, clip=None):
    """The state after all batches, and the metrics of each step."""
    state, step = zjax.init_state(plan, jax.random.key(0)), zjax.make_train_step(plan, loss_fn, clip=clip)
    metrics = []
    for batch in batches:
        state, scalars = step(state, batch)
        metrics.append(jax.device_get(scalars))
    return state, metrics


def dense(tx, params, loss_fn, batches):
    """Plain optax on one device over the whole batch: what every stage must equal."""
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    opt_state = tx.init(params)

    @jax.jit
    def update(params, opt_state, batch):
        def mean(params):
            total, weight = loss_fn(params, batch, None)
            return total / weight

        updates, opt_state = tx.update(jax.grad(mean)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        params, opt_state = update(params, opt_state, batch)
    return jax.device_get(params)


def bits(tree):
    """Every leaf as numpy, PRNG keys as their data; NaNs compare equal in `same_bits`."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {name: np.asarray(jax.random.key_data(x) if is_key(x) else x) for name, x in named_leaves(tree)}


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name


def close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), jax.device_get(a), jax.device_get(b))


def mlp(key=None):
    """Fixed values, so that a run needs no zjax to know where it starts; `odd` divides by no mesh, `scale` is a scalar."""
    draw = np.random.default_rng(7)
    normal = lambda *shape: jnp.asarray(draw.normal(0, 0.3, shape), jnp.float32)  # noqa: E731
    return {"w1": normal(16, 24), "b1": normal(24), "w2": normal(24, 8), "odd": normal(7), "scale": jnp.float32(1.5)}


def squared_errors(params, batch, rng):
    x = batch["x"].astype(params["w1"].dtype)
    out = (jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]) * params["scale"] + params["odd"].sum()
    rows = jnp.sum((out.astype(jnp.float32) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(rows * batch["mask"]), jnp.sum(batch["mask"])


def regression(steps, rows=32):
    """Rows are masked unevenly, so that devices and micro-batches weigh differently."""
    draw = np.random.default_rng(3)
    mask = ((np.arange(rows) % 5 != 0) & (np.arange(rows) < rows - 3)).astype("float32")
    normal = lambda columns: draw.normal(size=(rows, columns)).astype("float32")  # noqa: E731
    return [{"x": normal(16), "y": normal(8), "mask": mask} for _ in range(steps)]


# --- shapes and placement -------------------------------------------------------------------------------------------------


def test_c01_a_dim_that_does_not_divide_is_left_for_one_that_does():
    plan = plan_of(lambda key: {"vocab": jnp.ones((17, 16))}, optax.adam(1e-3))
    state = zjax.init_state(plan, jax.random.key(0))
    for x in (state.params["vocab"], state.opt_state.inner[0].mu["vocab"], state.opt_state.inner[0].nu["vocab"]):
        assert {shard.data.shape for shard in x.addressable_shards} == {(17, 2)}


def test_c01_a_leaf_that_stays_whole_says_why_in_the_table():
    plan = plan_of(lambda key: {"vocab": jnp.ones((17, 15)), "w": jnp.ones((16, 8))}, optax.sgd(0.1))
    line = next(line for line in plan.table().splitlines() if "params/vocab" in line)
    assert "no dim divides: 17 % 8 = 1, 15 % 8 = 7" in line
    assert zjax.init_state(plan, jax.random.key(0)).params["vocab"].sharding.is_fully_replicated


def test_c01_strict_raises_naming_path_shape_and_axis():
    with pytest.raises(ValueError) as error:
        plan_of(lambda key: {"embed": {"vocab": jnp.ones((17, 15))}}, optax.sgd(0.1), strict=True)
    for part in ("embed/vocab", "(17, 15)", "fsdp", "17 % 8 = 1", "15 % 8 = 7"):
        assert part in str(error.value)


def test_c02_a_rule_on_a_dim_that_does_not_divide_raises_at_planning_with_the_remainder():
    with pytest.raises(ValueError) as error:
        plan_of(lambda key: {"embed": {"vocab": jnp.ones((17, 16))}}, optax.sgd(0.1), rules=[rules.pattern({"embed": P("fsdp")})])
    for part in ("embed/vocab", "(17, 16)", "fsdp", "17 % 8 = 1"):
        assert part in str(error.value)


def test_c03_no_device_is_left_without_a_part_of_a_small_leading_dim():
    plan = plan_of(lambda key: {"w": jnp.ones((2, 64))}, optax.sgd(0.1))
    shards = zjax.init_state(plan, jax.random.key(0)).params["w"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(2, 8)] * 8
    assert len({shard.index[1].start for shard in shards}) == 8


@pytest.mark.parametrize(("stage", "engine"), [*((stage, "partitioner") for stage in STAGES), (2, "explicit"), (3, "explicit")])
def test_c05_zero_size_parameters_train_and_keep_their_shape_through_a_checkpoint(stage, engine, tmp_path):
    shapes = {"first": (8,), "none": (0,), "rows": (0, 8), "w": (24,)}
    init = lambda key: {name: jnp.ones(shape) for name, shape in shapes.items()}  # noqa: E731

    def loss_fn(params, batch, rng):
        empty = jnp.sum(params["none"]) + jnp.sum(params["rows"])
        return jnp.sum(batch @ params["first"]) + jnp.sum(batch.sum() * params["w"]) + empty, jnp.float32(batch.shape[0])

    plan = plan_of(init, optax.sgd(0.5, momentum=0.9), stage=stage, engine=engine)
    state, _ = train(plan, loss_fn, [np.ones((8, 8), "float32")] * 3)
    # Gradients of 1 and 8; momentum sums to 1 + 1.9 + 2.71 = 5.61.
    np.testing.assert_allclose(state.params["first"], np.full(8, 1 - 0.5 * 5.61), rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], np.full(24, 1 - 0.5 * 8 * 5.61), rtol=1e-6)

    checkpointer = zjax.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    restored = zjax.Checkpointer(tmp_path).restore(plan)
    checkpointer.close()
    assert {name: x.shape for name, x in restored.params.items()} == shapes
    same_bits(bits(restored), bits(state))
    assert unplanned(plan, restored) == []


@pytest.mark.parametrize(("stage", "engine"), [*((stage, "partitioner") for stage in STAGES), (2, "explicit")])
def test_c06_a_model_smaller_than_the_mesh_trains(stage, engine):
    plan = plan_of(lambda key: {"w": jnp.ones(3)}, optax.sgd(0.5), stage=stage, engine=engine)
    rows = np.arange(24, dtype="float32").reshape(8, 3)
    state, _ = train(plan, lambda p, x, rng: (jnp.sum(x @ p["w"]), jnp.float32(x.shape[0])), [rows])
    np.testing.assert_allclose(state.params["w"], 1 - 0.5 * rows.mean(0), rtol=1e-6)


def test_c07_a_scalar_parameter_is_replicated_and_trains():
    for stage in STAGES:
        plan = plan_of(lambda key: {"scale": jnp.float32(2)}, optax.adam(0.1), stage=stage)
        assert {leaf.rest.spec for leaf in plan.leaves} == {P()}
    state, _ = train(plan, lambda p, x, rng: (jnp.sum(x) * p["scale"], jnp.float32(8)), [np.ones(8, "float32")])
    # Adam's first step moves by the learning rate, whatever the gradient.
    np.testing.assert_allclose(state.params["scale"], 1.9, rtol=1e-5)


def test_c08_a_mesh_of_one_device_trains_at_stage_3_and_says_once_that_nothing_is_sharded():
    with pytest.warns(UserWarning, match=r"stage=3 on a mesh with one device") as caught:
        plan = plan_of(mlp, optax.adam(0.01), on=mesh(1))
        state, _ = train(plan, squared_errors, regression(2))
    assert len(caught) == 1
    close(state.params, dense(optax.adam(0.01), mlp(), squared_errors, regression(2)), rtol=1e-6, atol=1e-6)


@functools.cache
def three_steps(stage, compute, engine):
    """A plan, its compiled step, and the states before and after 3 steps."""
    plan, batches = plan_of(mlp, optax.adamw(0.01), stage=stage, compute=compute, engine=engine), regression(3)
    compiled = zjax.make_train_step(plan, squared_errors, clip=1.0).lower(batches[0]).compile()
    first = state = zjax.init_state(plan, jax.random.key(0))
    for batch in batches:
        state, _ = compiled(state, jax.device_put(batch, zjax.batch_sharding(plan)))
    return plan, compiled, first, state


MODES = [
    *((stage, "float32", "partitioner") for stage in STAGES),
    (1, "bfloat16", "partitioner"),
    (3, "bfloat16", "partitioner"),
    (2, "bfloat16", "explicit"),
    (3, "float32", "explicit"),
]


@pytest.mark.parametrize(("stage", "compute", "engine"), MODES)
def test_c10_placement_does_not_drift_from_the_plan_over_steps(stage, compute, engine):
    plan, _, _, state = three_steps(stage, compute, engine)
    assert unplanned(plan, state) == []
    # The same from the paper's table: w1 (16, 24) is cut in dim 1, odd (7,) and scale () never are.
    shard_of = lambda x: x.sharding.shard_shape(x.shape)  # noqa: E731
    adam = state.opt_state.inner[0]
    assert shard_of(state.params["w1"]) == ((16, 3) if stage == 3 else (16, 24))
    for moments in (adam.mu, adam.nu, *([state.opt_state.master] if compute == "bfloat16" else [])):
        assert shard_of(moments["w1"]) == ((16, 3) if stage else (16, 24))
        assert shard_of(moments["w2"]) == ((3, 8) if stage else (24, 8))
        assert shard_of(moments["odd"]) == (7,)
    for x in (state.step, state.rng, state.skipped_steps, adam.count):
        assert x.sharding.is_fully_replicated and len(x.sharding.device_set) == 8


@pytest.mark.parametrize(("stage", "compute", "engine"), MODES)
def test_c11_every_device_holds_its_share_and_no_device_holds_all_moments(stage, compute, engine):
    plan, _, _, state = three_steps(stage, compute, engine)
    held = Counter()
    for leaf, x in zip(plan.leaves, jax.tree.leaves(state), strict=True):
        data = jax.random.key_data(x) if leaf.path == "rng" else x
        on_device = Counter()
        for shard in data.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
        assert len(on_device) == 8 and max(on_device.values()) <= leaf.bytes_on(plan.mesh), leaf.path
        held += on_device
    assert max(held.values()) / min(held.values()) <= 1.05
    # By hand: 16 x 24 + 24 + 24 x 8 = 600 elements divide over 8 devices, 7 + 1 do not; Adam has 2 moments and a count.
    width, masters = (2, 4) if compute == "bfloat16" else (4, 0)
    whole, cut = 600 + 8, 600 // 8 + 8
    params = width * (cut if stage == 3 else whole)
    optimizer = (masters + 8) * (cut if stage else whole) + 4
    assert set(held.values()) == {params + optimizer + 4 + 4 + 8}


def test_c12_initialising_never_holds_a_full_tensor():
    plan = plan_of(lambda key: {"w": jax.random.normal(key, (8192, 8192))}, optax.sgd(0.1))
    compiled = lower_init(plan).compile()
    shard, full = 8192 * 8192 * 4 // 8, 8192 * 8192 * 4
    memory = compiled.memory_analysis()
    assert memory.peak_memory_in_bytes <= 2 * shard
    assert memory.output_size_in_bytes <= 1.01 * shard
    # XLA on CPU needs three integer buffers of a shard's size to draw the random bits; a full tensor would be eight.
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= 4.01 * shard < full
    assert not re.search(r"\[8192,8192\]", compiled.as_text())


def test_c12_an_initialiser_without_random_bits_holds_at_most_twice_its_shard():
    plan = plan_of(lambda key: {"w": jnp.sin(jax.lax.broadcasted_iota(jnp.float32, (8192, 8192), 0))}, optax.sgd(0.1))
    memory = lower_init(plan).compile().memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes <= 2 * 8192 * 8192 * 4 // 8


@pytest.mark.parametrize(("stage", "compute", "engine"), MODES)
def test_c14_every_byte_of_the_state_is_donated(stage, compute, engine):
    """Warnings of unused donations are errors in every test; here the compiled step says what it reuses."""
    plan, compiled, first, _ = three_steps(stage, compute, engine)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    held = sum(leaf.bytes_on(plan.mesh) for leaf in plan.leaves)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == held
    assert memory.argument_size_in_bytes == held + 32 * (16 + 8 + 1) * 4 // 8


# --- gradients, accumulation, clipping --------------------------------------------------------------------------------------


def weighed(params, batch, rng):
    """Summed losses `loss`, each times the parameter, over `tokens` tokens."""
    return jnp.sum(batch["loss"]) * params["w"], jnp.sum(batch["tokens"])


def token_batch(losses, tokens):
    return {"loss": np.array(losses, "float32"), "tokens": np.array(tokens, "float32")}


@pytest.mark.parametrize(
    ("devices", "micro", "engine"),
    [(1, 2, "partitioner"), (2, 1, "partitioner"), (2, 2, "partitioner"), (8, 2, "partitioner"), (2, 1, "explicit"), (8, 2, "explicit")],
)
def test_c18_the_loss_is_the_mean_over_tokens_not_the_mean_of_means(devices, micro, engine):
    """(2, 1) and (90, 9): (2 / 1 + 90 / 9) / 2 = 6.0 is what others reported; 92 / 10 = 9.2 is right."""
    rows = devices * micro
    losses, tokens = np.zeros(max(rows, 2)), np.zeros(max(rows, 2))
    losses[[0, -1]], tokens[[0, -1]] = (2, 90), (1, 9)
    plan = plan_of(lambda key: {"w": jnp.float32(1)}, optax.sgd(1.0), stage=0, on=mesh(devices), micro=micro, engine=engine)
    state, (metrics,) = train(plan, weighed, [token_batch(losses, tokens)])
    np.testing.assert_allclose(metrics["loss"], 9.2, rtol=1e-6)
    np.testing.assert_allclose(metrics["weight"], 10)
    np.testing.assert_allclose(metrics["grad_norm"], 9.2, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], 1 - 9.2, rtol=1e-6)


@pytest.mark.parametrize("micro", [1, 2])
def test_c18_a_batch_that_is_masked_out_whole_gives_zero_not_nan(micro):
    plan = plan_of(lambda key: {"w": jnp.float32(1)}, optax.sgd(1.0), micro=micro)
    state, (metrics,) = train(plan, weighed, [token_batch([0] * 16, [0] * 16)])
    assert (metrics["loss"], metrics["grad_norm"], float(state.params["w"])) == (0, 0, 1)


def test_c18_metrics_are_averaged_over_the_whole_batch_too():
    plan = plan_of(lambda key: {"w": jnp.float32(1)}, optax.sgd(1.0), micro=2)
    loss_fn = lambda p, b, rng: (*weighed(p, b, rng), {"correct": (jnp.sum(b["loss"]), jnp.sum(b["tokens"]))})  # noqa: E731
    _, (metrics,) = train(plan, loss_fn, [token_batch([2] + [0] * 14 + [90], [1] + [0] * 14 + [9])])
    np.testing.assert_allclose(metrics["correct"], 9.2, rtol=1e-6)


def test_c18_a_weight_that_is_not_finite_skips_the_step():
    """NaN > 0 is false: a division guarded by it alone would turn a broken weight into a loss of 0 and go on."""
    plan = plan_of(lambda key: {"w": jnp.float32(1)}, optax.adam(0.1))
    state, metrics = train(plan, weighed, [token_batch([1] * 8, [1] * 7 + [float(bad)]) for bad in ("nan", "inf")])
    assert [float(scalars["step_applied"]) for scalars in metrics] == [0, 0]
    assert (int(state.skipped_steps), float(state.params["w"])) == (2, 1)


def test_c18_a_loss_that_returns_a_mean_is_told_the_contract():
    plan = plan_of(lambda key: {"w": jnp.float32(1)}, optax.sgd(1.0))
    mean = lambda p, b, rng: jnp.mean(b["loss"]) * p["w"]  # noqa: E731
    batch = token_batch([1, 2, 3, 4, 5, 6, 7, 8], [1] * 8)
    with pytest.raises(TypeError, match=r"\(loss_sum, weight\).*mean_loss"):
        train(plan, mean, [batch])
    state, (metrics,) = train(plan, zjax.mean_loss(mean), [batch])
    np.testing.assert_allclose([metrics["loss"], 1 - float(state.params["w"])], 4.5, rtol=1e-6)
    with pytest.raises(ValueError, match="micro_batches=2"):
        zjax.make_train_step(plan_of(lambda key: {"w": jnp.float32(1)}, optax.sgd(1.0), micro=2), zjax.mean_loss(mean))


@pytest.mark.parametrize(("stage", "engine"), [(0, "partitioner"), (3, "partitioner"), (0, "explicit"), (3, "explicit")])
def test_c19_tokens_weigh_the_same_on_a_device_with_five_as_on_a_device_with_one(stage, engine):
    """Each of 12 tokens picks its own parameter, so that the gradient is the token's weight."""
    plan = plan_of(lambda key: {"w": jnp.zeros(12)}, optax.sgd(1.0), stage=stage, on=mesh(2), engine=engine)
    batch = {"tokens": np.arange(12).reshape(2, 6), "mask": np.array([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]], "float32")}
    state, _ = train(plan, lambda p, b, rng: (jnp.sum(p["w"][b["tokens"]] * b["mask"]), jnp.sum(b["mask"])), [batch])
    np.testing.assert_allclose(state.params["w"], -batch["mask"].ravel() / 6, rtol=1e-6)


@functools.cache
def five_dense_steps():
    return dense(optax.adamw(0.01), mlp(), squared_errors, regression(5))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_c20_stages_agree_with_one_device_however_the_batch_is_split(stage, micro):
    plan = plan_of(mlp, optax.adamw(0.01), stage=stage, micro=micro)
    state, _ = train(plan, squared_errors, regression(5))
    close(state.params, five_dense_steps(), rtol=1e-6, atol=1e-6)


EXPLICIT = [(stage, micro, "sharded") for stage in STAGES for micro in (1, 2, 4)] + [(stage, 4, "local") for stage in (2, 3)]
PAIRS = [(0, 2, "sharded"), (1, 4, "sharded"), (2, 1, "sharded"), (3, 2, "sharded"), (2, 4, "local"), (3, 4, "local")]


@pytest.mark.parametrize(
    ("stage", "micro", "mode"), [pytest.param(*case, marks=[] if case in PAIRS else pytest.mark.full) for case in EXPLICIT]
)
def test_c20_the_explicit_engine_agrees_too(stage, micro, mode):
    plan = plan_of(mlp, optax.adamw(0.01), stage=stage, micro=micro, mode=mode, engine="explicit")
    state, _ = train(plan, squared_errors, regression(5))
    close(state.params, five_dense_steps(), rtol=1e-6, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("degrees", [{"replica": 2}, {"replica": 4}, {"expert": 2}, {"tensor": 2}, {"fsdp": 1, "replica": 8}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:zero.stage")
def test_c20_stages_agree_with_one_device_on_every_mesh(stage, micro, degrees, engine):
    tensor = [rules.tensor_parallel({"w1": 1})]
    plan = plan_of(mlp, optax.adamw(0.01), stage=stage, micro=micro, on=mesh(**degrees), rules=tensor, engine=engine)
    state, _ = train(plan, squared_errors, regression(5))
    close(state.params, five_dense_steps(), rtol=1e-6, atol=1e-6)


def test_c22_the_schedule_counts_optimizer_steps_not_micro_batches():
    """8 micro-batches in steps of 4 read the schedule at 0 and 1: the parameter moves by 0.1 + 0.01."""
    schedule = lambda count: 10.0 ** -(count + 1)  # noqa: E731
    plan = plan_of(lambda key: {"w": jnp.float32(0)}, optax.sgd(schedule), micro=4)
    state, _ = train(plan, weighed, [token_batch([1] * 32, [1] * 32)] * 2)
    counts = [int(x) for name, x in named_leaves(state.opt_state.inner) if name.endswith("count")]
    assert counts == [2]
    np.testing.assert_allclose(state.params["w"], -0.11, rtol=1e-6)


def test_c23_the_plan_echoes_how_many_micro_batches_a_step_has():
    plan = plan_of(mlp, optax.sgd(0.1), micro=16)
    assert plan.accumulation.micro_batches == 16
    assert "16 micro-batches a step" in summary(plan)
    assert summary(plan) in plan.table()


def test_c23_two_that_accumulate_conflict():
    with pytest.raises(ValueError, match=r"MultiSteps.*micro_batches=2"):
        plan_of(mlp, optax.MultiSteps(optax.sgd(0.1), 4), micro=2)
    with pytest.raises(ValueError, match=r"MultiSteps.*micro_batches=2"):
        plan_of(mlp, optax.chain(optax.clip(1.0), optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()), micro=2)


def test_c23_rows_that_micro_batches_do_not_divide_raise_with_every_factor():
    step = zjax.make_train_step(plan_of(mlp, optax.sgd(0.1), micro=3), squared_errors)
    with pytest.raises(ValueError, match=r"32 rows .*fsdp 8.*micro_batches=3: 32 % 24 = 8"):
        step.lower(regression(1)[0])


def three_and_four(params, batch, rng):
    """Gradient 3 in a[0] and 4 in b[7], on different devices where parameters are sharded: a global norm of 5."""
    rows = jnp.float32(batch.shape[0])
    return rows * (3 * params["a"][0] + 4 * params["b"][7]).astype(jnp.float32), rows


def zeros_ab(key):
    return {"a": jnp.zeros(8), "b": jnp.zeros(8)}


@pytest.mark.parametrize(
    ("stage", "compute", "engine"),
    [(stage, compute, "partitioner") for stage in STAGES for compute in ("float32", "bfloat16")]
    + [(1, "float32", "explicit"), (2, "float32", "explicit"), (3, "bfloat16", "explicit")],
)
def test_c25_c28_clipping_scales_the_gradient_and_both_norms_are_told(stage, compute, engine):
    plan = plan_of(zeros_ab, optax.sgd(1.0), stage=stage, compute=compute, engine=engine)
    state, (metrics,) = train(plan, three_and_four, [np.zeros((8, 1), "float32")], clip=1.0)
    updated = state.params if compute == "float32" else state.opt_state.master
    np.testing.assert_allclose(updated["a"], [-0.6] + [0] * 7, atol=1e-6)
    np.testing.assert_allclose(updated["b"], [0] * 7 + [-0.8], atol=1e-6)
    np.testing.assert_allclose([metrics["grad_norm"], metrics["grad_norm_clipped"]], [5, 1], atol=1e-6)


@pytest.mark.parametrize(("stage", "engine"), [(0, "explicit"), (3, "explicit"), (3, "partitioner")])
def test_c33_a_gradient_over_devices_is_neither_summed_again_nor_left_local(stage, engine):
    """w = 3 and rows 0 to 7: the gradient of the sum of w * w * x is 168; 8 times that, or one device's part, is what went wrong."""
    plan = plan_of(lambda key: {"w": jnp.float32(3)}, optax.sgd(1.0), stage=stage, engine=engine)
    state, (metrics,) = train(plan, lambda p, x, rng: (jnp.sum(p["w"] ** 2 * x), jnp.float32(1 / 8) * x.shape[0]), [np.arange(8.0)])
    np.testing.assert_allclose([metrics["loss"], metrics["grad_norm"], 3 - float(state.params["w"])], [9 * 28, 168, 168], rtol=1e-6)


@pytest.mark.parametrize("clip", [None, 6.0])
def test_c28_norms_are_equal_where_nothing_is_clipped(clip):
    _, (metrics,) = train(plan_of(zeros_ab, optax.sgd(1.0)), three_and_four, [np.zeros((8, 1), "float32")], clip=clip)
    np.testing.assert_allclose([metrics["grad_norm"], metrics["grad_norm_clipped"]], [5, 5], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Python iterable type")
def test_c27_a_generator_of_gradients_is_refused_not_exhausted():
    grads = [jnp.array([3.0]), jnp.array([4.0])]
    np.testing.assert_allclose(global_norm(grads), 5)
    with pytest.raises((TypeError, AttributeError)):
        global_norm(g for g in grads)


def test_c27_the_norm_of_half_precision_gradients_does_not_overflow():
    """1024 values of 300 in fp16: their squares are infinite there; the norm is 9600."""
    np.testing.assert_allclose(global_norm({"w": jnp.full(1024, 300, jnp.float16)}), 9600, rtol=1e-6)


# --- overflow and precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "stage", "compute", "micro", "engine"),
    [
        ("inf", 0, "bfloat16", 1, "partitioner"),
        ("nan", 1, "float32", 2, "partitioner"),
        ("nan", 2, "bfloat16", 2, "partitioner"),
        ("inf", 3, "float32", 1, "partitioner"),
        ("nan", 3, "bfloat16", 2, "explicit"),
    ],
)
def test_c34_c35_a_step_whose_gradients_are_not_finite_changes_nothing_and_the_next_goes_on(bad, stage, compute, micro, engine):
    plan = plan_of(mlp, optax.adamw(optax.linear_schedule(0.01, 0.001, 5)), stage=stage, compute=compute, micro=micro, engine=engine)
    first, second = regression(2)
    broken = first | {"x": np.where(np.arange(16) == 3, float(bad), first["x"]).astype("float32")}

    state, step = zjax.init_state(plan, jax.random.key(0)), zjax.make_train_step(plan, squared_errors, clip=1.0)
    state, _ = step(state, first)
    before = bits((state.params, state.opt_state))
    state, metrics = step(state, broken)
    same_bits(bits((state.params, state.opt_state)), before)
    assert (int(state.skipped_steps), int(state.step), float(metrics["step_applied"])) == (1, 2, 0)
    state, metrics = step(state, second)
    assert (int(state.skipped_steps), int(state.step), float(metrics["step_applied"])) == (1, 3, 1)

    never_broken = zjax.init_state(plan, jax.random.key(0))
    for batch in (first, second):
        never_broken, _ = step(never_broken, batch)
    same_bits(bits((state.params, state.opt_state)), bits((never_broken.params, never_broken.opt_state)))


def test_c38_the_master_keeps_updates_that_bf16_would_round_away():
    plan = plan_of(lambda key: {"w": jnp.ones(8)}, optax.sgd(1e-4), compute="bfloat16")
    state, _ = train(plan, lambda p, b, rng: (8 * jnp.sum(p["w"].astype(jnp.float32)), jnp.float32(8)), [np.ones(8, "float32")] * 100)
    np.testing.assert_allclose(state.opt_state.master["w"], np.full(8, 0.99), atol=1e-5)
    assert state.params["w"].dtype == jnp.bfloat16
    same_bits(bits(state.params), bits({"w": state.opt_state.master["w"].astype(jnp.bfloat16)}))


def test_c40_moments_are_float32_whatever_dtype_the_model_computes_in():
    plan = plan_of(lambda key: {"w": jnp.ones(8, jnp.bfloat16)}, optax.adam(1e-3), compute="bfloat16")
    optimizer = zjax.init_state(plan, jax.random.key(0)).opt_state
    assert {x.dtype for x in jax.tree.leaves((optimizer.master, optimizer.inner[0].mu, optimizer.inner[0].nu))} == {jnp.dtype("float32")}


# --- optimizer state, randomness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smallest_factored", [128, 1000], ids=["factored", "not factored"])
def test_c41_adafactor_equals_one_device_and_survives_a_checkpoint(smallest_factored, tmp_path):
    tx = optax.adafactor(0.01, min_dim_size_to_factor=smallest_factored)
    draw = np.random.default_rng(1)
    weights = draw.normal(0, 0.1, (256, 128)).astype("float32")
    batches = [draw.normal(size=(16, 256)).astype("float32") for _ in range(6)]
    init = lambda key: {"w": jnp.asarray(weights)}  # noqa: E731

    def loss_fn(params, x, rng):
        return jnp.sum((x @ params["w"] - 1) ** 2), jnp.float32(x.shape[0])

    plan = plan_of(init, tx)
    state, _ = train(plan, loss_fn, batches[:5])
    close(state.params, dense(tx, init(None), loss_fn, batches[:5]), rtol=1e-5, atol=1e-6)
    factors = {x.shape: x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state.opt_state.inner)}
    expected = {(128,): (16,), (256,): (32,)} if smallest_factored == 128 else {(256, 128): (32, 128)}
    assert expected.items() <= factors.items()

    checkpointer = zjax.Checkpointer(tmp_path)
    checkpointer.save(state)
    checkpointer.wait()
    restored = zjax.Checkpointer(tmp_path).restore(plan)
    checkpointer.close()
    same_bits(bits(restored), bits(state))
    step = zjax.make_train_step(plan, loss_fn)
    same_bits(bits(step(restored, batches[5])[0]), bits(step(state, batches[5])[0]))


@pytest.mark.filterwarnings("ignore:zero.stage")
def test_c55_initial_values_do_not_depend_on_the_mesh():
    def init(key):
        keys = jax.random.split(key, 3)
        return {
            "w": jax.random.normal(keys[0], (496, 4)),
            "odd": jax.random.truncated_normal(keys[1], -2, 2, (17, 3)),
            "mixed": jax.random.uniform(keys[2], (24, 5)),
        }

    states = [bits(zjax.init_state(plan_of(init, optax.sgd(1e-3), on=mesh(n)), jax.random.key(5))) for n in (1, 2, 4, 8)]
    for other in states[1:]:
        same_bits(states[0], other)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.filterwarnings("ignore:zero.stage")
def test_c55_dropout_does_not_depend_on_the_mesh(micro):
    """Row r's gradient lands in row r of the parameter, so that the parameter shows which mask each row drew."""

    def loss_fn(params, batch, rng):
        keep = jax.random.bernoulli(rng, 0.5, (batch.shape[0], 5))
        return jnp.sum(params["w"][batch] * keep), jnp.float32(batch.shape[0])

    drawn = []
    for n in (1, 2, 4, 8):
        plan = plan_of(lambda key: {"w": jnp.zeros((16, 5))}, optax.sgd(16.0), on=mesh(n), micro=micro)
        state, _ = train(plan, loss_fn, [np.arange(16)])
        drawn.append(-np.asarray(state.params["w"]))
    assert set(np.unique(drawn[0])) == {0, 1} and 20 < drawn[0].sum() < 60
    for other in drawn[1:]:
        np.testing.assert_array_equal(drawn[0], other)


def test_c55_dropout_differs_by_step_and_by_micro_batch():
    def loss_fn(params, batch, rng):
        return jnp.sum(params["w"][batch] * jax.random.uniform(rng, batch.shape)), jnp.float32(batch.shape[0])

    plan = plan_of(lambda key: {"w": jnp.zeros((2, 16))[0]}, optax.sgd(1.0), micro=2)
    one, _ = train(plan, loss_fn, [np.arange(16)])
    two, _ = train(plan, loss_fn, [np.arange(16)] * 2)
    first, second = np.asarray(one.params["w"]), np.asarray(two.params["w"]) - np.asarray(one.params["w"])
    assert len(np.unique(first)) == 16
    assert not np.isclose(first, second).all()


@pytest.mark.parametrize("components", [10, 12, 9])
def test_c65_a_count_of_components_that_the_mesh_does_not_divide_raises_or_is_left_for_another_dim(components):
    init = lambda key: {"components": jnp.ones((components, 16))}  # noqa: E731
    with pytest.raises(ValueError, match=rf"components.*\({components}, 16\).*{components} % 8 = {components % 8}"):
        plan_of(init, optax.sgd(0.1), shard_placement=lambda path, shape: 0)
    plan = plan_of(init, optax.sgd(0.1))
    assert zjax.init_state(plan, jax.random.key(0)).params["components"].sharding.shard_shape((components, 16)) == (components, 2)


def test_c65_a_mesh_degree_that_does_not_divide_the_devices_raises_naming_every_factor():
    with pytest.raises(zjax.ConfigError, match=r"replica 3 x fsdp -1 .*on 8 devices: 8 % 3 = 2"):
        zjax.make_mesh(zjax.MeshConfig(replica=3))

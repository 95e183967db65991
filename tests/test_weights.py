"""Weights to and from others: transformers' own files and logits, safetensors, .npz; and what of them is held in memory."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from small import assert_same_state, environment, run_quietly, small_config, write_corpus

from zjax import cli, train
from zjax.checkpoint import Checkpointer, CheckpointError
from zjax.checkpoint.safetensors import INDEX, Spec, Writer, open_tensors
from zjax.checkpoint.weights import import_params, open_weights, own_names
from zjax.config import MeshConfig, PrecisionConfig, ZeroConfig
from zjax.mesh import make_mesh
from zjax.models import huggingface, llama
from zjax.plan import build_plan
from zjax.state import init_state

DATA = Path(__file__).parent / "data"
MODELS = ["llama_gqa", "llama_tied"]
"""Of scripts/make_llama_fixtures.py: grouped queries in float32, tied in bfloat16."""


def functions_of(folder):
    return llama.LlamaFunctions(huggingface.config_of(folder))


def plan_of(folder, compute="float32", stage=3, **degrees):
    model = functions_of(folder)
    mesh = make_mesh(MeshConfig(**(degrees or {"fsdp": 8})))
    return build_plan(
        ZeroConfig(stage=stage), model.init, optax.adamw(1e-3), mesh, precision=PrecisionConfig(compute=compute), units=llama.UNITS
    )


def imported(folder, plan):
    tensors, config = open_weights(folder), huggingface.config_of(folder)
    return import_params(plan, tensors, huggingface.layout(config), str(folder), huggingface.ignored(config, tensors))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the imported models, as `zjax train` would save them: (name, compute) -> step folder."""
    made = {}

    def of(name, compute="float32"):
        if (name, compute) not in made:
            plan = plan_of(DATA / name, compute)
            folder = tmp_path_factory.mktemp(name)
            opened = Checkpointer(folder, chunk_bytes=512)
            sizes = {key: value for key, value in huggingface.config_of(DATA / name).__dict__.items() if key != "attention"}
            opened.save(init_state(plan, jax.random.key(0), imported(DATA / name, plan)), {"model": sizes})
            opened.close()
            made[name, compute] = folder / "0"
        return made[name, compute]

    return of


# --- transformers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("degrees", [{"fsdp": 8}, {"replica": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_imported_weights_give_the_logits_of_transformers(name, degrees):
    plan = plan_of(DATA / name, **degrees)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), imported(DATA / name, plan))
    assert max(len({str(shard.index) for shard in x.addressable_shards}) for x in jax.tree.leaves(params)) == 8 // degrees.get(
        "replica", 1
    ) // degrees.get("tensor", 1)
    with np.load(DATA / name / "logits.npz") as expected:
        found = functions_of(DATA / name).logits(params, jnp.asarray(expected["tokens"]))
        assert np.abs(expected["logits"]).max() > 1
        np.testing.assert_allclose(found, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_what_transformers_itself_wrote(saved, tmp_path, name, capsys):
    """The same tensors bit for bit under the same names, and a config.json with which they mean the same.

    `scripts/make_llama_fixtures.py --check` has transformers compute the logits of an export.
    """
    dtype = {"llama_gqa": "float32", "llama_tied": "bfloat16"}[name]
    assert cli.main(["export", str(saved(name)), str(tmp_path / "out"), f"--dtype={dtype}", "--file-bytes=40000"]) == 0
    ours, theirs = open_tensors(tmp_path / "out"), open_tensors(DATA / name)
    assert ours.keys() == theirs.keys()
    for tensor, x in theirs.items():
        assert (ours[tensor].dtype, ours[tensor].shape) == (x.dtype, x.shape), tensor
        assert ours[tensor].tobytes() == x.tobytes(), tensor
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert all(path.stat().st_size < 45000 for path in (tmp_path / "out").glob("*.safetensors"))
    assert huggingface.config_of(tmp_path / "out") == huggingface.config_of(DATA / name)
    written, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", DATA / name))
    known = {key: value for key, value in original.items() if key in written}
    assert {key: written[key] for key in known} == known
    # What ours leaves out has the same value by default, or changes no logits.
    assert original.keys() - written.keys() <= {
        "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "transformers_version", "use_cache",
    }  # fmt: skip


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_master_weights_are_exported_where_float32_is_asked_for(saved, tmp_path, compute):
    assert cli.main(["export", str(saved("llama_gqa", compute)), str(tmp_path / "wide")]) == 0
    assert cli.main(["export", str(saved("llama_gqa", compute)), str(tmp_path / "narrow"), "--dtype=bfloat16"]) == 0
    theirs, wide, narrow = (open_tensors(folder) for folder in (DATA / "llama_gqa", tmp_path / "wide", tmp_path / "narrow"))
    for tensor, x in theirs.items():
        assert wide[tensor].tobytes() == x.tobytes()
        assert narrow[tensor].tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()


def test_one_export_counts_every_parameter_once(saved, tmp_path):
    """c54. DeepSpeed's consolidated export miscounts tied parameters."""
    for name in MODELS:
        cli.main(["export", str(saved(name)), str(tmp_path / name)])
        model = functions_of(DATA / name)
        elements = sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        assert sum(x.size for x in open_tensors(tmp_path / name).values()) == elements


@pytest.mark.parametrize(
    ("changed", "mentioned"),
    [
        ({"model_type": "mistral"}, ["model_type='mistral'"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"head_dim": 16}, ["head_dim=16"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, ["rope_parameters.rope_type='llama3'"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling='linear'"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"hidden_size": None}, []),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_that_ours_is_not_is_refused(changed, mentioned):
    values = json.loads((DATA / "llama_gqa" / "config.json").read_text()) | changed
    values = {key: value for key, value in values.items() if value is not None}
    with pytest.raises(CheckpointError, match=r"some/config\.json") as error:
        huggingface.from_json(json.dumps(values), "some/config.json")
    for text in mentioned:
        assert text in str(error.value)


def test_a_config_of_transformers_4_means_the_same():
    values = json.loads((DATA / "llama_gqa" / "config.json").read_text())
    rope = values.pop("rope_parameters")
    old = {**values, "rope_theta": rope["rope_theta"], "rope_scaling": None}
    assert huggingface.from_json(json.dumps(old), "old") == huggingface.config_of(DATA / "llama_gqa")


def copied(name, folder, change):
    """The fixture in one file, its tensors changed by a function."""
    tensors = {key: np.array(value) for key, value in open_tensors(DATA / name).items()}
    change(tensors)
    folder.mkdir()
    shutil.copy(DATA / name / "config.json", folder)
    writer = Writer(folder, {key: Spec(x.shape, x.dtype) for key, x in tensors.items()}, file_bytes=10**9, metadata={})
    for key, x in tensors.items():
        writer.put(key, x)
    return folder


@pytest.mark.parametrize(
    ("change", "mentioned"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), ["model.norm.weight: missing"]),
        (lambda tensors: tensors.update(extra=np.zeros(3)), ["extra: not a parameter of this model"]),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": np.zeros((32, 48), np.float32)}),
            ["model.layers.1.mlp.up_proj.weight: [32, 48], the model has [48, 32]"],
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, mentioned):
    folder = copied("llama_gqa", tmp_path / "changed", change)
    with pytest.raises(CheckpointError) as error:
        imported(folder, plan_of(folder))
    for text in mentioned:
        assert text in str(error.value)
    assert len(str(error.value).splitlines()) == 1 + len(mentioned)


def test_what_transformers_does_not_read_is_not_read(tmp_path):
    """Rotary tables in files of old, and a tied model's head."""

    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
        tensors["lm_head.weight"] = np.zeros((96, 32), np.float32)

    plan = plan_of(DATA / "llama_tied")
    ours, theirs = imported(copied("llama_tied", tmp_path / "old", change), plan), imported(DATA / "llama_tied", plan)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# --- zjax's own names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "dtype"), [("safetensors", "float32"), ("safetensors", "bfloat16"), ("npz", "float32")])
@pytest.mark.parametrize("name", MODELS)
def test_own_names_come_back(saved, tmp_path, name, form, dtype):
    """c54: what is exported and imported again is equal."""
    out = tmp_path / f"out.{form}"
    assert cli.main(["export", str(saved(name)), str(out), f"--format={form}", f"--dtype={dtype}"]) == 0
    plan = plan_of(DATA / name, "float32", 1, replica=2, fsdp=4)
    found = import_params(plan, open_weights(out), own_names(plan.params), str(out))
    expected = jax.tree.map(lambda x: x.astype(dtype), imported(DATA / name, plan))
    assert {str(x.dtype) for x in jax.tree.leaves(found)} == {dtype}
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_exports_that_cannot_be_made_are_refused_and_leave_nothing(saved, tmp_path, capsys):
    step = saved("llama_gqa")
    (tmp_path / "there").mkdir()
    copy = Path(shutil.copytree(step.parent, tmp_path / "copy"))
    for data in [path for path in copy.rglob("*") if path.parent.name == "d"]:
        data.write_bytes(bytes(value ^ (i % 97 == 0) for i, value in enumerate(data.read_bytes())))
    for arguments, mentioned in [
        ([step, tmp_path / "there"], "there exists"),
        ([step, tmp_path / "out", "--format=npz", "--dtype=bfloat16"], "--dtype=bfloat16"),
        ([tmp_path / "no", tmp_path / "out"], "no such directory"),
        ([tmp_path / "there", tmp_path / "out"], "no checkpoint in"),
        ([step, tmp_path / "out", "--strange=1"], "unknown option '--strange=1'"),
        ([copy, tmp_path / "out"], "0: "),
    ]:
        assert cli.main(["export", *map(str, arguments)]) == 2
        assert mentioned in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


# --- the format ---------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_safetensors_file(tmp_path):
    """As https://github.com/huggingface/safetensors says, by hand."""
    writer = Writer(
        tmp_path, {"a": Spec((2, 2), np.dtype(np.int16)), "b": Spec((), np.dtype(np.float32))}, file_bytes=99, metadata={"k": "v"}
    )
    writer.put("b", np.float32(1.5).reshape(()))
    writer.put("a", np.array([[1, 2], [3, 4]]).T)
    data = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length]) == {
        "__metadata__": {"k": "v"},
        "a": {"dtype": "I16", "shape": [2, 2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [8, 12]},
    }
    assert data[8 + length :] == struct.pack("<hhhhf", 1, 3, 2, 4, 1.5)
    read = open_tensors(tmp_path)
    np.testing.assert_array_equal(read["a"], [[1, 3], [2, 4]])
    assert read["b"].shape == () and read["b"] == 1.5


@pytest.mark.parametrize("harm", ["not there", "short", "no JSON", "length", "dtype", "index"])
def test_a_file_that_is_none_is_an_error_that_names_it(tmp_path, harm):
    folder = Path(shutil.copytree(DATA / "llama_tied", tmp_path / "copy"))
    path = folder / "model-00001-of-00002.safetensors"
    data = path.read_bytes()
    if harm == "not there":
        path.unlink()
    elif harm == "short":
        path.write_bytes(data[:-8])
    elif harm == "no JSON":
        path.write_bytes(data[:9] + b"x" + data[10:])
    elif harm == "length":
        path.write_bytes(b"\xff" * 8 + data[8:])
    elif harm == "dtype":
        path.write_bytes(data.replace(b'"BF16"', b'"BF17"', 1))
    else:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["strange"] = path.name
        (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=path.name if harm != "index" else "strange"):
        open_weights(folder)


# --- a run from weights -------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_imported_weights(tmp_path, capsys):
    """`zjax import`, then training: step 0 holds the weights, in masters too, and the first loss is theirs."""
    corpus = write_corpus(tmp_path / "corpus.txt", 700)
    # The corpus has bytes for tokens: a vocabulary of 256, embedded by repeating rows.
    folder = copied("llama_tied", tmp_path / "model", lambda tensors: tensors.update(
        {"model.embed_tokens.weight": np.tile(tensors["model.embed_tokens.weight"], (3, 1))[:256]}))  # fmt: skip
    values = json.loads((folder / "config.json").read_text()) | {"vocab_size": 256}
    (folder / "config.json").write_text(json.dumps(values))
    sizes = {"n_layers": 3, "d_model": 32, "n_heads": 2, "n_kv_heads": 2, "d_ff": 48, "max_sequence": 64, "tied": True, "norm_eps": 1e-6}
    config = small_config(corpus, steps=2, model=sizes, precision={"compute": "bfloat16"})
    with pytest.raises(CheckpointError, match=r"model\.norm_eps=1e-06, the config 1e-05: set --config\.model\.norm_eps=1e-06"):
        train.import_weights(small_config(corpus, model={**sizes, "norm_eps": None}), folder, tmp_path / "run")
    train.import_weights(config, folder, tmp_path / "run")
    plan = train.plan_run(config, make_mesh(config.mesh))
    state = Checkpointer(tmp_path / "run" / "checkpoints").restore(plan)
    given = imported(folder, plan)
    assert int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), given))
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.master, jax.tree.map(lambda x: x.astype(jnp.float32), given))
    assert_same_state(state, init_state(plan, jax.random.key(config.seed), given))
    with pytest.raises(CheckpointError, match="has step 0; import into another --workdir"):
        train.import_weights(config, folder, tmp_path / "run")
    result = run_quietly(config, tmp_path / "run")
    assert int(result.state.step) == 2
    assert result.losses[0] > 5.6  # random weights of deviation 0.3 are worse than uniform, ln 256 = 5.55; ours of 0.02 are as good


# --- memory -------------------------------------------------------------------------------------------------------------

MEASURE = """
import re, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from zjax import cli
def held(key): return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
small, large, out = sys.argv[1:]
assert cli.main(["export", small, out + "/small", "--format=safetensors"]) == 0
Path("/proc/self/clear_refs").write_text("5")
before = held("VmRSS")
assert cli.main(["export", large, out + "/large", "--format=safetensors"]) == 0
print(held("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
def test_an_export_holds_at_most_two_of_the_largest_leaf(tmp_path):
    """Of a model of 20 equal leaves."""
    leaf = 32 * 2**20

    def save(name, elements, count):
        def init(key):
            return {f"w{i:02}": jnp.full((elements // 256, 256), i, jnp.float32) for i in range(count)}

        plan = build_plan(
            ZeroConfig(stage=3), init, optax.sgd(1.0), make_mesh(MeshConfig()), precision=PrecisionConfig(compute="float32"), units=()
        )
        opened = Checkpointer(tmp_path / name, chunk_bytes=2**20)
        opened.save(init_state(plan, jax.random.key(0)))
        opened.close()

    save("small", 2**20, 4)  # what the readers' threads keep is not of this export
    save("large", leaf // 4, 20)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), str(tmp_path / "out")]
    (tmp_path / "out").mkdir()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert leaf // 2 < int(done.stdout.split()[-1]) <= 2 * leaf

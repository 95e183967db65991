import dataclasses
import itertools
import json
import math
import threading
from collections import Counter

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from zjax.config import DataConfig
from zjax.data import Batches, Corpus, Rows, load_corpus, prefetch
from zjax.fields import ConfigError


def corpus_of(*documents, vocab_size=256):
    return Corpus(documents=tuple(np.asarray(d, np.uint16) for d in documents), vocab_size=vocab_size, decoder=str)


def counting(length):
    """A corpus in which every token tells its position."""
    return corpus_of(np.arange(length), vocab_size=length)


def load(*paths, **knobs):
    return load_corpus(DataConfig(path=tuple(map(str, paths)), **knobs))


def tokens(corpus):
    return corpus.slice(0, len(corpus)).tolist()


def write_bin(path, ids):
    np.asarray(ids, "<u2").tofile(path)
    return path


def train_tokenizer(path, special_tokens=("<|endoftext|>",), **saved):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a tiny tokenizer for a tiny test"] * 4, trainer)
    if saved.get("limits"):
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return tokenizer


# --- corpus -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 999), max_size=7), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_slices_and_rows_equal_the_concatenated_documents(documents, data):
    corpus = corpus_of(*documents, vocab_size=1000)
    whole = [token for document in documents for token in document]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    part = corpus.slice(start, stop)
    assert part.dtype == np.int32 and part.tolist() == whole[start:stop]
    if len(whole) >= 2:
        length = data.draw(st.integers(1, len(whole) + 3))
        rows = [Rows(corpus, length)[i] for i in range(len(Rows(corpus, length)))]
        kept = [row["mask"] == 1 for row in rows]
        assert np.concatenate([row["inputs"][keep] for row, keep in zip(rows, kept, strict=True)]).tolist() == whole[:-1]
        assert np.concatenate([row["targets"][keep] for row, keep in zip(rows, kept, strict=True)]).tolist() == whole[1:]


def test_slice_outside_the_corpus_raises():
    corpus = corpus_of([1, 2], [3])
    for start, stop in ((-1, 2), (0, 4), (2, 1)):
        with pytest.raises(IndexError, match="corpus of 3"):
            corpus.slice(start, stop)


def test_text_files_in_sorted_order_with_separators(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes("é\r\n".encode())
    (tmp_path / "a.jsonl").write_text('{"text": "x", "n": 1}\n\n{"text": ""}\n{"text": "y\\u2028"}\n')
    (tmp_path / "sub" / "c.txt").write_text("z")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "notes.md").write_text("not read")
    corpus = load(tmp_path)
    assert bytes(tokens(corpus)) == "x\0y\u2028\0é\r\n\0z\0".encode()
    assert corpus.vocab_size == 256 and len(corpus.documents) == 4
    assert corpus.decode(corpus.slice(0, 7)) == "x\0y\u2028\0"
    assert corpus.decode([0xC3, 65, 300]) == "\ufffdA\ufffd"
    assert tokens(load(tmp_path / "sub", tmp_path / "b.txt")) == list("z\0é\r\n\0".encode())


def test_jsonl_text_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "hi", "text": "no"}\n')
    assert bytes(tokens(load(tmp_path / "a.jsonl", text_field="body"))) == b"hi\0"


def test_bin_is_memory_mapped_and_taken_as_it_is(tmp_path):
    corpus = load(write_bin(tmp_path / "a.bin", [5, 50000, 7]), write_bin(tmp_path / "b.bin", [1]), write_bin(tmp_path / "c.bin", []))
    assert all(isinstance(document, np.memmap) for document in corpus.documents)
    assert tokens(corpus) == [5, 50000, 7, 1] and corpus.vocab_size == 50001
    assert corpus.decode(corpus.slice(0, 2)) == "5 50000"


@pytest.mark.parametrize("separator", ["</s>", "<|endoftext|>", "<|end_of_text|>", None])
def test_tokenizer(tmp_path, separator):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", [separator] if separator else [], limits=True)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    (tmp_path / "a.jsonl").write_text('{"text": "a tiny test, é"}\n{"text": "x"}\n')
    corpus = load(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer.json"))
    end = [tokenizer.token_to_id(separator)] if separator else []
    first = tokenizer.encode("a tiny test, é").ids
    assert len(first) > 2 and tokens(corpus) == first + end + tokenizer.encode("x").ids + end
    assert corpus.vocab_size == tokenizer.get_vocab_size()
    assert corpus.decode(first) == "a tiny test, é"


def test_bin_and_text_together_with_their_tokenizer(tmp_path):
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("tiny")
    path = write_bin(tmp_path / "b.bin", [3, 4])
    knobs = {"tokenizer": str(tmp_path / "tokenizer.json")}
    assert tokens(load(path, tmp_path / "a.txt", **knobs)) == [3, 4, *tokenizer.encode("tiny").ids, tokenizer.token_to_id("<|endoftext|>")]
    write_bin(path, [tokenizer.get_vocab_size()])
    with pytest.raises(ConfigError, match=rf"b\.bin has token {tokenizer.get_vocab_size()}, but data\.tokenizer"):
        load(path, **knobs)


def test_vocabulary_with_holes_covers_the_largest_id(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("b")
    corpus = load(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert tokens(corpus) == [9] and corpus.vocab_size == 10


def test_fingerprint_is_a_property_of_the_tokens(tmp_path, monkeypatch):
    ids = np.arange(1, 100)
    reference = corpus_of(ids).fingerprint
    assert len(reference) == 64
    assert corpus_of(ids[:40], ids[40:]).fingerprint == reference
    assert Corpus(documents=(ids.astype(np.int64),), vocab_size=100, decoder=str).fingerprint == reference
    (tmp_path / "a.txt").write_bytes(bytes(ids.tolist()[:-1]))
    assert load(tmp_path / "a.txt").fingerprint == corpus_of([*ids[:-1], 0]).fingerprint
    monkeypatch.setattr("zjax.data.corpus.CHUNK", 7)
    assert corpus_of(ids).fingerprint == reference
    for position in (0, 50, 98):
        changed = ids.copy()
        changed[position] += 1
        assert corpus_of(changed).fingerprint != reference
    assert corpus_of(ids[:-1]).fingerprint != reference


def test_unigram_entropy(monkeypatch):
    assert corpus_of(np.arange(10).repeat(3)).unigram_entropy() == pytest.approx(math.log(10))
    assert corpus_of([4, 4, 4]).unigram_entropy() == 0
    monkeypatch.setattr("zjax.data.corpus.CHUNK", 3)
    assert corpus_of([0, 1], [0, 0]).unigram_entropy() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_stdlib():
    corpus = load_corpus(DataConfig())
    assert 5e6 < len(corpus) < 40e6 and corpus.vocab_size == 256
    assert 2.5 < corpus.unigram_entropy() < 4
    assert "def " in corpus.decode(corpus.slice(0, 20000))


def test_stdlib_without_sources(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("x = 1")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"data\.path='stdlib'.*no sources"):
        load_corpus(DataConfig())
    (tmp_path / "a.py").write_text("y")
    assert bytes(tokens(load_corpus(DataConfig()))) == b"y\0"


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "nowhere", r"data\.path=.*nowhere'.*does not exist"),
        ({"notes.md": b"x"}, "", r"data\.path=.*no file in the directory ends in \.txt, \.jsonl, \.bin"),
        ({"notes.md": b"x"}, "notes.md", r"data\.path=.*notes\.md'.*\.md is not supported"),
        ({"a.txt": b"", "b.bin": b""}, "a.txt", r"data\.path=.*empty.*no token in 1 files"),
        ({"b.bin": b""}, "b.bin", r"data\.path=.*empty"),
        ({"a.txt": b"\xff"}, "a.txt", r"data\.path: .*a\.txt is not utf-8"),
        ({"a.jsonl": b'{"text": "x"}\n[1]\n'}, "a.jsonl", r"data\.path: .*a\.jsonl:2 is not a JSON object but list"),
        ({"a.jsonl": b'{"text": "x"}\n\n{"text"\n'}, "a.jsonl", r"data\.path: .*a\.jsonl:3 is not JSON"),
        ({"a.jsonl": b'{"text": "\xff"}\n'}, "a.jsonl", r"data\.path: .*a\.jsonl:1 is not JSON"),
        ({"a.jsonl": b'{"body": "x"}\n'}, "a.jsonl", r"data\.text_field='text': .*a\.jsonl:1 has no text in it; its fields are body"),
        ({"a.jsonl": b'{"text": 3}\n'}, "a.jsonl", r"data\.text_field='text': .*a\.jsonl:1 has no text"),
        ({"a.jsonl": b'{"text": "\\ud800"}\n'}, "a.jsonl", r"data\.path: .*a\.jsonl:1 is not valid unicode"),
        ({"b.bin": b"abc"}, "b.bin", r"data\.path: .*b\.bin has 3 bytes, an odd number"),
        ({"a.txt": b"x", "b.bin": b"ab"}, "", r"data\.path=.*b\.bin holds tokens and .*a\.txt text.*data\.tokenizer"),
    ],
)
def test_errors_name_the_knob_and_the_file(tmp_path, files, path, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / path)


def test_tokenizer_errors(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*no such file"):
        load(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*not a tokenizer\.json"):
        load(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))


# --- batches ------------------------------------------------------------------------------------------------------------


def first_inputs(batches, steps):
    """The first input of every row of the steps, which tells the row where tokens tell positions."""
    return [int(t) for step in steps for t in batches.rows(step, 0, batches.global_batch)["inputs"][:, 0]]


def test_the_last_row_is_padded_with_zeros_under_the_mask():
    rows = Rows(corpus_of([1, 2, 3], [4, 5, 6, 7]), 4)
    assert len(rows) == 2
    assert {name: value.tolist() for name, value in rows[0].items()} == {
        "inputs": [1, 2, 3, 4],
        "targets": [2, 3, 4, 5],
        "mask": [1, 1, 1, 1],
    }
    assert {name: value.tolist() for name, value in rows[1].items()} == {
        "inputs": [5, 6, 0, 0],
        "targets": [6, 7, 0, 0],
        "mask": [1, 1, 0, 0],
    }
    assert len(Rows(counting(9), 4)) == 2 and len(Rows(counting(10), 4)) == 3


def test_every_token_but_the_first_is_predicted_once_an_epoch():
    corpus = counting(211)
    batches = Batches(corpus, global_batch=7, sequence_length=10, seed=3)
    assert len(batches.source) == 21  # Three steps an epoch.
    for epoch in range(3):
        predicted = Counter()
        for step in range(3 * epoch, 3 * epoch + 3):
            batch = batches.rows(step, 0, 7)
            predicted.update(batch["targets"][batch["mask"] == 1].tolist())
        assert predicted == Counter(range(1, 211))


def test_epochs_follow_without_a_gap_when_a_batch_spans_two():
    batches = Batches(counting(21), global_batch=3, sequence_length=2, seed=0)  # 10 rows: batches span epochs.
    order = first_inputs(batches, range(10))
    epochs = [order[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(0, 20, 2)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_the_seed_and_on_nothing_else():
    def order(seed, corpus=None):
        return first_inputs(Batches(corpus or counting(301), global_batch=10, sequence_length=3, seed=seed), range(25))

    assert order(1) == order(1)
    assert order(1) != order(2)
    # A seed's second epoch is not another seed's first.
    assert order(1)[100:200] != order(2)[:100]
    assert order(1, corpus_of(np.arange(150), np.arange(150, 301), vocab_size=301)) == order(1)
    assert sorted(order(2**40)[:100]) == list(range(0, 300, 3))


def test_position_is_one_integer_whatever_the_global_batch():
    corpus = counting(101)
    small, large = (Batches(corpus, global_batch=n, sequence_length=4, seed=5) for n in (4, 12))
    assert first_inputs(small, range(9)) == first_inputs(large, range(3))


@pytest.mark.parametrize("bounds", [range(13), (0, 6, 12), (0, 1, 11, 12)], ids=str)
def test_any_split_of_a_batch_equals_the_whole(bounds):
    batches = Batches(counting(203), global_batch=12, sequence_length=5, seed=9)
    for step in (0, 3, 1000):  # Step 3 spans two epochs.
        whole = batches.rows(step, 0, 12)
        parts = [batches.rows(step, start, stop) for start, stop in itertools.pairwise(bounds)]
        for name, dtype in (("inputs", np.int32), ("targets", np.int32), ("mask", np.float32)):
            assert whole[name].shape == (12, 5) and whole[name].dtype == dtype
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_batches_errors():
    with pytest.raises(ConfigError, match=r"data\.path: the corpus has 1 tokens"):
        Batches(corpus_of([1]), global_batch=2, sequence_length=4, seed=0)
    batches = Batches(corpus_of([1, 2]), global_batch=2, sequence_length=4, seed=0)
    for step, start, stop in ((-1, 0, 1), (0, 1, 1), (0, -1, 1), (0, 0, 3)):
        with pytest.raises(IndexError, match="batch has 2 rows"):
            batches.rows(step, start, stop)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CountingCorpus(Corpus):
    reads: Counter = dataclasses.field(default_factory=Counter)

    def slice(self, start, stop):
        self.reads[start] += 1
        return super().slice(start, stop)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8,), PartitionSpec("a")),
        ((2, 4), PartitionSpec(("a", "b"))),
        ((4, 2), PartitionSpec("a")),
        ((4, 2), PartitionSpec("b")),
        ((4, 2), PartitionSpec("a", "b")),
        ((8,), PartitionSpec()),
    ],
)
def test_global_batch_equals_rows_and_reads_each_row_once(shape, spec):
    assert jax.device_count() == 8
    mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    sharding = NamedSharding(mesh, spec)
    corpus = CountingCorpus(documents=(np.arange(1001),), vocab_size=1001, decoder=str)
    batches = Batches(corpus, global_batch=16, sequence_length=6, seed=2)
    expected = batches.rows(4, 0, 16)
    corpus.reads.clear()
    batch = batches.at(4, sharding)
    assert len(corpus.reads) == 16 and set(corpus.reads.values()) == {1}
    assert set(batch) == {"inputs", "targets", "mask"}
    for name, value in batch.items():
        assert value.sharding == sharding and value.dtype == expected[name].dtype
        np.testing.assert_array_equal(value, expected[name])


def test_prefetch_yields_the_steps_and_prepares_the_next():
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec("a"))
    batches = Batches(counting(500), global_batch=8, sequence_length=5, seed=1)
    steps = []
    for step, batch in prefetch(batches, sharding, 3, 7):
        steps.append(step)
        np.testing.assert_array_equal(batch["targets"], batches.rows(step, 0, 8)["targets"])
    assert steps == [3, 4, 5, 6]
    assert list(prefetch(batches, sharding, 2, 2)) == []


class FakeBatches:
    """Records which steps were prepared, on which thread; step 2 fails."""

    def __init__(self):
        self.prepared = {}
        self.ahead = threading.Event()

    def at(self, step, sharding):
        self.prepared[step] = threading.current_thread()
        if step == 1:
            self.ahead.set()
        if step == 2:
            raise RuntimeError("disk on fire")
        return {"step": step}


def test_prefetch_runs_one_step_ahead_and_closing_ends_its_thread():
    batches = FakeBatches()
    stream = prefetch(batches, None, 0, 10)
    assert next(stream) == (0, {"step": 0})
    assert batches.ahead.wait(timeout=10)  # While step 0 is in use.
    assert set(batches.prepared) == {0, 1} and threading.main_thread() not in batches.prepared.values()
    stream.close()
    assert not any(thread.is_alive() for thread in batches.prepared.values())


def test_prefetch_raises_where_the_step_would_have_been():
    batches = FakeBatches()
    stream = prefetch(batches, None, 0, 10)
    assert [next(stream)[0], next(stream)[0]] == [0, 1]
    with pytest.raises(RuntimeError, match="disk on fire"):
        next(stream)
    assert not any(thread.is_alive() for thread in batches.prepared.values())

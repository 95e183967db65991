"""The corpus and its batches."""

from zjax.data.batches import DTYPES, Batches, EvalBatches, Rows, prefetch
from zjax.data.corpus import Corpus, hold_out, load_corpus

__all__ = ["DTYPES", "Batches", "Corpus", "EvalBatches", "Rows", "hold_out", "load_corpus", "prefetch"]

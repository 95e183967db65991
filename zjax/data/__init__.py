"""The corpus and its batches."""

from zjax.data.batches import DTYPES, Batches, Rows, prefetch
from zjax.data.corpus import Corpus, load_corpus

__all__ = ["DTYPES", "Batches", "Corpus", "Rows", "load_corpus", "prefetch"]

"""Saving and restoring the train state."""

from zjax.checkpoint.checkpointer import Checkpointer
from zjax.checkpoint.errors import CheckpointError, DamagedError

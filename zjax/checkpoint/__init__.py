"""Saving and restoring the train state."""

from zjax.checkpoint.checkpointer import Checkpointer, CheckpointError

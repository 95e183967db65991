"""What can be wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved, or restored into a plan. The message names the leaves and what differs."""


class DamagedError(CheckpointError):
    """A step whose files are not what was written. The message names the leaves or files."""

"""Configs of DeepSpeed and PyTorch FSDP jobs, read as zjax's."""

from zjax.interop.deepspeed import from_deepspeed
from zjax.interop.fsdp import FSDPConfig, from_fsdp1, from_fsdp2

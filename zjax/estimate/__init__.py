"""Arithmetic on a plan: what a step must move and hold, how long it takes, and which plan to run. Nothing is compiled."""

from zjax.estimate.advice import Advice, Candidate, Question, advise
from zjax.estimate.cluster import Cluster, cluster_of
from zjax.estimate.decoder import Decoder
from zjax.estimate.deepspeed import zero2_model_states, zero3_model_states
from zjax.estimate.hardware import Chip, chip_named
from zjax.estimate.memory import Memory, Work, memory_of
from zjax.estimate.timing import StepTime, step_time, tokens_to_hide
from zjax.estimate.traffic import minimum_wire_bytes, traffic_by_link, traffic_per_step

"""Arithmetic on a plan: what a step must move and hold, without compiling anything."""

from zjax.estimate.traffic import minimum_wire_bytes, traffic_by_link, traffic_per_step

"""DeepSpeed's own memory estimators, to the byte, to compare with (`deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py`).

They know parameter counts and half precision, and nothing of activations, buffers or fragmentation: users have found
them 30 times too low (DeepSpeed issues 4527, 4093). `zjax.estimate.memory_of` counts a plan's own leaves instead.
"""

from __future__ import annotations


def zero2_model_states(
    total_params: int, *, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True, additional_buffer_factor: float = 1.5
) -> tuple[int, int]:
    """`estimate_zero2_model_states_mem_needs`: bytes of a node's CPU memory and of each GPU, (cpu, gpu).

    As in the code since DeepSpeed PR 5099; its documentation still prints figures of the formula before.
    """
    total_gpus = num_gpus_per_node * num_nodes
    if cpu_offload:
        gpu = 2 * total_params
        cpu = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        gpu = 2 * total_params + int(18 * total_params / total_gpus)
        cpu = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(cpu), int(gpu)


def zero3_model_states(
    total_params: int,
    largest_layer_params: int,
    *,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """`estimate_zero3_model_states_mem_needs`: bytes of a node's CPU memory, of each GPU, and of the largest layer.

    `largest_layer_params` is the largest sum of one module's own parameters, its children's left out. `cpu_offload_params`
    counts only with `cpu_offload`, as there.
    """
    total_gpus = num_gpus_per_node * num_nodes
    gpus_factor = 1 / num_nodes
    largest_layer = 4 * largest_layer_params
    factor = additional_buffer_factor
    if cpu_offload and cpu_offload_params:
        gpu, kept = largest_layer, 18
    elif cpu_offload:
        gpu, kept = largest_layer + int(2 * total_params / total_gpus), 16
    else:
        gpu = largest_layer + int(18 * total_params / total_gpus)
        cpu = (largest_layer_params if zero_init else total_params) * 4 * num_gpus_per_node * factor
        return int(cpu), int(gpu), largest_layer
    cpu = total_params * (kept * gpus_factor if zero_init else max(4 * num_gpus_per_node, kept * gpus_factor)) * factor
    return int(cpu), int(gpu), largest_layer

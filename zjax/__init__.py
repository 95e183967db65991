"""zjax: DeepSpeed ZeRO and PyTorch FSDP for JAX."""

from zjax.audit import Audit, AuditError, audit
from zjax.checkpoint import Checkpointer, CheckpointError
from zjax.config import (
    AccumulationConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
)
from zjax.layers import scan_layers
from zjax.mesh import abstract_mesh, make_mesh
from zjax.plan import LeafPlan, Placement, Plan, build_plan, bytes_per_device
from zjax.state import TrainState, init_state
from zjax.step import TrainStep, batch_sharding, make_train_step, mean_loss
from zjax.units import fully_shard

"""zjax: DeepSpeed ZeRO and PyTorch FSDP for JAX."""

from zjax import distributed, interop
from zjax.audit import Audit, AuditError, audit
from zjax.checkpoint import Checkpointer, CheckpointError
from zjax.config import (
    AccumulationConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LossScaleConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
    Unit,
    ZeroConfig,
)
from zjax.describe import bytes_per_device
from zjax.evaluate import EvalStep, evaluate, make_eval_step
from zjax.fields import ConfigError
from zjax.flags import xla_flags
from zjax.gradients import mean_loss
from zjax.guard import NonFiniteError, NonFiniteGuard
from zjax.layers import scan_layers
from zjax.mesh import abstract_mesh, make_mesh
from zjax.optimizer_config import OptimizerConfig, ParamGroup
from zjax.plan import LeafPlan, Placement, Plan, build_plan
from zjax.remat import offload_names, save_names
from zjax.rows import global_mean, row_keys
from zjax.state import TrainState, init_state
from zjax.step import TrainStep, batch_sharding, make_train_step
from zjax.units import fully_shard, wrap_by_size

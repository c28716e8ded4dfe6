"""Scheduler: assigns requests to instances, and merges and splits instances. See docs/scheduling.md.

This package uses no JAX, so that the same policies run on devices and in simulations.
"""

from serving.scheduler import estimates
from serving.scheduler.actions import (
    Action,
    Dispatch,
    Evict,
    LimitBatch,
    Migrate,
    Modules,
    Offload,
    PlacementChange,
    Preempt,
    Reject,
    RejectKind,
    Replicate,
    RunningRequests,
    ScaleDown,
    ScaleIn,
    ScaleOut,
    ScaleUp,
    invalid,
)
from serving.scheduler.admission import Admission
from serving.scheduler.amoeba import AmoebaPolicy
from serving.scheduler.amoeba_config import AmoebaConfig
from serving.scheduler.backoff import BackoffConfig
from serving.scheduler.baselines.amoeba_paper import AmoebaPaperPolicy, PaperConfig
from serving.scheduler.baselines.least_load_first import LeastLoadFirstPolicy
from serving.scheduler.baselines.round_robin import RoundRobinPolicy
from serving.scheduler.cocoserve.config import CocoServeConfig
from serving.scheduler.cocoserve.policy import CocoServePolicy
from serving.scheduler.executor import Executor, Outcome
from serving.scheduler.flying import FlyingPolicy
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.policies import POLICY_NAMES, UnknownPolicyError, is_policy_file, load_policy, make_policy
from serving.scheduler.policy import Policy
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.scheduler import Decision, Record, Scheduler, SchedulerCounters
from serving.scheduler.split_rule import SplitConfig, SplitRule
from serving.scheduler.static import StaticPolicy
from serving.scheduler.timing import Throughput, Timing
from serving.scheduler.view import (
    ClusterView,
    DegreeLimits,
    DeviceView,
    InstanceView,
    LayerSizes,
    PlacementView,
    RunningRequest,
    WaitingRequest,
)

__all__ = [
    "POLICY_NAMES",
    "Action",
    "Admission",
    "AmoebaConfig",
    "AmoebaPaperPolicy",
    "AmoebaPolicy",
    "BackoffConfig",
    "ClusterView",
    "CocoServeConfig",
    "CocoServePolicy",
    "Decision",
    "DegreeLimits",
    "DeviceView",
    "Dispatch",
    "Evict",
    "Executor",
    "FlyingConfig",
    "FlyingPolicy",
    "InstanceView",
    "LayerSizes",
    "LeastLoadFirstPolicy",
    "LimitBatch",
    "Migrate",
    "Modules",
    "Offload",
    "Outcome",
    "PaperConfig",
    "PlacementChange",
    "PlacementView",
    "Policy",
    "Preempt",
    "QueueOrder",
    "Record",
    "Reject",
    "RejectKind",
    "Replicate",
    "RoundRobinPolicy",
    "RunningRequest",
    "RunningRequests",
    "ScaleDown",
    "ScaleIn",
    "ScaleOut",
    "ScaleUp",
    "Scheduler",
    "SchedulerCounters",
    "SplitConfig",
    "SplitRule",
    "StaticPolicy",
    "Throughput",
    "Timing",
    "UnknownPolicyError",
    "WaitingRequest",
    "estimates",
    "invalid",
    "is_policy_file",
    "load_policy",
    "make_policy",
]

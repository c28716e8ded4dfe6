"""Scheduler: placement of requests, and merges and splits of instances. It does not use JAX, so the same policies run
on devices and in simulations. See docs/scheduling.md."""

from serving.scheduler import estimates
from serving.scheduler.actions import (
    Action,
    Dispatch,
    Preempt,
    Reject,
    RejectKind,
    RunningRequests,
    ScaleDown,
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
from serving.scheduler.executor import Executor, Outcome
from serving.scheduler.flying import FlyingPolicy
from serving.scheduler.flying_config import FlyingConfig
from serving.scheduler.policies import POLICY_NAMES, UnknownPolicyError, make_policy
from serving.scheduler.policy import Policy
from serving.scheduler.queue_order import QueueOrder
from serving.scheduler.scheduler import Decision, Scheduler, SchedulerCounters
from serving.scheduler.split_rule import SplitConfig, SplitRule
from serving.scheduler.static import StaticPolicy
from serving.scheduler.timing import Throughput, Timing
from serving.scheduler.view import ClusterView, DegreeLimits, InstanceView, RunningRequest, WaitingRequest

__all__ = [
    "POLICY_NAMES",
    "Action",
    "Admission",
    "AmoebaConfig",
    "AmoebaPaperPolicy",
    "AmoebaPolicy",
    "BackoffConfig",
    "ClusterView",
    "Decision",
    "DegreeLimits",
    "Dispatch",
    "Executor",
    "FlyingConfig",
    "FlyingPolicy",
    "InstanceView",
    "LeastLoadFirstPolicy",
    "Outcome",
    "PaperConfig",
    "Policy",
    "Preempt",
    "QueueOrder",
    "Reject",
    "RejectKind",
    "RoundRobinPolicy",
    "RunningRequest",
    "RunningRequests",
    "ScaleDown",
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
    "make_policy",
]

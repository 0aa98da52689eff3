"""MoE layers for training and inference, written with the DSL."""

from tileweave.moe.config import ExpertWeights, MoEConfig, random_weights
from tileweave.moe.gpu_layer import GpuMoELayer
from tileweave.moe.layer import MoELayer
from tileweave.moe.router import Router
from tileweave.moe.routing import Placement, plan_all, plan_routing, plan_specs

__all__ = [
    "ExpertWeights",
    "GpuMoELayer",
    "MoEConfig",
    "MoELayer",
    "Placement",
    "Router",
    "plan_all",
    "plan_routing",
    "plan_specs",
    "random_weights",
]

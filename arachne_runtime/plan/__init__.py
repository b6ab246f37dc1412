"""The nouns of both halves (Cluster, ModelSpec, Profile, Plan, Schedule) and their arithmetic; no torch."""

from .cluster import Cluster, Network, NetworkPair, Node, NodeEntry
from .document import Document
from .files import digest, encode, read_cluster, read_model, read_plan, read_profile, write
from .model import BlockSpec, ModelSpec, ParameterBytes
from .plan import MadeBy, Pipeline, Plan, Predicted, Replica, ScheduleKind, Stage
from .profile import (
    BlockTiming,
    Cost,
    LinkPoint,
    LinkScope,
    LinkTiming,
    Profile,
    Source,
    StepTiming,
    TpCommunication,
    UpdateTiming,
)
from .records import Record, RecordKind
from .rules import check_cluster, check_model, check_plan, check_profile
from .schedule import Action, Work
from .shares import Line, largest_remainder, water_fill, water_fill_table
from .text import describe

__all__ = [
    "Action",
    "BlockSpec",
    "BlockTiming",
    "Cluster",
    "Cost",
    "Document",
    "Line",
    "LinkPoint",
    "LinkScope",
    "LinkTiming",
    "MadeBy",
    "ModelSpec",
    "Network",
    "NetworkPair",
    "Node",
    "NodeEntry",
    "ParameterBytes",
    "Pipeline",
    "Plan",
    "Predicted",
    "Profile",
    "Record",
    "RecordKind",
    "Replica",
    "ScheduleKind",
    "Source",
    "Stage",
    "StepTiming",
    "TpCommunication",
    "UpdateTiming",
    "Work",
    "check_cluster",
    "check_model",
    "check_plan",
    "check_profile",
    "describe",
    "digest",
    "encode",
    "largest_remainder",
    "read_cluster",
    "read_model",
    "read_plan",
    "read_profile",
    "water_fill",
    "water_fill_table",
    "write",
]

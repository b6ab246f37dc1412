"""For each rule of a document, changes of a valid one that break this rule and no other."""

from collections.abc import Callable
from typing import Any

from arachne_runtime.plan.rules import cluster as cluster_rules
from arachne_runtime.plan.rules import model as model_rules
from arachne_runtime.plan.rules import plan as plan_rules
from arachne_runtime.plan.rules import plan_fit as fit_rules
from arachne_runtime.plan.rules import profile as profile_rules
from tests.documents import REMOVED

Rule = Callable[..., Any]
Case = tuple[Rule, dict[str, Any], str, str]
"""The rule, changes by address, the address of the problem, words of its message."""

P, C, M, F, FIT = plan_rules, cluster_rules, model_rules, profile_rules, fit_rules
STAGE = "pipelines[0].stages[0]"

PLAN_CASES: list[Case] = [
    (P.has_pipelines, {"pipelines": [], "predicted": REMOVED}, "$.pipelines", "has no pipeline"),
    (P.pipelines_have_stages, {"pipelines[1].stages": []}, "$.pipelines[1].stages", "has no stage"),
    (
        P.stages_have_replicas,
        {"pipelines[1].stages[0].replicas": []},
        "$.pipelines[1].stages[0].replicas",
        "replica",
    ),
    (
        P.replicas_have_devices,
        {"pipelines[1].stages[0].replicas[0].devices": []},
        "$.pipelines[1].stages[0].replicas[0].devices",
        "has no device",
    ),
    (P.model_is_named, {"model": " "}, "$.model", "is empty"),
    (P.counts_are_positive, {"sequence": 0}, "$.sequence", "must be at least 1, is 0"),
    (P.counts_are_positive, {"global_batch": -32}, "$.global_batch", "is -32"),
    (P.counts_are_positive, {"pipelines[1].micro_batches": 0}, "$.pipelines[1].micro_batches", "is 0"),
    (P.counts_are_positive, {"pipelines[1].micro_batch": 0}, "$.pipelines[1].micro_batch", "is 0"),
    (
        P.micro_batches_can_be_listed,
        {"global_batch": 6 * 10**12 + 8, "pipelines[0].micro_batches": 10**12},
        "$.pipelines",
        "hold 1000000000002 micro-batches; at most 65536 are supported",
    ),
    (
        P.stages_hold_a_block,
        {f"{STAGE}.layers": [0, 0], "pipelines[0].stages[1].layers": [0, 5]},
        "$.pipelines[0].stages[0].layers",
        "holds no block: [0, 0]",
    ),
    (
        P.first_stages_start_at_block_0,
        {"pipelines[1].stages[0].layers": [1, 5]},
        "$.pipelines[1].stages[0].layers",
        "starts at block 1",
    ),
    (
        P.stages_are_contiguous,
        {"pipelines[0].stages[1].layers": [3, 5]},
        "$.pipelines[0].stages[1].layers",
        "starts at block 3, but the previous stage stops at 2",
    ),
    (
        P.stages_are_contiguous,
        {"pipelines[0].stages[1].layers": [1, 5]},
        "$.pipelines[0].stages[1].layers",
        "starts at block 1, but the previous stage stops at 2",
    ),
    (
        P.pipelines_stop_at_the_same_block,
        {"pipelines[1].stages[0].layers": [0, 4]},
        "$.pipelines[1].stages[0].layers",
        "stops at block 4, but pipeline 0 stops at 5",
    ),
    (
        P.shares_are_positive,
        {f"{STAGE}.replicas[0].share": 6, f"{STAGE}.replicas[1].share": 0},
        "$.pipelines[0].stages[0].replicas[1].share",
        "must be at least 1, is 0",
    ),
    (
        P.shares_add_up,
        {f"{STAGE}.replicas[0].share": 3},
        "$.pipelines[0].stages[0].replicas",
        "shares add up to 5, but micro_batch is 6",
    ),
    (
        P.micro_batches_add_up,
        {"global_batch": 33},
        "$.global_batch",
        "is 33, but the micro-batches hold 4 x 6 + 2 x 4 = 32 samples",
    ),
    (
        P.devices_are_well_named,
        {"pipelines[1].stages[0].replicas[0].devices[1]": "v-1"},
        "$.pipelines[1].stages[0].replicas[0].devices[1]",
        "'v-1' is no device",
    ),
    (
        P.devices_are_used_once,
        {f"{STAGE}.replicas[1].devices[0]": "v-0:0"},
        "$.pipelines[0].stages[0].replicas[1].devices[0]",
        "v-0:0 is already in pipeline 0, stage 0",
    ),
    (
        P.devices_are_used_once,
        {f"{STAGE}.replicas[1].devices[0]": "a:0"},
        "$.pipelines[0].stages[1].replicas[0].devices[0]",
        "a:0 is already in pipeline 0, stage 0",
    ),
    (
        P.devices_are_used_once,
        {"schedule": "interleaved_1f1b", "pipelines[1].stages[0].replicas[0].devices": ["v-0:1", "v-0:2"]},
        "$.pipelines[1].stages[0].replicas[0].devices[0]",
        "v-0:1 is already in pipeline 0, stage 0",
    ),
    (
        P.devices_are_used_once,
        {"schedule": "interleaved_1f1b", f"{STAGE}.replicas[1].devices[0]": "v-0:0"},
        "$.pipelines[0].stages[0].replicas[1].devices[0]",
        "v-0:0 is already in pipeline 0, stage 0",
    ),
    (
        P.interleaved_stages_take_turns,
        {
            "schedule": "interleaved_1f1b",
            "pipelines[0].stages[1].replicas[0].devices": ["v-0:1"],
            "predicted": REMOVED,
        },
        "$.pipelines[0].stages[1].replicas",
        "has some devices of stage 0, not all",
    ),
    (
        P.interleaved_stages_take_turns,
        {
            "schedule": "interleaved_1f1b",
            "pipelines[0].stages[1].replicas": [
                {"devices": ["v-0:0"], "share": 2},
                {"devices": ["v-0:1"], "share": 4},
            ],
            "predicted": REMOVED,
        },
        "$.pipelines[0].stages[1].replicas",
        "must be those of stage 0: 1 sets of devices take turns",
    ),
    (
        P.interleaved_stages_take_turns,
        {
            "schedule": "interleaved_1f1b",
            "pipelines[1].stages": [
                {"layers": [0, 2], "replicas": [{"devices": ["v-1:0"], "share": 4}]},
                {"layers": [2, 3], "replicas": [{"devices": ["v-1:1"], "share": 4}]},
                {"layers": [3, 5], "replicas": [{"devices": ["v-1:0"], "share": 4}]},
            ],
        },
        "$.pipelines[1].stages",
        "3 stages do not divide among 2 sets of devices",
    ),
    (
        P.tensor_groups_stay_in_a_node,
        {"pipelines[1].stages[0].replicas[0].devices[1]": "v-2:1"},
        "$.pipelines[1].stages[0].replicas[0]",
        "devices v-1:0 and v-2:1 are in different nodes",
    ),
    (P.zero_is_0_to_3, {f"{STAGE}.zero": 4}, "$.pipelines[0].stages[0].zero", "must be 0, 1, 2 or 3, is 4"),
    (
        P.expert_degrees_are_positive,
        {f"{STAGE}.expert_tensor": 0},
        "$.pipelines[0].stages[0].expert_tensor",
        "must be at least 1, is 0",
    ),
    (
        P.expert_degrees_divide_the_stage,
        {f"{STAGE}.expert_parallel": 4},
        "$.pipelines[0].stages[0].expert_parallel",
        "expert_parallel x expert_tensor = 4 does not divide the stage's 2 devices",
    ),
    (
        P.expert_tensor_groups_stay_in_a_node,
        {f"{STAGE}.expert_tensor": 2, f"{STAGE}.replicas[1].devices[0]": "w:1"},
        "$.pipelines[0].stages[0].expert_tensor",
        "puts devices v-0:0 and w:1 of different nodes in one group",
    ),
    (P.prediction_is_positive, {"predicted.iteration_s": 0.0}, "$.predicted.iteration_s", "must be above 0"),
    (P.prediction_is_positive, {"predicted.samples_per_s": -1.0}, "$.predicted.samples_per_s", "above 0"),
    (
        P.prediction_is_positive,
        {'predicted.peak_bytes["a:0"]': -1},
        '$.predicted.peak_bytes["a:0"]',
        "must not be negative",
    ),
    (
        P.predicted_devices_are_in_the_plan,
        {'predicted.peak_bytes["a:9"]': 1},
        '$.predicted.peak_bytes["a:9"]',
        "the plan does not use a:9",
    ),
]
PLAN_CLUSTER_CASES: list[Case] = [
    (
        FIT.devices_are_in_the_cluster,
        {f"{STAGE}.replicas[1].devices[0]": "w:0"},
        "$.pipelines[0].stages[0].replicas[1].devices[0]",
        "the cluster has no node 'w'; its nodes: a, v-0, v-1",
    ),
    (
        FIT.devices_are_in_the_cluster,
        {f"{STAGE}.replicas[1].devices[0]": "v-0:2"},
        "$.pipelines[0].stages[0].replicas[1].devices[0]",
        "node v-0 has 2 devices, so no index 2",
    ),
]
PLAN_MODEL_CASES: list[Case] = [
    (
        FIT.model_is_the_one_planned_for,
        {"model": "tinny"},
        "$.model",
        "is 'tinny', but the model is called 'tiny'",
    ),
    (FIT.sequence_is_the_models, {"sequence": 17}, "$.sequence", "is 17, but the model is measured for 16"),
    (
        FIT.pipelines_cover_the_model,
        {"pipelines[1].stages[0].layers": [0, 6]},
        "$.pipelines[1].stages[0].layers",
        "stops at block 6, but the model has 5 blocks",
    ),
    (
        FIT.experts_exist,
        {f"{STAGE}.layers": [0, 1], "pipelines[0].stages[1].layers": [1, 5], f"{STAGE}.expert_parallel": 2},
        "$.pipelines[0].stages[0].expert_parallel",
        "blocks 0 to 0 have no experts",
    ),
    (
        FIT.experts_exist,
        {
            f"{STAGE}.expert_parallel": 8,
            f"{STAGE}.replicas[0].devices": [f"v-0:{i}" for i in (0, *range(2, 9))],
            f"{STAGE}.replicas[1].devices": [f"v-9:{i}" for i in range(8)],
        },
        "$.pipelines[0].stages[0].expert_parallel",
        "is 8, but a block of the stage has 4 experts",
    ),
]
CLUSTER_CASES: list[Case] = [
    (C.has_nodes, {"node": [], "network.pair": []}, "$.node", "has no [[node]]"),
    (
        C.names_are_plain,
        {"node[2]": {"name": "b:1", "device": "x", "gpus": 1}},
        "$.node[2].name",
        "'b:1' must be",
    ),
    (C.names_are_plain, {"node[0].zone": ""}, "$.node[0].zone", "'' must be a name"),
    (C.device_types_are_named, {"node[1].device": ""}, "$.node[1].device", "is empty"),
    (C.counts_are_positive, {"node[1].gpus": 0}, "$.node[1].gpus", "must be at least 1, is 0"),
    (C.counts_are_positive, {"node[1].count": -1}, "$.node[1].count", "must be at least 1, is -1"),
    (C.devices_can_be_listed, {"node[1].count": 10**15}, "$.node", "devices; at most"),
    (
        C.entry_names_are_unique,
        {"node[2]": {"name": "v", "device": "x", "gpus": 1, "count": 3}},
        "$.node[2].name",
        "'v' is already the name of $.node[1]",
    ),
    (
        C.node_names_are_unique,
        {"node[2]": {"name": "v-0", "device": "x", "gpus": 1}},
        "$.node",
        "[[node]] 'v' and [[node]] 'v-0' both make a node 'v-0'",
    ),
    (C.zones_are_not_nodes, {"node[1].zone": "a"}, "$.node[1].zone", "'a' is also the name of a node"),
    (C.zones_are_not_nodes, {"node[0].zone": "v-1"}, "$.node[0].zone", "'v-1' is also the name of a node"),
    (C.bandwidths_are_positive, {"network.inter_GBps": 0}, "$.network.inter_GBps", "must be above 0"),
    (C.bandwidths_are_positive, {"node[0].intra_GBps": -1}, "$.node[0].intra_GBps", "above 0"),
    (C.bandwidths_are_positive, {"network.pair[1].inter_GBps": 0}, "$.network.pair[1].inter_GBps", "above 0"),
    (C.memory_is_positive, {"node[0].memory_GiB": 0}, "$.node[0].memory_GiB", "must be above 0"),
    (C.latencies_and_prices_are_not_negative, {"network.latency_us": -1}, "$.network.latency_us", "negative"),
    (
        C.latencies_and_prices_are_not_negative,
        {"node[1].price_per_hour": -1},
        "$.node[1].price_per_hour",
        "must not be negative",
    ),
    (
        C.latencies_and_prices_are_not_negative,
        {"network.pair[0].price_per_GB": -1},
        "$.network.pair[0].price_per_GB",
        "must not be negative",
    ),
    (C.currency_is_a_code, {"currency": "euros"}, "$.currency", "'euros' must be three capital letters"),
    (
        C.pairs_name_what_exists,
        {"network.pair[0].between[1]": "w"},
        "$.network.pair[0].between[1]",
        "there is no node, [[node]] or zone 'w'",
    ),
    (
        C.pairs_join_two_nodes,
        {"network.pair[0].between": ["v-1", "v-1"]},
        "$.network.pair[0].between",
        "joins 'v-1' with itself",
    ),
    (
        C.pairs_are_given_once,
        {"network.pair[1].between": ["v", "a"]},
        "$.network.pair[1].between",
        "is already given by $.network.pair[0]",
    ),
]
MODEL_CASES: list[Case] = [
    (M.is_named, {"name": ""}, "$.name", "is empty"),
    (M.has_blocks, {"blocks": []}, "$.blocks", "has no block"),
    (M.sequence_is_positive, {"sequence": 0}, "$.sequence", "must be at least 1, is 0"),
    (M.dtype_is_known, {"dtype": "int8"}, "$.dtype", "'int8' is not allowed; allowed: float64"),
    (M.kinds_are_named, {"blocks[0].kind": ""}, "$.blocks[0].kind", "is empty"),
    (M.sizes_are_not_negative, {"blocks[2].activation_bytes": -1}, "$.blocks[2].activation_bytes", "is -1"),
    (M.sizes_are_not_negative, {"blocks[0].flops": -1.0}, "$.blocks[0].flops", "must not be negative"),
    (
        M.bytes_per_parameter_can_be,
        {"bytes_per_parameter.weight": 0},
        "$.bytes_per_parameter.weight",
        "at least 1",
    ),
    (
        M.bytes_per_parameter_can_be,
        {"bytes_per_parameter.optimizer": -1},
        "$.bytes_per_parameter.optimizer",
        "must be at least 0, is -1",
    ),
    (
        M.kinds_are_alike,
        {"blocks[2].parameters": 51},
        "$.blocks[2].parameters",
        "is 51, but block 1, of the same kind 'layer', has 50",
    ),
    (M.sizes_are_not_negative, {"blocks[0].tp_collectives": -1}, "$.blocks[0].tp_collectives", "is -1"),
    (
        M.kinds_are_alike,
        {"blocks[2].expert_flops": 1.0},
        "$.blocks[2].expert_flops",
        "is 1.0, but block 1, of the same kind 'layer', has 500.0",
    ),
    (
        M.experts_are_part_of_the_block,
        {"blocks[0].expert_parameters": 1},
        "$.blocks[0].expert_parameters",
        "is 1, but the block has no experts",
    ),
    (
        M.experts_are_part_of_the_block,
        {"blocks[4].experts": 4, "blocks[4].experts_per_token": 5},
        "$.blocks[4].experts_per_token",
        "is 5, but experts is 4",
    ),
    (
        M.ties_point_at_an_earlier_block,
        {"blocks[4].tied_to": 4},
        "$.blocks[4].tied_to",
        "is 4, which is no block",
    ),
    (M.ties_point_at_an_earlier_block, {"blocks[4].tied_to": -1}, "$.blocks[4].tied_to", "is -1"),
    (M.ties_share_parameters, {"blocks[4].tied_to": None}, "$.blocks[4].tied_parameters", "names no block"),
    (M.ties_share_parameters, {"blocks[4].tied_parameters": 0}, "$.blocks[4].tied_parameters", "is 0, but"),
    (
        M.tied_parameters_fit,
        {"blocks[4].tied_parameters": 105},
        "$.blocks[4].tied_parameters",
        "is 105, but block 0 has 100 parameters",
    ),
]
PROFILE_CASES: list[Case] = [
    (F.model_is_named, {"model": ""}, "$.model", "is empty"),
    (F.has_timings, {"timings": []}, "$.timings", "has no timing"),
    (F.kinds_and_devices_are_named, {"timings[0].kind": ""}, "$.timings[0].kind", "is empty"),
    (F.kinds_and_devices_are_named, {"updates[1].device": ""}, "$.updates[1].device", "is empty"),
    (F.kinds_and_devices_are_named, {"links[0].between[1]": ""}, "$.links[0].between[1]", "is empty"),
    (F.kinds_and_devices_are_named, {"steps[0].device": " "}, "$.steps[0].device", "is empty"),
    (F.fixed_costs_are_not_negative, {"steps[0].step_s": -1.0}, "$.steps[0].step_s", "must not be negative"),
    (F.nothing_is_measured_twice, {"steps[1].device": "A100-40"}, "$.steps[1]", "the same as $.steps[0]"),
    (F.counts_are_positive, {"timings[0].samples": 0}, "$.timings[0].samples", "must be at least 1, is 0"),
    (F.counts_are_positive, {"timings[0].tp": 0}, "$.timings[0].tp", "must be at least 1"),
    (F.counts_are_positive, {"updates[0].tp": 0}, "$.updates[0].tp", "must be at least 1"),
    (F.counts_are_positive, {"links[0].senders": 0}, "$.links[0].senders", "must be at least 1"),
    (F.counts_are_positive, {"sequence": 0}, "$.sequence", "must be at least 1"),
    (
        F.times_are_positive,
        {"timings[1].forward_s": 0.0},
        "$.timings[1].forward_s",
        "must be above 0, is 0.0",
    ),
    (F.times_are_positive, {"timings[1].backward_s": -1}, "$.timings[1].backward_s", "must be above 0"),
    (F.times_are_positive, {"links[0].points[1].seconds": 0}, "$.links[0].points[1].seconds", "above 0"),
    (F.fixed_costs_are_not_negative, {"step_s": -1}, "$.step_s", "must not be negative"),
    (F.fixed_costs_are_not_negative, {"updates[0].update_s": -1}, "$.updates[0].update_s", "negative"),
    (
        F.fixed_costs_are_not_negative,
        {"timings[1].activation_bytes": -1},
        "$.timings[1].activation_bytes",
        "neg",
    ),
    (
        F.fixed_costs_are_not_negative,
        {"links[0].points[0].bytes": -1},
        "$.links[0].points[0].bytes",
        "negative",
    ),
    (F.links_have_ascending_points, {"links[0].points": []}, "$.links[0].points", "has no point"),
    (
        F.links_have_ascending_points,
        {"links[0].points[1].bytes": 0},
        "$.links[0].points[1].bytes",
        "is 0, but the point before has 0",
    ),
    (F.nothing_is_measured_twice, {"timings[1].tp": 1}, "$.timings[1]", "measures the same as $.timings[0]"),
    (F.nothing_is_measured_twice, {"updates[1].tp": 1}, "$.updates[1]", "measures the same as $.updates[0]"),
    (
        F.nothing_is_measured_twice,
        {"links[1].between": ["V100-16", "A100-40"], "links[1].scope": "inter"},
        "$.links[1]",
        "measures the same as $.links[0]",
    ),
]

"""Plans for other frameworks; the last tests load them in the real libraries, where these are."""

import importlib
import json
import os
from dataclasses import replace

import pytest
from plans import make_plan
from processes import free_port, run_processes
from profiled import MACHINE, leaving, profile_of

from pipedream.graph.command import write_files
from pipedream.graph.errors import UserError
from pipedream.graph.placements.requests import PlacementTexts
from pipedream.graph.profile import read_profile_of, write_profile
from pipedream.optimizer.export.frameworks import export

# A transformer: embedding, three layers of two modules, norm and head. One letter is one node.
GPT = {
    "i": "",
    "e": "embed",
    "p": "layers.0.attention",
    "q": "layers.0.mlp",
    "r": "layers.1.attention",
    "s": "layers.1.mlp",
    "t": "layers.2.attention",
    "u": "layers.2.mlp",
    "n": "norm",
    "h": "head",
}
CHAIN = "i-e e-p p-q q-r r-s s-t t-u u-n n-h"

NO_ORDER = (
    "without an order of passes: torch updates all stages after a flush; this schedule is"
    " weight-stashing"
)


@pytest.fixture
def exported(make_graph, tmp_path):
    """exported(framework, modules, edges, stages): the export of a plan with these stages."""

    def make(
        framework,
        modules,
        edges,
        stages,
        replicas=None,
        parameters=None,
        flush=None,
        mesh=None,
        placed=None,
        **costs,
    ):
        graph = make_graph(" ".join(modules), edges, **costs)
        inputs = {"i"} & set(modules)
        graph = graph.with_nodes(make_graph_input(graph.nodes[name]) for name in inputs)
        nodes = {
            name: {
                "module": path,
                "parameters": tuple((parameters or {}).get(name, ())),
                "outputs": leaving(f"{name}_out"),
            }
            for name, path in modules.items()
        }
        machine = MACHINE.model_copy(update={"torch": "2.13.0"})
        path = tmp_path / "profile.json"
        write_profile(profile_of(graph, nodes, model="m", machine=machine), path)
        plan = make_plan(graph, stages.split(), replicas or [1] * len(stages.split()))
        compute = {name: node.compute_seconds for name, node in graph.nodes.items()}
        texts = None if mesh is None else PlacementTexts(parameters=placed)
        changed = {} if mesh is None else {"mesh": mesh, "placements": texts}
        held = tuple(
            stage.model_copy(
                update={"compute_seconds": sum(compute[n] for n in stage.nodes), **changed}
            )
            for stage in plan.stages
        )
        held_plan = plan.model_copy(update={"stages": held})
        if flush:
            predicted = plan.predicted.model_copy(update={"microbatches": flush})
            changes = {"schedule": "flush", "order": "zb-h1", "predicted": predicted}
            held_plan = held_plan.model_copy(update=changes)
        return export(framework, held_plan, graph, read_profile_of(path, graph))

    def make_graph_input(node):
        return replace(node, description="Input0", forward_seconds=0.0)

    return make


def test_torch_names_the_operators_of_each_stage(exported, tmp_path):
    made = exported("torch", GPT, CHAIN, "iepqr stunh")
    assert made.notes == (NO_ORDER,)
    (tmp_path / "export-torch.csv").touch()
    write_files(tmp_path, made.files("export-torch"))
    assert not (tmp_path / "export-torch.csv").exists(), "that of an earlier plan"
    assert json.loads((tmp_path / "export-torch.json").read_text()) == {
        "format": "pipedream-torch-split/1",
        "model": "m",
        "torch": "2.13.0",
        "stages": [
            ["e_out", "p_out", "q_out", "r_out"],
            ["s_out", "t_out", "u_out", "n_out", "h_out"],
        ],
    }


def test_torch_names_the_order_of_passes_beside_it(exported, tmp_path):
    made = exported("torch", GPT, CHAIN, "iepqr stunh", flush=2)
    assert made.notes == ()
    write_files(tmp_path, made.files("export-torch"))
    assert json.loads((tmp_path / "export-torch.json").read_text())["order"] == {
        "file": "export-torch.csv",
        "microbatches": 2,
        "stage_ranks": [0, 1],
    }
    rows = (tmp_path / "export-torch.csv").read_text()
    assert rows == "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_whole_layers_are_exported_as_they_are(exported):
    titan = exported("torchtitan", GPT, CHAIN, "iepq rs tunh")
    assert titan.notes == ()
    assert titan.content == {
        "module_fqns_per_model_part": (
            ("embed", "layers.0"),
            ("layers.1",),
            ("layers.2", "norm", "head"),
        ),
        "pipeline_parallel_degree": 3,
    }
    deepspeed = exported("deepspeed", GPT, CHAIN, "iepq rs tunh")
    assert deepspeed.content == {
        "layers": ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"],
        "parts": [0, 2, 3, 6],
    }
    megatron = exported("megatron", GPT, CHAIN, "iepq rs tunh")
    assert megatron.content == {
        "pipeline_model_parallel_layout": "Et|t|tL",
        "pipeline_model_parallel_size": 3,
        "num_layers": 3,
    }


PLACED = {"embed.weight": "R,S(1)", "layers.0.mlp.weight": "R,S(0, chunks=2)"}
"""On a mesh of two axes; its second divides parameters."""


def test_frameworks_have_the_degrees_of_a_mesh(exported):
    on_mesh = {"mesh": (2, 3), "placed": PLACED, "replicas": [12, 12]}
    titan = exported("torchtitan", GPT, CHAIN, "iepq rstunh", **on_mesh)
    degrees = {name: n for name, n in titan.content.items() if name.endswith("_degree")}
    assert degrees == {
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 3,
        "data_parallel_replicate_degree": 2 * 2,
    }
    assert titan.placements["stages"][0]["parameters"]["embed.weight"] == [
        "Replicate()",
        "Shard(1)",
    ]
    deepspeed = exported("deepspeed", GPT, CHAIN, "iepq rstunh", **on_mesh)
    assert deepspeed.content["topology"] == {"num_pp": 2, "num_mp": 3, "num_dp": 4}
    megatron = exported("megatron", GPT, CHAIN, "iepq rstunh", **on_mesh)
    assert megatron.content["tensor_model_parallel_size"] == 3
    assert "start 24 processes: data parallelism is what is left of them" in megatron.notes
    for made in (deepspeed, megatron):
        assert made.placements is None
        assert "--export torch has the plan's placements" in made.notes[-1]


def test_a_cut_inside_a_layer_goes_to_its_nearer_end_and_the_loss_is_told(exported):
    # r takes 5 ms, s 1 ms: layer 1 goes with r. The second stage had 1 + 4 ms, the first had 8.
    made = exported("deepspeed", GPT, CHAIN, "iepqr stunh", r=(5, 100, 1))
    assert made.content["parts"] == [0, 3, 6]
    assert made.notes == (
        "cuts are rounded to whole modules: 1 node moved, the slowest stage computes 9 ms for a"
        " minibatch, planned 8 ms",
    )
    assert exported("deepspeed", GPT, CHAIN, "iepqr stunh", s=(5, 9, 1)).content["parts"] == [
        0,
        2,
        6,
    ]


def test_megatron_keeps_what_is_around_the_layers_together(exported):
    made = exported("megatron", GPT, CHAIN, "iepqrstu nh")
    assert made.content["pipeline_model_parallel_layout"] == "Ettt|L"
    made = exported("megatron", GPT, CHAIN, "iepqrstun h", h=(9, 9, 1))
    assert made.content["pipeline_model_parallel_layout"] == "Ettt|L"
    assert "1 node moved" in made.notes[0]


def test_a_stage_without_a_whole_module_is_refused(exported):
    with pytest.raises(
        UserError,
        match="--export torchtitan: stage 1 of the plan does not contain most of any module",
    ):
        exported("torchtitan", GPT, CHAIN, "iepq r stunh", s=(5, 1, 1))


def test_a_tensor_that_passes_by_a_stage_is_refused_but_not_by_torch(exported):
    edges = CHAIN + " e-n"
    for framework in ("torchtitan", "deepspeed", "megatron"):
        with pytest.raises(
            UserError, match=f"--export {framework}: e Linear of stage 0 is read in"
        ):
            exported(framework, GPT, edges, "iepq rs tunh")
    assert exported("torch", GPT, edges, "iepq rs tunh").notes == (NO_ORDER,)


def test_notes_name_replicas_tensors_ties_and_code_around_modules(exported):
    modules = {**GPT, "a": ""}
    edges = "i-e e-p p-q q-r r-s s-t t-u e-a u-a a-n n-h"
    tied = {"e": ["embed.weight"], "h": ["embed.weight"]}
    made = exported("deepspeed", modules, edges, "iepqrs tuanh", [3, 1], tied)
    assert made.notes == (
        "1 operator in the code around the modules (a Linear) must be in the forward of their"
        " stage",
        "embed.weight is read by stages 0 and 1: tie it there",
        "2 tensors go from stage 0 to 1",
        "replicas 3, 1 are left out: it has the same number of every stage",
    )
    torch = exported("torch", modules, edges, "iepqrs tuanh", [3, 1])
    assert torch.notes == (made.notes[-1], NO_ORDER)


def test_deep_lists_are_taken_apart_and_torchtitan_is_told(exported):
    deep = {name: path and f"model.decoder.{path}" for name, path in GPT.items()}
    made = exported("torchtitan", deep, CHAIN, "iepq rstunh")
    assert made.content["module_fqns_per_model_part"][0] == (
        "model.decoder.embed",
        "model.decoder.layers.0",
    )
    assert made.notes[-1].endswith("not model.decoder.embed")


def test_megatron_needs_one_list_of_layers(exported):
    flat = {"a": "first", "b": "second"}
    with pytest.raises(UserError, match="one list of transformer layers; this model's lists: none"):
        exported("megatron", flat, "a-b", "a b")
    with pytest.raises(UserError, match="no module before the list of layers; it takes one for E"):
        exported("megatron", {"a": "0", "b": "1"}, "a-b", "a b")


def test_the_profile_of_another_graph_is_refused(exported, make_graph, tmp_path):
    exported("torch", GPT, CHAIN, "iepqr stunh")
    graph = make_graph("a b", "a-b")
    with pytest.raises(UserError, match=r"profile\.json: the profile of another graph"):
        read_profile_of(tmp_path / "profile.json", graph)


def real_model():
    """The model of GPT above."""
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.mlp(self.attention(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 8)

    return Gpt()


def test_torchtitan_takes_its_fields_and_splits_by_them(exported):
    configs = pytest.importorskip("torchtitan.config.configs")
    pipelines = pytest.importorskip("torchtitan.distributed.pipeline_parallel")
    content = json.loads(json.dumps(exported("torchtitan", GPT, CHAIN, "iepq rs tunh").content))
    config = configs.ParallelismConfig(**content)
    model = real_model()
    parts = [pipelines._split_module(model, names) for names in config.module_fqns_per_model_part]
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    layer = sum(p.numel() for p in model.layers[0].parameters())
    assert sizes[1] == layer
    assert sum(sizes) == sum(p.numel() for p in model.parameters())


def test_megatron_reads_its_layout(exported):
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    content = exported("megatron", GPT, CHAIN, "iepqrs tunh").content
    layout = PipelineParallelLayerLayout(
        content["pipeline_model_parallel_layout"], content["pipeline_model_parallel_size"]
    )
    layout.validate_layer_layout(content["num_layers"], None)
    kind = {"E": LayerType.embedding, "t": LayerType.decoder, "L": LayerType.loss}
    assert layout.layout == [[[kind[k] for k in "Ett"]], [[kind[k] for k in "tL"]]]


def deepspeed_stage(rank, processes, content, port):
    """The layers that DeepSpeed builds on this rank, given the file as README says."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    # An all-reduce that it would compile now, for a minute.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)

    class Planned(PipelineModule):
        def _partition_layers(self, method="uniform"):
            self.parts = content["parts"]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    model = real_model()
    layers = [model.get_submodule(name) for name in content["layers"]]
    module = Planned(layers=layers, num_stages=len(content["parts"]) - 1)
    return [type(layer).__name__ for layer in module.forward_funcs]


def test_deepspeed_builds_its_parts(exported):
    pytest.importorskip("deepspeed.pipe")
    content = dict(exported("deepspeed", GPT, CHAIN, "iepqrs tunh").content)
    stages = run_processes(deepspeed_stage, 2, content, free_port(), seconds=60)
    assert stages == [["Embedding", "Layer", "Layer"], ["Layer", "LayerNorm", "Linear"]]

from pipedream.graph.model import parse_graph
from pipedream.optimizer.cuts.planning_graph import PlanningGraph

COST = (
    "forward_compute_time=1.000, backward_compute_time=2.000,"
    " activation_size=8.0, parameter_size=4.000"
)

TEXT = f"""\
in0 -- Input0 -- {COST}
in1 -- Input1 -- {COST}
lstm -- LSTM(4, 4) -- {COST}
state -- __getitem__(1) -- {COST}
part -- __getitem__(0) -- {COST}
out -- __getitem__(0) -- {COST}
fake -- Input(3) -- {COST}
last -- Linear(4, 4) -- {COST}
unread -- __getitem__(2) -- {COST}
\tin0 -- lstm
\tlstm -- state
\tstate -- part
\tlstm -- out
\tout -- fake
\tfake -- last
\tin1 -- last
\tin1 -- unread
"""


def test_inputs_and_getitems_that_nothing_reads_are_left_out():
    graph = PlanningGraph.of(parse_graph(TEXT))
    assert graph.names == ("lstm", "out", "fake", "last")
    assert graph.follows == {
        "in0": None,
        "in1": None,
        "state": "lstm",
        "part": "lstm",
        "unread": None,
    }


def test_neighbours_are_numbered_among_the_working_nodes():
    graph = PlanningGraph.of(parse_graph(TEXT))
    assert graph.consumers == ((1,), (2,), (3,), ())
    assert graph.producers == ((), (0,), (1,), (2,))
    assert graph.consumer_masks == (0b0010, 0b0100, 0b1000, 0)
    assert graph.producer_masks == (0, 0b0001, 0b0010, 0b0100)


def test_costs_are_arrays_in_that_order():
    graph = PlanningGraph.of(parse_graph(TEXT))
    assert graph.compute_seconds.tolist() == [0.003] * 4
    assert graph.parameter_bytes.tolist() == [4.0] * 4
    assert graph.output_bytes.tolist() == [8.0] * 4


def test_what_was_left_out_goes_first_or_to_its_producer():
    graph = PlanningGraph.of(parse_graph(TEXT))
    stages = graph.stage_of([[0], [1, 2], [3]])
    assert stages == {
        "in0": 0,
        "in1": 0,
        "unread": 0,
        "lstm": 0,
        "state": 0,
        "part": 0,
        "out": 1,
        "fake": 1,
        "last": 2,
    }


def test_a_getitem_left_out_follows_its_producer_to_a_later_stage():
    text = TEXT + "\tlast -- after\n" + f"after -- __getitem__(0) -- {COST}\n"
    graph = PlanningGraph.of(parse_graph(text))
    assert graph.stage_of([[0], [1, 2], [3]])["after"] == 2

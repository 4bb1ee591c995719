"""A round asks the host nothing and moves no tensor, so it can be a graph; caches grow; reports are read late."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_fast.drafters import DSparkDrafter, Noise
from dspark_fast.engine import capacity, graphs, loop
from dspark_fast.engine.cache import RaggedCache
from dspark_fast.engine.compiled import hindrance
from dspark_fast.engine.packing import pack
from dspark_fast.engine.reader import Reader
from dspark_fast.engine.round import Cuts, Round, Sampling
from dspark_fast.engine.state import DecodingState, Limits
from dspark_fast.engine.target import driven
from dspark_fast.stats import Stats
from dspark_fast.vocabulary import restricted

NEW = 24
# What an op of PyTorch must not do inside a round: hand a value to the host, or make a shape of one.
ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "item", "unique", "is_nonzero", "equal")


class AsksNothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        assert not (name.startswith(ASKS) or "unique" in name), f"{func} asks the host"
        if name.startswith("index"):  # a mask as an index is a nonzero
            for index in args[1] if isinstance(args[1], (list, tuple)) else ():
                assert index is None or index.dtype != torch.bool, f"{func} indexes by a mask"
        return func(*args, **(kwargs or {}))


MODES = pytest.mark.parametrize("call", ["greedy", "coupled", "rejection"], indirect=True)


@pytest.fixture
def call(request, make_target, make_draft, prompts):
    """``call(graph)`` decodes one batch and returns what came; ``call.plan`` is how."""
    model = make_target()
    batch = prompts((9, 6, 1, 8))
    ids, lengths = pack(batch.input_ids, batch.attention_mask)
    mode = getattr(request, "param", "greedy")
    temperature = torch.full((4,), 0.0 if mode == "greedy" else 0.8)
    cuts = Cuts() if mode == "greedy" else Cuts(top_k=20, top_p=0.95)
    sampling = Sampling(Noise(mode, temperature, torch.arange(11, 15)), cuts)
    stops = torch.tensor([3, 50])

    draft = make_draft(model)

    def decode(*, seed=11, lengths=lengths, ids=ids, drafter=None, **options):
        noise = Noise(mode, temperature[: len(ids)], torch.arange(seed, seed + len(ids)))
        plan = loop.Plan(Sampling(noise, cuts), Limits(NEW, stops), **options)
        return loop.decode(model, drafter or DSparkDrafter(draft), ids, lengths, plan)

    decode.model, decode.draft, decode.sampling, decode.limits = model, draft, sampling, Limits(NEW, stops)
    decode.ids, decode.lengths = ids, lengths
    return decode


class Flips:
    """A switch that drafts in three rounds and makes three plain steps, over and over."""

    pauses = 0
    heard = 0

    def drafts(self):
        return self.heard % 6 < 3

    def note(self, drafting, seconds, tokens):
        self.heard += 1

    def forget(self):
        pass


@torch.no_grad()
@MODES
def test_a_round_asks_the_host_nothing(call, opaque):
    batch, width = call.ids.shape
    drafter = DSparkDrafter(call.draft)
    drafter.begin(batch, 64, call.ids.device)
    state = DecodingState(call.ids, call.lengths, call.limits, drafter.block_size, 64)
    cache = RaggedCache.for_model(call.model, batch, 64)
    with driven(call.model, drafter.target_layer_ids, cache) as target:
        rounds = Round(target, drafter, state, call.sampling.per_row(), None, None)
        rounds.prefill(call.ids, call.lengths)
        for drafting in (True, False):
            with AsksNothing():
                rounds.run(None, drafting=drafting)
        with pytest.raises(AssertionError, match="asks the host"), AsksNothing():
            rounds.run(width + 1 + drafter.block_size, drafting=True)  # outside graphs it may, on a CPU


@torch.no_grad()
@MODES
def test_a_replayed_round_is_the_round(call, on_a_cpu):
    """The first round is run, the second recorded and all later ones replayed from the record, one report behind."""
    plain = call()
    assert min(map(len, plain.rows)) < NEW or plain.stats.rounds > 3
    for seed in (11, 12, 11):
        replayed = call(seed=seed, graph=True)
        assert replayed.rows == call(seed=seed).rows
        assert replayed.stats.graph and replayed.stats.seconds.graph > 0
    assert replayed.stats.acceptance_lengths == plain.stats.acceptance_lengths
    assert len(on_a_cpu) == 1, "calls of one kind share a recording"


@torch.no_grad()
def test_a_recording_serves_other_prompts(call, on_a_cpu):
    call(graph=True)
    ids, lengths = call.ids.flip(0)[:, :7].contiguous() % 90 + 1, torch.tensor([7, 3, 2, 5])
    assert call(ids=ids, lengths=lengths, graph=True).rows == call(ids=ids, lengths=lengths).rows
    assert len(on_a_cpu) == 1


@torch.no_grad()
def test_weights_elsewhere_need_another_recording(call, on_a_cpu):
    before = call(graph=True)
    layer = call.model.model.layers[3].mlp.down_proj
    old = layer.weight.data
    try:
        layer.weight.data = old * 1.5
        after = call(graph=True)
        assert after.rows == call().rows != before.rows
    finally:
        layer.weight.data = old
    assert len(on_a_cpu) == 2


@torch.no_grad()
def test_graphs_are_bounded(call, on_a_cpu, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_KEPT", 2)
    for width in (512, 1536, 512, 3072):
        call(ids=torch.nn.functional.pad(call.ids, (0, width)), graph=True)
    assert [key[3] for key in graphs._kept] == [1024, 4096] and len(on_a_cpu) == 3


@torch.no_grad()
@pytest.mark.parametrize("graph", [False, True])
def test_an_exception_leaves_no_workspace(call, on_a_cpu, graph):
    def fail(rows):
        raise KeyboardInterrupt

    call(graph=graph)
    kept = len(graphs._kept)
    assert kept == graph
    with pytest.raises(KeyboardInterrupt):
        call(graph=graph, on_commit=fail)
    assert not graphs._kept


@torch.no_grad()
@MODES
def test_plain_steps_in_a_graph(call, on_a_cpu):
    """A switch that goes back and forth: both kinds of round are recorded, and greedy and coupled tokens stay."""

    plain = call()
    for graph in (False, True):
        flipped = call(graph=graph, switch=Flips())
        assert flipped.stats.plain_steps > 4 and flipped.stats.rounds > 2
        if plain.stats.mode != "rejection":
            assert flipped.rows == plain.rows
    assert len(on_a_cpu) == 2


def _storages(*holders):
    """Where all tensors lie that these hold, however deep."""
    found, seen = set(), {}

    def walk(one):
        if id(one) in seen:
            return
        seen[id(one)] = one  # kept, or another may get its id
        if isinstance(one, torch.Tensor):
            found.add(one.untyped_storage().data_ptr())
        elif isinstance(one, torch.nn.Module):
            walk([*one.parameters(), *one.buffers()])
        elif isinstance(one, (list, tuple, set, dict)):
            for part in one.values() if isinstance(one, dict) else one:
                walk(part)
        elif type(one).__module__.startswith(("dspark_fast", "transformers")):
            walk(vars(one))

    walk(list(holders))
    return found


@torch.no_grad()
@MODES
def test_a_recording_reads_nothing_that_is_gone(call, on_a_cpu):
    """A graph keeps nothing alive: every tensor from outside that it reads must be the workspace's or the models'."""

    call(graph=True, switch=Flips())
    (work,) = graphs._kept.values()
    assert set(work.replays) == {True, False}
    kept = _storages(work.state, work.cache, work.drafter, work.sampling, call.model, call.draft)
    for replay in work.replays.values():
        constants = [getattr(replay, node.target) for node in replay.graph.nodes if node.op == "get_attr"]
        assert len(constants) > 20
        gone = [one.shape for one in constants if one.numel() and one.untyped_storage().data_ptr() not in kept]
        assert not gone


@torch.no_grad()
@MODES
def test_a_drafter_of_a_part_of_the_vocabulary(call, on_a_cpu):
    """In rejection mode it keeps a row of all tokens' logits, which must be the workspace's too."""
    part = restricted(call.draft, torch.arange(0, call.draft.config.vocab_size, 2))
    plain = call(drafter=DSparkDrafter(part)).rows
    for _ in range(2):
        assert call(graph=True, drafter=DSparkDrafter(part), switch=None).rows == plain
    (work,) = graphs._kept.values()
    kept = _storages(work.state, work.cache, work.drafter, work.sampling, call.model, part)
    for replay in work.replays.values():
        constants = [getattr(replay, node.target) for node in replay.graph.nodes if node.op == "get_attr"]
        assert not [one.shape for one in constants if one.numel() and one.untyped_storage().data_ptr() not in kept]


@torch.no_grad()
def test_one_drafter_in_two_workspaces(call, on_a_cpu):
    """Its tensors stay with each workspace: a second shape, or a call without a graph, takes no room from the first."""
    drafter = DSparkDrafter(call.draft)
    one = {"ids": call.ids[:1, :9], "lengths": call.lengths[:1]}
    alone, together = call(**one).rows, call().rows
    for _ in range(2):
        assert call(**one, graph=True, drafter=drafter).rows == alone
        assert call(graph=True, drafter=drafter).rows == together
        assert call(drafter=drafter).rows == together
    assert len(on_a_cpu) == 2


def test_inference_mode_has_workspaces_of_its_own(call, on_a_cpu):
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert call(graph=True).rows == call().rows
    assert len(graphs._kept) == 2


@torch.no_grad()
def test_what_cannot_be_recorded_runs_without(call, on_a_cpu, monkeypatch):
    made = graphs.Workspace.__init__

    def fails(work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.recorder = fails

    monkeypatch.setattr(graphs.Workspace, "__init__", init)
    found = call(graph=True)
    assert found.rows == call().rows and not found.stats.graph
    assert not graphs._kept
    drafter = DSparkDrafter(call.draft)
    assert graphs._refused[call.model].startswith("operation not permitted")
    with pytest.raises(RuntimeError, match="cannot be captured: operation not permitted"):
        call(graph=True, strict=True)
    del graphs._refused[call.model]
    handle = call.model.model.layers[0].register_forward_hook(lambda *_: None)
    assert "forward hooks" in graphs.obstacle(call.model, drafter, torch.device("cuda"))
    handle.remove()
    monkeypatch.setattr(call.model, "hf_device_map", {"model.embed_tokens": 0, "lm_head": 1}, raising=False)
    for found in (graphs.obstacle(call.model, drafter, torch.device("cuda")), hindrance(call.model)):
        assert "spread over several devices" in found
    monkeypatch.setattr(call.model, "hf_device_map", {"model.embed_tokens": 0, "lm_head": 0})
    assert hindrance(call.model) is None


# --- growing ---


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 256), (256, 256), (257, 512), (4096, 4096), (4097, 8192), (8193, 12288), (32769, 36864)],
)
def test_buckets(tokens, expected):
    assert capacity.bucket(tokens) == expected
    assert capacity.room(tokens, 10**6) == expected
    assert capacity.room(tokens, tokens) == tokens


@torch.no_grad()
def test_caches_grow_and_nothing_changes(call, monkeypatch):
    whole = call()
    monkeypatch.setattr(capacity, "_SMALLEST", 2)
    grown = call()
    assert grown.rows == whole.rows
    assert grown.stats.acceptance_lengths == whole.stats.acceptance_lengths
    # 9 tokens of prompt, 24 new ones, and the last round's block
    assert 9 + max(map(len, whole.rows)) <= grown.stats.capacity <= 9 + NEW + 5 + 1


@torch.no_grad()
def test_memory_is_counted(call):
    stats = call().stats
    config, draft = call.model.config, call.draft.config
    per_token = 2 * config.num_key_value_heads * config.head_dim * 4
    assert stats.memory["target"] == config.num_hidden_layers * 4 * stats.capacity * per_token
    per_token = 2 * draft.num_key_value_heads * draft.head_dim * 4
    assert stats.memory["drafter"] == draft.num_hidden_layers * 4 * stats.capacity * per_token


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
def test_prompts_in_chunks(call, chunk, monkeypatch):
    whole = call()
    monkeypatch.setattr("dspark_fast.engine.target.PREFILL_CHUNK", chunk)
    assert call().rows == whole.rows


# --- the reader ---


@pytest.mark.parametrize("lag", [0, 1])
def test_reports_are_read_late(lag):
    state = DecodingState(torch.tensor([[5, 6]]), torch.tensor([2]), Limits(6, torch.tensor([9])), 3, 20)
    heard = []
    reader = Reader(state, Stats(1, "greedy", [0], 3), lag=lag, stopping=None, on_commit=heard.append)
    for run in ([7, 8], [4, 9, 1, 2], [3, 3, 3, 3]):
        state.commit(torch.tensor([run]), torch.tensor([len(run)]), torch.tensor([len(run) - 1]))
        reader.queue(True)
        reader.read()
        assert reader.unread == lag
    reader.read(all_of_it=True)
    assert [rows for rows in heard if rows != [[]]] == [[[7, 8]], [[4, 9]]]
    assert reader.done and reader.lengths == [6] and reader.rows == [[7, 8, 4, 9]]

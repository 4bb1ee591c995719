"""What the tests share: tiny random targets and drafters, a drafter that does as it is told, poisoned new memory."""

from __future__ import annotations

import math
import os
import sys
from types import SimpleNamespace

import pytest
import setuptools  # noqa: F401  # before anything takes distutils from the standard library: torch's inductor then fails
import torch
from torch.utils._device import _device_constructors

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # counts only if it is set before triton is imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, which the interpreter multiplies with

# torch keeps the list of functions that `with torch.device(...)` concerns from its first use on. Made while torch.empty
# is poisoned below, it would lack the real one, and all later tests of this process would make "meta" weights for real.
_device_constructors()

LENGTHS = (9, 6, 1, 8, 4)
VOCABULARY = 97


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that the package asks for and does not write is NaN, or an integer that indexes nothing."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if sys._getframe(1).f_globals.get("__name__", "").startswith("dspark_fast"):
                with torch.no_grad():
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
                    elif tensor.dtype not in (torch.bool, torch.complex64, torch.complex128):
                        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)
            return tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def always_drafting(monkeypatch):
    """Speculation is not switched off by the clock where a test does not ask for it: counts of rounds would vary."""
    monkeypatch.setattr("dspark_fast.generation.OFF_SWITCH", False)


@pytest.fixture(scope="session")
def make_target():
    """``make_target(family, **config)``: a random target, varied in what it says; one instance per set of arguments.

    6 layers, hidden size 64, 97 tokens, no stop token; ``fresh=True`` gives one of the caller's own.
    """
    import transformers

    made = {}
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,  # the usual 0.02 gives a model that repeats one token
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }

    def make(family="Qwen3", *, fresh=False, **changes):
        key = (family, str(sorted(changes.items())))
        if fresh or key not in made:
            torch.manual_seed(0)
            heads = {"head_dim": 16} if family in ("Qwen3", "Gemma") else {}
            config = getattr(transformers, f"{family}Config")(**{**small, **heads, **changes})
            model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
            if fresh:
                return model
            made[key] = model
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_draft():
    """``make_draft(model, **config)``: a random drafter of 2 layers, joined to ``model``."""
    from dspark_fast import DSparkConfig, DSparkDraft

    def make(model, **changes):
        torch.manual_seed(1)
        small = {"num_hidden_layers": 2, "block_size": 5, "markov_rank": 8, "initializer_range": 0.25}
        config = DSparkConfig.from_target(model.config, **{**small, **changes})
        return DSparkDraft(config).tie_to(model).eval()

    return make


@pytest.fixture(scope="session")
def processors_of():
    """``processors_of(model, ids, **settings)``: the logits processors that transformers makes of these settings."""

    def work(model, ids, **settings):
        kept = []

        def keep(model, input_ids, logits_processor=None, **kwargs):
            kept.append(logits_processor)
            return input_ids

        model.generate(ids, custom_generate=keep, **settings)
        return kept[0]

    return work


@pytest.fixture(scope="session")
def law():
    """``law(model, ids, processors, depth)``: probability of every continuation of ``depth`` tokens, by enumeration."""

    def work(model, ids, processors, depth):
        vocabulary = model.config.vocab_size
        probabilities = {(): 1.0}
        for _ in range(depth):
            rows = torch.cat(
                [ids.expand(len(probabilities), -1), torch.tensor(list(probabilities), dtype=torch.long)], 1
            )
            with torch.no_grad():
                p = processors(rows, model(rows).logits[:, -1]).double().softmax(-1)
            probabilities = {
                (*prefix, token): mass * float(p[row, token])
                for row, (prefix, mass) in enumerate(probabilities.items())
                for token in range(vocabulary)
            }
        return probabilities

    return work


@pytest.fixture(scope="session")
def g_test():
    """``g_test(counts, probabilities, total)``: p-value of the counts; cells that expect less than 5 are pooled."""
    from scipy.stats import chi2

    def work(counts, probabilities, total):
        statistic, cells, pooled_seen, pooled_mass = 0.0, 0, 0, 0.0
        for outcome, mass in probabilities.items():
            seen = counts.get(outcome, 0)
            if mass == 0:
                assert seen == 0, f"{outcome} cannot occur and did"
            elif mass * total < 5:
                pooled_seen, pooled_mass = pooled_seen + seen, pooled_mass + mass
            else:
                cells += 1
                statistic += 2 * seen * math.log(seen / (mass * total)) if seen else 0.0
        if pooled_mass:
            cells += 1
            statistic += 2 * pooled_seen * math.log(pooled_seen / (pooled_mass * total)) if pooled_seen else 0.0
        return chi2.sf(statistic, cells - 1)

    return work


@pytest.fixture(scope="session")
def tiny(make_target, make_draft):
    """A target of 5 tokens and a drafter that agrees with it now and then."""
    model = make_target(
        vocab_size=5,
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    draft = make_draft(
        model, num_hidden_layers=1, block_size=3, markov_rank=4, target_layer_ids=[0, 1], initializer_range=0.3
    )
    with torch.no_grad():  # trust the slots behind tokens 0, 3 and 4 alone: the cut then hangs on what was drafted
        known = torch.cat([draft.markov_head.markov_w1.weight, torch.ones(5, 1)], 1)
        trust = torch.linalg.solve(known, torch.tensor([3.0, -3.0, -3.0, 3.0, 3.0]))
        draft.confidence_head.proj.weight[0] = torch.cat([torch.zeros(32), trust[:4]])
        draft.confidence_head.proj.bias[0] = trust[4]
    return model, draft


@pytest.fixture(scope="session")
def prompts():
    """``prompts(lengths)``: random rows, left-padded with 0; and the attention mask."""

    def make(lengths=LENGTHS, vocabulary=VOCABULARY):
        generator = torch.Generator().manual_seed(2)
        width = max(lengths)
        ids = torch.randint(1, vocabulary, (len(lengths), width), generator=generator)
        mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
        return SimpleNamespace(input_ids=ids * mask, attention_mask=mask)

    return make


@pytest.fixture(scope="session")
def unpadded():
    """``unpadded(sequences, mask)``: each row's tokens as a list, without the padding on its left."""

    def rows(sequences, mask):
        return [row[int((keep == 0).sum()) :].tolist() for row, keep in zip(sequences, mask)]

    return rows


@pytest.fixture(scope="session")
def characters():
    """One token per character: ``tokenizer``, and ``target(make_target)``, a target of its own for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<unk>", "<|start|>", "<|end|>", "<pad>")
    known = (*special, "\n", *map(chr, range(32, 127)))
    made = Tokenizer(models.WordLevel({token: index for index, token in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(special))
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking is false %}>{% endif %}{% endif %}"
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<|end|>", pad_token="<pad>", chat_template=template
    )
    assert made.decode(made.encode("Hi, you!\n", add_special_tokens=False)) == "Hi, you!\n"

    def target(make_target):
        """Stops at ``<|end|>`` or ``e``, which its random text has often enough; some ids are no token."""
        changes = {"num_hidden_layers": 4, "max_position_embeddings": 4096, "initializer_range": 0.2}
        model = make_target(fresh=True, vocab_size=len(known) + 4, **changes)
        model.generation_config.eos_token_id = [2, known.index("e")]
        return model

    return SimpleNamespace(tokenizer=made, target=target)


class ScriptedDrafter:
    """Knows how each row goes on and proposes that, or something else, as it is told; behind the Drafter protocol.

    It also watches the protocol: every commit must follow the one before it and hold the row's own tokens.

    Args:
        rows: each row's prompt and continuation, as lists.
        right: probability that a draft is the row's own next token.
        ragged: draw each row's number of drafts from 0 to ``block_size``; otherwise always ``block_size``.
        plan: by round and row ``(drafts, right ones)``, in place of both.
        watch: false where ``rows`` are guesses, not what will be committed.
    """

    def __init__(
        self, rows, *, vocabulary=VOCABULARY, block_size=5, right=1.0, ragged=True, plan=None, taps=(), watch=True
    ):
        self.rows = rows
        self.vocabulary = vocabulary
        self.block_size = block_size
        self.target_layer_ids = list(taps)
        self.right = right
        self.ragged = ragged
        self.plan = plan
        self.watch = watch

    def begin(self, batch, capacity, device):
        assert batch == len(self.rows)
        self.known = [0] * batch
        self.round = 0
        self.features = [[] for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(3)

    memory = 0

    def grow(self, capacity):
        pass

    def commit(self, tokens, features, offsets, counts):
        assert (features is None) == (not self.target_layer_ids)
        for row, (start, count) in enumerate(zip(offsets.tolist(), counts.tolist())):
            if count == 0:
                continue
            assert start == self.known[row]
            assert not self.watch or tokens[row, :count].tolist() == self.rows[row][start : start + count]
            self.known[row] += count
            if features is not None:
                self.features[row].append(features[row, :count].clone())

    def propose(self, anchor, position, noise):
        from dspark_fast.drafters import Proposal

        assert position.tolist() == self.known
        tokens = torch.full((len(self.rows), self.block_size), -1)
        lengths = torch.full((len(self.rows),), self.block_size)
        for row, (last, start) in enumerate(zip(anchor.tolist(), position.tolist())):
            assert not self.watch or last == self.rows[row][start]
            count, right = self._told(row)
            lengths[row] = count
            for slot in range(count):
                true = self.rows[row][start + 1 + slot] if start + 1 + slot < len(self.rows[row]) else 0
                tokens[row, slot] = (
                    true if right[slot] else (true + 1 + self._below(self.vocabulary - 1)) % self.vocabulary
                )
        self.round += 1
        if noise.mode != "rejection":
            return Proposal(tokens, lengths)
        # A token that was not drawn at all has probability 1.
        logits = torch.full((*tokens.shape, self.vocabulary), -torch.inf).scatter_(
            2, tokens.clamp(min=0)[..., None], 0.0
        )
        return Proposal(tokens, lengths, logits, torch.zeros(tokens.shape), torch.zeros(tokens.shape))

    def _told(self, row):
        if self.plan is not None:
            count, right = self.plan[self.round][row]
            return count, [slot < right for slot in range(count)]
        count = self._below(self.block_size + 1) if self.ragged else self.block_size
        return count, [bool(torch.rand((), generator=self.generator) < self.right) for _ in range(count)]

    def _below(self, end):
        return int(torch.randint(end, (), generator=self.generator))


@pytest.fixture(scope="session")
def scripted():
    return ScriptedDrafter


class RecordingStreamer:
    """Keeps all that it is told; with ``fail_at`` it raises at that token (0 is the first)."""

    def __init__(self, fail_at=None, error=RuntimeError):
        self.heard = []
        self.fail_at = fail_at
        self.error = error

    def put(self, value):
        self.heard.append(value.tolist())
        if self.fail_at is not None and len(self.heard) == self.fail_at + 2:
            raise self.error("the streamer fails, as told")

    def end(self):
        self.heard.append("end")


@pytest.fixture(scope="session")
def streamer():
    return RecordingStreamer


@pytest.fixture(scope="session")
def batch_of():
    """``batch_of(model, draft)``: random sequences with the target's own taps, padded on the right, and anchors.

    ``loss_mask`` also has a hole.
    """
    import torch.nn.functional as F

    from dspark_fast.engine.taps import tapped

    @torch.no_grad()
    def make(model, draft, lengths=(23, 17), starts=(6, 4)):
        generator = torch.Generator().manual_seed(4)
        width = max(lengths)
        inside = torch.arange(width) < torch.tensor(lengths)[:, None]
        ids = torch.randint(1, VOCABULARY, (len(lengths), width), generator=generator) * inside
        mask = inside & (torch.arange(width) >= torch.tensor(starts)[:, None])
        mask[0, 13] = False
        taps, last = [], []
        for row, length in zip(ids, lengths):
            with tapped(model, draft.config.target_layer_ids) as caught:
                hidden = model.get_decoder()(input_ids=row[None, :length], use_cache=False).last_hidden_state
                taps.append(F.pad(caught.take()[0], (0, 0, 0, width - length)))
                last.append(F.pad(hidden[0], (0, 0, 0, width - length)))
        last = torch.stack(last)
        return SimpleNamespace(
            lengths=lengths,
            input_ids=ids,
            loss_mask=mask,
            features=torch.stack(taps),
            last_hidden=last,
            log_total=F.linear(last, model.lm_head.weight).logsumexp(-1),
            anchors=torch.tensor([[6, 11, 14, 21], [4, 10, 15, 0]]),
            valid=torch.tensor([[True, True, True, True], [True, True, True, False]]),
        )

    return make


@pytest.fixture(scope="session")
def cached(make_target, make_draft, tmp_path_factory):
    """Features of 8 responses to train on and 2 held out, few tokens in them, so they can be learnt; and trainers."""
    from dspark_fast.training.features import Batches, CachedFeatures, write_features
    from dspark_fast.training.responses import Response
    from dspark_fast.training.trainer import Trainer, TrainSettings

    model = make_target(fresh=True)
    generator = torch.Generator().manual_seed(10)
    responses = []
    for number in range(10):
        length = 30 + number
        ids = torch.randint(1, 12, (length,), generator=generator).repeat_interleave(2)[:length]
        responses.append(Response(f"r{number}", "chat", ids.tolist(), 6, True, number >= 8))
    folder = tmp_path_factory.mktemp("cached")
    layers = make_draft(model).config.target_layer_ids
    train = write_features(model, responses[:8], folder / "train", layers, top_tokens=6)
    held_out = write_features(model, responses[8:], folder / "held-out", layers, top_tokens=6)
    settings = TrainSettings(
        steps=6, learning_rate=3e-3, warm_up=0.34, sequences=2, anchors=6, vocabulary=40, save_every=3, evaluate_every=2
    )

    def trainer(to, settings=settings, *, draft=None, limit=None, held_out=None, on_step=lambda metrics: None, **shape):
        draft = draft or make_draft(model, **shape)
        stores = [
            Batches(CachedFeatures(folder / name, limit=first), settings.sequences)
            for name, first in (("train", limit), ("held-out", held_out))
        ]
        return Trainer(draft, *stores, to, settings, on_step)

    return SimpleNamespace(
        model=model, responses=responses, train=train, held_out=held_out, settings=settings, trainer=trainer
    )


def _recorded(work, space):
    """A stand-in for a CUDA graph: what ``work`` does to the same memory, as ops without any Python between them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    state = space.state
    places = [state.tokens, state.lengths, state.finished, state.report, space.cache.lengths]
    before = [place.clone() for place in places]
    trace = make_fx(work)()
    for place, old in zip(places, before):  # a capture does not run what it records, this did
        place.copy_(old)
    assert {node.op for node in trace.graph.nodes} <= {"call_function", "get_attr", "output"}
    return trace


@pytest.fixture
def opaque(monkeypatch):
    """Our ops as single nodes, as a compiler or a recorder sees them: what is inside is the kernels' own affair."""
    from dspark_fast import ops

    monkeypatch.setattr(
        ops, "call", lambda name, backend, *t, **o: getattr(torch.ops.dspark_fast, name)(*t, **o, backend=backend)
    )


@pytest.fixture
def on_a_cpu(monkeypatch, opaque):
    """Graphs are recorded and replayed on the CPU; the fixture is a list of the recordings."""
    from dspark_fast.engine import graphs

    recordings = []

    def record(work, space):
        recordings.append(work)
        return _recorded(work, space)

    made = graphs.Workspace.__init__

    def init(self, *args, **kwargs):
        made(self, *args, recorder=lambda work: record(work, self), **kwargs)

    monkeypatch.setattr(graphs.Workspace, "__init__", init)
    graphs.clear_graphs()
    yield recordings
    graphs.clear_graphs()

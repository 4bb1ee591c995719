"""The data half of training: the target's answers, its features over them, and the command that does it all."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from dspark_fast import DSparkDraft, generate
from dspark_fast.training import features, responses
from dspark_fast.training.features import FeatureStore, check_head, write_features
from dspark_fast.training.prompts import is_held_out, make_prompt
from dspark_fast.training.recipe import Recipe, collect, measure, remember
from dspark_fast.training.responses import Response, conversation_ids, generate_responses, read_responses, stop_tokens
from dspark_fast.training.trainer import Trainer

SPECIAL = ("<unk>", "<|start|>", "<|end|>", "<pad>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(SPECIAL) + len(CHARACTERS) + 4  # some ids that are no token, as in many models
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking is false %}>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<|end|>", pad_token="<pad>", chat_template=TEMPLATE
    )
    assert made.decode(made.encode("Hi, you!\n", add_special_tokens=False)) == "Hi, you!\n"
    return made


@pytest.fixture(scope="module")
def model(make_target):
    """Stops at ``<|end|>`` or ``e``, which its random text has often enough."""
    model = make_target(
        fresh=True, vocab_size=VOCABULARY, num_hidden_layers=4, max_position_embeddings=4096, initializer_range=0.2
    )
    model.generation_config.eos_token_id = [2, len(SPECIAL) + CHARACTERS.index("e")]
    return model


def user(text, domain="chat", follow_ups=()):
    return make_prompt(domain, ({"role": "user", "content": text},), follow_ups)


@pytest.fixture(scope="module")
def prompts():
    """30 prompts of two domains, a fifth with follow-up questions."""
    made = []
    for n in range(30):
        follow_ups = ("Why?", "More.")[: 1 + n % 2] if n % 5 == 0 else ()
        made.append(user("Say " + "a word " * (n % 7) + str(n), "short" if n % 4 == 3 else "chat", follow_ups))
    return made


NAMES = {"batch_size": 3, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def whole(model, tokenizer, prompts, tmp_path_factory):
    """All the prompts answered without interruption."""
    path = tmp_path_factory.mktemp("responses") / "responses.jsonl"
    told = []
    total = generate_responses(model, tokenizer, prompts, path, tokens=10**9, on_progress=told.append, **NAMES)
    return SimpleNamespace(path=path, total=total, told=told, rows={r.id: r for r in read_responses(path)})


# --- responses --------------------------------------------------------------------------------------------------------


def test_every_prompt_is_answered_once(whole, prompts):
    expected = [p.id if turn == 0 else f"{p.id}+{turn}" for p in prompts for turn in range(1 + len(p.follow_ups))]
    assert sorted(json.loads(line)["id"] for line in whole.path.read_text().splitlines()) == sorted(expected)
    own = sum(len(r.input_ids) - r.start for r in whole.rows.values())
    assert whole.total == whole.told[-1] == own
    assert whole.told == sorted(whole.told)
    assert whole.told[0] == 0


def test_answers_are_the_targets_own_and_follow_ups_have_a_history(whole, model, tokenizer, prompts):
    stops = stop_tokens(model)
    stopped = 0
    for prompt in prompts:
        messages = list(prompt.messages)
        for turn in range(1 + len(prompt.follow_ups)):
            row = whole.rows[prompt.id if turn == 0 else f"{prompt.id}+{turn}"]
            assert row.domain == prompt.domain
            assert row.held_out == is_held_out(prompt)
            assert row.greedy == (hashlib.sha256(prompt.id.encode()).digest()[0] % 4 != 0)
            text = conversation_ids(tokenizer, messages)
            assert row.input_ids[: row.start] == text
            answer = row.input_ids[row.start :]
            assert 1 <= len(answer) <= 12
            assert not stops & set(answer[:-1])
            stopped += answer[-1] in stops
            assert answer[-1] in stops or len(answer) == 12
            if row.greedy:
                ids = torch.tensor([text])
                plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
                assert answer == plain[0, len(text) :].tolist()
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
            if turn < len(prompt.follow_ups):
                messages.append({"role": "user", "content": prompt.follow_ups[turn]})
    assert 2 < stopped < len(whole.rows)
    assert {row.greedy for row in whole.rows.values()} == {True, False}


def test_three_quarters_are_greedy():
    greedy = sum(responses._is_greedy(user(f"Question {n}")) for n in range(2000))
    assert 1440 < greedy < 1560  # 1,500, standard deviation 19


def test_the_rest_is_sampled_as_the_paper_does(model, tokenizer, prompts, tmp_path, monkeypatch):
    calls = []

    def watched(*args, **kwargs):
        calls.append(kwargs)
        return generate(*args, **kwargs)

    monkeypatch.setattr(responses, "generate", watched)
    generate_responses(model, tokenizer, prompts, tmp_path / "r.jsonl", tokens=10**9, seed=5, **NAMES)
    sampled = [call for call in calls if call["do_sample"]]
    assert {(call["temperature"], call["top_p"], call["top_k"]) for call in sampled} == {(0.7, 0.8, 20)}
    assert len({call["seed"] for call in sampled}) == len(sampled)
    assert all("temperature" not in call for call in calls if not call["do_sample"])


def test_it_stops_at_the_number_of_tokens(model, tokenizer, prompts, whole, tmp_path):
    path = tmp_path / "r.jsonl"
    total = generate_responses(model, tokenizer, prompts, path, tokens=60, **NAMES)
    rows = list(read_responses(path))
    assert 60 <= total == sum(len(r.input_ids) - r.start for r in rows) < 60 + 3 * 3 * 12
    assert path.read_text() == "".join(whole.path.read_text().splitlines(keepends=True)[: len(rows)])
    before = path.read_bytes()
    assert generate_responses(model, tokenizer, prompts, path, tokens=60, **NAMES) == total
    assert path.read_bytes() == before


def assert_the_same(path, whole):
    rows = list(read_responses(path))
    assert Counter(row.id for row in rows) == Counter(whole.rows.keys())
    for row in rows:
        theirs = whole.rows[row.id]
        assert (row.domain, row.greedy, row.held_out) == (theirs.domain, theirs.greedy, theirs.held_out)
        if row.greedy:
            assert row == theirs


@pytest.mark.parametrize("batches", [1, 4])
def test_an_interrupted_file_is_continued(model, tokenizer, prompts, whole, tmp_path, batches):
    path = tmp_path / "r.jsonl"
    calls = []

    def stop(tokens):
        calls.append(tokens)
        if len(calls) > batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_responses(model, tokenizer, prompts, path, tokens=10**9, on_progress=stop, **NAMES)
    kept = path.read_text()
    assert kept and whole.path.read_text().startswith(kept)
    assert generate_responses(model, tokenizer, prompts, path, tokens=10**9, **NAMES) > calls[-1]
    assert path.read_text().startswith(kept)
    assert_the_same(path, whole)


def test_a_file_cut_anywhere_is_continued(model, tokenizer, prompts, whole, tmp_path):
    """Also between an answer and the answer to its follow-up question; half a line is dropped."""
    lines = whole.path.read_bytes().splitlines(keepends=True)
    follow_up = next(n for n, line in enumerate(lines) if b'+1"' in line)
    for number, (count, half) in enumerate([(0, True), (follow_up, False), (follow_up, True), (len(lines) - 1, True)]):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"".join(lines[:count]) + (lines[count][: len(lines[count]) // 2] if half else b""))
        generate_responses(model, tokenizer, prompts, path, tokens=10**9, **NAMES)
        assert path.read_bytes().startswith(b"".join(lines[:count]))
        assert_the_same(path, whole)


def test_a_prompt_given_twice_is_answered_once(model, tokenizer, tmp_path):
    twice = [user(f"Question {n % 5}") for n in range(10)]
    generate_responses(model, tokenizer, twice, tmp_path / "r.jsonl", tokens=10**9, **NAMES)
    assert len(list(read_responses(tmp_path / "r.jsonl"))) == 5


def test_read_responses(whole, tmp_path):
    assert list(read_responses(tmp_path / "none.jsonl")) == []
    path = tmp_path / "r.jsonl"
    good = whole.path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(good + good[:40])
    assert len(list(read_responses(path))) == 1
    assert path.read_bytes() == good + good[:40]
    assert len(list(read_responses(path, repair=True))) == 1
    assert path.read_bytes() == good
    path.write_bytes(good[:40])
    assert list(read_responses(path, repair=True)) == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "bad", [b"{", b"[1]", b"", b"5", b'{"id": "a"}', b'{"id": "caf\xe9"}', b"[1, 2, 3, 4, 5, 6]"], ids=repr
)
def test_a_bad_line_is_named(whole, tmp_path, bad):
    good = whole.path.read_bytes().splitlines(keepends=True)[0]
    path = tmp_path / "r.jsonl"
    path.write_bytes(good + bad + b"\n" + good)
    with pytest.raises(ValueError, match=r"r\.jsonl, line 2 is not a response"):
        list(read_responses(path))


def test_stop_tokens():
    for given, expected in ((None, set()), (7, {7}), ([7, 9], {7, 9})):
        assert stop_tokens(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=given))) == expected


# --- features ---------------------------------------------------------------------------------------------------------

TAPS = [-1, 0, 2]


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(features, "SHARD", 4)
    monkeypatch.setattr(features, "HELD_OUT_SHARD", 2)
    monkeypatch.setattr(features, "TOGETHER", 3)
    monkeypatch.setattr(features, "ROWS", 7)


def made_up(count, held_out=(), start=5, own=20):
    generator = torch.Generator().manual_seed(11)
    return [
        Response(
            f"r{n}",
            "chat",
            torch.randint(1, VOCABULARY, (start + n % 3 + own + 5 * n % 7,), generator=generator).tolist(),
            start + n % 3,
            True,
            n in held_out,
        )
        for n in range(count)
    ]


def by_ids(shard):
    """A shard's sequences, by their ids."""
    tensors = load_file(shard)
    offsets = tensors.pop("offsets").tolist()
    rows = [{key: value[a:b] for key, value in tensors.items()} for a, b in pairwise(offsets)]
    return {tuple(row["input_ids"].tolist()): row for row in rows}


@torch.no_grad()
@pytest.mark.parametrize("max_length", [1024, 23])
def test_features_are_those_of_a_plain_forward(model, small_shards, tmp_path, max_length):
    answers = made_up(10, held_out=(1, 6))
    told = []
    shards = write_features(model, answers, tmp_path, TAPS, max_length=max_length, on_progress=told.append)
    assert [s.name for s in shards] == [f"{n}.safetensors" for n in ("train-00000", "train-00001", "held-out-00000")]
    assert told == [4, 8, 10]
    train = [r for r in answers if not r.held_out]
    for shard, group in zip(shards, (train[:4], train[4:], [r for r in answers if r.held_out])):
        rows = by_ids(shard)
        assert rows.keys() == {tuple(r.input_ids[:max_length]) for r in group}
        lengths = list(map(len, rows))
        assert lengths == sorted(lengths)
        for response in group:
            row = rows[tuple(response.input_ids[:max_length])]
            ids = torch.tensor([response.input_ids[:max_length]])
            out = model(ids, output_hidden_states=True)
            wanted = torch.cat([out.hidden_states[layer + 1][0] for layer in TAPS], -1)
            for ours, theirs in ((row["features"], wanted), (row["last_hidden"], out.hidden_states[-1][0])):
                assert ours.dtype == torch.bfloat16
                torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-5)
            own = torch.arange(ids.shape[1]) >= response.start
            assert torch.equal(row["loss_mask"], own)
            needed = torch.arange(ids.shape[1]) >= response.start - 1
            assert row["log_total"].dtype == torch.float32
            wanted = out.logits[0].logsumexp(-1) * needed
            torch.testing.assert_close(row["log_total"], wanted, rtol=1e-5, atol=1e-5)


def test_short_answers_and_unfinished_shards_wait(model, small_shards, tmp_path):
    answers = made_up(7)
    few = [Response(f"few{n}", "chat", list(range(1, 19)), 5, True, False) for n in range(3)]  # 13 of their own
    brief = Response("brief", "short", [1, 2, 3, 4, 5, 6, 7], 4, True, False)
    briefer = Response("briefer", "short", [1, 2, 3, 4, 5, 6], 4, True, False)
    shards = write_features(model, [*few, brief, briefer, *answers], tmp_path, TAPS)
    assert len(shards) == 2
    seen = {ids for shard in shards for ids in by_ids(shard)}
    assert seen == {tuple(r.input_ids) for r in [brief, *answers]}
    assert write_features(model, answers[:3], tmp_path / "few", TAPS) == []


def test_shards_that_exist_are_kept(model, small_shards, tmp_path, monkeypatch):
    answers = made_up(11, held_out=(2, 3))
    first = write_features(model, answers[:6], tmp_path, TAPS)
    assert [s.name for s in first] == ["train-00000.safetensors", "held-out-00000.safetensors"]
    before = {s: s.read_bytes() for s in first}
    more = write_features(model, answers, tmp_path, TAPS)
    assert [s.name for s in more][:2] == ["train-00000.safetensors", "train-00001.safetensors"]
    assert all(s.read_bytes() == content for s, content in before.items())

    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(features, "_shard", never)
    assert write_features(model, answers, tmp_path, TAPS) == more


def test_shards_of_other_layers_are_not_taken_for_these(model, small_shards, tmp_path):
    """A folder of features for other taps must not be trained on in silence: the widths may well be the same."""
    answers = made_up(4)
    write_features(model, answers, tmp_path, [0, 1])
    with pytest.raises(ValueError, match=r"train-00000\.safetensors"):
        write_features(model, answers, tmp_path, [0, 2])


@pytest.mark.parametrize("where", ["model", "disk"])
def test_a_failure_leaves_no_half_shard(model, small_shards, tmp_path, monkeypatch, where):
    answers = made_up(8)
    calls = []
    real_save, real_shard = features.save_file, features._shard

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            if where == "disk":
                args[1].write_bytes(b"half")
            raise OSError("no more")
        return (real_save if where == "disk" else real_shard)(*args, **kwargs)

    monkeypatch.setattr(features, "save_file" if where == "disk" else "_shard", fail)
    with pytest.raises(OSError, match="no more"):
        write_features(model, answers, tmp_path, TAPS)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["train-00000.safetensors"]
    shards = write_features(model, answers, tmp_path, TAPS)
    assert len(shards) == 2
    assert {ids for shard in shards for ids in by_ids(shard)} == {tuple(r.input_ids) for r in answers}


def test_batches_are_padded_on_the_right(model, small_shards, tmp_path):
    shards = write_features(model, made_up(8), tmp_path, TAPS)
    store = FeatureStore(shards, together=3)
    assert len(store) == 4  # 3 + 1 of each shard
    sizes, seen = [], set()
    for index in range(4):
        batch = store[index]
        sizes.append(len(batch.input_ids))
        assert batch.input_ids.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool
        rows = by_ids(shards[index // 2])
        width = max(batch.input_ids.shape[1], 1)
        longest = 0
        for row, ids in enumerate(batch.input_ids):
            length = int(ids.count_nonzero())  # 0 is no token of these responses
            longest = max(longest, length)
            seen.add(tuple(ids[:length].tolist()))
            stored = rows[tuple(ids[:length].tolist())]
            for key, value in vars(batch).items():
                assert torch.equal(value[row, :length], stored[key].to(value.dtype)), key
                assert not value[row, length:].any(), key
        assert longest == width
    assert sizes == [3, 1, 3, 1]
    assert len(seen) == 8
    assert len(FeatureStore([])) == 0


def test_token_counts(model, small_shards, tmp_path):
    answers = made_up(8)
    store = FeatureStore(write_features(model, answers, tmp_path, TAPS))
    counts = Counter(token for r in answers for token in r.input_ids[r.start :])
    assert store.token_counts(VOCABULARY).tolist() == [counts[token] for token in range(VOCABULARY)]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_reads_features_as_the_targets_distribution(model, make_draft, small_shards, tmp_path, dtype):
    """The mass that ``log_total`` and ``last_hidden`` give the whole vocabulary is 1, but for the bf16 rounding."""
    twin = type(model)(model.config).to(dtype).eval()
    twin.load_state_dict(model.state_dict())
    batch = FeatureStore(write_features(twin, made_up(4), tmp_path, TAPS))[0]
    logits = torch.nn.functional.linear(batch.last_hidden.to(dtype), twin.lm_head.weight).float()
    mass = (logits - batch.log_total[..., None]).exp().sum(-1)[batch.loss_mask]
    assert (mass - 1).abs().max() < (1e-5 if dtype == torch.bfloat16 else 0.05)


# --- all stages -------------------------------------------------------------------------------------------------------


def test_collect_and_measure(model, tokenizer, make_draft, tmp_path, monkeypatch):
    """Built-in prompts follow the user's own; features cover whole shards; follow-ups are not measured."""
    monkeypatch.setattr(features, "HELD_OUT_SHARD", 1)
    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join(json.dumps({"turns": [f"Question {n}?", "Why?"]}) + "\n" for n in range(520)))
    draft = make_draft(model)
    told = []
    recipe = Recipe(tokens=2500, max_new_tokens=16)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    train, held_out = collect(
        model,
        tokenizer,
        tmp_path / "out",
        recipe,
        draft.config.target_layer_ids,
        prompt_files=[mine],
        on_progress=lambda *figures: told.append(figures),
    )
    rows = list(read_responses(tmp_path / "out" / "responses.jsonl"))
    assert sum(len(r.input_ids) - r.start for r in rows) >= 2500
    assert {stage for stage, _, _ in told} == {"responses", "features"}
    assert len(train) >= 8 and len(held_out) == sum(r.held_out for r in rows)
    ids = {tuple(r.input_ids) for r in rows if r.held_out}
    for index in range(len(train)):
        for row in train[index].input_ids.tolist():
            assert not any(tuple(row[: len(other)]) == other for other in ids)
    results = measure(model, draft, tmp_path / "out", per_domain=1)
    saved = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert [one["prompts"] for one in saved] == [one.prompts for one in results]
    first = [r for r in rows if r.held_out and "+" not in r.id]
    assert results[-1].prompts == min(1, len(first)) and saved[-1]["tau"] == pytest.approx(results[-1].tau, nan_ok=True)


@pytest.fixture
def command(model, tokenizer, make_target, small_shards, tmp_path, monkeypatch):
    """``dspark-fast train`` on a saved target; gives the exit status."""
    pytest.importorskip("typer")
    import matplotlib.figure

    from dspark_fast.cli import main

    folder = tmp_path / "target"
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    mine = tmp_path / "mine.jsonl"
    # The shortest are answered first, so these held-out ones are.
    chosen = [f"Q{n}" for n in range(300) if is_held_out(user(f"Q{n}"))]
    chosen += [f"Question {n}?" for n in range(700)]
    mine.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in chosen))
    monkeypatch.setattr(features, "HELD_OUT_SHARD", 1)
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path, **_: path.write_bytes(b"\x89PNG"))

    def run(*arguments, out=tmp_path / "out"):
        settings = {
            "--model": folder, "--out": out, "--tokens": 900, "--max-new-tokens": 14, "--prompts": mine, "--layers": 1,
            "--block-size": 3, "--rank": 4, "--taps": "2,0", "--steps": 4, "--sequences": 2, "--anchors": 4,
            "--save-every": 2, "--evaluate-every": 2, "--per-domain": 1, "--vocabulary": 50,
        }  # fmt: skip
        settings.update(zip(arguments[::2], arguments[1::2]))
        with pytest.raises(SystemExit) as ended:
            main(["train", *[str(part) for pair in settings.items() for part in pair]])
        return ended.value.code or 0

    run.out = tmp_path / "out"
    return run


def steps_of(out):
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_train_on_the_command_line(command, model, tmp_path, monkeypatch):
    assert command() == 0
    out = command.out
    assert steps_of(out) == [1, 2, 3, 4]
    twin = type(model).from_pretrained(tmp_path / "target", dtype=torch.bfloat16)
    draft = DSparkDraft.from_pretrained(out / "draft", target=twin)
    assert (draft.config.block_size, draft.config.markov_rank, draft.config.target_layer_ids) == (3, 4, [0, 2])
    ids = torch.tensor([[5, 6, 7]])
    result = generate(twin, draft, ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert result.stats.rounds >= 1
    card = (out / "draft" / "README.md").read_text()
    tau = json.loads((out / "acceptance.json").read_text())[-1]["tau"]
    assert f"| all | 1 | {tau:.2f} |" in card
    assert (out / "loss.png").is_file()
    with safe_open(out / "checkpoint.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "4"

    files = ["responses.jsonl", "metrics.jsonl", "draft/model.safetensors", "acceptance.json"]
    files += sorted(str(path.relative_to(out)) for path in (out / "features").iterdir())
    before = {name: (out / name).read_bytes() for name in files}

    def never(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr(Trainer, "_update", never)
    monkeypatch.setattr(features, "_shard", never)
    monkeypatch.setattr(responses, "_answer", never)
    assert command() == 0
    assert {name: (out / name).read_bytes() for name in files} == before


@pytest.mark.parametrize("stage", ["responses", "features", "training"])
def test_ctrl_c_leaves_what_the_next_run_goes_on_from(command, monkeypatch, stage):
    owner, name, calls = {
        "responses": (responses, "_answer", 1),
        "features": (features, "_shard", 2),
        "training": (Trainer, "_update", 3),
    }[stage]
    real, made = getattr(owner, name), []

    def interrupted(*args):
        made.append(args)
        if len(made) > calls:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, name, interrupted)
    assert command() == 130
    assert not (command.out / "draft").exists()
    monkeypatch.setattr(owner, name, real)
    assert command() == 0
    assert steps_of(command.out) == [1, 2, 3, 4]
    ids = [r.id for r in read_responses(command.out / "responses.jsonl")]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--taps", "1,x"), "--taps is '1,x'"),
        (("--prompts", "nowhere.jsonl"), "no such file: nowhere.jsonl"),
        (("--tokens", 20, "--max-new-tokens", 2), "--tokens is too small"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(command, capfd, arguments, message):
    assert command(*arguments) == 2
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())


# --- whose answers a folder holds ---


@pytest.mark.parametrize("kind", ["Granite", "Gemma2"])
def test_a_target_that_changes_its_logits_behind_the_head_is_refused(kind):
    torch.manual_seed(0)
    geometry = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    geometry |= {"num_key_value_heads": 2, "vocab_size": 97, "initializer_range": 0.25, "tie_word_embeddings": False}
    geometry |= {"logits_scaling": 8.0} if kind == "Granite" else {"final_logit_softcapping": 2.0, "head_dim": 16}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**geometry)).eval()
    with pytest.raises(ValueError, match=f"{kind}ForCausalLM changes its logits"):
        check_head(model)


@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Qwen2", "Gemma"])
def test_a_target_whose_logits_are_its_heads_is_not(kind, make_target):
    check_head(make_target(kind))


def test_a_folder_of_another_targets_answers_is_refused(make_target, tmp_path):
    model = make_target()
    recipe = Recipe(seed=3)
    remember(tmp_path, model, recipe)
    remember(tmp_path, model, recipe)
    with pytest.raises(ValueError, match="holds answers with seed 3, asked for is 4"):
        remember(tmp_path, model, Recipe(seed=4))
    other = make_target(fresh=True)
    with torch.no_grad():
        other.get_input_embeddings().weight[5, 5] += 1
    with pytest.raises(ValueError, match="holds answers with weights"):
        remember(tmp_path, other, recipe)

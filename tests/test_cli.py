"""The command line, on a tiny pair with a byte-level tokenizer: what a person and what a program gets to see."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dspark_fast import __version__, cli, generation
from dspark_fast.cli import chat as chat_module
from dspark_fast.cli import generate as generate_module
from dspark_fast.cli import session as session_module
from dspark_fast.cli.app import app
from dspark_fast.cli.session import TextStream
from dspark_fast.pairs import PAIRS

assert chat_module and generate_module  # importing them registers the commands
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEYS = {
    "text",
    "tokens",
    "acceptance_length",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "identical",
    "first_difference",
    "dtype",
    "device",
    "predicted_speedup",
    "rounds",
    "seed",
    "model",
    "draft",
    "versions",
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and three special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate([*letters, *special])}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def pair(make_target, make_draft, tmp_path_factory):
    """Options that name a saved pair."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = byte_tokenizer()
    model = make_target(
        vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=258, pad_token_id=256, fresh=True
    )
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_draft(model, num_hidden_layers=1).save_pretrained(folder / "draft")
    return ["--model", str(folder / "target"), "--draft", str(folder / "draft"), "--dtype", "fp32", "--device", "cpu"]


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """The other tests of this process go on hearing transformers' remarks."""
    monkeypatch.setattr(session_module, "quiet", lambda: None)


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(each) for each in arguments], **options)


def as_json(result):
    """The one JSON object that standard output must be."""
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def one_sentence(result, text, code=2):
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert text in flat
    assert "Traceback" not in flat


# --- generate ---------------------------------------------------------------------------------------------------------


def test_text_then_one_line_of_figures(pair):
    result = run("generate", "Hello", *pair, "--max-new-tokens", 20)
    assert result.exit_code == 0, result.output
    report = as_json(run("generate", "Hello", *pair, "--max-new-tokens", 20, "--json"))
    text, figures = result.stdout.removesuffix("\n").rsplit("\n", 1)
    assert text == report["text"].removesuffix("\n")
    assert figures.startswith(f"{len(report['tokens'])} tokens | ")
    assert f"acceptance length {report['acceptance_length']:.2f} | greedy | fp32 | cpu" in figures


def test_json_without_a_comparison(pair):
    report = as_json(run("generate", "Hello", *pair, "--max-new-tokens", 12, "--json"))
    assert set(report) >= KEYS
    for key in ("baseline_tokens_per_second", "speedup", "identical", "first_difference", "predicted_speedup", "seed"):
        assert report[key] is None
    assert len(report["tokens"]) == 12
    assert report["dtype"] == "fp32" and report["device"] == "cpu"
    assert report["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_json_of_a_comparison(pair, temperature):
    sampling = ["--temperature", temperature, "--seed", 1] if temperature else []
    arguments = ["generate", "Hello", *pair, "--max-new-tokens", 12, "--compare", "--repeats", 2, "--json", *sampling]
    result = run(*arguments)
    report = as_json(result)
    assert report["identical"] is True and report["first_difference"] is None
    assert report["mode"] == ("coupled" if temperature else "greedy")
    assert report["seed"] == (1 if temperature else None)
    assert all(report[key] > 0 for key in ("speedup", "predicted_speedup", "baseline_tokens_per_second"))
    assert report["tokens"] == report["comparison"]["baseline_tokens"]
    assert ("uses --verification coupled" in result.stderr) == bool(temperature)


@pytest.mark.floor
def test_a_real_process_prints_json_and_nothing_else(pair, tmp_path):
    """Coupled at a temperature, with whatever torch and transformers have to say when they are loaded."""
    command = [sys.executable, "-m", "dspark_fast", "generate", "-", *pair, "--max-new-tokens", "12"]
    command += ["--json", "--compare", "--repeats", "1", "--temperature", "0.8", "--seed", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, input="Grüße", capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] is True and report["seed"] == 1
    assert "Warning" not in done.stderr and "generation flags" not in done.stderr


@pytest.mark.parametrize("as_table", [False, True])
def test_a_planted_difference_is_reported(pair, monkeypatch, as_table):
    true = generation.generate

    def wrong(model, draft, input_ids, **kwargs):
        output = true(model, draft, input_ids, **kwargs)
        (output if isinstance(output, torch.Tensor) else output.sequences)[0, input_ids.shape[1] + 2] = 65
        return output

    monkeypatch.setattr(generation, "generate", wrong)
    arguments = ["generate", "Hello", *pair, "--max-new-tokens", 6, "--compare", "--repeats", 1]
    if as_table:
        result = run(*arguments)
        assert result.exit_code == 0
        assert "not the same tokens: the first 2 tokens are the same, then ours has" in result.stdout
        assert "rounding does not explain" in result.stdout
        assert "the same 6 tokens" not in result.stdout
    else:
        report = as_json(run(*arguments, "--json"))
        assert report["identical"] is False
        assert report["first_difference"]["index"] == 2 and report["first_difference"]["ours"] == 65
        assert report["first_difference"]["near_tie"] is False


def test_the_table(pair):
    result = run("generate", "Hello", *pair, "--max-new-tokens", 8, "--compare", "--repeats", 2)
    assert result.exit_code == 0, result.output
    for words in ("dspark-fast ", "transformers ", "median of 2 pairs of runs", "predicted ", "the same 8 tokens"):
        assert words in result.stdout


def test_prompt_from_standard_input(pair):
    options = [*pair, "--max-new-tokens", 8, "--json"]
    expected = as_json(run("generate", "Hello you", *options))["tokens"]
    assert as_json(run("generate", "-", *options, input="Hello you\n"))["tokens"] == expected
    assert as_json(run("generate", *options, input="Hello you\n"))["tokens"] == expected
    assert as_json(run("generate", "Hello me", *options))["tokens"] != expected
    one_sentence(run("generate", *options, input=" \n"), "Invalid value for 'PROMPT': it is empty.")


def test_what_the_model_is_given(pair, monkeypatch):
    given = []
    true = generation.generate

    def watching(model, draft, input_ids, **kwargs):
        given.append(byte_tokenizer().decode(input_ids[0]))
        return true(model, draft, input_ids, **kwargs)

    monkeypatch.setattr(generation, "generate", watching)
    for options in ([], ["--system", "Be brief"], ["--no-chat-template"]):
        as_json(run("generate", "Hello", *pair, "--max-new-tokens", 2, "--json", *options))
    user = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"  # and no <think>
    assert given == [user, "<|im_start|>system\nBe brief<|im_end|>\n" + user, "Hello"]


def test_settings_reach_the_decoder(pair, monkeypatch):
    given = {}
    true = generation.generate

    def watching(model, draft, input_ids, **kwargs):
        given.update(kwargs)
        return true(model, draft, input_ids, **kwargs)

    monkeypatch.setattr(generation, "generate", watching)
    arguments = "--temperature 0.5 --top-k 9 --top-p 0.8 --min-p 0.1 --seed 7 --verification coupled --no-markov"
    as_json(
        run("generate", "Hi", *pair, *arguments.split(), "--confidence-threshold", 0.3, "--max-new-tokens", 3, "--json")
    )
    expected = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "seed": 7,
        "verification": "coupled",
        "use_markov": False,
        "confidence_threshold": 0.3,
        "max_new_tokens": 3,
    }
    assert {key: given[key] for key in expected} == expected


def test_a_seed_left_out_is_drawn_and_told(pair):
    options = [*pair, "--max-new-tokens", 16, "--json", "--temperature", 0.9]
    one, two = (as_json(run("generate", "Hi", *options)) for _ in range(2))
    assert one["seed"] != two["seed"] and one["tokens"] != two["tokens"]
    assert as_json(run("generate", "Hi", *options, "--seed", one["seed"]))["tokens"] == one["tokens"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["--temperature", "-1"], "Invalid value for '--temperature'"),
        (["--temperature", "inf"], "Invalid value for '--temperature'"),
        (["--top-p", "1.5"], "Invalid value for '--top-p'"),
        (["--verification", "hope"], "Invalid value for '--verification'"),
        (["--confidence-threshold", "2"], "Invalid value for '--confidence-threshold'"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
        (["--system", "x", "--no-chat-template"], "a system message needs the chat template"),
        (["--device", "tpuu"], "Error: device is 'tpuu'"),
        (["--draft", "/no/such/folder"], "Error: the drafter is '/no/such/folder', and there is no such folder"),
        (["--speed", "9"], "No such option: --speed"),
    ],
)
def test_bad_arguments(pair, options, text):
    one_sentence(run("generate", "Hello", *pair, *options), text)


def test_an_unknown_model_names_the_known_ones():
    result = run("generate", "Hello", "--model", "someone/else")
    one_sentence(result, "Error: no drafter is known for someone/else")
    assert all(name in result.stderr for name in PAIRS)


def test_a_drafter_of_another_target(pair, make_target, make_draft, tmp_path):
    make_draft(make_target()).save_pretrained(tmp_path / "other")
    result = run("generate", "Hello", *pair, "--draft", tmp_path / "other")
    assert result.exit_code == 2
    assert "Error: the drafter's vocab_size is 97" in result.stderr


def test_the_context_ends(pair):
    prompt = "x" * 500
    result = run("generate", prompt, *pair, "--no-chat-template", "--max-new-tokens", 40, "--json")
    assert len(as_json(result)["tokens"]) == 12
    assert "ends after 12 more tokens" in result.stderr
    result = run("generate", prompt + prompt, *pair, "--no-chat-template")
    one_sentence(result, "Error: the prompt has 1000 tokens, and the context of")


def test_ctrl_c(pair, monkeypatch):
    def interrupted(*args, streamer, **kwargs):
        for value in ([[1, 2]], [40], [41]):
            streamer.put(torch.tensor(value))
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupted)
    result = run("generate", "Hello", *pair)
    assert result.exit_code == 130
    assert result.stdout.endswith("\n") and len(result.stdout) == 3
    assert "Traceback" not in result.stderr


# --- chat -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch):
    """What the model was given, turn by turn; its first answer can be interrupted after two tokens."""
    given = []
    true = generation.generate

    def watching(model, draft, input_ids, *, streamer, **kwargs):
        given.append(byte_tokenizer().decode(input_ids[0]))
        if watching.interrupt and len(given) == 1:
            for value in (input_ids, [40], [41]):
                streamer.put(torch.as_tensor(value))
            raise KeyboardInterrupt
        return true(model, draft, input_ids, streamer=streamer, **kwargs)

    watching.interrupt = False
    watching.given = given
    monkeypatch.setattr(generation, "generate", watching)
    return watching


def test_chat_remembers_until_it_is_reset(pair, heard):
    lines = "One\n\n  Two \n/reset\nThree\n/help\n/nonsense\n/exit\nFour\n"
    result = run("chat", *pair, "--max-new-tokens", 5, "--system", "S", input=lines)
    assert result.exit_code == 0, result.output
    first, second, third = heard.given
    start = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    assert first == f"{start}One{end}"
    assert second.startswith(first) and second.endswith(f"<|im_end|>\n<|im_start|>user\nTwo{end}")
    assert third == f"{start}Three{end}"
    assert result.stdout.count("| greedy | fp32 | cpu\n") == 3
    assert "/reset  forget" in result.stdout
    assert "no command /nonsense" in result.stderr


def test_a_chat_does_not_read_its_history_again(pair, monkeypatch):
    from dspark_fast.engine.target import RaggedTarget

    prefill, lengths = RaggedTarget.prefill, []

    def counted(self, tokens, counts, on_features):
        before = int(self.cache.lengths)
        lengths.append((before, before + int(counts)))
        return prefill(self, tokens, counts, on_features)

    monkeypatch.setattr(RaggedTarget, "prefill", counted)
    result = run("chat", *pair, "--max-new-tokens", 5, input="One\nTwo\n/reset\nOne\n")
    assert result.exit_code == 0, result.output
    first, second, third = lengths
    assert first[0] == 0 and first[1] <= second[0] < second[1]
    assert third == (first[1] - 1, first[1])


def test_ctrl_c_stops_the_answer_and_not_the_chat(pair, heard):
    heard.interrupt = True
    result = run("chat", *pair, "--max-new-tokens", 5, input="One\nTwo\n")
    assert result.exit_code == 0, result.output
    assert len(heard.given) == 2
    said = byte_tokenizer().decode([40, 41])
    assert f"assistant\n{said}<|im_end|>" in heard.given[1]
    assert f"{said}\nstopped\n" in result.stdout


def test_a_conversation_that_fills_the_context_goes_on_after_a_reset(pair):
    result = run("chat", *pair, "--max-new-tokens", 3, input=f"{'x' * 600}\nTwo\n")
    assert result.exit_code == 0, result.output
    assert "Error: the prompt has" in result.stderr and "/reset starts over" in result.stderr
    assert result.stdout.count("| greedy |") == 1


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_streamed_text_is_whole_characters():
    tokenizer = byte_tokenizer()
    text = "naïve — 日本 🎨🇫🇷 end\n"
    pieces = []
    stream = TextStream(tokenizer, pieces.append)
    stream.put(torch.tensor([[65, 66]]))  # the prompt
    tokens = [*tokenizer.encode(text), 258]
    for token in tokens:
        stream.put(torch.tensor([token]))
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert len(pieces) == len(text)  # nothing is held back longer than it must be
    half = tokenizer.encode("é")[:1]
    stream.put(torch.tensor(half))
    assert "".join(pieces) == text
    stream.end()
    assert "".join(pieces) == text + "\ufffd"
    assert stream.tokens == tokens + half


def test_a_terminal_gets_no_control_characters(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    session_module.write("a\x1b[2J\x07\x9bb\tc\n日🎨\u200d")
    assert capsys.readouterr().out == "a[2Jb\tc\n日🎨\u200d"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra(monkeypatch, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f'The command line needs {missing}: pip install "dspark-fast[cli]"\n'


def test_version_and_help_do_not_wait_for_torch(tmp_path):
    code = (
        "import sys; from dspark_fast.cli import main\n"
        "for line in ('--version', '--help', 'generate --help', 'chat --help', 'generate --top-k x'):\n"
        "    try: main(line.split())\n"
        "    except SystemExit as end: print('status', end.code)\n"
        "print('slow', sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"dspark-fast {__version__}\nstatus 0\n")
    assert done.stdout.count("status 0\n") == 4 and "status 2\n" in done.stdout
    assert done.stdout.endswith("slow []\n")
    assert "--compare" in done.stdout and "/reset" in done.stdout


def test_compare_does_not_overrule_a_chosen_verification():
    result = run("generate", "Hi.", "--compare", "--temperature", "0.8", "--verification", "rejection")
    assert result.exit_code == 2
    assert "only coupled verification promises" in " ".join(result.stderr.split()).replace("│ ", "")

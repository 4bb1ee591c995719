"""After a call, however it ended, the model is as it was before."""

from __future__ import annotations

import threading

import pytest
import torch

import dspark_fast
from dspark_fast.drafters import DSparkDrafter

IMPLEMENTATIONS = ["sdpa", "eager"]
SETTINGS = {"max_new_tokens": 12, "do_sample": False}
IDS = torch.tensor([[5, 17, 40, 3, 88]])


@pytest.fixture
def pair(make_target, make_draft):
    model = make_target(fresh=True)
    return model, make_draft(model)


def hooks(model):
    return {
        name: (list(module._forward_hooks), list(module._forward_pre_hooks))
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    }


class AsBefore:
    """``with AsBefore(model, draft):`` everything that a call could have left behind, checked at the end."""

    def __init__(self, model, draft=None):
        self.model = model
        self.draft = draft

    def state(self):
        config = self.model.config
        parts = (self.model, self.draft) if self.draft is not None else (self.model,)
        return {
            "hooks": [hooks(part) for part in parts],
            "attention": config._attn_implementation,
            "config": config.to_dict(),
            "generation config": self.model.generation_config.to_dict(),
            "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "training": [[module.training for module in part.modules()] for part in parts],
            "requires grad": [[weight.requires_grad for weight in part.parameters()] for part in parts],
            "attributes": [sorted(module.__dict__) for part in parts for module in part.modules()],
        }

    def __enter__(self):
        self.said = self.model.generate(IDS, **SETTINGS)  # before the state: transformers has its own first-call habits
        self.weights = [weight.clone() for weight in self.model.state_dict().values()]
        self.before = self.state()

    def __exit__(self, *error):
        if error[0] is None:
            assert self.state() == self.before
            assert all(torch.equal(a, b) for a, b in zip(self.model.state_dict().values(), self.weights))
            assert torch.equal(self.model.generate(IDS, **SETTINGS), self.said)


@pytest.mark.floor
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_after_a_normal_run(implementation, pair):
    model, draft = pair
    model.set_attn_implementation(implementation)
    with AsBefore(model, draft):
        out = dspark_fast.generate(model, draft, IDS, **SETTINGS)
        assert torch.equal(out, model.generate(IDS, **SETTINGS))
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_modes_of_the_caller_stay(training, grad, pair):
    model, draft = pair
    model.train(training)
    with torch.set_grad_enabled(grad), AsBefore(model, draft):
        dspark_fast.generate(model, draft, IDS, **SETTINGS)


def test_inference_mode_leaves_nothing_behind(pair):
    """A tensor that was made in inference mode and kept would break a later backward pass."""
    model, draft = pair
    draft.requires_grad_(True)
    with torch.inference_mode():
        out = dspark_fast.generate(model, draft, IDS, **SETTINGS)
    assert out.tolist() == dspark_fast.generate(model, draft, IDS, **SETTINGS).tolist()
    loss = model(IDS).logits.square().mean() + draft.context(torch.randn(1, 4, draft.fc.in_features)).square().mean()
    loss.backward()
    assert model.lm_head.weight.grad is not None and draft.fc.weight.grad is not None


@pytest.mark.floor
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 5], ids=["first-token", "in-the-middle"])
def test_after_an_exception_in_the_streamer(at, error, implementation, pair, streamer):
    model, draft = pair
    model.set_attn_implementation(implementation)
    with AsBefore(model, draft):
        listener = streamer(fail_at=at, error=error)
        with pytest.raises(error, match="as told"):
            dspark_fast.generate(model, draft, IDS, streamer=listener, **SETTINGS)
        assert len(listener.heard) == at + 2


@pytest.mark.floor
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("passes", [1, 4], ids=["prefill", "verify"])
def test_after_an_interrupt_inside_a_layer(passes, implementation, pair):
    model, draft = pair
    model.set_attn_implementation(implementation)
    calls = []

    def interrupt(module, args, output):
        calls.append(model.config._attn_implementation)
        if len(calls) == passes:
            raise KeyboardInterrupt

    with AsBefore(model, draft):
        handle = model.model.layers[3].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            dspark_fast.generate(model, draft, IDS, **SETTINGS)
        handle.remove()
        assert len(calls) == passes and calls[-1] != implementation  # it was switched, so there was something to undo


@pytest.mark.parametrize("method", ["begin", "commit", "propose"])
def test_after_an_exception_in_the_drafter(method, pair):
    model, draft = pair

    class Failing(DSparkDrafter):
        pass

    def fail(self, *args):
        raise ZeroDivisionError("as told")

    setattr(Failing, method, fail)
    with AsBefore(model, draft):
        with pytest.raises(ZeroDivisionError):
            dspark_fast.generate(model, Failing(draft), IDS, **SETTINGS)
        # And the next call works.
        assert torch.equal(dspark_fast.generate(model, draft, IDS, **SETTINGS), model.generate(IDS, **SETTINGS))


def test_after_a_refusal(pair):
    model, draft = pair
    with AsBefore(model, draft), pytest.raises(ValueError, match="num_beams"):
        dspark_fast.generate(model, draft, IDS, num_beams=2, **SETTINGS)


def test_after_broken_logits(pair):
    model, draft = pair
    with AsBefore(model, draft):
        handle = model.lm_head.register_forward_hook(lambda module, args, output: output * float("nan"))
        with pytest.raises(FloatingPointError, match="row 0 for position 5"):
            dspark_fast.generate(model, draft, IDS, **SETTINGS)
        handle.remove()


@pytest.mark.floor
def test_a_model_that_passes_its_attention_by_is_refused_in_batches_and_left_alone():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=2, eos_token_id=None)).eval()
    with AsBefore(model):
        with pytest.raises(ValueError, match=r"BloomForCausalLM.*one row at a time: the batch has 2"):
            dspark_fast.generate(model, None, IDS.repeat(2, 1), **SETTINGS)
        dspark_fast.generate(model, None, IDS, **SETTINGS)


@pytest.mark.parametrize("where", ["model", "decoder", "layers", "wrapped"])
def test_a_compiled_target_runs_uncompiled(where, make_target, make_draft):
    """Hooks that are set after the trace do not run in it: the taps would stay empty."""
    model = make_target(fresh=True, num_hidden_layers=4)
    draft, truth = make_draft(model), model.generate(IDS, **SETTINGS)
    parts = {"model": [model], "decoder": [model.model], "layers": model.model.layers, "wrapped": []}[where]
    for part in parts:
        part.compile(backend="eager")
    compiled = torch.compile(model, backend="eager") if where == "wrapped" else model
    compiled(IDS)  # traced, without hooks
    assert torch.equal(dspark_fast.generate(compiled, draft, IDS, **SETTINGS), truth)
    assert torch.equal(compiled.generate(IDS, custom_generate=dspark_fast.decoding(draft), **SETTINGS), truth)


class InTheMiddle:
    """A streamer that, at the third token, lets something else happen."""

    def __init__(self, what):
        self.what = what
        self.heard = 0

    def put(self, value):
        self.heard += 1
        if self.heard == 4:
            self.what()

    def end(self):
        pass


def in_a_thread(work, wait):
    """Start ``work`` in a thread; its result or exception lands in the dictionary that is returned."""
    result = {}

    def run():
        try:
            result["value"] = work()
        except BaseException as error:
            result["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(wait)
    result["thread"] = thread
    return result


def test_another_thread_that_uses_our_generate_waits_its_turn(pair, make_draft):
    model, draft = pair
    other = make_draft(model, block_size=3)
    ids = torch.tensor([[9, 8, 7]])
    expected = model.generate(ids, **SETTINGS)
    results = []

    def interfere():
        results.append(in_a_thread(lambda: dspark_fast.generate(model, other, ids, **SETTINGS), wait=0.2))
        assert "value" not in results[0]  # it waits

    with AsBefore(model, draft):
        out = dspark_fast.generate(model, draft, IDS, streamer=InTheMiddle(interfere), **SETTINGS)
        results[0]["thread"].join(60)
        assert torch.equal(out, model.generate(IDS, **SETTINGS))
        assert torch.equal(results[0]["value"], expected)


def test_another_thread_that_uses_the_model_itself_is_right_or_told(pair):
    model, draft = pair
    ids = torch.tensor([[9, 8, 7]])
    expected = model.generate(ids, **SETTINGS)
    results = []

    def interfere():
        results.append(in_a_thread(lambda: model.generate(ids, **SETTINGS), wait=60))

    with AsBefore(model, draft):
        out = dspark_fast.generate(model, draft, IDS, streamer=InTheMiddle(interfere), **SETTINGS)
        assert torch.equal(out, model.generate(IDS, **SETTINGS))
    if "error" in results[0]:
        assert "only inside dspark_fast.generate" in str(results[0]["error"])
    else:
        assert torch.equal(results[0]["value"], expected)


@pytest.mark.parametrize("door", ["ours", "the-models"])
def test_a_call_from_inside_a_call_is_right_or_told(door, pair, make_draft):
    """A streamer that generates with the same model, in the same thread."""
    model, draft = pair
    ids = torch.tensor([[9, 8, 7]])
    expected = model.generate(ids, **SETTINGS)
    results = []

    def interfere():
        if door == "ours":
            results.append(dspark_fast.generate(model, make_draft(model, block_size=3), ids, **SETTINGS))
        else:
            try:
                results.append(model.generate(ids, **SETTINGS))
            except RuntimeError as error:
                assert "dspark_fast.generate" in str(error)

    with AsBefore(model, draft):
        out = dspark_fast.generate(model, draft, IDS, streamer=InTheMiddle(interfere), **SETTINGS)
        assert torch.equal(out, model.generate(IDS, **SETTINGS))
    for result in results:
        assert torch.equal(result, expected)

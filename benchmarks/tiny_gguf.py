"""A small llama model of random weights as a GGUF file, to try the load test against llama.cpp without any download.

    pip install gguf
    python -m benchmarks.tiny_gguf model.gguf --layers 6 --wide 384 --inner 1024 --heads 6

Output: a model whose vocabulary is the 256 bytes, and the words of our prompts with all their starts; so a prompt has
as many tokens as words (`target.tokens_per_word` 1), and an answer is a row of such words. Its end token is as likely
as a word.
Does not: make sense. Needs the package gguf, which nothing else here needs.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from bench.workload.prompts import WORDS

UNKNOWN, BEGIN, END, BYTES = 0, 1, 2, 256
SPACE = "\u2581"  # how sentencepiece writes the blank before a word
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """(pieces, scores, types of llama.cpp): longer pieces score higher, so that each word is merged from its left."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(BYTES)]
    types = [2, 3, 3] + [6] * BYTES  # unknown, control, byte
    more = [SPACE, *(chr(c) for c in range(33, 127))]
    more += [SPACE + word[:n] for word in WORDS for n in range(1, len(word) + 1)]
    more = list(dict.fromkeys(more))
    scores = [0.0] * len(pieces) + [-1.0 if len(piece) == 1 else float(len(piece)) for piece in more]
    return pieces + more, scores, types + [1] * len(more)


def write(path: Path, *, layers: int, wide: int, inner: int, heads: int, context: int, seed: int) -> int:
    """Write the file; returns its number of tokens."""
    gguf: Any = importlib.import_module("gguf")
    rng = np.random.default_rng(seed)
    pieces, scores, types = vocabulary()
    size, kv_heads = len(pieces), max(heads // 3, 1)
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("random-llama")
    out.add_context_length(context)
    out.add_embedding_length(wide)
    out.add_block_count(layers)
    out.add_feed_forward_length(inner)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(wide // heads)
    out.add_vocab_size(size)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    out.add_tokenizer_model("llama")
    out.add_tokenizer_pre("default")
    out.add_token_list([piece.encode() for piece in pieces])
    out.add_token_scores(scores)
    out.add_token_types(types)
    out.add_bos_token_id(BEGIN)
    out.add_eos_token_id(END)
    out.add_unk_token_id(UNKNOWN)
    out.add_add_bos_token(True)
    out.add_chat_template(TEMPLATE)

    def half(rows: int, columns: int, scale: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns), dtype=np.float32) * scale).astype(np.float16)

    words = {SPACE + word for word in WORDS}
    spoken = np.array([piece in words or place == END for place, piece in enumerate(pieces)])
    head = half(size, wide, 2.0 / wide**0.5) * spoken[:, None].astype(np.float16)  # all else has logit 0: hardly drawn
    out.add_tensor("token_embd.weight", half(size, wide, 1.0))
    out.add_tensor("output.weight", head)
    out.add_tensor("output_norm.weight", np.ones(wide, np.float32))
    shapes = {
        "attn_q": (wide, wide), "attn_k": (kv_heads * wide // heads, wide), "attn_v": (kv_heads * wide // heads, wide),
        "attn_output": (wide, wide), "ffn_gate": (inner, wide), "ffn_up": (inner, wide), "ffn_down": (wide, inner),
    }  # fmt: skip
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            out.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(wide, np.float32))
        for name, (rows, columns) in shapes.items():
            out.add_tensor(f"blk.{layer}.{name}.weight", half(rows, columns, 1 / columns**0.5))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return size


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    for name, value in (("layers", 6), ("wide", 384), ("inner", 1024), ("heads", 6), ("context", 8192), ("seed", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args())
    try:
        tokens = write(given.pop("path"), **given)
    except ModuleNotFoundError:
        raise SystemExit("the package gguf is not installed: pip install gguf") from None
    print(f"{tokens} tokens")


if __name__ == "__main__":
    main()

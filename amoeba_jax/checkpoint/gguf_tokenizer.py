"""Hugging Face tokenizer files, built from the vocabulary in a GGUF file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from amoeba_jax.errors import CheckpointError

# Token types of the GGUF specification (`tokenizer.ggml.token_type`).
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

# Control tokens that end a turn, a message or a text, by name. From llama.cpp, which keeps such a list (its
# `llama-vocab.cpp`) because many files name no end but `eos`.
ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "</s>",
        "<eos>",
        "<｜end▁of▁sentence｜>",
    }
)

# Names of pre-tokenizers in llama.cpp (its `llama-vocab.cpp`), grouped by their rule.
GPT2 = frozenset({"default", "gpt-2"})
SINGLE_DIGITS = frozenset({"smollm", "starcoder"})
LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})

# Both rules as in the tokenizer.json of the models. They differ in the number of digits per word.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = WORDS.replace("DIGITS", r"\p{N}{1,3}")
QWEN2_WORDS = WORDS.replace("DIGITS", r"\p{N}")


def write_tokenizer(metadata: Mapping[str, Any], max_length: int, directory: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` into `directory`.

    Args:
        metadata: key-value pairs of the GGUF file.
        max_length: context length of the model in tokens.
        directory: existing directory.

    Raises `CheckpointError` if the vocabulary is of an unknown kind or inconsistent.
    """
    vocabulary = Vocabulary(metadata)
    try:
        tokenizer = vocabulary.build()
    except CheckpointError:
        raise
    except Exception as error:  # the Rust library raises `Exception`, such as for merges outside the vocabulary
        raise CheckpointError(f"the GGUF file's vocabulary cannot be used: {error}") from error
    # `tokenizer.save` would raise `Exception` for a full disk.
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := vocabulary.special(key)) is not None:
            config[f"{role}_token"] = token
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    _write_json(directory / "tokenizer_config.json", config)

    ends = vocabulary.end_ids()
    generation: dict[str, Any] = {}
    if (bos := vocabulary.special_id("bos")) is not None:
        generation["bos_token_id"] = bos
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if (pad := vocabulary.special_id("padding")) is not None:
        generation["pad_token_id"] = pad
    _write_json(directory / "generation_config.json", generation)


class Vocabulary:
    """Vocabulary of a GGUF file, from the metadata keys `tokenizer.ggml.*`.

    Raises `CheckpointError` if the vocabulary is damaged, or if its kind is not supported.
    """

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        self.kind: str = self._get("model", None)
        self.pre: str = self._get("pre", "default")
        self.tokens: list[str] = self._get("tokens", [])
        self.types: list[int] = self._get("token_type", [])
        if self.kind not in ("gpt2", "llama"):
            raise CheckpointError(
                f"the GGUF file's tokenizer.ggml.model is {self.kind!r}: only 'gpt2' (byte-level BPE) and "
                f"'llama' (SentencePiece BPE) can be rebuilt; use the model's safetensors directory instead"
            )
        if not self.tokens or len(self.types) not in (0, len(self.tokens)):
            raise CheckpointError(
                f"the GGUF file has {len(self.tokens)} tokens and {len(self.types)} token types: "
                f"it is damaged, download it again"
            )
        # The defaults of llama.cpp.
        self.add_bos: bool = self._get("add_bos_token", self.kind == "llama" or self.pre in LLAMA3)
        self.add_eos: bool = self._get("add_eos_token", False)

    def special_id(self, role: str) -> int | None:
        """Return the id of the token with a role such as "bos", or None if no token has the role.

        Raises `CheckpointError` if the id in the metadata is outside the vocabulary.
        """
        token_id = self._get(f"{role}_token_id", None)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"the GGUF file's {role}_token_id is {token_id}, but it has {len(self.tokens)} tokens: "
                f"it is damaged, download it again"
            )
        return token_id

    def special(self, role: str) -> str | None:
        """Return the token with a role such as "bos", or None if no token has the role."""
        token_id = self.special_id(role)
        return None if token_id is None else self.tokens[token_id]

    def end_ids(self) -> list[int]:
        """Return the ids of the tokens that end a generation: end of text, end of turn and end of message.

        Many files of chat models declare only the end of text. The result therefore also has all control tokens whose
        name is in `ENDS`.
        """
        named = [self.special_id(role) for role in ("eos", "eot", "eom")]
        known = [
            i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=False))
            if kind == CONTROL and token in ENDS
        ]
        return list(dict.fromkeys([i for i in named if i is not None] + known))

    def build(self) -> Tokenizer:
        """Return the tokenizer. Raises `CheckpointError` if the vocabulary is not supported or damaged."""
        tokenizer = self._byte_level() if self.kind == "gpt2" else self._sentencepiece()
        added = [
            AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(self.tokens, self.types, strict=False)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
        tokenizer.add_special_tokens([token for token in added if token.special])
        tokenizer.add_tokens([token for token in added if not token.special])
        bos = self.special("bos") if self.add_bos else None
        eos = self.special("eos") if self.add_eos else None
        ends = list(dict.fromkeys(token for token in (bos, eos) if token))
        if ends:
            single = [piece for piece in (bos, "$A", eos) if piece]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=single,
                pair=single + [f"{piece}:1" for piece in (bos, "$B", eos) if piece],
                special_tokens=[(token, self.tokens.index(token)) for token in ends],
            )
        return tokenizer

    def _byte_level(self) -> Tokenizer:
        merges = [tuple(merge.split(" ")) for merge in self._get("merges", [])]
        if not merges or any(len(merge) != 2 for merge in merges):
            raise CheckpointError(
                "the GGUF file's tokenizer.ggml.merges is missing or damaged: download the file again"
            )
        prefix_space = self._get("add_space_prefix", False)
        words = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
        if self.pre in GPT2:
            split: pre_tokenizers.PreTokenizer = words
        elif self.pre in SINGLE_DIGITS:
            split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        elif self.pre in LLAMA3 | QWEN2:
            pattern = LLAMA3_WORDS if self.pre in LLAMA3 else QWEN2_WORDS
            split = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
                ]
            )
        else:
            known = ", ".join(sorted(GPT2 | SINGLE_DIGITS | LLAMA3 | QWEN2))
            raise CheckpointError(
                f"the GGUF file's tokenizer.ggml.pre is {self.pre!r}: only {known} can be rebuilt; "
                f"use the model's safetensors directory instead"
            )
        tokenizer = Tokenizer(models.BPE(self._ids(), merges, ignore_merges=self.pre in LLAMA3))
        if self.pre in QWEN2:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = split
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        # The same parts as in transformers' LlamaConverter.
        scores: list[float] = self._get("scores", [])
        if len(scores) != len(self.tokens):
            raise CheckpointError(
                f"the GGUF file has {len(self.tokens)} tokens but {len(scores)} scores: download it again"
            )
        ids = self._ids()
        unknown = self.special("unknown") or next(
            (token for token, kind in zip(self.tokens, self.types, strict=False) if kind == UNKNOWN), None
        )
        tokenizer = Tokenizer(
            models.BPE(ids, _merges(ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        prefix_space = self._get("add_space_prefix", True)
        spaces = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix_space else [spaces])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix_space else steps)
        return tokenizer

    def _ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def _get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)


def _merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Convert SentencePiece's scores to equivalent BPE merge rules: pairs of a left and a right token.

    Each way to split a token into two tokens of the vocabulary is a rule. Rules for tokens with higher scores come
    first. Rules with equal scores are in the order of `generate_merges` in transformers' `convert_slow_tokenizer.py`.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in ids.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = sorted((s for s in splits if s[0] in ids and s[1] in ids), key=lambda s: (ids[s[0]], ids[s[1]]))
        ranked += [(scores[token_id], len(left), len(right), left, right) for left, right in known]
    ranked.sort(key=lambda rule: rule[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

#!/usr/bin/env python3
"""Compares `gantry tokenize` with Hugging Face's tokenizers and transformers, id by id.

    pip install tokenizers transformers
    cargo build --release
    python tests/scripts/check_tokenizers.py target/release/gantry [FOLDER OF TEXT]

Small vocabularies of several kinds are trained on the text (default: this repository), saved as tokenizer.json, as a folder
and as GPT-2's pair of files, and used on lines of code, random Unicode text, long runs and a long file.
"""
import json
import pathlib
import random
import subprocess
import sys
import tempfile

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GPT2Tokenizer

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
VOCAB = 3000


def byte_level(pre):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False,
                                          special_tokens=["<|endoftext|>", "<|im_end|>"])


def kinds():
    yield "gpt2", byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    yield "llama3", byte_level(pre_tokenizers.Sequence([split, level]))
    nfc, trainer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    nfc.normalizer = normalizers.NFC()
    yield "nfc", (nfc, trainer)
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    unigram.normalizer = normalizers.NFKC()
    special = ["<unk>", "</s>"]
    yield "unigram", (unigram, trainers.UnigramTrainer(vocab_size=1000, special_tokens=special, unk_token="<unk>",
                                                       show_progress=False))
    piece = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    piece.normalizer = normalizers.BertNormalizer(lowercase=True)
    piece.decoder = decoders.WordPiece()
    yield "wordpiece", (piece, trainers.WordPieceTrainer(vocab_size=1000, special_tokens=["[UNK]", "[SEP]"],
                                                         show_progress=False))


def random_text(rng, length):
    def character():
        kind = rng.random()
        if kind < 0.3:
            return rng.choice(" \t\n\r\u00a0\u2003\u3000\x85\u2028")
        if kind < 0.6:
            return chr(rng.randrange(32, 127))
        while True:
            code = rng.randrange(0x110000) if rng.random() < 0.3 else rng.randrange(0x80, 0x3000)
            if not 0xD800 <= code < 0xE000:
                return chr(code)
    return "".join(character() for _ in range(length))


def texts(corpus):
    rng = random.Random(7)
    yield from (text for text in corpus if text)
    yield from (random_text(rng, 200) for _ in range(400))
    yield from ["", " ", "\n\n\n", "a" * 5000, " " * 5000 + "x", "<|endoftext|>x<|im_end|>", "it's 12345 I'LL\r\n\r\n x"]
    yield "\n".join(corpus) * 2  # long enough to be cut


def ids(gantry, tokenizer, folder, texts):
    lines = folder / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = subprocess.run([gantry, "tokenize", tokenizer, lines, "--jsonl", "--json"], check=True, capture_output=True)
    return [json.loads(line) for line in out.stdout.decode().splitlines()]


def compare(name, ours, theirs, texts):
    assert len(ours) == len(theirs), (name, len(ours), len(theirs))
    for mine, expected, text in zip(ours, theirs, texts):
        if mine["ids"] != expected:
            at = next((i for i, pair in enumerate(zip(mine["ids"], expected)) if pair[0] != pair[1]), -1)
            sys.exit(f"{name}: {text[:60]!r}: token {at} is {mine['ids'][at]}, theirs {expected[at]}")
    tokens = sum(map(len, theirs))
    print(f"{name:22} {len(theirs):5} texts, {sum(map(len, texts)):9} characters, {tokens:8} tokens: the same")


def main():
    gantry = pathlib.Path(sys.argv[1]).resolve()
    root = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else pathlib.Path(__file__).resolve().parents[2] / "host/src"
    files = sorted(file for file in root.rglob("*") if file.suffix in {".rs", ".md", ".py", ".txt"})
    corpus = [file.read_text() for file in files]
    some = list(texts(corpus))
    with tempfile.TemporaryDirectory() as temporary:
        temporary = pathlib.Path(temporary)
        for name, (tokenizer, trainer) in kinds():
            tokenizer.train([str(file) for file in files], trainer)
            folder = temporary / name
            folder.mkdir()
            tokenizer.save(str(folder / "tokenizer.json"))
            theirs = [encoding.ids for encoding in tokenizer.encode_batch(some, add_special_tokens=False)]
            compare(name, ids(gantry, folder / "tokenizer.json", temporary, some), theirs, some)
            if name == "gpt2":
                pair = temporary / "pair"
                pair.mkdir()
                tokenizer.model.save(str(pair))
                slow = GPT2Tokenizer.from_pretrained(str(pair))
                theirs = [slow(text, add_special_tokens=False)["input_ids"] for text in some]
                compare("vocab.json, merges.txt", ids(gantry, pair, temporary, some), theirs, some)
    print("all the same")


if __name__ == "__main__":
    main()

//! Rows about tokenizers, files of lines, conversations and packing.

use super::rows::Step::{self, *};
use super::rows::{Row, row};

/// A tokenizer of three words.
const WORDS: &str = r#"{"model": {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "<|endoftext|>": 2}, "unk_token": "one"},
  "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [{"id": 2, "content": "<|endoftext|>", "single_word": false,
  "lstrip": false, "rstrip": false, "normalized": false, "special": true}]}"#;
const WITH_WORDS: Step = Replace("[txt]", "[txt]\n  tokenizer: words.json");

pub fn rows() -> Vec<Row> {
    let chat = |text| Replace("  paths: [text]\n  extensions: [txt]\n", text);
    const CHAT: &str = "  paths: [c.jsonl]\n  format: chat\n  chat: {template: chatml}\n";
    const LINES: &str = "  paths: [c.jsonl]\n  format: jsonl\n";
    let steps = |steps: Vec<Step>| -> &'static [Step] { steps.leak() };
    vec![
        row("tokenizer: no such file", 4, "train r.yaml", &[WITH_WORDS]),
        row("tokenizer: a folder without one", 4, "train r.yaml", &[Replace("[txt]", "[txt]\n  tokenizer: text")]),
        row("tokenizer: no JSON", 4, "train r.yaml", &[WITH_WORDS, Write("words.json", "{")]),
        row("tokenizer: another JSON", 4, "train r.yaml", &[WITH_WORDS, Write("words.json", "{\"a\": 1}")]),
        row("tokenizer: random bytes", 4, "train r.yaml", &[WITH_WORDS, Bytes("words.json", b"\x00\xff\x80")]),
        row("tokenizer: empty", 4, "train r.yaml", &[WITH_WORDS, Write("words.json", "")]),
        row(
            "tokenizer: huge id",
            4,
            "train r.yaml",
            &[WITH_WORDS, Write("words.json", WORDS), Edit("words.json", "\"two\": 1", "\"two\": 4000000000")],
        ),
        row(
            "tokenizer: without an end of a document",
            2,
            "train r.yaml",
            &[WITH_WORDS, Write("words.json", WORDS), Edit("words.json", "<|endoftext|>", "three")],
        ),
        row(
            "tokenizer: unknown special token",
            2,
            "train r.yaml",
            &[
                Replace("[txt]", "[txt]\n  tokenizer: words.json\n  special_tokens: {image: '<|endoftxt|>'}"),
                Write("words.json", WORDS),
            ],
        ),
        row(
            "tokenizer: special tokens of bytes",
            2,
            "train r.yaml",
            &[Replace("[txt]", "[txt]\n  special_tokens: {image: '<image>'}")],
        ),
        row(
            "tokenizer: more tokens than the model",
            2,
            "train r.yaml",
            &[WITH_WORDS, Write("words.json", WORDS), Edit("words.json", "\"two\": 1", "\"two\": 1000")],
        ),
        row(
            "tokenizer: merges of unknown tokens",
            4,
            "train r.yaml",
            &[
                Replace("[txt]", "[txt]\n  tokenizer: {vocab: v.json, merges: m.txt}"),
                Write("v.json", "{\"a\": 0, \"b\": 1, \"<|endoftext|>\": 2}"),
                Write("m.txt", "#version: 0.2\na b\n"),
            ],
        ),
        row("tokenizer: half a pair", 2, "train r.yaml", &[Replace("[txt]", "[txt]\n  tokenizer: {vocab: v.json}")]),
        row(
            "tokenizer: bytes it does not know",
            4,
            "train r.yaml",
            &[
                Replace("[txt]", "[txt]\n  tokenizer: {vocab: v.json, merges: m.txt}"),
                Write("v.json", "{\"a\": 0, \"b\": 1, \"<|endoftext|>\": 2}"),
                Write("m.txt", "#version: 0.2\n"),
            ],
        ),
        row(
            "tokenizer: another one than the checkpoint's",
            4,
            "eval r.yaml --checkpoint runs/small --data text",
            &[Trained, WITH_WORDS, Write("words.json", WORDS)],
        ),
        row(
            "tokenizer: another one when resumed",
            4,
            "train r.yaml",
            &[Trained, WITH_WORDS, Write("words.json", WORDS), Replace("steps: 2", "steps: 3")],
        ),
        row(
            "lines: broken JSON",
            4,
            "train r.yaml",
            steps(vec![chat(LINES), Write("c.jsonl", "{\"text\": \"a\"}\n\n{\n")]),
        ),
        row("lines: no text", 4, "train r.yaml", steps(vec![chat(LINES), Write("c.jsonl", "{\"body\": \"a\"}\n")])),
        row(
            "lines: broken UTF-8",
            4,
            "train r.yaml",
            steps(vec![chat(LINES), Bytes("c.jsonl", b"{\"text\": \"\xff\"}\n")]),
        ),
        row("lines: empty file", 4, "train r.yaml", steps(vec![chat(LINES), Write("c.jsonl", "")])),
        row("chat: no known key", 4, "train r.yaml", steps(vec![chat(CHAT), Write("c.jsonl", "{\"turns\": []}\n")])),
        row(
            "chat: a turn without its role",
            4,
            "train r.yaml",
            steps(vec![chat(CHAT), Write("c.jsonl", "{\"messages\": [{\"content\": \"a\"}]}\n")]),
        ),
        row(
            "chat: nothing to learn",
            4,
            "train r.yaml",
            steps(vec![chat(CHAT), Write("c.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n")]),
        ),
        row(
            "chat: no template",
            2,
            "train r.yaml",
            steps(vec![
                chat("  paths: [c.jsonl]\n  format: chat\n"),
                Write("c.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n"),
            ]),
        ),
        row(
            "chat: broken template",
            4,
            "train r.yaml",
            steps(vec![
                chat("  paths: [c.jsonl]\n  format: chat\n  chat: {template: t.jinja}\n"),
                Write("c.jsonl", "{\"text\": \"a\"}\n"),
                Write("t.jinja", "{% for %}"),
            ]),
        ),
        row(
            "chat: no such template",
            4,
            "train r.yaml",
            steps(vec![
                chat("  paths: [c.jsonl]\n  format: chat\n  chat: {template: t.jinja}\n"),
                Write("c.jsonl", "{\"text\": \"a\"}\n"),
            ]),
        ),
        row(
            "packing: every document is too long",
            4,
            "train r.yaml",
            &[Replace("[txt]", "[txt]\n  packing: best_fit\n  too_long: drop")],
        ),
        row(
            "packing: a baseline that is asked for other tokens",
            2,
            "train r.yaml",
            &[Replace("[txt]", "[txt]\n  packing: best_fit\n  valid_fraction: 0.5\n  ngram_order: 2")],
        ),
        row("generate: a chat without a template", 2, "generate --checkpoint runs/small --prompt a --chat", &[Trained]),
    ]
}

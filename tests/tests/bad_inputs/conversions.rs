//! Rows of `gantry convert`.

use super::rows::Step::*;
use super::rows::{Row, row};

const HF: &str = "convert --from hf --to gantry --plugin nemotron-hybrid m out";
const CONFIG: &str = "m/config.json";
const SMALL: &str = r#"{"model_type": "nemotron_h", "layers_block_type": ["mlp"], "hidden_size": 2, "vocab_size": 4, "intermediate_size": 2}"#;
const INDEX: &str = "m/model.safetensors.index.json";

pub fn conversions() -> Vec<Row> {
    vec![
        row("convert: no folder", 4, HF, &[]),
        row("convert: an empty folder", 4, HF, &[Folder("m")]),
        row("convert: no JSON", 4, HF, &[Folder("m"), Write(CONFIG, "{\"model_type\": ")]),
        row("convert: a list", 4, HF, &[Folder("m"), Write(CONFIG, "[]")]),
        row("convert: a key twice", 4, HF, &[Folder("m"), Write(CONFIG, "{\"a\": 1, \"a\": 2}")]),
        row("convert: a model of nobody", 4, HF, &[Folder("m"), Write(CONFIG, "{\"model_type\": \"llama\"}")]),
        row(
            "convert: a value that is not there",
            4,
            HF,
            &[Folder("m"), Write(CONFIG, "{\"model_type\": \"nemotron_h\", \"mlp_hidden_act\": \"silu\"}")],
        ),
        row(
            "convert: a key that is not known",
            4,
            HF,
            &[Folder("m"), Write(CONFIG, "{\"model_type\": \"nemotron_h\", \"rope_scaling\": 2}")],
        ),
        row(
            "convert: NaN in a config",
            4,
            HF,
            &[Folder("m"), Write(CONFIG, "{\"model_type\": \"nemotron_h\", \"layer_norm_epsilon\": NaN}")],
        ),
        row("convert: no weights", 4, HF, &[Folder("m"), Write(CONFIG, SMALL)]),
        row(
            "convert: weights cut short",
            4,
            HF,
            &[Folder("m"), Write(CONFIG, SMALL), Bytes("m/model.safetensors", b"\x40\0\0\0\0\0\0\0{}")],
        ),
        row(
            "convert: other weights",
            4,
            HF,
            &[Folder("m"), Write(CONFIG, SMALL), Bytes("m/model.safetensors", b"\x02\0\0\0\0\0\0\0{}")],
        ),
        row(
            "convert: an index that leads out",
            4,
            HF,
            &[Folder("m"), Write(CONFIG, SMALL), Write(INDEX, "{\"weight_map\": {\"lm_head.weight\": \"../x\"}}")],
        ),
        row(
            "convert: a file of the index is missing",
            4,
            HF,
            &[Folder("m"), Write(CONFIG, SMALL), Write(INDEX, "{\"weight_map\": {\"lm_head.weight\": \"x\"}}")],
        ),
        row("convert: a provider without folders", 4, "convert --from gantry --to hf runs/small out", &[Trained]),
        row(
            "convert: a destination that is there",
            4,
            "convert --from gantry --to megatron runs/small runs",
            &[Trained],
        ),
        row(
            "convert: what is no model is not replaced",
            4,
            "convert --from gantry --to megatron --force runs/small text",
            &[Trained],
        ),
        row("convert: over itself", 4, "convert --from gantry --to megatron --force runs/small runs", &[Trained]),
        row("convert: Megatron's names alone", 2, "convert --from megatron --to gantry m out", &[Folder("m")]),
        row("convert: a recipe in vain", 2, "convert --from gantry --to hf --recipe r.yaml runs/small out", &[Trained]),
        row("convert: no such module", 2, "convert --from gantry --to megatron --module x runs/small out", &[Trained]),
        row(
            "convert: a config that makes another model",
            4,
            "convert --from gantry --to megatron --set hidden_size=32 runs/small out",
            &[Trained],
        ),
        row("convert: no such plugin", 3, "convert --from hf --to gantry --plugin gone m out", &[Folder("m")]),
    ]
}

//! The table: what is wrong, how it comes about, what is called, and the exit status.

/// How a row's folder, which begins with a good recipe `r.yaml` and its text, is spoilt.
pub enum Step {
    /// A file with a text.
    Write(&'static str, &'static str),
    Bytes(&'static str, &'static [u8]),
    /// A file of so many bytes of YAML comments.
    Large(&'static str, usize),
    /// Lines at the end of the recipe.
    Append(&'static str),
    /// Another text in the recipe.
    Replace(&'static str, &'static str),
    Folder(&'static str),
    Remove(&'static str),
    Pipe(&'static str),
    Environment(&'static str, &'static str),
    Without(&'static str),
    /// From, to, mode.
    Copy(&'static str, &'static str, &'static str),
    /// A finished run in `runs/small`.
    Trained,
    /// A file's first bytes alone.
    Cut(&'static str, usize),
    /// Another last bit.
    Flip(&'static str),
    /// File, old text, new text.
    Edit(&'static str, &'static str, &'static str),
    /// A lock file that another process holds, with what is in it.
    Lock(&'static str, &'static str),
    /// Nothing can be written to stdout.
    FullStdout,
}

pub struct Row {
    pub name: &'static str,
    pub status: i32,
    /// Split at spaces.
    pub arguments: &'static str,
    pub steps: &'static [Step],
}

pub const fn row(name: &'static str, status: i32, arguments: &'static str, steps: &'static [Step]) -> Row {
    Row { name, status, arguments, steps }
}

use Step::*;

const INDEX: &str = "runs/small/checkpoints/step-00000002/index.json";

pub fn all() -> Vec<Row> {
    let recipes = [recipes(), provider_configs(), plugins(), data(), super::tokens::rows(), checkpoints()];
    let others = [super::conversions::conversions(), machine()];
    [arguments()].into_iter().chain(recipes).chain(others).flatten().collect()
}

fn arguments() -> Vec<Row> {
    vec![
        row("arguments: unknown command", 2, "trian r.yaml", &[]),
        row("arguments: no recipe", 2, "train", &[]),
        row("arguments: unknown option", 2, "train r.yaml --stepz 3", &[]),
        row("arguments: no step", 2, "train r.yaml --steps 0", &[]),
        row("arguments: override without a value", 2, "train r.yaml --set train.steps", &[]),
        row("arguments: override with an empty part", 2, "train r.yaml --set train..steps=1", &[]),
        row("arguments: override of an unknown key", 2, "train r.yaml --set train.stepz=1", &[]),
        row("arguments: override of the wrong kind", 2, "train r.yaml --set train.steps=many", &[]),
        row("arguments: ranks do not fit the grid", 2, "train r.yaml --ranks 3 --set modules.lm.grid.tp=2", &[]),
    ]
}

fn recipes() -> Vec<Row> {
    vec![
        row("recipe: no such file", 2, "train none.yaml", &[]),
        row("recipe: a folder", 2, "train text", &[]),
        row("recipe: a device", 2, "train /dev/zero", &[]),
        row("recipe: a pipe", 2, "train pipe.yaml", &[Pipe("pipe.yaml")]),
        row("recipe: empty", 2, "train r.yaml", &[Bytes("r.yaml", b"\n")]),
        row("recipe: comments only", 2, "train r.yaml", &[Bytes("r.yaml", b"# nothing\n")]),
        row("recipe: too large", 2, "train r.yaml", &[Large("r.yaml", 1 << 21)]),
        row("recipe: not UTF-8", 2, "train r.yaml", &[Bytes("r.yaml", b"name: \xff\xfe\n")]),
        row("recipe: a list", 2, "train r.yaml", &[Write("r.yaml", "- name\n- train\n")]),
        row("recipe: several documents", 2, "train r.yaml", &[Append("---\nname: other\n")]),
        row("recipe: bad YAML", 2, "train r.yaml", &[Append("run: {dir: x\n")]),
        row("recipe: a tab", 2, "train r.yaml", &[Append("run:\n\tdir: x\n")]),
        row("recipe: a key twice", 2, "train r.yaml", &[Append("name: again\n")]),
        row("recipe: unknown section", 2, "train r.yaml", &[Append("trian: {steps: 3}\n")]),
        row("recipe: unknown key", 2, "train r.yaml", &[Replace("  steps: 2", "  stepz: 2")]),
        row("recipe: key in the wrong section", 2, "train r.yaml", &[Replace("  lr:", "  seq_length: 3\n  lr:")]),
        row(
            "recipe: unknown key of a grid",
            2,
            "train r.yaml",
            &[Replace("    config:", "    grid: {tpp: 2}\n    config:")],
        ),
        row("recipe: wrong kind", 2, "train r.yaml", &[Replace("steps: 2", "steps: two")]),
        row("recipe: a fraction of a step", 2, "train r.yaml", &[Replace("steps: 2", "steps: 2.5")]),
        row("recipe: a number that is none", 2, "train r.yaml", &[Replace("1.0e-3", ".nan")]),
        row("recipe: out of range", 2, "train r.yaml", &[Replace("1.0e-3", "-1.0")]),
        row("recipe: unknown choice", 2, "train r.yaml", &[Replace("level: warn", "level: wran")]),
        row("recipe: a required key is missing", 2, "train r.yaml", &[Replace("  lr: 1.0e-3", "  eps: 1.0e-8")]),
        row("recipe: a section is no mapping", 2, "train r.yaml", &[Append("run: here\n")]),
        row("recipe: bad name", 2, "train r.yaml", &[Replace("name: small", "name: a/b")]),
        row(
            "recipe: no modules",
            2,
            "train r.yaml",
            &[Write(
                "r.yaml",
                "name: t\ndata: {paths: [text]}\noptimizer: {lr: 1}\ntrain: {steps: 1, seq_length: 4, global_batch_size: 1}\n",
            )],
        ),
        row(
            "recipe: two models",
            2,
            "train r.yaml",
            &[Replace("modules:", "modules:\n  other: {provider: dense-gpt}")],
        ),
        row(
            "recipe: batch sizes disagree",
            2,
            "train r.yaml",
            &[Append("schedule: {}\n"), Replace("steps: 2", "steps: 2\n  micro_batch_size: 3")],
        ),
        row(
            "recipe: warm-up longer than the schedule",
            2,
            "train r.yaml",
            &[Append("schedule: {warmup_steps: 9, decay_steps: 5}\n")],
        ),
        row("recipe: precision needs a GPU", 2, "train r.yaml", &[Replace("steps: 2", "steps: 2\n  precision: bf16")]),
        row(
            "recipe: grid of what is to come",
            2,
            "train r.yaml",
            &[Replace("    config:", "    grid: {cp: 2}\n    config:")],
        ),
        row(
            "recipe: grid does not divide heads",
            2,
            "train r.yaml",
            &[Replace("    config:", "    grid: {tp: 3}\n    config:")],
        ),
        row(
            "recipe: more stages than layers",
            2,
            "train r.yaml",
            &[Replace("    config:", "    grid: {pp: 9}\n    config:")],
        ),
        row("recipe: extends a missing file", 2, "train r.yaml", &[Append("extends: none.yaml\n")]),
        row("recipe: extends a folder", 2, "train r.yaml", &[Append("extends: text\n")]),
        row("recipe: extends itself", 2, "train r.yaml", &[Append("extends: r.yaml\n")]),
        row(
            "recipe: extends in a circle",
            2,
            "train r.yaml",
            &[
                Append("extends: a.yaml\n"),
                Write("a.yaml", "extends: [b.yaml]\n"),
                Write("b.yaml", "extends: r.yaml\n"),
            ],
        ),
        row("recipe: extends a number", 2, "train r.yaml", &[Append("extends: 5\n")]),
        row(
            "recipe: unknown key in an extended file",
            2,
            "train r.yaml",
            &[Append("extends: a.yaml\n"), Write("a.yaml", "\ntrain:\n  sead: 5\n")],
        ),
    ]
}

fn provider_configs() -> Vec<Row> {
    vec![
        row(
            "teacher: temperature 0",
            2,
            "plan r.yaml",
            &[Replace("    config:", "    teacher: {load: runs/small, temperature: 0}\n    config:")],
        ),
        row(
            "teacher: without a checkpoint",
            2,
            "plan r.yaml",
            &[Replace("    config:", "    teacher: {temperature: 2}\n    config:")],
        ),
        row(
            "teacher: bad config",
            2,
            "plan r.yaml",
            &[Replace("    config:", "    teacher: {load: runs/small, config: {num_layerz: 2}}\n    config:")],
        ),
        row("config: unknown key", 2, "train r.yaml", &[Replace("hidden_size: 16", "hiden_size: 16")]),
        row("config: unknown key in an override", 2, "plan r.yaml --set modules.lm.config.hiden_size=3", &[]),
        row(
            "config: unknown key in the environment",
            2,
            "plan r.yaml",
            &[Environment("GANTRY_MODULES__LM__CONFIG__HIDEN_SIZE", "3")],
        ),
        row("config: wrong kind", 2, "train r.yaml", &[Replace("hidden_size: 16", "hidden_size: wide")]),
        row(
            "config: wrong kind in the environment",
            2,
            "train r.yaml",
            &[Environment("GANTRY_MODULES__LM__CONFIG__HIDDEN_SIZE", "wide")],
        ),
        row("config: a required key is missing", 2, "train r.yaml", &[Replace("      hidden_size: 16\n", "")]),
        row(
            "config: sizes disagree",
            2,
            "train r.yaml",
            &[Replace("num_attention_heads: 2", "num_attention_heads: 3")],
        ),
        row("config: size of zero", 2, "train r.yaml", &[Replace("num_layers: 2", "num_layers: 0")]),
        row(
            "config: a number that is none",
            2,
            "train r.yaml",
            &[Replace("num_layers: 2", "num_layers: 2\n      rotary_base: .inf")],
        ),
        row(
            "config: a number beyond measure",
            2,
            "train r.yaml",
            &[Replace("num_layers: 2", "num_layers: 2\n      init_method_std: 1.0e+308")],
        ),
        row(
            "config: bad pattern",
            2,
            "train r.yaml",
            &[Replace(
                "dense-gpt\n    config:\n      num_layers: 2",
                "nemotron-hybrid\n    config:\n      pattern: MX*",
            )],
        ),
        row(
            "config: vocabulary too small for the data",
            2,
            "train r.yaml",
            &[Replace("vocab_size: 257", "vocab_size: 100")],
        ),
    ]
}

fn plugins() -> Vec<Row> {
    vec![
        row(
            "plugin: none with the provider",
            3,
            "train r.yaml",
            &[Replace("provider: dense-gpt", "provider: dense-gtp")],
        ),
        row("plugin: listed file is missing", 3, "train r.yaml", &[Append("plugins: [none.so]\n")]),
        row("plugin: a text", 3, "train r.yaml", &[Append("plugins: [text/a.txt]\n")]),
        row(
            "plugin: an empty file",
            3,
            "train r.yaml",
            &[Append("plugins: [lib(dense-gpt)]\n"), Bytes("libdense_gpt.so", b"")],
        ),
        row(
            "plugin: cut short",
            3,
            "train r.yaml",
            &[
                Append("plugins: [lib(dense-gpt)]\n"),
                Copy("BIN/lib(dense-gpt)", "libdense_gpt.so", "600"),
                Cut("libdense_gpt.so", 5000),
            ],
        ),
        row(
            "plugin: a library of another kind",
            3,
            "train r.yaml",
            &[Append("plugins: [PLUGINS/lib(not-a-plugin)]\n"), Replace("dense-gpt", "anything")],
        ),
        row(
            "plugin: another boundary",
            3,
            "train r.yaml",
            &[Append("plugins: [PLUGINS/lib(wrong-layout)]\n"), Replace("dense-gpt", "anything")],
        ),
        row(
            "plugin: not the pinned one",
            3,
            "train r.yaml",
            &[Append(
                "plugins: [{path: BIN/lib(dense-gpt), sha256: 00000000000000000000000000000000000000000000000000000000000000ab}]\n",
            )],
        ),
        row("plugin: a hash that is none", 2, "train r.yaml", &[Append("plugins: [{path: x.so, sha256: abc}]\n")]),
        row("plugin: unknown key of an entry", 2, "train r.yaml", &[Append("plugins: [{file: x.so}]\n")]),
        row(
            "plugin: others may write to it",
            3,
            "train r.yaml",
            &[
                Append("plugins: [lib(dense-gpt)]\n"),
                Copy("BIN/lib(dense-gpt)", "libdense_gpt.so", "666"),
                Without("GANTRY_ALLOW_WRITABLE_PLUGINS"),
            ],
        ),
        row(
            "plugin: an elastifier as a model",
            3,
            "train r.yaml",
            &[Append("plugins: [PLUGINS/lib(misbehave)]\n"), Replace("dense-gpt", "misbehave-elastic")],
        ),
        row(
            "plugin: panics",
            3,
            "train r.yaml",
            &[
                Append("plugins: [PLUGINS/lib(misbehave)]\n"),
                Replace(
                    "dense-gpt\n    config:\n      num_layers: 2\n      hidden_size: 16\n      num_attention_heads: 2\n      ffn_hidden_size: 32\n      vocab_size: 257",
                    "misbehave\n    config: {how: plan_panic}",
                ),
            ],
        ),
        row(
            "plugin: refuses",
            2,
            "train r.yaml",
            &[
                Append("plugins: [PLUGINS/lib(misbehave)]\n"),
                Replace(
                    "dense-gpt\n    config:\n      num_layers: 2\n      hidden_size: 16\n      num_attention_heads: 2\n      ffn_hidden_size: 32\n      vocab_size: 257",
                    "misbehave\n    config: {how: create_error}",
                ),
            ],
        ),
        row("plugin: inspection of what is not there", 3, "inspect nothing", &[]),
        row("plugin: inspection of a text", 3, "inspect text/a.txt", &[]),
    ]
}

fn data() -> Vec<Row> {
    vec![
        row("data: no such path", 4, "train r.yaml", &[Replace("[text]", "[none]")]),
        row("data: no such folder of a glob", 4, "train r.yaml", &[Replace("[text]", "['none/*.txt']")]),
        row("data: nothing named", 2, "train r.yaml", &[Replace("  paths: [text]\n", "")]),
        row("data: no file with the extension", 4, "train r.yaml", &[Replace("[txt]", "[rs]")]),
        row("data: extension with its dot", 2, "train r.yaml", &[Replace("[txt]", "[.txt]")]),
        row("data: bad glob", 2, "train r.yaml", &[Replace("[txt]", "[txt]\n  exclude: ['[a']")]),
        row("data: empty files", 4, "train r.yaml", &[Bytes("text/a.txt", b""), Bytes("text/b.txt", b"")]),
        row("data: binary files", 4, "train r.yaml", &[Bytes("text/a.txt", b"\0\x01"), Bytes("text/b.txt", b"\xff")]),
        row("data: less than a sample", 4, "train r.yaml", &[Replace("seq_length: 16", "seq_length: 100000")]),
        row("data: a pipe", 4, "train r.yaml", &[Replace("[text]", "[pipe.txt]"), Pipe("pipe.txt")]),
        row(
            "data: tracked files of no repository",
            4,
            "train r.yaml",
            &[Replace("[txt]", "[txt]\n  tracked_only: true"), Environment("GIT_CEILING_DIRECTORIES", "/")],
        ),
        row(
            "data: no git",
            4,
            "train r.yaml",
            &[Replace("[txt]", "[txt]\n  tracked_only: true"), Environment("PATH", "HERE")],
        ),
        row("data: nothing held out", 4, "train r.yaml", &[Replace("[txt]", "[txt]\n  valid_fraction: 0.001")]),
        row("data: everything held out", 4, "train r.yaml", &[Replace("[txt]", "[txt]\n  valid_paths: [text]")]),
        row("data: held-out path is missing", 4, "train r.yaml", &[Replace("[txt]", "[txt]\n  valid_paths: [none]")]),
        row(
            "data: held out in two ways",
            2,
            "train r.yaml",
            &[Replace("[txt]", "[txt]\n  valid_fraction: 0.5\n  valid_paths: [text/a.txt]")],
        ),
        row("data: a share of more than all", 2, "train r.yaml", &[Replace("[txt]", "[txt]\n  valid_fraction: 7")]),
        row("data: a baseline for nothing", 2, "train r.yaml", &[Replace("[txt]", "[txt]\n  ngram_order: 3")]),
        row(
            "data: made up and read",
            2,
            "train r.yaml",
            &[Replace("[txt]", "[txt]\n  synthetic: {vocab: 9, document_length: 5, tokens: 100}")],
        ),
        row(
            "data: unknown task",
            2,
            "train r.yaml",
            &[Replace("paths: [text]", "synthetic: {task: kopy, vocab: 9, document_length: 5, tokens: 100}")],
        ),
        row(
            "data: made up without a size",
            2,
            "train r.yaml",
            &[Replace("paths: [text]", "synthetic: {task: copy, vocab: 9, document_length: 5}")],
        ),
        row(
            "data: made up of one token",
            2,
            "train r.yaml",
            &[Replace("paths: [text]", "synthetic: {task: copy, vocab: 1, document_length: 5, tokens: 100}")],
        ),
    ]
}

fn checkpoints() -> Vec<Row> {
    vec![
        row("eval: no checkpoint", 4, "eval r.yaml --checkpoint none-here --data text", &[]),
        row("eval: nothing held out", 2, "eval r.yaml --checkpoint runs/small", &[Trained]),
        row("eval: no such text", 4, "eval r.yaml --checkpoint runs/small --data none", &[Trained]),
        row(
            "eval: another model",
            4,
            "eval r.yaml --checkpoint runs/small --data text --set modules.lm.config.hidden_size=32",
            &[Trained],
        ),
        row("generate: no checkpoint", 4, "generate --checkpoint none-here --prompt x", &[]),
        row("generate: negative temperature", 2, "generate --checkpoint x --prompt x --temperature=-1", &[]),
        row("checkpoint: none at the path", 4, "train r.yaml --resume none-here", &[]),
        row("checkpoint: an empty folder", 4, "train r.yaml --resume text", &[Trained]),
        row("checkpoint: no index", 4, "train r.yaml --steps 3", &[Trained, Remove(INDEX)]),
        row("checkpoint: index cut short", 4, "train r.yaml --steps 3", &[Trained, Cut(INDEX, 40)]),
        row(
            "checkpoint: index of another format",
            4,
            "train r.yaml --steps 3",
            &[Trained, Edit(INDEX, "\"version\": 2", "\"version\": 99")],
        ),
        row(
            "checkpoint: tensors cut short",
            4,
            "train r.yaml --steps 3",
            &[Trained, Cut("runs/small/checkpoints/step-00000002/shard-00000.safetensors", 100)],
        ),
        row(
            "checkpoint: a flipped bit",
            4,
            "train r.yaml --steps 3",
            &[Trained, Flip("runs/small/checkpoints/step-00000002/shard-00000.safetensors")],
        ),
        row(
            "checkpoint: tensors are gone",
            4,
            "train r.yaml --steps 3",
            &[Trained, Remove("runs/small/checkpoints/step-00000002/shard-00000.safetensors")],
        ),
        row(
            "checkpoint: `latest` names none",
            4,
            "train r.yaml --steps 3",
            &[Trained, Write("runs/small/checkpoints/latest", "step-00000009\n")],
        ),
        row(
            "checkpoint: `latest` is nonsense",
            4,
            "train r.yaml --steps 3",
            &[Trained, Write("runs/small/checkpoints/latest", "../../elsewhere\n")],
        ),
        row(
            "checkpoint: of another model",
            4,
            "train r.yaml --steps 3",
            &[Trained, Replace("hidden_size: 16", "hidden_size: 32")],
        ),
        row(
            "checkpoint: parameters from nowhere",
            4,
            "train r.yaml",
            &[Replace("    config:", "    load: none-here\n    config:")],
        ),
        row(
            "checkpoint: a teacher from nowhere",
            4,
            "train r.yaml",
            &[Replace("    config:", "    teacher: {load: none-here}\n    config:")],
        ),
        row(
            "checkpoint: a teacher of another width",
            4,
            "train r.yaml --run-dir other",
            &[
                Trained,
                Replace("    config:", "    teacher: {load: runs/small}\n    config:"),
                Replace("hidden_size: 16", "hidden_size: 32"),
            ],
        ),
        row(
            "checkpoint: a teacher of another vocabulary",
            2,
            "train r.yaml --run-dir other",
            &[
                Trained,
                Replace(
                    "    config:",
                    "    teacher: {load: runs/small, config: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, \
                     ffn_hidden_size: 32, vocab_size: 257}}\n    config:",
                ),
                Replace("      vocab_size: 257\ndata", "      vocab_size: 320\ndata"),
            ],
        ),
        row(
            "checkpoint: parameters of another model",
            4,
            "train r.yaml --run-dir other",
            &[
                Trained,
                Replace("    config:", "    load: runs/small/checkpoints/step-00000002\n    config:"),
                Replace("hidden_size: 16", "hidden_size: 32"),
            ],
        ),
    ]
}

fn machine() -> Vec<Row> {
    vec![
        row("environment: unknown key", 2, "train r.yaml", &[Environment("GANTRY_TRAIN__STEPZ", "3")]),
        row("environment: wrong kind", 2, "train r.yaml", &[Environment("GANTRY_TRAIN__STEPS", "many")]),
        row("environment: empty part", 2, "train r.yaml", &[Environment("GANTRY_TRAIN____STEPS", "3")]),
        row(
            "environment: plugin path without plugins",
            3,
            "train r.yaml",
            &[
                Replace("provider: dense-gpt", "provider: elsewhere"),
                Environment("GANTRY_PLUGIN_PATH", "HERE/text:HERE/none"),
            ],
        ),
        row("run folder: a file", 4, "train r.yaml --run-dir text/a.txt", &[]),
        row("run folder: inside a file", 4, "train r.yaml --run-dir text/a.txt/run", &[]),
        row("run folder: checkpoints are a file", 4, "train r.yaml", &[Write("runs/small/checkpoints", "x")]),
        row("run folder: metrics are a folder", 4, "train r.yaml", &[Folder("runs/small/metrics.jsonl")]),
        row("run folder: in use", 4, "train r.yaml", &[Lock("runs/small/lock", "4711 box\n")]),
        row("output: nothing can be written", 4, "plan r.yaml", &[FullStdout]),
        row("numbers: the loss is no number", 5, "train r.yaml --set optimizer.lr=1e30 --set train.steps=9", &[]),
    ]
}

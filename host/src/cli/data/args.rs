//! Options of `gantry data`.

use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Data {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Turns text into PREFIX.bin and PREFIX.idx, as Megatron-LM's preprocessing does.
    Build(Build),
    /// Shows what a data set holds.
    Inspect(Inspect),
    /// Checks a data set whole: index, tokens, and whether they belong together.
    Verify(Verify),
    /// Joins data sets in the order in which they are named.
    Merge(Merge),
    /// Makes a byte-level BPE vocabulary from text.
    TrainTokenizer(TrainTokenizer),
}

#[derive(Debug, Args)]
pub struct Build {
    /// Text files (a document each), files of JSON lines (.jsonl, .ndjson, .json), folders and globs; .gz and .zst too.
    #[arg(value_name = "INPUT", required = true)]
    pub inputs: Vec<PathBuf>,
    /// Writes PREFIX.bin and PREFIX.idx; with several keys PREFIX_KEY.bin and so on.
    #[arg(long, value_name = "PREFIX")]
    pub out: PathBuf,
    /// bytes, a tokenizer.json, or a folder with one or with vocab.json and merges.txt.
    #[arg(long, value_name = "SPEC", required_unless_present = "tokenized")]
    pub tokenizer: Option<String>,
    /// The inputs are lines of token ids: [1, 2, 3], or {"text": [1, 2, 3]}; a list of lists is a document of sequences.
    #[arg(long)]
    pub tokenized: bool,
    /// Type of the tokens in the file; auto: by the size of the vocabulary, with --tokenized alone int32.
    #[arg(long, value_enum, default_value = "auto")]
    pub dtype: DtypeName,
    /// Ends each document with the tokenizer's end of document.
    #[arg(long)]
    pub append_eod: bool,
    /// Ends each document with this token instead.
    #[arg(long, value_name = "ID")]
    pub eod: Option<u32>,
    /// Keys of a line's object, separated by commas; each becomes a data set of its own.
    #[arg(long, value_name = "KEYS", value_delimiter = ',', default_value = "text")]
    pub json_keys: Vec<String>,
    /// Of folders and globs only files with these extensions, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub extensions: Vec<String>,
    /// Threads that make tokens; default: one for each processor.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub workers: Option<u32>,
    /// Takes the place of a data set that is there.
    #[arg(long)]
    pub overwrite: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DtypeName {
    Auto,
    Uint8,
    Int8,
    Int16,
    Uint16,
    Int32,
    Int64,
}

#[derive(Debug, Args)]
pub struct Inspect {
    /// Path without .bin and .idx.
    pub prefix: PathBuf,
    /// Shows the beginning of the first N documents.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub documents: usize,
    /// Shows them as text too.
    #[arg(long, value_name = "SPEC")]
    pub tokenizer: Option<String>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Verify {
    /// Path without .bin and .idx.
    pub prefix: PathBuf,
    /// Every token must be one of this tokenizer's.
    #[arg(long, value_name = "SPEC")]
    pub tokenizer: Option<String>,
    /// Every token must be below N.
    #[arg(long, value_name = "N", conflicts_with = "tokenizer")]
    pub vocab_size: Option<u32>,
}

#[derive(Debug, Args)]
pub struct Merge {
    /// Writes OUT.bin and OUT.idx.
    pub out: PathBuf,
    /// Paths without .bin and .idx.
    #[arg(value_name = "PREFIX", required = true)]
    pub prefixes: Vec<PathBuf>,
    /// Takes the place of a data set that is there.
    #[arg(long)]
    pub overwrite: bool,
}

#[derive(Debug, Args)]
pub struct TrainTokenizer {
    /// Text files, files of JSON lines, folders and globs, as `gantry data build` takes them.
    #[arg(value_name = "INPUT", required = true)]
    pub inputs: Vec<PathBuf>,
    /// Tokens of the vocabulary, special ones included.
    #[arg(long, value_name = "N")]
    pub vocab_size: usize,
    /// Writes tokenizer.json and tokenizer_config.json into this folder.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Further special tokens, separated by commas.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    pub special: Vec<String>,
    /// Key of a line's text.
    #[arg(long, value_name = "KEY", default_value = "text")]
    pub json_key: String,
    /// Of folders and globs only files with these extensions, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub extensions: Vec<String>,
    /// Takes the place of a tokenizer that is there.
    #[arg(long)]
    pub overwrite: bool,
}

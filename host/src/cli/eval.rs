//! `gantry eval`: a trained model's loss on held-out data.

use super::{args, model, print};
use crate::checkpoint::{Coming, ShardStream};
use crate::data::{self, Batch, Held, RunData, Split, Valid};
use crate::failure::{Failure, Result};
use crate::train::{Engine, HeldOut, check_tokenizer, check_vocab};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

pub(super) fn run(arguments: args::Eval) -> Result<()> {
    let file = arguments.recipe.file().to_path_buf();
    let recipe = match &arguments.data {
        None => arguments.recipe,
        Some(path) => arguments.recipe.and_set(only(path)?),
    };
    let recipe = recipe.load(None)?;
    let reader = model::open(&arguments.checkpoint)?;
    let tokenizer = data::tokenizer(&recipe).map_err(|failure| recipe.locate(failure))?;
    check_tokenizer(&reader, tokenizer.as_ref())?;
    let mut held_out = match &arguments.data {
        Some(_) => Held::Documents(Valid::new(Split::with(&recipe, tokenizer.as_ref())?.train, &recipe)?),
        None => RunData::held_out(&recipe, tokenizer.as_ref())?.ok_or_else(|| {
            Failure::recipe(format!("{}: the recipe holds no data out", file.display()))
                .remedy("give --data PATH, or set data.valid_fraction or data.valid_paths")
        })?,
    };
    let mut model = model::load(&recipe, reader)?;
    if let Some(tokens) = data::vocab(&recipe, tokenizer.as_ref()) {
        check_vocab(model.engine.vocab(), tokens)?;
        model.engine.limit_vocab(tokens)?;
    }
    held_out.limit_vocab(model.engine.vocab());
    let held_out = HeldOut::new(held_out, &recipe);
    if let Some(path) = &arguments.logits {
        let size = recipe.train.micro_batch_size;
        if let Some(&first) = held_out.data().all(size).first() {
            write_logits(path, model.engine.as_mut(), held_out.data().batch(first, size)?)?;
        }
    }
    let clock = Instant::now();
    let never = AtomicBool::new(false);
    let evaluation = held_out.whole(model.engine.as_mut(), model.step, &never)?;
    let seconds = clock.elapsed().as_secs_f64();
    let Some(evaluation) = evaluation else { return Ok(()) };
    if !evaluation.loss_sum.is_finite() {
        return Err(Failure::numerical(format!(
            "the loss of {} is NaN or infinite on this data",
            model.checkpoint.display()
        )));
    }
    let about = held_out.data();
    if arguments.json {
        let report = json!({
            "checkpoint": model.checkpoint.display().to_string(),
            "step": model.step,
            "documents": about.documents(),
            "tokens": evaluation.tokens,
            "bytes": evaluation.bytes,
            "tokenizer": tokenizer.as_ref().map(|tokenizer| tokenizer.name()),
            "data_sha256": about.sha256(),
            "loss": evaluation.loss(),
            "perplexity": evaluation.perplexity(),
            "loss_per_byte": evaluation.loss_per_byte(),
            "bits_per_byte": evaluation.bits_per_byte(),
            "seconds": seconds,
            "tokens_per_second": evaluation.tokens as f64 / seconds.max(f64::MIN_POSITIVE),
        });
        return print(&format!("{report:#}\n"));
    }
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "checkpoint  {} (step {})", model.checkpoint.display(), model.step);
    let _ = writeln!(text, "data        {about}");
    let _ = writeln!(text, "loss        {:.4} nats per token", evaluation.loss());
    if let (Some(nats), Some(bits)) = (evaluation.loss_per_byte(), evaluation.bits_per_byte()) {
        let _ = writeln!(text, "            {nats:.4} nats per byte, {bits:.4} bits per byte");
    }
    let _ = writeln!(text, "perplexity  {:.4} per token", evaluation.perplexity());
    let _ = writeln!(text, "speed       {:.0} tokens/s", evaluation.tokens as f64 / seconds.max(f64::MIN_POSITIVE));
    print(&text)
}

/// Writes what a batch holds and the model says to it: `tokens` [n], `cu_seqlens` (where sequences begin, and the end) and
/// `logits` [n, vocab]. A sequence sees nothing of the others.
fn write_logits(path: &std::path::Path, engine: &mut dyn Engine, batch: Batch) -> Result<()> {
    let ints = |values: &[i32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let tokens = batch.tokens.clone();
    // Room for more sequences than there are ends in empty ones.
    let mut bounds = batch.cu_seqlens.clone();
    bounds.dedup();
    let logits = engine.logits(batch)?;
    let vocab = logits.len() / tokens.len().max(1);
    let coming = |name: &str, shape: Vec<usize>, dtype| Coming { name: name.into(), shape, dtype };
    let tensors = [
        coming("logits", vec![tokens.len(), vocab], Dtype::F32),
        coming("tokens", vec![tokens.len()], Dtype::I32),
        coming("cu_seqlens", vec![bounds.len()], Dtype::I32),
    ];
    let mut file = ShardStream::begin(path.to_path_buf(), &tensors, None, false)?;
    for row in logits.chunks(vocab.max(1)) {
        file.write(&row.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect::<Vec<u8>>())?;
    }
    file.write(&ints(&tokens))?;
    file.write(&ints(&bounds))?;
    file.finish().map(drop)
}

/// What makes `path` all there is of data.
fn only(path: &std::path::Path) -> Result<Vec<String>> {
    let path = path.to_str().ok_or_else(|| Failure::recipe(format!("--data {}: not UTF-8", path.display())))?;
    // JSON is YAML: quoted, a name is text whatever it looks like.
    let paths = format!("data.paths=[{}]", Value::from(path));
    let others = [
        "data.synthetic=null",
        "data.megatron={data_path: [], train_data_path: [], valid_data_path: []}",
        "data.valid_fraction=0",
        "data.valid_paths=[]",
        "data.ngram_order=0",
    ];
    let rest = ["data.tracked_only=false", "data.exclude=[]", "train.eval_every=0"];
    Ok(others.into_iter().chain(rest).map(str::to_string).chain([paths]).collect())
}

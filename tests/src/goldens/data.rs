//! Kind gpt_dataset: token files as Megatron-LM writes them, and the samples and blends its GPT data set makes of them.
//!
//! Files are written anew from the case's raw tokens; where the case's folder holds them, they must be the same bytes.
//! Nothing here is floating-point arithmetic in the precision of a check, so both precisions compare the same.

use super::case::{Case, Result};
use super::compare::Check;
use gantry::data::megatron::{
    Blend, Boundaries, Cache, Dtype, GptConfig, GptDataset, IndexedDataset, Part, SURPLUS, Sample, Source, Writer,
    parts,
};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// gpt_dataset.
pub fn gpt_dataset(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let mut sets = Vec::new();
    for (name, dtype) in [("u16", Dtype::U16), ("i32", Dtype::I32)] {
        sets.push((name, Arc::new(written(check, folder.path(), name, dtype)?)));
    }
    let variants = case.json["variants"].as_array().ok_or("the case has no variants")?;
    for row in variants {
        let name = text(row, "dataset")?;
        let (_, set) = sets.iter().find(|(known, _)| *known == name).ok_or_else(|| format!("no data set {name}"))?;
        variant(check, set, row).map_err(|e| format!("{name}.{}: {e}", row["variant"]))?;
    }
    let blends = case.json["blends"].as_array().ok_or("the case has no blends")?;
    let files: Vec<_> = sets.into_iter().map(|(_, set)| set).collect();
    blends.iter().try_for_each(|row| blend(check, &files, row).map_err(|e| format!("{}: {e}", row["key"])))?;
    // No tensor of this case is an input but raw.*.
    match case.tensors.keys().find(|name| !name.starts_with("raw.") && !check.has_compared(name)) {
        Some(missed) => Err(format!("{missed} was not compared")),
        None => Ok(()),
    }
}

fn text<'a>(row: &'a Value, key: &str) -> Result<&'a str> {
    row[key].as_str().ok_or_else(|| format!("no {key}"))
}

fn number(row: &Value, key: &str) -> Result<u64> {
    row[key].as_u64().ok_or_else(|| format!("no {key}"))
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, ours: T, golden: T) -> Result<()> {
    if ours == golden { Ok(()) } else { Err(format!("{what} is {ours:?}, not {golden:?}")) }
}

fn numbers<N: Copy + Into<i64>>(list: impl IntoIterator<Item = N>) -> Vec<f64> {
    list.into_iter().map(|n| n.into() as f64).collect()
}

/// Writes raw.NAME's documents with the case's sequence lengths, and compares files and index.
fn written(check: &mut Check<'_>, folder: &Path, name: &str, dtype: Dtype) -> Result<IndexedDataset> {
    let case = check.case;
    let tokens: Vec<i64> = case.data(&format!("raw.{name}.tokens"))?.iter().map(|&x| x as i64).collect();
    let lengths = case.ints(&format!("index.{name}.sequence_lengths"))?;
    let bounds = case.ints(&format!("index.{name}.document_indices"))?;
    let documents = case.ints(&format!("raw.{name}.document_lengths"))?;
    let prefix = folder.join(format!("corpus_{name}"));
    let mut writer = Writer::create(&prefix, dtype).map_err(|e| e.to_string())?;
    let mut rest = tokens.as_slice();
    for (bounds, &whole) in bounds.windows(2).zip(&documents) {
        let lengths = &lengths[bounds[0] as usize..bounds[1] as usize];
        same("the length of a document", lengths.iter().sum::<i32>(), whole)?;
        let mut sequences = Vec::new();
        for &length in lengths {
            let (sequence, after) = rest.split_at(length as usize);
            sequences.push(sequence);
            rest = after;
        }
        writer.document(&sequences).map_err(|e| e.to_string())?;
    }
    same("tokens left over", rest.len(), 0)?;
    writer.finish().map_err(|e| e.to_string())?;
    for ending in ["bin", "idx"] {
        let file = format!("corpus_{name}.{ending}");
        let stored = case.folder.join("data_a").join(&file);
        if stored.exists() {
            let read = |path: &Path| std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()));
            if read(&stored)? != read(&folder.join(&file))? {
                return Err(format!("{file} was written with other bytes than {}", stored.display()));
            }
        }
    }
    let set = IndexedDataset::open(&prefix).map_err(|e| e.to_string())?;
    let index = set.index();
    let all = 0..index.sequences();
    let begins = (0..index.documents()).map(|d| index.document(d).start).chain([index.sequences()]);
    check.tensor(&format!("index.{name}.sequence_lengths"), &numbers(all.clone().map(|s| index.length(s))))?;
    check.tensor(&format!("index.{name}.sequence_pointers"), &numbers(all.map(|s| index.pointer(s) as i64)))?;
    check.tensor(&format!("index.{name}.document_indices"), &numbers(begins.map(|s| s as i64)))?;
    Ok(set)
}

/// The configuration of the case, with what ends of documents do in a variant.
fn config(case: &Case, row: &Value) -> Result<GptConfig> {
    let flag = |key: &str| row[key].as_bool().unwrap_or(false);
    Ok(GptConfig {
        sequence_length: number(&case.json, "seq_length")? as usize,
        seed: number(&case.json, "seed")? as u32,
        pad: 59999,
        boundaries: Boundaries {
            end: number(&case.json, "eod")? as i64,
            reset_positions: flag("reset_position_ids"),
            reset_attention: flag("reset_attention_mask"),
            mask_loss: flag("eod_mask_loss"),
        },
        drop_last_partial_validation: true,
    })
}

fn variant(check: &mut Check<'_>, set: &Arc<IndexedDataset>, row: &Value) -> Result<()> {
    let case = check.case;
    let key = format!("{}.{}", text(row, "dataset")?, text(row, "variant")?);
    let split = parts(text(&case.json, "split")?, set.sequences()).map_err(|e| e.to_string())?;
    let mut cut = Vec::new();
    for (at, part) in [Part::Train, Part::Valid, Part::Test].into_iter().enumerate() {
        let sequences = split[at].clone().ok_or_else(|| format!("no {part} part"))?;
        if let Some(ends) = row.get(["train_sequences", "valid_sequences", "test_sequences"][at]) {
            let ours = [sequences.start as u64, sequences.end as u64 - 1];
            same("sequences", ours.map(Some), [ends[0].as_u64(), ends[1].as_u64()])?;
        }
        let asked = row["requested"][at].as_u64();
        let data = GptDataset::new(set.clone(), sequences, asked, part, &config(case, row)?, &Cache::none());
        let data = data.map_err(|e| e.to_string())?;
        same("the number of samples", data.len() as u64, number(row, ["train_len", "valid_len", "test_len"][at])?)?;
        cut.push(data);
    }
    let train = &cut[0];
    same("epochs", train.epochs(), number(row, "epochs")?)?;
    if case.has(&format!("{key}.document_index")) {
        check.tensor(&format!("{key}.document_index"), &numbers(train.document_index()))?;
        let begins = train.sample_index().flat_map(|(place, offset)| [place as i64, i64::from(offset)]);
        check.tensor(&format!("{key}.sample_index"), &numbers(begins))?;
        check.tensor(&format!("{key}.shuffle_index"), &numbers(train.shuffle_index().map(|i| i as i64)))?;
    }
    for (prefix, data) in [(key.clone(), train), (format!("{key}.valid"), &cut[1])] {
        if case.has(&format!("{prefix}.tokens")) {
            let count = case.tensor(&format!("{prefix}.tokens"))?.shape[0];
            let samples = (0..count).map(|i| data.sample(i).map_err(|e| e.to_string())).collect::<Result<Vec<_>>>()?;
            compare(check, &prefix, &samples)?;
        }
    }
    Ok(())
}

/// Every tensor of samples that the case has under `prefix`.
fn compare(check: &mut Check<'_>, prefix: &str, samples: &[Sample]) -> Result<()> {
    let ints = |of: fn(&Sample) -> &Vec<i32>| numbers(samples.iter().flat_map(|s| of(s).iter().copied()));
    let loss: Vec<f64> = samples.iter().flat_map(|s| s.loss_mask.iter().map(|&x| f64::from(x))).collect();
    let mask = samples.iter().take(4).flat_map(|s| hidden(&s.cu_seqlens, s.tokens.len())).collect();
    for (name, values) in [
        ("tokens", ints(|s| &s.tokens)),
        ("labels", ints(|s| &s.labels)),
        ("position_ids", ints(|s| &s.position_ids)),
        ("loss_mask", loss),
        ("attention_mask_first4", mask),
    ] {
        let name = format!("{prefix}.{name}");
        if check.case.has(&name) {
            check.tensor(&name, &values)?;
        }
    }
    Ok(())
}

/// Megatron-LM's mask [query, key]: 1 where the key may not be seen.
fn hidden(cu_seqlens: &[i32], len: usize) -> Vec<f64> {
    let piece = |at: usize| cu_seqlens.iter().filter(|&&begin| begin as usize <= at).count();
    let see = |query: usize, key: usize| key <= query && piece(key) == piece(query);
    (0..len).flat_map(|query| (0..len).map(move |key| if see(query, key) { 0.0 } else { 1.0 })).collect()
}

/// Blends are of whole files.
fn blend(check: &mut Check<'_>, files: &[Arc<IndexedDataset>], row: &Value) -> Result<()> {
    let (key, size) = (text(row, "key")?, number(row, "size")?);
    let config = config(check.case, &Value::Null)?;
    let cache = Cache::none();
    let source = Source { files, split: "1", part: Part::Train, config: &config, cache: &cache };
    let blend = match row["weights"].as_array() {
        Some(weights) => {
            let weights =
                weights.iter().map(|w| w.as_f64().ok_or("a weight is no number")).collect::<Result<Vec<_>, _>>()?;
            Blend::by_weights(&source, &weights, size, SURPLUS)
        }
        None => Blend::exhausting(&source, None),
    };
    let blend = blend.map_err(|e| e.to_string())?;
    same("the size", blend.len() as u64, size)?;
    let lengths: Vec<Option<u64>> = blend.sets().iter().map(|set| Some(set.len() as u64)).collect();
    let golden = row["dataset_lengths"].as_array().ok_or("no dataset_lengths")?;
    same("the sets' lengths", lengths, golden.iter().map(Value::as_u64).collect())?;
    let order = blend.order().ok_or("a blend of two sets has an order")?;
    check.tensor(&format!("{key}.dataset_index"), &numbers(order.0.iter()))?;
    let samples = order.1.iter().map(|sample| sample as i64);
    check.tensor(&format!("{key}.dataset_sample_index"), &numbers(samples))?;
    let count = check.case.tensor(&format!("{key}.tokens"))?.shape[0];
    let samples = (0..count).map(|i| blend.sample(i).map_err(|e| e.to_string())).collect::<Result<Vec<_>>>()?;
    compare(check, key, &samples)
}

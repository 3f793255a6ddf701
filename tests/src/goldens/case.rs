//! A golden case on disk: NAME.json with its configuration and tolerance, NAME.safetensors with its tensors.

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What went wrong with a case, in one sentence.
pub type Result<T, E = String> = std::result::Result<T, E>;

/// A stored tensor; integers and booleans as numbers too.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

/// A case as it was read.
#[derive(Clone, Debug)]
pub struct Case {
    /// Where it was read, with further files that it names.
    pub folder: PathBuf,
    pub name: String,
    pub kind: String,
    pub json: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

/// Names of the cases of a folder, in order.
pub fn list(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let files = entries.map(|entry| entry.map(|entry| entry.path()).map_err(|e| format!("{}: {e}", folder.display())));
    let files = files.collect::<Result<Vec<PathBuf>>>()?;
    let stem = |path: &PathBuf| path.file_stem().map(|s| s.to_string_lossy().into_owned());
    let of = |ext: &str| -> Vec<String> {
        files.iter().filter(|p| p.extension().is_some_and(|e| e == ext)).filter_map(stem).collect()
    };
    let mut names = of("json");
    names.sort();
    // Tensors without a description are a mistake of whoever made the folder, not something to pass over.
    if let Some(lonely) = of("safetensors").into_iter().find(|name| !names.contains(name)) {
        return Err(format!("{}: {lonely}.safetensors has no {lonely}.json beside it", folder.display()));
    }
    if names.is_empty() {
        return Err(format!("{} holds no cases", folder.display()));
    }
    Ok(names)
}

impl Case {
    pub fn read(folder: &Path, name: &str) -> Result<Case> {
        let at = |path: &Path, e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let path = folder.join(format!("{name}.json"));
        let text = std::fs::read_to_string(&path).map_err(|e| at(&path, &e))?;
        let json: Value = serde_json::from_str(&text).map_err(|e| at(&path, &e))?;
        // Without a kind the name says it: "ssd_scan_long" is an "ssd_scan".
        let kind = json.get("kind").and_then(Value::as_str).unwrap_or(name).to_string();
        let path = folder.join(format!("{name}.safetensors"));
        let tensors = if path.exists() { read_tensors(&path)? } else { BTreeMap::new() };
        Ok(Case { folder: folder.into(), name: name.into(), kind, json, tensors })
    }

    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| format!("the case has no tensor {name}"))
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub fn data(&self, name: &str) -> Result<Vec<f64>> {
        Ok(self.tensor(name)?.data.clone())
    }

    pub fn ints(&self, name: &str) -> Result<Vec<i32>> {
        Ok(self.tensor(name)?.data.iter().map(|&x| x as i32).collect())
    }

    pub fn config(&self, key: &str) -> Result<&Value> {
        self.json["config"].get(key).ok_or_else(|| format!("the case's config has no {key}"))
    }

    pub fn size(&self, key: &str) -> Result<usize> {
        let value = self.config(key)?;
        value.as_u64().map(|n| n as usize).ok_or_else(|| format!("config.{key} is {value}, not a size"))
    }

    pub fn number(&self, key: &str) -> Result<f64> {
        let value = self.config(key)?;
        value.as_f64().ok_or_else(|| format!("config.{key} is {value}, not a number"))
    }

    pub fn flag(&self, key: &str) -> Result<bool> {
        let value = self.config(key)?;
        value.as_bool().ok_or_else(|| format!("config.{key} is {value}, neither true nor false"))
    }

    /// (rtol, atol): |value - golden| <= atol + rtol |golden|. A case that speaks of no tolerance wants equal numbers,
    /// up to the last bit that reading a decimal text may miss.
    pub fn tolerance(&self) -> Result<(f64, f64)> {
        let Some(tolerance) = self.json.get("tolerance") else { return Ok((2.0 * f64::EPSILON, 0.0)) };
        let rtol = tolerance["rtol"].as_f64().ok_or("the case states no tolerance.rtol")?;
        Ok((rtol, tolerance["atol"].as_f64().unwrap_or(0.0)))
    }

    /// Sequence boundaries of flat tokens: from a config entry, an input, changes of seq_idx [batch, seq], or
    /// batch x seq equal sequences.
    pub fn cu_seqlens(&self, batch: usize, seq: usize) -> Result<Vec<i32>> {
        if self.has("in.cu_seqlens") {
            return self.ints("in.cu_seqlens");
        }
        if !self.has("in.seq_idx") {
            return Ok((0..=batch).map(|b| (b * seq) as i32).collect());
        }
        let index = self.ints("in.seq_idx")?;
        let mut bounds = vec![0];
        for t in 1..batch * seq {
            if t % seq == 0 || index[t] != index[t - 1] {
                bounds.push(t as i32);
            }
        }
        bounds.push((batch * seq) as i32);
        Ok(bounds)
    }
}

fn read_tensors(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.tensors() {
        let words = |f: fn([u8; 4]) -> f64| view.data().chunks_exact(4).map(|b| f([b[0], b[1], b[2], b[3]])).collect();
        let data: Vec<f64> = match view.dtype() {
            Dtype::F32 => words(|b| f64::from(f32::from_le_bytes(b))),
            Dtype::I32 => words(|b| f64::from(i32::from_le_bytes(b))),
            Dtype::U8 => view.data().iter().map(|&b| f64::from(b)).collect(),
            other => return Err(format!("{}: tensor {name} is {other:?}; cases hold F32, I32, U8", path.display())),
        };
        tensors.insert(name, Tensor { shape: view.shape().to_vec(), data });
    }
    Ok(tensors)
}

/// Rows ordered [seq, batch] as rows ordered [batch, seq], which is how flat tokens lie.
pub fn flat(seq_major: &[f64], seq: usize, batch: usize) -> Vec<f64> {
    transpose(seq_major, seq, batch)
}

/// The other way.
pub fn seq_major(flat: &[f64], seq: usize, batch: usize) -> Vec<f64> {
    transpose(flat, batch, seq)
}

/// [outer, inner, width] to [inner, outer, width].
fn transpose(x: &[f64], outer: usize, inner: usize) -> Vec<f64> {
    let width = x.len() / (outer * inner);
    let row = |o: usize, i: usize| &x[(o * inner + i) * width..][..width];
    (0..inner).flat_map(|i| (0..outer).flat_map(move |o| row(o, i).to_vec())).collect()
}

/// Columns of several [rows, *] side by side.
pub fn beside(rows: usize, parts: &[&[f64]]) -> Vec<f64> {
    let row = |t: usize| parts.iter().flat_map(move |p| p[t * (p.len() / rows)..][..p.len() / rows].to_vec());
    (0..rows).flat_map(row).collect()
}

/// Columns `start .. start + len` of x [rows, *].
pub fn columns(rows: usize, x: &[f64], start: usize, len: usize) -> Vec<f64> {
    let width = x.len() / rows;
    (0..rows).flat_map(|t| x[t * width + start..][..len].to_vec()).collect()
}

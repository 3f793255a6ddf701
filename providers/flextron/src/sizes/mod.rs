//! Parameters and memory of a model as functions of the widths of its axes.
//!
//! [`exact`] counts what a built model has, from its declaration; [`reference`] counts as Megatron-LM's
//! `flex_budget_utils.py` does. Both take expected widths and keep derivatives.

pub mod exact;
pub mod reference;

use crate::Result;
use crate::dual::Dual;
use schemars::JsonSchema;
use serde::Deserialize;

/// Which parameters a budget counts.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Those that one token passes through.
    #[default]
    Active,
    /// All.
    Total,
}

/// Sizes of a model, in elements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    pub total: Dual,
    pub active: Dual,
    /// Keys and values kept for the tokens of the context.
    pub kv_cache: Dual,
    /// State that sequence models keep.
    pub ssm_cache: Dual,
    /// The largest activation inside a layer while a chunk of the prompt is read.
    pub buffer: Dual,
}

impl Counts {
    pub fn params(&self, target: Target) -> &Dual {
        match target {
            Target::Active => &self.active,
            Target::Total => &self.total,
        }
    }

    /// Memory at inference, GiB (the reference calls it GB).
    pub fn gib(&self, bytes: &Bytes, target: Target) -> Dual {
        let weights = self.params(target).scale(bytes.params);
        let caches = &self.kv_cache.scale(bytes.kv_cache) + &self.ssm_cache.scale(bytes.ssm_cache);
        (&(&weights + &caches) + &self.buffer.scale(bytes.buffer)).scale(1.0 / f64::from(1u32 << 30))
    }
}

/// What is held in memory at inference.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Inference {
    /// Tokens of the context, of each sequence.
    pub seq_length: u64,
    /// Sequences at a time.
    pub batch_size: u64,
    /// Tokens of a prompt that are read at once, of each sequence.
    pub prefill_chunk: u64,
}

impl Default for Inference {
    fn default() -> Inference {
        Inference { seq_length: 131_072, batch_size: 1, prefill_chunk: 16_384 }
    }
}

/// Bytes of an element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bytes {
    pub params: f64,
    pub kv_cache: f64,
    pub ssm_cache: f64,
    pub buffer: f64,
}

/// Named sets of bytes per element; as those of the reference's `memory_profiles.yaml`.
const PROFILES: [(&str, Bytes); 6] = [
    ("bf16", bytes(2.0, 2.0, 2.0, 2.0)),
    ("fp8_kv", bytes(2.0, 1.0, 2.0, 2.0)),
    ("fp8_kv_ssm", bytes(2.0, 1.0, 1.0, 2.0)),
    ("fp8_all", bytes(1.0, 1.0, 1.0, 1.0)),
    ("int8", bytes(1.0, 1.0, 1.0, 2.0)),
    ("fp4", bytes(0.5625, 0.5625, 1.0, 2.0)),
];

const fn bytes(params: f64, kv_cache: f64, ssm_cache: f64, buffer: f64) -> Bytes {
    Bytes { params, kv_cache, ssm_cache, buffer }
}

/// A memory profile with single numbers replaced.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct MemoryProfile {
    /// bf16 (the default), fp8_kv, fp8_kv_ssm, fp8_all, int8 or fp4.
    pub profile: Option<String>,
    /// Bytes of a weight.
    pub params: Option<f64>,
    /// Bytes of an element of the KV cache.
    pub kv_cache: Option<f64>,
    /// Bytes of an element of the state of sequence models.
    pub ssm_cache: Option<f64>,
    /// Bytes of an element of the largest buffer.
    pub buffer: Option<f64>,
}

impl MemoryProfile {
    pub fn bytes(&self) -> Result<Bytes> {
        let name = self.profile.as_deref().unwrap_or("bf16");
        let Some((_, preset)) = PROFILES.iter().find(|(known, _)| *known == name) else {
            let known: Vec<&str> = PROFILES.iter().map(|p| p.0).collect();
            return Err(format!("memory.profile {name:?} is unknown; there are {}", known.join(", ")));
        };
        let given = [
            ("params", self.params),
            ("kv_cache", self.kv_cache),
            ("ssm_cache", self.ssm_cache),
            ("buffer", self.buffer),
        ];
        if let Some((key, Some(x))) = given.iter().find(|(_, x)| x.is_some_and(|x| !(x.is_finite() && x >= 0.0))) {
            return Err(format!("memory.{key} is {x} bytes; it must be at least 0"));
        }
        Ok(Bytes {
            params: self.params.unwrap_or(preset.params),
            kv_cache: self.kv_cache.unwrap_or(preset.kv_cache),
            ssm_cache: self.ssm_cache.unwrap_or(preset.ssm_cache),
            buffer: self.buffer.unwrap_or(preset.buffer),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_take_single_numbers() {
        let profile = MemoryProfile { profile: Some("fp8_kv".into()), buffer: Some(0.5), ..MemoryProfile::default() };
        assert_eq!(profile.bytes(), Ok(bytes(2.0, 1.0, 2.0, 0.5)));
        let unknown = MemoryProfile { profile: Some("fp3".into()), ..MemoryProfile::default() };
        assert!(unknown.bytes().unwrap_err().contains("fp8_kv_ssm"));
        let negative = MemoryProfile { kv_cache: Some(-1.0), ..MemoryProfile::default() };
        assert!(negative.bytes().unwrap_err().contains("kv_cache is -1"));
    }
}

//! The pattern string: one symbol per layer, `|` where a pipeline stage must begin.

use gantry_plugin_api::schemars::{self, JsonSchema};
use gantry_plugin_api::sdk::{Error, Result};
use serde::Deserialize;

/// Kind of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// `M`
    Mamba,
    /// `*`
    Attention,
    /// `-`
    Mlp,
    /// `E`
    Moe,
}

impl LayerKind {
    /// Name in reports and in the recipe's `recompute` list.
    pub fn name(self) -> &'static str {
        match self {
            LayerKind::Mamba => "mamba",
            LayerKind::Attention => "attention",
            LayerKind::Mlp => "mlp",
            LayerKind::Moe => "moe",
        }
    }

    pub fn symbol(self) -> char {
        match self {
            LayerKind::Mamba => 'M',
            LayerKind::Attention => '*',
            LayerKind::Mlp => '-',
            LayerKind::Moe => 'E',
        }
    }
}

/// A layer of the pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatternLayer {
    pub kind: LayerKind,
    /// A pipeline stage must begin with it.
    pub starts_stage: bool,
}

/// The pattern that [`parse`] reads these layers from.
pub fn text(layers: &[PatternLayer]) -> String {
    let mut text = String::new();
    for (at, layer) in layers.iter().enumerate() {
        // What comes first begins a stage as it is.
        if layer.starts_stage && at > 0 {
            text.push('|');
        }
        text.push(layer.kind.symbol());
    }
    text
}

/// Beyond any model.
const MAX_LAYERS: usize = 10_000;

/// The layers of a pattern; an error shows the place of the symbol that is none.
pub fn parse(pattern: &str) -> Result<Vec<PatternLayer>> {
    let mut layers: Vec<PatternLayer> = Vec::new();
    let mut starts_stage = false;
    for (at, symbol) in pattern.chars().enumerate() {
        let kind = match symbol {
            'M' => LayerKind::Mamba,
            '*' => LayerKind::Attention,
            '-' => LayerKind::Mlp,
            'E' => LayerKind::Moe,
            '|' if layers.is_empty() || starts_stage => {
                return Err(wrong(pattern, at, "\"|\" stands between two layers, where a pipeline stage begins"));
            }
            '|' => {
                starts_stage = true;
                continue;
            }
            '/' => {
                let why = "\"/\" begins multi-token prediction, which this provider does not have; remove it and what follows";
                return Err(wrong(pattern, at, why));
            }
            other => {
                let why = format!("{other:?} is no layer; a layer is M (Mamba), * (attention), - (MLP) or E (experts)");
                return Err(wrong(pattern, at, &why));
            }
        };
        layers.push(PatternLayer { kind, starts_stage });
        starts_stage = false;
    }
    if layers.len() > MAX_LAYERS {
        let n = layers.len();
        return Err(Error::config(format!("config.pattern has {n} layers; it may have at most {MAX_LAYERS}")));
    }
    if layers.is_empty() {
        return Err(Error::config("config.pattern is empty; it needs a symbol per layer, e.g. \"ME*E\""));
    }
    if starts_stage {
        return Err(wrong(pattern, pattern.chars().count() - 1, "no layer follows this \"|\"; remove it"));
    }
    Ok(layers)
}

fn wrong(pattern: &str, at: usize, why: &str) -> Error {
    Error::config(format!("config.pattern {pattern:?}, symbol {}: {why}", at + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_symbol_is_a_layer_and_bars_begin_stages() {
        let layers = parse("M*|-E").unwrap();
        let symbols: String = layers.iter().map(|l| l.kind.symbol()).collect();
        assert_eq!(symbols, "M*-E");
        assert_eq!(layers.iter().map(|l| l.starts_stage).collect::<Vec<_>>(), [false, false, true, false]);
    }

    #[test]
    fn what_is_no_layer_is_shown() {
        let message = |pattern| parse(pattern).unwrap_err().message;
        assert!(message("").contains("empty"));
        let long = parse(&"M".repeat(10_001)).unwrap_err().message;
        assert!(long.contains("has 10001 layers; it may have at most 10000"));
        assert!(message("MxE").contains("symbol 2: 'x' is no layer"), "{}", message("MxE"));
        assert!(message("ME/M").contains("symbol 3: \"/\" begins multi-token prediction"));
        assert!(message("|M").contains("symbol 1") && message("M||E").contains("symbol 3"));
        assert!(message("ME|").contains("symbol 3: no layer follows"));
    }
}

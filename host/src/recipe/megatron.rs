//! `data.megatron`: Megatron-LM's indexed files as a source of data, by the names of its arguments.

use super::Recipe;
use crate::failure::Result;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Unexpected, Visitor};
use std::fmt;
use std::path::PathBuf;

/// The section.
#[derive(Clone, Debug, Default, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Megatron {
    pub(crate) data_path: BlendSpec,
    pub(crate) split: String,
    pub(crate) train_data_path: BlendSpec,
    pub(crate) valid_data_path: BlendSpec,
    /// `None`: train.seed.
    pub(crate) seed: Option<u64>,
    /// `None`: train.steps x train.global_batch_size.
    pub(crate) train_samples: Option<u64>,
    /// `None`: that of `data.tokenizer`.
    pub(crate) eod: Option<i32>,
    pub(crate) eod_mask_loss: bool,
    pub(crate) mid_level_dataset_surplus: f64,
    /// `None`: indices are built in memory.
    pub(crate) data_cache_path: Option<PathBuf>,
}

impl Megatron {
    /// Whether it is the recipe's source of data.
    pub(crate) fn given(&self) -> bool {
        self.files().iter().any(|blend| !blend.prefixes.is_empty())
    }

    fn files(&self) -> [&BlendSpec; 3] {
        [&self.data_path, &self.train_data_path, &self.valid_data_path]
    }

    /// The blend trained on, and its key.
    pub(crate) fn training(&self) -> (&BlendSpec, &'static str) {
        match self.data_path.prefixes.is_empty() {
            true => (&self.train_data_path, "data.megatron.train_data_path"),
            false => (&self.data_path, "data.megatron.data_path"),
        }
    }

    /// The blend held out, if any, and its key.
    pub(crate) fn held_out(&self) -> Option<(&BlendSpec, &'static str)> {
        if !self.valid_data_path.prefixes.is_empty() {
            return Some((&self.valid_data_path, "data.megatron.valid_data_path"));
        }
        // What is no number is refused where the split is used.
        let share = self.split.split(',').nth(1).map(|share| share.trim().parse::<f64>());
        let held = share.is_some_and(|share| share.is_ok_and(|share| share > 0.0));
        (held && !self.data_path.prefixes.is_empty()).then_some((&self.data_path, "data.megatron.data_path"))
    }

    /// The paths in it, with their keys.
    pub(super) fn paths(&mut self) -> impl Iterator<Item = (&'static str, &mut PathBuf)> {
        let blends = [
            ("data.megatron.data_path", &mut self.data_path),
            ("data.megatron.train_data_path", &mut self.train_data_path),
            ("data.megatron.valid_data_path", &mut self.valid_data_path),
        ];
        let prefixes =
            blends.into_iter().flat_map(|(key, blend)| blend.prefixes.iter_mut().map(move |path| (key, path)));
        prefixes.chain(self.data_cache_path.iter_mut().map(|path| ("data.megatron.data_cache_path", path)))
    }

    /// Writes what has paths into a resolved recipe's section.
    pub(super) fn resolve(&self, section: &mut serde_json::Value) {
        for (key, blend) in ["data_path", "train_data_path", "valid_data_path"].into_iter().zip(self.files()) {
            section[key] = blend.to_value();
        }
        section["data_cache_path"] = self.data_cache_path.as_ref().map(|path| path.display().to_string()).into();
    }
}

/// Prefixes of files, and their weights if they are given: `PREFIX`, `[PREFIX, ...]`, `[WEIGHT, PREFIX, ...]` or
/// `[[WEIGHT, PREFIX], ...]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct BlendSpec {
    pub(crate) prefixes: Vec<PathBuf>,
    pub(crate) weights: Option<Vec<f64>>,
}

impl BlendSpec {
    fn to_value(&self) -> serde_json::Value {
        let prefixes = self.prefixes.iter().map(|prefix| serde_json::Value::from(prefix.display().to_string()));
        match &self.weights {
            None => prefixes.collect(),
            Some(weights) => {
                weights.iter().zip(prefixes).flat_map(|(&weight, prefix)| [weight.into(), prefix]).collect()
            }
        }
    }
}

impl schemars::JsonSchema for BlendSpec {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "BlendSpec".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let part = serde_json::json!([{"type": "string"}, {"type": "number"}]);
        schemars::json_schema!({
            "anyOf": [
                {"type": "string", "description": "PREFIX of PREFIX.bin and PREFIX.idx"},
                {
                    "type": "array",
                    "items": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "array", "items": {"anyOf": part}}]}
                }
            ]
        })
    }
}

/// An element of the list.
enum Part {
    Number(f64),
    Text(String),
    Pair(f64, String),
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Part, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Part;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a weight, a prefix or [weight, prefix]")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Part, E> {
                Ok(Part::Text(text.trim().into()))
            }
            fn visit_f64<E: Error>(self, number: f64) -> Result<Part, E> {
                Ok(Part::Number(number))
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<Part, E> {
                Ok(Part::Number(number as f64))
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Part, E> {
                Ok(Part::Number(number as f64))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Part, A::Error> {
                let pair: [Option<Part>; 3] = [seq.next_element()?, seq.next_element()?, seq.next_element()?];
                match pair {
                    [Some(Part::Number(weight)), Some(Part::Text(prefix)), None] => Ok(Part::Pair(weight, prefix)),
                    _ => Err(A::Error::invalid_value(Unexpected::Seq, &"[weight, prefix]")),
                }
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for BlendSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<BlendSpec, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = BlendSpec;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a prefix, a list of prefixes, or [weight, prefix, ...]")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<BlendSpec, E> {
                Ok(BlendSpec { prefixes: vec![text.trim().into()], weights: None })
            }
            fn visit_unit<E: Error>(self) -> Result<BlendSpec, E> {
                Ok(BlendSpec::default())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<BlendSpec, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = seq.next_element::<Part>()? {
                    parts.push(part);
                }
                blend(parts).ok_or_else(|| A::Error::invalid_value(Unexpected::Seq, &self))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// As Megatron-LM reads the list: in pairs if every first of a pair is a number, also one written as text.
fn blend(parts: Vec<Part>) -> Option<BlendSpec> {
    let number = |part: &Part| match part {
        Part::Number(number) => Some(*number),
        Part::Text(text) => text.parse::<f64>().ok(),
        Part::Pair(..) => None,
    };
    let firsts: Option<Vec<f64>> = parts.iter().step_by(2).map(number).collect();
    let (mut prefixes, mut weights) =
        (Vec::new(), firsts.filter(|_| !parts.is_empty() && parts.len().is_multiple_of(2)));
    let paired = weights.is_some();
    for (at, part) in parts.into_iter().enumerate() {
        match part {
            _ if paired && at % 2 == 0 => {}
            Part::Text(prefix) | Part::Pair(_, prefix) if prefix.is_empty() => return None,
            Part::Text(prefix) => prefixes.push(PathBuf::from(prefix)),
            Part::Number(_) => return None,
            Part::Pair(weight, prefix) => {
                prefixes.push(prefix.into());
                weights.get_or_insert_default().push(weight);
            }
        }
    }
    let even = weights.as_ref().is_none_or(|weights| weights.len() == prefixes.len());
    even.then_some(BlendSpec { prefixes, weights })
}

/// Most data sets of a blend: Megatron-LM numbers them with 16 bits and a sign.
const MOST_SETS: usize = 32_766;

impl super::validate::Check<'_> {
    /// The section, if it is the source of data.
    pub(super) fn megatron(&self, recipe: &Recipe) -> Result<()> {
        let (data, given) = (&recipe.data, &recipe.data.megatron);
        let (whole, train, valid) = (&given.data_path, &given.train_data_path, &given.valid_data_path);
        let key = |name: &str| format!("data.megatron.{name}");
        let some = |blend: &BlendSpec| !blend.prefixes.is_empty();
        self.ensure(!(some(whole) && (some(train) || some(valid))), &key("data_path"), || {
            "`data.megatron.data_path`, which is parted by `split`, excludes `train_data_path` and `valid_data_path`; \
             leave one or the other out"
                .into()
        })?;
        self.ensure(some(whole) || some(train), &key("valid_data_path"), || {
            "`data.megatron.valid_data_path` needs `data.megatron.train_data_path`".into()
        })?;
        for (name, blend) in [("data_path", whole), ("train_data_path", train), ("valid_data_path", valid)] {
            let sets = blend.prefixes.len();
            self.ensure(sets <= MOST_SETS, &key(name), || {
                format!("`{}` has {sets} data sets, expected at most {MOST_SETS}", key(name))
            })?;
            for (weight, prefix) in blend.weights.iter().flatten().zip(&blend.prefixes) {
                self.ensure(*weight > 0.0 && weight.is_finite(), &key(name), || {
                    format!("`{}` gives {} the weight {weight}, expected a number above 0", key(name), prefix.display())
                })?;
            }
        }
        let seed = given.seed.unwrap_or(recipe.train.seed);
        let seed_key = if given.seed.is_some() { "data.megatron.seed" } else { "train.seed" };
        self.ensure(u32::try_from(seed).is_ok(), seed_key, || {
            format!("`{seed_key}` is {seed}; the order of `data.megatron` takes seeds of 32 bits, as numpy does")
        })?;
        self.at_least_one(&key("train_samples"), given.train_samples.unwrap_or(1))?;
        self.ensure(given.eod.is_none_or(|eod| eod >= 0), &key("eod"), || {
            format!("`data.megatron.eod` is {}, expected a token id", given.eod.unwrap_or(0))
        })?;
        self.range(&key("mid_level_dataset_surplus"), given.mid_level_dataset_surplus, 0.0, 1.0)?;
        let without_effect = [
            ("data.valid_fraction", data.valid_fraction > 0.0, "data.megatron.split"),
            ("data.valid_paths", !data.valid_paths.is_empty(), "data.megatron.valid_data_path"),
            ("data.tracked_only", data.tracked_only, "data.paths"),
            ("data.ngram_order", data.ngram_order > 0, "data.paths"),
        ];
        for (without, stated, instead) in without_effect {
            self.ensure(!stated, without, || {
                format!("`{without}` has no effect with `data.megatron`; it belongs to `data.paths` (see `{instead}`)")
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Overrides, Recipe};
    use rstest::rstest;
    use std::path::Path;

    const BASE: &str = "name: t\nmodules: {lm: {provider: p}}\noptimizer: {lr: 1}\n\
                        train: {steps: 3, seq_length: 4, global_batch_size: 2}\n";

    fn recipe(megatron: &str, set: &[&str]) -> crate::failure::Result<Recipe> {
        let overrides = Overrides { set: set.iter().map(|s| s.to_string()).collect(), ..Default::default() };
        Recipe::parse(&format!("{BASE}data: {{megatron: {megatron}}}\n"), &overrides)
    }

    #[rstest]
    #[case::one("{data_path: /a}", &["/a"], None)]
    #[case::list("{data_path: [/a, /b, /c]}", &["/a", "/b", "/c"], None)]
    #[case::two("{data_path: [/a, /b]}", &["/a", "/b"], None)]
    #[case::flat("{data_path: [0.7, /a, 3, /b]}", &["/a", "/b"], Some(&[0.7, 3.0] as &[f64]))]
    #[case::text("{data_path: ['30', /a, '70', /b]}", &["/a", "/b"], Some(&[30.0, 70.0] as &[f64]))]
    #[case::pairs("{data_path: [[0.7, /a], [0.3, /b]]}", &["/a", "/b"], Some(&[0.7, 0.3] as &[f64]))]
    #[case::one_weight("{data_path: [1, /a]}", &["/a"], Some(&[1.0] as &[f64]))]
    fn forms_of_a_blend(#[case] text: &str, #[case] prefixes: &[&str], #[case] weights: Option<&[f64]>) {
        let first = recipe(text, &[]).unwrap();
        // The resolved recipe loads to the same.
        for recipe in [Recipe::parse(first.resolved_yaml(), &Overrides::default()).unwrap(), first] {
            let blend = &recipe.data.megatron.data_path;
            assert_eq!(blend.prefixes, prefixes.iter().map(Path::new).collect::<Vec<_>>());
            assert_eq!(blend.weights.as_deref(), weights);
            assert!(recipe.data.megatron.given() && recipe.data.megatron.held_out().is_some());
        }
    }

    #[rstest]
    #[case::weight_alone("{data_path: [0.5]}", "data.megatron.data_path")]
    #[case::weights_miss("{data_path: [0.5, /a, /b]}", "data.megatron.data_path")]
    #[case::weights_mixed("{data_path: [[0.5, /a], /b]}", "data.megatron.data_path")]
    #[case::triple("{data_path: [[0.5, /a, /b]]}", "data.megatron.data_path")]
    #[case::nothing("{data_path: [0, /a]}", "gives /a the weight 0, expected a number above 0")]
    #[case::negative("{data_path: [1, /a, -2, /b]}", "gives /b the weight -2, expected a number above 0")]
    #[case::nan("{data_path: ['nan', /a]}", "the weight NaN, expected a number above 0")]
    #[case::infinite("{data_path: ['inf', /a]}", "the weight inf, expected a number above 0")]
    #[case::empty("{data_path: ['']}", "data.megatron.data_path")]
    #[case::both("{data_path: /a, valid_data_path: /b}", "excludes `train_data_path` and `valid_data_path`")]
    #[case::valid_alone(
        "{valid_data_path: /b}",
        "`data.megatron.valid_data_path` needs `data.megatron.train_data_path`"
    )]
    #[case::seed("{data_path: /a, seed: 4294967296}", "`data.megatron.seed` is 4294967296")]
    #[case::samples("{data_path: /a, train_samples: 0}", "`data.megatron.train_samples` is 0")]
    #[case::eod("{data_path: /a, eod: -1}", "`data.megatron.eod` is -1, expected a token id")]
    #[case::surplus("{data_path: /a, mid_level_dataset_surplus: 2}", "expected 0 to 1")]
    #[case::unknown("{data_pth: /a}", "data_path")]
    fn what_cannot_be_is_refused(#[case] text: &str, #[case] part: &str) {
        let failure = recipe(text, &[]).unwrap_err();
        assert!(failure.sentence.contains(part), "{}", failure.sentence);
        assert_eq!(failure.exit_status(), 2);
    }

    #[rstest]
    #[case("data.paths=[x]", "exclude each other")]
    #[case("data.synthetic={vocab: 9, document_length: 5, tokens: 9}", "exclude each other")]
    #[case("data.valid_fraction=0.1", "`data.valid_fraction` has no effect with `data.megatron`")]
    #[case("data.ngram_order=2", "`data.ngram_order` has no effect")]
    #[case("data.tracked_only=true", "`data.tracked_only` has no effect with `data.megatron`")]
    #[case("train.seed=4294967296", "`train.seed` is 4294967296; the order of `data.megatron` takes seeds of 32 bits")]
    fn other_sources_and_their_keys_are_refused_beside_it(#[case] set: &str, #[case] part: &str) {
        let failure = recipe("{data_path: /a}", &[set]).unwrap_err();
        assert!(failure.sentence.contains(part), "{}", failure.sentence);
    }

    #[test]
    fn evaluation_needs_a_validation_part() {
        assert!(recipe("{data_path: /a}", &["train.eval_every=1"]).is_ok());
        assert!(recipe("{train_data_path: /a, valid_data_path: /b}", &["train.eval_every=1"]).is_ok());
        for text in ["{data_path: /a, split: '1,0,1'}", "{data_path: /a, split: '1'}", "{train_data_path: /a}"] {
            let failure = recipe(text, &["train.eval_every=1"]).unwrap_err();
            assert!(failure.sentence.contains("`train.eval_every` has no effect without"), "{}", failure.sentence);
        }
    }
}

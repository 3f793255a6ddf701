//! Factors for the learning rate and weight decay of single parameters: `optimizer.multipliers` of a recipe.
//!
//! A pattern is a glob over declared names, in which `*` also stands for dots; the `{axis}` of a stack of tensors is no part
//! of the name. Every entry that matches a parameter counts, and so does what the model declares: factors multiply.

use crate::error::{Error, Result};
use crate::model::ParamTable;
use crate::model::params::decays;
use crate::recipe::Multiplier;
use gantry_plugin_api::plan::{ModelPlan, Param};
use globset::Glob;
use std::collections::HashMap;

/// What a recipe multiplies a parameter's hyperparameters by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    pub lr: f64,
    pub weight_decay: f64,
}

/// The factors of every parameter of a plan, by its index. An entry that has no effect is an error.
pub fn resolve(plan: &ModelPlan, multipliers: &[Multiplier]) -> Result<Vec<Factors>> {
    let mut factors = vec![Factors { lr: 1.0, weight_decay: 1.0 }; plan.params.len()];
    let mut ties: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, param) in plan.params.iter().enumerate() {
        if let Some(tie) = &param.tie {
            ties.entry(tie).or_default().push(index);
        }
    }
    for (number, entry) in multipliers.iter().enumerate() {
        let place = format!("optimizer.multipliers.{number}");
        let glob = Glob::new(&entry.pattern).map_err(|e| Error::recipe(format!("`{place}.match`: {e}")))?;
        let glob = glob.compile_matcher();
        let mut matched: Vec<usize> =
            (0..plan.params.len()).filter(|&i| glob.is_match(name(&plan.params[i]))).collect();
        if matched.is_empty() {
            let nearest = nearest(plan, &entry.pattern);
            return Err(Error::recipe(format!(
                "`{place}.match`: no parameter matches `{}`; the nearest is `{nearest}`",
                entry.pattern
            ))
            .remedy("see the names of parameters with gantry inspect PROVIDER"));
        }
        // Tied parameters are one tensor: what holds for one of its names holds for all.
        let others = matched.iter().filter_map(|&i| plan.params[i].tie.as_deref()).filter_map(|tie| ties.get(tie));
        let others: Vec<usize> = others.flatten().copied().collect();
        matched.extend(others);
        matched.sort_unstable();
        matched.dedup();
        let decays = matched.iter().any(|&index| decays(&plan.params[index]));
        if entry.weight_decay.is_some_and(|factor| factor > 0.0) && !decays {
            return Err(Error::recipe(format!(
                "`{place}.weight_decay`: what `{}` matches has no weight decay to multiply: one-dimensional parameters, \
                 biases, and what the model excepts",
                entry.pattern
            ))
            .remedy("leave weight_decay out of this entry"));
        }
        for index in matched {
            factors[index].lr *= entry.lr.unwrap_or(1.0);
            factors[index].weight_decay *= entry.weight_decay.unwrap_or(1.0);
        }
    }
    Ok(factors)
}

/// Multiplies what a table's parameters have by their factors.
pub fn apply(factors: &[Factors], table: &mut ParamTable) {
    for entry in &mut table.params {
        let Factors { lr, weight_decay } = factors[entry.plan];
        entry.lr_mult *= lr;
        entry.wd_mult *= weight_decay;
    }
}

fn name(param: &Param) -> &str {
    param.name.split('{').next().unwrap_or_default()
}

/// The parameter whose name is most like a pattern without its stars.
fn nearest<'a>(plan: &'a ModelPlan, pattern: &str) -> &'a str {
    let pattern = pattern.replace('*', "");
    let score = |param: &&Param| strsim::normalized_damerau_levenshtein(&pattern, name(param));
    plan.params.iter().max_by(|a, b| score(a).total_cmp(&score(b))).map(name).unwrap_or("none: it has no parameters")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use gantry_plugin_api::plan::{Block, Init, Layout, Stage};
    use rstest::rstest;

    fn plan() -> ModelPlan {
        let param =
            |name: &str, dims: &[usize]| Param::new(name, 0, dims.iter().map(|&n| Layout::Fixed(n)), Init::Zeros);
        let mut plan = ModelPlan { blocks: vec![Block::new("b", "test")], ..ModelPlan::default() };
        plan.params = vec![
            param("embedding.weight", &[4, 2]).tied("words"),
            param("layers.0.norm.weight", &[2]),
            param("layers.0.mlp.fc1.weight{experts}", &[3, 2]),
            param("layers.0.mlp.fc1.bias{experts}", &[3, 2]),
            param("output.weight", &[4, 2]).tied("words"),
        ];
        plan.params[2].lr_mult = 0.5;
        plan
    }

    fn entry(pattern: &str, lr: Option<f64>, weight_decay: Option<f64>) -> Multiplier {
        Multiplier { pattern: pattern.into(), lr, weight_decay }
    }

    /// (lr, weight decay) multipliers of the table's entries: embedding, norm, fc1 weight, fc1 bias.
    fn table(multipliers: &[Multiplier]) -> Vec<(f64, f64)> {
        let plan = plan();
        let mut table =
            ParamTable::new(&plan, &Stage { begin: 0, end: 1 }, Grid::SINGLE, Grid::SINGLE.place(0)).unwrap();
        apply(&resolve(&plan, multipliers).unwrap(), &mut table);
        table.params.iter().map(|entry| (entry.lr_mult, entry.wd_mult)).collect()
    }

    #[test]
    fn norms_and_biases_have_no_decay() {
        assert_eq!(table(&[]), [(1.0, 1.0), (1.0, 0.0), (0.5, 1.0), (1.0, 0.0)]);
    }

    #[test]
    fn factors_of_all_entries_and_of_the_model_multiply() {
        let list = [entry("*.weight", Some(3.0), None), entry("layers.*.fc1.*", Some(2.0), Some(0.25))];
        assert_eq!(table(&list), [(3.0, 1.0), (3.0, 0.0), (3.0, 0.25), (2.0, 0.0)]);
    }

    #[test]
    fn a_name_of_a_tied_tensor_is_enough() {
        assert_eq!(table(&[entry("output.weight", Some(0.1), Some(0.0))])[0], (0.1, 0.0));
        // Matched under both names, it is still one tensor.
        assert_eq!(table(&[entry("{embedding,output}.weight", Some(0.1), None)])[0], (0.1, 1.0));
    }

    #[test]
    fn decay_that_is_not_there_cannot_be_multiplied() {
        let e = resolve(&plan(), &[entry("*norm*", None, Some(2.0))]).unwrap_err();
        assert!(e.sentence.contains("what `*norm*` matches has no weight decay to multiply"), "{e}");
        resolve(&plan(), &[entry("*norm*", None, Some(0.0)), entry("layers.*", None, Some(2.0))]).unwrap();
    }

    #[rstest]
    #[case("layers.0.mlp.fc1.wieght", "layers.0.mlp.fc1.weight")]
    #[case("*.embeding.weight", "embedding.weight")]
    fn a_pattern_without_a_parameter_names_the_nearest(#[case] pattern: &str, #[case] nearest: &str) {
        let e = resolve(&plan(), &[entry("*", Some(1.0), None), entry(pattern, Some(2.0), None)]).unwrap_err();
        let sentence =
            format!("`optimizer.multipliers.1.match`: no parameter matches `{pattern}`; the nearest is `{nearest}`");
        assert_eq!((e.sentence, e.cause as u8), (sentence, 2));
    }
}

//! What `gantry train` says when all steps are done: a text by the model, and where to look next.

use super::generate;
use crate::data::Tokenizer;
use crate::failure::Result;
use crate::infer::{Request, Sampling};
use crate::recipe::Recipe;
use crate::train::Engine;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Has the model write the recipe's `train.sample`, if it asks for one. `stop` ends the text.
pub(super) fn sample(
    recipe: &Recipe,
    tokenizer: Option<&Tokenizer>,
    engine: &mut dyn Engine,
    stop: &AtomicBool,
) -> Result<()> {
    let (Some(sample), Some(tokenizer)) = (&recipe.train.sample, tokenizer) else { return Ok(()) };
    let (temperature, seed) = (sample.temperature, recipe.train.seed);
    let request = Request {
        prompt: tokenizer.encode(&sample.prompt)?,
        tokens: sample.tokens,
        sampling: Sampling { temperature, top_k: None, top_p: 1.0, seed },
        stop: Vec::new(),
    };
    let mut text = sample.prompt.clone();
    let generated = generate::write(tokenizer, engine, &request, |more| {
        text.push_str(more);
        Ok(!stop.load(Ordering::Relaxed))
    })?;
    let rate = generated.tokens as f64 / generated.seconds.max(f64::MIN_POSITIVE);
    tracing::info!(
        "{} tokens by the model at temperature {temperature} ({rate:.0} tokens/s):\n{}",
        generated.tokens,
        text.trim_end()
    );
    Ok(())
}

/// Says where the results are and what to do with them.
pub(super) fn next(recipe: &Recipe) {
    let program = std::env::args_os().next().map_or_else(|| "gantry".into(), |name| quoted(Path::new(&name)));
    tracing::info!("{}", next_lines(recipe, &program));
}

fn next_lines(recipe: &Recipe, program: &str) -> String {
    let folder = recipe.run_dir();
    let run = quoted(&folder);
    let mut lines = vec![format!("results are in {run}; what to do with them:")];
    let mut add = |what: &str, how: String| lines.push(format!("  {what:12}  {how}"));
    add("numbers", quoted(&folder.join("metrics.jsonl")));
    if recipe.log.tensorboard {
        add("curves", format!("tensorboard --logdir {}", quoted(&folder.join("tensorboard"))));
    }
    if recipe.data.synthetic.is_none() {
        add("write", format!("{program} generate --checkpoint {run} --prompt 'The '"));
    }
    if recipe.data.valid_fraction > 0.0 || !recipe.data.valid_paths.is_empty() {
        let resolved = quoted(&folder.join("recipe.resolved.yaml"));
        add("evaluate", format!("{program} eval {resolved} --checkpoint {run}"));
    }
    lines.join("\n")
}

/// A path as a shell reads it back.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "-_./+,:@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::Overrides;
    use rstest::rstest;

    #[rstest]
    #[case("runs/quickstart", "runs/quickstart")]
    #[case("my runs/a", "'my runs/a'")]
    #[case("it's", r"'it'\''s'")]
    #[case("", "''")]
    fn paths_are_quoted_where_a_shell_needs_it(#[case] path: &str, #[case] shown: &str) {
        assert_eq!(quoted(Path::new(path)), shown);
    }

    #[rstest]
    #[case("{paths: [x], valid_fraction: 0.1}", true, &["numbers", "curves", "write", "evaluate"])]
    #[case("{paths: [x]}", false, &["numbers", "write"])]
    #[case("{synthetic: {vocab: 9, document_length: 5, tokens: 50}}", true, &["numbers", "curves"])]
    fn only_what_there_is_is_named(#[case] data: &str, #[case] tensorboard: bool, #[case] named: &[&str]) {
        let text = format!(
            "name: t\nmodules: {{lm: {{provider: p}}}}\ndata: {data}\noptimizer: {{lr: 1}}\n\
             train: {{steps: 1, seq_length: 4, global_batch_size: 1}}\nlog: {{tensorboard: {tensorboard}}}\n"
        );
        let recipe = Recipe::parse(&text, &Overrides::default()).unwrap();
        let lines = next_lines(&recipe, "gantry");
        let words: Vec<&str> = lines.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(words, named);
        assert!(lines.contains("runs/t/metrics.jsonl"));
    }
}

//! Checks that types cannot make: ranges, divisibility, choices that exclude each other.
//!
//! Sizes that only the plan or the mesh knows (heads by tp, samples by dp) are checked where they are known.

use super::layers::Layers;
use super::{Device, Format, Packing, Precision, Recipe, ScheduleKind, Task, TokenizerSpec, WeightDecayKind};
use crate::failure::{Failure, Result};

pub(super) fn check(recipe: &Recipe, layers: &Layers) -> Result<()> {
    let check = Check { layers };
    check.name(&recipe.name)?;
    check.modules(recipe)?;
    check.data(recipe)?;
    check.train(recipe)?;
    check.optimizer(recipe)?;
    check.schedule(recipe)?;
    check.checkpoint(recipe)
}

/// Ids and positions are 32-bit.
const MAX_TOKENS: usize = i32::MAX as usize;
/// Samples of a step: more than any run uses, and little enough to be listed.
const MAX_BATCH: usize = 1 << 24;
/// Losses that are kept, and summed in every step.
const MAX_SPIKE_WINDOW: usize = 1 << 16;
/// Made-up tokens are kept in memory, 4 bytes each.
const MAX_SYNTHETIC_TOKENS: usize = 1 << 31;

/// Longer histories are hardly ever seen twice.
const MAX_NGRAM_ORDER: usize = 16;
/// Batches of steps that are kept.
const MAX_PREFETCH: usize = 1024;

/// Whether every `[` of a glob has its `]`; the library takes one without as a plain character.
fn classes_end(glob: &str) -> bool {
    let mut rest = glob.chars();
    while let Some(c) = rest.next() {
        match c {
            '\\' => drop(rest.next()),
            '[' => {
                // A `]` that stands first is one of the class.
                let mut first = rest.next();
                if matches!(first, Some('!' | '^')) {
                    first = rest.next();
                }
                if first.is_none() || !rest.any(|c| c == ']') {
                    return false;
                }
            }
            _ => {}
        }
    }
    true
}

pub(super) struct Check<'a> {
    layers: &'a Layers,
}

impl Check<'_> {
    /// A refusal that begins with the place that wrote `key`.
    fn refuse(&self, key: &str, sentence: String) -> Failure {
        Failure::recipe(format!("{}: {sentence}", self.layers.place(key)))
    }

    pub(super) fn ensure(&self, holds: bool, key: &str, sentence: impl FnOnce() -> String) -> Result<()> {
        if holds { Ok(()) } else { Err(self.refuse(key, sentence())) }
    }

    pub(super) fn at_least_one(&self, key: &str, value: u64) -> Result<()> {
        self.ensure(value >= 1, key, || format!("`{key}` is 0, expected at least 1"))
    }

    fn at_most(&self, key: &str, value: usize, most: usize) -> Result<()> {
        self.ensure(value <= most, key, || format!("`{key}` is {value}, expected at most {most}"))
    }

    pub(super) fn range(&self, key: &str, value: f64, low: f64, high: f64) -> Result<()> {
        let shown = |bound: f64| match bound.abs() {
            // Bounds at the ends of what a number can be would be hundreds of digits.
            size if size != 0.0 && !(1e-9..1e15).contains(&size) => format!("{bound:e}"),
            _ => bound.to_string(),
        };
        self.ensure((low..=high).contains(&value), key, || match (low, high) {
            (f64::MIN_POSITIVE, f64::MAX) => format!("`{key}` is {value}, expected more than 0"),
            (_, f64::MAX) => format!("`{key}` is {value}, expected at least {}", shown(low)),
            _ => format!("`{key}` is {value}, expected {} to {}", shown(low), shown(high)),
        })
    }

    fn name(&self, name: &str) -> Result<()> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        self.ensure(!name.is_empty() && !name.starts_with('.') && name.chars().all(plain), "name", || {
            format!("`name` is `{name}`, expected letters, digits, `-`, `_` and `.` only")
        })
    }

    fn modules(&self, recipe: &Recipe) -> Result<()> {
        self.ensure(!recipe.modules.is_empty(), "modules", || "`modules` is empty, expected at least one".into())?;
        for (name, module) in &recipe.modules {
            let key = |part: &str| format!("modules.{name}.{part}");
            self.ensure(!module.provider.is_empty(), &key("provider"), || format!("`{}` is empty", key("provider")))?;
            let grid = &module.grid;
            let sizes = [("tp", grid.tp), ("cp", grid.cp), ("pp", grid.pp), ("ep", grid.ep)];
            let optional = [("dp", grid.dp), ("etp", grid.etp)];
            let given = optional.into_iter().filter_map(|(part, size)| Some((part, size?)));
            for (part, size) in sizes.into_iter().chain(given) {
                self.at_least_one(&key(&format!("grid.{part}")), size as u64)?;
            }
            if let Some(teacher) = &module.teacher {
                for (part, value) in [("temperature", teacher.temperature), ("kd_loss_scale", teacher.kd_loss_scale)] {
                    self.range(&key(&format!("teacher.{part}")), value, f64::MIN_POSITIVE, f64::MAX)?;
                }
            }
        }
        for (index, plugin) in recipe.plugins.iter().enumerate() {
            if let Some(hash) = &plugin.sha256 {
                let hexadecimal = hash.len() == 64 && hash.chars().all(|c| c.is_ascii_hexdigit());
                self.ensure(hexadecimal, "plugins", || {
                    format!("`plugins.{index}.sha256` is `{hash}`, expected 64 hexadecimal digits")
                })?;
            }
        }
        Ok(())
    }

    fn data(&self, recipe: &Recipe) -> Result<()> {
        for glob in &recipe.data.exclude {
            let bad = ignore::gitignore::GitignoreBuilder::new("").add_line(None, glob).err();
            self.ensure(bad.is_none() && classes_end(glob), "data.exclude", || {
                format!("`data.exclude` has `{glob}`, which is no glob")
            })?;
        }
        for extension in recipe.data.extensions.iter().flatten() {
            self.ensure(!extension.starts_with('.'), "data.extensions", || {
                let plain = extension.trim_start_matches('.');
                format!("`data.extensions` has `{extension}`; extensions are written without the dot: `{plain}`")
            })?;
        }
        let held = recipe.data.valid_fraction;
        self.ensure((0.0..1.0).contains(&held), "data.valid_fraction", || {
            format!("`data.valid_fraction` is {held}, expected 0 to less than 1")
        })?;
        let named = !recipe.data.valid_paths.is_empty();
        self.ensure(held == 0.0 || !named, "data.valid_paths", || {
            "`data.valid_fraction` and `data.valid_paths` exclude each other; leave one of them out".into()
        })?;
        let order = recipe.data.ngram_order;
        self.at_most("data.ngram_order", order, MAX_NGRAM_ORDER)?;
        self.ensure(order == 0 || named || held > 0.0, "data.ngram_order", || {
            "`data.ngram_order` has no effect without `data.valid_fraction` or `data.valid_paths`".into()
        })?;
        self.ensure(order == 0 || recipe.data.format != Format::Chat, "data.ngram_order", || {
            "`data.ngram_order` has no effect with `data.format: chat`, where an n-gram model would be asked for other tokens"
                .into()
        })?;
        self.ensure(order == 0 || recipe.data.packing == Packing::Concat, "data.ngram_order", || {
            "`data.ngram_order` has no effect with `data.packing: best_fit`, where an n-gram model would be asked for other tokens"
                .into()
        })?;
        for name in recipe.data.special_tokens.keys() {
            let plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
            self.ensure(plain, "data.special_tokens", || {
                format!("`data.special_tokens` has the name `{name}`, expected letters, digits, `_` and `-` only")
            })?;
        }
        let made_up = recipe.data.synthetic.is_some();
        self.ensure(!made_up || recipe.data.format == Format::Text, "data.format", || {
            "`data.format` has no effect with `data.synthetic`".into()
        })?;
        self.ensure(!made_up || recipe.data.tokenizer == TokenizerSpec::Bytes, "data.tokenizer", || {
            "`data.tokenizer` has no effect with `data.synthetic`".into()
        })?;
        self.at_most("data.prefetch", recipe.data.prefetch, MAX_PREFETCH)?;
        self.ensure(!(made_up && named), "data.valid_paths", || {
            "`data.synthetic` and `data.valid_paths` exclude each other; leave one of them out".into()
        })?;
        self.ensure(!(made_up && recipe.data.tracked_only), "data.tracked_only", || {
            "`data.tracked_only` has no effect with `data.synthetic`".into()
        })?;
        if recipe.data.megatron.given() {
            for (key, given) in [("data.paths", !recipe.data.paths.is_empty()), ("data.synthetic", made_up)] {
                self.ensure(!given, "data.megatron", || {
                    format!("`data.megatron` and `{key}` exclude each other; leave one of them out")
                })?;
            }
            return self.megatron(recipe);
        }
        match (&recipe.data.synthetic, recipe.data.paths.is_empty()) {
            (None, true) => {
                let sentence =
                    "none of `data.paths`, `data.synthetic` and `data.megatron.data_path` is given".to_string();
                Err(self.refuse("data", sentence).remedy("name text files or folders in data.paths"))
            }
            (Some(_), false) => Err(self.refuse(
                "data.synthetic",
                "`data.synthetic` and `data.paths` exclude each other; leave one of them out".into(),
            )),
            (None, false) => Ok(()),
            (Some(synthetic), true) => {
                let vocab = synthetic.vocab;
                // Copying needs a separator, a chain a word, pairs a key and a value, all the end of a document.
                let least = match synthetic.task {
                    Task::Uniform | Task::Markov => 2,
                    Task::Copy | Task::Induction => 3,
                };
                self.ensure((least..=i32::MAX as usize).contains(&vocab), "data.synthetic.vocab", || {
                    format!("`data.synthetic.vocab` is {vocab}, expected {least} to {}", i32::MAX)
                })?;
                self.at_least_one("data.synthetic.tokens", synthetic.tokens as u64)?;
                self.at_most("data.synthetic.tokens", synthetic.tokens, MAX_SYNTHETIC_TOKENS)?;
                let length = synthetic.document_length;
                self.ensure((1..=1 << 30).contains(&length), "data.synthetic.document_length", || {
                    format!("`data.synthetic.document_length` is {length}, expected 1 to {}", 1 << 30)
                })
            }
        }
    }

    fn checkpoint(&self, recipe: &Recipe) -> Result<()> {
        let checkpoint = &recipe.checkpoint;
        self.at_least_one("checkpoint.keep_last", checkpoint.keep_last as u64)?;
        let (every, eval) = (checkpoint.every, recipe.train.eval_every);
        let scored = every > 0 && eval > 0 && every.is_multiple_of(eval);
        self.ensure(!checkpoint.keep_best || scored, "checkpoint.keep_best", || {
            format!(
                "`checkpoint.keep_best` needs a held-out loss at every checkpoint: `checkpoint.every` is {every}, \
                 expected a multiple of `train.eval_every` ({eval})"
            )
        })?;
        let Some(kept) = checkpoint.keep_every else { return Ok(()) };
        self.at_least_one("checkpoint.keep_every", kept)?;
        self.ensure(every > 0 && kept.is_multiple_of(every), "checkpoint.keep_every", || {
            format!("`checkpoint.keep_every` is {kept}, expected a multiple of `checkpoint.every` ({every})")
        })
    }

    fn train(&self, recipe: &Recipe) -> Result<()> {
        let train = &recipe.train;
        self.at_least_one("train.steps", train.steps)?;
        self.at_least_one("train.seq_length", train.seq_length as u64)?;
        self.at_least_one("train.micro_batch_size", train.micro_batch_size as u64)?;
        self.at_least_one("train.global_batch_size", train.global_batch_size as u64)?;
        self.at_least_one("train.log_every", train.log_every)?;
        self.at_least_one("train.max_skipped_steps", train.max_skipped_steps)?;
        self.at_least_one("train.spike_window", train.spike_window as u64)?;
        self.at_most("train.spike_window", train.spike_window, MAX_SPIKE_WINDOW)?;
        let factor = train.spike_factor.unwrap_or(f64::MAX);
        self.ensure(factor > 1.0, "train.spike_factor", || {
            format!("`train.spike_factor` is {factor}, expected more than 1")
        })?;
        self.at_least_one("train.eval_samples", train.eval_samples.map_or(1, |samples| samples as u64))?;
        let held_out = recipe.data.valid_fraction > 0.0 || !recipe.data.valid_paths.is_empty();
        let megatron = &recipe.data.megatron;
        let held_out = held_out || megatron.held_out().is_some();
        self.ensure(train.eval_every == 0 || held_out, "train.eval_every", || match megatron.given() {
            true => "`train.eval_every` has no effect without a validation part in `data.megatron.split` or \
                     `data.megatron.valid_data_path`"
                .into(),
            false => "`train.eval_every` has no effect without `data.valid_fraction` or `data.valid_paths`".into(),
        })?;
        if let Some(sample) = &train.sample {
            self.at_least_one("train.sample.tokens", sample.tokens as u64)?;
            self.range("train.sample.temperature", sample.temperature, 0.0, f64::MAX)?;
            self.ensure(recipe.data.synthetic.is_none(), "train.sample", || {
                "`train.sample` is text, and `data.synthetic` has none".into()
            })?;
        }
        self.at_most("train.seq_length", train.seq_length, MAX_TOKENS)?;
        self.at_most("train.micro_batch_size", train.micro_batch_size, MAX_BATCH)?;
        self.at_most("train.global_batch_size", train.global_batch_size, MAX_BATCH)?;
        let (global, micro) = (train.global_batch_size, train.micro_batch_size);
        self.ensure(global.is_multiple_of(micro), "train.global_batch_size", || {
            format!("`train.global_batch_size` ({global}) is no multiple of `train.micro_batch_size` ({micro})")
        })?;
        for (name, module) in &recipe.modules {
            let dp = module.grid.dp.unwrap_or(1);
            self.ensure(global.is_multiple_of(micro.saturating_mul(dp)), "train.global_batch_size", || {
                format!(
                    "`train.global_batch_size` ({global}) is no multiple of `train.micro_batch_size` ({micro}) times \
                     `modules.{name}.grid.dp` ({dp})"
                )
            })?;
        }
        let tokens = train.seq_length.checked_mul(micro).filter(|&tokens| tokens < MAX_TOKENS);
        self.ensure(tokens.is_some(), "train.seq_length", || {
            format!("a micro-batch of {micro} x {} tokens does not fit 32-bit positions", train.seq_length)
        })?;
        match (recipe.device, train.precision) {
            (Device::Cpu, Precision::Bf16) => {
                let sentence = "`train.precision: bf16` needs a GPU and `device` is cpu".to_string();
                Err(self.refuse("train.precision", sentence).remedy("use fp32 (or fp64 for parity checks)"))
            }
            (Device::Cpu, Precision::Fp32 | Precision::Fp64) => Ok(()),
        }
    }

    fn optimizer(&self, recipe: &Recipe) -> Result<()> {
        let optimizer = &recipe.optimizer;
        self.range("optimizer.lr", optimizer.lr, 0.0, f64::MAX)?;
        self.range("optimizer.min_lr", optimizer.min_lr, 0.0, optimizer.lr)?;
        for beta in optimizer.betas {
            self.ensure((0.0..1.0).contains(&beta), "optimizer.betas", || {
                format!("`optimizer.betas` is {beta}, expected 0 to less than 1")
            })?;
        }
        self.range("optimizer.eps", optimizer.eps, f64::MIN_POSITIVE, f64::MAX)?;
        self.range("optimizer.weight_decay", optimizer.weight_decay, 0.0, f64::MAX)?;
        self.range("optimizer.clip_grad", optimizer.clip_grad, 0.0, f64::MAX)?;
        for (index, entry) in optimizer.multipliers.iter().enumerate() {
            let key = format!("optimizer.multipliers.{index}");
            let glob = globset::Glob::new(&entry.pattern).is_ok() && !entry.pattern.is_empty();
            self.ensure(glob, &key, || format!("`{key}.match` is `{}`, which is no glob", entry.pattern))?;
            self.ensure(entry.lr.is_some() || entry.weight_decay.is_some(), &key, || {
                format!("`{key}` (match: {}) states neither `lr` nor `weight_decay`", entry.pattern)
            })?;
            let factors = [("lr", entry.lr), ("weight_decay", entry.weight_decay)];
            for (name, factor) in factors.into_iter().filter_map(|(name, factor)| Some((name, factor?))) {
                self.range(&format!("{key}.{name}"), factor, 0.0, f64::MAX)?;
            }
        }
        Ok(())
    }

    fn schedule(&self, recipe: &Recipe) -> Result<()> {
        let schedule = &recipe.schedule;
        self.range("schedule.init_lr", schedule.init_lr, 0.0, recipe.optimizer.lr)?;
        // Without decay_steps the curve spans train.steps, however short a trial run makes that.
        let decay = schedule.decay_steps.unwrap_or(u64::MAX);
        self.at_least_one("schedule.decay_steps", decay)?;
        let warmup = schedule.warmup_steps;
        self.ensure(warmup < decay, "schedule.warmup_steps", || {
            format!("`schedule.warmup_steps` ({warmup}) is not below `schedule.decay_steps` ({decay})")
        })?;
        match (schedule.kind, schedule.wsd_decay_steps) {
            (ScheduleKind::Wsd, None) => {
                let sentence = "`schedule.wsd_decay_steps` is required with `schedule.kind: wsd`".to_string();
                return Err(self.refuse("schedule.kind", sentence));
            }
            (ScheduleKind::Wsd, Some(steps)) => {
                // As above, a trial run may be shorter than the decay.
                let most = match schedule.decay_steps {
                    Some(decay) => format!("1 to `schedule.decay_steps` ({decay})"),
                    None => "at least 1".into(),
                };
                self.ensure((1..=decay).contains(&steps), "schedule.wsd_decay_steps", || {
                    format!("`schedule.wsd_decay_steps` is {steps}, expected {most}")
                })?;
            }
            (_, Some(_)) => {
                let sentence = "`schedule.wsd_decay_steps` has no effect without `schedule.kind: wsd`".to_string();
                return Err(self.refuse("schedule.wsd_decay_steps", sentence));
            }
            (_, None) => {}
        }
        let bounds = [
            ("schedule.weight_decay_start", schedule.weight_decay_start),
            ("schedule.weight_decay_end", schedule.weight_decay_end),
        ];
        for (key, bound) in bounds.into_iter().filter_map(|(key, bound)| Some((key, bound?))) {
            self.range(key, bound, 0.0, f64::MAX)?;
            self.ensure(schedule.weight_decay_kind != WeightDecayKind::Constant, key, || {
                format!("`{key}` has no effect with `schedule.weight_decay_kind: constant`")
            })?;
        }
        let decayed = recipe.optimizer.weight_decay;
        let start = schedule.weight_decay_start.unwrap_or(decayed);
        let end = schedule.weight_decay_end.unwrap_or(decayed);
        self.ensure(start <= end, "schedule.weight_decay_start", || {
            format!("the weight decay falls from {start} to {end}, expected it to rise")
        })?;
        self.at_least_one("schedule.weight_decay_steps", schedule.weight_decay_steps.unwrap_or(recipe.train.steps))
    }
}

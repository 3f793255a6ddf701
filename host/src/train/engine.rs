//! From a recipe to an engine: the team of ranks that the loop drives.

use super::guard::Diagnosis;
use super::rank::Rank;
use super::record::{Distillation, KD_LOSS};
use super::sums::LabelSums;
use super::team::{ELASTIFIER, ElasticSpec, Kind, TeacherSpec, Team, TeamSpec};
use super::{Engine, Hyper, LossSums, StepReport};
use crate::checkpoint::{CheckpointReader, ElementType, PluginEntry, Staging};
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::mesh::Grid;
use crate::optim::multipliers;
use crate::optim::update::{AdamConfig, StepHyper};
use crate::plugin::PluginSet;
use crate::program::ops::lm_loss::Divergence;
use crate::program::profile::Profile;
use crate::recipe::{DivergenceKind, OptimizerKind, Precision, Recipe};
use gantry_kernels::Element;
use gantry_plugin_api::plan::ProviderKind;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Everything a recipe says about its module's team, for `ranks` ranks (default: as many as the grid states).
pub fn spec(recipe: &Recipe, plugins: PluginSet, ranks: Option<usize>) -> Result<TeamSpec> {
    let hooks = |provider: &str| plugins.kind(provider) == Some(ProviderKind::Hooks);
    let modules: Vec<_> = recipe.modules.iter().filter(|(_, module)| !hooks(&module.provider)).collect();
    let [(name, module)] = modules.as_slice() else {
        return Err(Error::recipe(format!(
            "{}: `modules` has {} entries besides hooks; this version trains exactly one",
            recipe.place("modules"),
            modules.len()
        )));
    };
    let hooked = recipe.modules.iter().filter(|(_, module)| hooks(&module.provider));
    for (hook, of_hook) in hooked {
        let keys =
            [("load", of_hook.load.is_some()), ("freeze", of_hook.freeze), ("teacher", of_hook.teacher.is_some())];
        if let Some((key, _)) = keys.into_iter().find(|(_, given)| *given) {
            return Err(Error::recipe(format!(
                "modules.{hook}.{key} has no effect: {} is a provider of hooks and has no parameters",
                of_hook.provider
            )));
        }
    }
    let grid = &module.grid;
    let unsupported = [("cp", grid.cp, 1), ("ep", grid.ep, 1), ("offset", grid.offset, 0)];
    if let Some((key, value, only)) = unsupported.into_iter().find(|(_, value, only)| value != only) {
        return Err(Error::recipe(format!("modules.{name}.grid.{key} is {value}; this version supports {only} only")));
    }
    if let Some(etp) = grid.etp.filter(|&etp| etp != grid.tp) {
        return Err(Error::recipe(format!(
            "modules.{name}.grid.etp is {etp}; this version supports etp = tp = {} only",
            grid.tp
        )));
    }
    let of_one = Grid { tp: grid.tp, dp: 1, pp: grid.pp, sequence_parallel: grid.sequence_parallel };
    let place = |e: Error| e.at(format!("modules.{name}"));
    of_one.check().map_err(place)?;
    let dp = match (grid.dp, ranks) {
        (Some(dp), _) => dp,
        (None, None) => 1,
        (None, Some(ranks)) if ranks < of_one.ranks() => {
            return Err(Error::recipe(format!(
                "--ranks {ranks} is fewer than modules.{name}.grid needs: tp {} x pp {} = {} ranks",
                grid.tp,
                grid.pp,
                of_one.ranks()
            )));
        }
        (None, Some(ranks)) if !ranks.is_multiple_of(of_one.ranks()) => {
            return Err(Error::recipe(format!(
                "--ranks {ranks} is no multiple of what modules.{name}.grid needs: tp {} x pp {} = {} ranks",
                grid.tp,
                grid.pp,
                of_one.ranks()
            )));
        }
        (None, Some(ranks)) => ranks / of_one.ranks(),
    };
    let built = Grid { dp, ..of_one };
    built.check().map_err(place)?;
    if let Some(ranks) = ranks.filter(|&ranks| ranks != built.ranks()) {
        return Err(Error::recipe(format!(
            "--ranks {ranks} does not fit modules.{name}.grid: tp {} x dp {dp} x pp {} = {} ranks",
            grid.tp,
            grid.pp,
            built.ranks()
        )));
    }
    let train = &recipe.train;
    let tokens = train.micro_batch_size * train.seq_length;
    if built.sequence_parallel && !tokens.is_multiple_of(built.tp) {
        return Err(Error::recipe(format!(
            "sequence parallelism spreads the {tokens} tokens of a micro-batch over grid.tp = {} ranks, which does not \
             divide them",
            built.tp
        )));
    }
    let per_step = train.micro_batch_size * dp;
    if !train.global_batch_size.is_multiple_of(per_step) {
        return Err(Error::recipe(format!(
            "train.global_batch_size = {} is no multiple of train.micro_batch_size x dp = {} x {dp}",
            train.global_batch_size, train.micro_batch_size
        )));
    }
    let elastic = match &module.elastify {
        None => ElasticSpec::Off,
        Some(e) => ElasticSpec::Plugin { provider: e.provider.clone(), config: Value::Object(e.config.clone()) },
    };
    let teacher = module.teacher.as_ref().map(|teacher| TeacherSpec {
        provider: teacher.provider.clone().unwrap_or_else(|| module.provider.clone()),
        config: Value::Object(teacher.config.clone().unwrap_or_else(|| module.config.clone())),
        distillation: Distillation {
            divergence: Divergence {
                temperature: teacher.temperature,
                reverse: teacher.divergence == DivergenceKind::Reverse,
            },
            scale: teacher.kd_loss_scale,
            skip_lm_loss: teacher.skip_lm_loss,
        },
    });
    Ok(TeamSpec {
        plugins,
        provider: module.provider.clone(),
        config: Value::Object(module.config.clone()),
        grid: built,
        seed: train.seed,
        elastic,
        teacher,
        trains: true,
        frozen: module.freeze,
        check_purity: cfg!(debug_assertions),
        state_grads: false,
        timeout: Duration::from_secs(600),
        tamper: None,
    })
}

/// States how many replicas a run has where its recipe leaves it to the number of ranks, so that the resolved recipe alone
/// says it.
pub fn state_grid(recipe: &mut Recipe, plugins: &PluginSet, ranks: Option<usize>) -> Result<()> {
    let dp = spec(recipe, plugins.clone(), ranks)?.grid.dp;
    let hooks = |provider: &str| plugins.kind(provider) == Some(ProviderKind::Hooks);
    let open = recipe.modules.iter().filter(|(_, module)| !hooks(&module.provider) && module.grid.dp.is_none());
    let names: Vec<String> = open.map(|(name, _)| name.clone()).collect();
    names.iter().try_for_each(|name| recipe.state_dp(name, dp))
}

/// The settings of Adam in a recipe.
pub fn adam(recipe: &Recipe) -> AdamConfig {
    let optimizer = &recipe.optimizer;
    AdamConfig {
        beta1: optimizer.betas[0],
        beta2: optimizer.betas[1],
        eps: optimizer.eps,
        decoupled: optimizer.kind == OptimizerKind::Adamw,
        clip_grad: optimizer.clip_grad,
    }
}

/// Starts the ranks of a recipe. What is wrong with the recipe is named with its place.
pub fn create(recipe: &Recipe, plugins: PluginSet, ranks: Option<usize>) -> Result<Box<dyn Engine>> {
    let spec = spec(recipe, plugins, ranks);
    spec.and_then(|spec| start(recipe, &spec)).map_err(|failure| recipe.locate(failure))
}

/// As [`create`], for forward passes only: without gradients, optimizer state and teacher.
pub fn create_forward(recipe: &Recipe, plugins: PluginSet) -> Result<Box<dyn Engine>> {
    let spec = spec(recipe, plugins, None).map(|spec| TeamSpec { trains: false, teacher: None, ..spec });
    spec.and_then(|spec| start(recipe, &spec)).map_err(|failure| recipe.locate(failure))
}

fn start(recipe: &Recipe, spec: &TeamSpec) -> Result<Box<dyn Engine>> {
    let entries = plugin_entries(&spec.plugins);
    match recipe.train.precision {
        Precision::Fp32 => Ok(Box::new(TeamEngine::<f32>::new(recipe, spec, entries)?)),
        Precision::Fp64 => Ok(Box::new(TeamEngine::<f64>::new(recipe, spec, entries)?)),
        Precision::Bf16 => Err(Error::recipe("train.precision bf16 needs a GPU; on the CPU use fp32")),
    }
}

fn plugin_entries(plugins: &PluginSet) -> Vec<PluginEntry> {
    plugins
        .plugins()
        .iter()
        .map(|p| PluginEntry {
            name: p.name.clone(),
            version: p.version.clone(),
            path: p.path.display().to_string(),
            sha256: file_hash(&p.path),
        })
        .collect()
}

fn file_hash(path: &std::path::Path) -> String {
    use sha2::Digest;
    std::fs::read(path).map(|bytes| crate::checkpoint::hexadecimal(&sha2::Sha256::digest(bytes))).unwrap_or_default()
}

/// The loop's view of a team.
pub struct TeamEngine<T: Element> {
    pub team: Team<T>,
    /// Name of the module in the recipe.
    module: String,
    /// Micro-batches of the step, with their indices.
    batches: Arc<Vec<(usize, Arc<Batch>)>>,
    adam: AdamConfig,
    distillation: Option<Distillation>,
    micro_batches: usize,
    seq_length: usize,
    plugins: Vec<PluginEntry>,
}

impl<T: Element> TeamEngine<T> {
    fn new(recipe: &Recipe, spec: &TeamSpec, plugins: Vec<PluginEntry>) -> Result<TeamEngine<T>> {
        let micro_batches = recipe.train.global_batch_size / recipe.train.micro_batch_size;
        let team = Team::start(spec)?;
        let factors = multipliers::resolve(&team.plan, &recipe.optimizer.multipliers)?;
        let run = (recipe.train.steps, micro_batches as u64);
        team.all(move |rank| {
            multipliers::apply(&factors, &mut rank.model.table);
            rank.run = run;
            Ok(())
        })?;
        let seq_length = recipe.train.seq_length;
        let module = recipe.modules.iter().find(|(_, module)| module.provider == spec.provider);
        let module = module.map(|(name, _)| name.clone()).unwrap_or_default();
        let batches = Arc::default();
        let distillation = spec.teacher.as_ref().map(|teacher| teacher.distillation);
        Ok(TeamEngine { team, module, batches, adam: adam(recipe), distillation, micro_batches, seq_length, plugins })
    }
}

impl<T: Element> TeamEngine<T> {
    /// What a label's micro-batches did, for the metrics: losses per token.
    fn of_label(&self, sums: &LabelSums) -> Value {
        let per_token = |sum: f64| sum / sums.tokens.max(1.0);
        let mut report = json!({
            "micro_batches": sums.micro_batches,
            "lm_loss": per_token(sums.loss),
            "budget_loss": sums.choice_loss / sums.micro_batches,
            "params": sums.params / sums.micro_batches,
        });
        if let Some(kd_loss) = sums.kd_loss {
            report["kd_loss"] = json!(per_token(kd_loss));
        }
        report
    }
}

/// A rank's micro-batches of a step.
fn share<T: Element>(batches: &[(usize, Arc<Batch>)], rank: &Rank<T>) -> Vec<(usize, Arc<Batch>)> {
    batches.iter().filter(|(i, _)| i % rank.model.grid.dp == rank.model.place.dp).cloned().collect()
}

/// Kinds of tensors in a checkpoint.
const KINDS: [Kind; 7] =
    [Kind::Params, Kind::Buffers, Kind::ExpAvg, Kind::ExpAvgSq, Kind::Router, Kind::RouterExpAvg, Kind::RouterExpAvgSq];

/// Whether who loads weights may leave a tensor of the checkpoint where it is.
pub fn stays(name: &str) -> bool {
    name.starts_with("optimizer.") || name.starts_with(ELASTIFIER)
}

/// Tokens of the shortest program for logits.
const SHORTEST: usize = 64;

/// Tokens of the program that gives logits after `context` tokens: few different lengths, as each is recorded once, and
/// none much longer than it must be. Sequence parallelism spreads them over the tp ranks.
fn program_length(context: usize, window: usize, tp: usize) -> usize {
    context.next_power_of_two().max(SHORTEST).min(window.max(context)).next_multiple_of(tp)
}

impl<T: Element> Engine for TeamEngine<T> {
    fn gradients(&mut self, step: u64, batch: &(dyn Fn(usize) -> Batch + Sync), hyper: Hyper) -> Result<StepReport> {
        self.batches = Arc::new((0..self.micro_batches).map(|i| (i, Arc::new(batch(i)))).collect());
        let (adam, batches) = (self.adam, Arc::clone(&self.batches));
        let results = self.team.all(move |rank| {
            for (name, value) in [("lr", hyper.lr), ("weight_decay", hyper.weight_decay), ("iteration", step as f64)] {
                rank.step_inputs.insert(name.into(), value);
            }
            let sums = rank.gradients(step, &share(&batches, rank))?;
            Ok((sums, rank.grad_norm(&adam)?))
        })?;
        let (sums, norm) = results[0].clone();
        let mut metrics = serde_json::Map::new();
        for (name, value) in results.iter().flat_map(|(s, _)| &s.terms) {
            let sum = metrics.get(name).and_then(Value::as_f64).unwrap_or(0.0);
            metrics.insert(name.clone(), json!(sum + value));
        }
        // Like the cross entropy it is reported as it is, whatever its factor in the objective.
        if let (Some(kd), Some(teacher)) = (metrics.get_mut(KD_LOSS), &self.distillation) {
            *kd = json!(kd.as_f64().unwrap_or(0.0) / teacher.scale);
        }
        if let Some(ratio) = sums.load_max_over_mean {
            metrics.insert("expert_load_max_over_mean".into(), json!(ratio));
        }
        for (name, value) in results.iter().flat_map(|(s, _)| &s.metrics) {
            let sum = metrics.get(name).and_then(Value::as_f64).unwrap_or(0.0);
            // A metric is the mean over the step's micro-batches.
            metrics.insert(name.clone(), json!(sum + value / self.micro_batches as f64));
        }
        if !sums.labels.is_empty() {
            let labels = sums.labels.iter().map(|(label, sums)| (label.clone(), self.of_label(sums)));
            metrics.insert("budgets".into(), Value::Object(labels.collect()));
        }
        Ok(StepReport {
            loss_sum: sums.loss,
            tokens: sums.tokens as u64,
            objective: sums.objective,
            grad_norm: norm,
            metrics,
        })
    }

    fn diagnose(&mut self, step: u64) -> Result<Option<Diagnosis>> {
        let batches = Arc::clone(&self.batches);
        let found = self.team.all(move |rank| rank.diagnose(step, &share(&batches, rank)))?;
        if let Some(first) = found.into_iter().flatten().min_by_key(|found| found.order) {
            return Ok(Some(Diagnosis { place: first.place(&self.module, step), value: first.finding.value }));
        }
        // Finite on every rank, but not their sum.
        let sums = self.team.all(|rank| Ok(rank.nonfinite_gradient()))?;
        Ok(sums.into_iter().flatten().next().map(|(name, value)| Diagnosis {
            place: format!("the sum over ranks of the gradient of {}.{name}, step {step}", self.module),
            value,
        }))
    }

    fn update(&mut self, hyper: Hyper) -> Result<()> {
        let (adam, Hyper { lr, weight_decay, update: step }) = (self.adam, hyper);
        self.team
            .all(move |rank| {
                rank.apply(&adam, StepHyper { lr, weight_decay, step });
                Ok(())
            })
            .map(drop)
    }

    fn save(&mut self, to: &mut Staging) -> Result<Value> {
        for kind in KINDS {
            for (index, mut parts) in self.team.entries(kind)?.into_iter().enumerate() {
                if parts.is_empty() {
                    continue;
                }
                parts.iter_mut().for_each(|(name, _)| name.insert_str(0, kind.prefix()));
                to.add(parts, ElementType::of_bytes(T::BYTES), |bytes| self.team.copy_out(kind, index, bytes))?;
            }
        }
        Ok(json!({}))
    }

    fn load(&mut self, reader: &mut CheckpointReader) -> Result<()> {
        self.team.load(reader, &KINDS, Some(ElementType::of_bytes(T::BYTES)), |_| false)
    }

    fn load_teacher(&mut self, reader: &mut CheckpointReader) -> Result<()> {
        self.team.load(reader, &[Kind::Teacher, Kind::TeacherBuffers], None, stays)?;
        if reader.holds(|name| name.starts_with(ELASTIFIER)) {
            tracing::info!("the teacher is a plain model: the elastifier of its checkpoint is left out");
        }
        Ok(())
    }

    fn load_weights(&mut self, reader: &mut CheckpointReader) -> Result<()> {
        let elastic = reader.holds(|name| name.starts_with(ELASTIFIER));
        let routed = self.team.has_router();
        let kinds = if elastic && routed { &[Kind::Params, Kind::Buffers, Kind::Router][..] } else { &KINDS[..2] };
        self.team.load(reader, kinds, None, stays)?;
        match (elastic, routed) {
            (true, false) => tracing::info!("a plain model: the elastifier of the checkpoint is left out"),
            (false, true) => tracing::info!("the checkpoint has no elastifier: its router begins anew"),
            _ => {}
        }
        Ok(())
    }

    fn evaluate(&mut self, step: u64, batches: Vec<Batch>) -> Result<LossSums> {
        self.team.evaluate(step, batches)
    }

    fn logits(&mut self, batch: Batch) -> Result<Vec<f64>> {
        self.team.logits(batch)
    }

    fn next_logits(&mut self, context: &[i32]) -> Result<Vec<f64>> {
        self.team.next_logits(context, program_length(context.len(), self.seq_length, self.team.grid.tp))
    }

    fn window(&self) -> usize {
        self.seq_length
    }

    fn limit_vocab(&mut self, labels: usize) -> Result<()> {
        self.team.all(move |rank| rank.limit_vocab(labels)).map(drop)
    }

    fn vocab(&self) -> Option<usize> {
        self.team.vocab()
    }

    fn start_profile(&mut self) -> Result<()> {
        self.team
            .all(|rank| {
                rank.profile = Some(Profile::default());
                Ok(())
            })
            .map(drop)
    }

    fn take_profile(&mut self) -> Result<Option<(Profile, usize)>> {
        let profiles = self.team.all(|rank| Ok(rank.profile.take()))?;
        let ranks = profiles.len();
        let all = profiles.into_iter().flatten().reduce(|mut sum, profile| {
            sum.merge(&profile);
            sum
        });
        Ok(all.map(|profile| (profile, ranks)))
    }

    fn plugins(&self) -> Vec<PluginEntry> {
        self.plugins.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(1, 256, 1, 64)]
    #[case(65, 256, 1, 128)]
    #[case(200, 256, 2, 256)]
    #[case(3, 48, 1, 48)]
    #[case(40, 50, 4, 52)]
    fn programs_are_few_and_short(
        #[case] context: usize,
        #[case] window: usize,
        #[case] tp: usize,
        #[case] length: usize,
    ) {
        assert_eq!(program_length(context, window, tp), length);
    }
}

//! The elastifier: a budget for each group of samples, the router's answer to it, and the budget loss.
//!
//! In training every micro-batch is a mixture of prefixes weighted by the router's probabilities; a hard sample is a
//! mixture with all its weight on one choice and the gradient of the soft one. Each activation is masked once, where it
//! is produced. Where nothing is trained the model is full, unless widths for a budget are asked for: the router's
//! likeliest choices without noise.

use crate::budget::reference::Sequence;
use crate::budget::sampling::Sampling;
use crate::budget::{Budgets, FULL};
use crate::config::{BudgetType, Config, SamplingKind};
use crate::loss::{Routed, budget_loss};
use crate::random::{Purpose, uniform};
use crate::router::{BUDGET, Router, SCALER, TAU, straight_through};
use crate::schedule::{scaler, tau};
use crate::sizes::{Bytes, Counts};
use crate::target::Target;
use gantry_plugin_api::plan::{
    AxisSetting, Choice, ChoiceLoss, ElasticPlan, MicroBatchInfo, ModelPlan, Occasion, Values,
};
use gantry_plugin_api::sdk::{Configure, Cx, Elastifier, Error, Result};

/// Name of the loss in metrics.
const LOSS: &str = "budget_loss";

/// The elastifier `flextron`.
pub struct Flextron {
    config: Config,
    budgets: Budgets,
    bytes: Bytes,
    /// Known once a target is.
    target: Option<Routes>,
    /// The reference's sequence of budgets, for runs that repeat it.
    sequence: Option<(u64, Sequence)>,
}

/// A target, the router of its axes, and its full size.
struct Routes {
    target: Target,
    router: Router,
    full: Counts,
}

impl Configure for Flextron {
    type Config = Config;
    const SUMMARY: &'static str = "a router that learns widths for budgets (Flextron, Nemotron Elastic)";

    fn new(config: Config) -> Result<Flextron> {
        config.check().map_err(Error::config)?;
        let budgets = Budgets::new(&config.budget_list, config.budget_probs.as_deref());
        let budgets = budgets.map_err(|e| Error::config(format!("config.{e}")))?;
        let bytes = config.memory.bytes().map_err(|e| Error::config(format!("config.{e}")))?;
        Ok(Flextron { config, budgets, bytes, target: None, sequence: None })
    }
}

impl Flextron {
    fn routes(&self) -> Result<&Routes> {
        self.target.as_ref().ok_or_else(|| Error::plugin("the elastifier was asked before it saw a model"))
    }

    /// The group of samples that a micro-batch belongs to: its number within the step, and the groups of a step.
    fn group(&self, info: &MicroBatchInfo) -> Result<(u64, u64)> {
        let samples = info.samples.max(1);
        let group = self.config.samples_per_budget.unwrap_or(samples);
        let of_step = info.micro_batches.max(info.micro_batch + 1) * samples;
        if !group.is_multiple_of(samples) || (info.micro_batches > 0 && !of_step.is_multiple_of(group)) {
            return Err(Error::config(format!(
                "config.samples_per_budget is {group}; it must be a multiple of the {samples} samples of a micro-batch and \
                 divide the {of_step} of a step"
            )));
        }
        Ok((info.micro_batch * samples / group, of_step.div_ceil(group)))
    }

    fn budget(&mut self, info: &MicroBatchInfo) -> Result<f64> {
        let (group, groups) = self.group(info)?;
        match self.config.sampling {
            SamplingKind::Seeded => {
                let full = self.config.original_model_sample_prob;
                Ok(Sampling { seed: info.seed, full, budgets: self.budgets.clone() }.budget(info.step, group))
            }
            SamplingKind::Reference => {
                let fresh = || Sequence::new(self.config.original_model_sample_prob, self.budgets.clone(), groups);
                let (of, sequence) = self.sequence.get_or_insert_with(|| (groups, fresh()));
                if *of != groups {
                    (*of, *sequence) = (groups, fresh());
                }
                Ok(sequence.budget(info.step.saturating_sub(1), group))
            }
        }
    }

    /// Temperature and factor on the logits of an occasion. Widths are asked for with those of the end: they only stretch
    /// the logits and change no order.
    fn schedule(&self, occasion: &Occasion) -> (f64, f64) {
        let c = &self.config;
        match occasion {
            Occasion::MicroBatch(info) => {
                let iteration = info.step.saturating_sub(1);
                // Far into a run the temperature would be zero in f32.
                let tau = tau(c.tau_init, c.tau_decay, iteration).max(1e-6);
                (tau, scaler(c.linear_scaler_start, c.linear_scaler_end, iteration, info.steps))
            }
            _ => (1.0, c.linear_scaler_end),
        }
    }

    /// Gumbel noise of a gate's logits: the same for all micro-batches of a group of samples, on every layout.
    fn noise(&self, info: &MicroBatchInfo, gate: usize, count: usize) -> Result<Vec<f64>> {
        let (group, _) = self.group(info)?;
        let draw = |i: usize| uniform(info.seed, Purpose::Noise, ((gate << 16) | i) as u32, info.step as u32, group);
        Ok((0..count).map(|i| -(-draw(i).ln()).ln()).collect())
    }

    fn size(&self, counts: &Counts, budget: f64, full: &Counts) -> (crate::dual::Dual, f64) {
        let target = self.config.param_budget_target;
        match self.config.budget_type {
            BudgetType::Param => (counts.params(target).clone(), budget * full.params(target).value),
            // The full model's budget is its own memory, not one GiB.
            BudgetType::Mem if budget == FULL => (counts.gib(&self.bytes, target), full.gib(&self.bytes, target).value),
            BudgetType::Mem => (counts.gib(&self.bytes, target), budget),
        }
    }

    fn choose_trained(&mut self, info: &MicroBatchInfo, soft: Vec<Routed>) -> Result<Choice> {
        let budget = self.budget(info)?;
        let (group, _) = self.group(info)?;
        let occasion = Occasion::MicroBatch(*info);
        let hard = uniform(info.seed, Purpose::Hard, 0, info.step as u32, group) > self.config.hard_sample_th;
        let mut outputs = soft;
        if hard {
            outputs.iter_mut().flat_map(|routed| &mut routed.rows).for_each(|row| *row = straight_through(row));
        }
        let Routes { target, full, .. } = self.routes()?;
        let (settings, mut sources) = target.mixtures(&outputs);
        let mut one_hot = outputs.clone();
        one_hot.iter_mut().flat_map(|routed| &mut routed.rows).for_each(|row| *row = straight_through(row));
        let params = target.expected(&one_hot, self.config.inference).total.value;
        let mut loss = None;
        if self.config.freeze_router {
            sources.clear();
        } else {
            let counts = target.expected(&outputs, self.config.inference);
            let (size, aim) = self.size(&counts, budget, full);
            let value = budget_loss(&outputs, budget, &size, aim);
            // It is never below zero, so the reference's router_beta has nothing to weigh.
            let factor = self.config.loss_alpha;
            let mut gradients = Values::new();
            let mut index = 0;
            for axis in &target.axes {
                let grad = (index..index + axis.gate.len()).map(|i| factor * value.by(i)).collect();
                gradients.insert(axis.gate.output(), grad);
                index += axis.gate.len();
            }
            loss = Some(ChoiceLoss { name: LOSS.into(), value: factor * value.value, gradients });
        }
        let (tau, scaler) = self.schedule(&occasion);
        let metrics = [(TAU.to_string(), tau), (SCALER.to_string(), scaler)].into_iter().collect();
        Ok(Choice { settings, sources, loss, label: Some(label(budget)), params: Some(params), metrics })
    }
}

/// How a budget is written in metrics.
fn label(budget: f64) -> String {
    format!("{budget:?}")
}

impl Elastifier for Flextron {
    fn plan(&mut self, target: &ModelPlan) -> Result<ElasticPlan> {
        let target = Target::new(target, &self.config).map_err(Error::config)?;
        let router = Router {
            budgets: self.budgets.list.len(),
            inter_dim: self.config.router_inter_dim,
            std: self.config.router_std,
            lr_mult: if self.config.freeze_router { 0.0 } else { self.config.lr_mult_router },
            gates: target.axes.iter().map(|axis| axis.gate.clone()).collect(),
        };
        let mut labels: Vec<String> = self.budgets.list.iter().map(|&budget| label(budget)).collect();
        if !self.budgets.list.contains(&FULL) {
            labels.push(label(FULL));
        }
        let plan = router.plan();
        let full = target.full(self.config.inference);
        self.target = Some(Routes { target, router, full });
        Ok(ElasticPlan { router: Some(plan), labels, ..ElasticPlan::default() })
    }

    /// Where nothing is trained, the full model.
    fn begin_micro_batch(&mut self, _: &MicroBatchInfo) -> Result<Vec<AxisSetting>> {
        Ok(Vec::new())
    }

    fn forward(&self, cx: &Cx) -> Result<()> {
        self.routes()?.router.forward(cx)
    }

    fn router_inputs(&mut self, occasion: &Occasion) -> Result<Values> {
        let budget = match occasion {
            Occasion::MicroBatch(info) => self.budget(info)?,
            Occasion::Budget(budget) if budget.is_finite() && *budget > 0.0 => *budget,
            Occasion::Budget(budget) => return Err(Error::config(format!("a budget of {budget} is not above 0"))),
            other => return Err(Error::plugin(format!("this elastifier does not know the occasion {other:?}"))),
        };
        let (tau, scaler) = self.schedule(occasion);
        let mut values = Values::new();
        values.insert(BUDGET.into(), self.budgets.one_hot(budget, false));
        values.insert(TAU.into(), vec![tau]);
        values.insert(SCALER.into(), vec![scaler]);
        for (number, gate) in self.routes()?.router.gates.iter().enumerate() {
            let noise = match occasion {
                Occasion::MicroBatch(info) => self.noise(info, number, gate.len())?,
                _ => vec![0.0; gate.len()],
            };
            values.insert(gate.noise(), noise);
        }
        Ok(values)
    }

    fn choose(&mut self, occasion: &Occasion, outputs: &Values) -> Result<Choice> {
        let target = &self.routes()?.target;
        let routed = target.routed(|gate| {
            outputs.get(&gate.output()).cloned().ok_or_else(|| format!("the router gave no output {}", gate.output()))
        });
        let routed = routed.map_err(Error::plugin)?;
        match occasion {
            Occasion::MicroBatch(info) => self.choose_trained(info, routed),
            _ => Ok(Choice { settings: target.slices(&routed), ..Choice::default() }),
        }
    }
}

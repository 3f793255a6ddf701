//! From a stage's module to a bound program: records a signature once.

use crate::error::{Error, Result};
use crate::mesh::{Grid, Place};
use crate::model::ParamTable;
use crate::model::params::Stored;
use crate::plugin::{self, ModelStage};
use crate::program::backprop;
use crate::program::graph::{LossTerm, Share, ValueId};
use crate::program::ops::lm_loss::{Divergence, Head, distillation_loss, lm_loss};
use crate::program::ops::{gather_rows, linear};
use crate::program::recorder::{Context, Recorder};
use crate::program::replay::Program;
use crate::program::states::{StateKey, States};
use gantry_plugin_api::plan::{Direction, ModelPlan, PortKind, RoleMask, Stage};
use std::collections::BTreeMap;

/// What a program computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// Loss and gradients.
    Train,
    /// Loss only.
    Loss,
    /// Logits of every token.
    Logits,
    /// Logits of one token: the last of the first sequence.
    NextToken,
    /// What the output weight is multiplied with, for a student: the last stage's activation [tokens, hidden].
    Hidden,
}

/// Input of a student's program: its teacher's activation, see [`Mode::Hidden`].
pub(super) const TEACHER_HIDDEN: &str = "teacher.hidden";

/// Name of the loss term by which a student learns.
pub const KD_LOSS: &str = "kd_loss";

/// How a model learns from a frozen one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distillation {
    pub divergence: Divergence,
    /// Factor of the divergence in the objective.
    pub scale: f64,
    /// The cross entropy is reported and not minimised.
    pub skip_lm_loss: bool,
}

/// Input of [`Mode::NextToken`]: the row whose logits are computed, i32 [1].
pub(super) const LOGITS_ROW: &str = "logits_row";

/// What a program was recorded for; anything else about a micro-batch is data.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Signature {
    pub mode: Mode,
    pub tokens: usize,
    /// Tokens of the longest sequence there may be.
    pub longest: usize,
    pub max_seqs: usize,
    pub states: BTreeMap<crate::program::states::Place, StateKey>,
}

/// Changes a record before it is bound. For tests that plant a fault and see it caught; nothing else sets one.
pub type Tamper = std::sync::Arc<dyn Fn(&mut crate::program::graph::Graph, Place) + Send + Sync>;

/// The parts of a model that do not change during a run.
pub struct StageModel {
    pub plan: ModelPlan,
    pub table: ParamTable,
    pub grid: Grid,
    pub place: Place,
    pub stage: Stage,
    pub provider: String,
    pub module: ModelStage,
    pub roles: Option<Vec<RoleMask>>,
    pub frozen: bool,
    pub seed: u64,
    /// Ask for gradients of the numbers in axis states.
    pub state_grads: bool,
    /// Token ids from this one on are padding of the vocabulary; none: all are tokens.
    pub labels: Option<usize>,
    pub tamper: Option<Tamper>,
}

/// A bound program and the values the host touches.
pub struct Compiled {
    pub program: Program,
    /// Sum of the cross entropy over unmasked tokens.
    pub loss: Option<ValueId>,
    pub logits: Option<ValueId>,
    /// [tokens, hidden] of [`Mode::Hidden`], on the last stage.
    pub hidden: Option<ValueId>,
    /// Entry of the parameter table whose rows are the vocabulary, on the last stage.
    pub head: Option<usize>,
    /// Activation from the previous stage, and the gradient that goes back.
    pub received: Option<(ValueId, Option<ValueId>)>,
    /// Activation for the next stage, and the gradient that comes back.
    pub sent: Option<(ValueId, Option<ValueId>)>,
    /// Gradients of axis-state inputs by name, if asked for.
    pub state_grads: Vec<(String, ValueId)>,
}

impl StageModel {
    fn port(&self, direction: Direction, kind: PortKind) -> Result<&str> {
        self.plan
            .ports
            .iter()
            .find(|p| p.direction == direction && p.kind == kind)
            .map(|p| p.name.as_str())
            .ok_or_else(|| Error::plugin(format!("the plan declares no {direction:?} port of kind {kind:?}")))
    }

    fn recorder<'a>(&'a self, signature: &Signature, states: &'a States) -> Recorder<'a> {
        Recorder::new(Context {
            plan: &self.plan,
            table: &self.table,
            grid: self.grid,
            place: self.place,
            states,
            roles: self.roles.as_deref(),
            training: signature.mode == Mode::Train,
            frozen: self.frozen,
            tokens: signature.tokens,
            longest: signature.longest,
            max_seqs: signature.max_seqs,
            seed: self.seed,
            state_grads: self.state_grads,
            labels: self.labels,
        })
    }

    /// Records, differentiates and binds the program of a signature. `teacher`: the output weight of the model to learn
    /// from, as it is stored on this rank, and how; only programs with [`Mode::Train`] do.
    pub fn compile(
        &self,
        signature: &Signature,
        states: &States,
        teacher: Option<(&Stored, Distillation)>,
    ) -> Result<Compiled> {
        let mut cx = self.recorder(signature, states);
        self.module.forward(&mut cx)?;
        let ends_model = self.stage.end == self.plan.blocks.len();
        let (mut loss, mut logits, mut head, mut last, mut sent) = (None, None, None, None, None);
        let mut seeds = Vec::new();
        if ends_model {
            let port = self.port(Direction::Output, PortKind::LanguageModel)?;
            let Some([hidden, weight]) = cx.g.outputs.get(port).map(|ids| [ids[0], ids[1]]) else {
                return Err(Error::plugin(format!("forward delivered nothing to its output port {port:?}")));
            };
            cx.begin_call("loss");
            head = cx.value(weight).param;
            let student = Head { hidden, weight };
            match signature.mode {
                Mode::Train | Mode::Loss => {
                    let teacher = teacher.filter(|_| signature.mode == Mode::Train);
                    let minimised = !teacher.is_some_and(|(_, how)| how.skip_lm_loss);
                    loss = Some(language_model_loss(&mut cx, student, signature.tokens, minimised)?);
                    if let Some((weight, how)) = teacher {
                        learn(&mut cx, student, weight, how)?;
                    }
                }
                Mode::Logits => logits = Some(project(&mut cx, student)?),
                Mode::NextToken => {
                    let row = cx.int_input(LOGITS_ROW, 1)?;
                    let hidden = gather_rows::record(&mut cx, Default::default(), &[hidden, row])?[0];
                    logits = Some(project(&mut cx, Head { hidden, weight })?);
                }
                Mode::Hidden => {
                    let rows = cx.replicated(hidden)?;
                    let rows = cx.contiguous(rows);
                    cx.g.pin(rows);
                    last = Some(rows);
                }
            }
        } else {
            let port = self.output_activation()?;
            let Some(&hidden) = cx.g.outputs.get(&port).and_then(|ids| ids.first()) else {
                return Err(Error::plugin(format!("forward delivered nothing to its output port {port:?}")));
            };
            let hidden = cx.stream(hidden)?;
            let hidden = cx.contiguous(hidden);
            cx.g.pin(hidden);
            let grad = (signature.mode == Mode::Train).then(|| {
                let grad = cx.g.fresh_like(hidden, "grad.sent");
                cx.g.pin(grad);
                seeds.push((hidden, grad));
                grad
            });
            sent = Some((hidden, grad));
        }
        cx.finish()?;
        let received = match self.stage.begin {
            0 => None,
            _ => {
                let port = self.port(Direction::Input, PortKind::Activation)?;
                cx.g.inputs.get(port).copied()
            }
        };
        let states: Vec<(String, ValueId)> =
            cx.g.inputs.iter().filter(|i| i.0.starts_with("state.")).map(|(name, id)| (name.clone(), *id)).collect();
        let (mut returned, mut state_grads) = (None, Vec::new());
        if signature.mode == Mode::Train {
            let mut wanted: Vec<ValueId> = received.into_iter().collect();
            if self.state_grads {
                wanted.extend(states.iter().map(|s| s.1));
            }
            let mut grads = backprop::append(&mut cx.g, &seeds, &wanted)?.into_iter();
            if received.is_some() {
                returned = grads.next().flatten();
            }
            state_grads = states.into_iter().zip(grads).filter_map(|((name, _), grad)| Some((name, grad?))).collect();
        }
        self.check_gradients(&cx)?;
        if let Some(tamper) = &self.tamper {
            tamper(&mut cx.g, self.place);
        }
        let program = Program::bind(std::mem::take(&mut cx.g), self.grid.tp)?;
        let received = received.map(|id| (id, returned));
        Ok(Compiled { program, loss, logits, hidden: last, head, received, sent, state_grads })
    }

    /// An error if two recordings of a signature differ.
    pub fn check_pure(&self, signature: &Signature, states: &States) -> Result<()> {
        let (mut first, mut second) = (self.recorder(signature, states), self.recorder(signature, states));
        Ok(plugin::check_pure(&self.provider, &self.module, &mut first, &mut second)?)
    }

    fn output_activation(&self) -> Result<String> {
        self.port(Direction::Output, PortKind::Activation).map(str::to_string)
    }

    /// A main gradient is a sum over tp or complete, never both.
    fn check_gradients(&self, cx: &Recorder<'_>) -> Result<()> {
        let both = cx.g.partial_grads.iter().zip(&cx.g.full_grads).position(|(&partial, &full)| partial && full);
        match both {
            None => Ok(()),
            Some(entry) => Err(Error::plugin(format!(
                "parameter {:?} is used on spread rows and on whole rows; under tensor parallelism use it on one of them",
                self.table.params[entry].stored.name
            ))),
        }
    }
}

/// Logits of every row of the hidden states.
fn project(cx: &mut Recorder<'_>, Head { hidden, weight }: Head) -> Result<ValueId> {
    let logits = linear::record(cx, Default::default(), &[hidden, weight])?[0];
    cx.g.pin(logits);
    Ok(logits)
}

/// Cross entropy at the output port, as the first term of the objective if it is `minimised`.
fn language_model_loss(cx: &mut Recorder<'_>, head: Head, tokens: usize, minimised: bool) -> Result<ValueId> {
    let labels = cx.int_input("labels", tokens)?;
    let mask = cx.real_input("loss_mask", tokens)?;
    let total = lm_loss(cx, head, labels, mask, 0.0)?.total;
    cx.g.pin(total);
    if minimised {
        let seed = cx.real_input("loss_scale", 1)?;
        cx.g.losses.push(LossTerm { name: "lm_loss".into(), value: total, share: Share::Sum(1.0), seed });
    }
    Ok(total)
}

/// The divergence from the teacher at the output port, as a term of the objective.
fn learn(cx: &mut Recorder<'_>, student: Head, weight: &Stored, how: Distillation) -> Result<()> {
    cx.begin_call("distillation");
    let weight = cx.teacher_param(weight);
    let hidden = cx.rows_input(TEACHER_HIDDEN, cx.value(weight).last().clone());
    let mask = cx.real_input("loss_mask", cx.cx.tokens)?;
    let seed = cx.real_input("kd_scale", 1)?;
    let total = distillation_loss(cx, student, Head { hidden, weight }, mask, how.divergence)?.total;
    cx.g.pin(total);
    cx.g.losses.push(LossTerm { name: KD_LOSS.into(), value: total, share: Share::Sum(how.scale), seed });
    Ok(())
}

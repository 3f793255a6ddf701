//! All ranks of a model as threads of this process, and logical tensors gathered from them.
//!
//! Work is sent to every rank at once; an error or panic of one ends the waiting of all. Tensors leave and enter in
//! logical order, one at a time, whatever the layout.

use super::rank::{Elastic, Groups, Rank, Teacher};
use super::record::{Distillation, StageModel, Tamper};
use super::router::Router;
use crate::checkpoint::{CheckpointReader, ElementType, LogicalTensor, TensorData};
use crate::comm::{Group, threads};
use crate::error::{Cause, Error, Result};
use crate::mesh::{Grid, Place};
use crate::model::ParamTable;
use crate::model::entries::{Entries, entries};
use crate::model::params::Stored;
use crate::plugin::PluginSet;
use crate::schedule::cut;
use gantry_kernels::Element;
use gantry_plugin_api::plan::{AxisSetting, ElasticPlan, ModelPlan, Stage};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Where axis states come from, before any rank exists.
#[derive(Clone, Debug)]
pub enum ElasticSpec {
    Off,
    Fixed(Vec<AxisSetting>),
    Plugin { provider: String, config: serde_json::Value },
}

/// A frozen model to learn from: on the same grid, never elastic.
#[derive(Clone, Debug)]
pub struct TeacherSpec {
    pub provider: String,
    pub config: serde_json::Value,
    pub distillation: Distillation,
}

/// Everything a team is made from.
#[derive(Clone)]
pub struct TeamSpec {
    pub plugins: PluginSet,
    pub provider: String,
    pub config: serde_json::Value,
    pub grid: Grid,
    pub seed: u64,
    pub elastic: ElasticSpec,
    pub teacher: Option<TeacherSpec>,
    /// Ranks have gradients and optimizer state; otherwise they compute forward passes only.
    pub trains: bool,
    /// Parameters take no gradient.
    pub frozen: bool,
    /// Record every signature twice and compare.
    pub check_purity: bool,
    /// Gradients of the numbers in axis states.
    pub state_grads: bool,
    /// How long a rank waits for the others.
    pub timeout: Duration,
    /// See [`Tamper`].
    pub tamper: Option<Tamper>,
}

/// Tensors of the same structure as the parameters, or the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Params,
    Grads,
    ExpAvg,
    ExpAvgSq,
    Buffers,
    /// Parameters and buffers of the teacher.
    Teacher,
    TeacherBuffers,
    /// Of the router that an elastifier chooses by.
    Router,
    RouterGrads,
    RouterExpAvg,
    RouterExpAvgSq,
}

impl Kind {
    /// What its tensors' names begin with in a checkpoint.
    pub fn prefix(self) -> &'static str {
        match self {
            Kind::Params | Kind::Buffers | Kind::Teacher | Kind::TeacherBuffers => "",
            Kind::Grads => "grad.",
            Kind::ExpAvg => "optimizer.exp_avg.",
            Kind::ExpAvgSq => "optimizer.exp_avg_sq.",
            Kind::Router => ELASTIFIER,
            Kind::RouterGrads => "grad.elastifier.",
            Kind::RouterExpAvg => "optimizer.exp_avg.elastifier.",
            Kind::RouterExpAvgSq => "optimizer.exp_avg_sq.elastifier.",
        }
    }

    fn is_buffers(self) -> bool {
        matches!(self, Kind::Buffers | Kind::TeacherBuffers)
    }

    fn is_of_teacher(self) -> bool {
        matches!(self, Kind::Teacher | Kind::TeacherBuffers)
    }

    fn is_of_router(self) -> bool {
        matches!(self, Kind::Router | Kind::RouterGrads | Kind::RouterExpAvg | Kind::RouterExpAvgSq)
    }
}

/// What names of an elastifier's parameters begin with in a checkpoint. A model without it leaves them there.
pub const ELASTIFIER: &str = "elastifier.";

type Job<T> = Box<dyn FnOnce(&mut Rank<T>) + Send>;

/// The ranks of a model.
pub struct Team<T> {
    pub plan: ModelPlan,
    teacher: Option<ModelPlan>,
    /// Of the elastifier, if it has one.
    router: Option<ModelPlan>,
    pub grid: Grid,
    jobs: Vec<Sender<Job<T>>>,
    threads: Vec<JoinHandle<()>>,
}

/// The stages of a plan, cut where it says so or by cost: two operations per parameter and token, plus what blocks add.
pub fn stages(plan: &ModelPlan, pp: usize) -> Result<Vec<Stage>> {
    let table =
        ParamTable::new(plan, &Stage { begin: 0, end: plan.blocks.len() }, Grid::SINGLE, Grid::SINGLE.place(0))?;
    let mut costs: Vec<f64> = plan.blocks.iter().map(|block| block.extra_flops_per_token).collect();
    for entry in &table.params {
        costs[plan.params[entry.plan].block] += 2.0 * entry.stored.len as f64;
    }
    let begins = cut(&costs, &plan.blocks.iter().map(|b| b.starts_stage).collect::<Vec<_>>(), pp).map_err(|n| {
        Error::recipe(format!("grid.pp is {pp}, but the model has {n} stages by its own marks or blocks"))
            .remedy(format!("set grid.pp to {n}, or change the stage marks in the model's pattern"))
    })?;
    let ends = begins[1..].iter().copied().chain([plan.blocks.len()]);
    let stages: Vec<Stage> = begins.iter().zip(ends).map(|(&begin, end)| Stage { begin, end }).collect();
    for param in plan.params.iter().filter(|p| p.tie.is_some()) {
        let stage_of = |block: usize| stages.iter().position(|s| (s.begin..s.end).contains(&block));
        if let Some(other) =
            plan.params.iter().find(|o| o.tie == param.tie && stage_of(o.block) != stage_of(param.block))
        {
            return Err(Error::recipe(format!(
                "{:?} and {:?} are tied but fall on different pipeline stages",
                param.name, other.name
            ))
            .remedy("untie them, or set grid.pp to 1"));
        }
    }
    Ok(stages)
}

impl<T: Element> Team<T> {
    /// Starts the ranks: each makes its own provider instance, its share of the parameters, and waits for work.
    pub fn start(spec: &TeamSpec) -> Result<Team<T>> {
        spec.grid.check()?;
        let student = Cut::of(spec, &spec.provider, &spec.config)?;
        let teacher = student.of_teacher(spec)?;
        // What it refuses shows before the first thread starts, too.
        let router = elastic(spec, &student.plan)?.1.router;
        let mut groups = groups::<T>(spec.grid, spec.timeout);
        let mut of_teacher = teacher.as_ref().map(|_| self::groups::<T>(spec.grid, spec.timeout)).unwrap_or_default();
        let (mut jobs, mut handles, mut ready) = (Vec::new(), Vec::new(), Vec::new());
        for rank in (0..spec.grid.ranks()).rev() {
            let Some(groups) = groups.pop() else { break };
            let (place, ranks) = (spec.grid.place(rank), spec.grid.ranks());
            let teacher = of_teacher.pop().zip(teacher.clone());
            let (spec, student) = (spec.clone(), student.clone());
            let (job_sender, job_receiver) = channel::<Job<T>>();
            let (ready_sender, ready_receiver) = channel();
            let thread = std::thread::Builder::new()
                .name(format!("rank {rank}"))
                .spawn(move || {
                    match guarded(rank, || {
                        let workers = own_workers(ranks)?;
                        Ok((build(&spec, student, teacher, place, groups)?, workers))
                    }) {
                        Ok((mut rank, _workers)) => {
                            let _ = ready_sender.send(Ok(()));
                            while let Ok(job) = job_receiver.recv() {
                                job(&mut rank);
                            }
                        }
                        Err(e) => {
                            let _ = ready_sender.send(Err(e));
                        }
                    }
                })
                .map_err(|e| Error::communication(format!("cannot start the thread of rank {rank}: {e}")))?;
            jobs.push(job_sender);
            handles.push(thread);
            ready.push(ready_receiver);
        }
        jobs.reverse();
        let team = Team {
            plan: student.plan,
            teacher: teacher.map(|teacher| teacher.plan),
            router,
            grid: spec.grid,
            jobs,
            threads: handles,
        };
        let results = ready.iter().map(|r| r.recv().unwrap_or_else(|_| Err(lost()))).collect::<Vec<_>>();
        first_error(results).map(|_| team)
    }

    /// Runs `job` on every rank at once; results in rank order.
    pub fn all<R: Send + 'static>(
        &self,
        job: impl Fn(&mut Rank<T>) -> Result<R> + Send + Sync + Clone + 'static,
    ) -> Result<Vec<R>> {
        let receivers: Vec<Receiver<Result<R>>> = self
            .jobs
            .iter()
            .enumerate()
            .map(|(index, jobs)| {
                let (sender, receiver) = sync_channel(1);
                let job = job.clone();
                let span = tracing::Span::current();
                let _ = jobs.send(Box::new(move |rank| {
                    let _inside = span.entered();
                    let result = guarded(index, || job(rank));
                    if let Err(e) = &result {
                        let why = format!("rank {index} stopped: {}", e.sentence);
                        let of_teacher = rank.teacher.as_ref().map(|teacher| &teacher.rank.groups);
                        for groups in std::iter::once(&rank.groups).chain(of_teacher) {
                            groups.world.abort(&why);
                            groups.tp.abort(&why);
                            groups.dp.abort(&why);
                            groups.pp.abort(&why);
                        }
                    }
                    let _ = sender.send(result);
                }));
                receiver
            })
            .collect();
        first_error(receivers.into_iter().map(|r| r.recv().unwrap_or_else(|_| Err(lost()))).collect())
    }

    /// Tokens of the model's vocabulary, if it has one.
    pub fn vocab(&self) -> Option<usize> {
        vocab(&self.plan)
    }

    /// Whether an elastifier chooses by a router.
    pub fn has_router(&self) -> bool {
        self.router.is_some()
    }

    /// Number of tensors of a kind; they are gathered by number.
    fn count(&self, kind: Kind) -> usize {
        let plan = self.plan_of(kind);
        if kind.is_buffers() { plan.buffers.len() } else { plan.params.len() }
    }

    /// The plan that declares tensors of a kind; an empty one where there is no teacher or router.
    fn plan_of(&self, kind: Kind) -> &ModelPlan {
        static NONE: LazyLock<ModelPlan> = LazyLock::new(ModelPlan::default);
        match kind {
            _ if kind.is_of_teacher() => self.teacher.as_ref().unwrap_or(&NONE),
            _ if kind.is_of_router() => self.router.as_ref().unwrap_or(&NONE),
            _ => &self.plan,
        }
    }

    /// One declared tensor in logical order, from the ranks that hold it; none if another, tied one stands for it.
    fn gather_one(&self, kind: Kind, index: usize) -> Result<Option<(Vec<usize>, Vec<f64>)>> {
        let parts = self.all(move |rank| {
            if rank.model.place.dp != 0 {
                return Ok(None);
            }
            let Some(stored) = stored(table(rank, kind)?, kind, index) else { return Ok(None) };
            let range = stored.offset..stored.offset + stored.len;
            let values: Vec<f64> = data(rank, kind)?[range].iter().map(|x| x.to_f64()).collect();
            Ok(Some((stored.shape(), stored.logical_indices().collect::<Vec<usize>>(), values)))
        })?;
        let mut whole: Option<(Vec<usize>, Vec<f64>)> = None;
        for (shape, indices, values) in parts.into_iter().flatten() {
            let (_, all) = whole.get_or_insert_with(|| {
                let len = shape.iter().product();
                (shape, vec![f64::NAN; len])
            });
            indices.into_iter().zip(values).for_each(|(i, x)| all[i] = x);
        }
        Ok(whole)
    }

    /// Every tensor of a kind under its checkpoint name (without prefix), gathered one at a time.
    pub fn gather(&self, kind: Kind) -> impl Iterator<Item = Result<Vec<LogicalTensor>>> + '_ {
        (0..self.count(kind)).map(move |index| {
            let Some((shape, values)) = self.gather_one(kind, index)? else { return Ok(Vec::new()) };
            let (name, export) = self.name(kind, index);
            Ok(split(&name, shape, export, values, T::BYTES))
        })
    }

    /// Copies declared tensor `index` of a kind in logical order into `bytes`, which are as long as its
    /// [`entries`](Team::entries) say, little-endian.
    pub fn copy_out(&self, kind: Kind, index: usize, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let shared = Arc::new(Mutex::new(bytes));
        let to = Arc::clone(&shared);
        self.all(move |rank| {
            // Replicas hold the same.
            if rank.model.place.dp != 0 {
                return Ok(());
            }
            let Some(stored) = stored(table(rank, kind)?, kind, index) else { return Ok(()) };
            let values = &data(rank, kind)?[stored.offset..][..stored.len];
            let mut bytes = to.lock().unwrap_or_else(PoisonError::into_inner);
            stored.each_logical_run(|local, logical, len| {
                let (from, to) = (&values[local..][..len], &mut bytes[logical * T::BYTES..][..len * T::BYTES]);
                if T::BYTES == size_of::<f32>() {
                    let to = to.as_chunks_mut().0;
                    to.iter_mut().zip(from).for_each(|(to, x)| *to = (x.to_f64() as f32).to_le_bytes());
                } else {
                    let to = to.as_chunks_mut().0;
                    to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f64().to_le_bytes());
                }
            });
            Ok(())
        })?;
        let mut bytes = shared.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *bytes))
    }

    /// Names and shapes of the checkpoint tensors that a declared one becomes.
    pub fn entries(&self, kind: Kind) -> Result<Vec<Entries>> {
        let plan = self.plan_of(kind);
        let table = ParamTable::new(
            plan,
            &Stage { begin: 0, end: plan.blocks.len() },
            Grid::SINGLE,
            Place { tp: 0, dp: 0, pp: 0 },
        )?;
        Ok((0..self.count(kind))
            .map(|index| {
                let first = kind.is_buffers() || table.params.iter().any(|p| p.plan == index);
                match stored(&table, kind, index).filter(|_| first) {
                    None => Vec::new(),
                    Some(stored) => {
                        let (name, export) = self.name(kind, index);
                        entries(&name, &stored.shape(), export.as_deref())
                    }
                }
            })
            .collect())
    }

    fn name(&self, kind: Kind, index: usize) -> (String, Option<Vec<usize>>) {
        let plan = self.plan_of(kind);
        if kind.is_buffers() {
            (plan.buffers[index].name.clone(), None)
        } else {
            (plan.params[index].name.clone(), plan.params[index].export_shape.clone())
        }
    }

    /// Fills every tensor of the kinds. Every tensor of the checkpoint must be of one of them, or `may_stay` allow it; of
    /// the type `ty`, if it must not be converted.
    pub fn load(
        &self,
        reader: &mut CheckpointReader,
        kinds: &[Kind],
        ty: Option<ElementType>,
        may_stay: fn(&str) -> bool,
    ) -> Result<()> {
        let mut wanted = Vec::new();
        for &kind in kinds {
            for (index, mut parts) in self.entries(kind)?.into_iter().enumerate() {
                parts.iter_mut().for_each(|(name, _)| name.insert_str(0, kind.prefix()));
                wanted.push((kind, index, parts));
            }
        }
        let all: Vec<_> = wanted.iter().flat_map(|(_, _, parts)| parts).cloned().collect();
        reader.expect(&all, ty, may_stay)?;
        for (kind, index, parts) in wanted.into_iter().filter(|(_, _, parts)| !parts.is_empty()) {
            let mut values = Vec::new();
            for (name, shape) in parts {
                values.extend(reader.take(&name, &shape)?.data.into_f64());
            }
            self.scatter(kind, index, values)?;
        }
        Ok(())
    }

    /// Gives declared tensor `index` of a kind its logical `values` on every rank that holds a share.
    pub fn scatter(&self, kind: Kind, index: usize, values: Vec<f64>) -> Result<()> {
        let values = Arc::new(values);
        self.all(move |rank| {
            let Some(stored) = stored(table(rank, kind)?, kind, index).cloned() else { return Ok(()) };
            let wants: usize = stored.shape().iter().product();
            if values.len() != wants {
                return Err(Error::data(format!(
                    "tensor {:?} has {} elements where the model has {wants}",
                    stored.name,
                    values.len()
                )));
            }
            let to = &mut data_mut(rank, kind)?[stored.offset..][..stored.len];
            to.iter_mut().zip(stored.logical_indices()).for_each(|(to, i)| *to = T::of(values[i]));
            Ok(())
        })
        .map(drop)
    }
}

impl<T> Drop for Team<T> {
    fn drop(&mut self) {
        self.jobs.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn stored(table: &ParamTable, kind: Kind, index: usize) -> Option<&Stored> {
    if kind.is_buffers() {
        return table.buffer_of_plan[index].map(|i| &table.buffers[i].stored);
    }
    // A tied parameter is gathered under the first name it has.
    table.params.iter().find(|p| p.plan == index).map(|p| &p.stored)
}

fn table<T: Element>(rank: &Rank<T>, kind: Kind) -> Result<&ParamTable> {
    if kind.is_of_router() {
        return rank.router.as_ref().map(|router| &router.table).ok_or_else(no_router);
    }
    match &rank.teacher {
        _ if !kind.is_of_teacher() => Ok(&rank.model.table),
        Some(teacher) => Ok(&teacher.rank.model.table),
        None => Err(no_teacher()),
    }
}

fn data<T: Element>(rank: &Rank<T>, kind: Kind) -> Result<&[T]> {
    let teacher = rank.teacher.as_ref().map(|teacher| &teacher.rank);
    Ok(match kind {
        Kind::Params => &rank.params,
        Kind::Grads => &rank.grads,
        Kind::ExpAvg => &rank.moments.exp_avg,
        Kind::ExpAvgSq => &rank.moments.exp_avg_sq,
        Kind::Buffers => &rank.buffers,
        Kind::Teacher => &teacher.ok_or_else(no_teacher)?.params,
        Kind::TeacherBuffers => &teacher.ok_or_else(no_teacher)?.buffers,
        Kind::Router => &rank.router.as_ref().ok_or_else(no_router)?.params,
        Kind::RouterGrads => &rank.router.as_ref().ok_or_else(no_router)?.grads,
        Kind::RouterExpAvg => &rank.router.as_ref().ok_or_else(no_router)?.moments.exp_avg,
        Kind::RouterExpAvgSq => &rank.router.as_ref().ok_or_else(no_router)?.moments.exp_avg_sq,
    })
}

fn data_mut<T: Element>(rank: &mut Rank<T>, kind: Kind) -> Result<&mut [T]> {
    let teacher = rank.teacher.as_mut().map(|teacher| &mut teacher.rank);
    Ok(match kind {
        Kind::Params => &mut rank.params,
        Kind::Grads => &mut rank.grads,
        Kind::ExpAvg => &mut rank.moments.exp_avg,
        Kind::ExpAvgSq => &mut rank.moments.exp_avg_sq,
        Kind::Buffers => &mut rank.buffers,
        Kind::Teacher => &mut teacher.ok_or_else(no_teacher)?.params,
        Kind::TeacherBuffers => &mut teacher.ok_or_else(no_teacher)?.buffers,
        Kind::Router => &mut rank.router.as_mut().ok_or_else(no_router)?.params,
        Kind::RouterGrads => &mut rank.router.as_mut().ok_or_else(no_router)?.grads,
        Kind::RouterExpAvg => &mut rank.router.as_mut().ok_or_else(no_router)?.moments.exp_avg,
        Kind::RouterExpAvgSq => &mut rank.router.as_mut().ok_or_else(no_router)?.moments.exp_avg_sq,
    })
}

fn no_router() -> Error {
    Error::recipe("the module has no elastifier with a router")
}

fn no_teacher() -> Error {
    Error::recipe("the module has no teacher")
}

/// A declared tensor as the checkpoint tensors it becomes.
fn split(
    name: &str,
    shape: Vec<usize>,
    export: Option<Vec<usize>>,
    values: Vec<f64>,
    bytes: usize,
) -> Vec<LogicalTensor> {
    let typed = |values: &[f64]| {
        if bytes == 4 {
            TensorData::F32(values.iter().map(|&x| x as f32).collect())
        } else {
            TensorData::F64(values.to_vec())
        }
    };
    let parts = entries(name, &shape, export.as_deref());
    let one = values.len() / parts.len().max(1);
    let parts = parts.into_iter().enumerate();
    parts.map(|(i, (name, shape))| LogicalTensor { name, shape, data: typed(&values[i * one..][..one]) }).collect()
}

/// Makes this thread the first worker of a pool of its own, with its share of the machine's cores: kernels start without
/// a hand-over, and ranks do not take each other's work. The pool lasts as long as what is returned.
fn own_workers(ranks: usize) -> Result<rayon::ThreadPool> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    rayon::ThreadPoolBuilder::new()
        .num_threads((cores / ranks).max(1))
        .use_current_thread()
        .build()
        .map_err(|e| Error::communication(format!("cannot start the worker threads of a rank: {e}")))
}

/// What providers call the axis of token ids.
const VOCAB_AXIS: &str = "vocab";

/// Tokens of a model's vocabulary.
pub(super) fn vocab(plan: &ModelPlan) -> Option<usize> {
    plan.axes.iter().find(|axis| axis.name == VOCAB_AXIS).map(|axis| axis.size)
}

/// A model's declaration and its pipeline stages.
#[derive(Clone)]
pub(super) struct Cut {
    pub plan: ModelPlan,
    stages: Vec<Stage>,
}

impl Cut {
    pub fn of(spec: &TeamSpec, provider: &str, config: &serde_json::Value) -> Result<Cut> {
        let plan = spec.plugins.provider(provider, config)?.plan().map_err(Error::from)?;
        let stages = stages(&plan, spec.grid.pp)?;
        // What a layout cannot hold shows on any of its ranks: before the first thread starts.
        for stage in &stages {
            ParamTable::new(&plan, stage, spec.grid, spec.grid.place(0))?;
        }
        Ok(Cut { plan, stages })
    }

    /// The model that the one of `spec` learns from, if there is one; refused if it speaks of other tokens.
    pub fn of_teacher(&self, spec: &TeamSpec) -> Result<Option<Cut>> {
        let Some(teacher) = &spec.teacher else { return Ok(None) };
        let cut = Cut::of(spec, &teacher.provider, &teacher.config).map_err(|e| e.at("teacher"))?;
        match (vocab(&self.plan), vocab(&cut.plan)) {
            (Some(ours), Some(theirs)) if ours != theirs => Err(Error::recipe(format!(
                "the vocabulary of the teacher has {theirs} tokens, that of the model {ours}; they must be the same"
            ))
            .remedy("give both models one vocabulary size")),
            _ => Ok(Some(cut)),
        }
    }
}

fn build<T: Element>(
    spec: &TeamSpec,
    student: Cut,
    teacher: Option<(Groups<T>, Cut)>,
    place: Place,
    groups: Groups<T>,
) -> Result<Rank<T>> {
    let teacher = match (teacher, &spec.teacher) {
        (Some((groups, cut)), Some(teacher)) => {
            let model =
                StageModel { frozen: true, ..stage_model(spec, &teacher.provider, &teacher.config, cut, place)? };
            let rank = Box::new(Rank::new(model, groups, Elastic::Off, None, spec.check_purity, false)?);
            Some(Teacher { rank, distillation: teacher.distillation })
        }
        _ => None,
    };
    let (elastic, wants) = elastic(spec, &student.plan)?;
    let router = match &elastic {
        Elastic::Plugin(elastifier) => Router::new(&wants, elastifier, spec.seed, spec.trains)?,
        _ => None,
    };
    let model = StageModel {
        roles: wants.roles,
        state_grads: spec.state_grads || router.is_some(),
        labels: None,
        tamper: spec.tamper.clone(),
        ..stage_model(spec, &spec.provider, &spec.config, student, place)?
    };
    let mut rank = Rank::new(model, groups, elastic, teacher, spec.check_purity, spec.trains)?;
    rank.router = router;
    Ok(rank)
}

/// Where a rank's axis states come from, and what an elastifier wants of the target.
fn elastic(spec: &TeamSpec, target: &ModelPlan) -> Result<(Elastic, ElasticPlan)> {
    Ok(match &spec.elastic {
        ElasticSpec::Off => (Elastic::Off, ElasticPlan::default()),
        ElasticSpec::Fixed(settings) => (Elastic::Fixed(settings.clone()), ElasticPlan::default()),
        ElasticSpec::Plugin { provider, config } => {
            let mut elastifier = spec.plugins.elastifier(provider, config)?;
            let wants = elastifier.plan(target).map_err(Error::from)?;
            (Elastic::Plugin(Box::new(elastifier)), wants)
        }
    })
}

/// A rank's stage of a model as the recipe has it, without an elastifier.
pub(super) fn stage_model(
    spec: &TeamSpec,
    provider: &str,
    config: &serde_json::Value,
    Cut { plan, mut stages }: Cut,
    place: Place,
) -> Result<StageModel> {
    let stage = stages.swap_remove(place.pp);
    let module = spec.plugins.provider(provider, config)?.build(&stage).map_err(Error::from)?;
    Ok(StageModel {
        table: ParamTable::new(&plan, &stage, spec.grid, place)?,
        plan,
        grid: spec.grid,
        place,
        stage,
        provider: provider.into(),
        module,
        roles: None,
        frozen: spec.frozen,
        seed: spec.seed,
        state_grads: false,
        labels: None,
        tamper: None,
    })
}

/// The groups of every rank of a grid, in rank order.
fn groups<T: Element>(grid: Grid, timeout: Duration) -> Vec<Groups<T>> {
    type Seats<T> = Vec<Option<Box<dyn Group<T>>>>;
    let mut lists: Vec<Seats<T>> = Vec::new();
    let places: Vec<Place> = (0..grid.ranks()).map(|rank| grid.place(rank)).collect();
    // Each kind of group: the key ranks share, in the order of their place inside.
    type Key = fn(&Place) -> (usize, usize);
    let kinds: [(&str, Key); 4] =
        [("tp", |p| (p.dp, p.pp)), ("dp", |p| (p.tp, p.pp)), ("pp", |p| (p.tp, p.dp)), ("world", |_| (0, 0))];
    for (name, key) in kinds {
        let mut list: Seats<T> = (0..grid.ranks()).map(|_| None).collect();
        let mut keys: Vec<(usize, usize)> = places.iter().map(key).collect();
        keys.sort_unstable();
        keys.dedup();
        for of in keys {
            let members: Vec<usize> = (0..grid.ranks()).filter(|&rank| key(&places[rank]) == of).collect();
            let label = format!("{name} of ranks {members:?}");
            if members.len() == 1 {
                list[members[0]] = Some(Box::new(crate::comm::Alone));
                continue;
            }
            for (rank, group) in members.iter().zip(threads::group::<T>(&label, members.len(), timeout)) {
                list[*rank] = Some(Box::new(group));
            }
        }
        lists.push(list);
    }
    let mut take = |kind: usize, rank: usize| lists[kind][rank].take().unwrap_or_else(|| Box::new(crate::comm::Alone));
    (0..grid.ranks())
        .map(|rank| Groups { tp: take(0, rank), dp: take(1, rank), pp: take(2, rank), world: take(3, rank) })
        .collect()
}

fn lost() -> Error {
    Error::communication("a rank's thread ended without a word")
}

/// `job`, with a panic turned into an error.
fn guarded<R>(rank: usize, job: impl FnOnce() -> Result<R>) -> Result<R> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()))
            .unwrap_or_else(|| "no message".into());
        Err(Error::plugin(format!("rank {rank} panicked: {what}")))
    })
}

/// All results, or the error that began it: waiting ranks only report that somebody else stopped.
fn first_error<R>(results: Vec<Result<R>>) -> Result<Vec<R>> {
    let mut fallout = None;
    let mut all = Vec::new();
    for result in results {
        match result {
            Ok(r) => all.push(r),
            Err(e) if e.cause == Cause::Communication => fallout = fallout.or(Some(e)),
            Err(e) => return Err(e),
        }
    }
    match fallout {
        Some(e) => Err(e),
        None => Ok(all),
    }
}

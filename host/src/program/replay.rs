//! Executes a program on CPU without the provider.
//!
//! Binding resolves every operand to a range of an arena once; a replay only splits slices and launches.

use super::graph::{Action, Collective, Graph, Mark, Operand, Space, StorageId, ValueId};
use super::memory::{self, Plan};
use super::profile::Profile;
use crate::comm::Group;
use crate::error::{Error, Result};
use gantry_kernels::{Args, Cost, Element, Kernel};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A record bound to memory.
pub struct Program {
    pub graph: Graph,
    pub plan: Plan,
    steps: Vec<Bound>,
}

/// Memory of one live micro-batch.
pub struct Arena<T> {
    pub act: Vec<T>,
    pub int: Vec<i32>,
}

/// The rank's long-lived memory.
pub struct Memory<'a, T> {
    pub params: &'a [T],
    pub grads: &'a mut [T],
    pub buffers: &'a [T],
    /// Parameters of the model that this one learns from, if there is one.
    pub teacher: &'a [T],
}

/// Where a real operand begins.
#[derive(Clone, Copy, Debug)]
enum At {
    /// Piece of the activation arena, and offset in it.
    Act(usize, usize),
    /// Piece of the main gradients, and offset in it.
    Grad(usize, usize),
    Param(usize, usize),
    Buffer(usize, usize),
    Teacher(usize, usize),
}

/// Disjoint ranges of a space in ascending order, and whether each is written.
type Pieces = SmallVec<[(Range<usize>, bool); 8]>;

#[expect(clippy::large_enum_variant, reason = "nearly every step is a launch")]
enum Bound {
    Launch {
        kernel: Arc<dyn Kernel>,
        acts: Pieces,
        grads: Pieces,
        ints: Pieces,
        ins: SmallVec<[At; 8]>,
        outs: SmallVec<[At; 8]>,
        int_ins: SmallVec<[(usize, usize); 4]>,
        int_outs: SmallVec<[(usize, usize); 4]>,
        work: Option<usize>,
    },
    Collective {
        kind: Collective,
        src: Range<usize>,
        dst: Range<usize>,
    },
}

impl Bound {
    /// Name of the step's class in profiles, and its work by count.
    fn class(&self) -> (&'static str, Cost) {
        match self {
            Bound::Launch { kernel, .. } => (kernel.name(), kernel.cost()),
            Bound::Collective { kind, src, dst } => (kind.name(), Cost::new(0.0, (src.len() + dst.len()) as f64)),
        }
    }
}

/// Outputs of each type a kernel may have.
const MAX_OUTS: usize = 12;

/// Which part of a program to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Forward,
    Backward,
}

impl Program {
    /// Plans memory and binds every operand. The graph must be complete.
    pub fn bind(graph: Graph, tp: usize) -> Result<Program> {
        let plan = memory::plan(&graph);
        let mut steps = Vec::with_capacity(graph.steps.len());
        for step in &graph.steps {
            let bound = bind_step(&graph, &plan, &step.action, tp)
                .map_err(|e| e.at(format!("{} (a fault of the host)", graph.step_path(step))))?;
            steps.push(bound);
        }
        Ok(Program { graph, plan, steps })
    }

    pub fn arena<T: Element>(&self) -> Arena<T> {
        Arena { act: vec![T::ZERO; self.plan.act_len], int: vec![0; self.plan.int_len] }
    }

    /// Where a value lies in its space.
    pub fn range(&self, id: ValueId) -> Range<usize> {
        let v = self.graph.value(id);
        let start = self.plan.offsets[v.storage.0 as usize] + v.offset;
        start..start + v.rows.saturating_sub(1) * v.ld + if v.rows == 0 { 0 } else { v.cols }
    }

    /// A pinned activation.
    pub fn get<'a, T>(&self, arena: &'a Arena<T>, id: ValueId) -> &'a [T] {
        &arena.act[self.range(id)]
    }

    pub fn get_mut<'a, T>(&self, arena: &'a mut Arena<T>, id: ValueId) -> &'a mut [T] {
        &mut arena.act[self.range(id)]
    }

    pub fn get_int<'a, T>(&self, arena: &'a Arena<T>, id: ValueId) -> &'a [i32] {
        &arena.int[self.range(id)]
    }

    pub fn get_int_mut<'a, T>(&self, arena: &'a mut Arena<T>, id: ValueId) -> &'a mut [i32] {
        &mut arena.int[self.range(id)]
    }

    /// Runs one phase. `tp` is this rank's tensor-parallel group.
    pub fn run<T: Element>(
        &self,
        phase: Phase,
        arena: &mut Arena<T>,
        memory: &mut Memory<'_, T>,
        tp: &dyn Group<T>,
    ) -> Result<()> {
        self.run_profiled(phase, arena, memory, tp, None)
    }

    /// As [`Program::run`], adding the time of every step to a profile if there is one.
    pub fn run_profiled<T: Element>(
        &self,
        phase: Phase,
        arena: &mut Arena<T>,
        memory: &mut Memory<'_, T>,
        tp: &dyn Group<T>,
        mut profile: Option<&mut Profile>,
    ) -> Result<()> {
        for i in self.steps_of(phase) {
            let clock = profile.is_some().then(Instant::now);
            self.run_step(i, arena, memory, tp)?;
            if let (Some(profile), Some(clock)) = (profile.as_deref_mut(), clock) {
                let (class, cost) = self.steps[i].class();
                profile.add(class, clock.elapsed(), cost, T::BYTES);
            }
        }
        Ok(())
    }

    /// Runs the forward phase and shows every mark of the record when its value is there.
    pub fn run_observed<T: Element>(
        &self,
        arena: &mut Arena<T>,
        memory: &mut Memory<'_, T>,
        tp: &dyn Group<T>,
        mut see: impl FnMut(&Arena<T>, &Mark),
    ) -> Result<()> {
        let mut marks: Vec<&Mark> = self.graph.marks.iter().collect();
        marks.sort_by_key(|mark| mark.at);
        let mut marks = marks.into_iter().peekable();
        for i in self.steps_of(Phase::Forward) {
            while let Some(mark) = marks.next_if(|mark| mark.at <= i) {
                see(arena, mark);
            }
            self.run_step(i, arena, memory, tp)?;
        }
        marks.for_each(|mark| see(arena, mark));
        Ok(())
    }

    /// The steps of a phase.
    pub(super) fn steps_of(&self, phase: Phase) -> Range<usize> {
        match phase {
            Phase::Forward => 0..self.graph.forward_steps,
            Phase::Backward => self.graph.forward_steps..self.steps.len(),
        }
    }

    /// Where in the activations the numbers go that a collective brings.
    pub(super) fn received(&self, i: usize) -> Option<Range<usize>> {
        match &self.steps[i] {
            Bound::Collective { kind, dst, .. } if *kind != Collective::AllGatherInt => Some(dst.clone()),
            _ => None,
        }
    }

    /// Runs one step.
    pub(super) fn run_step<T: Element>(
        &self,
        i: usize,
        arena: &mut Arena<T>,
        memory: &mut Memory<'_, T>,
        tp: &dyn Group<T>,
    ) -> Result<()> {
        let place = |e: Error| e.at(self.graph.step_path(&self.graph.steps[i]));
        match &self.steps[i] {
            Bound::Launch { .. } => {
                launch(&self.steps[i], arena, memory);
                super::ops::custom::take_failure().map_or(Ok(()), |e| Err(place(e)))
            }
            Bound::Collective { kind, src, dst } => collective(*kind, src, dst, arena, tp).map_err(place),
        }
    }
}

fn bind_step(g: &Graph, plan: &Plan, action: &Action, tp: usize) -> Result<Bound> {
    let range = |storage: StorageId| {
        let start = plan.offsets[storage.0 as usize];
        start..start + g.storages[storage.0 as usize].len
    };
    match action {
        Action::Collective { kind, src, dst, len } => {
            let at = |o: &Operand, len: usize| {
                let start = plan.offsets[o.storage.0 as usize] + o.offset;
                start..start + len
            };
            let (src_len, dst_len) = match kind {
                Collective::AllReduce => (*len, *len),
                Collective::AllGather | Collective::AllGatherInt => (*len, len * tp),
                Collective::ReduceScatter => (len * tp, *len),
            };
            Ok(Bound::Collective { kind: *kind, src: at(src, src_len), dst: at(dst, dst_len) })
        }
        Action::Launch { kernel, ins, outs, ints, int_outs, work } => {
            if outs.len().max(int_outs.len()) > MAX_OUTS {
                return Err(Error::plugin(format!("{} has more than {MAX_OUTS} outputs", kernel.name())));
            }
            let (mut acts, mut grads, mut int_pieces) = (Pieces::new(), Pieces::new(), Pieces::new());
            let mut used: SmallVec<[(StorageId, bool); 16]> = SmallVec::new();
            for (operands, written) in [(ins, false), (ints, false), (outs, true), (int_outs, true)] {
                for operand in operands {
                    match used.iter().find(|(storage, _)| *storage == operand.storage) {
                        Some((_, before)) if *before || written => {
                            return Err(Error::plugin(format!(
                                "{} reads and writes one buffer at once",
                                kernel.name()
                            )));
                        }
                        Some(_) => {}
                        None => used.push((operand.storage, written)),
                    }
                }
            }
            used.extend(work.map(|storage| (storage, true)));
            for &(storage, written) in &used {
                let pieces = match g.storages[storage.0 as usize].space {
                    Space::Act => &mut acts,
                    Space::Grad => &mut grads,
                    Space::Int => &mut int_pieces,
                    Space::Param | Space::Buffer | Space::Teacher if written => {
                        return Err(Error::plugin(format!("{} writes a parameter", kernel.name())));
                    }
                    Space::Param | Space::Buffer | Space::Teacher => continue,
                };
                // Parameters that meet in one kernel twice have one main gradient.
                if !pieces.iter().any(|(r, _)| *r == range(storage)) {
                    pieces.push((range(storage), written));
                }
            }
            for pieces in [&mut acts, &mut grads, &mut int_pieces] {
                pieces.sort_by_key(|(range, _)| range.start);
            }
            let piece = |pieces: &Pieces, o: &Operand| {
                let range = range(o.storage);
                pieces.iter().position(|(r, _)| *r == range).unwrap_or(usize::MAX)
            };
            let at = |o: &Operand| match g.storages[o.storage.0 as usize].space {
                Space::Act | Space::Int => At::Act(piece(&acts, o), o.offset),
                Space::Grad => At::Grad(piece(&grads, o), o.offset),
                Space::Param => At::Param(range(o.storage).start + o.offset, range(o.storage).end),
                Space::Buffer => At::Buffer(range(o.storage).start + o.offset, range(o.storage).end),
                Space::Teacher => At::Teacher(range(o.storage).start + o.offset, range(o.storage).end),
            };
            let int_at = |o: &Operand| (piece(&int_pieces, o), o.offset);
            Ok(Bound::Launch {
                kernel: kernel.clone(),
                ins: ins.iter().map(at).collect(),
                outs: outs.iter().map(at).collect(),
                int_ins: ints.iter().map(int_at).collect(),
                int_outs: int_outs.iter().map(int_at).collect(),
                work: work.map(|s| piece(&acts, &Operand { storage: s, offset: 0 })),
                acts,
                grads,
                ints: int_pieces,
            })
        }
    }
}

/// A piece of an arena, lent out.
enum Piece<'a, T> {
    Read(&'a [T]),
    Write(&'a mut [T]),
    Taken,
}

fn lend<'a, T>(mut rest: &'a mut [T], pieces: &Pieces) -> SmallVec<[Piece<'a, T>; 8]> {
    let mut at = 0;
    let mut lent = SmallVec::new();
    for (range, written) in pieces {
        let (_, tail) = rest.split_at_mut(range.start - at);
        let (piece, tail) = tail.split_at_mut(range.len());
        rest = tail;
        at = range.end;
        lent.push(if *written { Piece::Write(piece) } else { Piece::Read(piece) });
    }
    lent
}

fn read<'a, T>(pieces: &[Piece<'a, T>], piece: usize, offset: usize) -> &'a [T] {
    match &pieces[piece] {
        Piece::Read(x) => &x[offset..],
        _ => &[],
    }
}

fn write<'a, T>(pieces: &mut [Piece<'a, T>], piece: usize, offset: usize) -> &'a mut [T] {
    match std::mem::replace(&mut pieces[piece], Piece::Taken) {
        Piece::Write(x) => &mut x[offset..],
        _ => &mut [],
    }
}

fn launch<T: Element>(bound: &Bound, arena: &mut Arena<T>, memory: &mut Memory<'_, T>) {
    let Bound::Launch { kernel, acts, grads, ints, ins, outs, int_ins, int_outs, work } = bound else { return };
    let mut act = lend(&mut arena.act, acts);
    let mut grad = lend(memory.grads, grads);
    let mut int = lend(&mut arena.int, ints);
    let in_slices: SmallVec<[&[T]; 8]> = ins
        .iter()
        .map(|at| match *at {
            At::Act(piece, offset) => read(&act, piece, offset),
            At::Grad(piece, offset) => read(&grad, piece, offset),
            At::Param(start, end) => &memory.params[start..end],
            At::Buffer(start, end) => &memory.buffers[start..end],
            At::Teacher(start, end) => &memory.teacher[start..end],
        })
        .collect();
    let int_slices: SmallVec<[&[i32]; 4]> = int_ins.iter().map(|&(piece, offset)| read(&int, piece, offset)).collect();
    // Plain arrays: lending them to the kernel for as long as the slices live must not wait for a destructor.
    let mut out_slices: [&mut [T]; MAX_OUTS] = Default::default();
    for (slice, at) in out_slices.iter_mut().zip(outs) {
        *slice = match *at {
            At::Act(piece, offset) => write(&mut act, piece, offset),
            At::Grad(piece, offset) => write(&mut grad, piece, offset),
            At::Param(..) | At::Buffer(..) | At::Teacher(..) => &mut [],
        };
    }
    let mut int_out_slices: [&mut [i32]; MAX_OUTS] = Default::default();
    for (slice, &(piece, offset)) in int_out_slices.iter_mut().zip(int_outs) {
        *slice = write(&mut int, piece, offset);
    }
    let work: &mut [T] = match work {
        Some(piece) => write(&mut act, *piece, 0),
        None => &mut [],
    };
    T::launch(
        kernel.as_ref(),
        Args {
            ins: &in_slices,
            outs: &mut out_slices[..outs.len()],
            ints: &int_slices,
            int_outs: &mut int_out_slices[..int_outs.len()],
            work,
        },
    );
}

/// Disjoint source and destination of one arena.
fn two<'a, T>(x: &'a mut [T], src: &Range<usize>, dst: &Range<usize>) -> (&'a [T], &'a mut [T]) {
    if src.start < dst.start {
        let (low, high) = x.split_at_mut(dst.start);
        (&low[src.clone()], &mut high[..dst.len()])
    } else {
        let (low, high) = x.split_at_mut(src.start);
        (&high[..src.len()], &mut low[dst.clone()])
    }
}

fn collective<T: Element>(
    kind: Collective,
    src: &Range<usize>,
    dst: &Range<usize>,
    arena: &mut Arena<T>,
    tp: &dyn Group<T>,
) -> Result<()> {
    match kind {
        Collective::AllReduce => {
            if src != dst {
                let (src, dst) = two(&mut arena.act, src, dst);
                dst.copy_from_slice(src);
            }
            tp.all_reduce(&mut arena.act[dst.clone()])
        }
        Collective::AllGather => {
            let (src, dst) = two(&mut arena.act, src, dst);
            tp.all_gather(src, dst)
        }
        Collective::ReduceScatter => {
            let (src, dst) = two(&mut arena.act, src, dst);
            tp.reduce_scatter(src, dst)
        }
        Collective::AllGatherInt => {
            let (src, dst) = two(&mut arena.int, src, dst);
            tp.all_gather_i32(src, dst)
        }
    }
}

//! The backward pass of a record: walks the tape in reverse and appends steps to the same graph.
//!
//! A gradient is kept per value in up to two parts: *full* (this rank has the value's whole gradient) and *partial* (the
//! gradient is the sum over tensor-parallel ranks). Whoever asks for a gradient gets it whole; the reduction is appended
//! where it is asked for. Gradients of views are windows on their base's gradient, so a split costs no copy.
//! Parameter gradients add into the rank's main gradients; the reductions they still need are noted and done once a step.

use super::graph::{Action, Collective, Graph, Space, StorageId, ValueId};
use gantry_kernels::Kernel;
use gantry_kernels::cpu::elementwise::{Fill, Scale};
use gantry_plugin_api::ops::RegionKind;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::error::{Error, Result};

/// The backward rule of one operator call, with what it saved.
pub trait Backward: Send + Sync {
    /// Appends the gradients of the inputs, given those of the outputs.
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()>;
}

/// Where to write a gradient.
#[derive(Clone, Copy, Debug)]
pub struct GradOut {
    pub value: ValueId,
    /// Add to what is there instead of overwriting.
    pub acc: bool,
}

/// A gradient under construction.
#[derive(Clone, Debug)]
struct Buf {
    value: ValueId,
    /// Column ranges written so far, (first, length).
    written: Vec<(usize, usize)>,
}

#[derive(Clone, Debug, Default)]
struct Entry {
    full: Option<Buf>,
    partial: Option<Buf>,
}

/// The backward pass in the making.
pub struct Backprop<'g> {
    pub g: &'g mut Graph,
    grads: BTreeMap<ValueId, Entry>,
    /// Gradients that live in a storage; more than one after a pass-through.
    sharers: BTreeMap<StorageId, usize>,
}

/// Appends the backward pass of every loss term, and of outputs whose gradients arrive in `seeds`: (output, gradient).
/// Returns the gradients of `wanted`, complete and kept for the host to read; none where nothing depends on them.
pub fn append(g: &mut Graph, seeds: &[(ValueId, ValueId)], wanted: &[ValueId]) -> Result<Vec<Option<ValueId>>> {
    let mut bw = Backprop { g, grads: BTreeMap::new(), sharers: BTreeMap::new() };
    for term in bw.g.losses.clone() {
        if bw.g.value(term.value).needs_grad {
            bw.seed(term.value, term.seed);
        }
    }
    for &(value, grad) in seeds {
        bw.seed(value, grad);
    }
    bw.walk()?;
    let mut grads = Vec::new();
    for &value in wanted {
        let grad = bw.dy(value);
        if let Some(grad) = grad {
            bw.g.pin(grad);
        }
        grads.push(grad);
    }
    Ok(grads)
}

impl Backprop<'_> {
    fn walk(&mut self) -> Result<()> {
        let mut recomputed = BTreeSet::new();
        let nodes = std::mem::take(&mut self.g.nodes);
        let mut result = Ok(());
        for node in nodes.iter().rev() {
            let recompute = self.recompute_region(node.region);
            match recompute {
                Some(region) if recomputed.insert(region) => self.recompute(region),
                None => self.g.remap.clear(),
                _ => {}
            }
            (self.g.region, self.g.call) = (node.region, node.call);
            if node.outputs.iter().any(|&out| self.has_grad(out)) {
                result = node.op.backward(self);
                if result.is_err() {
                    break;
                }
            }
            for &out in &node.outputs {
                self.forget(out);
            }
        }
        self.g.remap.clear();
        self.g.nodes = nodes;
        result
    }

    /// The outermost recompute region around `region`.
    fn recompute_region(&self, region: u32) -> Option<u32> {
        let mut found = None;
        let mut at = Some(region);
        while let Some(r) = at {
            let info = self.g.regions.get(r as usize)?;
            if info.kind == RegionKind::Recompute {
                found = Some(r);
            }
            at = info.parent;
        }
        found
    }

    /// Runs the region's forward steps again on fresh storages; until the walk leaves it, saved values mean those.
    fn recompute(&mut self, region: u32) {
        self.g.remap.clear();
        let (begin, end) = self.g.regions[region as usize].steps;
        let steps = self.g.steps[begin..end].to_vec();
        for mut step in steps {
            let writes: Vec<StorageId> = match &step.action {
                Action::Launch { outs, int_outs, work, .. } => {
                    outs.iter().chain(int_outs).map(|o| o.storage).chain(*work).collect()
                }
                Action::Collective { dst, .. } => vec![dst.storage],
            };
            for storage in writes {
                if !self.g.remap.contains_key(&storage) {
                    let (space, len) = {
                        let s = &self.g.storages[storage.0 as usize];
                        (s.space, s.len)
                    };
                    if matches!(space, Space::Act | Space::Int) {
                        let fresh = self.g.storage(space, len);
                        self.g.remap.insert(storage, fresh);
                    }
                }
            }
            let remap = &self.g.remap;
            let map = |storage: &mut StorageId| {
                if let Some(&fresh) = remap.get(storage) {
                    *storage = fresh;
                }
            };
            match &mut step.action {
                Action::Launch { ins, outs, ints, int_outs, work, .. } => {
                    ins.iter_mut().chain(outs).chain(ints).chain(int_outs).for_each(|o| map(&mut o.storage));
                    work.iter_mut().for_each(map);
                }
                Action::Collective { src, dst, .. } => {
                    map(&mut src.storage);
                    map(&mut dst.storage);
                }
            }
            self.g.steps.push(step);
        }
    }

    fn root(&self, value: ValueId) -> (ValueId, usize) {
        self.g.value(value).base.unwrap_or((value, 0))
    }

    /// Whether any gradient has reached `value`.
    pub fn has_grad(&self, value: ValueId) -> bool {
        self.grads.get(&self.root(value).0).is_some_and(|e| e.full.is_some() || e.partial.is_some())
    }

    fn seed(&mut self, value: ValueId, grad: ValueId) {
        // Counted once more than it has owners, so that the host's input is never added into.
        *self.sharers.entry(self.g.value(grad).storage).or_default() += 1;
        self.pass(value, grad);
    }

    fn forget(&mut self, value: ValueId) {
        let (root, _) = self.root(value);
        if root != value {
            return;
        }
        if let Some(entry) = self.grads.remove(&value) {
            for buf in [entry.full, entry.partial].into_iter().flatten() {
                let storage = self.g.value(buf.value).storage;
                if let Some(n) = self.sharers.get_mut(&storage) {
                    *n -= 1;
                }
            }
        }
    }

    /// The whole gradient of `value`, or none if nothing depends on it. For a value that is itself a partial sum this is
    /// the gradient of the sum, which every rank's term has.
    pub fn dy(&mut self, value: ValueId) -> Option<ValueId> {
        let (root, col) = self.root(value);
        self.complete(root)?;
        let entry = self.grads.get(&root)?;
        let grad = entry.full.as_ref()?.value;
        if root == value { Some(grad) } else { Some(self.window(grad, col, value)) }
    }

    /// Gradient parts as they are: (whole, still to be summed over tp). For operators that can reduce better themselves.
    pub fn dy_parts(&mut self, value: ValueId) -> (Option<ValueId>, Option<ValueId>) {
        let (root, _) = self.root(value);
        debug_assert_eq!(root, value, "redistribution never works on views");
        self.fill_gaps(root);
        match self.grads.get(&root) {
            Some(entry) => (entry.full.as_ref().map(|b| b.value), entry.partial.as_ref().map(|b| b.value)),
            None => (None, None),
        }
    }

    /// Gives every gap of the parts zeros.
    fn fill_gaps(&mut self, root: ValueId) {
        let Some(entry) = self.grads.get_mut(&root) else { return };
        let mut fills = Vec::new();
        for buf in [&mut entry.full, &mut entry.partial].into_iter().flatten() {
            let cols = self.g.value(buf.value).cols;
            fills.extend(gaps(&buf.written, 0, cols).into_iter().map(|gap| (buf.value, gap)));
            buf.written = vec![(0, cols)];
        }
        for (value, (col, len)) in fills {
            self.zero(value, col, len);
        }
    }

    /// Sums the partial part into the full one.
    fn complete(&mut self, root: ValueId) -> Option<()> {
        self.fill_gaps(root);
        let entry = self.grads.get(&root)?;
        if let Some(partial) = entry.partial.clone() {
            let full = entry.full.clone();
            let partial = self.own(partial);
            let value = self.g.value(partial.value);
            let len = value.len();
            self.g.emit_collective(Collective::AllReduce, partial.value, partial.value, len);
            if let Some(full) = &full {
                self.copy(full.value, partial.value, true);
                self.release(full.value);
            }
            let entry = self.grads.get_mut(&root)?;
            entry.full = Some(partial);
            entry.partial = None;
        }
        Some(())
    }

    fn release(&mut self, grad: ValueId) {
        let storage = self.g.value(grad).storage;
        if let Some(n) = self.sharers.get_mut(&storage) {
            *n -= 1;
        }
    }

    /// Where to write the gradient of `value`; `partial` says that what will be written is this rank's term of a sum over
    /// tp. None if `value` needs no gradient.
    pub fn dx(&mut self, value: ValueId, partial: bool) -> Option<GradOut> {
        if !self.g.value(value).needs_grad {
            return None;
        }
        let (root, col) = self.root(value);
        let cols = self.g.value(value).cols;
        let buf = {
            let entry = self.grads.entry(root).or_default();
            let slot = if partial { &mut entry.partial } else { &mut entry.full };
            slot.clone()
        };
        let mut buf = match buf {
            Some(buf) => self.own(buf),
            None => {
                let value = self.fresh_grad(root);
                Buf { value, written: Vec::new() }
            }
        };
        let missing = gaps(&buf.written, col, cols);
        let acc = match missing.as_slice() {
            [] => true,
            [(at, len)] if *at == col && *len == cols => false,
            some => {
                for &(at, len) in some {
                    self.zero(buf.value, at, len);
                }
                true
            }
        };
        if !acc || !missing.is_empty() {
            buf.written.push((col, cols));
        }
        let grad = buf.value;
        let entry = self.grads.entry(root).or_default();
        *(if partial { &mut entry.partial } else { &mut entry.full }) = Some(buf);
        let value = if root == value { grad } else { self.window(grad, col, value) };
        Some(GradOut { value, acc })
    }

    /// Passes the whole gradient `dy` through to `value` unchanged, without a copy where that is possible.
    pub fn pass(&mut self, value: ValueId, dy: ValueId) {
        self.pass_part(value, dy, false);
    }

    /// As [`Backprop::pass`], for a gradient that is a term of a sum over tp if `partial`.
    pub fn pass_part(&mut self, value: ValueId, dy: ValueId, partial: bool) {
        if !self.g.value(value).needs_grad {
            return;
        }
        let (root, _) = self.root(value);
        let fresh = {
            let entry = self.grads.entry(root).or_default();
            if partial { entry.partial.is_none() } else { entry.full.is_none() }
        };
        if fresh && root == value {
            let cols = self.g.value(value).cols;
            *self.sharers.entry(self.g.value(dy).storage).or_default() += 1;
            let buf = Some(Buf { value: dy, written: vec![(0, cols)] });
            let entry = self.grads.entry(root).or_default();
            *(if partial { &mut entry.partial } else { &mut entry.full }) = buf;
        } else if let Some(out) = self.dx(value, partial) {
            self.copy(dy, out.value, out.acc);
        }
    }

    /// A gradient buffer that nobody else reads: itself, or a copy.
    fn own(&mut self, buf: Buf) -> Buf {
        let storage = self.g.value(buf.value).storage;
        if self.sharers.get(&storage).copied().unwrap_or(1) <= 1 {
            return buf;
        }
        let fresh = self.g.fresh_like(buf.value, "grad");
        *self.sharers.entry(self.g.value(fresh).storage).or_default() += 1;
        self.copy(buf.value, fresh, false);
        self.release(buf.value);
        Buf { value: fresh, written: buf.written }
    }

    fn fresh_grad(&mut self, root: ValueId) -> ValueId {
        let grad = self.g.fresh_like(root, "grad");
        let value = &mut self.g.values[grad.0 as usize];
        value.partial = false;
        *self.sharers.entry(value.storage).or_default() += 1;
        grad
    }

    /// Columns of `grad` that belong to the view `like`.
    fn window(&mut self, grad: ValueId, col: usize, like: ValueId) -> ValueId {
        let grad = self.g.value(grad).clone();
        let like = self.g.value(like).clone();
        self.g.push_value(super::graph::Value {
            storage: grad.storage,
            offset: grad.offset + col,
            ld: grad.ld,
            base: None,
            needs_grad: false,
            partial: false,
            ..like
        })
    }

    fn zero(&mut self, value: ValueId, col: usize, len: usize) {
        let v = self.g.value(value).clone();
        let fill = Fill { rows: v.rows, cols: len, ld: v.ld, value: 0.0 };
        let window = self.g.push_value(super::graph::Value { offset: v.offset + col, cols: len, ..v });
        self.g.emit(fill, &[], &[window], &[], &[]);
    }

    /// dst = src or dst += src.
    pub fn copy(&mut self, src: ValueId, dst: ValueId, acc: bool) {
        copy(self.g, src, dst, acc);
    }

    /// The main gradient of a parameter value, to be added into. `partial`: what is added is this rank's term of a sum
    /// over tp.
    pub fn param_grad(&mut self, param: ValueId, partial: bool) -> Result<Option<ValueId>> {
        let value = self.g.value(param).clone();
        let Some(entry) = value.param else {
            return Err(Error::plugin(format!("{}: expected a parameter here", value.name)));
        };
        if !value.needs_grad {
            return Ok(None);
        }
        let fixed = self.g.storages[value.storage.0 as usize].clone();
        let storage = self.g.storage(Space::Grad, fixed.len);
        self.g.storages[storage.0 as usize].fixed = fixed.fixed;
        let flags = if partial { &mut self.g.partial_grads } else { &mut self.g.full_grads };
        if flags.len() <= entry {
            flags.resize(entry + 1, false);
        }
        flags[entry] = true;
        Ok(Some(self.g.push_value(super::graph::Value { storage, base: None, needs_grad: false, ..value })))
    }

    /// As [`Backprop::param_grad`], with scratch for a parameter that takes no gradient.
    pub fn param_grad_or_scratch(&mut self, param: ValueId, partial: bool) -> Result<ValueId> {
        match self.param_grad(param, partial)? {
            Some(grad) => Ok(grad),
            None => {
                let value = self.g.value(param).clone();
                let len = self.g.storages[value.storage.0 as usize].len;
                let storage = self.g.storage(Space::Act, len);
                let scratch = super::graph::Value { storage, needs_grad: false, param: None, ..value };
                Ok(self.g.push_value(scratch))
            }
        }
    }

    /// As [`Backprop::dx`], with scratch for a value that needs no gradient.
    pub fn dx_or_scratch(&mut self, value: ValueId, partial: bool) -> GradOut {
        match self.dx(value, partial) {
            Some(out) => out,
            None => GradOut { value: self.g.fresh_like(value, "unused"), acc: false },
        }
    }

    /// The gradient of `value` for a kernel that always adds: zeros if nothing is there yet.
    pub fn dx_adding_or_scratch(&mut self, value: ValueId, partial: bool) -> ValueId {
        let out = self.dx_or_scratch(value, partial);
        if !out.acc {
            let cols = self.g.value(out.value).cols;
            self.zero(out.value, 0, cols);
        }
        out.value
    }

    /// Columns `col .. col + cols` of a gradient.
    pub fn columns(&mut self, grad: ValueId, col: usize, cols: usize) -> ValueId {
        let v = self.g.value(grad).clone();
        self.g.push_value(super::graph::Value { offset: v.offset + col, cols, ..v })
    }

    /// Appends a kernel launch.
    pub fn emit(
        &mut self,
        kernel: impl Kernel,
        ins: &[ValueId],
        outs: &[ValueId],
        ints: &[ValueId],
        int_outs: &[ValueId],
    ) {
        self.g.emit(kernel, ins, outs, ints, int_outs);
    }

    pub fn value(&self, id: ValueId) -> &super::graph::Value {
        self.g.value(id)
    }

    /// Row stride of a value.
    pub fn ld(&self, id: ValueId) -> usize {
        self.g.value(id).ld
    }

    /// A scratch value of `rows` x `cols`.
    pub fn scratch(&mut self, name: &str, rows: usize, cols: usize) -> ValueId {
        scratch(self.g, name, rows, cols)
    }
}

/// dst = src or dst += src, row by row.
pub fn copy(g: &mut Graph, src: ValueId, dst: ValueId, acc: bool) {
    let (s, d) = (g.value(src), g.value(dst));
    debug_assert_eq!((s.rows, s.cols), (d.rows, d.cols), "copy of {} to {}", s.text(), d.text());
    let kernel =
        Scale { rows: s.rows, cols: s.cols, ld_x: s.ld, ld_y: d.ld, factor: 1.0, scalar: false, acc, in_place: false };
    g.emit(kernel, &[src], &[dst], &[], &[]);
}

/// A plain real value of `rows` x `cols` without axes.
pub fn scratch(g: &mut Graph, name: &str, rows: usize, cols: usize) -> ValueId {
    use super::dims::Dim;
    let storage = g.storage(Space::Act, rows * cols);
    g.push_value(super::graph::Value {
        name: Arc::from(name),
        dtype: super::graph::DType::Real,
        dims: [Dim::plain("rows", rows), Dim::plain("cols", cols)].into_iter().collect(),
        rows,
        cols,
        storage,
        offset: 0,
        ld: cols,
        partial: false,
        seq: false,
        needs_grad: false,
        base: None,
        param: None,
    })
}

/// Parts of [first, first + len) that `written` does not cover.
fn gaps(written: &[(usize, usize)], first: usize, len: usize) -> Vec<(usize, usize)> {
    let mut sorted = written.to_vec();
    sorted.sort_unstable();
    let (mut at, end) = (first, first + len);
    let mut gaps = Vec::new();
    for (start, n) in sorted {
        if start + n <= at {
            continue;
        }
        if start >= end {
            break;
        }
        if start > at {
            gaps.push((at, start - at));
        }
        at = start + n;
    }
    if at < end {
        gaps.push((at, end - at));
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_was_not_written() {
        assert_eq!(gaps(&[], 2, 3), [(2, 3)]);
        assert_eq!(gaps(&[(0, 10)], 2, 3), []);
        assert_eq!(gaps(&[(4, 2), (0, 1)], 0, 8), [(1, 3), (6, 2)]);
        assert_eq!(gaps(&[(3, 1)], 3, 2), [(4, 1)]);
    }
}

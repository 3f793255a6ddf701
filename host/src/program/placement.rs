//! Placement over the tensor-parallel group: replicated, rows spread (sequence parallel), or a partial sum.
//!
//! Operators state which placement they need; this file appends the collective that gets there, and its gradient.

use super::backprop::{Backprop, Backward, copy};
use super::graph::{Collective, Space, Value, ValueId};
use super::recorder::Recorder;
use crate::error::{Error, Result};

/// A placement an operator can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// The whole value on every rank.
    Replicated,
    /// Contiguous rows spread over the ranks.
    Rows,
}

impl Recorder<'_> {
    /// The value with every rank holding all of it.
    pub fn replicated(&mut self, x: ValueId) -> Result<ValueId> {
        self.redistribute(x, Target::Replicated)
    }

    /// The value as the residual stream is placed: rows spread under sequence parallelism, replicated otherwise.
    pub fn stream(&mut self, x: ValueId) -> Result<ValueId> {
        let target =
            if self.cx.grid.sequence_parallel && self.cx.grid.tp > 1 { Target::Rows } else { Target::Replicated };
        self.redistribute(x, target)
    }

    /// A value whose terms are summed; its rows may stay spread.
    pub fn summed(&mut self, x: ValueId) -> Result<ValueId> {
        if self.g.value(x).partial { self.stream(x) } else { Ok(x) }
    }

    /// Both values with one placement, rows spread if either is.
    pub fn aligned(&mut self, a: ValueId, b: ValueId) -> Result<(ValueId, ValueId)> {
        let (va, vb) = (self.g.value(a), self.g.value(b));
        if va.partial && vb.partial || !va.partial && !vb.partial && va.seq == vb.seq {
            return Ok((a, b));
        }
        Ok((self.stream(a)?, self.stream(b)?))
    }

    fn redistribute(&mut self, x: ValueId, target: Target) -> Result<ValueId> {
        let v = self.g.value(x).clone();
        let have = if v.seq { Target::Rows } else { Target::Replicated };
        if self.cx.grid.tp == 1 || (!v.partial && have == target) {
            return Ok(x);
        }
        if let Some(&y) = self.placed.get(&(x, target)) {
            return Ok(y);
        }
        let ranks = self.cx.grid.tp;
        if v.seq && v.partial {
            return Err(Error::plugin(format!("{}: rows spread and partial at once", v.name)));
        }
        let rows = match (have, target) {
            (Target::Replicated, Target::Rows) => {
                if !v.rows.is_multiple_of(ranks) {
                    return Err(Error::recipe(format!(
                        "sequence parallelism spreads {} rows over grid.tp = {ranks} ranks, which does not divide them",
                        v.rows
                    )));
                }
                v.rows / ranks
            }
            (Target::Rows, Target::Replicated) => v.rows * ranks,
            _ => v.rows,
        };
        let taping = self.taping();
        let y = self.g.fresh_like(x, &v.name);
        let space = if v.dtype == super::graph::DType::I32 { Space::Int } else { Space::Act };
        let storage = self.g.storage(space, rows * v.cols);
        let value = &mut self.g.values[y.0 as usize];
        (value.rows, value.storage, value.partial, value.seq) = (rows, storage, false, target == Target::Rows);
        value.needs_grad = v.needs_grad && taping;
        let src = self.contiguous(x);
        let tp = self.cx.place.tp;
        move_rows(&mut self.g, src, y, v.partial, tp)?;
        if v.needs_grad && taping {
            self.node(Redistribute { x, y, tp }, &[y]);
        }
        self.placed.insert((x, target), y);
        Ok(y)
    }

    /// The same data with rows back to back.
    pub fn contiguous(&mut self, x: ValueId) -> ValueId {
        if self.g.value(x).contiguous() {
            return x;
        }
        let y = self.g.fresh_like(x, "contiguous");
        copy(&mut self.g, x, y, false);
        y
    }
}

/// Appends the data movement from `src` to `dst`; `partial`: the terms in `src` are summed on the way.
fn move_rows(g: &mut super::graph::Graph, src: ValueId, dst: ValueId, partial: bool, tp: usize) -> Result<()> {
    let (s, d) = (g.value(src).clone(), g.value(dst).clone());
    let int = s.dtype == super::graph::DType::I32;
    match (partial, s.rows.cmp(&d.rows)) {
        (true, std::cmp::Ordering::Equal) => g.emit_collective(Collective::AllReduce, src, dst, s.len()),
        (true, std::cmp::Ordering::Greater) => g.emit_collective(Collective::ReduceScatter, src, dst, d.len()),
        (false, std::cmp::Ordering::Less) if int => g.emit_collective(Collective::AllGatherInt, src, dst, s.len()),
        (false, std::cmp::Ordering::Less) => g.emit_collective(Collective::AllGather, src, dst, s.len()),
        (false, std::cmp::Ordering::Greater) if !int => {
            let mine = g.push_value(Value { offset: s.offset + tp * d.rows * s.ld, rows: d.rows, ..s });
            copy(g, mine, dst, false);
        }
        _ => return Err(Error::plugin(format!("{}: no way from {} to {}", s.name, s.text(), d.text()))),
    }
    Ok(())
}

/// Gradient of a change of placement.
struct Redistribute {
    x: ValueId,
    y: ValueId,
    tp: usize,
}

impl Backward for Redistribute {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let (x, y) = (bw.value(self.x).clone(), bw.value(self.y).clone());
        if x.rows == y.rows {
            // A partial sum became whole: every term takes the whole gradient.
            if let Some(dy) = bw.dy(self.y) {
                bw.pass(self.x, dy);
            }
            return Ok(());
        }
        if x.partial {
            // Reduced and spread: gather the gradient of all rows.
            if let Some(dy) = bw.dy(self.y) {
                spread(bw, self.x, dy, false, self.tp)?;
            }
            return Ok(());
        }
        let (full, partial) = bw.dy_parts(self.y);
        if y.rows > x.rows {
            // Gathered: sum the ranks' terms and keep this rank's rows.
            if let Some(partial) = partial {
                spread(bw, self.x, partial, true, self.tp)?;
            }
            if let Some(full) = full {
                spread(bw, self.x, full, false, self.tp)?;
            }
        } else if let Some(dy) = bw.dy(self.y) {
            spread(bw, self.x, dy, false, self.tp)?;
        }
        Ok(())
    }
}

/// Moves `dy` to the placement of `x` and adds it to the gradient of `x`.
fn spread(bw: &mut Backprop<'_>, x: ValueId, dy: ValueId, partial: bool, tp: usize) -> Result<()> {
    let dy = if bw.value(dy).contiguous() {
        dy
    } else {
        let packed = bw.g.fresh_like(dy, "contiguous");
        bw.copy(dy, packed, false);
        packed
    };
    let Some(out) = bw.dx(x, false) else { return Ok(()) };
    let target = bw.value(out.value).clone();
    if !out.acc && target.contiguous() {
        return move_rows(bw.g, dy, out.value, partial, tp);
    }
    let moved = bw.g.fresh_like(out.value, "grad");
    move_rows(bw.g, dy, moved, partial, tp)?;
    bw.copy(moved, out.value, out.acc);
    Ok(())
}

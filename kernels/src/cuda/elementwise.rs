//! Launchers of `elementwise.cu`.

use super::error::Result;
use super::launch::{Launch, Matrix, args, fours};
use crate::cpu::elementwise::{Binary, BinaryOp, Fill, Scale};

/// How [rows, cols] operands are walked: dense ones as one long row, and four elements at a time where possible.
pub(super) struct Walk {
    pub rows: usize,
    pub cols: usize,
    pub ld: Vec<usize>,
    pub fours: bool,
}

/// Threads of a block.
const THREADS: usize = 256;

impl Walk {
    pub fn new(rows: usize, cols: usize, operands: &[Matrix]) -> Self {
        if operands.iter().any(|m| m.ld != cols) && rows > 1 {
            return Walk::by_rows(rows, cols, operands);
        }
        let cols = rows * cols;
        let row: Vec<Matrix> = operands.iter().map(|m| Matrix { ld: cols, ..*m }).collect();
        Walk::by_rows(1, cols, &row)
    }

    /// Row by row even where rows touch.
    pub fn by_rows(rows: usize, cols: usize, operands: &[Matrix]) -> Self {
        Walk { rows, cols, ld: operands.iter().map(|m| m.ld).collect(), fours: fours(cols, operands) }
    }

    /// Each block has work for a few rounds of its threads; the kernels walk what the grid does not cover.
    pub fn grid(&self) -> (usize, usize) {
        const BLOCKS: usize = 132 * 16;
        if self.rows == 0 || self.cols == 0 {
            return (0, 0);
        }
        let x = self.cols.div_ceil(THREADS * if self.fours { 4 } else { 1 }).min(BLOCKS);
        (x, self.rows.min(BLOCKS.div_ceil(x)))
    }

    pub fn block(&self) -> (u32, u32) {
        (THREADS as u32, 1)
    }

    pub fn pick(&self, one: &'static str, four: &'static str) -> &'static str {
        if self.fours { four } else { one }
    }
}

pub(super) fn binary(k: &Binary, cx: &Launch<'_>) -> Result<()> {
    let a = cx.input_rows(0, k.rows, k.cols, k.ld_a)?;
    let b = cx.input_rows(1, k.rows, k.cols, k.ld_b)?;
    let y = cx.output_rows(0, k.rows, k.cols, k.ld_y)?;
    let op: usize = match k.op {
        BinaryOp::Add => 0,
        BinaryOp::Sub => 1,
        BinaryOp::Mul => 2,
    };
    let walk = Walk::new(k.rows, k.cols, &[a, b, y]);
    cx.run(
        walk.pick("binary_1", "binary_4"),
        walk.grid(),
        walk.block(),
        args![a.ptr, b.ptr, y.ptr, walk.rows, walk.cols, walk.ld[0], walk.ld[1], walk.ld[2], op, k.acc],
    )
}

pub(super) fn scale(k: &Scale, cx: &Launch<'_>) -> Result<()> {
    let y = cx.output_rows(0, k.rows, k.cols, k.ld_y)?;
    let x = if k.in_place { y } else { cx.input_rows(0, k.rows, k.cols, k.ld_x)? };
    let s = if k.scalar { Some(cx.input(usize::from(!k.in_place), 1)?) } else { None };
    let walk = Walk::new(k.rows, k.cols, &[x, y]);
    cx.run(
        walk.pick("scale_1", "scale_4"),
        walk.grid(),
        walk.block(),
        args![x.ptr, s, y.ptr, walk.rows, walk.cols, walk.ld[0], walk.ld[1], k.factor, k.acc && !k.in_place],
    )
}

pub(super) fn fill(k: &Fill, cx: &Launch<'_>) -> Result<()> {
    let y = cx.output_rows(0, k.rows, k.cols, k.ld)?;
    fill_rows(cx, y, k.rows, k.cols, k.value)
}

/// y[rows, cols] = value.
pub(super) fn fill_rows(cx: &Launch<'_>, y: Matrix, rows: usize, cols: usize, value: f64) -> Result<()> {
    let walk = Walk::new(rows, cols, &[y]);
    cx.run(
        walk.pick("fill_1", "fill_4"),
        walk.grid(),
        walk.block(),
        args![y.ptr, walk.rows, walk.cols, walk.ld[0], value],
    )
}

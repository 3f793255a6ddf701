//! Matrix products through cuBLASLt, one per pair of blocks as on the CPU, and launchers of `gemm.cu`.

use super::blas::Product;
use super::elementwise::fill_rows;
use super::error::Result;
use super::launch::{DeviceBlocks, Launch, Matrix, args};
use super::memory::BYTES;
use crate::blocks::Blocks;
use crate::cpu::gemm::{Gemm, LinearBackwardInput, LinearBackwardWeight, LinearForward};

impl Matrix {
    /// The matrix from row `row` and column `col` on.
    fn from(self, row: usize, col: usize) -> Matrix {
        Matrix { ptr: self.ptr + ((row * self.ld + col) * BYTES) as u64, ..self }
    }
}

/// C[m, n] = alpha op(A) op(B), added to C when `acc`; an empty inner dimension gives zeros. Callers have checked that the
/// operands lie inside their spans.
fn product(cx: &Launch<'_>, p: Product) -> Result<()> {
    if p.m == 0 || p.n == 0 {
        return Ok(());
    }
    if p.k == 0 {
        return if p.acc { Ok(()) } else { fill_rows(cx, p.c, p.m, p.n, 0.0) };
    }
    // SAFETY: the callers below checked every operand's extent against its live span.
    unsafe { cx.device.blas().product(cx.device.stream(), &p) }
}

pub(super) fn gemm(k: &Gemm, cx: &Launch<'_>) -> Result<()> {
    let (a_rows, a_cols) = if k.ta { (k.k, k.m) } else { (k.m, k.k) };
    let (b_rows, b_cols) = if k.tb { (k.n, k.k) } else { (k.k, k.n) };
    let a = cx.input_rows(0, a_rows, a_cols, k.lda)?;
    let b = cx.input_rows(1, b_rows, b_cols, k.ldb)?;
    let c = cx.output_rows(0, k.m, k.n, k.ldc)?;
    let (m, n, alpha) = (k.m, k.n, k.alpha as f32);
    product(cx, Product { m, n, k: k.k, a, ta: k.ta, b, tb: k.tb, c, alpha, acc: k.acc })
}

/// Elements that a parameter with rows `ld_w` apart must have for these blocks.
fn stored(rows: &Blocks, cols: &Blocks, ld_w: usize) -> usize {
    if rows.is_empty() || cols.is_empty() { 0 } else { (rows.end() - 1) * ld_w + cols.end() }
}

pub(super) fn linear_forward(k: &LinearForward, cx: &Launch<'_>) -> Result<()> {
    let (n, inner) = (k.rows.len(), k.cols.len());
    let x = cx.input_rows(0, k.tokens, inner, k.ld_x)?;
    let w = Matrix { ptr: cx.input(1, stored(&k.rows, &k.cols, k.ld_w))?, ld: k.ld_w };
    let y = cx.output_rows(0, k.tokens, n, k.ld_y)?;
    if k.tokens == 0 {
        return Ok(());
    }
    if k.bias {
        let bias = cx.input(2, k.rows.end())?;
        let blocks = DeviceBlocks::new(&k.rows)?;
        cx.run(
            "bias_rows",
            (n.div_ceil(128), k.tokens.min(256)),
            (128, 1),
            args![bias, y.ptr, k.tokens, n, y.ld, k.acc, &blocks],
        )?;
    }
    for (row, y_col, n) in k.rows.iter() {
        let mut acc = k.acc || k.bias;
        let c = y.from(0, y_col);
        for (col, x_col, inner) in k.cols.iter() {
            let (a, b) = (x.from(0, x_col), w.from(row, col));
            product(cx, Product { m: k.tokens, n, k: inner, a, ta: false, b, tb: true, c, alpha: 1.0, acc })?;
            acc = true;
        }
        if !acc {
            fill_rows(cx, c, k.tokens, n, 0.0)?;
        }
    }
    Ok(())
}

pub(super) fn linear_backward_input(k: &LinearBackwardInput, cx: &Launch<'_>) -> Result<()> {
    let dy = cx.input_rows(0, k.tokens, k.rows.len(), k.ld_dy)?;
    let w = Matrix { ptr: cx.input(1, stored(&k.rows, &k.cols, k.ld_w))?, ld: k.ld_w };
    let dx = cx.output_rows(0, k.tokens, k.cols.len(), k.ld_dx)?;
    if k.tokens == 0 {
        return Ok(());
    }
    for (col, dx_col, n) in k.cols.iter() {
        let mut acc = k.acc;
        let c = dx.from(0, dx_col);
        for (row, dy_col, inner) in k.rows.iter() {
            let (a, b) = (dy.from(0, dy_col), w.from(row, col));
            product(cx, Product { m: k.tokens, n, k: inner, a, ta: false, b, tb: false, c, alpha: 1.0, acc })?;
            acc = true;
        }
        if !acc {
            fill_rows(cx, c, k.tokens, n, 0.0)?;
        }
    }
    Ok(())
}

pub(super) fn linear_backward_weight(k: &LinearBackwardWeight, cx: &Launch<'_>) -> Result<()> {
    let dy = cx.input_rows(0, k.tokens, k.rows.len(), k.ld_dy)?;
    let x = cx.input_rows(1, k.tokens, k.cols.len(), k.ld_x)?;
    let dw = Matrix { ptr: cx.output(0, stored(&k.rows, &k.cols, k.ld_w))?, ld: k.ld_w };
    for (row, dy_col, m) in k.rows.iter() {
        for (col, x_col, n) in k.cols.iter() {
            let (a, b, c) = (dy.from(0, dy_col), x.from(0, x_col), dw.from(row, col));
            product(cx, Product { m, n, k: k.tokens, a, ta: true, b, tb: false, c, alpha: 1.0, acc: true })?;
        }
    }
    if k.bias {
        let db = cx.output(1, k.rows.end())?;
        let (n, blocks) = (k.rows.len(), DeviceBlocks::new(&k.rows)?);
        let grid = (n.div_ceil(32), 1);
        cx.run("column_sums", grid, (32, 32), args![dy.ptr, db, k.tokens, n, dy.ld, &blocks])?;
    }
    Ok(())
}

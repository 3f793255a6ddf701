//! Launchers of `rms_norm.cu`.

use super::error::Result;
use super::launch::{DeviceBlocks, Launch, args, fours, fours_in_blocks, row_threads};
use crate::cpu::rms_norm::{RmsNorm, RmsNormBackward};
use crate::par;

pub(super) fn forward(k: &RmsNorm, cx: &Launch<'_>) -> Result<()> {
    let (rows, cols) = (k.tokens, k.weight.len());
    let x = cx.input_rows(0, rows, cols, k.ld_x)?;
    let w = cx.input(1, k.weight.end())?;
    let e = if k.eps_ratio { Some(cx.input(2, 1)?) } else { None };
    let s = if k.scale { Some(cx.input(2 + usize::from(k.eps_ratio), 1)?) } else { None };
    let y = cx.output_rows(0, rows, cols, k.ld_y)?;
    let rstd = cx.output(1, rows)?;
    if cols == 0 {
        return Ok(());
    }
    let blocks = DeviceBlocks::new(&k.weight)?;
    let four = fours(cols, &[x, y]) && fours_in_blocks(&k.weight, w);
    cx.run(
        if four { "rms_norm_4" } else { "rms_norm_1" },
        (rows, 1),
        (row_threads(cols, if four { 4 } else { 1 }), 1),
        args![x.ptr, w, e, s, y.ptr, rstd, rows, cols, x.ld, y.ld, 1.0 / k.width as f64, k.eps, &blocks],
    )
}

pub(super) fn backward(k: &RmsNormBackward, cx: &Launch<'_>) -> Result<()> {
    let (rows, cols) = (k.tokens, k.weight.len());
    let dy = cx.input_rows(0, rows, cols, k.ld_dy)?;
    let x = cx.input_rows(1, rows, cols, k.ld_x)?;
    let rstd = cx.input(2, rows)?;
    let w = cx.input(3, k.weight.end())?;
    let s = if k.scale { Some(cx.input(4, 1)?) } else { None };
    let dx = cx.output_rows(0, rows, cols, k.ld_dx)?;
    let dw = cx.output(1, k.weight.end())?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let blocks = DeviceBlocks::new(&k.weight)?;
    let four = fours(cols, &[dy, x, dx]) && fours_in_blocks(&k.weight, w);
    cx.run(
        if four { "rms_norm_backward_4" } else { "rms_norm_backward_1" },
        (rows, 1),
        (row_threads(cols, if four { 4 } else { 1 }), 1),
        args![dy.ptr, x.ptr, rstd, w, s, dx.ptr, rows, cols, dy.ld, x.ld, dx.ld, 1.0 / k.width as f64, k.acc, &blocks],
    )?;
    // The scratch is the CPU kernel's: one row of sums per part.
    let parts = par::reduce_parts(rows);
    let work = cx.work(parts * cols)?;
    cx.run(
        "rms_norm_weight_parts",
        (cols.div_ceil(32), parts),
        (32, 8),
        args![dy.ptr, x.ptr, rstd, work, rows, cols, dy.ld, x.ld, par::reduce_rows(rows)],
    )?;
    cx.run("rms_norm_weight", (cols.div_ceil(128), 1), (128, 1), args![work, s, dw, parts, cols, &blocks])?;
    if k.scale {
        let ds = cx.output(2, 1)?;
        cx.run("rms_norm_scale", (1, 1), (row_threads(cols, 1), 1), args![work, w, ds, cols, &blocks])?;
    }
    Ok(())
}

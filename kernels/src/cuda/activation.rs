//! Launchers of `activation.cu`.

use super::elementwise::Walk;
use super::error::Result;
use super::launch::{Launch, args, row_threads};
use crate::cpu::activation::{Activation, ActivationBackward, ActivationKind};

/// (kind, slope) as the source numbers them.
fn number(kind: ActivationKind) -> (usize, f64) {
    match kind {
        ActivationKind::Relu2 => (0, 0.0),
        ActivationKind::GeluTanh => (1, 0.0),
        ActivationKind::Silu => (2, 0.0),
        ActivationKind::Relu => (3, 0.0),
        ActivationKind::LeakyRelu(slope) => (3, slope),
    }
}

pub(super) fn forward(k: &Activation, cx: &Launch<'_>) -> Result<()> {
    let x = cx.input_rows(0, k.rows, k.cols, k.ld_x)?;
    let y = cx.output_rows(0, k.rows, k.cols, k.ld_y)?;
    let w = if k.row_weight { Some(cx.input(1, k.rows)?) } else { None };
    let (kind, slope) = number(k.kind);
    // With row weights the rows must stay rows.
    let walk = if w.is_some() { Walk::by_rows(k.rows, k.cols, &[x, y]) } else { Walk::new(k.rows, k.cols, &[x, y]) };
    cx.run(
        walk.pick("activation_1", "activation_4"),
        walk.grid(),
        walk.block(),
        args![x.ptr, w, y.ptr, walk.rows, walk.cols, walk.ld[0], walk.ld[1], kind, slope],
    )
}

pub(super) fn backward(k: &ActivationBackward, cx: &Launch<'_>) -> Result<()> {
    let dy = cx.input_rows(0, k.rows, k.cols, k.ld_dy)?;
    let x = cx.input_rows(1, k.rows, k.cols, k.ld_x)?;
    let dx = cx.output_rows(0, k.rows, k.cols, k.ld_dx)?;
    let (kind, slope) = number(k.kind);
    if k.row_weight {
        let w = cx.input(2, k.rows)?;
        let dw = cx.output(1, k.rows)?;
        return cx.run(
            "activation_backward_weighted",
            (k.rows, 1),
            (row_threads(k.cols, 1), 1),
            args![dy.ptr, x.ptr, w, dx.ptr, dw, k.rows, k.cols, dy.ld, x.ld, dx.ld, kind, slope, k.acc, k.acc_weight],
        );
    }
    let walk = Walk::new(k.rows, k.cols, &[dy, x, dx]);
    cx.run(
        walk.pick("activation_backward_1", "activation_backward_4"),
        walk.grid(),
        walk.block(),
        args![dy.ptr, x.ptr, dx.ptr, walk.rows, walk.cols, walk.ld[0], walk.ld[1], walk.ld[2], kind, slope, k.acc],
    )
}

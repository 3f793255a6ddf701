use super::*;
use crate::mesh::Grid;
use crate::program::ops::{activation, grouped_linear, linear, mask, moe_permute};
use crate::program::testing::{Input, OpTest, Results as Numbers, axis, relative_l2};
use gantry_plugin_api::ops::{Act, Activation, Role};
use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};
use rstest::rstest;

const ROUTE: MoeRoute = MoeRoute {
    topk: 2,
    score: ScoreFn::Sigmoid,
    normalize: true,
    scaling: 1.5,
    aux_loss: 0.0,
    seq_aux_loss: 0.0,
    z_loss: 0.0,
    capacity_factor: 0.0,
    global_aux_loss: 0.0,
};

/// A whole mixture of experts: router with bias, two expert layers with a row weight between, and back. Outputs are the
/// layer's, and the auxiliary loss if there is one.
fn layer(route: MoeRoute, settings: Vec<AxisSetting>) -> OpTest {
    let hidden = || Layout::axis("hidden", 1);
    let experts = || Layout::axis("experts", 1);
    OpTest {
        axes: vec![axis("hidden", 6, false), axis("experts", 5, false), axis("ffn", 4, true)],
        params: vec![
            ("router", vec![experts(), hidden()]),
            ("fc1", vec![experts(), Layout::axis("ffn", 1), hidden()]),
            ("fc2", vec![experts(), hidden(), Layout::axis("ffn", 1)]),
        ],
        inputs: vec![
            Input { name: "x", rows: 12, channels: hidden(), spread: true },
            Input { name: "bias", rows: 1, channels: experts(), spread: false },
        ],
        ints: vec![("cu_seqlens", vec![0, 1, 1, 8, 12, 12])],
        tokens: 12,
        settings,
        state_grads: true,
        labels: None,
        forward: Box::new(move |cx, inputs| {
            let (router, fc1, fc2) = (cx.param_value(0)?, cx.param_value(1)?, cx.param_value(2)?);
            let logits = linear::record(cx, Default::default(), &[inputs[0], router])?[0];
            // The load's share is a constant to the loss; any numbers do, so the bias stands in for it.
            let share = if route.global_aux_loss != 0.0 { &inputs[1..2] } else { &[] };
            let route = record(cx, route.clone(), &[&[logits, inputs[1]], share].concat())?;
            let sorted = moe_permute::permute(cx, Default::default(), &[inputs[0], route[0], route[1], fc1])?;
            let (xs, weight, offsets) = (sorted[0], sorted[1], sorted[2]);
            let h = grouped_linear::record(cx, Default::default(), &[xs, fc1, offsets])?[0];
            let h = activation::activation(cx, Activation { act: Act::Relu2 }, &[h, weight])?[0];
            let h = mask::at_role(cx, Role::ExpertHidden, h)?;
            let y = grouped_linear::record(cx, Default::default(), &[h, fc2, offsets])?[0];
            let y = moe_permute::unpermute(cx, Default::default(), &[y, sorted[3], sorted[4]])?[0];
            // The terms of the objective are seeded by the test like any output.
            let losses: Vec<ValueId> = cx.g.losses.drain(..).map(|term| term.value).collect();
            Ok([y].into_iter().chain(losses).collect())
        }),
    }
}

fn state(axis: &str, state: AxisState) -> Vec<AxisSetting> {
    vec![AxisSetting { axis: axis.into(), layer: None, state }]
}

fn single(route: MoeRoute, settings: Vec<AxisSetting>) -> Numbers {
    layer(route, settings).run(Grid::SINGLE)
}

#[rstest]
#[case(ROUTE)]
#[case(MoeRoute { score: ScoreFn::Softmax, ..ROUTE })]
#[case(MoeRoute { normalize: false, ..ROUTE })]
#[case(MoeRoute { capacity_factor: 0.8, ..ROUTE })]
fn routes_and_computes(#[case] route: MoeRoute) {
    layer(route, vec![]).check();
}

#[rstest]
#[case(MoeRoute { aux_loss: 0.7, z_loss: 0.3, ..ROUTE })]
#[case(MoeRoute { aux_loss: 0.7, seq_aux_loss: 0.5, z_loss: 0.3, ..ROUTE })]
#[case(MoeRoute { seq_aux_loss: 0.5, score: ScoreFn::Softmax, ..ROUTE })]
fn auxiliary_losses(#[case] route: MoeRoute) {
    let test = layer(route, vec![]);
    assert_eq!(test.run(Grid::SINGLE)["y1"].len(), 1);
    test.check();
}

/// Shares are data of the step before: no gradient flows to them, only to what is balanced.
#[test]
fn a_loss_against_shares_of_the_load() {
    let test = layer(MoeRoute { global_aux_loss: 0.6, ..ROUTE }, vec![]);
    test.check_gradients_of(&["x", "router", "fc1", "fc2"]);
    test.check_parity();
    let plain = single(ROUTE, vec![]);
    assert!(relative_l2(&plain["d.router"], &test.run(Grid::SINGLE)["d.router"]) > 1e-3);
}

#[rstest]
#[case("experts", AxisState::Slice { n: 3 })]
#[case("experts", AxisState::Hard { n: 3, gain: 1.0 })]
#[case("experts", AxisState::Hard { n: 3, gain: 0.8 })]
#[case("experts", AxisState::Soft { choices: vec![5, 3, 2], p: vec![0.5, 0.3, 0.2] })]
#[case("ffn", AxisState::Slice { n: 2 })]
#[case("ffn", AxisState::Soft { choices: vec![4, 2], p: vec![0.6, 0.4] })]
#[case("hidden", AxisState::Slice { n: 4 })]
fn elastic(#[case] axis: &str, #[case] by: AxisState) {
    layer(MoeRoute { aux_loss: 0.7, z_loss: 0.3, ..ROUTE }, state(axis, by)).check();
}

#[test]
fn a_mask_of_experts_equals_their_slice() {
    let route = MoeRoute { aux_loss: 0.7, z_loss: 0.3, ..ROUTE };
    let hard = single(route.clone(), state("experts", AxisState::Hard { n: 3, gain: 1.0 }));
    let slice = single(route, state("experts", AxisState::Slice { n: 3 }));
    for name in ["y0", "y1", "d.x"] {
        assert!(relative_l2(&hard[name], &slice[name]) < 1e-13, "{name}");
    }
}

#[test]
fn a_soft_mask_of_one_choice_equals_full_width() {
    let full = single(ROUTE, vec![]);
    let soft = single(ROUTE, state("experts", AxisState::Soft { choices: vec![5], p: vec![1.0] }));
    assert_eq!(full["y0"], soft["y0"]);
}

#[test]
fn a_capacity_limit_drops_assignments() {
    let free = single(ROUTE, vec![]);
    let limited = single(MoeRoute { capacity_factor: 0.8, ..ROUTE }, vec![]);
    assert!(relative_l2(&free["y0"], &limited["y0"]) > 1e-3);
    let ample = single(MoeRoute { capacity_factor: 5.0, ..ROUTE }, vec![]);
    assert_eq!(free["y0"], ample["y0"]);
}

#[test]
fn more_choices_than_experts_are_refused() {
    let refused = std::panic::catch_unwind(|| single(MoeRoute { topk: 6, ..ROUTE }, vec![]));
    assert!(refused.is_err());
}

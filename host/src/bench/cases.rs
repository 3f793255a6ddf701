//! What `gantry bench` runs: every operator that does arithmetic, in a small program of its own.
//!
//! Sizes follow from tokens T and hidden size C as in the hybrid models: heads of 32 channels, MLPs of 4 C, experts of C,
//! two sequences in a micro-batch.

use crate::error::{Error, Result};
use crate::program::graph::ValueId;
use crate::program::ops::{self, Results};
use crate::program::recorder::Recorder;
use gantry_plugin_api::ops::{
    Act, Activation, Add, Attention, AttrBytes, CausalConv1d, CrossEntropy, Dropout, Embedding, GatedNorm,
    GroupedLinear, LayerNorm, Linear, MoePermute, MoeRoute, MoeUnpermute, Op, RmsNorm, Rope, RowScale, Softmax,
    SsdScan, StdScale, SwiGlu,
};
use gantry_plugin_api::plan::{Axis, Layout};

type Forward = Box<dyn Fn(&mut Recorder<'_>, &[ValueId]) -> Result<Vec<ValueId>>>;

/// A program around one operator.
pub struct Case {
    pub operator: &'static str,
    pub size: String,
    pub axes: Vec<Axis>,
    /// Dimensions of each parameter.
    pub params: Vec<Vec<Layout>>,
    /// Rows and channels of each real input.
    pub inputs: Vec<(usize, Layout)>,
    pub ints: Vec<(&'static str, Vec<i32>)>,
    pub tokens: usize,
    /// Beginnings of the names of kernels that belong to other operators, which prepare this one's inputs.
    pub helpers: &'static [&'static str],
    pub forward: Forward,
}

/// Channels of a head.
const HEAD: usize = 32;
const EXPERTS: usize = 8;
const TOPK: u64 = 2;
const VOCAB: usize = 512;

/// Tokens and hidden sizes that `gantry bench` measures without a recipe.
pub const SIZES: [(usize, usize); 3] = [(1024, 128), (1024, 512), (4096, 1024)];

/// Records an operator.
fn op<A: Op>(cx: &mut Recorder<'_>, attrs: A, inputs: &[ValueId]) -> Result<Results> {
    let mut bytes = AttrBytes::new();
    attrs.encode(&mut bytes);
    match ops::find(A::ID) {
        Some(op) => op.record(cx, &bytes, inputs),
        None => Err(Error::plugin(format!("this host has no operator {}", A::NAME))),
    }
}

fn first<A: Op + Clone + 'static>(attrs: A) -> Forward {
    Box::new(move |cx, inputs| Ok(vec![op(cx, attrs.clone(), inputs)?[0]]))
}

/// With every parameter after the inputs.
fn with_params<A: Op + Clone + 'static>(attrs: A, params: usize) -> Forward {
    Box::new(move |cx, inputs| {
        let mut all = inputs.to_vec();
        for index in 0..params {
            all.push(cx.param_value(index)?);
        }
        Ok(vec![op(cx, attrs.clone(), &all)?[0]])
    })
}

fn axis(name: &str, size: usize, group: Option<&str>) -> Axis {
    Axis {
        name: name.into(),
        size,
        group: group.map(str::to_string),
        shard: None,
        elastic: false,
        per_layer: false,
        active: None,
    }
}

/// Every case at T tokens and hidden size C, a multiple of 64 or less than that and one of 32.
pub fn all(tokens: usize, hidden: usize) -> Vec<Case> {
    let c = || Layout::Fixed(hidden);
    let heads = (hidden / HEAD).max(1);
    let groups = if heads.is_multiple_of(2) { 2 } else { 1 };
    let boundaries = vec![0, (tokens / 2) as i32, tokens as i32];
    let ids: Vec<i32> = (0..tokens).map(|i| (i * 37 % VOCAB) as i32).collect();
    let plain = |operator, forward| Case {
        operator,
        size: format!("T {tokens} C {hidden}"),
        axes: Vec::new(),
        params: Vec::new(),
        inputs: vec![(tokens, c())],
        ints: Vec::new(),
        tokens,
        helpers: &[],
        forward,
    };
    let with = |operator, params: Vec<Vec<Layout>>, forward| Case { params, ..plain(operator, forward) };
    let qkv = || {
        Layout::seq([
            ("q", Layout::axis("heads", HEAD)),
            ("k", Layout::axis("groups", HEAD)),
            ("v", Layout::axis("groups", HEAD)),
        ])
    };
    let attention_axes = || vec![axis("heads", heads, Some("groups")), axis("groups", groups, None)];
    let xbc = || {
        Layout::seq([
            ("x", Layout::axis("heads", HEAD)),
            ("B", Layout::axis("groups", HEAD)),
            ("C", Layout::axis("groups", HEAD)),
        ])
    };
    let per_head = || vec![Layout::axis("heads", 1)];
    let experts = || vec![axis("experts", EXPERTS, None)];
    let stacked = || vec![Layout::axis("experts", 1), c(), c()];
    let mut logits = plain("moe_route", first(MoeRoute { topk: TOPK, aux_loss: 1e-3, ..MoeRoute::default() }));
    logits.axes = experts();
    logits.inputs = vec![(tokens, Layout::axis("experts", 1))];
    let routed = |operator, helpers, forward| Case {
        axes: experts(),
        params: vec![stacked()],
        inputs: vec![(tokens, c()), (tokens, Layout::axis("experts", 1))],
        helpers,
        ..plain(operator, forward)
    };
    let labels = ids.clone();
    vec![
        with("linear", vec![vec![Layout::Fixed(4 * hidden), c()]], with_params(Linear {}, 1)),
        Case {
            ints: vec![("ids", ids.clone())],
            inputs: Vec::new(),
            params: vec![vec![Layout::Fixed(VOCAB), c()]],
            ..plain(
                "embedding",
                Box::new(|cx, _| {
                    let (weight, ids) = (cx.param_value(0)?, cx.g.inputs["ids"]);
                    Ok(vec![op(cx, Embedding {}, &[weight, ids])?[0]])
                }),
            )
        },
        with("rms_norm", vec![vec![c()]], with_params(RmsNorm::default(), 1)),
        with("layer_norm", vec![vec![c()], vec![c()]], with_params(LayerNorm::default(), 2)),
        Case {
            axes: attention_axes(),
            params: vec![vec![Layout::axis("heads", HEAD)]],
            inputs: vec![(tokens, Layout::axis("heads", HEAD)), (tokens, Layout::axis("heads", HEAD))],
            ..plain("gated_norm", with_params(GatedNorm::default(), 1))
        },
        plain("activation", first(Activation { act: Act::Relu2 })),
        Case { inputs: vec![(tokens, Layout::seq([("gate", c()), ("up", c())]))], ..plain("swiglu", first(SwiGlu {})) },
        Case {
            params: vec![vec![c(), Layout::Fixed(4)], vec![c()]],
            ints: vec![("cu_seqlens", boundaries.clone())],
            ..plain("causal_conv1d", with_params(CausalConv1d::default(), 2))
        },
        Case {
            axes: attention_axes(),
            params: vec![per_head(), per_head(), per_head()],
            inputs: vec![(tokens, xbc()), (tokens, Layout::axis("heads", 1))],
            ints: vec![("cu_seqlens", boundaries.clone())],
            ..plain("ssd_scan", with_params(SsdScan::default(), 3))
        },
        Case {
            axes: attention_axes(),
            inputs: vec![(tokens, qkv())],
            ints: vec![("cu_seqlens", boundaries.clone())],
            ..plain("attention", first(Attention::default()))
        },
        Case {
            axes: attention_axes(),
            inputs: vec![(tokens, qkv())],
            ints: vec![("cu_seqlens", boundaries)],
            ..plain("rope", first(Rope::default()))
        },
        logits,
        routed(
            "moe_permute",
            &["moe_route"],
            Box::new(|cx, inputs| {
                let permuted = permuted(cx, inputs)?;
                Ok(vec![op(cx, MoeUnpermute {}, &[permuted[0], permuted[3], permuted[4]])?[0]])
            }),
        ),
        routed(
            "grouped_linear",
            &["moe_route", "moe_permute", "moe_unpermute", "moe_gather"],
            Box::new(|cx, inputs| {
                let permuted = permuted(cx, inputs)?;
                let weight = cx.param_value(0)?;
                Ok(vec![op(cx, GroupedLinear {}, &[permuted[0], weight, permuted[2]])?[0]])
            }),
        ),
        Case { inputs: vec![(tokens, c()), (tokens, c())], ..plain("add", first(Add {})) },
        Case { inputs: vec![(tokens, c()), (tokens, Layout::Fixed(1))], ..plain("row_scale", first(RowScale {})) },
        plain("softmax", first(Softmax {})),
        plain("std_scale", first(StdScale {})),
        plain("dropout", first(Dropout { p: 0.1 })),
        Case {
            inputs: vec![(tokens, Layout::Fixed(VOCAB))],
            ints: vec![("labels", labels)],
            ..plain(
                "cross_entropy",
                Box::new(|cx, inputs| {
                    let labels = cx.g.inputs["labels"];
                    Ok(vec![op(cx, CrossEntropy::default(), &[inputs[0], labels])?[0]])
                }),
            )
        },
    ]
}

/// Routes inputs [tokens, hidden] by logits [tokens, experts] and sorts them by expert.
fn permuted(cx: &mut Recorder<'_>, inputs: &[ValueId]) -> Result<Results> {
    let routing = op(cx, MoeRoute { topk: TOPK, ..MoeRoute::default() }, &inputs[1..])?;
    let stacked = cx.param_value(0)?;
    op(cx, MoePermute {}, &[inputs[0], routing[0], routing[1], stacked])
}

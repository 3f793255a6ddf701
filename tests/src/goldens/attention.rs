//! Kind attention: q, k, v [batch, seq, heads, head_dim].

use super::case::{Result, beside, columns};
use super::compare::Check;
use super::graph::{Graph, provider};
use gantry_kernels::Element;
use gantry_plugin_api::ops::Attention;
use gantry_plugin_api::plan::{Axis, Layout};

pub fn attention<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (batch, seq) = (case.size("batch")?, case.size("seq")?);
    let (heads, groups, head_dim) = (case.size("q_heads")?, case.size("kv_heads")?, case.size("head_dim")?);
    let attrs = Attention { causal: case.flag("causal")?, scale: case.number("softmax_scale")? };
    let tokens = batch * seq;
    let queries = || Layout::axis("heads", head_dim);
    let keys = || Layout::axis("groups", head_dim);
    let graph = Graph {
        axes: vec![Axis::new("groups", groups), Axis::new("heads", heads).grouped_by("groups")],
        inputs: vec![(
            "qkv",
            Layout::seq([("q", queries()), ("k", keys()), ("v", keys())]),
            beside(tokens, &[&case.data("in.q")?, &case.data("in.k")?, &case.data("in.v")?]),
        )],
        tokens,
        cu_seqlens: case.cu_seqlens(batch, seq)?,
        seeds: vec![("out.y", case.data("in.dy")?)],
        ..Graph::default()
    };
    let results = graph.run::<T>(&|cx| {
        provider(cx, |cx| {
            let y = cx.attention("attention", cx.batch("qkv")?, attrs.clone())?;
            Ok(vec![("out.y", y, Some(queries()))])
        })
    })?;
    check.tensor("out.y", &results["out.y"])?;
    let (q, kv) = (heads * head_dim, groups * head_dim);
    for (name, start, len) in [("grad.q", 0, q), ("grad.k", q, kv), ("grad.v", q + kv, kv)] {
        check.tensor(name, &columns(tokens, &results["grad.qkv"], start, len))?;
    }
    Ok(())
}

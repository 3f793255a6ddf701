//! Kinds causal_conv1d, ssd_scan, mamba2_mixer.

use super::case::{Result, beside, columns, flat, seq_major};
use super::compare::Check;
use super::graph::{Graph, provider};
use super::kernel::{Launch, heads_last, heads_stored};
use gantry_kernels::Element;
use gantry_kernels::cpu::ssd::{Ssd, SsdBackward, SsdShape};
use gantry_plugin_api::ops::{Act, GatedNorm, SsdScan};
use gantry_plugin_api::plan::{Axis, Layout};
use gantry_plugin_api::sdk::ParamId;
use serde_json::json;

/// causal_conv1d: x [batch, seq, channels].
pub fn conv<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (batch, seq) = (case.size("batch")?, case.size("seqlen")?);
    let act = if case.flag("silu")? { Act::Silu } else { Act::Identity };
    let channels = || Layout::axis("channels", 1);
    let graph = Graph {
        axes: vec![Axis::new("channels", case.size("channels")?)],
        params: vec![
            ("w.weight", vec![channels(), Layout::Fixed(case.size("kernel")?)], case.data("w.weight")?),
            ("w.bias", vec![channels()], case.data("w.bias")?),
        ],
        inputs: vec![("x", channels(), case.data("in.x")?)],
        tokens: batch * seq,
        cu_seqlens: case.cu_seqlens(batch, seq)?,
        seeds: vec![("out.y", case.data("in.dy")?)],
        ..Graph::default()
    };
    let results = graph.run::<T>(&|cx| {
        provider(cx, |cx| {
            let y = cx.causal_conv1d("conv1d", cx.batch("x")?, ParamId(0), ParamId(1), act)?;
            Ok(vec![("out.y", y, None)])
        })
    })?;
    results.iter().try_for_each(|(name, values)| check.tensor(name, values))
}

/// ssd_scan: the kernel itself, which unlike the operator takes and gives states.
pub fn scan<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (batch, seq) = (case.size("batch")?, case.size("seqlen")?);
    let (heads, head_dim) = (case.size("nheads")?, case.size("headdim")?);
    let (groups, state) = (case.size("ngroups")?, case.size("d_state")?);
    let tokens = batch * seq;
    let has_init = case.has("in.initial_state");
    // Where packed sequences reset the state within a row of the batch, the final state is the last sequence's.
    let cu_seqlens = case.cu_seqlens(batch, seq)?;
    let sequences = cu_seqlens.len() - 1;
    let last = |s: usize| (cu_seqlens[s + 1] as usize).is_multiple_of(seq);
    let ends: Vec<usize> = (0..sequences).filter(|&s| last(s)).collect();

    let by_head = |name: &str| Ok::<_, String>(heads_stored(&case.data(name)?, heads, groups));
    let xbc = beside(
        tokens,
        &[&by_head_dim(&case.data("in.x")?, heads, groups, head_dim), &case.data("in.B")?, &case.data("in.C")?],
    );
    let [dt, a_log, d, dt_bias] = [by_head("in.dt")?, by_head("in.A_log")?, by_head("in.D")?, by_head("in.dt_bias")?];
    let dy = by_head_dim(&case.data("in.dy")?, heads, groups, head_dim);
    let state_len = heads * head_dim * state;
    // States [batch, heads, head_dim, state] are given to and taken from the sequences that end (begin) a row.
    let dfinal = by_head_dim(&case.data("in.dfinal_state")?, heads, groups, head_dim * state);
    let mut dfinal_all = vec![0.0; sequences * state_len];
    for (b, &s) in ends.iter().enumerate() {
        dfinal_all[s * state_len..][..state_len].copy_from_slice(&dfinal[b * state_len..][..state_len]);
    }

    let (inner, bc) = (heads * head_dim, groups * state);
    let shape = SsdShape {
        tokens,
        sequences,
        heads,
        head_dim,
        groups,
        state,
        chunk: 16,
        x_off: 0,
        b_off: inner,
        c_off: inner + bc,
        ld_xbc: inner + 2 * bc,
        ld_dt: heads,
        dt_limit: None,
    };
    let mut forward = Launch::<T>::new();
    forward.ins(&[&xbc, &dt, &a_log, &d, &dt_bias]).ints(&[&cu_seqlens]).int_outs(&[shape.table_len()]);
    if has_init {
        forward.ins(&[&by_head_dim(&case.data("in.initial_state")?, heads, groups, head_dim * state)]);
    }
    forward.outs(&[tokens * inner, shape.states_len(), sequences * state_len]);
    forward.run(&Ssd { shape: shape.clone(), ld_y: inner, has_init, has_final: true });
    check.tensor("out.y", &back(&forward.out(0), heads, groups, head_dim))?;
    let finals = forward.out(2);
    let finals: Vec<f64> = ends.iter().flat_map(|&s| finals[s * state_len..][..state_len].to_vec()).collect();
    check.tensor("out.final_state", &back(&finals, heads, groups, head_dim * state))?;

    let mut backward = Launch::<T>::new();
    backward.ins(&[&xbc, &dt, &a_log, &d, &dt_bias, &forward.out(1), &dy, &dfinal_all]);
    backward.ints(&[&cu_seqlens, &forward.int_out(0)]);
    let dinit = if has_init { sequences * state_len } else { 0 };
    backward.outs(&[tokens * shape.ld_xbc, tokens * heads, heads, heads, heads]);
    if has_init {
        backward.outs(&[dinit]);
    }
    backward.run(&SsdBackward {
        ld_dy: inner,
        ld_dxbc: shape.ld_xbc,
        ld_ddt: heads,
        shape,
        has_init,
        has_dfinal: true,
        has_dinit: has_init,
        acc_dxbc: false,
        acc_ddt: false,
        acc_dinit: false,
    });
    let dxbc = backward.out(0);
    check.tensor("grad.x", &back(&columns(tokens, &dxbc, 0, inner), heads, groups, head_dim))?;
    check.tensor("grad.B", &columns(tokens, &dxbc, inner, bc))?;
    check.tensor("grad.C", &columns(tokens, &dxbc, inner + bc, bc))?;
    for (out, name) in [(1, "grad.dt"), (2, "grad.A_log"), (3, "grad.D"), (4, "grad.dt_bias")] {
        check.tensor(name, &heads_last(&backward.out(out), heads, groups))?;
    }
    if has_init {
        check.tensor("grad.initial_state", &back(&backward.out(5), heads, groups, head_dim * state))?;
    }
    Ok(())
}

/// [.., heads, width] with heads in stored order.
fn by_head_dim(x: &[f64], heads: usize, groups: usize, width: usize) -> Vec<f64> {
    super::kernel::permute_heads(x, heads, groups, width, false)
}

/// And back to logical order.
fn back(x: &[f64], heads: usize, groups: usize, width: usize) -> Vec<f64> {
    super::kernel::permute_heads(x, heads, groups, width, true)
}

/// mamba2_mixer: a Mamba layer without its first norm; x [seq, batch, d_model].
pub fn mixer<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (batch, seq, model) = (case.size("batch")?, case.size("seqlen")?, case.size("d_model")?);
    let (heads, head_dim) = (case.size("nheads")?, case.size("headdim")?);
    let (groups, state) = (case.size("ngroups")?, case.size("d_state")?);
    let gate = GatedNorm { eps: case.number("norm_eps")?, norm_before_gate: case.flag("norm_before_gate")? };
    let chunk = SsdScan { chunk: case.size("chunk_size")? as u64, ..SsdScan::default() };
    if !case.json["config"]["dt_limit"].is_null() && case.json["config"]["dt_limit"] != json!([0.0, "inf"]) {
        return Err("config.dt_limit bounds dt, which the operator does not".into());
    }
    if case.size("norm_group_size")? * groups != heads * head_dim {
        return Err("config.norm_group_size is not that of the heads' groups".into());
    }
    let hidden = || Layout::axis("hidden", 1);
    let channels = || Layout::axis("heads", head_dim);
    let per_head = || Layout::axis("heads", 1);
    let states = || Layout::axis("groups", state);
    let xbc = || Layout::seq([("x", channels()), ("B", states()), ("C", states())]);
    let rows =
        Layout::seq([("z", channels()), ("x", channels()), ("B", states()), ("C", states()), ("dt", per_head())]);
    let param = |name: &'static str, dims: Vec<Layout>| Ok::<_, String>((name, dims, case.data(name)?));
    let graph = Graph {
        axes: vec![
            Axis::new("hidden", model),
            Axis::new("groups", groups),
            Axis::new("heads", heads).grouped_by("groups"),
        ],
        params: vec![
            param("w.in_proj.weight", vec![rows, hidden()])?,
            param("w.conv1d.weight", vec![xbc(), Layout::Fixed(case.size("conv_kernel")?)])?,
            param("w.conv1d.bias", vec![xbc()])?,
            param("w.dt_bias", vec![per_head()])?,
            param("w.A_log", vec![per_head()])?,
            param("w.D", vec![per_head()])?,
            param("w.norm.weight", vec![channels()])?,
            param("w.out_proj.weight", vec![hidden(), channels()])?,
        ],
        inputs: vec![("x", hidden(), flat(&case.data("in.x")?, seq, batch))],
        tokens: batch * seq,
        cu_seqlens: case.cu_seqlens(batch, seq)?,
        seeds: vec![("out.y", flat(&case.data("in.dy")?, seq, batch))],
        ..Graph::default()
    };
    let results = graph.run::<T>(&|cx| {
        provider(cx, |cx| {
            let [in_proj, conv, conv_bias, dt_bias, a_log, d, norm, out_proj] = [0, 1, 2, 3, 4, 5, 6, 7].map(ParamId);
            let [z, x, b, c, dt] = cx.split("split", cx.linear("in_proj", cx.batch("x")?, in_proj)?)?;
            let xbc = cx.causal_conv1d("conv1d", cx.concat("xbc", &[x, b, c])?, conv, conv_bias, Act::Silu)?;
            let y = cx.ssd_scan("scan", xbc, dt, a_log, d, dt_bias, chunk.clone())?;
            let y = cx.linear("out_proj", cx.gated_norm("norm", y, z, norm, gate.clone())?, out_proj)?;
            Ok(vec![("out.y", y, None)])
        })
    })?;
    for (name, values) in &results {
        match name.as_str() {
            "out.y" | "grad.x" => check.tensor(name, &seq_major(values, seq, batch))?,
            _ => check.tensor(name, values)?,
        }
    }
    Ok(())
}

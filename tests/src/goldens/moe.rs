//! Kinds moe, moe_router, moe_bias_update. Rows of x and y are [seq, batch, hidden], those of probs [seq * batch, experts].

use super::case::{Case, Result, flat, seq_major};
use super::compare::Check;
use super::graph::{Graph, Results, provider};
use super::kernel::Launch;
use gantry_kernels::Element;
use gantry_kernels::cpu::moe_route::{
    ExpertBiasUpdate, RouteBackward, RouteForward, RouteShape, RouterLoss, RouterLossBackward, RouterLossShape,
    RouterStats, Score,
};
use gantry_plugin_api::ops::{Act, MoeRoute, ScoreFn};
use gantry_plugin_api::plan::{Axis, Layout};
use gantry_plugin_api::sdk::{BufferId, ParamId};
use serde_json::Value;

/// A coefficient of the case's auxiliary losses, 0 if it has not got it.
fn coefficient(config: &Value, key: &str) -> f64 {
    config[key].as_f64().unwrap_or(0.0)
}

fn score_function(case: &Case) -> Result<ScoreFn> {
    match case.json["config"]["score_function"].as_str() {
        None | Some("sigmoid") => Ok(ScoreFn::Sigmoid),
        Some("softmax") => Ok(ScoreFn::Softmax),
        Some(other) => Err(format!("config.score_function is {other:?}, which no check knows")),
    }
}

/// moe: router, experts, shared expert.
pub fn layer<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (batch, seq, hidden) = (case.size("batch")?, case.size("seq")?, case.size("hidden")?);
    let (experts, topk) = (case.size("num_experts")?, case.size("topk")?);
    let tokens = batch * seq;
    let aux = &case.json["config"]["aux"];
    let per_token = aux["per_token"].as_bool().unwrap_or(false);
    let (biased, shared) = (case.has("w.expert_bias"), case.has("w.shared.fc1"));
    let route = MoeRoute {
        topk: topk as u64,
        score: score_function(case)?,
        normalize: topk > 1,
        scaling: case.number("scaling")?,
        aux_loss: coefficient(aux, "aux"),
        seq_aux_loss: coefficient(aux, "seq"),
        z_loss: coefficient(aux, "z"),
        ..MoeRoute::default()
    };
    let h = || Layout::axis("hidden", 1);
    let e = || Layout::axis("experts", 1);
    let f = || Layout::axis("ffn", 1);
    let s = || Layout::axis("shared", 1);
    let param = |name: &'static str, dims: Vec<Layout>| Ok::<_, String>((name, dims, case.data(name)?));
    let mut graph = Graph {
        axes: vec![Axis::new("hidden", hidden), Axis::new("experts", experts), Axis::new("ffn", case.size("moe_ffn")?)],
        params: vec![
            param("w.router.weight", vec![e(), h()])?,
            param("w.experts.fc1", vec![e(), f(), h()])?,
            param("w.experts.fc2", vec![e(), h(), f()])?,
        ],
        inputs: vec![("x", h(), flat(&case.data("in.x")?, seq, batch))],
        scalars: vec![("aux_scale", if per_token { tokens as f64 } else { 1.0 })],
        tokens,
        cu_seqlens: case.cu_seqlens(batch, seq)?,
        seeds: vec![("y", flat(&case.data("in.dy")?, seq, batch))],
        ..Graph::default()
    };
    if biased {
        graph.buffers.push(("w.expert_bias", vec![e()], case.data("w.expert_bias")?));
    }
    if shared {
        graph.axes.push(Axis::new("shared", case.size("shared_ffn")?));
        graph.params.extend([param("w.shared.fc1", vec![s(), h()])?, param("w.shared.fc2", vec![h(), s()])?]);
    }
    let results = graph.run::<T>(&|cx| {
        provider(cx, |cx| {
            let [router, fc1, fc2, shared_fc1, shared_fc2] = [0, 1, 2, 3, 4].map(ParamId);
            let x = cx.batch("x")?;
            let logits = cx.linear("router", x, router)?;
            let routing = match biased {
                true => cx.moe_route_biased("topk", logits, BufferId(0), route.clone())?,
                false => cx.moe_route("topk", logits, route.clone())?,
            };
            let slots = cx.moe_permute("permute", x, routing, fc1)?;
            let a = cx.grouped_linear("fc1", slots.xs, fc1, slots.offsets)?;
            let a = cx.activation_weighted("act", a, slots.probs, Act::Relu2)?;
            let mut y = cx.moe_unpermute("unpermute", cx.grouped_linear("fc2", a, fc2, slots.offsets)?, &slots)?;
            if shared {
                let a = cx.activation("shared.act", cx.linear("shared.fc1", x, shared_fc1)?, Act::Relu2)?;
                y = cx.add("sum", y, cx.linear("shared.fc2", a, shared_fc2)?)?;
            }
            let (probs, indices) = (routing.probs, routing.indices);
            Ok(vec![("y", y, None), ("logits", logits, None), ("probs", probs, None), ("indices", indices, None)])
        })
    })?;
    check.tensor("out.y", &seq_major(&results["y"], seq, batch))?;
    check.tensor("grad.x", &seq_major(&results["grad.x"], seq, batch))?;
    check.tensor("out.router_logits", &seq_major(&results["logits"], seq, batch))?;
    check.tensor("out.tokens_per_expert", &results["load"])?;
    let (probs, map) = dense(&results["probs"], &results["indices"], experts, topk);
    check.tensor("out.probs", &seq_major(&probs, seq, batch))?;
    check.tensor("out.routing_map", &seq_major(&map, seq, batch))?;
    for (name, ..) in &graph.params {
        check.tensor(&format!("grad.{name}"), &results[&format!("grad.{name}")])?;
    }
    losses(check, &results, [route.aux_loss, route.seq_aux_loss, route.z_loss])
}

/// The loss that was added is the sum of coefficient x metric; each metric by itself, as they are reported.
fn losses(check: &mut Check<'_>, results: &Results, coefficients: [f64; 3]) -> Result<()> {
    let mut sum = 0.0;
    for (name, coefficient) in METRICS.into_iter().zip(coefficients).filter(|(_, c)| *c != 0.0) {
        let golden = format!("out.metric.{name}");
        let reported = results.get(&format!("metric.topk.{name}")).ok_or(format!("{name} is not reported"))?;
        check.tensor(&golden, reported)?;
        sum += coefficient * check.case.tensor(&golden)?.data[0];
    }
    match results.get("loss.moe_aux_loss") {
        Some(loss) => check.numbers("the sum of the auxiliary losses", loss, &[sum], 1),
        None if sum == 0.0 => Ok(()),
        None => Err("no auxiliary loss was recorded".into()),
    }
}

const METRICS: [&str; 3] = ["load_balancing_loss", "seq_load_balancing_loss", "z_loss"];

/// Probabilities and choices [tokens, topk] as [tokens, experts].
fn dense(probs: &[f64], indices: &[f64], experts: usize, topk: usize) -> (Vec<f64>, Vec<f64>) {
    let tokens = probs.len() / topk;
    let (mut dense, mut map) = (vec![0.0; tokens * experts], vec![0.0; tokens * experts]);
    for (i, (&p, &e)) in probs.iter().zip(indices).enumerate() {
        // A dropped assignment is negative.
        if e >= 0.0 {
            let at = i / topk * experts + e as usize;
            (dense[at], map[at]) = (p, 1.0);
        }
    }
    (dense, map)
}

/// moe_router: the kernels themselves, which unlike the operator take a padding mask.
pub fn router<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (batch, seq, hidden) = (case.size("batch")?, case.size("seq")?, case.size("hidden")?);
    let (experts, k) = (case.size("num_experts")?, case.size("topk")?);
    let tokens = batch * seq;
    let x = flat(&case.data("in.x")?, seq, batch);
    let padding: Vec<i32> = match case.has("in.padding_mask") {
        true => flat(&case.data("in.padding_mask")?, seq, batch).iter().map(|&m| m as i32).collect(),
        false => vec![0; tokens],
    };
    let weight = case.data("w.router.weight")?;
    let row = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    let logits: Vec<f64> = x.chunks(hidden).flat_map(|x| weight.chunks(hidden).map(move |w| row(x, w))).collect();

    let score = match score_function(case)? {
        ScoreFn::Softmax => Score::Softmax,
        _ => Score::Sigmoid,
    };
    let shape = RouteShape {
        tokens,
        experts,
        active: experts,
        k,
        ld: experts,
        score,
        normalize: k > 1,
        scaling: case.number("scaling")?,
        elastic: false,
    };
    let mut forward = Launch::<T>::new();
    let bias = case.has("w.expert_bias");
    forward.ins(&[&logits]).ints(&[&padding]);
    if bias {
        forward.ins(&[&case.data("w.expert_bias")?]);
    }
    forward.outs(&[tokens * k]).int_outs(&[tokens * k, experts]);
    forward.run(&RouteForward { shape, bias, mask: true, capacity: None, acc_counts: false });
    let indices = forward.int_out(0);
    let as_numbers = |ints: &[i32]| ints.iter().map(|&i| f64::from(i)).collect::<Vec<f64>>();
    let (probs, map) = dense(&forward.out(0), &as_numbers(&indices), experts, k);
    check.tensor("out.probs", &seq_major(&probs, seq, batch))?;
    check.tensor("out.routing_map", &seq_major(&map, seq, batch))?;
    check.tensor("out.local_tokens_per_expert", &as_numbers(&forward.int_out(1)))?;

    let dprobs = flat(&case.data("in.dprobs")?, seq, batch);
    let dselected: Vec<f64> = indices.iter().enumerate().map(|(i, &e)| dprobs[i / k * experts + e as usize]).collect();
    let mut backward = Launch::<T>::new();
    backward.ins(&[&logits, &dselected]).ints(&[&indices]).outs(&[tokens * experts]);
    backward.run(&RouteBackward { shape, ld_d: experts, acc: false });
    let mut dlogits = backward.out(0);

    let coefficients = ["aux_loss", "seq_aux_loss", "z_loss"].map(|key| coefficient(&case.json["config"], key));
    let cu_seqlens = case.cu_seqlens(batch, seq)?;
    let sequences = Some(cu_seqlens.len() - 1);
    // The reference divides each sequence's sums by the mean number of tokens that are not padding.
    let shape = RouterLossShape {
        tokens,
        experts,
        active: experts,
        k,
        ld: experts,
        score,
        sequences,
        mean_length: true,
        mask: true,
    };
    let mut stats = Launch::<T>::new();
    stats.ins(&[&logits]).ints(&[&cu_seqlens, &padding]).outs(&[shape.groups() * shape.width()]);
    stats.run(&RouterStats { shape });
    let mut loss = Launch::<T>::new();
    loss.ins(&[&stats.out(0)]).outs(&[1, 3]);
    loss.run(&RouterLoss { shape, coefficients });
    for (name, metric) in METRICS.into_iter().zip(loss.out(1)) {
        let golden = format!("out.metric.{name}");
        if case.has(&golden) {
            check.tensor(&golden, &[metric])?;
        }
    }
    let mut backward = Launch::<T>::new();
    backward.ins(&[&logits, &stats.out(0), &[1.0]]).ints(&[&cu_seqlens, &padding]).outs(&[tokens * experts]);
    backward.run(&RouterLossBackward { shape, coefficients, ld_d: experts, acc: false });
    dlogits.iter_mut().zip(backward.out(0)).for_each(|(d, loss)| *d += loss);

    let mut dx = vec![0.0; tokens * hidden];
    let mut dweight = vec![0.0; experts * hidden];
    for t in 0..tokens {
        for e in 0..experts {
            let d = dlogits[t * experts + e];
            for c in 0..hidden {
                dx[t * hidden + c] += d * weight[e * hidden + c];
                dweight[e * hidden + c] += d * x[t * hidden + c];
            }
        }
    }
    check.tensor("grad.x", &seq_major(&dx, seq, batch))?;
    check.tensor("grad.w.router.weight", &dweight)
}

/// moe_bias_update: tokens_per_expert [step, layer, expert], bias [step, layer, expert] after each.
pub fn bias_update<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (layers, experts) = (case.size("layers")?, case.size("experts")?);
    let rate = case.number("moe_router_bias_update_rate")?;
    let loads = case.data("in.tokens_per_expert")?;
    let mut bias = case.data("in.bias0")?;
    let mut after = Vec::new();
    for loads in loads.chunks(layers * experts) {
        for (bias, loads) in bias.chunks_mut(experts).zip(loads.chunks(experts)) {
            let mut update = Launch::<T>::new();
            update.ins(&[loads]).out_from(bias);
            update.run(&ExpertBiasUpdate { active: experts, rate });
            bias.copy_from_slice(&update.out(0));
        }
        after.extend_from_slice(&bias);
    }
    check.tensor("out.bias", &after)
}

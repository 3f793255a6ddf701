//! Kinds cross_entropy and distillation: losses on given logits, and the ones fused with the output projection, which get
//! the logits as hidden states and the identity as output weight.

use super::case::{Case, Result, flat, seq_major};
use super::compare::Check;
use super::graph::{Graph, Output, provider};
use gantry::program::ops::lm_loss::{Divergence, Head, distillation_loss, lm_loss};
use gantry::program::recorder::Recorder;
use gantry_kernels::Element;
use gantry_plugin_api::ops::KlDivergence;
use gantry_plugin_api::plan::{Axis, Layout};
use gantry_plugin_api::sdk::HostCalls;

/// The identity [n, n].
fn identity(n: usize) -> Vec<f64> {
    (0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 }).collect()
}

fn output(name: &str, id: gantry::program::graph::ValueId) -> Output {
    Output { name: name.into(), id, channels: None }
}

/// The value of an input port.
fn port(cx: &mut Recorder<'_>, name: &str) -> Result<gantry::program::graph::ValueId> {
    let tensor = cx.batch_input(name).map_err(|e| e.to_string())?;
    cx.resolve(tensor).map_err(|e| e.to_string())
}

/// A program over logits whose axis is also the vocabulary of an identity weight.
fn graph(case: &Case, names: &[&'static str], tokens: usize, vocab: usize) -> Result<Graph> {
    let logits = || Layout::axis("hidden", 1);
    let (batch, seq) = (case.size("batch")?, case.size("seq")?);
    let input = |name: &&'static str| Ok((*name, logits(), flat(&case.data(&format!("in.{name}"))?, seq, batch)));
    Ok(Graph {
        axes: vec![Axis::new("hidden", vocab), Axis::new("vocab", vocab)],
        params: vec![("identity", vec![Layout::axis("vocab", 1), logits()], identity(vocab))],
        inputs: names.iter().map(input).collect::<Result<_>>()?,
        tokens,
        cu_seqlens: vec![0, tokens as i32],
        ..Graph::default()
    })
}

pub fn cross_entropy<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (batch, seq, vocab) = (case.size("batch")?, case.size("seq")?, case.size("vocab")?);
    let smoothing = case.number("label_smoothing")?;
    let tokens = batch * seq;
    let labels: Vec<f64> = case.data("in.labels")?;
    let labels: Vec<i32> = flat(&labels, seq, batch).iter().map(|&l| l as i32).collect();
    let mask = flat(&case.data("in.loss_mask")?, seq, batch);

    let mut graph = graph(case, &["logits"], tokens, vocab)?;
    graph.ids = vec![("labels", labels)];
    graph.seeds = vec![("loss", mask.clone())];
    let results = graph.run::<T>(&|cx| {
        provider(cx, |cx| {
            let y = cx.cross_entropy("loss", cx.batch("logits")?, cx.batch("labels")?, smoothing)?;
            Ok(vec![("loss", y, None)])
        })
    })?;
    check.tensor("out.loss", &seq_major(&results["loss"], seq, batch))?;
    check.tensor("grad.logits", &seq_major(&results["grad.logits"], seq, batch))?;

    graph.rows = vec![("loss_mask", mask)];
    graph.seeds = vec![("total", vec![1.0])];
    let results = graph.run::<T>(&|cx| {
        let (hidden, labels) = (port(cx, "logits")?, port(cx, "labels")?);
        let weight = cx.param_value(0).map_err(|e| e.to_string())?;
        let mask = cx.real_input("loss_mask", tokens).map_err(|e| e.to_string())?;
        let loss = lm_loss(cx, Head { hidden, weight }, labels, mask, smoothing).map_err(|e| e.to_string())?;
        Ok(vec![output("loss", loss.tokens), output("total", loss.total)])
    })?;
    check.tensor("out.loss", &seq_major(&results["loss"], seq, batch))?;
    check.tensor("out.masked_sum", &results["total"])?;
    check.tensor("grad.logits", &seq_major(&results["grad.logits"], seq, batch))
}

pub fn distillation<T: Element>(check: &mut Check<'_>) -> Result<()> {
    let case = check.case;
    let (batch, seq, vocab) = (case.size("batch")?, case.size("seq")?, case.size("vocab")?);
    let (temperature, reverse) = (case.number("temperature")?, case.flag("reverse")?);
    let tokens = batch * seq;
    // Losses and their mask are [batch, seq] already.
    let mask = case.data("in.loss_mask")?;
    let back = |values: &[f64]| seq_major(values, seq, batch);

    let mut logits = graph(case, &["student_logits", "teacher_logits"], tokens, vocab)?;
    logits.seeds = vec![("kl", mask.clone())];
    for (topk, out, grad) in
        [(0, "out.kl", "grad.student_logits"), (case.size("top_k")? as u64, "out.topk_kl", "grad.student_logits_topk")]
    {
        let attrs = KlDivergence { temperature, reverse, topk };
        let results = logits.run::<T>(&|cx| {
            provider(cx, |cx| {
                let (student, teacher) = (cx.batch("student_logits")?, cx.batch("teacher_logits")?);
                Ok(vec![("kl", cx.kl_divergence("kl", student, teacher, attrs.clone())?, None)])
            })
        })?;
        check.tensor(out, &results["kl"])?;
        check.tensor(grad, &back(&results["grad.student_logits"]))?;
    }

    logits.rows = vec![("loss_mask", mask.clone())];
    logits.seeds = vec![("total", vec![1.0])];
    let results = logits.run::<T>(&|cx| {
        let (student, teacher) = (port(cx, "student_logits")?, port(cx, "teacher_logits")?);
        let weight = cx.param_value(0).map_err(|e| e.to_string())?;
        let mask = cx.real_input("loss_mask", tokens).map_err(|e| e.to_string())?;
        let (student, teacher) = (Head { hidden: student, weight }, Head { hidden: teacher, weight });
        let loss = distillation_loss(cx, student, teacher, mask, Divergence { temperature, reverse });
        let loss = loss.map_err(|e| e.to_string())?;
        Ok(vec![output("kl", loss.tokens), output("total", loss.total)])
    })?;
    check.tensor("out.kl", &results["kl"])?;
    check.tensor("out.kl_masked_sum", &results["total"])?;
    check.tensor("grad.student_logits", &back(&results["grad.student_logits"]))?;

    let mut hidden = graph(case, &["student_hidden", "teacher_hidden"], tokens, case.size("hidden")?)?;
    hidden.seeds = vec![("loss", mask)];
    for (cosine, out, grad) in
        [(false, "out.mse", "grad.student_hidden_mse"), (true, "out.cosine", "grad.student_hidden_cosine")]
    {
        let results = hidden.run::<T>(&|cx| {
            provider(cx, |cx| {
                let (student, teacher) = (cx.batch("student_hidden")?, cx.batch("teacher_hidden")?);
                let loss = match cosine {
                    true => cx.cosine_loss("cosine", student, teacher)?,
                    false => cx.mse_loss("mse", student, teacher)?,
                };
                Ok(vec![("loss", loss, None)])
            })
        })?;
        check.tensor(out, &results["loss"])?;
        check.tensor(grad, &back(&results["grad.student_hidden"]))?;
    }
    Ok(())
}

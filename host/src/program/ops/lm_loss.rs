//! The language model's losses, recorded by the host at a provider's output port (hidden, output weight): cross entropy,
//! and KL divergence to a teacher's pair. Logits exist in tiles only.
//!
//! Placement. Hidden states are gathered whole. With the vocabulary spread, each rank computes statistics of its labels'
//! logits, which are gathered, so that every rank has the loss; its dhidden is a partial sum, its dweight complete. With
//! the weight whole on every rank, every rank computes everything. Labels that are padding (`Context::labels`) have no
//! probability: their logits are -inf, and their rows of the weight have no gradient. Axis states: sliced hidden channels are the leading
//! columns of the weight; a masked hidden needs nothing here.

use super::rows::only_rows;
use crate::error::Result;
use crate::program::backprop::{Backprop, Backward};
use crate::program::dims::Dim;
use crate::program::graph::{Collective, ValueId};
use crate::program::recorder::Recorder;
use gantry_kernels::blocks::Blocks;
use gantry_kernels::cpu::cross_entropy::{CE_STATS, CHUNK, CeCombine, LinearCeBackward, LinearCeStats, VocabShard};
use gantry_kernels::cpu::kl::{KL_SAVED, KL_STATS, KlCombine, LinearKlBackward, LinearKlStats, TwoHeads};

/// Results of a loss over a micro-batch, the same on every tensor-parallel rank.
#[derive(Clone, Copy, Debug)]
pub struct TokenLoss {
    /// [tokens]: each token's loss, not masked.
    pub tokens: ValueId,
    /// One element: sum of loss * mask. The value whose gradient the backward takes.
    pub total: ValueId,
    /// One element: sum of mask.
    pub count: ValueId,
}

/// Hidden states [tokens, hidden] and the output weight [vocab, hidden] they are multiplied with.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub hidden: ValueId,
    pub weight: ValueId,
}

/// Cross entropy of the next token: labels i32 [tokens], mask [tokens].
///
/// A label outside the vocabulary has no target; only the mask removes it from the sum.
pub fn lm_loss(
    cx: &mut Recorder<'_>,
    head: Head,
    labels: ValueId,
    mask: ValueId,
    label_smoothing: f64,
) -> Result<TokenLoss> {
    let head = whole(cx, head)?;
    let shard = vocabulary(cx, head)?;
    let (h, w) = (cx.value(head.hidden).clone(), cx.value(head.weight).clone());
    let tokens = h.rows;
    let (labels, mask) = (cx.replicated(labels)?, cx.replicated(mask)?);
    only_rows(cx, "labels", labels, tokens)?;
    only_rows(cx, "the loss mask", mask, tokens)?;

    let stats = fresh_rows(cx, "ce_stats", tokens, CE_STATS);
    let kernel = LinearCeStats { tokens, hidden: h.cols, ld_h: h.ld, ld_w: w.ld, shard, chunk: CHUNK };
    cx.g.emit(kernel, &[head.hidden, head.weight], &[stats], &[labels], &[]);
    let stats = gather(cx, stats, shard.parts);

    let needs_grad = cx.needs_grad(&[head.hidden, head.weight]);
    let lse = fresh_rows(cx, "lse", tokens, 1);
    let loss = results(cx, tokens, needs_grad);
    let kernel = CeCombine { tokens, parts: shard.parts, vocab: shard.vocab, smoothing: label_smoothing };
    cx.g.emit(kernel, &[stats, mask], &[lse, loss.tokens, loss.total, loss.count], &[labels], &[]);
    cx.node(CeGrad { head, labels, mask, lse, total: loss.total, shard, smoothing: label_smoothing }, &[loss.total]);
    Ok(loss)
}

struct CeGrad {
    head: Head,
    labels: ValueId,
    mask: ValueId,
    lse: ValueId,
    total: ValueId,
    shard: VocabShard,
    smoothing: f64,
}

impl Backward for CeGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(scale) = bw.dy(self.total) else { return Ok(()) };
        let Head { hidden, weight } = self.head;
        let (h, ld_w) = (bw.value(hidden).clone(), bw.ld(weight));
        let dw = weight_grad(bw, weight)?;
        let dh = bw.dx_or_scratch(hidden, self.shard.parts > 1);
        let kernel = LinearCeBackward {
            tokens: h.rows,
            hidden: h.cols,
            ld_h: h.ld,
            ld_w,
            ld_dh: bw.ld(dh.value),
            ld_dw: ld_w,
            shard: self.shard,
            chunk: CHUNK,
            smoothing: self.smoothing,
            acc: dh.acc,
            weight_grad: dw.is_some(),
        };
        let outs: Vec<ValueId> = [dh.value].into_iter().chain(dw).collect();
        bw.emit(kernel, &[hidden, weight, self.lse, self.mask, scale], &outs, &[self.labels], &[]);
        Ok(())
    }
}

/// How a student's distribution is compared with a teacher's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// Both sides' logits are divided by it; the loss is not multiplied by its square.
    pub temperature: f64,
    /// KL(student || teacher) instead of KL(teacher || student).
    pub reverse: bool,
}

/// KL divergence of the student's next-token distribution from the teacher's; no gradient to the teacher.
pub fn distillation_loss(
    cx: &mut Recorder<'_>,
    student: Head,
    teacher: Head,
    mask: ValueId,
    divergence: Divergence,
) -> Result<TokenLoss> {
    let (student, teacher) = (whole(cx, student)?, whole(cx, teacher)?);
    let shard = vocabulary(cx, student)?;
    let other = vocabulary(cx, teacher)?;
    if shard != other {
        return Err(cx.error(format!(
            "the student's vocabulary of {} over {} ranks and the teacher's of {} over {} must be the same",
            shard.vocab, shard.parts, other.vocab, other.parts
        )));
    }
    let [hs, ws, ht, wt] =
        [student.hidden, student.weight, teacher.hidden, teacher.weight].map(|id| cx.value(id).clone());
    let tokens = hs.rows;
    if ht.rows != tokens {
        return Err(cx.error(format!("student {} and teacher {} differ in tokens", hs.text(), ht.text())));
    }
    let mask = cx.replicated(mask)?;
    only_rows(cx, "the loss mask", mask, tokens)?;
    let heads = TwoHeads {
        tokens,
        hidden_s: hs.cols,
        ld_hs: hs.ld,
        ld_ws: ws.ld,
        hidden_t: ht.cols,
        ld_ht: ht.ld,
        ld_wt: wt.ld,
        shard,
        temperature: divergence.temperature,
        reverse: divergence.reverse,
        chunk: CHUNK,
    };
    let ins = [student.hidden, student.weight, teacher.hidden, teacher.weight];
    let stats = fresh_rows(cx, "kl_stats", tokens, KL_STATS);
    cx.g.emit(LinearKlStats { heads }, &ins, &[stats], &[], &[]);
    let stats = gather(cx, stats, shard.parts);

    let needs_grad = cx.needs_grad(&[student.hidden, student.weight]);
    let saved = fresh_rows(cx, "kl_saved", tokens, KL_SAVED);
    let loss = results(cx, tokens, needs_grad);
    let kernel = KlCombine { tokens, parts: shard.parts, reverse: divergence.reverse };
    cx.g.emit(kernel, &[stats, mask], &[saved, loss.tokens, loss.total, loss.count], &[], &[]);
    cx.node(KlGrad { ins, mask, saved, total: loss.total, heads }, &[loss.total]);
    Ok(loss)
}

struct KlGrad {
    ins: [ValueId; 4],
    mask: ValueId,
    saved: ValueId,
    total: ValueId,
    heads: TwoHeads,
}

impl Backward for KlGrad {
    fn backward(&self, bw: &mut Backprop<'_>) -> Result<()> {
        let Some(scale) = bw.dy(self.total) else { return Ok(()) };
        let [hidden, weight, teacher_hidden, teacher_weight] = self.ins;
        let dw = weight_grad(bw, weight)?;
        let dh = bw.dx_or_scratch(hidden, self.heads.shard.parts > 1);
        let kernel = LinearKlBackward {
            heads: self.heads,
            ld_dh: bw.ld(dh.value),
            ld_dw: bw.ld(weight),
            acc: dh.acc,
            weight_grad: dw.is_some(),
        };
        let outs: Vec<ValueId> = [dh.value].into_iter().chain(dw).collect();
        let ins = [hidden, weight, teacher_hidden, teacher_weight, self.saved, self.mask, scale];
        bw.emit(kernel, &ins, &outs, &[], &[]);
        Ok(())
    }
}

/// The head with all rows of its hidden states here, checked against its weight.
fn whole(cx: &mut Recorder<'_>, head: Head) -> Result<Head> {
    let hidden = cx.replicated(head.hidden)?;
    let (h, w) = (cx.value(hidden).clone(), cx.value(head.weight).clone());
    let [_, inner] = w.dims.as_slice() else {
        return Err(cx.error(format!("the output weight must be [vocabulary, hidden], not {}", w.text())));
    };
    if w.param.is_none() && w.needs_grad {
        return Err(cx.error(format!("the output weight must be a parameter, not a computed {}", w.text())));
    }
    cx.same_dim("hidden channels and columns of the output weight", h.last(), inner)?;
    if inner.sharded() || !Blocks::new(inner.blocks()).is_dense() {
        return Err(cx.error(format!("the output weight's {inner} must be one segment that is whole on every rank")));
    }
    Ok(Head { hidden, ..head })
}

/// Where the gradient of an output weight goes, if it takes one.
fn weight_grad(bw: &mut Backprop<'_>, weight: ValueId) -> Result<Option<ValueId>> {
    if bw.value(weight).needs_grad { bw.param_grad(weight, false) } else { Ok(None) }
}

/// The labels whose rows of the weight are here. Rows of padding, which are the last ones, take no part.
fn vocabulary(cx: &Recorder<'_>, head: Head) -> Result<VocabShard> {
    let dim = &cx.value(head.weight).dims[0];
    match dim.segs.as_slice() {
        [seg] if seg.unit == 1 => {
            let vocab = cx.cx.labels.map_or(seg.units, |labels| labels.min(seg.units));
            Ok(VocabShard { vocab, local: seg.local(), parts: seg.parts, part: seg.part })
        }
        _ => Err(cx.error(format!("the vocabulary must be one segment of single labels, not {dim}"))),
    }
}

/// [rows, cols] without axes or gradient, the same rows on every rank.
fn fresh_rows(cx: &mut Recorder<'_>, name: &str, rows: usize, cols: usize) -> ValueId {
    cx.fresh(name, [Dim::plain("tokens", rows), Dim::plain(name, cols)], false, false)
}

/// The statistics of all parts, in order.
fn gather(cx: &mut Recorder<'_>, stats: ValueId, parts: usize) -> ValueId {
    if parts == 1 {
        return stats;
    }
    let v = cx.value(stats).clone();
    let all = fresh_rows(cx, &v.name, parts * v.rows, v.cols);
    cx.g.emit_collective(Collective::AllGather, stats, all, v.len());
    all
}

fn results(cx: &mut Recorder<'_>, tokens: usize, needs_grad: bool) -> TokenLoss {
    let one = || [Dim::plain("one", 1)];
    TokenLoss {
        tokens: cx.fresh("token_loss", [Dim::plain("tokens", tokens)], false, false),
        total: cx.fresh("loss", one(), false, needs_grad),
        count: cx.fresh("tokens", one(), false, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Grid;
    use crate::program::testing::{Input, OpTest, axis, relative_l2};
    use gantry_kernels::cpu::elementwise::Fill;
    use gantry_plugin_api::plan::{AxisSetting, AxisState, Layout};
    use std::sync::{Arc, Mutex};

    const TOKENS: usize = 6;
    const VOCAB: usize = 14;
    /// One label is outside the vocabulary; the mask removes it.
    const LABELS: [i32; TOKENS] = [0, 13, 5, -1, 7, 4];

    /// [tokens]: 1, but `value` at row `at`.
    fn mask(cx: &mut Recorder<'_>, at: usize, value: f64) -> ValueId {
        let mask = cx.fresh("mask", [Dim::plain("tokens", TOKENS)], false, false);
        for (first, rows, value) in [(0, TOKENS, 1.0), (at, 1, value)] {
            let v = cx.value(mask).clone();
            let window = cx.g.push_value(crate::program::graph::Value { offset: first, rows, ..v });
            cx.g.emit(Fill { rows, cols: 1, ld: 1, value }, &[], &[window], &[], &[]);
        }
        mask
    }

    fn test(vocab_tp: bool, settings: Vec<AxisSetting>) -> OpTest {
        test_of(VOCAB, vocab_tp, settings)
    }

    fn test_of(vocab: usize, vocab_tp: bool, settings: Vec<AxisSetting>) -> OpTest {
        let weight = |inner: &str| vec![Layout::axis("vocab", 1), Layout::axis(inner, 1)];
        let input = |name, channels| Input { name, rows: TOKENS, channels: Layout::axis(channels, 1), spread: true };
        OpTest {
            axes: vec![axis("hidden", 6, false), axis("teacher_hidden", 4, false), axis("vocab", vocab, vocab_tp)],
            params: vec![("output", weight("hidden")), ("teacher.output", weight("teacher_hidden"))],
            inputs: vec![input("x", "hidden"), input("t", "teacher_hidden")],
            ints: vec![("labels", LABELS.to_vec())],
            tokens: TOKENS,
            settings,
            state_grads: false,
            labels: None,
            forward: Box::new(|_, _| Ok(vec![])),
        }
    }

    fn cross_entropy(smoothing: f64) -> impl Fn(&mut Recorder<'_>, &[ValueId]) -> Result<TokenLoss> + Sync {
        move |cx, inputs| {
            let head = Head { hidden: inputs[0], weight: cx.param_value(0)? };
            let labels = cx.int_input("labels", TOKENS)?;
            let mask = mask(cx, 3, 0.0);
            lm_loss(cx, head, labels, mask, smoothing)
        }
    }

    fn divergence(reverse: bool) -> impl Fn(&mut Recorder<'_>, &[ValueId]) -> Result<TokenLoss> + Sync {
        move |cx, inputs| {
            let student = Head { hidden: inputs[0], weight: cx.param_value(0)? };
            // A teacher's parameters take no gradient.
            let weight = cx.param_value(1)?;
            let (hidden, frozen) = (cx.value(inputs[1]).clone(), cx.value(weight).clone());
            let still = |v| crate::program::graph::Value { needs_grad: false, ..v };
            let teacher = Head { hidden: cx.g.push_value(still(hidden)), weight: cx.g.push_value(still(frozen)) };
            let mask = mask(cx, 1, 0.5);
            distillation_loss(cx, student, teacher, mask, Divergence { temperature: 1.5, reverse })
        }
    }

    type Record = Box<dyn Fn(&mut Recorder<'_>, &[ValueId]) -> Result<Vec<ValueId>> + Sync>;

    /// The total alone, whose gradient can be checked.
    fn total(loss: impl Fn(&mut Recorder<'_>, &[ValueId]) -> Result<TokenLoss> + Sync + 'static) -> Record {
        Box::new(move |cx, inputs| Ok(vec![loss(cx, inputs)?.total]))
    }

    /// Everything a loss gives.
    fn everything(loss: impl Fn(&mut Recorder<'_>, &[ValueId]) -> Result<TokenLoss> + Sync + 'static) -> Record {
        Box::new(move |cx, inputs| {
            let loss = loss(cx, inputs)?;
            Ok(vec![loss.total, loss.tokens, loss.count])
        })
    }

    fn slice() -> Vec<AxisSetting> {
        vec![AxisSetting { axis: "hidden".into(), layer: None, state: AxisState::Slice { n: 4 } }]
    }

    #[test]
    fn cross_entropy_is_right_and_the_same_on_any_grid() {
        for vocab_tp in [true, false] {
            for (smoothing, settings) in [(0.0, vec![]), (0.1, vec![]), (0.0, slice())] {
                OpTest { forward: total(cross_entropy(smoothing)), ..test(vocab_tp, settings) }.check();
            }
            let test = OpTest { forward: everything(cross_entropy(0.1)), ..test(vocab_tp, vec![]) };
            test.check_parity();
            let results = test.run(Grid::SINGLE);
            let expected: f64 = results["y1"].iter().zip([1.0, 1.0, 1.0, 0.0, 1.0, 1.0]).map(|(l, m)| l * m).sum();
            assert!(relative_l2(&results["y0"], &[expected]) < 1e-12);
            assert_eq!(results["y2"], [5.0]);
        }
    }

    #[test]
    fn divergence_is_the_same_on_any_grid_and_teaches_the_student_alone() {
        for (vocab_tp, reverse) in [(true, false), (true, true), (false, false)] {
            let test = OpTest { forward: everything(divergence(reverse)), ..test(vocab_tp, vec![]) };
            test.check_parity();
            let results = test.run(Grid::SINGLE);
            assert!(results["d.t"].iter().chain(&results["d.teacher.output"]).all(|&d| d == 0.0));
            assert!(results["d.x"].iter().any(|&d| d != 0.0));
            let expected: f64 = results["y1"].iter().zip([1.0, 0.5, 1.0, 1.0, 1.0, 1.0]).map(|(l, m)| l * m).sum();
            assert!(relative_l2(&results["y0"], &[expected]) < 1e-12);
            assert_eq!(results["y2"], [5.5]);
        }
    }

    /// Of 18 rows of the weight 15 are tokens: on two ranks 8 and 7 of 9.
    const PADDED: usize = 18;
    const REAL: usize = 15;

    #[test]
    fn padding_of_the_vocabulary_has_no_probability_and_no_gradient() {
        for (vocab_tp, smoothing) in [(true, 0.0), (true, 0.1), (false, 0.1)] {
            let forward = everything(cross_entropy(smoothing));
            let test = OpTest { labels: Some(REAL), forward, ..test_of(PADDED, vocab_tp, vec![]) };
            test.check_parity();
            let padded = test.run(Grid::SINGLE);
            let small = OpTest { forward: everything(cross_entropy(smoothing)), ..test_of(REAL, vocab_tp, vec![]) };
            let small = small.run(Grid::SINGLE);
            // The weight of the small model is the beginning of the padded one's.
            for name in ["y0", "y1", "d.x"] {
                assert!(relative_l2(&padded[name], &small[name]) < 1e-14, "{name}");
            }
            let (rows, padding) = padded["d.output"].split_at(REAL * 6);
            assert!(relative_l2(rows, &small["d.output"]) < 1e-14);
            assert!(padding.len() == (PADDED - REAL) * 6 && padding.iter().all(|&d| d == 0.0));
            // The same without the limit is another loss.
            let unlimited = OpTest { labels: None, forward: everything(cross_entropy(smoothing)), ..test };
            assert!(relative_l2(&unlimited.run(Grid::SINGLE)["y0"], &small["y0"]) > 1e-3);
        }
        for settings in [vec![], slice()] {
            let forward = total(cross_entropy(0.1));
            OpTest { labels: Some(REAL), forward, ..test_of(PADDED, true, settings) }.check();
        }
    }

    #[test]
    fn padding_is_no_part_of_a_divergence() {
        let padded =
            OpTest { labels: Some(REAL), forward: everything(divergence(false)), ..test_of(PADDED, true, vec![]) };
        padded.check_parity();
        let small = OpTest { forward: everything(divergence(false)), ..test_of(REAL, true, vec![]) }.run(Grid::SINGLE);
        let padded = padded.run(Grid::SINGLE);
        for name in ["y0", "y1", "d.x"] {
            assert!(relative_l2(&padded[name], &small[name]) < 1e-14, "{name}");
        }
        assert!(padded["d.output"][REAL * 6..].iter().all(|&d| d == 0.0));
    }

    #[test]
    fn gradients_of_the_divergence() {
        for (reverse, settings) in [(false, vec![]), (true, vec![]), (false, slice())] {
            OpTest { forward: total(divergence(reverse)), ..test(true, settings) }.check_gradients_of(&["x", "output"]);
        }
    }

    #[test]
    fn a_vocabulary_that_differs_is_refused() {
        let mut test = test(true, vec![]);
        test.params[1].1[0] = Layout::axis("teacher_hidden", 1);
        let loss = divergence(false);
        let message = Arc::new(Mutex::new(String::new()));
        let seen = message.clone();
        test.forward = Box::new(move |cx: &mut Recorder<'_>, inputs: &[ValueId]| {
            *seen.lock().unwrap() = loss(cx, inputs).unwrap_err().to_string();
            Ok(vec![])
        });
        test.run(Grid::SINGLE);
        let message = message.lock().unwrap();
        assert!(message.contains("14") && message.contains("the teacher's of 4"), "{message}");
    }
}

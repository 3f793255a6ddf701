//! The program under proof: a gated feed-forward block as the host records it, and its run on the CPU.
//!
//! h = rms_norm(x); [g | u] = h W1^T; y = x + (silu(g) * u) W2^T + b + 0.5 h W3^T. Its record has views with row strides
//! (g and u), gradients that several users add to (h, x), a bias, and with a sliced `ffn` products on two row blocks.

use gantry::comm::Alone;
use gantry::error::Result;
use gantry::mesh::{Grid, Place};
use gantry::model::ParamTable;
use gantry::model::layout::resolve;
use gantry::program::backprop;
use gantry::program::dims::Dim;
use gantry::program::graph::{Graph, ValueId};
use gantry::program::ops::{activation, arith, linear, rms_norm, shape};
use gantry::program::recorder::{Context, Recorder};
use gantry::program::replay::{Memory, Phase, Program};
use gantry::program::states::States;
use gantry_kernels::Element;
use gantry_kernels::philox::{Stream, stream_of};
use gantry_plugin_api::ops::{Act, Activation, RmsNorm, Scale};
use gantry_plugin_api::plan::{Axis, AxisSetting, AxisState, Block, Init, Layout, ModelPlan, Param, Stage};

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub tokens: usize,
    pub hidden: usize,
    pub ffn: usize,
    /// Features of `ffn` that are used, when sliced.
    pub slice: Option<usize>,
}

/// Odd sizes: nothing is a multiple of a vector or a tile.
pub const SMALL: Sizes = Sizes { tokens: 37, hidden: 27, ffn: 45, slice: None };
/// Products on row blocks that begin in the middle of the parameter.
pub const SLICED: Sizes = Sizes { tokens: 130, hidden: 64, ffn: 96, slice: Some(36) };
/// Large enough to be worth a GPU.
pub const LARGE: Sizes = Sizes { tokens: 2048, hidden: 1024, ffn: 4096, slice: None };

/// A bound program and where its inputs and results are.
pub struct Recorded {
    pub program: Program,
    pub table: ParamTable,
    x: ValueId,
    y: ValueId,
    dy: ValueId,
    dx: ValueId,
}

/// Everything a run starts from.
pub struct Inputs<T> {
    pub params: Vec<T>,
    /// Main gradients of earlier micro-batches.
    pub grads: Vec<T>,
    pub x: Vec<T>,
    pub dy: Vec<T>,
}

/// What a run gives: y, dx and the main gradient of every parameter, by name.
pub type Results<T> = Vec<(String, Vec<T>)>;

fn plan(sizes: Sizes) -> ModelPlan {
    let hidden = || Layout::axis("hidden", 1);
    let ffn = || Layout::axis("ffn", 1);
    let axis = |name: &str, size| Axis {
        name: name.into(),
        size,
        group: None,
        shard: None,
        elastic: true,
        per_layer: false,
        active: None,
    };
    let param = |name: &str, dims: Vec<Layout>, init| Param {
        name: name.into(),
        block: 0,
        dims,
        init,
        decay: true,
        lr_mult: 1.0,
        fp32: false,
        tie: None,
        export_shape: None,
        hf_name: None,
    };
    let weights = |inner: usize| Init::Normal { std: (inner as f64).powf(-0.5) };
    ModelPlan {
        axes: vec![axis("hidden", sizes.hidden), axis("ffn", sizes.ffn)],
        blocks: vec![Block {
            path: "block".into(),
            kind: "mlp".into(),
            layer: Some(0),
            starts_stage: false,
            extra_flops_per_token: 0.0,
            memory: Vec::new(),
        }],
        params: vec![
            param("norm", vec![hidden()], Init::Uniform { low: 0.5, high: 1.5 }),
            param("fc1", vec![Layout::seq([("gate", ffn()), ("up", ffn())]), hidden()], weights(sizes.hidden)),
            param("fc2", vec![hidden(), ffn()], weights(sizes.ffn)),
            param("bias", vec![hidden()], Init::Normal { std: 0.1 }),
            param("skip", vec![hidden(), hidden()], weights(sizes.hidden)),
        ],
        ..ModelPlan::default()
    }
}

fn forward(cx: &mut Recorder<'_>, x: ValueId) -> Result<ValueId> {
    let p = (0..5).map(|i| cx.param_value(i)).collect::<Result<Vec<_>>>()?;
    let h = rms_norm::record(cx, RmsNorm { eps: 1e-5 }, &[x, p[0]])?[0];
    let gu = linear::record(cx, Default::default(), &[h, p[1]])?[0];
    let parts = shape::split(cx, Default::default(), &[gu])?;
    let g = activation::activation(cx, Activation { act: Act::Silu }, &[parts[0]])?[0];
    let f = arith::mul(cx, Default::default(), &[g, parts[1]])?[0];
    let y = linear::record(cx, Default::default(), &[f, p[2], p[3]])?[0];
    let s = linear::record(cx, Default::default(), &[h, p[4]])?[0];
    let s = arith::scale(cx, Scale { by: 0.5 }, &[s])?[0];
    let y = arith::add(cx, Default::default(), &[y, s])?[0];
    Ok(arith::add(cx, Default::default(), &[x, y])?[0])
}

/// Records the block, lets `plant` change the finished record, and plans its memory.
pub fn record(sizes: Sizes, plant: impl FnOnce(&mut Graph)) -> Result<Recorded> {
    let plan = plan(sizes);
    let (grid, place) = (Grid::SINGLE, Place { tp: 0, dp: 0, pp: 0 });
    let table = ParamTable::new(&plan, &Stage { begin: 0, end: 1 }, grid, place)?;
    let settings: Vec<AxisSetting> = sizes
        .slice
        .map(|n| AxisSetting { axis: "ffn".into(), layer: None, state: AxisState::Slice { n } })
        .into_iter()
        .collect();
    let states = States::resolve(&plan, &settings)?;
    let mut cx = Recorder::new(Context {
        plan: &plan,
        table: &table,
        grid,
        place,
        states: &states,
        roles: None,
        training: true,
        frozen: false,
        tokens: sizes.tokens,
        longest: sizes.tokens,
        max_seqs: 1,
        seed: 1,
        state_grads: false,
        labels: None,
    });
    let hidden = table.dim(&resolve(&plan.axes, &Layout::axis("hidden", 1))?, Some(0), grid, place)?;
    let x = cx.fresh("x", [Dim::plain("tokens", sizes.tokens), hidden], false, true);
    cx.g.pin(x);
    let y = forward(&mut cx, x)?;
    cx.g.pin(y);
    cx.finish()?;
    let mut g = std::mem::take(&mut cx.g);
    let dy = g.fresh_like(y, "dy");
    g.pin(dy);
    let grads = backprop::append(&mut g, &[(y, dy)], &[x])?;
    let dx = grads.into_iter().flatten().next().unwrap_or(x);
    plant(&mut g);
    let program = Program::bind(g, grid.tp)?;
    Ok(Recorded { program, table, x, y, dy, dx })
}

impl Recorded {
    /// Random inputs of this size; rows of x differ in scale by up to a thousand, so that the norm's eps matters.
    pub fn inputs<T: Element>(&self) -> Inputs<T> {
        let normal = |name: &str, n: usize, std: f64| -> Vec<T> {
            let stream = Stream::new(7, stream_of(name), 0);
            (0..n as u64).map(|i| T::of(f64::from((std * stream.normal(i)) as f32))).collect()
        };
        let v = self.program.graph.value(self.x);
        let mut x = normal("x", v.len(), 1.0);
        for (r, row) in x.chunks_mut(v.cols).enumerate() {
            let scale = T::of(f64::from(10f32.powi(-((r % 4) as i32))));
            row.iter_mut().for_each(|x| *x *= scale);
        }
        let mut params = vec![T::ZERO; self.table.param_len];
        for entry in &self.table.params {
            let stored = &entry.stored;
            for (p, value) in params[stored.offset..][..stored.len].iter_mut().zip(stored.initial(3)) {
                *p = T::of(f64::from(value as f32));
            }
        }
        Inputs { params, grads: normal("grads", self.table.param_len, 0.1), x, dy: normal("dy", v.len(), 1.0) }
    }

    /// Floating-point operations of a step, by count.
    pub fn flops(&self) -> f64 {
        use gantry::program::graph::Action;
        let flops = |action: &Action| match action {
            Action::Launch { kernel, .. } => kernel.cost().flops,
            Action::Collective { .. } => 0.0,
        };
        self.program.graph.steps.iter().map(|step| flops(&step.action)).sum()
    }

    pub fn ids(&self) -> (ValueId, ValueId, ValueId, ValueId) {
        (self.x, self.dy, self.y, self.dx)
    }

    /// Names a run's results.
    pub fn results<T: Copy>(&self, y: Vec<T>, dx: Vec<T>, grads: &[T]) -> Results<T> {
        let params = self.table.params.iter().map(|entry| {
            let stored = &entry.stored;
            (format!("d.{}", stored.name), grads[stored.offset..][..stored.len].to_vec())
        });
        [("y".to_string(), y), ("d.x".to_string(), dx)].into_iter().chain(params).collect()
    }

    /// Runs a step on the CPU.
    pub fn run_cpu<T: Element>(&self, inputs: &Inputs<T>) -> Result<Results<T>> {
        let program = &self.program;
        let mut arena = program.arena::<T>();
        arena.act.fill(T::of(f64::NAN));
        program.get_mut(&mut arena, self.x).copy_from_slice(&inputs.x);
        program.get_mut(&mut arena, self.dy).copy_from_slice(&inputs.dy);
        let mut grads = inputs.grads.clone();
        let mut memory = Memory { params: &inputs.params, grads: &mut grads, buffers: &[], teacher: &[] };
        program.run(Phase::Forward, &mut arena, &mut memory, &Alone)?;
        program.run(Phase::Backward, &mut arena, &mut memory, &Alone)?;
        let (y, dx) = (program.get(&arena, self.y).to_vec(), program.get(&arena, self.dx).to_vec());
        Ok(self.results(y, dx, &grads))
    }
}

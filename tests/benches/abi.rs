//! What the boundary costs: recording one operator through a plugin, less the same call made inside the host. Bound:
//! 300 ns per operator, checked at the end.

use criterion::Criterion;
use gantry::plugin::{ModelStage, PluginFile, PluginSet};
use gantry_plugin_api::ops::{Act, Activation, Add, AttrBytes, Embedding, Linear, Op, RegionKind, RmsNorm, Role};
use gantry_plugin_api::plan::{ModelPlan, Stage};
use gantry_plugin_api::sdk::{HostCalls, OpCall, Outputs, Result, TensorRef};
use gantry_tests::plugins::build_workspace;
use gantry_tests::plugins::file_name;
use gantry_tests::test_host::TestHost;
use serde_json::json;
use std::hint::black_box;
use std::time::Instant;

const LAYERS: usize = 100;
/// Operators the tiny model records: embedding, five in each layer, final norm.
const OPERATORS: usize = 2 + 5 * LAYERS;
const BOUND_NS: f64 = 300.0;

fn record(host: &mut dyn HostCalls, path: &str, op: &impl Op, inputs: &[TensorRef]) -> Result<TensorRef> {
    fn call<O: Op>(host: &mut dyn HostCalls, path: &str, op: &O, inputs: &[TensorRef]) -> Result<TensorRef> {
        let mut attrs = AttrBytes::new();
        op.encode(&mut attrs);
        let mut outputs = Outputs::new();
        host.call(OpCall { op: O::ID, version: O::VERSION, path, attrs: &attrs, inputs }, &mut outputs)?;
        Ok(outputs[0])
    }
    call(host, path, op, inputs)
}

/// The tiny model's forward, call by call, without a plugin.
fn in_host(host: &mut dyn HostCalls) -> Result<()> {
    let ids = host.batch_input("tokens")?;
    let weight = host.param(0)?;
    let mut x = record(host, "embedding", &Embedding {}, &[weight, ids])?;
    x = host.role(Role::Embedding, x)?;
    for i in 0..LAYERS as u32 {
        host.region_begin("layer", RegionKind::Layer, Some(i))?;
        let h = host.role(Role::MixerInput, x)?;
        let norm = host.param(1 + 3 * i)?;
        let h = record(host, "norm", &RmsNorm { eps: 1e-5 }, &[h, norm])?;
        let fc1 = host.param(2 + 3 * i)?;
        let h = record(host, "fc1", &Linear {}, &[h, fc1])?;
        let h = record(host, "act", &Activation { act: Act::Relu2 }, &[h])?;
        let h = host.role(Role::FfnHidden, h)?;
        let fc2 = host.param(3 + 3 * i)?;
        let h = record(host, "fc2", &Linear {}, &[h, fc2])?;
        let h = host.role(Role::MixerOutput, h)?;
        x = record(host, "residual", &Add {}, &[x, h])?;
        host.region_end()?;
    }
    let norm = host.param(1 + 3 * LAYERS as u32)?;
    let h = record(host, "final_norm", &RmsNorm { eps: 1e-5 }, &[x, norm])?;
    let weight = host.param(0)?;
    host.output("logits", &[h, weight])
}

fn model() -> (ModelPlan, ModelStage) {
    let folder = build_workspace("tests/plugins", "plugins", &["--package", "elastic-test", "--release"]);
    let mut set = PluginSet::default();
    let file = PluginFile { allow_writable: true, ..PluginFile::new(folder.join(file_name("elastic-test"))) };
    set.add_file(&file).expect("the fixture loads");
    let provider = set.provider("tiny", &json!({"layers": LAYERS})).expect("an instance");
    let plan = provider.plan().expect("a plan");
    let stage = provider.build(&Stage { begin: 0, end: plan.blocks.len() }).expect("a stage");
    (plan, stage)
}

/// Nanoseconds per operator, the best of many rounds of whole forwards.
fn per_operator(mut forward: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..200 {
        let start = Instant::now();
        (0..10).for_each(|_| forward());
        best = best.min(start.elapsed().as_nanos() as f64 / (10 * OPERATORS) as f64);
    }
    best
}

fn main() {
    let (plan, stage) = model();
    let mut host = TestHost::quiet(&plan);
    in_host(&mut host).expect("the host's own forward");
    let mut through = || {
        host.clear();
        stage.forward(black_box(&mut host)).expect("forward");
    };
    let plugin = per_operator(&mut through);
    let mut criterion = Criterion::default().configure_from_args();
    criterion.bench_function("record/through a plugin", |b| b.iter(&mut through));
    let mut host = TestHost::quiet(&plan);
    let mut inside = || {
        host.clear();
        in_host(black_box(&mut host)).expect("forward");
    };
    let inner = per_operator(&mut inside);
    criterion.bench_function("record/in the host", |b| b.iter(&mut inside));
    criterion.final_summary();
    let cost = plugin - inner;
    println!("per operator: {plugin:.0} ns through a plugin, {inner:.0} ns in the host, boundary {cost:.0} ns");
    assert!(cost <= BOUND_NS, "the boundary costs {cost:.0} ns per operator; at most {BOUND_NS} are allowed");
}
